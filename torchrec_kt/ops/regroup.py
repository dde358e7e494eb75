"""Regroup values by a map: checks, eager calls, autograd.

Eager code calls :func:`regroup_values` with a plan: a memoised program per shape, and an
``autograd.Function`` only where a gradient can flow; no dispatcher round trip. Whatever records graphs
(compile, export, fake tensors, tracing) sees one call of the operator that :mod:`.operators` registers.

Both apply a column map and differentiate by applying its transpose, so derivatives of every order
exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from .kernel import compile_for_kernel
from .moves import device_of, moves_beside, recording
from .plan import ColumnMap, RegroupPlan
from .torch_impl import Program, TensorMeta, Tensors, accumulate_dtype, compile_map

try:
    from torch._C._dynamo.guards import TensorGuards  # pyright: ignore[reportMissingModuleSource]
except ImportError:  # then every call describes its inputs, which costs two microseconds more
    TensorGuards = None

__all__ = ["apply_column_map", "regroup_by_moves", "regroup_values"]

# Shapes rarely vary much within one process; the bound is there so that they may.
_MAX_CALLS = 128

_PLAIN_TENSORS = frozenset((Tensor, torch.nn.Parameter))
transforms_active = torch._C._are_functorch_transforms_active
_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
_is_old_vmap = _functorch.is_legacy_batchedtensor


def regroup_values(
    values: Sequence[Tensor],
    plan: RegroupPlan,
    dtype: torch.dtype | None = None,
    *,
    key_dim: int = 1,
) -> list[Tensor]:
    """Rearrange the columns of ``values`` into the groups of ``plan``.

    Differentiable to any order, in forward mode, and under ``torch.func`` transforms. The gradient
    of a column that no group uses is zero; that of a column used several times is the sum in the
    order of the groups, taken in float32 for narrower types and rounded once.

    Args:
        values: one strided tensor per layout of the plan, any strides, of shape
            ``[batch, width]`` or of any other rank of 1 or more with the columns in dimension
            ``key_dim``. A tensor may be wider than its layout; the rest is ignored. Types may
            differ; they are promoted as ``torch.cat`` promotes.
        plan: from :meth:`RegroupPlan.build`.
        dtype: of the outputs, cast while copying. Gradients return in the inputs' types.
        key_dim: the dimension that holds the columns; negative counts from the end.

    Returns:
        One new contiguous tensor per group, independent of each other and of the inputs: the shape
        of the inputs with the group's width in ``key_dim``.

    Raises:
        TypeError: ``values`` are not tensors, ``plan`` is not a plan, ``dtype`` is not a dtype, or
            the types cannot be promoted.
        ValueError: number of tensors, rank, batch, width or device do not fit.

    Example:
        >>> import torch
        >>> from torchrec_kt.ops import RegroupPlan, regroup_values
        >>> layouts = [(["a", "b"], [1, 2]), (["c"], [1])]
        >>> plan = RegroupPlan.build(layouts=layouts, groups=[["c", "a"], ["b"]])
        >>> regroup_values([torch.tensor([[1, 2, 3]]), torch.tensor([[4]])], plan)
        [tensor([[4, 1]]), tensor([[2, 3]])]
    """
    if not isinstance(plan, RegroupPlan):
        raise TypeError(
            f"plan is a {type(plan).__name__}; expected a RegroupPlan, which RegroupPlan.build makes"
        )
    return apply_column_map(values, plan.column_map, dtype, key_dim)


def apply_column_map(
    values: Sequence[Tensor],
    column_map: ColumnMap,
    dtype: torch.dtype | None,
    key_dim: int,
    held_moves: Callable[[ColumnMap, torch.device], Tensor | None] | None = None,
) -> list[Tensor]:
    """:func:`regroup_values` for a bare map.

    Args:
        held_moves: finds moves that the caller keeps for graphs, such as a module's buffer, or None.
    """
    if not isinstance(values, (list, tuple)):
        check_tensors(values)  # a lone tensor is a sequence too
        values = list(values)
    if recording():
        return _by_operator(values, column_map, dtype, key_dim, held_moves)
    known = _known_call(values, column_map, dtype, key_dim)
    if known is not None:
        call, differentiable = known
        if differentiable and torch.is_grad_enabled():
            return list(_eager_apply(call, *values))
        return call.program(values)
    if not _PLAIN_TENSORS.issuperset(map(type, values)):
        return _by_operator(values, column_map, dtype, key_dim, held_moves)
    call = call_for(values, column_map, dtype, key_dim)
    outputs = _run(call, values)
    column_map.last_call = _remember(call, values, dtype, key_dim)
    return outputs


class _Known(NamedTuple):
    """A call and how to tell quickly that another one is the same."""

    dtype: torch.dtype | None
    key_dim: int
    inputs: int
    # Whether tensors agree with those of the call in type, shape, dtype, device, layout and requires_grad.
    same: Callable[..., bool]
    call: _Call
    differentiable: bool


def _known_call(
    values: Tensors, column_map: ColumnMap, dtype: torch.dtype | None, key_dim: int
) -> tuple[_Call, bool] | None:
    """The last call with this map and whether an input requires a gradient, if this call is the same.

    None also while torch.func or forward-mode derivatives are at work.
    """
    known: _Known | None = column_map.last_call
    if known is not None:
        known_dtype, known_dim, inputs, same, call, differentiable = known
        if (
            known_dtype is dtype
            and known_dim == key_dim
            and inputs == len(values)
            and same(*values)
            and not transforms_active()
            and forward_ad._current_level < 0
        ):
            return call, differentiable
    return None


def _remember(call: _Call, values: Tensors, dtype: torch.dtype | None, key_dim: int) -> _Known | None:
    if TensorGuards is None or not values or len(set(map(id, values))) < len(values):
        return None  # guards want every tensor once
    if call.same is None or not call.same(*values):
        call.same = TensorGuards(
            *values,
            dynamic_dims_sizes=[list(meta.shape) for meta in call.inputs],  # pyright: ignore[reportArgumentType]
            dynamic_dims_strides=[[None] * len(meta.shape) for meta in call.inputs],  # pyright: ignore[reportArgumentType]
        ).check
    return _Known(dtype, key_dim, len(values), call.same, call, any(v.requires_grad for v in values))


def _run(call: _Call, values: Tensors) -> list[Tensor]:
    """Apply a call's map to real tensors of the shapes that it was made for."""
    try:
        if transforms_active():
            levels = _functorch.get_interpreter_stack()
            if any(level.key() == _functorch.TransformType.Functionalize for level in levels):
                # It has a rule for operators and none for autograd functions.
                return _by_operator(values, call.column_map, call.dtype, call.key_dim)
            return list(_TransformableApply.apply(call, *values))
        if wants_autograd(values):
            return list(_eager_apply(call, *values))
        return call.program(values)
    except Exception:
        # What a call is found by does not tell sparse tensors from strided ones.
        check_values(values, call.column_map.in_widths, call.column_map.used_inputs, call.key_dim)
        raise


