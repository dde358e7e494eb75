"""What only a GPU can show: graphs, streams, memory, no waiting, several devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.reference import regroup_reference
from torchrec_kt.ops import RegroupPlan, regroup_values
from torchrec_kt.ops.moves import graph_moves

LAYOUTS = [(["a", "b", "c"], [64, 16, 7]), (["d", "e"], [128, 32])]
GROUPS = [["d", "a", "a"], ["e", "c", "d"]]
PLAN = RegroupPlan.build(layouts=LAYOUTS, groups=GROUPS)
ROWS = 300


@pytest.fixture
def values(device: torch.device) -> list[Tensor]:
    return [torch.randn(ROWS, sum(w), device=device, requires_grad=True) for _, w in LAYOUTS]


def expected(values: list[Tensor]) -> list[Tensor]:
    return regroup_reference([v.detach() for v in values], LAYOUTS, GROUPS)


def step(values: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    outs = regroup_values(values, PLAN)
    return outs, torch.autograd.grad(outs, values, grads)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("no_waiting")
def test_steady_state_neither_waits_nor_uploads(values: list[Tensor]) -> None:
    grads = [torch.randn_like(out) for out in step(values, [torch.ones_like(o) for o in expected(values)])[0]]
    step(values, grads)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        step(values, grads)
    torch.cuda.set_sync_debug_mode("default")
    names = [event.name for event in profile.events() or []]
    assert not [name for name in names if "Memcpy" in name or "Memset" in name], names
    kernels = [name for name in names if "apply_map" in name]
    assert len(kernels) == 2, names


def test_captured_graph_replays_with_new_inputs(values: list[Tensor]) -> None:
    grads = [torch.randn_like(out) for out in expected(values)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(values, grads)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs, input_grads = step(values, grads)
    for n in range(4):
        with torch.no_grad():
            for tensor in (*values, *grads):
                tensor.copy_(torch.randn(tensor.shape).pin_memory(), non_blocking=True)
        # Other traffic through pinned memory between the replays.
        junk = [
            torch.full((1 << 16,), float("nan")).pin_memory().to("cuda", non_blocking=True) for _ in range(8)
        ]
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, outs, expected(values))), f"replay {n}"
        fresh = step([v.detach().clone().requires_grad_() for v in values], grads)[1]
        assert all(map(torch.equal, input_grads, fresh)), f"replay {n}"
        del junk


def test_a_graph_outlives_the_plan(device: torch.device) -> None:
    values = [torch.randn(ROWS, 24, device=device)]
    plan = RegroupPlan.build(layouts=[(["a", "b"], [8, 16])], groups=[["b", "a"]])
    regroup_values(values, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = regroup_values(values, plan)
    plan.column_map.recipes.clear()
    plan.column_map.calls.clear()
    del plan
    junk = [torch.full((64,), -1, dtype=torch.int32, device=device) for _ in range(2000)]
    values[0].normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, torch.cat([values[0][:, 8:], values[0][:, :8]], 1))
    del junk


def test_a_first_call_during_capture_says_what_to_do(device: torch.device) -> None:
    plan = RegroupPlan.build(layouts=[(["a", "b"], [9, 17])], groups=[["b", "a"]])
    value = torch.randn(4, 26, device=device)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run the model once before capture"), torch.cuda.graph(graph):
        regroup_values([value], plan)
    torch.cuda.synchronize()
    assert torch.equal(regroup_values([value], plan)[0], torch.cat([value[:, 9:], value[:, :9]], 1))


def test_current_stream_is_used(values: list[Tensor]) -> None:
    regroup_values(values, PLAN)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            for value in values:
                value.fill_(3.0)
        outs = regroup_values(values, PLAN)
    stream.synchronize()
    assert all((out == 3.0).all() for out in outs)


def test_memory_is_the_outputs(values: list[Tensor]) -> None:
    regroup_values(values, PLAN)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        outs = regroup_values(values, PLAN)
    granule = 512  # of the caching allocator
    returned = sum(-(-out.nbytes // granule) * granule for out in outs)
    assert torch.cuda.max_memory_allocated() - before == returned


def test_operator_with_moves_on_the_device(values: list[Tensor]) -> None:
    moves = graph_moves(PLAN.column_map, torch.device("cuda"))
    operator = torch.ops.torchrec_kt.regroup
    outs = operator(values, moves, PLAN.out_widths)
    grads = [torch.randn_like(out) for out in outs]
    torch.autograd.grad(outs, values, grads)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = operator(values, moves, PLAN.out_widths)
        got = torch.autograd.grad(outs, values, grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, outs, expected(values)))
    assert all(map(torch.equal, got, step(values, grads)[1]))
    moves[:, [0, 2]] = 0  # in place: everything from the first columns of the first input
    changed = operator(values, moves.clone(), PLAN.out_widths)
    assert all(map(torch.equal, operator(values, moves, PLAN.out_widths), changed))


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled(values: list[Tensor], mode: str | None) -> None:
    def regrouped(*inputs: Tensor) -> list[Tensor]:
        return regroup_values(inputs, PLAN)

    compiled = torch.compile(regrouped, fullgraph=True, mode=mode)
    grads = [torch.randn_like(out) for out in expected(values)]
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        outs = compiled(*values)
        got = torch.autograd.grad(outs, values, grads)
        assert all(map(torch.equal, outs, expected(values)))
        assert all(map(torch.equal, got, step(values, grads)[1]))
        with torch.no_grad():
            for value in values:
                value.normal_()


def test_every_device(device: torch.device) -> None:
    for n in range(torch.cuda.device_count()):
        place = torch.device("cuda", n)
        values = [torch.randn(40, sum(w), device=place) for _, w in LAYOUTS]
        outs = regroup_values(values, PLAN)
        assert {out.device for out in outs} == {place}
        assert all(map(torch.equal, outs, expected(values)))


def test_a_large_tensor(device: torch.device) -> None:
    """Offsets beyond 2^32 bytes and 2^31 elements."""
    rows, width = 70_000, 33_000
    if torch.cuda.mem_get_info()[0] < 4 * rows * width:
        pytest.fail("this test needs a GPU with 10 GB of free memory")
    value = torch.randint(-100, 100, (rows, width), dtype=torch.int8, device=device)
    half = width // 2
    plan = RegroupPlan.build(layouts=[(["a", "b"], [half, half])], groups=[["b", "a"]])
    (out,) = regroup_values([value], plan)
    assert torch.equal(out[:, :half], value[:, half:])
    assert torch.equal(out[:, half:], value[:, :half])
