"""Put the package under code that calls ``KeyedTensor.regroup`` or FBGEMM's operator by name.

For models whose source is not to be touched. :func:`patch_keyed_tensor` replaces the two static
methods of ``KeyedTensor``, :func:`patch_fbgemm` the operator that TorchRec's ``KTRegroupAsDict`` and
scripted graphs call. For modules in a model there is :func:`torchrec_kt.swap_regroup`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from ..ops.compat import kt_regroup_arguments, permute_multi_embedding
from .functional import regroup, regroup_as_dict

__all__ = ["Patch", "patch_fbgemm", "patch_keyed_tensor"]

logger = logging.getLogger(__name__)


class _Site:
    """A place that is patched while at least one :class:`Patch` is in force."""

    def __init__(self, name: str, install: Callable[[], Callable[[], None]]) -> None:
        self.name = name
        self._install = install
        self._restore: Callable[[], None] | None = None
        self._in_force = 0
        self._lock = threading.Lock()

    def enter(self) -> None:
        with self._lock:
            if self._restore is None:
                self._restore = self._install()
            self._in_force += 1

    def leave(self) -> None:
        with self._lock:
            self._in_force -= 1
            if self._in_force == 0 and self._restore is not None:
                restore, self._restore = self._restore, None
                restore()


class Patch:
    """A patch in force, from its making until :meth:`undo` or the end of a ``with`` block.

    Patches of one place may overlap in any order, also from several threads: the place stays
    patched until the last of them is undone.
    """

    def __init__(self, site: _Site) -> None:
        self._site = site
        self._lock = threading.Lock()
        self._in_force = False
        site.enter()
        self._in_force = True

    def undo(self) -> None:
        """Take the patch back. Doing so again changes nothing."""
        with self._lock:
            was, self._in_force = self._in_force, False
        if was:
            self._site.leave()

    def __enter__(self) -> Patch:
        if not self._in_force:
            raise RuntimeError(f"this patch was undone; call {self._site.name}() again for a new one")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<{self._site.name}(): {'in force' if self._in_force else 'undone'}>"


def patch_keyed_tensor() -> Patch:
    """Make ``KeyedTensor.regroup`` and ``KeyedTensor.regroup_as_dict`` this package's functions.

    For the whole process, all threads, from this call on. Models that call the static methods get
    :func:`torchrec_kt.regroup` and :func:`torchrec_kt.regroup_as_dict` in eager mode, and in what is
    traced, scripted, compiled or exported while the patch is in force; graphs made before or
    after keep what they were made with. (TorchScript compiles a class once for a process: a class
    of models that it has met before keeps what it called then, unless it is traced first.) Helper functions beside the class
    (``permute_multi_embedding``, ``regroup_kts``) call FBGEMM and are reached by :func:`patch_fbgemm`.

    Returns:
        A :class:`Patch`: leave it for good, call its ``undo()``, or use it in a ``with`` statement.

    Example:
        >>> import torch, torchrec_kt
        >>> from torchrec.sparse.jagged_tensor import KeyedTensor
        >>> kt = KeyedTensor(keys=["a", "b"], length_per_key=[1, 2], values=torch.tensor([[1, 2, 3]]))
        >>> with torchrec_kt.patch_keyed_tensor():
        ...     KeyedTensor.regroup([kt], [["b", "a"]])
        [tensor([[2, 3, 1]])]
    """
    return Patch(_KEYED_TENSOR)


def patch_fbgemm() -> Patch:
    """Run ``fbgemm::permute_multi_embedding`` by this package's operator.

    For the whole process, all threads, from this call on, whoever calls the operator: TorchRec's
    ``KTRegroupAsDict``, code that calls it by name, and graphs scripted or saved long ago. Its
    internal function ``fbgemm::permute_multi_embedding_function`` is replaced too, through which
    ``fbgemm::regroup_keyed_tensor`` runs forward and backward. Gradients of columns that no row of
    the plan names become zero, and arguments are checked: what would have read or written outside
    of a tensor raises ``ValueError``.

    Graphs compiled or exported while the patch is in force hold this package's operator and
    need ``import torchrec_kt`` where they are loaded. CUDA tensors are covered; without this
    package's CUDA kernel they take the pure torch path, and each call reads the plan back from the
    device.

    Returns:
        A :class:`Patch`: leave it for good, call its ``undo()``, or use it in a ``with`` statement.

    Raises:
        RuntimeError: FBGEMM's operator is not there.

    Example:
        >>> import torch, torchrec_kt
        >>> with torchrec_kt.patch_fbgemm():
        ...     plan = torch.ops.fbgemm.kt_regroup_arguments(torch.empty(0), [["a", "b"]], [[1, 2]], [["b"]])
        ...     torch.ops.fbgemm.permute_multi_embedding([torch.tensor([[1, 2, 3]])], *plan)
        [tensor([[2, 3]])]
    """
    return Patch(_FBGEMM)


def _install_methods() -> Callable[[], None]:
    ours = {"regroup": staticmethod(regroup), "regroup_as_dict": staticmethod(regroup_as_dict)}
    theirs = {name: KeyedTensor.__dict__[name] for name in ours}
    for name, method in ours.items():
        setattr(KeyedTensor, name, method)

    def restore() -> None:
        for name, method in ours.items():
            if KeyedTensor.__dict__.get(name) is method:
                setattr(KeyedTensor, name, theirs[name])
            else:
                # Putting the old one back would undo somebody else's patch with ours.
                logger.warning(
                    "KeyedTensor.%s was replaced again after patch_keyed_tensor(); left as it is", name
                )

    return restore


_OPERATOR = "permute_multi_embedding"
_INTERNAL = "permute_multi_embedding_function"


def _install_operators() -> Callable[[], None]:
    for name in (_OPERATOR, _INTERNAL):
        if not hasattr(torch.ops.fbgemm, name):
            raise RuntimeError(
                f"there is no operator fbgemm::{name} to patch; import fbgemm_gpu first, and see the README for the "
                "builds that fit together"
            )
    library = torch.library.Library("fbgemm", "IMPL")
    try:
        for key in ("CPU", "CUDA", "Meta", "Autograd"):
            library.impl(_OPERATOR, permute_multi_embedding, key, allow_override=True)
        for key in ("CPU", "CUDA", "Meta"):
            library.impl(_INTERNAL, _permute_either_way, key, allow_override=True)
        # FBGEMM's says that plans are float32, which they are not and which the operator refuses.
        library.impl("kt_regroup_arguments", kt_regroup_arguments, "Meta", allow_override=True)
    except BaseException:
        library._destroy()
        raise
    return library._destroy


def _permute_either_way(
    pooled_embs: Sequence[Tensor],
    permutes: Tensor,
    in_shapes: Tensor,
    out_shapes: Tensor,
    out_lengths: Sequence[int],
    reverse: bool = False,
) -> list[Tensor]:
    if not reverse:
        return permute_multi_embedding(pooled_embs, permutes, in_shapes, out_shapes, out_lengths)
    # Gradients back to where they came from. Rows that meet in one column are summed, columns without
    # a row are zero.
    return torch.ops.torchrec_kt.regroup_transposed(pooled_embs, permutes, out_lengths)


_KEYED_TENSOR = _Site("patch_keyed_tensor", _install_methods)
_FBGEMM = _Site("patch_fbgemm", _install_operators)
