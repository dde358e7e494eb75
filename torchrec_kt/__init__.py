"""torchrec_kt: the regroup step of recommendation models, faster and right.

A drop-in for TorchRec's ``KTRegroupAsDict`` and ``KeyedTensor.regroup``. What needs TorchRec is
imported when it is first used, so that :mod:`torchrec_kt.ops` works with torch alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import ops as _ops  # noqa: F401  registers the operators, which saved graphs look for

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .modules import (
        KTRegroupAsDict,
        PermuteMultiEmbedding,
        patch_fbgemm,
        patch_keyed_tensor,
        regroup,
        regroup_as_dict,
        swap_regroup,
    )

__all__ = [
    "KTRegroupAsDict",
    "PermuteMultiEmbedding",
    "__version__",
    "patch_fbgemm",
    "patch_keyed_tensor",
    "regroup",
    "regroup_as_dict",
    "swap_regroup",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import modules

        value = globals()[name] = getattr(modules, name)  # kept: the next look-up finds it at once
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
