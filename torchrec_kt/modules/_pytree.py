"""What ``torch.export`` needs to know of KeyedTensors and TorchRec does not tell it.

TorchRec registers ``KeyedTensor`` as a pytree without names for its parts, so that export refuses
models that take one, and without a way to read its context back, so that a program that was saved
would refuse its inputs. Importing this package fills the two in where they are missing.
"""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree
from torchrec.sparse.jagged_tensor import KeyedTensor

__all__ = ["complete_registration"]


def complete_registration() -> None:
    """Fill in what the registration of KeyedTensor lacks; what is there stays."""
    node = pytree.SUPPORTED_NODES.get(KeyedTensor)
    if node is not None and node.flatten_with_keys_fn is None:
        pytree.SUPPORTED_NODES[KeyedTensor] = node._replace(flatten_with_keys_fn=_flatten_with_keys)
    saved = pytree.SUPPORTED_SERIALIZED_TYPES.get(KeyedTensor)
    if saved is not None and saved.from_dumpable_context is None and saved.to_dumpable_context is None:
        pytree.SUPPORTED_SERIALIZED_TYPES[KeyedTensor] = saved._replace(
            to_dumpable_context=list, from_dumpable_context=tuple
        )


def _flatten_with_keys(keyed_tensor: KeyedTensor) -> tuple[list[tuple[Any, Any]], Any]:
    key_dim, rank = keyed_tensor.key_dim(), keyed_tensor.values().dim()
    if key_dim % rank != 1:
        raise ValueError(
            f"a KeyedTensor with key_dim {key_dim} cannot be an input of an exported program, since TorchRec's "
            "pytree registration drops key_dim; build it inside the model, from tensors"
        )
    parts, context = pytree.SUPPORTED_NODES[KeyedTensor].flatten_fn(keyed_tensor)
    return [(pytree.GetAttrKey("_values"), part) for part in parts], context
