"""Host cost: what a call costs when there is next to nothing to move."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..candidates import BARE, CAT_SPLIT, FUNCTION, MODULE, REGROUP, Candidate, Factory
from ..measuring import Budget, CannotRun, Clock, Problem, interleaved, trace
from ..results import OURS, NotRun, Row
from ..workloads import Workload, function_workloads
from . import Case, Settings
from .copying import reason, trace_path

__all__ = ["MODES", "cases"]

MODES = ("no_grad", "grad", "forward + backward", "compiled", "scripted")
_BUDGET = Budget(rounds=15, seconds=10)


def cases(quick: bool) -> list[Case]:
    stored = function_workloads()
    few = stored["host"]
    more = dataclasses.replace(stored["ctr narrow"], name="host, 39 keys", batch=1)
    return [
        Case("host", workload.name, workload.megabytes, _runner(workload))
        for workload in ([few] if quick else [few, more])
    ]


def _runner(workload: Workload) -> Callable[[Settings], list[Row]]:
    return lambda settings: [_measure(workload, mode, settings) for mode in MODES]


def _measure(workload: Workload, mode: str, settings: Settings) -> Row:
    clock = Clock(settings.device)
    problem = Problem(workload, settings.device, keyed=True)
    row = Row("host", workload.name, mode, workload.batch, workload.uses, problem.input_bytes, None, None)
    calls: dict[str, Callable[[], Any]] = {}
    wrong: dict[str, str | None] = {}
    factories = _factories(mode)
    for name, factory in settings.chosen(factories).items():
        try:
            candidate = factory(workload, settings.device)
            with torch.set_grad_enabled(mode in ("grad", "forward + backward")):
                wrong[name] = problem.mismatch(candidate, mode == "forward + backward")
                calls[name] = _call(problem, candidate, mode)
                calls[name]()
        except Exception as error:
            calls.pop(name, None)
            row.figures[name] = NotRun(reason(error))
    timed = interleaved(calls, clock, settings.limit(_BUDGET))
    figures = {
        name: dataclasses.replace(found, match=wrong[name] is None, mismatch=wrong[name])
        for name, found in timed.items()
    }
    row.figures = {name: (row.figures | figures)[name] for name in factories if name in row.figures | figures}
    if settings.trace is not None:
        for name, call in calls.items():
            trace(call, clock, trace_path(settings.trace, row, name))
    return row


def _call(problem: Problem, candidate: Candidate, mode: str) -> Callable[[], Any]:
    if mode == "forward + backward":
        inputs = problem.inputs(requires_grad=True)
        return lambda: problem.backward(candidate(inputs))
    inputs = problem.inputs(requires_grad=mode == "grad")
    if mode == "grad":
        return lambda: candidate(inputs)

    def without_grad() -> Any:
        with torch.no_grad():
            return candidate(inputs)

    return without_grad


def _factories(mode: str) -> Mapping[str, Factory]:
    if mode == "scripted":
        return {OURS: _scripted_ours, MODULE: _scripted_theirs}
    names = (OURS, f"{OURS}, function", MODULE, REGROUP, CAT_SPLIT)
    if mode == "compiled":
        return {name: _compiled(FUNCTION[name]) for name in names}
    return {name: FUNCTION[name] for name in (*names, BARE)}


def _compiled(factory: Factory) -> Factory:
    def make(workload: Workload, device: torch.device) -> Candidate:
        torch._dynamo.reset()
        return torch.compile(factory(workload, device), fullgraph=True)

    return make


def _scripted_ours(workload: Workload, device: torch.device) -> Candidate:
    from ...modules import KTRegroupAsDict

    layout = list(zip(workload.keys, workload.widths))
    module = KTRegroupAsDict(workload.groups, workload.names, layout=layout)
    return _scripted(module.to(device))


def _scripted_theirs(workload: Workload, device: torch.device) -> Candidate:
    from torchrec.modules.regroup import KTRegroupAsDict

    if workload.cast is not None:
        raise CannotRun("takes no target type when scripted")
    module = KTRegroupAsDict(workload.groups, workload.names)
    module(Problem(workload, device, keyed=True).inputs(False))  # scripting keeps the plan of the first batch
    return _scripted(module)


def _scripted(module: torch.nn.Module) -> Candidate:
    scripted = torch.jit.script(module)
    return lambda kts: list(scripted(kts).values())
