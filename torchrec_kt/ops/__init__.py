"""Regroup as an operator on tensors. Needs torch alone."""

from . import _native
from . import compat as _compat  # noqa: F401  registers the operators
from .plan import RegroupPlan, UnknownKeyError
from .regroup import regroup_values

__all__ = ["RegroupPlan", "UnknownKeyError", "has_cuda_kernel", "regroup_values"]


def has_cuda_kernel() -> bool:
    """Whether tensors on a CUDA device are regrouped by the CUDA kernel of this package.

    Loads the library if that has not been tried. Without it, or with ``TORCHREC_KT_PURE_TORCH=1`` in the
    environment, they take the pure torch path.
    """
    return _native.has_kernel("cuda")
