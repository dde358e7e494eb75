"""The kernel against slicing and concatenating, on whatever device there is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.reference import (
    ALL_DTYPES,
    Groups,
    Layouts,
    gradient_reference,
    poison,
    random_bits,
    regroup_reference,
    same_bytes,
)
from torchrec_kt.ops import RegroupPlan, regroup_values
from torchrec_kt.ops.kernel import _Program
from torchrec_kt.ops.plan import ColumnMap
from torchrec_kt.ops.regroup import apply_column_map

ARITHMETIC = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def _kernel_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that never reached the kernel."""
    calls: list[None] = []
    original = _Program.__call__

    def counted(self: _Program, values: list[Tensor]) -> list[Tensor]:
        calls.append(None)
        return original(self, values)

    monkeypatch.setattr(_Program, "__call__", counted)
    yield
    assert calls, "the kernel was never called"


def layouts_of(*widths: list[int]) -> Layouts:
    names = iter(f"k{n}" for n in range(10**6))
    return [([next(names) for _ in row], row) for row in widths]


def keys_of(layouts: Layouts) -> list[str]:
    return [key for keys, _ in layouts for key in keys]


def make(layouts: Layouts, rows: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [random_bits((rows, sum(widths)), dtype).to(device) for _, widths in layouts]


def check_forward(values: list[Tensor], layouts: Layouts, groups: Groups) -> None:
    outs = regroup_values(values, RegroupPlan.build(layouts=layouts, groups=groups))
    expected = regroup_reference([v.cpu() for v in values], layouts, groups)
    assert all(same_bytes(a.cpu(), b) for a, b in zip(outs, expected, strict=True))
    assert all(out.is_contiguous() and out.device == values[0].device for out in outs)


WIDTHS = {
    "128": [[128] * 6, [64] * 4],
    "16": [[16] * 13, [16] * 13],
    "1": [[1] * 70, [1] * 3],
    "odd": [[1, 3, 5, 7, 11, 13], [17, 19, 9]],
    "mixed": [[10, 4, 16, 2, 8, 6], [12, 28, 64, 1, 3]],
    "one odd among wide": [[128, 128, 3, 128], [64, 61, 64]],
}


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
def test_copies_are_exact(widths: list[list[int]], dtype: torch.dtype, device: torch.device) -> None:
    layouts = layouts_of(*widths)
    keys = keys_of(layouts)
    for rows in (1, 2, 7, 8, 9, 65):
        for groups in ([keys[::2], keys[1::2]], [keys[::-1]], [keys[:2] * 3, keys[-1:]]):
            check_forward(make(layouts, rows, dtype, device), layouts, groups)


@pytest.mark.parametrize("rows", [63, 64, 1000, 65_535, 65_536, 65_600, 200_001])
def test_many_rows(rows: int, device: torch.device) -> None:
    layouts = layouts_of([3, 4, 1], [8])
    keys = keys_of(layouts)
    check_forward(make(layouts, rows, torch.float32, device), layouts, [keys[::-1], keys[1:2]])


def test_empty_everything(device: torch.device) -> None:
    layouts = layouts_of([3, 0, 5], [0], [4])
    keys = keys_of(layouts)
    for rows in (0, 1, 5):
        check_forward(make(layouts, rows, torch.float32, device), layouts, [[keys[0]], [keys[1]], [], keys])


def _offset(t: Tensor, by: int) -> Tensor:
    buffer = torch.empty(t.numel() + by, dtype=t.dtype, device=t.device)
    view = buffer[by:].view(t.shape)
    view.copy_(t)
    return view


def _padded(t: Tensor, by: int) -> Tensor:
    wide = torch.empty(t.shape[0], t.shape[1] + by, dtype=t.dtype, device=t.device)
    wide[:, : t.shape[1]] = t
    return wide[:, : t.shape[1]]


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.t().contiguous().t(),
    "every second column": lambda t: torch.stack([t, t], 2).flatten(1)[:, ::2],
    "one row expanded": lambda t: t[:1].expand(t.shape),
    "one column expanded": lambda t: t[:, :1].expand(t.shape),
    **{f"offset by {n}": (lambda t, n=n: _offset(t, n)) for n in (1, 2, 3, 4, 5, 8)},
    **{f"rows padded by {n}": (lambda t, n=n: _padded(t, n)) for n in (1, 2, 3, 4, 8, 13)},
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("stride", STRIDES.values(), ids=STRIDES.keys())
def test_strides_and_misalignment(
    stride: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    layouts = layouts_of([16, 32, 5, 3], [8, 8])
    keys = keys_of(layouts)
    for changed in ((0,), (1,), (0, 1)):
        values = make(layouts, 19, dtype, device)
        for i in changed:
            values[i] = stride(values[i])
        check_forward(values, layouts, [keys[::2], keys[1::2]])


@pytest.mark.parametrize("dtype", ARITHMETIC, ids=str)
@pytest.mark.parametrize("repeats", [1, 2, 64])
@pytest.mark.parametrize("widths", [[[16, 8, 4], [12]], [[5, 1, 6], [3]]], ids=["even", "odd"])
def test_gradients(widths: list[list[int]], repeats: int, dtype: torch.dtype, device: torch.device) -> None:
    layouts = layouts_of(*widths)
    a, b, c, d = keys_of(layouts)
    groups = [[a] * repeats + [d], [b, a]]  # c is in no group
    values = [v.to(dtype).to(device).requires_grad_() for v in (torch.randn(21, sum(w)) for w in widths)]
    outs = regroup_values(values, RegroupPlan.build(layouts=layouts, groups=groups))
    grads = [torch.rand(out.shape).to(dtype).to(device) for out in outs]
    poison(*values)
    got = torch.autograd.grad(outs, values, grads)
    exact = gradient_reference([v.cpu() for v in values], [g.cpu() for g in grads], layouts, groups)
    for g, e in zip(got, exact, strict=True):
        # One rounding of the sum for half types; one for each term otherwise.
        ulps = 1 if dtype.itemsize == 2 else repeats + 1
        torch.testing.assert_close(
            g.cpu().double(), e, rtol=ulps * torch.finfo(dtype).eps, atol=0, msg=lambda m: f"{dtype}: {m}"
        )
    assert torch.equal(
        got[0][:, widths[0][0] + widths[0][1] :].cpu(), torch.zeros(21, widths[0][2], dtype=dtype)
    )
    assert c not in groups[0]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_gradients(dtype: torch.dtype, device: torch.device) -> None:
    layouts = layouts_of([3, 4], [5])
    a, b, c = keys_of(layouts)
    groups = [[a, a, c], [a, b]]
    values = [torch.randn(9, n, dtype=dtype).to(device).requires_grad_() for n in (7, 5)]
    outs = regroup_values(values, RegroupPlan.build(layouts=layouts, groups=groups))
    grads = [torch.randn_like(out) for out in outs]
    got = torch.autograd.grad(outs, values, [g.conj() for g in grads])
    exact = gradient_reference(
        [v.cpu() for v in values], [g.conj().resolve_conj().cpu() for g in grads], layouts, groups
    )
    for g, e in zip(got, exact, strict=True):
        torch.testing.assert_close(g.cpu().to(torch.complex128), e, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("source", ARITHMETIC, ids=str)
@pytest.mark.parametrize("target", ARITHMETIC, ids=str)
def test_casts(source: torch.dtype, target: torch.dtype, device: torch.device) -> None:
    layouts = layouts_of([16, 5, 8], [7])
    keys = keys_of(layouts)
    values = [(torch.randn(33, sum(w)) * 100).to(source).to(device) for _, w in layouts]
    values[0][0, :6] = torch.tensor(
        [float("inf"), -float("inf"), -0.0, 1e-40, 65519.0, 3e38], dtype=torch.float64
    ).to(source)
    groups = [keys[::2], keys[1::2]]
    outs = regroup_values(values, RegroupPlan.build(layouts=layouts, groups=groups), target)
    expected = regroup_reference([v.cpu() for v in values], layouts, groups)
    assert all(same_bytes(a.cpu(), b.to(target)) for a, b in zip(outs, expected, strict=True))


@pytest.mark.parametrize("key_dim", [0, 1, 2, -1])
def test_other_dimensions(key_dim: int, device: torch.device) -> None:
    layouts = layouts_of([3, 5], [4])
    keys = keys_of(layouts)
    shapes = []
    for _, widths in layouts:
        shape = [6, 2, 4]
        shape[key_dim] = sum(widths)
        shapes.append(shape)
    values = [torch.randn(shape).to(device) for shape in shapes]
    groups = [keys[::-1], keys[:1]]
    outs = regroup_values(values, RegroupPlan.build(layouts=layouts, groups=groups), key_dim=key_dim)
    expected = regroup_reference([v.cpu() for v in values], layouts, groups, key_dim=key_dim)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(outs, expected, strict=True))


def test_more_tensors_than_one_launch_reaches(device: torch.device) -> None:
    order = random.Random(0)
    layouts = layouts_of(*[[order.randint(1, 9) for _ in range(4)] for _ in range(150)])
    keys = keys_of(layouts)
    order.shuffle(keys)
    groups = [keys[n::130] for n in range(130)]
    values = make(layouts, 17, torch.float32, device)
    check_forward(values, layouts, groups)


@pytest.mark.parametrize("tensors", [100, 111])
def test_sums_over_many_tensors(tensors: int, device: torch.device) -> None:
    moves = [(i, 0, i % 3, 0, 8) for i in range(tensors)]
    column_map = ColumnMap(moves, [12] * tensors, [9])
    values = [torch.randint(-8, 8, (5, 12)).float().to(device) for _ in range(tensors)]
    (out,) = apply_column_map(values, column_map, None, 1)
    exact = torch.zeros(5, 9)
    for (_, _, offset, _, length), value in zip(moves, values):
        exact[:, :length] += value[:, offset : offset + length].cpu()
    assert torch.equal(out.cpu(), exact)


def test_random_maps(device: torch.device) -> None:
    """Any map: overlaps, gaps, any alignment. Whole numbers, so that sums are exact."""
    order = random.Random(1)
    for _ in range(150):
        n_in, n_out = order.randint(1, 4), order.randint(1, 4)
        in_widths = [order.randint(1, 60) for _ in range(n_in)]
        out_widths = [order.randint(0, 60) for _ in range(n_out)]
        moves = []
        for _ in range(order.randint(0, 12)):
            i, o = order.randrange(n_in), order.randrange(n_out)
            length = order.randint(0, min(in_widths[i], out_widths[o]))
            moves.append(
                (
                    i,
                    o,
                    order.randint(0, in_widths[i] - length),
                    order.randint(0, out_widths[o] - length),
                    length,
                )
            )
        rows = order.choice([1, 3, 8, 40])
        dtype = order.choice(ARITHMETIC)
        values = [torch.randint(-4, 5, (rows, w)).to(dtype).to(device) for w in in_widths]
        outs = apply_column_map(values, ColumnMap(moves, in_widths, out_widths), None, 1)
        for o, out in enumerate(outs):
            exact = torch.zeros(rows, out_widths[o], dtype=torch.float64)
            for i, to, start, at, length in moves:
                if to == o:
                    exact[:, at : at + length] += values[i][:, start : start + length].cpu().double()
            assert torch.equal(out.cpu().double(), exact), (moves, in_widths, out_widths, rows, dtype)
