"""Keys and widths of inputs that are not there yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedTensor

__all__ = ["Layout", "read_layout"]

Layout = tuple[Sequence[str], Sequence[int]] | KeyedTensor | EmbeddingBagCollectionInterface


def read_layout(layout: Sequence[Layout]) -> tuple[list[tuple[Sequence[str], Sequence[int]]], int]:
    """``(keys, widths)`` of each entry, and the key_dim.

    Args:
        layout: per input a ``(keys, widths)`` pair, a KeyedTensor, or an embedding bag collection:
            plain, quantised, or sharded, whose order of keys is then that of the sharding.

    Raises:
        TypeError: an entry is none of these.
        ValueError: KeyedTensors differ in key_dim.
    """
    pairs: list[tuple[Sequence[str], Sequence[int]]] = []
    key_dims: set[int] = set()
    if isinstance(layout, (str, KeyedTensor)) or not isinstance(layout, Sequence):
        raise TypeError(f"layout is a {type(layout).__name__}; expected a list with one entry per input")
    if _is_pair(layout):
        raise TypeError(
            "layout is a single (keys, widths) pair; expected a list with one entry per input, pass [pair]"
        )
    for i, entry in enumerate(layout):
        if isinstance(entry, KeyedTensor):
            pairs.append((entry.keys(), entry.length_per_key()))
            key_dims.add(entry.key_dim())
        elif hasattr(entry, "embedding_bag_configs") or _output_of(entry) is not None:
            pairs.append(_output_of(entry) or _of_tables(entry))
        elif isinstance(entry, (tuple, list)) and len(entry) == 2:
            pairs.append((entry[0], entry[1]))
        else:
            raise TypeError(
                f"layout[{i}] is a {type(entry).__name__}; expected a (keys, widths) pair, a KeyedTensor or an "
                "EmbeddingBagCollection"
            )
    if len(key_dims) > 1:
        raise ValueError(f"the KeyedTensors of layout have key_dims {sorted(key_dims)}; they must agree")
    return pairs, key_dims.pop() if key_dims else 1


def _is_pair(layout: Sequence[Any]) -> bool:
    return (
        len(layout) == 2
        and all(isinstance(part, (list, tuple)) for part in layout)
        and all(isinstance(width, int) for width in layout[1])
    )


def _output_of(collection: Any) -> tuple[Sequence[str], Sequence[int]] | None:
    """Keys and widths of the output, of collections that order it otherwise than their tables and know how.

    Quantised ones go by type of table, sharded ones by type of sharding.
    """
    names = getattr(collection, "_embedding_names", None)
    shardings = getattr(collection, "_sharding_type_device_group_to_sharding", None)
    if not names and isinstance(shardings, dict):
        # A quantised one that is sharded lists these on its first batch.
        names = [name for sharding in shardings.values() for name in sharding.embedding_names()]
        return names, [dim for sharding in shardings.values() for dim in sharding.embedding_dims()]
    for attribute in ("_length_per_key", "_embedding_dims"):
        widths = getattr(collection, attribute, None)
        if isinstance(names, list) and isinstance(widths, list) and len(names) == len(widths):
            return names, widths
    return None


def _of_tables(collection: Any) -> tuple[Sequence[str], Sequence[int]]:
    configs = collection.embedding_bag_configs()
    by_table = get_embedding_names_by_table(configs)
    keys = [name for names in by_table for name in names]
    return keys, [c.embedding_dim for c, names in zip(configs, by_table) for _ in names]
