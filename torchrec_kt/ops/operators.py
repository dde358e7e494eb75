"""The registered operators: the form of a regroup that graphs see.

Their map is a tensor of moves, see :mod:`.moves`::

    torchrec_kt::regroup(Tensor[] values, Tensor moves, SymInt[] out_widths,
                         int key_dim=1, ScalarType? dtype=None) -> Tensor[]

The backward pass is one call of ``regroup_transposed``, which takes the same tensor of moves and reads it
the other way round: a graph needs no second plan and computes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from .moves import column_map_from_moves
from .plan import ColumnMap
from .regroup import (
    as_gradient,
    batch_in_front,
    call_for,
    check_values,
    composite,
    expanded_zeros,
    gradient_dtype,
    promoted_dtype,
    transforms_active,
    wants_autograd,
)
from .torch_impl import TensorMeta

try:
    from torch._subclasses.fake_tensor import in_kernel_invocation_manager as _beneath
except ImportError:  # not promised to stay
    _beneath: Any = None

__all__ = ["LIBRARY"]

LIBRARY = torch.library.Library("torchrec_kt", "DEF")
try:
    for _name in ("regroup", "regroup_transposed"):
        LIBRARY.define(
            f"{_name}(Tensor[] values, Tensor moves, SymInt[] out_widths, int key_dim=1, ScalarType? dtype=None) -> Tensor[]"
        )
except RuntimeError as error:
    if "multiple times" not in str(error):
        raise
    raise ImportError(
        "the operators of torchrec_kt are defined in this process already, by its library for processes without "
        "Python (libtorchrec_kt_serving). Import torchrec_kt before that library is loaded, or do not load it"
    ) from error


def _widths(shapes: Sequence[Sequence[int]], key_dim: int) -> list[int]:
    # An input without that dimension can only be one that no move names.
    return [shape[key_dim] if -len(shape) <= key_dim < len(shape) else 0 for shape in shapes]


def _common_dtype(values: Sequence[Tensor]) -> torch.dtype | None:
    """The operator's default type: that of all inputs, since it must not depend on the plan's data."""
    return promoted_dtype(values, range(len(values))) if values else None


def _check_out_widths(out_widths: Sequence[int]) -> None:
    for t, width in enumerate(out_widths):
        if width < 0:
            raise ValueError(f"the width of output {t} is {width}; expected 0 or more")


def _map_for(
    transposed: bool, values: Sequence[Tensor], moves: Tensor, out_widths: Sequence[int], key_dim: int
) -> ColumnMap:
    return column_map_from_moves(moves, _widths([v.shape for v in values], key_dim), out_widths, transposed)


def _regroup_fake(
    values: Sequence[Tensor],
    moves: Tensor,
    out_widths: Sequence[int],
    key_dim: int = 1,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    if moves.is_meta and not all(v.is_meta for v in values):
        raise ValueError("the plan tensor is on the meta device and the values are not; move it to theirs")
    # The moves cannot be read here, so every input counts as used, and how wide they are meant is unknown.
    every = range(len(values))
    dim = check_values(values, [0] * len(values), every, key_dim)
    _check_out_widths(out_widths)
    result = promoted_dtype(values, every) if dtype is None else dtype
    shape = values[0].shape
    shapes = [(*shape[:dim], width, *shape[dim + 1 :]) for width in out_widths]
    return _empty_beside(values[0], shapes, result)


def _empty_beside(value: Tensor, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
    if _beneath is None or type(value) is not FakeTensor:
        return [value.new_empty(shape, dtype=dtype) for shape in shapes]
    # Through the mode, each would cost a compilation nearly a millisecond where the batch is symbolic.
    with _beneath(value.fake_mode):
        metas = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    return [FakeTensor(value.fake_mode, meta, value.device) for meta in metas]


@contextmanager
def _recording_again() -> Iterator[None]:
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


class _OperatorApply(torch.autograd.Function):
    """Autograd of the registered operators, each of which is the other's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        transposed: bool,
        moves: Tensor,
        out_widths: Sequence[int],
        key_dim: int,
        dtype: Any,
        *values: Tensor,
    ) -> tuple[Tensor, ...]:
        # Autograd is off in here, but outer torch.func levels still have to record the call.
        outer_levels = _recording_again() if transforms_active() else nullcontext()
        with outer_levels, torch._C._AutoDispatchBelowAutograd():
            outs = _operator(transposed)(values, moves, out_widths, key_dim, dtype)
        ctx.save_for_backward(moves)  # so that a change of it in between is noticed
        ctx.arguments = transposed, moves, out_widths, key_dim
        ctx.inputs = [TensorMeta(v.shape, v.dtype, v.device) for v in values]
        ctx.out_metas = [TensorMeta(o.shape, o.dtype, o.device) for o in outs]
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (moves,), (transposed, _, _, key_dim) = ctx.saved_tensors, ctx.arguments
        filled = [expanded_zeros(*meta) if g is None else g for g, meta in zip(grads, ctx.out_metas)]
        needs = ctx.needs_input_grad[5:]
        dtypes = [meta.dtype for meta, need in zip(ctx.inputs, needs) if need]
        parts = _operator(not transposed)(
            filled,
            moves,
            _widths([meta.shape for meta in ctx.inputs], key_dim),
            key_dim,
            gradient_dtype(ctx.out_metas[0].dtype, dtypes),
        )
        return (None,) * 5 + tuple(
            (
                as_gradient(part, meta.dtype)
                if part.shape == meta.shape
                else torch.zeros(
                    meta.shape, dtype=meta.dtype, device=meta.device
                )  # an unused input of another shape
            )
            if need
            else None
            for part, meta, need in zip(parts, ctx.inputs, needs)
        )

    @staticmethod
    def jvp(ctx: Any, *arguments: Any) -> Any:
        transposed, moves, out_widths, key_dim = ctx.arguments
        tangents = [expanded_zeros(*m) if t is None else t for t, m in zip(arguments[5:], ctx.inputs)]
        dtype = ctx.out_metas[0].dtype if ctx.out_metas else None
        return tuple(_operator(transposed)(tangents, moves, out_widths, key_dim, dtype))


