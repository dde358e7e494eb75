"""The slow, obvious regroup that tests compare with, and makers of awkward tensors.

Nothing here uses the package under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Layouts = Sequence[tuple[Sequence[Any], Sequence[int]]]
Groups = Sequence[Sequence[Any]]

REAL_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FLOAT8_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
COMPLEX_DTYPES = (torch.complex32, torch.complex64, torch.complex128)
INTEGER_DTYPES = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
ALL_DTYPES = (*REAL_DTYPES, *FLOAT8_DTYPES, *COMPLEX_DTYPES, *INTEGER_DTYPES, torch.bool)


# Regroup by name


def locate(layouts: Layouts) -> dict[Any, tuple[int, int, int]]:
    """``key -> (input, first column, width)``."""
    where: dict[Any, tuple[int, int, int]] = {}
    for i, (keys, widths) in enumerate(layouts):
        offset = 0
        for key, width in zip(keys, widths, strict=True):
            where[key] = (i, offset, width)
            offset += width
    return where


def regroup_reference(
    values: Sequence[Tensor],
    layouts: Layouts,
    groups: Groups,
    *,
    key_dim: int = 1,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Slice by key and ``torch.cat``. Everything that groups name is promoted together, as cat does."""
    where = locate(layouts)
    slices = [
        [values[i].narrow(key_dim, offset, width) for i, offset, width in map(where.__getitem__, group)]
        for group in groups
    ]
    used = [part for parts in slices for part in parts] or [values[0].narrow(key_dim, 0, 0)]
    if dtype is None:
        dtype = torch.cat(used, key_dim).dtype
    empty = used[0].narrow(key_dim, 0, 0).to(dtype)
    return [torch.cat([empty, *(part.to(dtype) for part in parts)], key_dim).contiguous() for parts in slices]


def wide(tensor: Tensor) -> Tensor:
    """The same numbers in float64 or complex128, where small sums and products are exact."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def gradient_reference(
    values: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    layouts: Layouts,
    groups: Groups,
    *,
    key_dim: int = 1,
) -> list[Tensor]:
    """Gradients of all values in double precision, by plain autograd through the slices.

    None stands for an output that the loss does not use.
    """
    leaves = [wide(v).clone().requires_grad_() for v in values]
    outs = regroup_reference(leaves, layouts, groups, key_dim=key_dim)
    pairs = [(o, wide(g).to(o.dtype)) for o, g in zip(outs, grads, strict=True) if g is not None]
    pairs = [(o, g) for o, g in pairs if o.requires_grad]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


# Maps as dense matrices of counts, inputs' columns by outputs' columns


def dense_of_groups(layouts: Layouts, groups: Groups) -> Tensor:
    """Built column by column from the names."""
    columns = [(key, n) for keys, widths in layouts for key, width in zip(keys, widths) for n in range(width)]
    width_of = {key: width for keys, widths in layouts for key, width in zip(keys, widths)}
    wanted = [(key, n) for group in groups for key in group for n in range(width_of[key])]
    matrix = torch.zeros(len(columns), len(wanted), dtype=torch.int64)
    for column, name in enumerate(wanted):
        matrix[columns.index(name), column] = 1
    return matrix


def dense_of_moves(
    moves: Iterable[Sequence[int]], in_widths: Sequence[int], out_widths: Sequence[int]
) -> Tensor:
    """``moves`` are rows ``(in_tensor, out_tensor, in_offset, out_offset, length)``; further fields are ignored.

    Raises IndexError for a row that leaves the matrix.
    """
    matrix = torch.zeros(sum(in_widths), sum(out_widths), dtype=torch.int64)
    for in_tensor, out_tensor, in_offset, out_offset, length, *_ in moves:
        if not (0 <= in_tensor < len(in_widths) and 0 <= out_tensor < len(out_widths) and length >= 0):
            raise IndexError(f"({in_tensor}, {out_tensor}, {length})")
        if not (in_offset >= 0 and in_offset + length <= in_widths[in_tensor]):
            raise IndexError(f"columns {in_offset} + {length} of input {in_tensor}")
        if not (out_offset >= 0 and out_offset + length <= out_widths[out_tensor]):
            raise IndexError(f"columns {out_offset} + {length} of output {out_tensor}")
        row = sum(in_widths[:in_tensor]) + in_offset
        column = sum(out_widths[:out_tensor]) + out_offset
        for n in range(length):
            matrix[row + n, column + n] += 1
    return matrix


def apply_dense(values: Sequence[Tensor], matrix: Tensor, out_widths: Sequence[int]) -> list[Tensor]:
    """Two-dimensional ``values`` times the matrix, in int64, float64 or complex128."""
    joined = torch.cat([v if not v.is_floating_point() else v.double() for v in values], 1)
    if not joined.is_complex():
        joined = joined.double() if joined.is_floating_point() else joined.long()
    return list((joined @ matrix.to(joined.dtype)).split(list(out_widths), 1))


def apply_moves(
    values: Sequence[Tensor],
    moves: Iterable[Sequence[int]],
    out_widths: Sequence[int],
    *,
    key_dim: int,
    dtype: torch.dtype,
    sum_dtype: torch.dtype,
) -> list[Tensor]:
    """One move after the other, added up in ``sum_dtype``, then converted once."""
    first = values[0]
    outs: list[Tensor] = []
    for width in out_widths:
        shape = list(first.shape)
        shape[key_dim] = width
        outs.append(torch.zeros(shape, dtype=sum_dtype))
    for in_tensor, out_tensor, in_offset, out_offset, length, *_ in moves:
        target = outs[out_tensor].narrow(key_dim, out_offset, length)
        target += values[in_tensor].narrow(key_dim, in_offset, length).to(sum_dtype)
    return [out.to(dtype) for out in outs]


# Memory


def poison(*like: Tensor, copies: int = 32) -> None:
    """Fill blocks of the sizes of these tensors with 0xFF and free them.

    That is NaN in every floating-point type and -1 in signed integers, so a result that is not written in
    full shows. To be called right before the code that allocates.
    """
    sizes = {max(1, t.numel() * t.element_size()) for t in like}
    blocks = [torch.full((size,), 255, dtype=torch.uint8) for size in sizes for _ in range(copies)]
    del blocks


def as_bytes(tensor: Tensor) -> Tensor:
    """A copy of the bytes of the elements, in row-major order."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return copy.copy_(tensor.detach()).reshape(-1).view(torch.uint8)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equal in type, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


