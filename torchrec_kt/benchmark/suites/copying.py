"""What the suites that move data have in common: one case, its modes, all its candidates."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..candidates import Candidate, Factory
from ..measuring import (
    GRADIENT,
    TELLING_BYTES,
    Budget,
    CannotRun,
    Clock,
    Problem,
    copy_of,
    file_name,
    interleaved,
    peak_growth,
    trace,
)
from ..results import COPY, NotRun, Row
from ..workloads import Workload
from . import Case, Settings

__all__ = ["BOTH", "CLONE", "FORWARD", "copying_case", "reason"]

FORWARD = "forward"
BOTH = "forward + backward"
CLONE = "clone"

# Few rows are enough to see what a candidate leaves unwritten, and memory of that size is used again.
_FEW_ROWS = 3
_SLOW_SECONDS = 0.1


def copying_case(
    suite: str,
    workload: Workload,
    factories: Mapping[str, Factory],
    keyed: bool,
    budget: Budget,
    sweep: tuple[str, int] | None = None,
    modes: Sequence[str] = (FORWARD, BOTH),
) -> Case:
    """A case whose candidates all turn the same inputs into the same outputs."""

    def run(settings: Settings) -> list[Row]:
        return _measure(suite, workload, factories, keyed, budget, sweep, modes, settings)

    return Case(suite, workload.name, workload.megabytes, run)


def _measure(
    suite: str,
    workload: Workload,
    factories: Mapping[str, Factory],
    keyed: bool,
    budget: Budget,
    sweep: tuple[str, int] | None,
    modes: Sequence[str],
    settings: Settings,
) -> list[Row]:
    budget = settings.limit(budget)
    clock = Clock(settings.device)
    problem = Problem(workload, settings.device, keyed)
    few = Problem(workload, settings.device, keyed, batch=min(_FEW_ROWS, workload.batch))
    absent: dict[str, NotRun] = {}
    found: dict[str, Candidate] = {}
    for name, factory in settings.chosen(factories).items():
        try:
            found[name] = factory(workload, settings.device)
        except Exception as error:  # a peer that is not there or does not load is no reason to stop
            absent[name] = NotRun(reason(error))
    wrong: dict[str, str | None] = {}
    for name, candidate in found.items():
        try:
            wrong[name] = _mismatch(candidate, few, problem, BOTH in modes)
        except Exception as error:
            absent[name] = NotRun(reason(error))
    rows: list[Row] = []
    for mode in modes:
        row = Row(
            suite=suite,
            case=workload.name,
            mode=mode,
            batch=workload.batch,
            keys=workload.uses,
            input_bytes=problem.input_bytes,
            moved=problem.moved(mode),
            sweep=sweep,
        )
        calls = {name: _call(problem, found[name], mode) for name in wrong if name not in absent}
        yardsticks: dict[str, Callable[[], Any]] = {COPY: copy_of(problem.moved(mode), settings.device)}
        if mode == FORWARD:
            yardsticks[CLONE] = partial(_clone, problem.values)
        timed = interleaved(calls | yardsticks, clock, budget, row.moved)
        del yardsticks
        for name in (*factories, COPY, CLONE):
            if name in absent:
                row.figures[name] = absent[name]
            elif name in calls:
                figure = timed[name]
                times = 1 if settings.quick or figure.p50 > _SLOW_SECONDS else 3
                # At least the outputs are kept; of less than that there is nothing to be told.
                tells = clock.cuda or problem.moved(mode) >= 2 * TELLING_BYTES
                growth = peak_growth(calls[name], clock, times) if tells else None
                mismatch = None if mode == FORWARD and wrong[name] == GRADIENT else wrong[name]
                row.figures[name] = dataclasses.replace(
                    figure, memory=growth, match=mismatch is None, mismatch=mismatch
                )
                if settings.trace is not None:
                    trace(calls[name], clock, trace_path(settings.trace, row, name))
            elif name in timed:
                row.figures[name] = timed[name]
        rows.append(row)
        del calls, timed
    del problem, few, found
    gc.collect()
    if clock.cuda:
        torch.cuda.empty_cache()
    return rows


def _clone(values: Sequence[Tensor]) -> list[Tensor]:
    return [v.clone() for v in values]


def _call(problem: Problem, candidate: Candidate, mode: str) -> Callable[[], Any]:
    inputs = problem.inputs(mode == BOTH)
    if mode == BOTH:
        return lambda: problem.backward(candidate(inputs))

    def forward() -> Any:
        with torch.no_grad():
            return candidate(inputs)

    return forward


def _mismatch(candidate: Candidate, few: Problem, problem: Problem, gradients: bool) -> str | None:
    """Few rows first, with and without autograd, then as many as are measured."""
    with torch.no_grad():
        wrong = few.mismatch(candidate, gradients=False)
    return wrong or few.mismatch(candidate, gradients=True) or problem.mismatch(candidate, gradients)


def trace_path(folder: Path, row: Row, candidate: str) -> Path:
    """Where a candidate's Chrome trace goes."""
    return folder / row.suite / f"{file_name(row.case, row.mode, candidate)}.json"


def reason(error: BaseException) -> str:
    """An exception in a line."""
    if isinstance(error, CannotRun):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{(error.name or 'a module').split('.')[0]} is not installed"
    first = (str(error).strip().splitlines() or [""])[0]
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
