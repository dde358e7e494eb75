"""Operator level: the six published sizes, tensors in and out, plans made beforehand."""

from __future__ import annotations

from ..candidates import OPERATOR
from ..measuring import Budget
from ..workloads import operator_workloads
from . import Case
from .copying import BOTH, FORWARD, copying_case

__all__ = ["cases"]

_BUDGET = Budget(rounds=7, seconds=10)
# Both directions of the largest sizes need several times their 2.2 GB; the published figures are forward.
_BOTH_UP_TO_MEGABYTES = 300


def cases(quick: bool) -> list[Case]:
    workloads = list(operator_workloads().values())
    return [
        copying_case(
            "operator",
            workload,
            OPERATOR,
            keyed=False,
            budget=_BUDGET,
            modes=(FORWARD, BOTH)
            if not quick and workload.megabytes <= _BOTH_UP_TO_MEGABYTES
            else (FORWARD,),
        )
        for workload in (workloads[:1] if quick else workloads)
    ]
