"""Time, memory and rightness of several candidates on one problem, in one run."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import mmap
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ops import _memory
from ..ops.plan import ColumnMap
from .results import Figure
from .workloads import Workload

__all__ = [
    "Budget",
    "CannotRun",
    "Clock",
    "Problem",
    "interleaved",
    "peak_growth",
    "quantile",
    "rounds_of",
    "trace",
]

Call = Callable[[], Any]

# What may not match.
GRADIENT = "gradient"

# A timed stretch lasts at least this long; short calls are repeated until it does.
_MIN_SECONDS = 2e-3
# Calls this long need no untimed one before each timed one, and take part in few rounds.
_LONG_SECONDS = 0.05
# The call that tells how long calls take is a round of its own where it is this long.
_VERY_LONG_SECONDS = 0.5
# Below this the memory of a process cannot tell one call's tensors from what the allocator holds.
TELLING_BYTES = 8 << 20
# Calls that move less than this live in memory that the allocator keeps.
_FRESH_BYTES = 1 << 20
_LEAST_BACKED_BYTES = 256 << 20
_BACKED_SECONDS = 0.5
# Buffers of the plain copy: far beyond every cache, and no larger.
_COPY_BYTES = 1 << 30


class CannotRun(Exception):
    """A candidate cannot do a case, with the reason that the table shows."""


@dataclass(frozen=True)
class Budget:
    """How much to measure.

    Attributes:
        rounds: most rounds that a candidate takes part in.
        seconds: what all rounds of one row may take together; slow candidates sit out, down to
            two rounds, or one where a call takes more than two seconds.
    """

    rounds: int
    seconds: float = math.inf


class Clock:
    """Times calls on a device: events for the device, the host's clock beside them."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._backed = -math.inf

    def back_memory(self, size: int) -> None:
        """Have the system hand out memory that is really there.

        A virtual machine gives free memory back to its host after a second or two. Touching it again
        then costs several times what a whole call does, and falls on whoever comes first.
        """
        now = time.monotonic()
        if self.cuda or size < _FRESH_BYTES or now - self._backed < _BACKED_SECONDS:
            return
        size = min(max(_LEAST_BACKED_BYTES, size), _available() // 2)
        _memory.empty([size], torch.uint8, torch.device("cpu"))[:: mmap.PAGESIZE].fill_(1)
        self._backed = time.monotonic()

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def stretch(self, call: Call, count: int) -> tuple[float, float]:
        """Seconds per call on the device and on the host. Freeing the results counts, as in use."""
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(count):
                call()
            seconds = (time.perf_counter() - start) / count
            return seconds, seconds
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.wait()
        before.record()
        start = time.perf_counter()
        for _ in range(count):
            call()
        host = (time.perf_counter() - start) / count
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3 / count, host


def interleaved(
    calls: Mapping[str, Call], clock: Clock, budget: Budget, moved: int | None = None
) -> dict[str, Figure]:
    """P50 and P90 over the rounds of :func:`rounds_of`."""
    return {
        name: Figure(
            p50=quantile(device, 0.5),
            p90=quantile(device, 0.9),
            host_p50=quantile(host, 0.5),
            host_p90=quantile(host, 0.9),
            rounds=len(device),
        )
        for name, found in rounds_of(calls, clock, budget, moved).items()
        for device, host in [tuple(zip(*found))]
    }


def rounds_of(
    calls: Mapping[str, Call], clock: Clock, budget: Budget, moved: int | None = None
) -> dict[str, list[tuple[float, float]]]:
    """Seconds per call on the device and on the host, one pair for each round that a candidate took part in.

    In a round every candidate runs in turn, so that noise hits all alike.

    Args:
        moved: bytes that a call reads and writes, of which its memory is estimated.
    """
    size = moved or 0
    _settle_allocator()
    repeats: dict[str, int] = {}
    long: dict[str, bool] = {}
    cost: dict[str, float] = {}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for name, call in calls.items():
        clock.back_memory(size)
        first = clock.stretch(call, 1)
        seconds = max(first)
        if seconds > _VERY_LONG_SECONDS:  # too dear to be thrown away
            found[name].append(first)
        if seconds < _LONG_SECONDS:  # the first call may have paid for more than itself
            seconds = max(clock.stretch(call, 1))
        repeats[name] = max(1, round(_MIN_SECONDS / max(1e-9, seconds)))
        long[name] = seconds > _LONG_SECONDS
        cost[name] = seconds * repeats[name] * (1 if long[name] else 2)
    rounds = _rounds(cost, budget)
    left = {name: rounds[name] - len(found[name]) for name in calls}
    with _no_collection():
        for turn in range(budget.rounds):
            for name, call in calls.items():
                if (turn + 1) * left[name] // budget.rounds == turn * left[name] // budget.rounds:
                    continue  # spread evenly over all rounds
                clock.back_memory(size)
                if not long[name]:
                    # Untimed, so that none pays for what the one before it left: caches, sleeping threads.
                    clock.stretch(call, repeats[name])
                found[name].append(clock.stretch(call, repeats[name]))
    return found


@functools.cache
def _settle_allocator() -> None:
    """Bring glibc's allocator to where a process that has run for a while has it.

    It returns freed memory to the system from a size on, which grows to 32 MB with the blocks that
    were freed. Until then, whether a call of a few MB pays for page faults depends on what ran before.
    """
    torch.ones(31 << 20, dtype=torch.uint8)


def _rounds(cost: Mapping[str, float], budget: Budget) -> dict[str, int]:
    """Rounds of each: all of them for the cheap, the rest of the time shared by the others."""
    found: dict[str, int] = {}
    left = budget.seconds
    for place, name in enumerate(sorted(cost, key=lambda n: cost[n])):
        share = left / (len(cost) - place)
        least = 1 if cost[name] > 2 else 2
        found[name] = int(min(budget.rounds, max(least, share / max(1e-9, cost[name]))))
        left -= found[name] * cost[name]
    return found


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def quantile(values: Sequence[float], share: float) -> float:
    """Between the two nearest of the sorted values, in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


class Problem:
    """A workload's tensors on a device, and what is right.

    Args:
        workload: shapes and types.
        device: where the tensors lie.
        keyed: hand candidates ``KeyedTensor``s; otherwise the tensors alone.
        batch: in place of the workload's own.
    """

    def __init__(
        self, workload: Workload, device: torch.device, keyed: bool, batch: int | None = None
    ) -> None:
        self.workload = workload
        self.device = device
        self.batch = workload.batch if batch is None else batch
        self.column_map: ColumnMap = workload.plan.column_map
        self.out_dtype = workload.cast or workload.dtype
        generator = torch.Generator(device=device).manual_seed(0)

        def fresh(width: int, dtype: torch.dtype) -> Tensor:
            values = torch.empty(self.batch, width, device=device)
            return values.uniform_(-1, 1, generator=generator).to(dtype)

        self.values = [fresh(sum(widths), workload.dtype) for widths in workload.widths]
        self.leaves = [v.detach().requires_grad_() for v in self.values]
        self.grads = [fresh(width, self.out_dtype) for width in self.column_map.out_widths]
        self._keyed = keyed

    def inputs(self, requires_grad: bool) -> list[Any]:
        """What a candidate is called with."""
        tensors = self.leaves if requires_grad else self.values
        if not self._keyed:
            return list(tensors)
        from torchrec.sparse.jagged_tensor import KeyedTensor

        return [
            KeyedTensor(keys, widths, value)
            for keys, widths, value in zip(self.workload.keys, self.workload.widths, tensors)
        ]

    @property
    def input_bytes(self) -> int:
        return sum(v.nbytes for v in self.values)

    def moved(self, mode: str) -> int:
        """Bytes that a call has to read and write."""
        copied = sum(move.length for move in self.column_map.moves) * self.batch
        into, out = self.workload.dtype.itemsize, self.out_dtype.itemsize
        forward = copied * (into + out)
        return forward if mode == "forward" else forward + copied * out + self.input_bytes

    def backward(self, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        return list(torch.autograd.grad(outputs, self.leaves, self.grads, allow_unused=True))

    def mismatch(self, candidate: Callable[[list[Any]], Sequence[Tensor]], gradients: bool) -> str | None:
        """What is not as slicing by key and ``torch.cat`` give it; None if all is.

        Outputs bit for bit; gradients, too, except for sums over keys used repeatedly, which
        may round otherwise.
        """
        _poison(self.values)
        outputs = candidate(self.inputs(gradients))
        if len(outputs) != len(self.column_map.out_widths):
            return f"{len(outputs)} outputs"
        parts = {
            key: part
            for keys, widths, value in zip(self.workload.keys, self.workload.widths, self.values)
            for key, part in zip(keys, value.split(widths, 1))
        }
        for group, output in zip(self.workload.groups, outputs):
            if not torch.equal(output.detach(), torch.cat([parts[k] for k in group], 1).to(self.out_dtype)):
                return "output"
        if not gradients:
            return None
        _poison(self.values)
        got = self.backward(outputs)
        del outputs
        return None if all(self._right_gradient(t, grad) for t, grad in enumerate(got)) else GRADIENT

    def _right_gradient(self, tensor: int, got: Tensor | None) -> bool:
        """Without autograd and input by input, since all of them at once may not fit into memory."""
        pieces = self.column_map.transpose().outputs[tensor]
        if got is None:
            return not any(piece.sources for piece in pieces)
        if got.shape != self.values[tensor].shape or got.dtype != self.workload.dtype:
            return False
        wide = self.out_dtype in (torch.float16, torch.bfloat16)
        for piece in pieces:
            columns = slice(piece.start, piece.start + piece.length)
            sources = [self.grads[t][:, o : o + piece.length] for t, o in piece.sources]
            if not sources:
                right = torch.zeros_like(got[:, columns])
            elif len(sources) == 1:
                right = sources[0].to(got.dtype)
            else:
                # A sum in another order, or rounded at every step, may differ by as many roundings.
                exact = torch.stack(sources).double().sum(0)
                tolerance = len(sources) * (2**-7 if wide else 2**-22)
                if not torch.allclose(got[:, columns].double(), exact, rtol=tolerance, atol=tolerance):
                    return False
                continue
            if not torch.equal(got[:, columns], right):
                return False
        return True


def _poison(values: Sequence[Tensor]) -> None:
    """Leave NaN in the memory that is handed out next, so that what is not written shows."""
    junk = [torch.full_like(v, math.nan) for v in values for _ in range(2) if v.nbytes < 1 << 20]
    del junk


def copy_of(moved: int, device: torch.device) -> Call:
    """A plain copy that reads and writes as many bytes in all, into memory that is there already."""
    each = moved // 2
    size = min(each, _COPY_BYTES)
    source, target = (_memory.empty([max(1, size)], torch.uint8, device).fill_(1) for _ in range(2))
    whole, rest = divmod(each, size) if size else (0, 0)

    def call() -> None:
        for _ in range(whole):
            target.copy_(source)
        if rest:
            target[:rest].copy_(source[:rest])

    return call


def peak_growth(call: Call, clock: Clock, times: int) -> int | None:
    """By how much the peak of the memory in use grows during a call, P90 in bytes.

    On CUDA as the caching allocator counts, on a CPU of the whole process. None where the call
    keeps too little to be told, or the system does not tell.
    """
    grown: list[float] = []
    for _ in range(times):
        if clock.cuda:
            clock.wait()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            kept = call()
            clock.wait()
            grown.append(torch.cuda.max_memory_allocated() - before)
        else:
            try:
                _trim()
                Path("/proc/self/clear_refs").write_text("5")  # resets the peak
                before = _peak()
                kept = call()
                grown.append(_peak() - before)
            except OSError:
                return None
            if sum(t.nbytes for t in kept or () if isinstance(t, Tensor)) < TELLING_BYTES:
                return None
        del kept
    return round(quantile(grown, 0.9))


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _trim() -> None:
    """Give memory that the allocator holds back to the system, so that using it shows."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)


def _peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("VmHWM is not in /proc/self/status")


def trace(call: Call, clock: Clock, path: Path) -> None:
    """Write a Chrome trace of one call, for chrome://tracing or Perfetto."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if clock.cuda else [])
    path.parent.mkdir(parents=True, exist_ok=True)
    call()
    with profile(activities=activities) as profiler:
        call()
        clock.wait()
    profiler.export_chrome_trace(str(path))


def file_name(*parts: str) -> str:
    """A file's name made of words."""
    return "-".join(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts)
