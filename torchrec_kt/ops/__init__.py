"""Regroup as an operator on tensors. Needs torch alone."""

from .plan import RegroupPlan, UnknownKeyError
from .regroup import regroup_values

__all__ = ["RegroupPlan", "UnknownKeyError", "regroup_values"]
