"""Shapes that hurt: narrow and odd widths, blocks, many keys, inputs and groups, batches from 1 to 65,536,
half types, casts, omissions, repeats."""

from __future__ import annotations

import dataclasses

import torch

from ..candidates import ALIKE, FUNCTION
from ..measuring import Budget
from ..workloads import Workload, function_workloads
from . import Case, function
from .copying import copying_case

__all__ = ["cases"]

_BUDGET = Budget(rounds=7, seconds=4)
_CANDIDATES = {name: factory for name, factory in FUNCTION.items() if name not in ALIKE}

_BATCHES = (1, 8, 64, 512, 4096, 16384, 65536)
_WIDTHS = (1, 2, 4, 8, 10, 16, 31, 64, 128, 256)
# The sweep over widths moves about as many columns at each.
_COLUMNS = 2048
_QUICK = ("odd widths", "width 1", "contiguous blocks", "64 repeats", "host")
# 2.1 GB of the shape that the function suite has four times.
_LEFT_OUT = "published B=4096"
_LARGEST_QUICK_BATCH = 512
_QUICK_WIDTHS = (8, 64)


def cases(quick: bool) -> list[Case]:
    """The stored workloads that are not the function suite's, then the two sweeps."""
    stored = [w for name, w in function_workloads().items() if name not in (*function.STORED, _LEFT_OUT)]
    if quick:
        stored = [w for w in stored if w.name in _QUICK]
    found = [_case(workload) for workload in stored]
    for batch in _BATCHES:
        if not quick or batch <= _LARGEST_QUICK_BATCH:
            found.append(_case(_with_batch(batch), ("batch", batch)))
    for width in _QUICK_WIDTHS if quick else _WIDTHS:
        found.append(_case(_with_width(width), ("width", width)))
    return found


def _case(workload: Workload, sweep: tuple[str, int] | None = None) -> Case:
    return copying_case("shapes", workload, _CANDIDATES, keyed=True, budget=_BUDGET, sweep=sweep)


def _with_batch(batch: int) -> Workload:
    """26 keys of width 64 from two inputs."""
    return dataclasses.replace(function_workloads()["ctr small"], name=f"batch {batch}", batch=batch)


def _with_width(width: int) -> Workload:
    """Keys of one width from two inputs, dealt to two groups in turn."""
    half = _COLUMNS // width // 2
    keys = [[f"f{n}" for n in range(half)], [f"f{half + n}" for n in range(half)]]
    every = [key for row in keys for key in row]
    return Workload(
        name=f"width {width} alone",
        batch=512,
        keys=keys,
        widths=[[width] * half] * 2,
        groups=[every[::2], every[1::2]],
        dtype=torch.float32,
        cast=None,
        note="",
    )
