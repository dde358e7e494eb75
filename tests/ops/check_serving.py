"""Checks the operators of the serving library, in a process that never imports the package.

    python -m tests.ops.check_serving libtorchrec_kt_serving.so [--device cuda]

Run by ``tests/test_serving.py``, with a host build of the kernel by ``tests/kernel/test_serving_build.py``,
and on a GPU by ``tests/gpu/test_serving.py``; the exit status says whether everything was right. What only the
kernel's side of the library does is in :mod:`tests.ops.check_serving_kernel`.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference import ALL_DTYPES, apply_moves, regroup_reference

DEVICE = torch.device("cpu")

LAYOUTS = [(["a", "b"], [3, 5]), (["c", "d"], [2, 4])]
KEYS, WIDTHS = [list(k) for k, _ in LAYOUTS], [list(w) for _, w in LAYOUTS]
GROUPS = [["a", "c", "a"], ["d", "b"], []]
OUT_WIDTHS = [8, 9, 0]


def plan(groups: Any = GROUPS) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    return torch.ops.torchrec_kt.kt_regroup_arguments(torch.empty(0, device=DEVICE), KEYS, WIDTHS, groups)


def values(batch: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [filled((batch, sum(w)), dtype) for w in WIDTHS]


def filled(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        numbers = torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    else:
        numbers = torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
    return numbers.to(DEVICE)


def rows_of(moves: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(moves, dtype=torch.int32).reshape(-1, 5).to(DEVICE)


def expected_of(given: Sequence[Tensor], groups: Any = GROUPS, **more: Any) -> list[Tensor]:
    return regroup_reference([v.cpu() for v in given], LAYOUTS, groups, **more)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected), (len(found), len(expected))
    for a, b in zip(found, expected):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.is_contiguous()
        assert a.device.type == DEVICE.type
        assert torch.equal(bits(a.cpu()), bits(b.cpu())), (a, b)


def refuses(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call()


def check_copies() -> None:
    ops = torch.ops.torchrec_kt
    for dtype in ALL_DTYPES:
        for batch in (0, 1, 7, 300):
            given = values(batch, dtype)
            expected = expected_of(given)
            permutes, in_shapes, out_shapes, out_widths = plan()
            assert out_widths == OUT_WIDTHS
            assert_same(ops.regroup(given, permutes, out_widths), expected)
            assert_same(ops.regroup(given, permutes[:, :5], out_widths), expected)
            assert_same(
                ops.permute_multi_embedding(given, permutes, in_shapes, out_shapes, out_widths), expected
            )
            assert_same(ops.regroup_by_keys(given, KEYS, WIDTHS, GROUPS), expected)
            assert_same(ops.regroup_keyed_tensor(given, KEYS, WIDTHS, GROUPS), expected)


def check_shapes_and_strides() -> None:
    op = torch.ops.torchrec_kt.regroup_by_keys
    for shape, key_dim in [
        ((0,), 0), ((0, 4), 0), ((4, 0), -1), ((2, 0, 3), 1), ((2, 3, 0), 2), ((2, 3, 0, 2), -2), ((1, 1, 0), 2),
    ]:  # fmt: skip
        dim = key_dim % len(shape)
        for case in ("packed", "padded", "transposed", "rows apart", "columns apart", "expanded"):
            given: list[Tensor] = []
            for row in WIDTHS:
                size = list(shape)
                size[dim] = sum(row) + (3 if case == "padded" else 0)
                if case == "transposed":
                    value = filled(size[::-1], torch.float32).permute(*reversed(range(len(size))))
                elif case in ("rows apart", "columns apart"):
                    along = 0 if case == "rows apart" else len(size) - 1
                    size[along] *= 2
                    value = filled(size, torch.float32)
                    value = value.narrow(along, 0, size[along] // 2) if along != dim else value
                    value = value.unflatten(along, (-1, 2)).select(along + 1, 1) if along == dim else value
                elif case == "expanded":
                    rest = [1 if d != dim else n for d, n in enumerate(size)]
                    value = filled(rest, torch.float32).expand(size)
                else:
                    value = filled(size, torch.float32)
                given.append(value)
            expected = expected_of(given, key_dim=key_dim)
            assert_same(op(given, KEYS, WIDTHS, GROUPS, key_dim), expected)


def check_types() -> None:
    permutes, _, _, widths = plan()
    for first, second in [
        ("float32", "float16"), ("int64", "float32"), ("complex64", "float64"), ("float16", "bfloat16"),
        ("int32", "float16"), ("float32", "float32"), ("float64", "bfloat16"), ("complex32", "complex64"),
        ("int8", "int8"), ("float8_e4m3fn", "float8_e4m3fn"), ("bool", "uint8"),
    ]:  # fmt: skip
        given = [values(4, getattr(torch, first))[0], values(4, getattr(torch, second))[1]]
        for dtype in (None, torch.float16, torch.float32, torch.float64, torch.int64, torch.complex128):
            if dtype is not None and not dtype.is_complex and given[0].is_complex():
                continue
            expected = expected_of(given, dtype=dtype)
            assert_same(torch.ops.torchrec_kt.regroup(given, permutes, widths, 1, dtype), expected)
    # Types that torch does not promote have a target, or none.
    given = [values(4, torch.float8_e5m2)[0], values(4, torch.bfloat16)[1]]
    assert_same(
        torch.ops.torchrec_kt.regroup(given, permutes, widths, 1, torch.float32),
        expected_of(given, dtype=torch.float32),
    )
    # Whole numbers that a half does not hold.
    given = [torch.full((4, 8), 70001, device=DEVICE), values(4, torch.float16)[1]]
    assert_same(
        torch.ops.torchrec_kt.regroup(given, permutes, widths, 1, torch.float32),
        expected_of(given, dtype=torch.float32),
    )


def check_sums_and_gaps() -> None:
    op = torch.ops.torchrec_kt.regroup
    moves = rows_of([[0, 0, 0, 1, 3], [0, 0, 2, 2, 3], *[[0, 0, 0, 1, 2]] * 298])
    given = [torch.ones(2, 5, dtype=torch.bfloat16, device=DEVICE)]
    # Additions of one stall at 256 in bfloat16; 299, summed in float32, rounds to 300.
    expected = [[0, 300, 300, 2, 1, 0]]
    assert op(given, moves, [6])[0].tolist() == [*expected, *expected]
    assert op([given[0].bool()], moves, [6])[0].tolist() == [[False, True, True, True, True, False]] * 2
    generator = random.Random(0)
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.complex64,
        torch.complex32, torch.float8_e5m2,
    ):  # fmt: skip
        for _ in range(30):
            moves = random_moves(generator)
            given = [
                torch.randint(-2, 3, (3, 8)).to(dtype).to(DEVICE) for _ in range(2)
            ]  # whose sums are exact
            assert_same(op(given, rows_of(moves), [10, 10]), summed(given, moves, [10, 10], dtype))
            target = torch.complex128 if dtype.is_complex else torch.float64
            assert_same(
                op(given, rows_of(moves), [10, 10], 1, target), summed(given, moves, [10, 10], target)
            )
    # In the order stated, in float32.
    moves = [[0, 0, at, 2, 5] for at in (3, 1, 0, 2, 1, 3)]
    for dtype in (torch.float32, torch.float16, torch.complex64):
        given = [filled((6, 8), dtype)]
        sums = torch.float32 if dtype == torch.float16 else dtype
        assert_same(op(given, rows_of(moves), [9]), summed(given, moves, [9], dtype, sums))
    # Of whole inputs, which stay as they are.
    for dtype in (torch.float32, torch.float16, torch.int64, torch.uint8):
        given = [filled((3, 4), dtype) for _ in range(2)]
        before, both = [v.clone() for v in given], [[0, 0, 0, 0, 4], [1, 0, 0, 0, 4]]
        assert_same(op(given, rows_of(both), [4]), summed(before, both, [4], dtype))
        assert_same(given, before)
    # Of integers and halves: not as halves.
    given = [torch.tensor([[2049, 4097]], device=DEVICE), torch.tensor([[1.0, 3.0]], device=DEVICE).half()]
    moves = rows_of([[0, 0, 0, 0, 2], [1, 0, 0, 0, 2], [1, 0, 0, 0, 2]])
    assert op(given, moves, [2])[0].tolist() == [[2052, 4104]]


def random_moves(generator: random.Random) -> list[list[int]]:
    moves: list[list[int]] = []
    for _ in range(generator.randrange(8)):
        length = generator.randrange(5)
        start, target = generator.randrange(9 - length), generator.randrange(11 - length)
        moves.append([generator.randrange(2), generator.randrange(2), start, target, length])
    return moves


def summed(
    given: Sequence[Tensor],
    moves: Sequence[Sequence[int]],
    widths: Sequence[int],
    dtype: torch.dtype,
    sums: torch.dtype | None = None,
    key_dim: int = 1,
) -> list[Tensor]:
    sums = sums or (torch.complex128 if dtype.is_complex else torch.float64)
    given = [v.cpu() for v in given]
    return apply_moves(given, moves, widths, key_dim=key_dim, dtype=dtype, sum_dtype=sums)


def check_transposed() -> None:
    op, generator = torch.ops.torchrec_kt.regroup_transposed, random.Random(1)
    for dtype in (torch.float32, torch.bfloat16):
        for _ in range(20):
            moves = random_moves(generator)
            back = [[o, i, to, at, length] for i, o, at, to, length in moves]
            given = [torch.randint(-2, 3, (3, 10)).to(dtype).to(DEVICE) for _ in range(2)]
            assert_same(op(given, rows_of(moves), [8, 8]), summed(given, back, [8, 8], dtype))
    permutes, _, _, widths = plan()
    given = [filled((2, w, 3), torch.float32) for w in widths]
    back = [[o, i, to, at, length] for i, o, at, to, length, _ in permutes.tolist()]
    assert_same(
        op(given, permutes, [8, 6], -2), summed(given, back, [8, 6], torch.float32, torch.float32, -2)
    )
    refuses(lambda: op(given[:1], permutes, [8, 6], 1), "there are 1 inputs and 2 outputs")
    refuses(lambda: op(given, permutes, [8, 5], 1), "which has 5 columns")


def check_refusals() -> None:
    ops, given = torch.ops.torchrec_kt, values()
    permutes, in_shapes, out_shapes, widths = plan()
    for field, value in [(0, 2), (0, -1), (1, 3), (1, -1), (2, 7), (2, -1), (3, 9), (3, -1), (4, 99), (4, -1),
                         (2, 2**31 - 1), (3, 2**31 - 1), (4, 2**31 - 1), (4, -(2**31))]:  # fmt: skip
        hostile = permutes.clone()
        hostile[0, field] = value
        refuses(lambda: ops.regroup(given, hostile, widths), "row 0 of the plan")  # noqa: B023
        refuses(
            lambda: ops.permute_multi_embedding(given, hostile, in_shapes, out_shapes, widths),  # noqa: B023
            "row 0 of the plan",
        )
    refuses(lambda: ops.regroup([], permutes, widths), "got no value tensors")
    refuses(
        lambda: ops.permute_multi_embedding(given[:1], permutes, in_shapes, out_shapes, widths), "in_shapes"
    )
    refuses(lambda: ops.permute_multi_embedding(given, permutes, in_shapes, out_shapes, [8, 9]), "out_shapes")
    refuses(lambda: ops.regroup_by_keys([given[0][:2], given[1]], KEYS, WIDTHS, GROUPS), "shape [3, 6]")
    refuses(lambda: ops.regroup(given[:1], permutes, widths), "there are 1 inputs")
    refuses(lambda: ops.regroup(given, permutes.long(), widths), "expected int32")
    refuses(lambda: ops.regroup(given, permutes[:, :4], widths), "shape [5, 4]")
    refuses(lambda: ops.regroup(given, permutes[0], widths), "expected int32")
    refuses(lambda: ops.regroup(given, permutes, [-1, 9, 0]), "the width of output 0 is -1")
    refuses(lambda: ops.regroup(given, permutes, [7, 9, 0]), "which has 7 columns")
    refuses(lambda: ops.regroup([given[0][:2], given[1]], permutes, widths), "shape [3, 6]")
    refuses(lambda: ops.regroup([given[0][:, :6], given[1]], permutes, widths), "which has 6 columns")
    refuses(lambda: ops.regroup(given, permutes, widths, 2), "which has 0 columns")
    refuses(lambda: ops.regroup(given, permutes[:0], widths, 2), "key_dim is 2")
    refuses(
        lambda: ops.regroup_keyed_tensor([given[0][None], given[1]], KEYS, WIDTHS, GROUPS), "[batch, width]"
    )
    refuses(lambda: ops.regroup_by_keys(given, KEYS, WIDTHS, [["zz"]]), "'zz'")
    refuses(lambda: ops.regroup_by_keys(given, [["a", "b"], ["a", "d"]], WIDTHS, GROUPS), "more than once")
    refuses(lambda: ops.regroup_by_keys(given, KEYS, [[3], [2, 4]], GROUPS), "2 keys but 1 widths")
    refuses(lambda: ops.regroup_by_keys(given, KEYS, [[3, -5], [2, 4]], GROUPS), "width -5")
    refuses(lambda: ops.regroup_by_keys(given[:1], KEYS, WIDTHS, GROUPS), "2 lists of keys")
    refuses(lambda: ops.regroup_by_keys(given, KEYS, WIDTHS[:1], GROUPS), "1 lists of lengths")
    # What no row uses is not looked at.
    used_only = [given[0], torch.empty(9)]
    assert_same(ops.regroup_by_keys(used_only, KEYS, WIDTHS, [["b"]]), [given[0][:, 3:]])
    nothing = rows_of([[0, 0, 3, 0, 5], [1, 0, 0, 5, 0]])  # nor what a row of no columns names
    assert_same(ops.regroup(used_only, nothing, [5]), [given[0][:, 3:]])


def check_plans_are_told_apart() -> None:
    op, given = torch.ops.torchrec_kt.regroup_by_keys, values()
    for _ in range(2):
        for n in range(100):  # more than are kept
            key = f"k{n}"
            assert_same(op(given, [[key, "b"], ["c", "d"]], WIDTHS, [[key]]), [given[0][:, :3]])
            assert_same(op(given, [["b", key], ["c", "d"]], WIDTHS, [[key]]), [given[0][:, 3:]])
    assert_same(op(given, [["a:b", "c"], ["x", "y"]], WIDTHS, [["c"]]), [given[0][:, 3:]])
    assert_same(op(given, [["a", "b:c"], ["x", "y"]], WIDTHS, [["a"]]), [given[0][:, :3]])


CHECKS = (
    check_copies,
    check_shapes_and_strides,
    check_types,
    check_sums_and_gaps,
    check_transposed,
    check_refusals,
    check_plans_are_told_apart,
)


def main(checks: Sequence[Callable[[], None]] = CHECKS) -> str:
    """Run the checks on the library and the device that the command line names; the former."""
    global DEVICE
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--device", type=torch.device, default=DEVICE)
    arguments = parser.parse_args()
    DEVICE = arguments.device
    torch.manual_seed(0)
    torch.ops.load_library(arguments.library)
    for check in checks:
        check()
    assert not any(name.split(".")[0] == "torchrec_kt" for name in sys.modules)
    return arguments.library


if __name__ == "__main__":
    main()