def _by_operator(
    values: Sequence[Tensor],
    column_map: ColumnMap,
    dtype: torch.dtype | None,
    key_dim: int,
    held_moves: Callable[[ColumnMap, torch.device], Tensor | None] | None = None,
) -> list[Tensor]:
    check_tensors(values)
    # Fake tensors outlive their mode; the plan beside them has to be fake as well.
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    with nullcontext() if mode is None or recording() else mode:
        device = device_of(values, column_map.used_inputs)
        moves = None if held_moves is None else held_moves(column_map, device)
        if moves is None:
            moves = moves_beside(values, column_map)
        return regroup_by_moves(values, moves, column_map.out_widths, column_map.used_inputs, key_dim, dtype)


def regroup_by_moves(
    values: Sequence[Tensor],
    moves: Tensor,
    out_widths: Sequence[int],
    used: Sequence[int],
    key_dim: int,
    dtype: torch.dtype | None,
) -> list[Tensor]:
    """The operator, with the default type that the inputs in use give.

    The operator itself cannot tell which inputs its moves use before it runs; the caller knows.
    """
    if dtype is None and len(used) < len(values):
        dtype = promoted_dtype(values, used)
    return torch.ops.torchrec_kt.regroup(list(values), moves, out_widths, key_dim, dtype)


