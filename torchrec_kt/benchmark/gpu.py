"""The kernel on a GPU beside a plain copy and the peers. Needs torch alone.

    python -m torchrec_kt.benchmark.gpu --json gpu.json

For each workload, forward and backward: the time of the kernel, of ``copy_`` from device to device moving as
many bytes, of slicing with ``torch.cat``, and of FBGEMM's operator and TorchRec's Triton operator where they
can be imported. *Kernel* is the time on the device, from replays of a CUDA graph; *call* the time of a
whole call as Python sees it, launches queued up. *GB/s* counts bytes read and written once. All candidates
of a row are measured in one run, interleaved; figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..ops import RegroupPlan, _native, regroup_values
from .workloads import Workload, function_workloads, operator_workloads

__all__ = ["main", "measure"]

Run = Callable[[], Any]
# A kernel is timed for at least this long a round, a call as often as fits.
_MIN_SECONDS = 3e-3


class Bench:
    """One workload's tensors on a device."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.workload = workload
        self.plan: RegroupPlan = workload.plan
        generator = torch.Generator(device=device).manual_seed(0)
        self.values = [
            torch.randn(workload.batch, sum(widths), generator=generator, device=device).to(workload.dtype)
            for widths in workload.widths
        ]
        self.leaves = [v.clone().requires_grad_() for v in self.values]
        self.dtype = workload.cast or workload.dtype
        self.grads = [
            torch.randn(workload.batch, width, generator=generator, device=device).to(self.dtype)
            for width in self.plan.out_widths
        ]

    def ours(self, values: Sequence[Tensor]) -> list[Tensor]:
        return regroup_values(values, self.plan, self.dtype)

    def cat(self, values: Sequence[Tensor]) -> list[Tensor]:
        place: dict[str, Tensor] = {}
        for keys, widths, value in zip(self.workload.keys, self.workload.widths, values):
            place.update(zip(keys, value.split(widths, 1)))
        outs = [torch.cat([place[key] for key in group], 1) for group in self.workload.groups]
        return [out.to(self.dtype) for out in outs]

    def peers(self) -> dict[str, Callable[[Sequence[Tensor]], list[Tensor]]]:
        """FBGEMM's operator and TorchRec's Triton operator, as far as they are there; plans made beforehand."""
        arguments = torch.ops.torchrec_kt.kt_regroup_arguments(
            self.values[0], self.workload.keys, self.workload.widths, self.workload.groups
        )
        found: dict[str, Callable[[Sequence[Tensor]], list[Tensor]]] = {}
        for name, load in {"fbgemm": _fbgemm_operator, "triton": _triton_operator}.items():
            try:
                operator = load()
            except Exception:  # whatever keeps it from loading, it is not there
                continue
            found[name] = _cast_after(operator, arguments, self.dtype)
        return found

    @property
    def candidates(self) -> dict[str, Callable[[Sequence[Tensor]], list[Tensor]]]:
        return {"ours": self.ours, "cat/split": self.cat} | self.peers()

    def moved(self, direction: str) -> int:
        """Bytes that a call has to read and write."""
        copied = sum(move.length for move in self.plan.column_map.moves) * self.workload.batch
        written = sum(v.numel() for v in self.values)
        if direction == "forward":
            return copied * (self.workload.dtype.itemsize + self.dtype.itemsize)
        return copied * self.dtype.itemsize + written * self.workload.dtype.itemsize

    def runs(self, direction: str) -> dict[str, Run]:
        """What each candidate does in this direction."""
        if direction == "forward":
            return {name: _bind(candidate, self.values) for name, candidate in self.candidates.items()}
        found: dict[str, Run] = {}
        for name, candidate in self.candidates.items():
            outs = candidate(self.leaves)
            found[name] = _bind_backward(outs, self.leaves, self.grads)
        return found

    def matches(self) -> bool:
        """Forward bit for bit, gradients to the rounding of the sums."""
        outs, right = self.ours(self.leaves), self.cat(self.leaves)
        if not all(map(torch.equal, outs, right)):
            return False
        got = torch.autograd.grad(outs, self.leaves, self.grads, materialize_grads=True)
        exact = torch.autograd.grad(right, self.leaves, self.grads, materialize_grads=True)
        if self.workload.uses == len({key for group in self.workload.groups for key in group}):
            return all(map(torch.equal, got, exact))
        tolerance = 1e-4 if self.dtype == torch.float32 else 0.2  # the peer rounds every partial sum
        return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(got, exact))


def _fbgemm_operator() -> Any:
    import fbgemm_gpu  # noqa: F401

    return torch.ops.fbgemm.permute_multi_embedding


def _triton_operator() -> Any:
    from torchrec.sparse.triton_permute_multi_embedding import triton_permute_multi_embedding

    return triton_permute_multi_embedding


def _cast_after(
    operator: Any, arguments: Any, dtype: torch.dtype
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    return lambda values: [out.to(dtype) for out in operator(list(values), *arguments)]


def _bind(candidate: Callable[[Sequence[Tensor]], list[Tensor]], values: Sequence[Tensor]) -> Run:
    return lambda: candidate(values)


def _bind_backward(outs: list[Tensor], leaves: list[Tensor], grads: list[Tensor]) -> Run:
    return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=True, allow_unused=True)


