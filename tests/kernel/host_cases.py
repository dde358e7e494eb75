"""What the operator's own tests do not reach. Run by test_host_build.py with tensors on the CPU in the kernel's hands."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference import (
    ALL_DTYPES,
    COMPLEX_DTYPES,
    REAL_DTYPES,
    STRIDES,
    apply_moves,
    assert_independent,
    assert_same,
    conjugate_view,
    distinct,
    negative_view,
    poison,
    random_bits,
    random_values,
    same_bytes,
    wide,
)
from torchrec_kt.ops import RegroupPlan, kernel, regroup_values
from torchrec_kt.ops.kernel import _MAX_TENSORS, _Program, compile_for_kernel
from torchrec_kt.ops.plan import ColumnMap
from torchrec_kt.ops.torch_impl import TensorMeta

pytestmark = pytest.mark.usefixtures("host_kernel")
WINDOW = 1 << 24
SIZES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128)  # 1, 2, 4, 8, 16 bytes
#: Copies of lengths that take vectors of every size, gaps, one piece on an even place of both sides.
MOVES = [(0, 0, 0, 0, 32), (1, 0, 3, 35, 21), (0, 1, 33, 1, 7), (1, 1, 24, 8, 16), (1, 2, 40, 5, 1)]
IN_WIDTHS, OUT_WIDTHS = [48, 41], [57, 24, 6]


@pytest.fixture
def host_kernel(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.pluginmanager.has_plugin("tests.host_kernel")


def program_for(
    values: Sequence[Tensor], column_map: ColumnMap, dtype: torch.dtype | None = None, key_dim: int = 1
) -> _Program | None:
    metas = [TensorMeta(tuple(v.shape), v.dtype, v.device) for v in values]
    program = compile_for_kernel(column_map, metas, dtype or values[0].dtype, key_dim)
    assert program is None or isinstance(program, _Program)
    return program


def apply(
    values: Sequence[Tensor], column_map: ColumnMap, dtype: torch.dtype | None = None, key_dim: int = 1
) -> list[Tensor]:
    """By the kernel, or not at all."""
    program = program_for(values, column_map, dtype, key_dim)
    assert program is not None
    outs = program(list(values))
    assert_independent(outs, values)
    return outs


def copies(values: Sequence[Tensor], column_map: ColumnMap) -> list[Tensor]:
    """Slice by slice, on bytes."""
    outs = [torch.zeros(values[0].shape[0], w, dtype=values[0].dtype) for w in column_map.out_widths]
    for i, o, at, to, length in column_map.moves:
        outs[o][:, to : to + length] = values[i][:, at : at + length]
    return outs


def check_copies(values: Sequence[Tensor], column_map: ColumnMap) -> None:
    expected = copies(values, column_map)
    poison(*expected, copies=2)
    for n, (a, b) in enumerate(zip(apply(values, column_map), expected, strict=True)):
        assert same_bytes(a, b), f"output {n} of {[(v.storage_offset(), v.stride()) for v in values]}"


def placed(rows: int, width: int, dtype: torch.dtype, offset: int, row_stride: int) -> Tensor:
    """Random bits, with no byte before or after what the strides need."""
    buffer = random_bits((offset + (rows - 1) * row_stride + width,), dtype)
    return buffer.as_strided((rows, width), (row_stride, 1), offset)


# --- strides and alignment ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SIZES, ids=str)
def test_every_misalignment(dtype: torch.dtype) -> None:
    column_map = ColumnMap(MOVES, IN_WIDTHS, OUT_WIDTHS)
    for first, second in itertools.product(range(16), (0, 1, 2, 4, 8, 11)):
        for rows, pads in ((1, (0, 0)), (2, (0, 7)), (3, (first % 5, 3)), (11, (16, 8))):
            values = [
                placed(rows, width, dtype, offset, width + pad)
                for width, offset, pad in zip(IN_WIDTHS, (first, second), pads)
            ]
            check_copies(values, column_map)


@pytest.mark.parametrize("dtype", SIZES, ids=str)
def test_every_row_stride(dtype: torch.dtype) -> None:
    column_map = ColumnMap(MOVES, IN_WIDTHS, OUT_WIDTHS)
    for pad, offset in itertools.product(range(33), (0, 4, 9)):
        values = [placed(9, width, dtype, offset, width + pad) for width in IN_WIDTHS]
        check_copies(values, column_map)


@pytest.mark.parametrize("names", list(itertools.product(STRIDES, repeat=2)), ids=" and ".join)
@pytest.mark.parametrize("dtype", SIZES, ids=str)
def test_every_kind_of_strides(dtype: torch.dtype, names: tuple[str, str]) -> None:
    column_map = ColumnMap(MOVES, IN_WIDTHS, OUT_WIDTHS)
    for rows in (1, 5, 17):
        values = [STRIDES[name](random_bits((rows, w), dtype)) for name, w in zip(names, IN_WIDTHS)]
        check_copies(values, column_map)


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize(("dtype", "target"), list(itertools.product(REAL_DTYPES, repeat=2)), ids=str)
def test_sums_and_casts_of_strides(dtype: torch.dtype, target: torch.dtype, name: str) -> None:
    moves = [*MOVES, (0, 0, 8, 4, 30), (1, 1, 0, 0, 24), (1, 2, 7, 5, 1)]
    column_map = ColumnMap(moves, IN_WIDTHS, OUT_WIDTHS)
    for rows in (1, 3, 19):
        values = [STRIDES[name](distinct((rows, w), dtype)) for w in IN_WIDTHS]
        expected = apply_moves(values, moves, OUT_WIDTHS, key_dim=1, dtype=target, sum_dtype=torch.float64)
        poison(*expected, copies=2)
        assert_same(apply(values, column_map, target), expected)


def test_strides_of_single_rows_and_columns_mean_nothing() -> None:
    column = torch.randn(3).as_strided((3, 1), (1, 2**62))
    row = torch.randn(4).as_strided((1, 4), (2**62 + 1, 1))
    check_copies([column, torch.randn(3, 4)], ColumnMap([(0, 0, 0, 0, 1), (1, 0, 0, 1, 4)], [1, 4], [5]))
    check_copies([row], ColumnMap([(0, 0, 1, 0, 3), (0, 0, 0, 3, 1)], [4], [4]))


@pytest.mark.parametrize("key_dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex64], ids=str)
def test_other_dimensions(dtype: torch.dtype, key_dim: int) -> None:
    moves = [(0, 0, 1, 0, 3), (1, 0, 0, 3, 2), (0, 1, 0, 1, 1)]
    for name in STRIDES:
        shapes = [[3, 5, 7], [3, 5, 7]]
        shapes[0][key_dim], shapes[1][key_dim] = 4, 2
        values = [STRIDES[name](distinct(shape, dtype)) for shape in shapes]
        expected = apply_moves(values, moves, [5, 2], key_dim=key_dim, dtype=dtype, sum_dtype=dtype)
        assert_same(apply(values, ColumnMap(moves, [4, 2], [5, 2]), key_dim=key_dim), expected)


# --- size ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [255, 4096, 65_535, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_many_rows(rows: int, dtype: torch.dtype) -> None:
    forward = ColumnMap([(0, 0, 0, 1, 2), (1, 0, 0, 0, 1), (1, 1, 0, 0, 1)], [2, 1], [3, 1])
    check_copies([random_bits((rows, 2), dtype), random_bits((rows, 1), dtype)], forward)
    values = [distinct((rows, w), torch.float32) for w in (3, 1)]
    back = forward.transpose([4, 1])  # with two columns that nothing moves to
    expected = apply_moves(
        values, back.moves, back.out_widths, key_dim=1, dtype=torch.float32, sum_dtype=torch.float64
    )
    assert_same(apply(values, back), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_more_tensors_than_a_launch_takes(transposed: bool) -> None:
    rng = random.Random(0)
    layouts = [([f"{i}.{n}" for n in range(4)], rng.choices((0, 1, 3, 4, 8), k=4)) for i in range(200)]
    keys = [key for names, _ in layouts for key in names]
    plan = RegroupPlan.build(layouts, [rng.choices(keys, k=rng.randrange(8)) for _ in range(200)])
    column_map = plan.column_map.transpose() if transposed else plan.column_map
    values = [distinct((5, width), torch.float32, start=i) for i, width in enumerate(column_map.in_widths)]
    expected = apply_moves(
        values,
        column_map.moves,
        column_map.out_widths,
        key_dim=1,
        dtype=torch.float32,
        sum_dtype=torch.float64,
    )
    poison(*expected, copies=4)
    program = program_for(values, column_map)
    assert program is not None
    assert_same(program(values), expected)
    header = program.variant.header
    assert header[4 + len(column_map.out_widths) + 2 * len(program.used)] > 1  # launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("count", [100, _MAX_TENSORS, _MAX_TENSORS + 1, 150])
def test_a_column_from_many_tensors(count: int, dtype: torch.dtype) -> None:
    moves = [(i, 0, i % 3, 1, 4) for i in range(count)] + [(3, 1, 0, 0, 7)]
    column_map = ColumnMap(moves, [7] * count, [6, 7])
    values = [random_values((3, 7), dtype) for _ in range(count)]
    if count <= _MAX_TENSORS:
        outs = apply(values, column_map)
    else:
        assert program_for(values, column_map) is None
        layouts = [([f"a{i}", f"b{i}"], [4, 3]) for i in range(count)]
        plan = RegroupPlan.build(layouts, [[f"a{i}"] for i in range(count)])
        assert_same(regroup_values(values, plan), [v[:, :4].contiguous() for v in values])
        outs = torch.ops.torchrec_kt.regroup(values, torch.tensor(moves, dtype=torch.int32), [6, 7])
    sums = {torch.bfloat16: torch.float32}.get(dtype, dtype)
    expected = apply_moves(values, moves, [6, 7], key_dim=1, dtype=dtype, sum_dtype=sums)
    assert_same(outs, expected)


def test_a_column_repeated_more_often_than_a_launch_has_tensors() -> None:
    moves = [(i % 2, 0, i % 5, 0, 8) for i in range(400)]
    values = [random_values((3, 12), torch.bfloat16) for _ in range(2)]
    expected = apply_moves(values, moves, [8], key_dim=1, dtype=torch.bfloat16, sum_dtype=torch.float32)
    assert_same(apply(values, ColumnMap(moves, [12, 12], [8])), expected)


def test_a_column_from_many_windows() -> None:
    """Of one tensor, which is one slot for each."""
    count = _MAX_TENSORS + 1
    moves = [(0, 0, i * WINDOW + i, 0, 4) for i in range(count)]
    width = count * WINDOW
    values = [torch.zeros(1, 1, dtype=torch.bfloat16).expand(1, width)]
    assert program_for(values, ColumnMap(moves, [width], [4])) is None
    assert_same(apply(values, ColumnMap(moves[1:], [width], [4])), [torch.zeros(1, 4, dtype=torch.bfloat16)])


@pytest.fixture
def untouched(tmp_path: Path) -> Iterator[Tensor]:
    """20 GiB of zeros that take memory only where they are written."""
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(20 << 30)
    yield torch.from_file(str(path), shared=False, size=20 << 30, dtype=torch.uint8)
    gc.collect()
    path.unlink()


@pytest.mark.parametrize("dtype", SIZES[:4], ids=str)
def test_rows_and_columns_far_apart(untouched: Tensor, dtype: torch.dtype) -> None:
    memory = untouched.view(dtype)
    far_rows = memory.as_strided(
        (3, 24), ((1 << 30) + (5 << 25), 1), 0
    )  # over 2^31 from the first to the last
    far_columns = memory.as_strided((5, 8), (3, (1 << 28) + (60 << 20)), 64)
    assert far_rows.stride(0) * 2 > 2**31
    assert far_columns.stride(1) * 7 > 2**31
    far_rows.copy_(random_bits((3, 24), dtype))
    far_columns[:3].copy_(random_bits((3, 8), dtype))
    moves = [(0, 0, 0, 0, 16), (0, 0, 17, 16, 7)]
    check_copies([far_rows], ColumnMap(moves, [24], [24]))
    check_copies([far_columns], ColumnMap([(0, 0, 5, 0, 3), (0, 1, 0, 1, 6)], [8], [3, 8]))
    if dtype.is_floating_point:
        again = [*moves, (0, 0, 1, 2, 20)]
        far_rows.copy_(distinct((3, 24), dtype))
        expected = apply_moves([far_rows], again, [24], key_dim=1, dtype=dtype, sum_dtype=torch.float64)
        assert_same(apply([far_rows], ColumnMap(again, [24], [24])), expected)


def test_output_of_more_than_2_to_the_31_elements() -> None:
    width, rows = (1 << 21) + 16, 1025  # rows of a window and more would make a map of millions of vectors
    values = [torch.arange(width, dtype=torch.int32).to(torch.uint8).expand(rows, width)]
    (out,) = apply(values, ColumnMap([(0, 0, 16, 0, width - 16)], [width], [width - 16]))
    assert out.numel() >= 2**31
    for row in (0, 1, 1022, 1023, 1024):
        assert torch.equal(out[row], values[0][0, 16:])
    assert int(out[:, ::4096].long().sum()) == int(values[0][0, 16::4096].long().sum()) * rows


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_columns_beyond_a_window(dtype: torch.dtype, offset: int) -> None:
    """Sources and destinations that cross 2^24 and twice that, together and apart."""
    near = WINDOW - 8 + offset
    in_width, rows = 2 * WINDOW + 40, 2
    source = torch.arange(in_width, dtype=torch.int32).remainder_(251).to(dtype).expand(rows, in_width)
    moves = [
        (0, 0, near, 0, 40),
        (0, 0, 2 * WINDOW - 3 * offset, 40, 31),
        (0, 0, 2 * WINDOW + 24, 71, 16),
        (0, 0, 5, 87, 9),
        (0, 0, 2 * WINDOW - 20, 96, 40),
    ]
    check_copies([source], ColumnMap(moves, [in_width], [136]))
    summed = [*moves, (0, 0, near + 3, 3, 37), (1, 0, 0, 0, 136)]
    if dtype == torch.float32:
        values = [source, random_values((rows, 136), dtype)]
        expected = apply_moves(values, summed, [136], key_dim=1, dtype=dtype, sum_dtype=dtype)
        assert_same(apply(values, ColumnMap(summed, [in_width, 136], [136])), expected)


def test_output_beyond_a_window() -> None:
    source = random_bits((1, 96), torch.uint8)
    width = WINDOW + 64
    moves = [(0, 0, 0, WINDOW - 20, 40), (0, 0, 64, WINDOW + 32, 32)]
    check_copies([source], ColumnMap(moves, [96], [width]))


def test_maps_of_many_columns_are_not_made() -> None:
    """Wherever a plan names an output of a billion columns: the map would be larger than the output."""
    values = [torch.ones(1, 8, dtype=torch.uint8)]
    moves = torch.tensor([[0, 0, 0, 5, 8]], dtype=torch.int32)
    for width in (1 << 25) + 1, 10**9:
        assert program_for(values, ColumnMap(moves.tolist(), [8], [width])) is None
    assert program_for(values, ColumnMap(moves.tolist(), [8], [1 << 25])) is not None
    (out,) = torch.ops.torchrec_kt.regroup(values, moves, [10**8])
    assert int(out[:, :100].sum()) == 8
    planes = [torch.ones(1, 8, 1 << 19, dtype=torch.uint8)]
    assert program_for(planes, ColumnMap([(0, 0, 0, 0, 8)], [8], [8])) is not None
    assert program_for(planes, ColumnMap([(0, 0, 0, 0, 8)], [8], [9])) is None


# --- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_copies_keep_every_bit(dtype: torch.dtype) -> None:
    column_map = ColumnMap(MOVES, IN_WIDTHS, OUT_WIDTHS)
    for rows in (1, 8, 37):
        check_copies([random_bits((rows, w), dtype) for w in IN_WIDTHS], column_map)


@pytest.mark.parametrize("dtype", REAL_DTYPES, ids=str)
def test_copies_beside_sums_keep_every_bit(dtype: torch.dtype) -> None:
    """Sums take another kernel, which copies too."""
    values = [random_bits((9, 48), dtype), random_values((9, 41), dtype)]
    column_map = ColumnMap([(0, 0, 0, 0, 48), (1, 1, 0, 0, 8), (1, 1, 8, 0, 8)], IN_WIDTHS, [48, 8])
    outs = apply(values, column_map)
    assert same_bytes(outs[0], values[0])


def test_zeros_keep_their_sign() -> None:
    minus = torch.full((5, 8), -0.0)
    assert same_bytes(apply([minus], ColumnMap([(0, 0, 0, 0, 8)], [8], [8]))[0], minus)
    for target in REAL_DTYPES:  # casts, and a sum of one term beside one of two
        outs = apply(
            [minus], ColumnMap([(0, 0, 0, 0, 8), (0, 1, 0, 0, 8), (0, 1, 0, 0, 4)], [8], [9, 8]), target
        )
        for out in outs:
            assert same_bytes(out[:, :8].contiguous(), minus.to(target))
        assert same_bytes(
            outs[0][:, 8:].contiguous(), torch.zeros(5, 1, dtype=target)
        )  # no source: plus zero


def borders(dtype: torch.dtype) -> Tensor:
    """Around every number of a 16-bit type, and half way to its neighbours, in another type."""
    exact = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).double()
    exact = exact[exact.isfinite()]
    ordered = exact.unique()
    middle = (ordered[1:] + ordered[:-1]) / 2
    top = ordered[-1:] + (ordered[-1:] - ordered[-2:-1]) / 2
    points = torch.cat([ordered, middle, top, -top, torch.tensor([float("inf"), -float("inf"), 0.0, -0.0])])
    return torch.cat([points, points * (1 + 2**-23), points * (1 - 2**-23), points * (1 + 2**-50)])


@pytest.mark.parametrize(("dtype", "target"), list(itertools.product(REAL_DTYPES, repeat=2)), ids=str)
def test_casts_round_as_torch_does(dtype: torch.dtype, target: torch.dtype) -> None:
    numbers = torch.cat([borders(torch.float16), borders(torch.bfloat16), torch.randn(4096).double()]).to(
        dtype
    )
    numbers = numbers[: numbers.numel() // 32 * 32].reshape(-1, 32)
    outs = apply([numbers], ColumnMap([(0, 0, 0, 0, 29), (0, 0, 29, 32, 3)], [32], [35]), target)
    assert same_bytes(outs[0][:, :29].contiguous(), numbers[:, :29].to(target))
    assert same_bytes(outs[0][:, 32:].contiguous(), numbers[:, 29:].to(target))
    nan = torch.full((3, 4), float("nan"), dtype=dtype)
    assert apply([nan], ColumnMap([(0, 0, 0, 0, 4)], [4], [4]), target)[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_types_have_exact_values_in_wider_ones(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)
    out = apply([every], ColumnMap([(0, 0, 0, 0, 256)], [256], [256]), torch.float64)[0]
    assert torch.equal(out.nan_to_num(nan=12345.0), every.double().nan_to_num(nan=12345.0))
    assert torch.equal(out.isnan(), every.isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("repeats", [2, 3, 7, 64])
def test_sums_of_halves_are_rounded_once(dtype: torch.dtype, repeats: int) -> None:
    """In float32, where these sums are exact."""
    exact = 1023 if dtype == torch.float16 else 127  # numerators that the type has bits for, signs apart
    values = [(torch.randint(-exact, exact + 1, (21, 24)) / 2 ** (i % 4)).to(dtype) for i in range(repeats)]
    moves = [(i, 0, 0, 1, 24) for i in range(repeats)]
    total = torch.stack([wide(v) for v in values]).sum(0)
    out = apply(values, ColumnMap(moves, [24] * repeats, [25]))[0]
    assert torch.equal(out[:, 1:], total.to(dtype))
    assert not out[:, 0].any()
    step_by_step = values[0]
    for value in values[1:]:
        step_by_step = step_by_step + value
    assert repeats < 7 or not torch.equal(step_by_step, total.to(dtype))  # so rounding often would show


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *COMPLEX_DTYPES], ids=str)
def test_sums_are_taken_in_the_order_of_the_moves(dtype: torch.dtype) -> None:
    values = [random_values((6, 12), dtype) for _ in range(9)]
    moves = [(i, 0, i % 4, 2, 8) for i in (3, 1, 4, 1, 5, 2, 6, 8, 7, 0)]
    sums = torch.complex64 if dtype == torch.complex32 else dtype
    expected = apply_moves(values, moves, [11], key_dim=1, dtype=dtype, sum_dtype=sums)
    assert_same(apply(values, ColumnMap(moves, [12] * 9, [11])), expected)


@pytest.mark.parametrize(("dtype", "target"), list(itertools.product(REAL_DTYPES, repeat=2)), ids=str)
def test_sums_are_taken_in_the_wider_type(dtype: torch.dtype, target: torch.dtype) -> None:
    """In float64 where either side is, else in float32; narrower types are not what is added in."""
    values = [random_values((6, 12), dtype) * 10 ** (n % 3) for n in range(7)]
    moves = [(i, 0, 1, 2, 8) for i in range(7)]
    sums = torch.float64 if torch.float64 in (dtype, target) else torch.float32
    expected = apply_moves(values, moves, [11], key_dim=1, dtype=target, sum_dtype=sums)
    assert_same(apply(values, ColumnMap(moves, [12] * 7, [11]), target), expected)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("repeats", [1, 2])
def test_whole_numbers_beside_halves_are_not_rounded_first(half: torch.dtype, repeats: int) -> None:
    values = [torch.tensor([[70001, 2049, 257]]), torch.tensor([[1.0, 3.0, 5.0]]).to(half)]
    moves = [(i, 0, 0, 3 * i if repeats == 1 else 0, 3) for i in range(2)]
    for target in (half, torch.float32, torch.float64):
        expected = apply_moves(values, moves, [6], key_dim=1, dtype=target, sum_dtype=torch.float64)
        assert_same(apply(values, ColumnMap(moves, [3, 3], [6]), target), expected)


@pytest.mark.parametrize(("dtype", "target"), list(itertools.product(COMPLEX_DTYPES, repeat=2)), ids=str)
def test_complex_casts(dtype: torch.dtype, target: torch.dtype) -> None:
    values = [random_values((6, 12), dtype)]
    for view in (lambda v: v, torch.conj):
        (out,) = apply([view(values[0])], ColumnMap([(0, 0, 1, 1, 11)], [12], [12]), target)
        assert same_bytes(
            out[:, 1:].contiguous(), view(values[0])[:, 1:].resolve_conj().to(target).contiguous()
        )


# --- nothing to do --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_nothing_to_move(shape: tuple[int, int]) -> None:
    plan = RegroupPlan.build([(["a", "b"], [shape[1] // 2] * 2)], [["b"], [], ["a", "a"]])
    outs = regroup_values([torch.empty(shape)], plan)
    assert [tuple(o.shape) for o in outs] == [(shape[0], w) for w in plan.out_widths]


def test_operator_without_rows_or_outputs() -> None:
    def encoded(pieces: list[int], tensors: int) -> tuple[Tensor, Tensor]:
        return torch.ops.torchrec_kt._encode_map(
            torch.tensor(pieces), torch.zeros(tensors, dtype=torch.int64), 2
        )

    call = torch.ops.torchrec_kt._apply_map
    assert call([torch.ones(3, 2)], *encoded([1, 0], 1), -1) == []
    outs = call([torch.ones(3, 2)], *encoded([1, 2, 0, 0], 3), -1)
    assert [tuple(o.shape) for o in outs] == [(3, 0), (3, 0)]
    outs = call([torch.ones(0, 2)], *encoded([1, 1, 2, 0, 0, 2, 1, 0, 0], 2), -1)
    assert [tuple(o.shape) for o in outs] == [(0, 2)]
    outs = call([torch.ones(3, 0), torch.ones(3, 2)], *encoded([2, 1, 2, 0, 0, 2, 1, 1, 0], 3), -1)
    assert torch.equal(outs[0], torch.ones(3, 2))


def lazy_zeros(t: Tensor) -> Tensor:
    return torch._efficientzerotensor(t.shape, dtype=t.dtype)


def padded_negative(t: Tensor) -> Tensor:
    """Rows of this view are aligned better than those of the tensor that torch makes of it."""
    return torch._neg_view(torch.cat([t, t[:, :2]], 1))[:, : t.shape[1]]


@pytest.mark.parametrize(
    "lazy", [lazy_zeros, negative_view, padded_negative, lambda t: conjugate_view(t * 1j)]
)
@pytest.mark.parametrize("width", [4, 6])
def test_tensors_that_torch_computes_on_the_way(lazy: Callable[[Tensor], Tensor], width: int) -> None:
    column_map = ColumnMap([(0, 0, 0, 0, width), (1, 0, 0, 8, 8)], [width, 8], [16])
    special = lazy(distinct((3, width), torch.float32))
    plain = distinct((3, 9), special.dtype)
    for values in (
        [special, plain[:, :8].contiguous()],
        [special, plain[:, 1:]],
        [special, torch.cat([special, special], 1)],
    ):
        program = program_for(values, column_map)
        assert program is not None
        gap = torch.zeros(3, 8 - width, dtype=special.dtype)
        expected = torch.cat([values[0] + 0, gap, values[1][:, :8]], 1)
        assert_same(program(values), [expected])


def test_variants_for_alignments_are_bounded() -> None:
    column_map = ColumnMap([(0, 0, 0, 0, 16), (1, 0, 0, 16, 16), (2, 0, 0, 32, 16)], [16] * 3, [48])
    for offsets in itertools.product((0, 1, 2, 4, 8), repeat=3):
        check_copies([placed(2, 16, torch.uint8, o, 16 * (1 + o)) for o in offsets], column_map)
    assert 1 < len(column_map.recipes["kernel"]) <= 32


def test_dropped_maps_live_until_their_device_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice:
        device, nbytes = torch.device("cuda", 1), 8

    on_device: Any = OnDevice()
    waits: list[torch.device] = []

    def wait(device: torch.device) -> None:
        assert on_device in kernel._dropped
        waits.append(device)

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    gc.collect()
    kernel._dropped[:] = [on_device]
    values = [torch.randn(2, 8)]
    encoded: list[weakref.ref[Tensor]] = []
    for n in range(kernel._MAX_DROPPED + 2):
        program = program_for(values, ColumnMap([(0, 0, 0, 0, 1 + n % 8)], [8], [9 + n]))
        assert program is not None
        encoded.append(weakref.ref(program.variant.encoded))
        del program
        freed = n >= kernel._MAX_DROPPED
        assert [reference() is None for reference in encoded[:-2]] == [freed] * (len(encoded) - 2)
        assert waits == [OnDevice.device] * freed


def test_many_bytes_of_dropped_maps_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_MAX_DROPPED_BYTES", 1000)
    gc.collect()
    kernel._dropped.clear()
    values = [torch.randn(2, 1001)]
    for n in range(20):
        assert program_for(values, ColumnMap([(0, 0, 0, 0, 1001)], [1001], [1001 + n])) is not None
        assert len(kernel._dropped) <= 2


# --- the call -------------------------------------------------------------------------------------------


def allocated(run: Callable[[], object]) -> list[int]:
    """Sizes of the tensors that a call allocates, and that live on after it as its result."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        result = run()
    events: Any = profile.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    del result
    return sorted(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_allocate_their_outputs_alone(dtype: torch.dtype) -> None:
    """No copy of an input, whatever its strides; no map; forward, and backward with sums."""
    column_map = ColumnMap([*MOVES, (1, 1, 0, 3, 9)], IN_WIDTHS, OUT_WIDTHS)
    for name in ("contiguous", "padded rows", "transposed", "offset", "expanded rows"):
        for program_map in (column_map, column_map.transpose()):
            values = [STRIDES[name](random_values((5, w), dtype)) for w in program_map.in_widths]
            program = program_for(values, program_map)
            assert program is not None
            program(values)
            sizes = allocated(partial(program, values))
            assert sizes == sorted(5 * w * dtype.itemsize for w in program_map.out_widths)


def test_casts_allocate_their_outputs_alone() -> None:
    values = [torch.randn(5, w) for w in IN_WIDTHS]
    program = program_for(values, ColumnMap(MOVES, IN_WIDTHS, OUT_WIDTHS), torch.bfloat16)
    assert program is not None
    program(values)
    assert allocated(partial(program, values)) == sorted(5 * w * 2 for w in OUT_WIDTHS)
