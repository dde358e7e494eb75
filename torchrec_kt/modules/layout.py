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
        layout: per input a ``(keys, widths)`` pair, a KeyedTensor, or an embedding bag collection.

    Raises:
        TypeError: an entry is none of these.
        ValueError: KeyedTensors differ in key_dim.
    """
    pairs: list[tuple[Sequence[str], Sequence[int]]] = []
    key_dims: set[int] = set()
    if isinstance(layout, (str, KeyedTensor)) or not isinstance(layout, Sequence):
        raise TypeError(f"layout is a {type(layout).__name__}; expected a list with one entry per input")
    for i, entry in enumerate(layout):
        if isinstance(entry, KeyedTensor):
            pairs.append((entry.keys(), entry.length_per_key()))
            key_dims.add(entry.key_dim())
        elif hasattr(entry, "embedding_bag_configs"):
            pairs.append(_of_collection(entry))
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


def _of_collection(collection: Any) -> tuple[list[str], list[int]]:
    # The order of its output: table by table, and within a table by feature.
    configs = collection.embedding_bag_configs()
    keys: list[str] = []
    widths: list[int] = []
    for config, names in zip(configs, get_embedding_names_by_table(configs)):
        keys.extend(names)
        widths.extend([config.embedding_dim] * len(names))
    return keys, widths
