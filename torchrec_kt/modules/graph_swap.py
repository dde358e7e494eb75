"""Calls of TorchRec's and FBGEMM's regroups inside ``torch.fx`` graphs, rewritten to this package's."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .functional import _regroup, regroup_as_dict

__all__ = ["swap_graph"]

_JAGGED_TENSOR = "torchrec.sparse.jagged_tensor"

# All take the KeyedTensors and the groups, and return one tensor per group.
_REGROUPS = frozenset(
    (
        "KeyedTensor.regroup",
        "_fbgemm_permute_pooled_embs",
        "_regroup_keyed_tensors",
        "permute_multi_embedding",
        "regroup_kts",
    )
)

_Replacement = tuple[Any, tuple[Any, ...]]


def swap_graph(graph_module: GraphModule) -> int:
    """Rewrite the regroup calls of a traced graph, in place, and recompile it.

    Replaced are calls of ``KeyedTensor.regroup`` and ``regroup_as_dict``, of TorchRec's functions behind
    them (which is what tracing leaves of the two), and of FBGEMM's operators
    ``permute_multi_embedding``, ``regroup_keyed_tensor`` and ``kt_regroup_arguments``. Calls by name go
    on looking columns up by name; a plan in FBGEMM's form is a plan by position and stays one, now
    checked against the bounds of its inputs. ``permute_pooled_embs`` is left as it is.

    Args:
        graph_module: any, also one from ``torch.export``. Graphs inside of graphs are separate
            modules; :func:`torchrec_kt.swap_regroup` visits them all.

    Returns:
        How many calls were replaced.

    Example:
        >>> import torch, torchrec_kt
        >>> from torchrec.sparse.jagged_tensor import KeyedTensor
        >>> from torchrec_kt.modules.graph_swap import swap_graph
        >>> class Model(torch.nn.Module):
        ...     def forward(self, keyed_tensors):
        ...         return KeyedTensor.regroup(keyed_tensors, [["b"], ["a"]])
        >>> traced = torch.fx.symbolic_trace(Model())
        >>> swap_graph(traced)
        1
        >>> kt = KeyedTensor(keys=["a", "b"], length_per_key=[1, 2], values=torch.tensor([[1, 2, 3]]))
        >>> traced([kt])
        [tensor([[2, 3]]), tensor([[1]])]
    """
    graph = graph_module.graph
    replaced = 0
    for node in list(graph.nodes):
        replacement = _replacement_of(node)
        if replacement is None:
            continue
        target, args = replacement
        given = node.all_input_nodes
        with graph.inserting_before(node):
            new = graph.call_function(target, args)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        replaced += 1
        for argument in given:
            # Buffers that only the old call read. Placeholders belong to the signature and stay.
            if argument.op == "get_attr" and not argument.users:
                graph.erase_node(argument)
    if replaced:
        for node in reversed(list(graph.nodes)):
            # KeyedTensor.regroup asks this to choose between its own two ways.
            if _torchrec_name(node.target) == "_all_keys_used_once" and not node.users:
                graph.erase_node(node)
        graph.lint()
        graph_module.recompile()
    return replaced


def _replacement_of(node: Node) -> _Replacement | None:
    """What to call in place of this node, with which arguments."""
    if node.op != "call_function":
        return None
    name = _torchrec_name(node.target)
    if name in _REGROUPS:
        return _regroup, _bound(_regroup, node)
    if name == "KeyedTensor.regroup_as_dict":
        return regroup_as_dict, _bound(regroup_as_dict, node)
    operator_name, take = _operator_name(node.target)
    if operator_name is None:
        return None
    ours = torch.ops.torchrec_kt
    if operator_name in ("permute_multi_embedding", "permute_multi_embedding_function"):
        arguments = _named(node, operator_name)
        ours = ours.regroup_transposed if arguments.get("reverse") else ours.regroup
        # The stated shapes are those of the tensors, which are at hand and can be trusted.
        return take(ours), (arguments["pooled_embs"], arguments["permutes"], arguments["out_lengths"])
    if operator_name in ("regroup_keyed_tensor", "kt_regroup_arguments"):
        return take(getattr(ours, operator_name)), tuple(_named(node, operator_name).values())
    return None


def _torchrec_name(target: Any) -> str | None:
    """The name of one of TorchRec's functions, also if it comes from a package or was patched over."""
    module = getattr(target, "__module__", None) or ""
    if module == _JAGGED_TENSOR or module.endswith(f".{_JAGGED_TENSOR}"):
        return getattr(target, "__qualname__", None)
    return None


def _operator_name(target: Any) -> tuple[str | None, Callable[[Any], Any]]:
    """The name of one of FBGEMM's operators, and how to take the same form of one of ours."""
    if isinstance(target, torch._ops.OpOverload):
        packet, take = target.overloadpacket, operator.attrgetter("default")
    else:
        packet, take = target, lambda packet: packet
    qualified = getattr(packet, "_qualified_op_name", "")
    return (qualified.removeprefix("fbgemm::") if qualified.startswith("fbgemm::") else None), take


def _bound(function: Callable[..., Any], node: Node) -> tuple[Any, ...]:
    return inspect.signature(function).bind(*node.args, **node.kwargs).args


def _named(node: Node, operator_name: str) -> dict[str, Any]:
    """Arguments of a call of an FBGEMM operator by the names in its schema, in that order."""
    schema = getattr(torch.ops.fbgemm, operator_name).default._schema
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, node.args)), **node.kwargs}
    return {name: given[name] for name in names if name in given}
