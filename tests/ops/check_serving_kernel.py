"""Checks what the serving library does around the kernel, in a process that never imports the package.

    python -m tests.ops.check_serving_kernel libtorchrec_kt_serving.so [--device cuda]

The library is one that holds the kernel: on CUDA devices, or, with tensors on the CPU, a host build. The latter
can also act as while a CUDA graph is captured, and tells how often its kernel was launched.
"""

from __future__ import annotations

import ctypes
import random
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import check_serving as serving
from tests.ops.check_serving import assert_same, filled, refuses, rows_of, summed
from tests.reference import STRIDES, poison

MAPS_KEPT, ENCODINGS_KEPT = 64, 256
ARITHMETIC = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
host: Any = None  # the library, if it is a host build


def regroup(*arguments: Any) -> list[Tensor]:
    return torch.ops.torchrec_kt.regroup(*arguments)


@contextmanager
def launching(at_least: int = 1) -> Iterator[None]:
    """The calls inside reach the kernel so often."""
    before = launches()
    yield
    assert host is None or launches() - before >= at_least, f"{launches() - before} launches"


@contextmanager
def not_launching() -> Iterator[None]:
    before = launches()
    yield
    assert launches() == before


def launches() -> int:
    return host.torchrec_kt_host_launches() if host else 0


@contextmanager
def captured() -> Iterator[None]:
    """What runs here may neither copy nor wait."""
    if host is None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield
        graph.replay()
        torch.cuda.synchronize()
        return
    host.torchrec_kt_host_capture(True)
    try:
        yield
    finally:
        host.torchrec_kt_host_capture(False)


# --- the kernel -------------------------------------------------------------------------------------------


def check_the_kernel_serves_copies_sums_and_casts() -> None:
    moves = [[0, 0, 0, 0, 32], [1, 0, 3, 35, 21], [0, 1, 33, 1, 7], [1, 1, 24, 8, 16], [1, 2, 40, 5, 1]]
    widths = [57, 24, 6]
    for dtype in ARITHMETIC:
        given = [filled((37, w), dtype) for w in (48, 41)]
        for target in ARITHMETIC:
            with launching():
                outs = regroup(given, rows_of(moves), widths, 1, target)
            assert_same(outs, summed(given, moves, widths, target))
        with launching():
            outs = regroup(given, rows_of([*moves, *moves[:2]]), widths)
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        assert_same(outs, summed(given, [*moves, *moves[:2]], widths, dtype, sums))
    for dtype, target in ((torch.complex64, torch.complex128), (torch.complex128, torch.complex32)):
        given = [filled((5, 2, 8), dtype).conj()]
        for key_dim in (0, 1, 2, -1):
            size = given[0].shape[key_dim]
            twice = [[0, 0, 0, 1, size], [0, 0, size - 1, 0, 1], [0, 0, 0, 1, 1]]
            with launching():
                outs = regroup(given, rows_of(twice), [size + 1], key_dim, target)
            assert_same(outs, summed(given, twice, [size + 1], target, target, key_dim))
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.int64, torch.complex128):
        given = [filled((9, w), dtype) for w in (48, 41)]
        with launching():
            outs = regroup(given, rows_of(moves), widths)
        exact = [given[i].cpu()[:, at : at + n] for i, _, at, _, n in moves]
        assert torch.equal(serving.bits(outs[0][:, :32].cpu()), serving.bits(exact[0]))
        assert torch.equal(serving.bits(outs[1][:, 8:].cpu()), serving.bits(exact[3]))
        assert not outs[0][:, 32:35].cpu().to(torch.complex128).any()


def check_alignment() -> None:
    """Tensors at every address and distance of rows, on the same plan."""
    moves = [[0, 0, 0, 0, 16], [1, 0, 8, 16, 8], [0, 1, 16, 0, 8], [1, 1, 5, 8, 3]]
    plan = rows_of(moves)
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.complex128):
        for offset in range(9):
            for pad in (0, 1, 4):
                for rows in (1, 2, 9):
                    given: list[Tensor] = []
                    for n in (0, 1):
                        apart = (24 + pad) * rows + offset
                        given.append(
                            filled((apart,), dtype)[offset * (1 - n) :].as_strided((rows, 24), (24 + pad, 1))
                        )
                    poison(*(torch.empty(rows, w, dtype=dtype) for w in (24, 11)), copies=2)
                    with launching():
                        outs = regroup(given, plan, [24, 11])
                    assert_same(outs, copied(given, moves, [24, 11]))
    for strided in STRIDES.values():
        given = [strided(torch.randn(19, 24)).to(serving.DEVICE) for _ in range(2)]
        with launching():
            outs = regroup(given, plan, [24, 11])
        assert_same(outs, copied(given, moves, [24, 11]))


