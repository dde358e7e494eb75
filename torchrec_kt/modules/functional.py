"""``KeyedTensor.regroup`` and ``regroup_as_dict`` with a cache of plans."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from ..ops.regroup import apply_column_map
from ._inputs import PlanCache, check_names, common_key_dim, unpack

__all__ = ["regroup", "regroup_as_dict"]

_plans = PlanCache(size=64)


def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
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
    unpacked = unpack(keyed_tensors)
    if not unpacked.values and not groups:
        return []
    plan = _plans.find(groups, unpacked.keys, unpacked.widths)
    key_dim = common_key_dim(unpacked, plan.column_map.used_inputs)
    return apply_column_map(unpacked.values, plan.column_map, None, key_dim)


def regroup_as_dict(
    keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
) -> dict[str, Tensor]:
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
    return dict(zip(keys, regroup(keyed_tensors, groups)))
