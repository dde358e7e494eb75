"""Plan cost: from names and widths to a plan, 10 to 100,000 keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops import RegroupPlan
from ..measuring import Budget, Clock, interleaved, trace
from ..results import OURS, NotRun, Row
from ..workloads import Workload
from . import Case, Settings
from .copying import reason, trace_path

__all__ = ["cases"]

_COUNTS = (10, 100, 1_000, 10_000, 100_000)
_QUICK_COUNTS = _COUNTS[:4]
_WIDTH = 16
_BUDGET = Budget(rounds=7, seconds=12)

Planner = Callable[[Workload], Any]


def cases(quick: bool) -> list[Case]:
    return [
        Case("plan", f"{count} keys", 0.0, _runner(count)) for count in (_QUICK_COUNTS if quick else _COUNTS)
    ]


def _runner(count: int) -> Callable[[Settings], list[Row]]:
    return lambda settings: [_measure(_workload(count), settings)]


def _workload(count: int) -> Workload:
    """Keys of two inputs, dealt to two groups in turn."""
    keys = [[f"f{n}" for n in range(count // 2)], [f"f{n}" for n in range(count // 2, count)]]
    every = [key for row in keys for key in row]
    return Workload(
        name=f"{count} keys",
        batch=0,
        keys=keys,
        widths=[[_WIDTH] * len(row) for row in keys],
        groups=[every[::2], every[1::2]],
        dtype=torch.float32,
        cast=None,
        note="",
    )


def _measure(workload: Workload, settings: Settings) -> Row:
    clock = Clock(torch.device("cpu"))  # plans are made on the host
    row = Row("plan", workload.name, "build", 0, workload.uses, 0, None, None)
    calls: dict[str, Callable[[], Any]] = {}
    match: dict[str, bool] = {}
    right = _expected(workload)
    for name, (planner, columns) in settings.chosen(_PLANNERS).items():
        try:
            match[name] = torch.equal(columns(workload, planner(workload)), right)
            calls[name] = _bind(planner, workload)
        except Exception as error:
            row.figures[name] = NotRun(reason(error))
    timed = interleaved(calls, clock, settings.limit(_BUDGET))
    for name, found in timed.items():
        mismatch = None if match[name] else "columns"
        row.figures[name] = type(found)(
            **{**vars(found), "match": match[name], "mismatch": mismatch},
        )
        if settings.trace is not None:
            trace(calls[name], clock, trace_path(settings.trace, row, name))
    row.figures = {name: row.figures[name] for name in _PLANNERS if name in row.figures}
    return row


def _bind(planner: Planner, workload: Workload) -> Callable[[], Any]:
    return lambda: planner(workload)


def _ours(workload: Workload) -> RegroupPlan:
    """Both directions: a plan, checked, and the transpose that gradients take."""
    plan = workload.plan
    plan.column_map.transpose()
    return plan


def _our_rows(workload: Workload) -> Any:
    return torch.ops.torchrec_kt.kt_regroup_arguments(
        torch.empty(0), workload.keys, workload.widths, workload.groups
    )


def _fbgemm_rows(workload: Workload) -> Any:
    import fbgemm_gpu  # noqa: F401

    return torch.ops.fbgemm.kt_regroup_arguments(
        torch.empty(0), workload.keys, workload.widths, workload.groups
    )


def _torchrec_rows(workload: Workload) -> Any:
    from torchrec.sparse.jagged_tensor import _kt_regroup_arguments

    return _kt_regroup_arguments(torch.empty(0), workload.keys, workload.widths, workload.groups)


def _torchrec_remap(workload: Workload) -> Any:
    from torchrec.sparse.jagged_tensor import _remap_to_groups

    return _remap_to_groups(workload.keys, workload.widths, workload.groups)


def _of_plan(workload: Workload, plan: RegroupPlan) -> Tensor:
    moves = torch.tensor(
        sorted(
            (m.out_tensor, m.out_offset, m.in_tensor, m.in_offset, m.length) for m in plan.column_map.moves
        )
    )
    return _columns(workload, moves[:, 2], moves[:, 3], moves[:, 4])


def _of_rows(workload: Workload, arguments: Any) -> Tensor:
    rows = arguments[0].long()
    return _columns(workload, rows[:, 0], rows[:, 2], rows[:, 4])


def _of_remap(workload: Workload, arguments: Any) -> Tensor:
    permute, _, offsets, *_ = arguments
    widths = offsets.diff()[permute.long()]
    return _runs(offsets[permute.long()].long(), widths.long())


def _columns(workload: Workload, tensors: Tensor, offsets: Tensor, lengths: Tensor) -> Tensor:
    """For each column of the outputs, laid side by side, its column among the inputs, laid side by side."""
    first = torch.tensor([0, *map(sum, workload.widths)]).cumsum(0)
    return _runs(first[tensors.long()] + offsets, lengths)


def _runs(starts: Tensor, lengths: Tensor) -> Tensor:
    before = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return torch.repeat_interleave(starts, lengths) + torch.arange(len(before)) - before


def _expected(workload: Workload) -> Tensor:
    """By hand."""
    place: dict[str, tuple[int, int]] = {}
    column = 0
    for keys, widths in zip(workload.keys, workload.widths):
        for key, width in zip(keys, widths):
            place[key] = (column, width)
            column += width
    used = torch.tensor([place[key] for group in workload.groups for key in group])
    return _runs(used[:, 0], used[:, 1])


_PLANNERS: dict[str, tuple[Planner, Callable[[Workload, Any], Tensor]]] = {
    OURS: (_ours, _of_plan),
    f"{OURS}, FBGEMM's form": (_our_rows, _of_rows),
    "FBGEMM kt_regroup_arguments": (_fbgemm_rows, _of_rows),
    "TorchRec _kt_regroup_arguments": (_torchrec_rows, _of_rows),
    "TorchRec _remap_to_groups": (_torchrec_remap, _of_remap),
}
