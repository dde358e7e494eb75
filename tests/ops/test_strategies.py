"""Each way to move columns, forced, on maps with gaps and sums, against one move after the other."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.layouts import column_maps
from tests.reference import (
    STRIDES,
    apply_moves,
    assert_independent,
    assert_same,
    distinct,
    poison,
    random_values,
    same_bytes,
)
from torchrec_kt.ops import _memory, cost, torch_impl
from torchrec_kt.ops.plan import ColumnMap, RegroupPlan
from torchrec_kt.ops.torch_impl import TensorMeta, compile_map

Forced = Literal["slices", "columns", "rows", "composite"]
MOVERS: tuple[Forced, ...] = ("slices", "columns", "rows")
STRATEGIES: tuple[Forced, ...] = (*MOVERS, "composite")

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SAME_DTYPE = (*FLOATS, torch.int64, torch.int8, torch.complex64)


def metas(values: Sequence[Tensor]) -> list[TensorMeta]:
    return [TensorMeta(tuple(v.shape), v.dtype, v.device) for v in values]


def run(
    column_map: ColumnMap,
    values: Sequence[Tensor],
    dtype: torch.dtype,
    key_dim: int = 1,
    strategy: Forced | None = None,
) -> list[Tensor]:
    return compile_map(column_map, metas(values), dtype, key_dim, strategy)(list(values))


def expected(
    column_map: ColumnMap, values: Sequence[Tensor], dtype: torch.dtype, key_dim: int = 1
) -> list[Tensor]:
    """For values whose sums are exact in double precision."""
    exact = torch.complex128 if any(v.is_complex() for v in values) or dtype.is_complex else torch.float64
    if not any(v.is_floating_point() or v.is_complex() for v in values) and not dtype.is_complex:
        exact = torch.int64
    return apply_moves(
        values, column_map.moves, column_map.out_widths, key_dim=key_dim, dtype=dtype, sum_dtype=exact
    )


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No way around several blocks of rows."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("expected several blocks of rows")

    monkeypatch.setattr(torch_impl, "_rows_at_once", refuse)


class Sample(NamedTuple):
    column_map: ColumnMap
    values: list[Tensor]
    dtype: torch.dtype
    key_dim: int


@st.composite
def samples(
    draw: st.DrawFn,
    *,
    rows: st.SearchStrategy[int],
    ranks: Sequence[tuple[int, int]] = ((2, 1),),
    casts: bool = True,
) -> Sample:
    """``ranks`` are pairs of rank and key_dim."""
    column_map = draw(column_maps())
    rank, key_dim = draw(st.sampled_from(list(ranks)))
    batch = [draw(rows), 2, 3][: rank - 1]
    dtype = draw(st.sampled_from(SAME_DTYPE))
    values: list[Tensor] = []
    for n, width in enumerate(column_map.in_widths):
        shape = list(batch)
        shape.insert(key_dim, width + draw(st.sampled_from((0, 0, 1, 4))))
        # Casts to and among these are exact for small whole numbers.
        given_dtype = draw(st.sampled_from((dtype, *FLOATS))) if casts and dtype in FLOATS else dtype
        stride = STRIDES[draw(st.sampled_from(sorted(STRIDES)))]
        values.append(stride(distinct(shape, given_dtype, start=1 + 5 * n)))
    return Sample(column_map, values, dtype, key_dim)


FEW_ROWS = st.sampled_from((0, 1, 2, 7, 64))
ANY_RANK = ((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 1), (4, 3))


def check(sample: Sample, strategy: Forced | None) -> None:
    column_map, values, dtype, key_dim = sample
    before = [v.clone() for v in values]
    outs = run(column_map, values, dtype, key_dim, strategy)
    assert_same(outs, expected(column_map, values, dtype, key_dim))
    assert_independent(outs, values)
    assert all(torch.equal(a, b) for a, b in zip(values, before))


@given(samples(rows=FEW_ROWS, ranks=ANY_RANK))
def test_slices(sample: Sample) -> None:
    check(sample, "slices")


@given(samples(rows=FEW_ROWS, ranks=ANY_RANK, casts=False))
def test_columns(sample: Sample) -> None:
    check(sample, "columns")


@given(
    samples(rows=st.sampled_from((1, 2, 7, 64)), ranks=ANY_RANK, casts=False),
    st.sampled_from((16, 100, 4 << 20)),
)
@settings(max_examples=200)
def test_columns_of_several_inputs_joined(sample: Sample, scratch: int) -> None:
    """With a premium on joining whatever can be, a few rows at a time where the scratch buffer is small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "COLUMNS", cost.COLUMNS._replace(range=-1e9))
        patch.setattr(cost, "SCRATCH_BYTES", scratch)
        check(sample, "columns")


