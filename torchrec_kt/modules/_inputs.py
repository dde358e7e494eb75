"""What calls have in common: reading KeyedTensors, checking names, finding the plan."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from ..ops.plan import RegroupPlan

__all__ = ["CachedPlan", "PlanCache", "Unpacked", "check_names", "common_key_dim", "unpack"]


_KEYED_TENSOR = frozenset((KeyedTensor,))

Unpacked = tuple[list[list[str]], list[list[int]], list[Tensor], list[int]]


def unpack(keyed_tensors: Sequence[KeyedTensor]) -> Unpacked | None:
    """Keys, widths, values and key_dim of each KeyedTensor, or of what behaves like one.

    Sharded modules return awaitables that are no KeyedTensor but answer as one, so nothing is asked
    about types unless reading fails.

    Returns:
        None if these are proxies of ``torch.fx``, which hold nothing to read.

    Raises:
        TypeError: the argument is not a list of KeyedTensors.
    """
    keys: list[list[str]] = []
    widths: list[list[int]] = []
    values: list[Tensor] = []
    key_dims: list[int] = []
    if type(keyed_tensors) is list and _KEYED_TENSOR.issuperset(map(type, keyed_tensors)):
        # Nearly always. What the methods would return, without the calls.
        for kt in keyed_tensors:
            keys.append(kt._keys)
            widths.append(kt._length_per_key)
            values.append(kt._values)
            key_dims.append(kt._key_dim)
        return keys, widths, values, key_dims
    if isinstance(keyed_tensors, torch.fx.Proxy):
        return None
    if isinstance(keyed_tensors, KeyedTensor) or not isinstance(keyed_tensors, Sequence):
        raise TypeError(
            f"keyed_tensors is a {type(keyed_tensors).__name__}; expected a list of KeyedTensors, as in [it]"
        )
    if any(isinstance(kt, torch.fx.Proxy) for kt in keyed_tensors):
        return None
    for i, kt in enumerate(keyed_tensors):
        try:
            keys.append(kt.keys())
            widths.append(kt.length_per_key())
            values.append(kt.values())
            key_dims.append(kt.key_dim())
        except (AttributeError, TypeError) as error:
            if all(hasattr(kt, name) for name in ("keys", "length_per_key", "values", "key_dim")):
                raise
            raise TypeError(f"keyed_tensors[{i}] is a {type(kt).__name__}; expected a KeyedTensor") from error
    return keys, widths, values, key_dims


def common_key_dim(dims: list[int], values: Sequence[Tensor], used: Sequence[int]) -> int:
    """The dimension that holds the keys, which the inputs in use must agree on."""
    if not dims:
        return 1
    if dims.count(dims[0]) == len(dims):
        return dims[0]
    for i in used or (0,):
        if not -values[i].dim() <= dims[i] < values[i].dim():
            raise ValueError(
                f"keyed_tensors[{i}] has key_dim {dims[i]}, but values of shape {tuple(values[i].shape)}"
            )
    counted = {i: dims[i] % values[i].dim() for i in used or (0,)}
    first, *others = counted.items()
    for i, dim in others:
        if dim != first[1]:
            raise ValueError(
                f"keyed_tensors[{i}] has key_dim {dims[i]}, keyed_tensors[{first[0]}] has {dims[first[0]]}; they must "
                "hold their keys in the same dimension"
            )
    return first[1]


def check_names(groups: list[list[str]], keys: list[str]) -> None:
    """Raise ValueError unless there is one distinct output name per group. Scripted code uses it too."""
    if len(groups) != len(keys):
        raise ValueError(
            f"got {len(groups)} groups and {len(keys)} keys; expected one key (output name) per group"
        )
    seen: dict[str, int] = {}
    for key in keys:
        if key in seen:
            raise ValueError(
                f"output key '{key}' is given more than once; a dict would lose all but the last of its groups"
            )
        seen[key] = 1


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A plan and what it was built for, in lists that nobody else holds.

    No tuple: exporters walk through the tuples that a module holds, name by name.
    """

    groups: list[list[str]]
    keys: list[list[str]]
    widths: list[list[int]]
    plan: RegroupPlan


class PlanCache:
    """The plans used last, found by names, widths and groups.

    A look-up compares lists, whose strings are mostly the same objects, so it costs about four
    nanoseconds a key. It compares with copies: a list that its owner changed no longer matches. The
    entries are replaced in one assignment, so threads may share a cache; at worst one of them
    builds a plan twice.

    Args:
        size: how many plans to keep.
    """

    __slots__ = ("_entries", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: tuple[CachedPlan, ...] = ()

    def find(
        self, groups: Sequence[Sequence[str]], keys: Sequence[Sequence[str]], widths: Sequence[Sequence[int]]
    ) -> CachedPlan:
        """The plan for these arguments; errors are those of :meth:`RegroupPlan.build`."""
        entries = self._entries
        if entries:  # the one used last first, without the price of a loop
            entry = entries[0]
            if entry.groups == groups and entry.keys == keys and entry.widths == widths:
                return entry
        for n, entry in enumerate(entries):
            # Groups first: among calls on the same inputs they differ soonest.
            if entry.groups == groups and entry.keys == keys and entry.widths == widths:
                self._entries = (entry, *entries[:n], *entries[n + 1 :])
                return entry
        entry = _build(groups, keys, widths)
        if not (entry.groups == groups and entry.keys == keys and entry.widths == widths):
            # Tuples where lists are usual; found again only as lists.
            return self.find(entry.groups, entry.keys, entry.widths)
        self._entries = (entry, *entries[: self._size - 1])
        return entry

    def clear(self) -> None:
        self._entries = ()

    def __len__(self) -> int:
        return len(self._entries)


def _build(
    groups: Sequence[Sequence[str]], keys: Sequence[Sequence[str]], widths: Sequence[Sequence[int]]
) -> CachedPlan:
    plan = RegroupPlan.build(layouts=list(zip(keys, widths)), groups=groups)
    return CachedPlan(
        [list(group) for group in groups], [list(k) for k in keys], [list(w) for w in widths], plan
    )
