"""What a model author touches. Needs TorchRec."""

try:
    import torchrec as _torchrec  # noqa: F401  # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise ImportError(
        f"this part of torchrec_kt needs torchrec, whose import failed ({error}). Install torchrec and a "
        "matching fbgemm-gpu or fbgemm-gpu-cpu, see the README; torchrec_kt.ops works without them"
    ) from error

from ._pytree import complete_registration as _complete_registration
from .functional import regroup, regroup_as_dict
from .kt_regroup import KTRegroupAsDict, PermuteMultiEmbedding
from .patch import patch_fbgemm, patch_keyed_tensor
from .swap import swap_regroup

_complete_registration()

__all__ = [
    "KTRegroupAsDict",
    "PermuteMultiEmbedding",
    "patch_fbgemm",
    "patch_keyed_tensor",
    "regroup",
    "regroup_as_dict",
    "swap_regroup",
]
