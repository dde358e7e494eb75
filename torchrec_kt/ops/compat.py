"""FBGEMM-shaped operators on top of the same column maps.

Same schemas and plan rows as ``fbgemm::permute_multi_embedding``, ``fbgemm::kt_regroup_arguments``
and ``fbgemm::regroup_keyed_tensor``, registered under ``torch.ops.torchrec_kt``. A plan row is
``(in_tensor, out_tensor, in_offset, out_offset, length, next)``; ``next`` links the uses of a
repeated key for FBGEMM's backward and is not needed here, where gradients follow from the other
five fields. Unlike FBGEMM's, arguments are checked before anything is read or written, unused keys
get zero gradients, and repeated keys are summed in float32 for narrower types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .moves import FBGEMM_FIELDS, column_map_from_moves, moves_beside
from .operators import LIBRARY
from .plan import RegroupPlan, locate_keys
from .regroup import batch_in_front, check_tensors

__all__ = [
    "kt_regroup_arguments",
    "permute_multi_embedding",
    "plan_rows",
    "regroup_by_keys",
    "regroup_keyed_tensor",
]

LIBRARY.define(
    "permute_multi_embedding(Tensor[] pooled_embs, Tensor permutes, Tensor in_shapes, Tensor out_shapes, "
    "SymInt[] out_lengths) -> Tensor[]"
)
LIBRARY.define(
    "kt_regroup_arguments(Tensor embs, str[][] keys, int[][] lengths, str[][] groups) "
    "-> (Tensor, Tensor, Tensor, int[])"
)
LIBRARY.define(
    "regroup_by_keys(Tensor[] values, str[][] keys, int[][] lengths, str[][] groups, int key_dim=1) -> Tensor[]"
)
LIBRARY.define(
    "regroup_keyed_tensor(Tensor[] pooled_embs, str[][] keys, int[][] lengths, str[][] groups) -> Tensor[]"
)


# Layouts rarely vary much within one process; the bound is there so that they may.
_MAX_PLANS = 64
_plans: dict[Any, RegroupPlan] = {}


def plan_rows(plan: RegroupPlan) -> list[tuple[int, int, int, int, int, int]]:
    """The plan as FBGEMM writes it: one row per use of a key, in group order.

    The last field of a row is 0 for a key's first use while it is the only one; otherwise uses of a
    key form a list: the first holds the row number of the second, each later one minus that of the
    next, and the last one minus the number of rows.
    """
    place, _ = locate_keys(plan.layouts)
    total = sum(map(len, plan.groups))
    rows: list[list[int]] = []
    last_use: dict[object, int] = {}
    for out_tensor, group in enumerate(plan.groups):
        out_offset = 0
        for key in group:
            tensor, offset, width = place[key]
            link = 0
            if key in last_use:
                before = rows[last_use[key]]
                before[5] = len(rows) if before[5] == 0 else -len(rows)
                link = -total
            last_use[key] = len(rows)
            rows.append([tensor, out_tensor, offset, out_offset, width, link])
            out_offset += width
    return [(a, b, c, d, e, f) for a, b, c, d, e, f in rows]


def permute_multi_embedding(
    values: Sequence[Tensor],
    permutes: Tensor,
    in_shapes: Tensor,
    out_shapes: Tensor,
    out_lengths: Sequence[int],
) -> list[Tensor]:
    """Rearrange columns by a plan in FBGEMM's form.

    Args:
        values: tensors ``[batch, width]``.
        permutes: int32 ``[rows, 6]``, as :func:`kt_regroup_arguments` and FBGEMM's and TorchRec's
            own planners produce. Output columns that no row writes are zero.
        in_shapes: int32, widths of the inputs; ``values`` may be wider.
        out_shapes: int32, widths of the outputs.
        out_lengths: the same as integers.

    Returns:
        One new tensor ``[batch, out_length]`` per entry of ``out_lengths``.

    Raises:
        ValueError: an argument has the wrong type or shape, a row names a tensor or columns that
            do not exist, or two rows write the same output column.

    Example:
        >>> import torch
        >>> import torchrec_kt.ops.compat
        >>> plan = torch.ops.torchrec_kt.kt_regroup_arguments(
        ...     torch.empty(0), [["a", "b"]], [[1, 2]], [["b", "a"]]
        ... )
        >>> torch.ops.torchrec_kt.permute_multi_embedding([torch.tensor([[1, 2, 3]])], *plan)
        [tensor([[2, 3, 1]])]
    """
    check_tensors(values)
    for name, tensor in (("permutes", permutes), ("in_shapes", in_shapes), ("out_shapes", out_shapes)):
        if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  the dispatcher lets None in
            raise TypeError(f"{name} is {tensor!r}; expected an int32 tensor")
    if permutes.is_meta != values[0].is_meta if values else False:
        raise ValueError(
            f"permutes is on {permutes.device}, the values are on {values[0].device}; move the plan to the values' "
            "device"
        )
    if permutes.dtype != torch.int32 or permutes.dim() != 2 or permutes.shape[1] != FBGEMM_FIELDS:
        raise ValueError(
            f"permutes is {permutes.dtype} of shape {tuple(permutes.shape)}; expected int32 of shape "
            f"[rows, {FBGEMM_FIELDS}]"
        )
    if not values:
        raise ValueError("got no value tensors, so the batch size is unknown; pass at least one")
    for i, value in enumerate(values):
        if value.dim() != 2:
            raise ValueError(f"values[{i}] has shape {tuple(value.shape)}; expected [batch, width]")
    _check_shape_vector("in_shapes", in_shapes, len(values))
    _check_shape_vector("out_shapes", out_shapes, len(out_lengths))
    if _readable(permutes):
        _check_plan(values, permutes, in_shapes, out_shapes, out_lengths)
    return torch.ops.torchrec_kt.regroup(values, permutes, out_lengths)


def _readable(plan: Tensor) -> bool:
    # Fake, traced and meta plans hold no data, and those inside torch.func are wrapped. What is not
    # checked here the operator below still checks: bounds, always.
    return (
        type(plan) is Tensor
        and not plan.is_meta
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_compiling()
    )


def _check_shape_vector(name: str, vector: Tensor, count: int) -> None:
    if vector.dim() != 1 or vector.shape[0] != count or vector.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} is {vector.dtype} of shape {tuple(vector.shape)}; expected int32 of shape [{count}]"
        )


def _check_plan(
    values: Sequence[Tensor],
    permutes: Tensor,
    in_shapes: Tensor,
    out_shapes: Tensor,
    out_lengths: Sequence[int],
) -> None:
    for name, vector in (("in_shapes", in_shapes), ("out_shapes", out_shapes)):
        if vector.is_meta:
            raise ValueError(f"{name} is on the meta device and holds no data; move it to the values' device")
    stated_in, stated_out = in_shapes.tolist(), out_shapes.tolist()
    if stated_out != list(out_lengths):
        raise ValueError(
            f"out_shapes is {stated_out} but out_lengths is {list(out_lengths)}; they must agree"
        )
    if out_lengths and min(out_lengths) < 0:
        raise ValueError(f"out_lengths is {list(out_lengths)}; widths must be 0 or more")
    for i, (value, width) in enumerate(zip(values, stated_in)):
        if not 0 <= width <= value.shape[1]:
            raise ValueError(
                f"in_shapes says that values[{i}] has {width} columns; its shape is {tuple(value.shape)}"
            )
    # Real widths, not stated ones: it is them that a row must stay inside, and the same map serves the call.
    column_map = column_map_from_moves(permutes, [v.shape[1] for v in values], out_lengths)
    if column_map.max_fan_in > 1:
        output, piece = next(
            (t, p) for t, pieces in enumerate(column_map.outputs) for p in pieces if len(p.sources) > 1
        )
        raise ValueError(
            f"several rows of permutes write columns {piece.start} to {piece.start + piece.length - 1} of "
            f"output {output}; each output column has one source"
        )


def kt_regroup_arguments(
    embs: Tensor,
    keys: Sequence[Sequence[str]],
    lengths: Sequence[Sequence[int]],
    groups: Sequence[Sequence[str]],
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Plan in FBGEMM's form: ``(permutes, in_shapes, out_shapes, out_lengths)``.

    Args:
        embs: any tensor on the device where the plan should be.
        keys: keys of each input.
        lengths: their widths.
        groups: keys of each output.

    Returns:
        int32 tensors ``[uses, 6]``, ``[inputs]`` and ``[outputs]``, and the output widths.

    Raises:
        ValueError, TypeError, UnknownKeyError: as :meth:`RegroupPlan.build`.
    """
    plan = _plan(keys, lengths, groups)
    rows = plan_rows(plan)
    to = {"dtype": torch.int32, "device": embs.device}
    permutes = torch.tensor(rows, **to).reshape(len(rows), FBGEMM_FIELDS)
    in_shapes, out_shapes = torch.tensor(plan.in_widths, **to), torch.tensor(plan.out_widths, **to)
    return permutes, in_shapes, out_shapes, list(plan.out_widths)