def _operator(transposed: bool) -> Any:
    ops = torch.ops.torchrec_kt
    return ops.regroup_transposed if transposed else ops.regroup


# Single-level, as generated autograd kernels are: a kernel runs beneath the torch.func machinery,
# which autograd.Function.apply would enter a second time.
_operator_apply = super(torch.autograd.Function, _OperatorApply).apply  # pyright: ignore


def _register(transposed: bool) -> None:
    """Register one of the two operators."""
    name = "regroup_transposed" if transposed else "regroup"

    def kernel(
        values: list[Tensor],
        moves: Tensor,
        out_widths: Sequence[int],
        key_dim: int = 1,
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        _check_out_widths(out_widths)
        column_map = _map_for(transposed, values, moves, out_widths, key_dim)
        return call_for(values, column_map, dtype or _common_dtype(values), key_dim).program(values)

    def old_vmap(
        values: list[Tensor],
        moves: Tensor,
        out_widths: Sequence[int],
        key_dim: int = 1,
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        column_map = _map_for(transposed, values, moves, out_widths, key_dim)
        dim = check_values(values, column_map.in_widths, column_map.used_inputs, key_dim)
        return composite(values, column_map, dtype or _common_dtype(values), dim)

    def autograd(
        values: Sequence[Tensor],
        moves: Tensor,
        out_widths: Sequence[int],
        key_dim: int = 1,
        dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        if wants_autograd(values):
            # torch.func lets single-level functions run only when asked to.
            with enable_single_level_autograd_function() if transforms_active() else nullcontext():
                return list(_operator_apply(transposed, moves, out_widths, key_dim, dtype, *values))
        with torch._C._AutoDispatchBelowAutograd():
            return _operator(transposed)(values, moves, out_widths, key_dim, dtype)

    def vmap(
        info: Any,
        in_dims: Sequence[Any],
        values: Sequence[Tensor],
        moves: Tensor,
        out_widths: Sequence[int],
        key_dim: int = 1,
        dtype: torch.dtype | None = None,
    ) -> Any:
        if in_dims[1] is not None:
            raise ValueError(
                "the plan tensor is batched by vmap; one plan serves the whole batch, close over it"
            )
        batched = batch_in_front(info.batch_size, in_dims[0], values)
        front = key_dim if key_dim < 0 else key_dim + 1
        outs = _operator(transposed)(batched, moves, out_widths, front, dtype)
        return outs, [0] * len(outs)

    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    LIBRARY.impl(name, autograd, "Autograd")
    LIBRARY.impl(name, old_vmap, "Batched")
    torch.library.register_fake(f"torchrec_kt::{name}", _regroup_fake, lib=LIBRARY)
    torch.library.register_vmap(f"torchrec_kt::{name}", vmap, lib=LIBRARY)


_register(transposed=False)
_register(transposed=True)