def joining(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Notes how many ranges of columns and how many rows each selection reads."""
    seen: list[tuple[int, int]] = []
    select = torch_impl._select

    def noting(sources: list[Tensor], *rest: Any) -> None:
        seen.append((len(sources), sources[0].shape[0]))
        select(sources, *rest)

    monkeypatch.setattr(torch_impl, "_select", noting)
    return seen


def test_gradients_of_alternating_keys_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A selection for each input of the forward, not one for each key."""
    keys = [f"k{n}" for n in range(60)]
    plan = RegroupPlan.build([(keys[:30], [7] * 30), (keys[30:], [13] * 30)], [keys[g::3] for g in range(3)])
    values = [distinct((64, w), torch.float32, start=n) for n, w in enumerate(plan.out_widths)]
    seen = joining(monkeypatch)
    transposed = Sample(plan.column_map.transpose(), values, torch.float32, 1)
    check(transposed, "columns")
    assert seen == [(3, 64), (3, 64)]
    # Room for 50 rows of the first, 26 of the second.
    seen.clear()
    monkeypatch.setattr(cost, "SCRATCH_BYTES", 50 * 30 * 7 * 4)
    check(transposed, "columns")
    assert seen == [(3, 50), (3, 14), (3, 26), (3, 26), (3, 12)]


def test_granules_at_the_grain_are_taken_in_two_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither would several threads take one each, nor share each."""
    monkeypatch.setattr(torch_impl, "_GRAIN", 7 * 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    plan = RegroupPlan.build(
        [([f"k{n}" for n in range(40)], [4] * 40)], [[f"k{n}" for n in range(39, -1, -1)]]
    )
    seen = joining(monkeypatch)
    for rows, wanted in ((7, [(1, 4), (1, 3)]), (6, [(1, 6)]), (8, [(1, 8)])):
        seen.clear()
        check(Sample(plan.column_map, [distinct((rows, 160), torch.float32)], torch.float32, 1), "columns")
        assert seen == wanted


@given(samples(rows=FEW_ROWS))
def test_rows(sample: Sample) -> None:
    assume(sample.column_map.used_inputs)
    check(sample, "rows")


@given(samples(rows=FEW_ROWS, ranks=ANY_RANK))
def test_composite(sample: Sample) -> None:
    column_map, values, dtype, key_dim = sample
    outs = run(column_map, values, dtype, key_dim, "composite")
    assert_same(outs, expected(column_map, values, dtype, key_dim))
    assert all(out.is_contiguous() for out in outs)


@given(samples(rows=FEW_ROWS, ranks=ANY_RANK))
def test_whatever_is_chosen(sample: Sample) -> None:
    check(sample, None)


@given(samples(rows=st.sampled_from((1, 2, 7, 64, 131))), st.sampled_from((1, 2, 3, 5, 63, 64)))
def test_rows_in_several_blocks(sample: Sample, block: int) -> None:
    column_map, _, dtype, _ = sample
    assume(column_map.used_inputs)
    used = sum(column_map.in_widths[i] for i in column_map.used_inputs)
    with pytest.MonkeyPatch.context() as patch:
        # Room for `block` rows, or one less where a granule of zeros joins each row.
        patch.setattr(cost, "SCRATCH_BYTES", used * dtype.itemsize * block)
        check(sample, "rows")


@pytest.mark.parametrize("scratch_rows", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("rows", [7, 64])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([["b", "d", "a"], ["c"]], id="all"),
        pytest.param([["d"], [], ["b", "b"]], id="some"),
        pytest.param([["b"], ["a"]], id="one-input"),
    ],
)
@pytest.mark.usefixtures("tiny_blocks")
def test_short_last_block(
    monkeypatch: pytest.MonkeyPatch, groups: list[list[str]], cast: bool, rows: int, scratch_rows: int
) -> None:
    plan = RegroupPlan.build([(["a", "b"], [4, 6]), (["c", "d"], [2, 8])], groups)
    dtype = torch.float64 if cast else torch.float32
    values = [distinct((rows, 10), torch.float32), distinct((rows, 10), torch.float32, start=6)]
    for column_map, given_values in (
        (plan.column_map, values),
        (
            plan.column_map.transpose(),
            [distinct((rows, w), torch.float32, start=w) for w in plan.out_widths],
        ),
    ):
        width = sum(column_map.in_widths[i] for i in column_map.used_inputs)
        scratch = (width + 2) * dtype.itemsize * scratch_rows
        monkeypatch.setattr(cost, "SCRATCH_BYTES", scratch)
        if scratch_rows >= rows and not cast:
            monkeypatch.setattr(torch_impl, "HUGE_PAGE_BYTES", 1)  # large outputs go in blocks, too
        check(Sample(column_map, given_values, dtype, 1), "rows")


def test_many_rows_need_several_blocks_at_the_real_size() -> None:
    width = 512
    rows = 2 * cost.SCRATCH_BYTES // (2 * width * 4) + 3
    plan = RegroupPlan.build([(["a", "b"], [width - 8, 8]), (["c"], [width])], [["c", "b"], ["a"]])
    values = [random_values((rows, width), torch.float32) for _ in range(2)]
    outs = run(plan.column_map, values, torch.float32, 1, "rows")
    assert torch.equal(outs[0], torch.cat([values[1], values[0][:, width - 8 :]], 1))
    assert torch.equal(outs[1], values[0][:, : width - 8])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_columns_without_a_source_are_zero_in_used_memory(strategy: Forced, rows: int) -> None:
    plan = RegroupPlan.build(
        [(["a", "b", "c"], [4, 8, 4]), (["d", "e"], [4, 4]), (["f"], [4])], [["b"], ["e"]]
    )
    transposed = plan.column_map.transpose([16, 8, 4 + 3])
    values = [random_values((rows, w), torch.float32) for w in plan.out_widths]
    wanted = [torch.zeros(rows, w) for w in (16, 8, 7)]
    wanted[0][:, 4:12], wanted[1][:, 4:] = values
    program = compile_map(transposed, metas(values), torch.float32, 1, strategy)
    for _ in range(5):
        poison(*wanted)
        assert_same(program(values), wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_map_of_zeros(strategy: Forced) -> None:
    column_map = ColumnMap([], [3], [4, 0, 2])
    values = [random_values((5, 3), torch.float32)]
    if strategy == "rows":
        strategy = "slices"  # joins the used inputs, and there are none
    wanted = [torch.zeros(5, 4), torch.zeros(5, 0), torch.zeros(5, 2)]
    poison(*wanted)
    assert_same(run(column_map, values, torch.float32, 1, strategy), wanted)


# Sums


def repeats(count: int, width: int) -> RegroupPlan:
    groups = [["a"] * (count // 2), ["b", *["a"] * (count - count // 2)]]
    return RegroupPlan.build([(["a", "b"], [width, 2])], groups)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 3), (70, 1000)])
def test_sums_are_taken_in_order(strategy: Forced, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Floating-point addition depends on the order; every strategy has the same one."""
    rows, width = shape
    transposed = repeats(9, width).column_map.transpose()
    values = [random_values((rows, w), dtype) for w in transposed.in_widths]
    wanted = apply_moves(
        values, transposed.moves, transposed.out_widths, key_dim=1, dtype=dtype, sum_dtype=dtype
    )
    backwards = apply_moves(
        values, transposed.moves[::-1], transposed.out_widths, key_dim=1, dtype=dtype, sum_dtype=dtype
    )
    assert not torch.equal(wanted[0], backwards[0])
    assert_same(run(transposed, values, dtype, 1, strategy), wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("key_dim", [0, 1])
def test_narrow_types_are_summed_in_float32_and_rounded_once(
    strategy: Forced, dtype: torch.dtype, key_dim: int
) -> None:
    if strategy == "rows" and key_dim == 0:
        strategy = "columns"
    transposed = repeats(64, 33).column_map.transpose()
    values = [random_values((7, w), torch.float32).mul(0.25).to(dtype) for w in transposed.in_widths]
    values = [v if key_dim else v.T.contiguous() for v in values]
    wanted = apply_moves(
        values, transposed.moves, transposed.out_widths, key_dim=key_dim, dtype=dtype, sum_dtype=torch.float32
    )
    assert_same(run(transposed, values, dtype, key_dim, strategy), wanted)


@pytest.mark.parametrize("strategy", ["slices", "rows", "composite"])
@pytest.mark.parametrize(
    ("given_dtype", "dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),
    ],
)
def test_sums_with_a_cast_are_taken_in_the_wider_type(
    strategy: Forced, given_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    transposed = repeats(32, 5).column_map.transpose()
    values = [random_values((9, w), given_dtype) for w in transposed.in_widths]
    sum_dtype = torch.promote_types(torch.promote_types(given_dtype, dtype), torch.float32)
    wanted = apply_moves(
        values, transposed.moves, transposed.out_widths, key_dim=1, dtype=dtype, sum_dtype=sum_dtype
    )
    assert_same(run(transposed, values, dtype, 1, strategy), wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("key_dim", [0, 1])
def test_sums_in_blocks(strategy: Forced, key_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer of the wider type holds a few rows at a time; the last block is a short one."""
    if strategy == "rows" and key_dim == 0:
        strategy = "columns"
    monkeypatch.setattr(torch_impl, "_SUM_BLOCK_ELEMENTS", 40)
    transposed = repeats(6, 11).column_map.transpose()
    values = [random_values((23, w), torch.bfloat16) for w in transposed.in_widths]
    values = [v if key_dim else v.T.contiguous() for v in values]
    wanted = apply_moves(
        values,
        transposed.moves,
        transposed.out_widths,
        key_dim=key_dim,
        dtype=torch.bfloat16,
        sum_dtype=torch.float32,
    )
    assert_same(run(transposed, values, torch.bfloat16, key_dim, strategy), wanted)


# Programs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_program_serves_any_values_of_its_shapes(strategy: Forced) -> None:
    """Compiled once, run on other data and other strides, from within inference mode and after it."""
    plan = RegroupPlan.build([(["a", "b"], [3, 5]), (["c"], [4])], [["c", "a"], ["b", "a"]])
    with torch.inference_mode():
        first = [torch.ones(6, 8), torch.ones(6, 4)]
        program = compile_map(plan.column_map, metas(first), torch.float32, 1, strategy)
        assert all(bool((out == 1).all()) for out in program(first))
    for stride in STRIDES.values():
        values = [stride(random_values((6, w), torch.float32)) for w in (8, 4)]
        wanted = [
            torch.cat([values[1], values[0][:, :3]], 1),
            torch.cat([values[0][:, 3:], values[0][:, :3]], 1),
        ]
        outs = program(values)
        assert_same(outs, wanted)
        assert not any(out.is_inference() for out in outs)


@pytest.mark.parametrize("strategy", MOVERS)
def test_programs_of_several_row_counts_share_a_map(strategy: Forced) -> None:
    """What is remembered beside the map for one number of rows must not be used for another."""
    plan = RegroupPlan.build([(["a", "b", "c"], [2, 4, 6]), (["d"], [8])], [["c", "d"], ["a", "b", "a"]])
    transposed = plan.column_map.transpose()
    for column_map in (plan.column_map, transposed):
        for rows in (5, 1, 64, 2, 63, 65, 1, 1000, 5):
            values = [distinct((rows, w), torch.float32, start=rows) for w in column_map.in_widths]
            check(Sample(column_map, values, torch.float32, 1), strategy)
            check(Sample(column_map, [v.double() for v in values], torch.float64, 1), strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_meta_inputs_give_shapes(strategy: Forced) -> None:
    plan = RegroupPlan.build([(["a", "b"], [3, 5])], [["b"], [], ["a", "a"]])
    values = [torch.empty(4, 9, device="meta", dtype=torch.float16)]
    outs = run(plan.column_map, values, torch.float64, 1, strategy)
    assert [tuple(out.shape) for out in outs] == [(4, 5), (4, 0), (4, 6)]
    assert all(out.is_meta and out.dtype == torch.float64 for out in outs)


@pytest.mark.parametrize("strategy", MOVERS)
def test_outputs_are_no_views_for_autograd(strategy: Forced) -> None:
    """Those of a program that runs inside an autograd function are modified in place by users."""
    plan = RegroupPlan.build([(["a", "b"], [4, 4]), (["c"], [8])], [["c", "a"], ["b"], ["a", "b"]])
    for rows in (1, 5):
        values = [random_values((rows, 8), torch.float32) for _ in range(2)]
        with torch.no_grad():
            outs = run(plan.column_map, values, torch.float32, 1, strategy)
        assert [out._base is None for out in outs] == [True] * 3


@pytest.mark.parametrize("strategy", ["slices", "columns", "composite"])
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.channels_last_3d])
def test_outputs_are_contiguous_for_channels_last_inputs(
    strategy: Forced, memory_format: torch.memory_format
) -> None:
    shape = (2, 6, 3, 5, 2)[: 4 if memory_format == torch.channels_last else 5]
    values = [random_values(shape, torch.float32).to(memory_format=memory_format) for _ in range(2)]
    plan = RegroupPlan.build([(["a", "b"], [2, 4]), (["c"], [6])], [["c", "a"], ["b"]])
    outs = run(plan.column_map, values, torch.float32, 1, strategy)
    assert_same(outs, [torch.cat([values[1], values[0][:, :2]], 1), values[0][:, 2:]])
    assert all(out.is_contiguous() for out in outs)


# Choice


@given(samples(rows=FEW_ROWS, ranks=ANY_RANK), st.permutations(MOVERS))
@settings(max_examples=100)
def test_a_preferred_strategy_is_taken_only_where_it_works(sample: Sample, preferred: list[Forced]) -> None:
    """With the costs replaced by a taste, everything on offer gives the right result."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "cheapest", lambda costs: next(s for s in preferred if s in costs))
        check(sample, None)


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("given_dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.uint8, torch.bool, torch.float16, torch.float32]
)
@pytest.mark.parametrize("preferred", MOVERS)
def test_casts_that_cat_refuses(
    preferred: Forced, given_dtype: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "cheapest", lambda costs: preferred if preferred in costs else "slices")
    plan = RegroupPlan.build([(["a", "b"], [3, 5]), (["c"], [4])], [["c", "a"], ["b"]])
    values = [distinct((6, 8), given_dtype), distinct((6, 4), given_dtype)]
    wanted = [torch.cat([values[1], values[0][:, :3]], 1).to(dtype), values[0][:, 3:].to(dtype)]
    outs = run(plan.column_map, values, dtype)
    assert all(same_bytes(a, b) for a, b in zip(outs, wanted))


@pytest.mark.parametrize("rows", [2, 8, 64, 2048])
@pytest.mark.parametrize("width", [1, 4, 64])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_cost_is_finite_and_one_is_chosen(rows: int, width: int, transposed: bool) -> None:
    keys = [f"k{n}" for n in range(24)]
    plan = RegroupPlan.build(
        [(keys[:12], [width] * 12), (keys[12:], [width] * 12)], [keys[::2], keys[::-3] + keys[:2]]
    )
    column_map = plan.column_map.transpose() if transposed else plan.column_map
    seen: list[dict[str, float]] = []
    values = [distinct((rows, w), torch.float32) for w in column_map.in_widths]
    with pytest.MonkeyPatch.context() as patch:
        cheapest = cost.cheapest
        patch.setattr(cost, "cheapest", lambda costs: seen.append(dict(costs)) or cheapest(costs))
        outs = run(column_map, values, torch.float32)
    assert_same(outs, expected(column_map, values, torch.float32))
    (costs,) = seen
    assert set(costs) == set(MOVERS)
    assert all(0 < c < float("inf") for c in costs.values())
    chosen = cheapest(costs)  # pyright: ignore[reportArgumentType]
    if chosen == "slices":
        assert costs["slices"] * cost.WORTH_IT <= min(costs.values())
    else:
        assert costs[chosen] == min(costs.values())
        assert costs[chosen] < costs["slices"] * cost.WORTH_IT


# Memory


class Advice(NamedTuple):
    address: int
    length: int
    advice: int


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[Advice]:
    """The calls of madvise, which are still made."""
    calls: list[Advice] = []
    original = _memory._madvise

    def madvise(address: int, length: int, advice: int) -> int:
        calls.append(Advice(address, length, advice))
        return original(address, length, advice) if original is not None else 0

    monkeypatch.setattr(_memory, "_madvise", madvise)
    return calls


def assert_advice_stays_inside(calls: Sequence[Advice], outs: Sequence[Tensor]) -> None:
    ranges = [(out.data_ptr(), out.data_ptr() + out.numel() * out.element_size()) for out in outs]
    for call in calls:
        assert call.advice == mmap.MADV_HUGEPAGE
        assert call.address % mmap.PAGESIZE == 0
        assert call.length % mmap.PAGESIZE == 0
        assert call.length > 0
        assert any(first <= call.address and call.address + call.length <= last for first, last in ranges)


@pytest.mark.parametrize("strategy", MOVERS)
@pytest.mark.parametrize("cast", [False, True])
def test_large_outputs_are_advised_once_each(strategy: Forced, cast: bool, advised: list[Advice]) -> None:
    if strategy == "columns" and cast:
        strategy = "slices"  # columns does not cast
    plan = RegroupPlan.build([(["a", "b"], [4, 1024]), (["c"], [1028])], [["b", "a"], ["a"], ["c", "b"]])
    dtype = torch.float32
    values = [distinct((1040, 1028), torch.bfloat16 if cast else dtype, start=n) for n in range(2)]
    outs = run(plan.column_map, values, dtype, 1, strategy)
    large = [out for out in outs if out.numel() * 4 >= _memory.HUGE_PAGE_BYTES]
    assert [out.shape[1] for out in large] == [1028, 2052]
    assert len(advised) == 2
    assert_advice_stays_inside(advised, large)
    assert_same(outs, expected(plan.column_map, values, dtype))


def test_advice_covers_all_but_the_ends(advised: list[Advice]) -> None:
    size = _memory.HUGE_PAGE_BYTES
    out = _memory.empty((size + 5,), torch.uint8, torch.device("cpu"))
    assert out.shape == (size + 5,)
    assert out.dtype == torch.uint8
    assert len(advised) == 1
    assert_advice_stays_inside(advised, [out])
    assert advised[0].length > size - 2 * mmap.PAGESIZE


@pytest.mark.parametrize(
    ("shape", "dtype", "device"),
    [
        ((_memory.HUGE_PAGE_BYTES - 1,), torch.uint8, "cpu"),
        ((0, _memory.HUGE_PAGE_BYTES), torch.uint8, "cpu"),
        ((_memory.HUGE_PAGE_BYTES // 8 - 1,), torch.float64, "cpu"),
        ((_memory.HUGE_PAGE_BYTES,), torch.float64, "meta"),
    ],
)
def test_no_advice_for_small_or_absent_memory(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, advised: list[Advice]
) -> None:
    out = _memory.empty(shape, dtype, torch.device(device))
    assert out.shape == shape
    assert out.dtype == dtype
    assert out.device.type == device
    assert not advised


def test_refused_or_missing_advice_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = RegroupPlan.build([(["a", "b"], [4, 1024])], [["b", "a"]])
    values = [random_values((1040, 1028), torch.float32)]
    wanted = [torch.cat([values[0][:, 4:], values[0][:, :4]], 1)]
    for madvise in (lambda *_: -1, None):
        monkeypatch.setattr(_memory, "_madvise", madvise)
        assert_same(run(plan.column_map, values, torch.float32), wanted)


def test_advice_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHREC_KT_HUGE_PAGES", "0")
    assert _memory._find_madvise() is None
    monkeypatch.setattr(_memory, "_madvise", None)
    assert "not asked for" in _memory.huge_pages()
    monkeypatch.setattr(_memory, "_madvise", lambda *_: 0)
    assert _memory.huge_pages().startswith("asked for")
    monkeypatch.setenv("TORCHREC_KT_HUGE_PAGES", "1")
    monkeypatch.setattr("sys.platform", "darwin")
    assert _memory._find_madvise() is None