def _kt_regroup_arguments_fake(
    embs: Tensor,
    keys: Sequence[Sequence[str]],
    lengths: Sequence[Sequence[int]],
    groups: Sequence[Sequence[str]],
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    plan = _plan(keys, lengths, groups)
    permutes = embs.new_empty((sum(map(len, groups)), FBGEMM_FIELDS), dtype=torch.int32)
    in_shapes = embs.new_empty((len(keys),), dtype=torch.int32)
    out_shapes = embs.new_empty((len(groups),), dtype=torch.int32)
    return permutes, in_shapes, out_shapes, list(plan.out_widths)


def regroup_keyed_tensor(
    values: Sequence[Tensor],
    keys: Sequence[Sequence[str]],
    lengths: Sequence[Sequence[int]],
    groups: Sequence[Sequence[str]],
) -> list[Tensor]:
    """Plan and permute in one call.

    Args and errors are those of :func:`kt_regroup_arguments`, and one tensor ``[batch, width]`` per
    list of keys. Returns one new tensor per group.
    """
    check_tensors(values)
    for i, value in enumerate(values):
        if value.dim() != 2:
            raise ValueError(f"values[{i}] has shape {tuple(value.shape)}; expected [batch, width]")
    return regroup_by_keys(values, keys, lengths, groups)


def regroup_by_keys(
    values: Sequence[Tensor],
    keys: Sequence[Sequence[str]],
    lengths: Sequence[Sequence[int]],
    groups: Sequence[Sequence[str]],
    key_dim: int = 1,
) -> list[Tensor]:
    """:func:`regroup_keyed_tensor` for any rank and ``key_dim``: what scripted code calls."""
    check_tensors(values)
    if len(values) != len(keys):
        raise ValueError(
            f"got {len(values)} value tensors and {len(keys)} lists of keys; expected one list each"
        )
    plan = _plan(keys, lengths, groups)
    return torch.ops.torchrec_kt.regroup(
        values, moves_beside(values, plan.column_map), plan.out_widths, key_dim
    )


def _permute_multi_embedding_vmap(
    info: Any,
    in_dims: Sequence[Any],
    values: Sequence[Tensor],
    permutes: Tensor,
    in_shapes: Tensor,
    out_shapes: Tensor,
    out_lengths: Sequence[int],
) -> Any:
    if any(dim is not None for dim in in_dims[1:4]):
        raise ValueError("the plan is batched by vmap; one plan serves the whole batch, close over it")
    batched = batch_in_front(info.batch_size, in_dims[0], values)
    outs = torch.ops.torchrec_kt.regroup(batched, permutes, out_lengths, 2)
    return outs, [0] * len(outs)


def _regroup_by_keys_vmap(
    info: Any,
    in_dims: Sequence[Any],
    values: Sequence[Tensor],
    keys: Sequence[Sequence[str]],
    lengths: Sequence[Sequence[int]],
    groups: Sequence[Sequence[str]],
    key_dim: int = 1,
) -> Any:
    batched = batch_in_front(info.batch_size, in_dims[0], values)
    outs = regroup_by_keys(batched, keys, lengths, groups, key_dim if key_dim < 0 else key_dim + 1)
    return outs, [0] * len(outs)


def _plan(
    keys: Sequence[Sequence[str]], lengths: Sequence[Sequence[int]], groups: Sequence[Sequence[str]]
) -> RegroupPlan:
    if len(keys) != len(lengths):
        raise ValueError(
            f"got {len(keys)} lists of keys and {len(lengths)} lists of lengths; expected one each"
        )
    # Scripted code hands the names over in every call.
    called_with = tuple(map(tuple, keys)), tuple(map(tuple, lengths)), tuple(map(tuple, groups))
    plan = _plans.get(called_with)
    if plan is None:
        plan = RegroupPlan.build(layouts=list(zip(keys, lengths)), groups=groups)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[called_with] = plan
    return plan


LIBRARY.impl("kt_regroup_arguments", kt_regroup_arguments, "CompositeExplicitAutograd")
torch.library.register_fake("torchrec_kt::kt_regroup_arguments", _kt_regroup_arguments_fake, lib=LIBRARY)
LIBRARY.impl("permute_multi_embedding", permute_multi_embedding, "CompositeImplicitAutograd")
LIBRARY.impl("regroup_keyed_tensor", regroup_keyed_tensor, "CompositeImplicitAutograd")
LIBRARY.impl("regroup_by_keys", regroup_by_keys, "CompositeImplicitAutograd")
torch.library.register_vmap(
    "torchrec_kt::permute_multi_embedding", _permute_multi_embedding_vmap, lib=LIBRARY
)
torch.library.register_vmap("torchrec_kt::regroup_keyed_tensor", _regroup_by_keys_vmap, lib=LIBRARY)
torch.library.register_vmap("torchrec_kt::regroup_by_keys", _regroup_by_keys_vmap, lib=LIBRARY)
