"""``KeyedTensor.regroup`` and ``regroup_as_dict`` with a cache of plans."""

from typing import Dict, List

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from ..ops.regroup import apply_column_map
from ._compiled import regroup_compiled
from ._inputs import PlanCache, check_names, common_key_dim, unpack

__all__ = ["regroup", "regroup_as_dict"]

_plans = PlanCache(size=64)


# A leaf for torch.fx, which would otherwise try to iterate over proxies: the graph holds one call
# and finds the plan when it runs.
@torch.fx.wrap
def _regroup(keyed_tensors: List[KeyedTensor], groups: List[List[str]]) -> List[Tensor]:
    if torch.jit.is_scripting():
        return _regroup_scripted(keyed_tensors, groups)
    return _regroup_eagerly(keyed_tensors, groups)


@torch.jit.unused
def _regroup_eagerly(keyed_tensors: List[KeyedTensor], groups: List[List[str]]) -> List[Tensor]:
    if torch.compiler.is_compiling():
        return regroup_compiled(keyed_tensors, groups)
    unpacked = unpack(keyed_tensors)
    if unpacked is None:
        raise TypeError("keyed_tensors holds torch.fx proxies outside of tracing; expected KeyedTensors")
    names, widths, values, dims = unpacked
    if not values and not groups:
        return []
    column_map = _plans.find(groups, names, widths).plan.column_map
    return apply_column_map(values, column_map, None, common_key_dim(dims, values, column_map.used_inputs))


def _regroup_scripted(keyed_tensors: List[KeyedTensor], groups: List[List[str]]) -> List[Tensor]:
    if len(keyed_tensors) == 0 and len(groups) == 0:
        return []
    key_dims = [kt.key_dim() for kt in keyed_tensors]
    for i, key_dim in enumerate(key_dims):
        if key_dim != key_dims[0]:
            raise ValueError(
                f"keyed_tensors[{i}] has key_dim {key_dim}, keyed_tensors[0] has {key_dims[0]}; scripted code "
                "expects the same number for all"
            )
    return torch.ops.torchrec_kt.regroup_by_keys(
        [kt.values() for kt in keyed_tensors],
        [kt.keys() for kt in keyed_tensors],
        [kt.length_per_key() for kt in keyed_tensors],
        groups,
        key_dims[0] if len(key_dims) > 0 else 1,
    )


@torch.fx.wrap
def _to_dict(keys: List[str], values: List[Tensor]) -> Dict[str, Tensor]:
    return {key: values[i] for i, key in enumerate(keys)}


def regroup(keyed_tensors: List[KeyedTensor], groups: List[List[str]]) -> List[Tensor]:
    """Rearrange the columns of KeyedTensors into groups; replaces ``KeyedTensor.regroup``.

    The plan is built on the first call with given keys, widths and groups, and found again on later
    ones; the batch may change freely.

    Args:
        keyed_tensors: values ``[batch, sum of widths]`` each, or any rank with the keys in
            ``key_dim``.
        groups: keys of each output. A key may be used any number of times, or not at all.

    Returns:
        One new contiguous tensor per group, ``[batch, sum of the widths of its keys]``.

    Raises:
        KeyError: a group names a key that no input holds.
        ValueError: a used key appears twice; batches, devices or key_dims differ; values are
            narrower than their widths say.
        TypeError: an argument is of the wrong type, or dtypes cannot be promoted.

    Example:
        >>> import torch, torchrec_kt
        >>> from torchrec.sparse.jagged_tensor import KeyedTensor
        >>> kt = KeyedTensor(keys=["a", "b"], length_per_key=[1, 2], values=torch.tensor([[1, 2, 3]]))
        >>> torchrec_kt.regroup([kt], [["b", "a"], ["b"]])
        [tensor([[2, 3, 1]]), tensor([[2, 3]])]
    """
    return _regroup(keyed_tensors, groups)


def regroup_as_dict(
    keyed_tensors: List[KeyedTensor], groups: List[List[str]], keys: List[str]
) -> Dict[str, Tensor]:
    """:func:`regroup` with a name for each group; replaces ``KeyedTensor.regroup_as_dict``.

    Args:
        keyed_tensors: as for :func:`regroup`.
        groups: as for :func:`regroup`.
        keys: the name of each output, all different.

    Returns:
        ``{name: tensor}`` in the order of ``keys``.

    Raises:
        ValueError: also if the number of names is not that of the groups, or a name repeats.

    Example:
        >>> import torch, torchrec_kt
        >>> from torchrec.sparse.jagged_tensor import KeyedTensor
        >>> kt = KeyedTensor(keys=["a", "b"], length_per_key=[1, 2], values=torch.tensor([[1, 2, 3]]))
        >>> torchrec_kt.regroup_as_dict([kt], [["b"], ["a"]], ["user", "item"])
        {'user': tensor([[2, 3]]), 'item': tensor([[1]])}
    """
    check_names(groups, keys)
    return _to_dict(keys, _regroup(keyed_tensors, groups))
