"""Function level: the published case and its kin, from ``KeyedTensor``s to one tensor per group."""

from __future__ import annotations

import dataclasses

from ..candidates import ALIKE, FUNCTION
from ..measuring import Budget
from ..workloads import function_workloads
from . import Case
from .copying import copying_case

__all__ = ["STORED", "cases"]

_EVERY_CANDIDATE = ("published", "published dup", "published B=512")
_FEWER_CANDIDATES = ("published B=2048", "production bf16", "production fp32")
STORED = (*_EVERY_CANDIDATE, *_FEWER_CANDIDATES)
_QUICK_BATCH = 64
_BUDGET = Budget(rounds=7, seconds=10)


def cases(quick: bool) -> list[Case]:
    stored = function_workloads()
    # Small enough for --quick, and in full runs as well, so that either can be compared with the other.
    small = [
        dataclasses.replace(stored[name], name=f"{name} B={_QUICK_BATCH}", batch=_QUICK_BATCH)
        for name in ("published", "published dup")
    ]
    every = small if quick else [*(stored[name] for name in _EVERY_CANDIDATE), *small]
    fewer = {name: factory for name, factory in FUNCTION.items() if name not in ALIKE}
    return [copying_case("function", w, FUNCTION, keyed=True, budget=_BUDGET) for w in every] + [
        copying_case("function", stored[name], fewer, keyed=True, budget=_BUDGET)
        for name in (() if quick else _FEWER_CANDIDATES)
    ]
