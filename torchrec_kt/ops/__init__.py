"""Regroup as an operator on tensors. Needs torch alone."""

import torch

from . import compat as _compat  # noqa: F401  registers the FBGEMM-shaped operators
from .plan import RegroupPlan, UnknownKeyError
from .regroup import regroup_values

__all__ = ["RegroupPlan", "UnknownKeyError", "has_cuda_kernel", "regroup_values"]


def has_cuda_kernel() -> bool:
    """Whether tensors on a CUDA device are regrouped by a CUDA kernel of this package.

    Asks the dispatcher, so the answer is about what would run, not about what was built. Without
    one, they take the pure torch path.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key("torchrec_kt::regroup", "CUDA")