def wants_autograd(values: Sequence[Tensor]) -> bool:
    if torch.is_grad_enabled():
        for value in values:
            if value.requires_grad:
                return True
    return forward_ad._current_level >= 0


# --- checks ---------------------------------------------------------------------------------------


def check_tensors(values: Sequence[Any]) -> None:
    """Raise TypeError unless ``values`` is a sequence of tensors."""
    if isinstance(values, Tensor):
        raise TypeError("values is a single tensor; expected a sequence of tensors, one per layout")
    for i, value in enumerate(values):
        if not isinstance(value, Tensor):
            raise TypeError(f"values[{i}] is a {type(value).__name__}; expected a torch.Tensor")
        if value.is_nested:
            raise ValueError(f"values[{i}] is a nested tensor; expected a strided one")


def check_values(
    values: Sequence[Tensor], in_widths: Sequence[int], used: Sequence[int], key_dim: int
) -> int:
    """Check everything that a launch relies on; returns ``key_dim`` counted from the front.

    Inputs that are not used are not looked at, so they may have any shape and device.
    """
    if len(values) != len(in_widths):
        raise ValueError(f"got {len(values)} value tensors; the plan was built for {len(in_widths)}")
    if not values:
        raise ValueError("got no value tensors, so the batch size is unknown; pass at least one")
    used = used or (0,)
    first = values[used[0]]
    dim = key_dim + first.dim() if key_dim < 0 else key_dim
    if not 0 <= dim < first.dim():
        raise ValueError(
            f"key_dim is {key_dim}, but values[{used[0]}] has shape {tuple(first.shape)}; expected a "
            f"dimension that exists"
        )
    for i in used:
        value = values[i]
        if value.layout != torch.strided:
            raise ValueError(f"values[{i}] is not a strided tensor ({value.layout}); convert it first")
        if value.device != first.device:
            raise ValueError(
                f"values[{i}] is on {value.device}, values[{used[0]}] on {first.device}; move them to one device"
            )
        if value.dim() != first.dim() or any(
            a != b for d, (a, b) in enumerate(zip(value.shape, first.shape)) if d != dim
        ):
            raise ValueError(
                f"values[{i}] has shape {tuple(value.shape)}, values[{used[0]}] has {tuple(first.shape)}; they "
                f"must agree in everything but dimension {dim}, which holds the columns"
            )
        if value.shape[dim] < in_widths[i]:
            raise ValueError(
                f"values[{i}] has shape {tuple(value.shape)}, {value.shape[dim]} columns in dimension {dim}; the "
                f"widths of its keys add up to {in_widths[i]}"
            )
    return dim


def check_dtype(dtype: Any) -> None:
    """Raise TypeError unless ``dtype`` is a torch.dtype or None."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; expected a torch.dtype or None")


def promoted_dtype(values: Sequence[Tensor], used: Sequence[int]) -> torch.dtype:
    """The type ``torch.cat`` would give the inputs in use, or the first one's if none is."""
    used = used or (0,)
    result = values[used[0]].dtype
    for i in used[1:]:
        if values[i].dtype != result:
            try:
                result = torch.promote_types(result, values[i].dtype)
            except RuntimeError as error:
                raise TypeError(
                    f"values[{i}] is {values[i].dtype}, those before it promote to {result}, and torch does "
                    f"not promote the two ({error}); convert one of them or give a dtype"
                ) from None
    return result


# --- eager calls ----------------------------------------------------------------------------------


