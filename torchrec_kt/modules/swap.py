"""Put the package's module into an existing model."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torchrec.modules.regroup import KTRegroupAsDict as TorchRecKTRegroupAsDict
from torchrec.modules.regroup import PermuteMultiEmbedding as TorchRecPermuteMultiEmbedding

from .graph_swap import swap_graph
from .kt_regroup import KTRegroupAsDict

__all__ = ["swap_regroup"]

logger = logging.getLogger(__name__)


def swap_regroup(model: nn.Module) -> nn.Module:
    """Turn every TorchRec ``KTRegroupAsDict`` in a model into this package's, in place.

    The instances stay the same objects, so names, sharing, hooks, training mode and references
    from anywhere else hold; only what they do changes. Works before and after
    ``DistributedModelParallel``, ``DistributedDataParallel`` or ``torch.compile``, and on a module that
    has already seen batches: a plan it has cached goes on serving graphs, where each used key is
    checked to be where the plan has it, until the first batch brings a full one. In every
    ``torch.fx.GraphModule`` inside, calls of ``KeyedTensor.regroup``, ``regroup_as_dict`` and FBGEMM's
    operators are rewritten as well.

    Left as they are, with a warning in the log that says why: subclasses of TorchRec's module,
    instances whose ``forward`` was replaced, scripted modules (:func:`torchrec_kt.patch_fbgemm`
    reaches those), and modules that this package's constructor refuses. Modules that no
    registered path leads to are not found. What is replaced is logged at level INFO. A second
    call finds nothing to do.

    Args:
        model: any module, also a ``KTRegroupAsDict`` itself.

    Returns:
        The same object.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> import torch, torchrec_kt
        >>> from torchrec.modules.regroup import KTRegroupAsDict
        >>> model = torch.nn.ModuleDict({"regroup": KTRegroupAsDict([["f1"]], ["user"])})
        >>> isinstance(torchrec_kt.swap_regroup(model)["regroup"], torchrec_kt.KTRegroupAsDict)
        True
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"model is a {type(model).__name__}; expected a torch.nn.Module (for functions there are "
            "patch_keyed_tensor and patch_fbgemm)"
        )
    for path, module in list(model.named_modules()):
        shown = path or "the model itself"
        if isinstance(module, GraphModule):
            calls = swap_graph(module)
            if calls:
                logger.info("%s: %d calls in the graph replaced", shown, calls)
        elif isinstance(module, torch.jit.ScriptModule):
            # Ours has the same name once scripted.
            named = module.original_name == TorchRecKTRegroupAsDict.__name__
            if named and "fbgemm::" in str(module.inlined_graph):
                logger.warning("%s: left as it is, since it is scripted; see patch_fbgemm", shown)
        elif isinstance(module, TorchRecKTRegroupAsDict) and not isinstance(module, KTRegroupAsDict):
            try:
                _replace(module)
            except _LeftAsItIs as reason:
                logger.warning("%s: left as it is, since %s", shown, reason)
            else:
                logger.info("%s: KTRegroupAsDict replaced", shown)
    return model


class _LeftAsItIs(Exception):
    """Why a module is not replaced."""


def _replace(module: TorchRecKTRegroupAsDict) -> None:
    if type(module) is not TorchRecKTRegroupAsDict:
        # It may rely on how TorchRec's class works inside.
        raise _LeftAsItIs(f"{type(module).__qualname__} is a subclass of TorchRec's class")
    held = module._permute_pooled_embs_impl
    if type(held) is not TorchRecPermuteMultiEmbedding:
        raise _LeftAsItIs(f"its _permute_pooled_embs_impl is a {type(held).__qualname__}")
    for part in (module, held):
        if "forward" in vars(part):
            raise _LeftAsItIs(f"the forward method of this {type(part).__name__} was replaced")
    try:
        fresh = KTRegroupAsDict(module._groups, module._keys, module._emb_dtype, held._multi_device)
    except (TypeError, ValueError) as error:
        raise _LeftAsItIs(str(error)) from error

    holder = fresh._permute_pooled_embs_impl
    layout = _layout_of_plan(module)
    if layout is None:
        holder.forget(held._permutes.device)
    else:
        holder.init_tensors(held._permutes, held._in_shapes, held._out_shapes, list(held._out_lengths or []))
        holder._layout_keys, holder._layout_widths = layout
        fresh._is_inited = fresh._use_fbgemm_regroup = True
    _become(held, holder)
    fresh._modules["_permute_pooled_embs_impl"] = held
    _become(module, fresh)


# What every module has: tables of parameters, buffers, children and hooks, and the training mode.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _become(module: Any, other: nn.Module) -> None:
    """Give ``module`` the class, attributes, buffers and children of ``other``; keep hooks and mode.

    Changing the class in place, as lazy modules and FSDP do, is what lets all who hold a reference
    to the module see the change: hooks, lists, closures, pipelines, further names of it.
    """
    module._buffers.update(other._buffers)
    module._modules.update(other._modules)
    vars(module).update({k: v for k, v in vars(other).items() if k not in _OF_EVERY_MODULE})
    module.__class__ = type(other)


def _layout_of_plan(module: TorchRecKTRegroupAsDict) -> tuple[list[list[str]], list[list[int]]] | None:
    """Keys and widths of the inputs that a cached plan was made for; None if there is no usable one.

    The plan says where the keys of the groups are, not what the columns between them are called:
    those get the key ``""``.
    """
    held = module._permute_pooled_embs_impl
    plan = [held._permutes, held._in_shapes, held._out_shapes]
    if not module._is_inited or not module._use_fbgemm_regroup or held._out_lengths is None:
        return None
    if any(type(tensor) is not torch.Tensor or tensor.is_meta for tensor in plan):
        return None
    rows, in_widths, _ = (tensor.tolist() for tensor in plan)
    uses = [(g, key) for g, group in enumerate(module._groups) for key in group]
    if [row[1] for row in rows] != [g for g, _ in uses] or any(key == "" for _, key in uses):
        return None  # the lists of groups were edited since
    places = {(row[0], row[2], row[4], key) for row, (_, key) in zip(rows, uses)}
    keys: list[list[str]] = [[] for _ in in_widths]
    widths: list[list[int]] = [[] for _ in in_widths]
    for tensor, start, width, name in sorted(places):
        gap = start - sum(widths[tensor])
        if gap < 0:
            return None  # one column under two names: not the plan of these groups
        if gap:
            keys[tensor].append("")
            widths[tensor].append(gap)
        keys[tensor].append(name)
        widths[tensor].append(width)
    for tensor, total in enumerate(in_widths):
        gap = total - sum(widths[tensor])
        if gap < 0:
            return None
        if gap:
            keys[tensor].append("")
            widths[tensor].append(gap)
    return keys, widths