def copied(given: Sequence[Tensor], moves: Sequence[Sequence[int]], widths: Sequence[int]) -> list[Tensor]:
    outs = [torch.zeros(given[0].shape[0], w, dtype=given[0].dtype) for w in widths]
    for i, o, at, to, length in moves:
        outs[o][:, to : to + length] = given[i].cpu()[:, at : at + length]
    return outs


def check_limits() -> None:
    """Beyond what a launch reaches, and where the kernel is not for a call."""
    given = [filled((5, 7), torch.float32) for _ in range(150)]
    moves = [[i, i % 130, i % 3, 4 * (i // 130), 4] for i in range(150)]
    with launching(2):
        assert_same(regroup(given, rows_of(moves), [8] * 130), copied(given, moves, [8] * 130))
    for count, serves in ((111, True), (112, False), (150, False)):
        moves = [[i, 0, i % 3, 1, 4] for i in range(count)]
        for dtype in (torch.float32, torch.bfloat16):
            inputs = [v.to(dtype) for v in given]
            with launching() if serves else not_launching():
                outs = regroup(inputs, rows_of(moves), [6])
            assert_same(outs, summed(inputs, moves, [6], dtype, torch.float32))
    often = [[i % 2, 0, i % 3, 0, 4] for i in range(400)]
    with launching():
        assert_same(
            regroup(given, rows_of(often), [4]), summed(given, often, [4], torch.float32, torch.float32)
        )
    window = 1 << 24
    wide = torch.zeros(1, 1, dtype=torch.bfloat16, device=serving.DEVICE).expand(1, 112 * window)
    many = [[0, 0, i * window + i, 0, 4] for i in range(112)]
    with not_launching():
        assert not regroup([wide], rows_of(many), [4])[0].any()
    with launching():
        assert not regroup([wide], rows_of(many[1:]), [4])[0].any()
    bytes_ = [torch.ones(1, 8, dtype=torch.uint8, device=serving.DEVICE)]
    for width, serves in ((1 << 25, True), ((1 << 25) + 1, False)):
        with launching() if serves else not_launching():
            (out,) = regroup(bytes_, rows_of([[0, 0, 0, 5, 8]]), [width])
        assert int(out[:, 5:13].sum()) == int(out.sum()) == 8
    planes = [torch.ones(1, 8, 1 << 19, dtype=torch.uint8, device=serving.DEVICE)]
    for width, serves in ((8, True), (9, False)):
        with launching() if serves else not_launching():
            (out,) = regroup(planes, rows_of([[0, 0, 0, 1, 7]]), [width])
        assert torch.equal(out[:, 1:8].sum((0, 2)).cpu(), torch.full((7,), 1 << 19))
    with pytest.raises(RuntimeError):  # out of memory, after the widths' sum has been looked at
        regroup(bytes_, rows_of([[0, 0, 0, 0, 8]]), [2**62, 2**62, 2**62])
    for shape in ((0, 8), (3, 0), (0, 0)):
        empty = [torch.empty(shape, device=serving.DEVICE)]
        length = shape[1] // 2
        with not_launching():
            outs = regroup(
                empty, rows_of([[0, 0, length, 0, length], [0, 2, 0, 0, length]]), [length, 0, length]
            )
        assert [tuple(o.shape) for o in outs] == [(shape[0], length), (shape[0], 0), (shape[0], length)]
    assert regroup(bytes_, rows_of([]), []) == []
    assert_same(regroup(bytes_, rows_of([]), [2]), [torch.zeros(1, 2, dtype=torch.uint8)])


# --- plans on a device -------------------------------------------------------------------------------------


def behind_torch(plan: Tensor, row: Sequence[int]) -> None:
    """Write without a trace in the tensor's version."""
    before = plan._version
    plan.detach().data[0] = torch.tensor(row, dtype=torch.int32)
    assert plan._version == before


def check_plans_are_read_once_and_again_when_they_change() -> None:
    given = [filled((3, 8), torch.float32)]
    first, second = given[0][:, :4], given[0][:, 4:]
    plan = rows_of([[0, 0, 0, 0, 4]])
    assert_same(regroup(given, plan, [4]), [first])
    behind_torch(plan, [0, 0, 4, 0, 4])
    assert_same(regroup(given, plan, [4]), [first])  # so it was not read
    with captured():
        outs = regroup(given, plan, [4])  # nor was anything copied
    assert_same(outs, [first])
    plan[0, 2] = 4
    assert_same(regroup(given, plan, [4]), [second])
    plan.copy_(rows_of([[0, 0, 0, 0, 4]]))
    assert_same(regroup(given, plan, [4]), [first])
    plan[0, 4] = 99
    refuses(lambda: regroup(given, plan, [4]), "reads 99 columns")
    plan[0, 4] = 4
    assert_same(regroup(given, plan, [4]), [first])
    # Views of one tensor, at one address.
    both = rows_of([[0, 0, 0, 0, 4], [0, 0, 4, 4, 4]])
    assert_same(regroup(given, both, [8]), given)
    assert_same(regroup(given, both[:1], [8]), [torch.cat([first, torch.zeros_like(first)], 1)])
    turned = rows_of([[0, 0, 0, 0, 4]]).expand(2, 5)  # the row twice
    assert_same(regroup(given, turned, [8]), [torch.cat([first * 2, torch.zeros_like(first)], 1)])
    assert_same(regroup(given, both, [8]), given)
    padded = torch.tensor([[0, 0, 4, 0, 4, 7]], dtype=torch.int32).to(serving.DEVICE)
    assert_same(regroup(given, padded, [4]), [second])
    assert_same(regroup(given, padded[:, :5], [4]), [second])
    # The same 30 numbers are other rows by five than by six.
    numbers = torch.zeros(30, dtype=torch.int32)
    numbers[4::6] = 1
    numbers = numbers.to(serving.DEVICE)
    ones = [torch.ones(1, 8, device=serving.DEVICE)] * 2
    assert regroup(ones, numbers.view(5, 6), [2, 2])[0].tolist() == [[5, 0]]
    assert regroup(ones, numbers.view(6, 5), [2, 2])[0].tolist() == [[1, 0]]
    # A plan is another one the other way round.
    plan, zeros = rows_of([[0, 0, 4, 0, 4]]), torch.zeros_like(first)
    assert_same(regroup(given, plan, [8]), [torch.cat([second, zeros], 1)])
    assert_same(torch.ops.torchrec_kt.regroup_transposed(given, plan, [8]), [torch.cat([zeros, first], 1)])
    assert_same(regroup(given, plan, [8]), [torch.cat([second, zeros], 1)])
    # The widths of a call are part of it.
    for width in (4, 6, 4):
        assert regroup(given, rows_of([[0, 0, 0, 0, 4]]), [width])[0].shape == (3, width)
    narrow = [given[0][:, :3]]
    plan = rows_of([[0, 0, 0, 0, 4]])
    assert_same(regroup(given, plan, [4]), [first])
    refuses(lambda: regroup(narrow, plan, [4]), "which has 3 columns")
    assert_same(
        torch.ops.torchrec_kt.regroup_transposed([first], plan, [8]),
        [torch.cat([first, torch.zeros_like(first)], 1)],
    )
    assert_same(regroup(given, plan, [4]), [first])


def check_a_plan_at_the_address_of_another() -> None:
    """Memory that its tensor does not own, as the constants of an AOTInductor model do not."""
    given = [filled((3, 8), torch.float32)]
    memory = torch.tensor([[0, 0, 0, 0, 4]], dtype=torch.int32).to(serving.DEVICE)
    for start in (0, 4, 1):
        memory[0, 2] = start
        plan = borrowed(memory)
        assert (plan.data_ptr(), plan._version) == (memory.data_ptr(), 0)
        assert_same(regroup(given, plan, [4]), [given[0][:, start : start + 4]])
        del plan


def borrowed(memory: Tensor) -> Tensor:
    if memory.is_cuda:
        return torch.from_dlpack(memory)
    return torch.from_numpy(memory.numpy())


def check_inference_plans_are_read_each_time() -> None:
    """A change of one leaves no trace."""
    given = [filled((3, 8), torch.float32)]
    with torch.inference_mode():
        plan = rows_of([[0, 0, 0, 0, 4]])
        assert plan.is_inference()
        for start in (0, 4, 2):
            plan[0, 2] = start
            assert_same(regroup(given, plan, [4]), [given[0][:, start : start + 4]])
    # A first call under inference mode, with a plan from outside of it.
    plan = rows_of([[0, 0, 0, 0, 4]])
    with torch.inference_mode():
        assert_same(regroup(given, plan, [4]), [given[0][:, :4]])
    plan[0, 2] = 1
    assert_same(regroup(given, plan, [4]), [given[0][:, 1:5]])


def check_plans_kept_are_bounded() -> None:
    if host is None:
        return
    given, references = [filled((2, 8), torch.float32)], []
    for n in range(5 * MAPS_KEPT):
        memory = torch.tensor([[0, 0, n % 5, 0, 3]], dtype=torch.int32).numpy()
        references.append(weakref.ref(memory))
        assert_same(regroup(given, torch.from_numpy(memory), [3]), [given[0][:, n % 5 : n % 5 + 3]])
        del memory
    assert 0 < sum(reference() is not None for reference in references) <= MAPS_KEPT


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def check_memory_is_bounded() -> None:
    if host is None:
        return
    # Long plans, each another one.
    length = 2_500
    rows = torch.zeros(length, 5, dtype=torch.int32)
    rows[:, 4] = 1
    rows[:, 3] = torch.arange(length)
    rows[:, 2] = torch.arange(length) * 7 % length
    given, before = [torch.ones(1, length)], 0
    for n in range(4 * MAPS_KEPT):
        rows[0, 2] = n
        assert regroup(given, rows, [length])[0].all()
        if n == MAPS_KEPT:
            before = resident_bytes()
    growth = resident_bytes() - before
    assert growth < 20 << 20, f"{growth >> 20} MiB"
    # Encoded maps are dropped after everything that was launched is done.
    waits, widths = host.torchrec_kt_host_waits(), range(1, 3 * ENCODINGS_KEPT)
    for width in widths:
        value = torch.ones(2, width)
        assert_same(regroup([value], rows_of([[0, 0, 0, 0, width]]), [width]), [value])
    assert host.torchrec_kt_host_waits() - waits in (
        len(widths) // ENCODINGS_KEPT,
        len(widths) // ENCODINGS_KEPT + 1,
    )


def check_layouts_in_turns() -> None:
    """Plans, shapes, types and alignments that alternate, from many threads at once."""
    generator = random.Random(2)
    cases: list[tuple[list[Tensor], Tensor, list[int], int, list[Tensor]]] = []
    for n in range(40):
        moves = serving.random_moves(generator)
        dtype = (torch.float32, torch.bfloat16, torch.int32, torch.complex64)[n % 4]
        shape = [3 + n % 3, 8] if n % 2 else [2, 8, 3]
        given = [torch.randint(-2, 3, shape).to(dtype).to(serving.DEVICE) for _ in range(2)]
        cases.append(
            (given, rows_of(moves), [10, 10 + n % 2], 1, summed(given, moves, [10, 10 + n % 2], dtype))
        )
    failures: list[BaseException] = []
    barrier = threading.Barrier(6)

    def work(seed: int) -> None:
        order = random.Random(seed)
        stream = torch.cuda.Stream() if serving.DEVICE.type == "cuda" else None
        barrier.wait()
        try:
            with torch.cuda.stream(stream) if stream else nullcontext():
                for _ in range(150):
                    given, plan, widths, key_dim, expected = order.choice(cases)
                    assert_same(regroup(given, plan, widths, key_dim), expected)
                    if order.random() < 0.3:  # and one that nobody has met
                        width = order.randrange(1, 5000)
                        value = torch.arange(width, device=serving.DEVICE)[None]
                        assert_same(regroup([value], rows_of([[0, 0, 0, 0, width]]), [width]), [value])
        except BaseException as error:
            failures.append(error)

    for _ in range(2):
        torch.cuda.synchronize() if serving.DEVICE.type == "cuda" else None
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


# --- capture ------------------------------------------------------------------------------------------------


def check_capture() -> None:
    """A first call says what to do; the same call later copies nothing and waits for nothing."""
    message = "run the model once before capture"
    first, second = filled((4, 26), torch.float32), filled((4, 27), torch.float32)
    plan = rows_of([[0, 0, 9, 0, 17]])

    def first_call(given: Tensor, moves: Tensor) -> None:
        with captured():
            regroup([given], moves, [17])

    refuses_in_capture: Callable[..., None] = lambda given, moves: refuses(  # noqa: E731
        lambda: first_call(given, moves), message
    )
    if host is not None:  # whose plans are on the CPU, which is no reason to refuse
        refuses_in_capture(first, plan)
    assert_same(regroup([first], plan, [17]), [first[:, 9:]])
    with captured():
        outs = regroup([first], plan, [17])
    assert_same(outs, [first[:, 9:]])
    refuses_in_capture(second, plan)  # another layout on the same plan
    assert_same(regroup([second], plan, [17]), [second[:, 9:26]])
    with captured():
        outs = regroup([second], plan, [17])
    assert_same(outs, [second[:, 9:26]])
    apart = filled((4 * 26 + 1,), torch.float32)[1:].view(4, 26)
    regroup([apart], plan, [17])
    with captured():
        outs = regroup([apart], plan, [17])
    assert_same(outs, [apart[:, 9:]])
    nothing = filled((0, 28), torch.float32)  # takes no map, so there is none to copy
    with captured():
        assert regroup([nothing], plan, [17])[0].shape == (0, 17)
    # Beneath what replays, maps are kept for good.
    for width in range(1, 2 * ENCODINGS_KEPT):
        regroup([filled((1, width), torch.uint8)], rows_of([[0, 0, 0, 0, width]]), [width])
    assert_same(regroup([first], plan, [17]), [first[:, 9:]])


def check_operators_by_name_reach_the_kernel() -> None:
    ops, given = torch.ops.torchrec_kt, serving.values()
    expected = serving.expected_of(given)
    permutes, in_shapes, out_shapes, widths = serving.plan()
    with launching(3):
        assert_same(ops.regroup_by_keys(given, serving.KEYS, serving.WIDTHS, serving.GROUPS), expected)
        assert_same(ops.regroup_keyed_tensor(given, serving.KEYS, serving.WIDTHS, serving.GROUPS), expected)
        assert_same(ops.permute_multi_embedding(given, permutes, in_shapes, out_shapes, widths), expected)
    for place in ("cpu", serving.DEVICE):  # plans on the host, too
        with launching(2):
            assert_same(regroup(given, permutes.to(place), widths), expected)
            assert_same(
                ops.permute_multi_embedding(given, permutes.to(place), in_shapes, out_shapes, widths),
                expected,
            )


def check_devices() -> None:
    """Only where there are two: the CPU is the other."""
    if serving.DEVICE.type != "cuda":
        return
    given = [filled((3, 8), torch.float32), torch.ones(3, 8)]
    plan = rows_of([[0, 0, 0, 0, 4], [1, 0, 0, 4, 4]])
    refuses(lambda: regroup(given, plan, [8]), "on another device")
    on_cpu = [torch.ones(3, 8)] * 2
    outs = regroup(on_cpu, plan, [8])
    assert outs[0].device.type == "cpu"
    assert outs[0].all()
    torch_knows_nothing = torch.tensor([[0, 0, 0, 0, 4]], dtype=torch.int32)
    for start in (0, 4):
        torch_knows_nothing.numpy()[0, 2] = start
        assert_same(regroup(given[:1], torch_knows_nothing, [4]), [given[0][:, start : start + 4]])


CHECKS = (
    check_memory_is_bounded,  # first, while little memory that was freed is at hand
    check_the_kernel_serves_copies_sums_and_casts,
    check_alignment,
    check_limits,
    check_plans_are_read_once_and_again_when_they_change,
    check_a_plan_at_the_address_of_another,
    check_inference_plans_are_read_each_time,
    check_plans_kept_are_bounded,
    check_layouts_in_turns,
    check_capture,
    check_operators_by_name_reach_the_kernel,
    check_devices,
)


def open_host() -> None:
    global host
    if serving.DEVICE.type == "cpu":
        host = ctypes.CDLL(sys.argv[1])
        host.torchrec_kt_host_capture.argtypes = [ctypes.c_bool]
        host.torchrec_kt_host_launches.restype = host.torchrec_kt_host_waits.restype = ctypes.c_int64


def timed(check: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        start = time.process_time()
        check()
        print(f"{check.__name__}: {time.process_time() - start:.1f} s")

    return run


if __name__ == "__main__":
    serving.main([open_host, *map(timed, CHECKS)])