def assert_same(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Lists of tensors (or None) equal in length, type, shape and every bit but the sign of zero."""
    assert len(actual) == len(expected)
    for n, (a, b) in enumerate(zip(actual, expected)):
        if a is None or b is None:
            assert a is None, f"tensor {n} is not None"
            assert b is None, f"tensor {n} is None"
            continue
        assert a.dtype == b.dtype, f"tensor {n} is {a.dtype}, expected {b.dtype}"
        assert a.shape == b.shape, f"tensor {n} has shape {tuple(a.shape)}, expected {tuple(b.shape)}"
        if a.dtype in (*FLOAT8_DTYPES, torch.complex32):  # torch.equal does not know them
            a, b = wide(a), wide(b)
        assert torch.equal(a, b), f"tensor {n} is\n{a}\nexpected\n{b}"


def assert_independent(outs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Contiguous, each alone in a storage of its own that is no larger than needed, no views."""
    own = [t.untyped_storage().data_ptr() for t in outs if t.numel()]
    assert len(set(own)) == len(own)
    assert not set(own) & {t.untyped_storage().data_ptr() for t in values}
    for out in outs:
        assert out.is_contiguous(), f"strides {out.stride()} of shape {tuple(out.shape)}"
        assert out.storage_offset() == 0
        assert out.untyped_storage().nbytes() == out.numel() * out.element_size()


# Values


def distinct(shape: Sequence[int], dtype: torch.dtype, start: int = 1) -> Tensor:
    """Small whole numbers, neighbours differ; sums and casts of them are exact in most types."""
    period = {torch.bool: 2, torch.float8_e8m0fnu: 5}.get(dtype, 13)
    numbers = torch.arange(start, start + math.prod(shape), dtype=torch.int64) % period
    if dtype == torch.float8_e8m0fnu:
        return torch.ldexp(torch.ones(()), numbers).to(dtype).reshape(tuple(shape))  # powers of two only
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers * 5 % 11).double()).to(dtype).reshape(tuple(shape))
    return numbers.to(dtype).reshape(tuple(shape))


def random_values(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Finite numbers of any dtype, from the global generator."""
    if dtype.is_complex or dtype.is_floating_point:
        compute = torch.complex128 if dtype.is_complex else torch.float64
        numbers = torch.randn(tuple(shape), dtype=compute)
        return (numbers.abs() + 0.5 if dtype == torch.float8_e8m0fnu else numbers).to(dtype)
    high = 2 if dtype == torch.bool else 100
    return torch.randint(0, high, tuple(shape)).to(dtype)


def random_bits(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Any bit pattern: NaNs with payloads, infinities, negative zeros, subnormal numbers."""
    if dtype == torch.bool:
        return random_values(shape, dtype)
    count = math.prod(shape)
    return (
        torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(tuple(shape))
    )


# Strides. Each takes a contiguous tensor and returns one of its shape with other strides; the values may
# change where the strides force it (stride 0), so compute with what comes back.


def _padded_rows(t: Tensor) -> Tensor:
    buffer = torch.zeros((*t.shape[:-1], t.shape[-1] + 3), dtype=t.dtype)
    view = buffer.narrow(-1, 1, t.shape[-1])
    return view.copy_(t)


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)


def _column_step(t: Tensor) -> Tensor:
    buffer = torch.zeros((*t.shape, 2), dtype=t.dtype)
    return buffer.select(-1, 1).copy_(t)


def _offset(t: Tensor) -> Tensor:
    buffer = torch.zeros(t.numel() + 7, dtype=t.dtype)
    return buffer.narrow(0, 7, t.numel()).view(t.shape).copy_(t)


def _expanded_rows(t: Tensor) -> Tensor:
    return t.narrow(0, 0, 1).clone().expand(t.shape) if t.shape[0] else t


def _expanded_columns(t: Tensor) -> Tensor:
    return t.narrow(-1, 0, 1).clone().expand(t.shape) if t.shape[-1] else t


def _expanded_scalar(t: Tensor) -> Tensor:
    return t.reshape(-1)[:1].clone().reshape([1] * t.dim()).expand(t.shape) if t.numel() else t


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": torch.Tensor.clone,
    "padded rows": _padded_rows,
    "transposed": _transposed,
    "column step": _column_step,
    "offset": _offset,
    "expanded rows": _expanded_rows,
    "expanded columns": _expanded_columns,
    "expanded scalar": _expanded_scalar,
}


def negative_view(t: Tensor) -> Tensor:
    """The same numbers, stored with the opposite sign."""
    return torch._neg_view(torch.neg(t))


def conjugate_view(t: Tensor) -> Tensor:
    """The same complex numbers, stored conjugated."""
    return t.conj_physical().conj()