def _copy(moved: int, device: torch.device) -> Run:
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


class Clock:
    """Times on a device; with the host's clock where there is no GPU, to try the program out."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def once(self, run: Run) -> float:
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - start

    def kernel(self, run: Run) -> tuple[Run, str]:
        """A run that leaves the host's work out, and how that is done."""
        if not self.cuda:
            return run, "host clock"
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
        except Exception as error:  # a peer that copies from the host cannot be captured
            torch.cuda.synchronize()
            return run, f"not captured ({type(error).__name__}), whole calls"
        return graph.replay, "graph"

    def interleaved(self, runs: dict[str, Run], rounds: int) -> dict[str, float]:
        """Median seconds of each."""
        repeats: dict[str, int] = {}
        for name, run in runs.items():
            self.once(run)
            repeats[name] = max(1, min(200, math.ceil(_MIN_SECONDS / max(1e-7, self.once(run)))))
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                seconds[name].append(self._round(run, repeats[name]))
        return {name: statistics.median(found) for name, found in seconds.items()}

    def _round(self, run: Run, count: int) -> float:
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(count):
                run()
            return (time.perf_counter() - start) / count
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(count):
            run()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3 / count


def measure(workload: Workload, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Two rows, forward and backward."""
    clock = Clock(device)
    bench = Bench(workload, device)
    rows: list[dict[str, Any]] = []
    match = bench.matches()
    for direction in ("forward", "backward"):
        moved = bench.moved(direction)
        runs = bench.runs(direction)
        row: dict[str, Any] = {
            "name": workload.name,
            "direction": direction,
            "match": match,
            "bytes": moved,
            "memory": _extra_memory(runs["ours"], bench, direction) if clock.cuda else None,
        }
        row["call"] = clock.interleaved(runs, rounds)
        timed = {name: clock.kernel(run) for name, run in ({"copy": _copy(moved, device)} | runs).items()}
        row["method"] = {name: how for name, (_, how) in timed.items()}
        row["kernel"] = clock.interleaved({name: run for name, (run, _) in timed.items()}, rounds)
        rows.append(row)
        del runs, timed
    return rows


def _extra_memory(run: Run, bench: Bench, direction: str) -> float:
    """Peak growth during one call over the bytes it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    torch.cuda.synchronize()
    returned = sum(t.nbytes for t in results if t is not None)
    return (torch.cuda.max_memory_allocated() - before) / max(1, returned)


def provenance(device: torch.device) -> dict[str, Any]:
    """What a figure depends on."""
    found = {
        "date": datetime.date.today().isoformat(),
        "torchrec_kt": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": _native.has_kernel(device.type),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "cuda": torch.version.cuda,
            "processors": properties.multi_processor_count,
        }
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A short table of ratios."""
    lines = [
        f"{'workload':<24} {'':<8} {'GB/s':>7} {'of copy':>7} {'kernel: cat':>11} {'fbgemm':>7} {'triton':>7}"
        f" {'call: cat':>9} {'fbgemm':>7} {'memory':>7} match"
    ]
    for row in rows:
        kernel, call = row["kernel"], row["call"]
        ours = kernel["ours"]

        def ratio(times: dict[str, float], name: str) -> str:
            return f"{times[name] / times['ours']:.2f}" if name in times else "-"

        lines.append(
            f"{row['name']:<24} {row['direction']:<8} {row['bytes'] / ours / 1e9:7.0f}"
            f" {kernel['copy'] / ours:7.1%} {ratio(kernel, 'cat/split'):>11} {ratio(kernel, 'fbgemm'):>7}"
            f" {ratio(kernel, 'triton'):>7} {ratio(call, 'cat/split'):>9} {ratio(call, 'fbgemm'):>7}"
            f" {'-' if row['memory'] is None else format(row['memory'], '.3f'):>7} {'yes' if row['match'] else 'NO'}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, write JSON, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--device", default="cuda", help="cpu tries the program out; its figures mean nothing"
    )
    parser.add_argument("--only", default="", help="workloads whose name holds this word")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=240, help="start no further workload after this long"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not (torch.cuda.is_available() and _native.has_kernel("cuda")):
        parser.error(f"no GPU, or no kernel for it: {_native.why_not()}")
    start, rows, left_out = time.monotonic(), [], []
    for name, workload in (function_workloads() | operator_workloads()).items():
        if arguments.only not in name:
            continue
        if time.monotonic() - start > arguments.seconds:
            left_out.append(name)
            continue
        rows += measure(workload, device, arguments.rounds)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(table(rows[-2:]).split("\n", 1)[1], flush=True)
        if arguments.json:
            # Written as it grows: a run that is cut short keeps what it has.
            found = {"about": provenance(device), "left out": left_out, "rows": rows}
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(provenance(device)))
    if left_out:
        print("left out for lack of time:", ", ".join(left_out))
    print(table(rows))
    return 0 if rows and all(row["match"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