class _Adjoint:
    """How gradients of one call's outputs become gradients of its inputs."""

    __slots__ = ("column_map", "complete", "dtype", "unused", "wanted")

    def __init__(self, call: _Call, needs: tuple[bool, ...]) -> None:
        used = call.column_map.used_inputs
        self.wanted = tuple(i for i in used if needs[i])
        self.unused = tuple(i for i, need in enumerate(needs) if need and i not in used)
        widths = list(call.column_map.in_widths)
        for i in self.wanted:
            widths[i] = call.inputs[i].shape[call.key_dim]
        self.column_map = call.column_map.transpose(widths, self.wanted)
        self.dtype = gradient_dtype(call.dtype, [call.inputs[i].dtype for i in self.wanted])
        # Whether the map's outputs are the gradients as they stand.
        self.complete = len(self.wanted) == len(needs) and all(
            meta.dtype == self.dtype for meta in call.inputs
        )


class _Call:
    """A map, the inputs it was checked against, and the program for them."""

    __slots__ = ("_adjoints", "column_map", "dtype", "inputs", "key_dim", "out_shapes", "program", "same")

    def __init__(
        self, values: Sequence[Tensor], column_map: ColumnMap, dtype: torch.dtype | None, key_dim: int
    ) -> None:
        check_tensors(values)
        check_dtype(dtype)
        self.column_map = column_map
        self.key_dim = check_values(values, column_map.in_widths, column_map.used_inputs, key_dim)
        self.dtype = promoted_dtype(values, column_map.used_inputs) if dtype is None else dtype
        self.inputs = tuple(TensorMeta(tuple(v.shape), v.dtype, v.device) for v in values)
        arguments = column_map, self.inputs, self.dtype, self.key_dim
        self.program: Program = compile_for_kernel(*arguments) or compile_map(*arguments)
        first = self.inputs[column_map.used_inputs[0] if column_map.used_inputs else 0].shape
        self.out_shapes = [
            (*first[: self.key_dim], width, *first[self.key_dim + 1 :]) for width in column_map.out_widths
        ]
        self.same: Callable[..., bool] | None = None
        self._adjoints: dict[tuple[bool, ...], _Adjoint] = {}

    def pull_back(self, needs: tuple[bool, ...], grads: tuple[Any, ...]) -> Sequence[Tensor | None]:
        """Gradients of the inputs; None where ``needs`` says that none is needed."""
        adjoint = self._adjoints.get(needs)
        if adjoint is None:
            adjoint = self._adjoints[needs] = _Adjoint(self, needs)
        if adjoint.complete:
            return self._pull_back_used(adjoint, grads)
        result: list[Tensor | None] = [None] * len(needs)
        if adjoint.wanted:
            for i, grad in zip(adjoint.wanted, self._pull_back_used(adjoint, grads)):
                result[i] = as_gradient(grad, self.inputs[i].dtype)
        for i in adjoint.unused:
            shape, dtype, device = self.inputs[i]
            result[i] = torch.zeros(shape, dtype=dtype, device=device)
        return result

    def _filled(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        device = self.inputs[(self.column_map.used_inputs or (0,))[0]].device
        return tuple(
            expanded_zeros(shape, self.dtype, device) if g is None else g
            for g, shape in zip(grads, self.out_shapes)
        )

    def _pull_back_used(self, adjoint: _Adjoint, grads: tuple[Any, ...]) -> list[Tensor]:
        watched = recording()
        if not watched:
            known = _known_call(grads, adjoint.column_map, adjoint.dtype, self.key_dim)
            if known is not None and not (known[1] and torch.is_grad_enabled()):
                return known[0].program(grads)
        if not _PLAIN_TENSORS.issuperset(map(type, grads)):
            grads = self._filled(grads)
        if watched:
            return _by_operator(grads, adjoint.column_map, adjoint.dtype, self.key_dim)
        return _apply_to_derivatives(grads, adjoint.column_map, adjoint.dtype, self.key_dim)

    def push_forward(self, tangents: Sequence[Tensor | None]) -> list[Tensor]:
        """Tangents of the outputs."""
        filled = [
            expanded_zeros(shape, dtype, device) if t is None else t
            for t, (shape, dtype, device) in zip(tangents, self.inputs)
        ]
        return _apply_to_derivatives(filled, self.column_map, self.dtype, self.key_dim)


def _apply_to_derivatives(
    values: Tensors, column_map: ColumnMap, dtype: torch.dtype, key_dim: int
) -> list[Tensor]:
    """Gradients and tangents can be tensors of the old vmap (``torch.autograd.grad(is_grads_batched=True)``)."""
    if True in map(_is_old_vmap, values):
        return composite(values, column_map, dtype, key_dim)
    return apply_column_map(values, column_map, dtype, key_dim)


def composite(
    values: Tensors, column_map: ColumnMap, dtype: torch.dtype | None, key_dim: int
) -> list[Tensor]:
    inputs = [TensorMeta(tuple(v.shape), v.dtype, v.device) for v in values]
    result = promoted_dtype(values, column_map.used_inputs) if dtype is None else dtype
    return compile_map(column_map, inputs, result, key_dim, "composite")(values)


def call_for(
    values: Sequence[Tensor], column_map: ColumnMap, dtype: torch.dtype | None, key_dim: int
) -> _Call:
    described: list[Any] = [key_dim, dtype]
    try:
        for v in values:
            described += (v.shape, v.dtype, v.device)
    except RuntimeError:
        check_tensors(values)  # nested tensors have no shape to ask for
        raise
    signature = tuple(described)
    call = column_map.calls.get(signature)
    if call is None:
        call = _Call(values, column_map, dtype, key_dim)
        if len(column_map.calls) >= _MAX_CALLS:
            column_map.calls.clear()
        column_map.calls[signature] = call
    return call


def expanded_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def gradient_dtype(dtype: torch.dtype, targets: Sequence[torch.dtype]) -> torch.dtype:
    """The type in which the transposed map should return gradients of type ``dtype``.

    The inputs' own type if they share one, so that a sum is rounded once; else one that holds all.
    """
    kinds = set(targets)
    if len(kinds) == 1 and (targets[0].is_complex or not dtype.is_complex):
        return targets[0]
    wide = accumulate_dtype(dtype)
    for kind in kinds:
        wide = torch.promote_types(wide, accumulate_dtype(kind))
    return wide


def as_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    if grad.dtype == dtype:
        return grad
    if grad.is_complex() and not dtype.is_complex:
        grad = grad.real
    return grad.to(dtype)


class _EagerApply(torch.autograd.Function):
    """Applies a call's map outside of ``torch.func`` transforms.

    ``ctx`` comes first: setting up the context in a method of its own costs microseconds more.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(call.program(values))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *ctx.call.pull_back(ctx.needs_input_grad[1:], grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(ctx.call.push_forward(tangents[1:]))


# Past the look at torch.func that autograd.Function.apply takes first, which has been taken.
_eager_apply = super(torch.autograd.Function, _EagerApply).apply  # pyright: ignore


class _TransformableApply(torch.autograd.Function):
    """The same in the style that ``torch.func`` transforms require."""

    @staticmethod
    def forward(call: _Call, *values: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(call.program(values))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[0]
        ctx.set_materialize_grads(False)

    backward = _EagerApply.backward
    jvp = _EagerApply.jvp

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        call, *values = args
        batched = batch_in_front(info.batch_size, in_dims[1:], values)
        outs = apply_column_map(batched, call.column_map, call.dtype, call.key_dim + 1)
        return tuple(outs), (0,) * len(outs)


def batch_in_front(size: int, dims: Sequence[int | None], values: Sequence[Tensor]) -> list[Tensor]:
    """The values with vmap's dimension first, those without one expanded to it."""
    return [
        v.unsqueeze(0).expand(size, *v.shape) if d is None else v.movedim(d, 0) for d, v in zip(dims, values)
    ]
