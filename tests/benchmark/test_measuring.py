"""Measuring: who runs when, what counts as right, what memory is seen."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from torchrec_kt.benchmark import candidates, measuring
from torchrec_kt.benchmark.candidates import ALIKE, BARE, FUNCTION, MODULE, OPERATOR
from torchrec_kt.benchmark.measuring import (
    Budget,
    CannotRun,
    Clock,
    Problem,
    interleaved,
    peak_growth,
    quantile,
    rounds_of,
)
from torchrec_kt.benchmark.results import COPY, OURS, Figure, NotRun
from torchrec_kt.benchmark.suites import SUITE_ORDER, Settings, cases, host, plan
from torchrec_kt.benchmark.suites.copying import BOTH, CLONE, FORWARD, copying_case
from torchrec_kt.benchmark.workloads import Workload, function_workloads, operator_workloads
from torchrec_kt.ops import torch_impl
from torchrec_kt.ops.torch_impl import Strategy

CPU = torch.device("cpu")
QUICKLY = Settings(CPU, quick=True, rounds=1)


def tiny(name: str, batch: int = 5) -> Workload:
    return dataclasses.replace(function_workloads()[name], batch=batch)


def test_quantiles() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2
    assert quantile([0.0, 10.0], 0.9) == pytest.approx(9)
    assert quantile([7.0], 0.9) == 7
    assert quantile(list(map(float, range(11))), 0.9) == 9


class FakeClock(Clock):
    """Calls take the time that they return."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.turns: list[tuple[str, int]] = []

    def stretch(self, call: Any, count: int) -> tuple[float, float]:
        name, seconds = call()
        self.turns.append((name, count))
        return seconds, seconds / 2


def test_rounds_are_interleaved_and_slow_candidates_sit_out() -> None:
    clock = FakeClock()
    calls = {name: lambda name=name, s=s: (name, s) for name, s in {"slow": 3.0, "a": 0.2, "b": 1e-3}.items()}
    found = interleaved(calls, clock, Budget(rounds=4, seconds=1))
    assert {name: figure.rounds for name, figure in found.items()} == {"slow": 1, "a": 2, "b": 4}
    assert found["slow"].p50 == 3
    assert found["slow"].host_p50 == 1.5
    assert clock.turns[:4] == [("slow", 1), ("a", 1), ("b", 1), ("b", 1)]  # to see how long they take
    # Short calls are repeated to last 2 ms, and run untimed first; those that sit out are spread over the rounds.
    short, a = ("b", 2), ("a", 1)
    # The slowest has had its round by then.
    assert clock.turns[4:] == [short, short, a, short, short, short, short, a, short, short]


def test_a_generous_budget_gives_all_rounds() -> None:
    calls = {"x": lambda: ("x", 0.01)}
    assert interleaved(calls, FakeClock(), Budget(rounds=6, seconds=60))["x"].rounds == 6


def test_every_round_is_kept() -> None:
    """Without a limit of the time, slow candidates take part in every round as well."""
    clock = FakeClock()
    calls = {name: lambda name=name, s=s: (name, s) for name, s in {"slow": 3.0, "short": 1e-3}.items()}
    found = rounds_of(calls, clock, Budget(rounds=4))
    assert found == {"slow": [(3.0, 1.5)] * 4, "short": [(1e-3, 5e-4)] * 4}


@pytest.mark.parametrize("name", list(function_workloads()))
def test_ours_matches_on_every_workload(name: str) -> None:
    problem = Problem(tiny(name), CPU, keyed=True)
    for label in (OURS, f"{OURS}, function", BARE):
        if label == f"{OURS}, function" and problem.workload.cast is not None:
            continue  # takes no target type
        candidate = FUNCTION[label](problem.workload, CPU)
        assert problem.mismatch(candidate, gradients=True) is None, label
        with torch.no_grad():
            assert problem.mismatch(candidate, gradients=False) is None, label


@pytest.mark.parametrize("name", ["host", "odd widths", "skip half", "64 repeats", "cast to bf16"])
@pytest.mark.parametrize("way", get_args(Strategy))
def test_bare_calls_match_in_every_way(name: str, way: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_way(calls: dict[str, Any], *_: Any) -> dict[str, list[tuple[float, float]]]:
        return {other: [(1.0, 1.0) if other == way else (2.0, 2.0)] for other in calls}

    monkeypatch.setattr(candidates, "rounds_of", one_way)
    problem = Problem(tiny(name), CPU, keyed=True)
    bare = FUNCTION[BARE](problem.workload, CPU)
    assert problem.mismatch(bare, gradients=True) is None
    with torch.no_grad():
        assert problem.mismatch(bare, gradients=False) is None
    other_batch = Problem(problem.workload, CPU, keyed=True, batch=3)
    assert other_batch.mismatch(bare, gradients=True) is None


def test_bare_calls_go_the_fastest_way(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def watched(*arguments: Any) -> Any:
        compiled.append(arguments[-1])
        return torch_impl.compile_map(*arguments)

    def timed(calls: dict[str, Any], *_: Any) -> dict[str, list[tuple[float, float]]]:
        assert set(calls) == set(get_args(Strategy))
        seconds = {"slices": [2.0, 2.0, 2.0], "columns": [3.0, 3.0, 3.0], "rows": [9.0, 1.0, 9.0]}
        return {way: [(s, s) for s in rounds] for way, rounds in seconds.items()}

    monkeypatch.setattr(candidates, "compile_map", watched)
    monkeypatch.setattr(candidates, "rounds_of", timed)
    bare = FUNCTION[BARE](tiny("odd widths"), CPU)
    compiled.clear()
    with torch.no_grad():
        bare(Problem(tiny("odd widths"), CPU, keyed=True).inputs(False))
        assert compiled == []  # the workload's own batch is ready
        bare(Problem(tiny("odd widths", batch=2), CPU, keyed=True).inputs(False))
    assert compiled == ["rows"]


def test_bare_calls_are_for_a_cpu() -> None:
    with pytest.raises(CannotRun, match="on a CPU"):
        FUNCTION[BARE](tiny("host"), torch.device("cuda"))


@pytest.mark.parametrize("name", list(operator_workloads()))
@pytest.mark.parametrize("candidate", list(OPERATOR))
def test_operators_match(name: str, candidate: str) -> None:
    workload = dataclasses.replace(operator_workloads()[name], batch=2)
    problem = Problem(workload, CPU, keyed=False)
    assert problem.mismatch(OPERATOR[candidate](workload, CPU), gradients=True) is None


@pytest.mark.parametrize("name", ["published", "published dup", "cast to bf16"])
@pytest.mark.parametrize("candidate", list(FUNCTION))
def test_functions_match(name: str, candidate: str) -> None:
    problem = Problem(tiny(name), CPU, keyed=True)
    if name == "cast to bf16" and candidate == f"{OURS}, function":
        with pytest.raises(CannotRun, match="takes no target type"):
            FUNCTION[candidate](problem.workload, CPU)
    else:
        assert problem.mismatch(FUNCTION[candidate](problem.workload, CPU), gradients=True) is None


def test_what_does_not_match_is_told() -> None:
    problem = Problem(tiny("odd widths"), CPU, keyed=False)
    ours = OPERATOR[OURS](problem.workload, CPU)

    def other_outputs(values: list[Any]) -> Sequence[Tensor]:
        return [*ours(values)[:-1], ours(values)[-1].flip(1)]

    def fewer(values: list[Any]) -> Sequence[Tensor]:
        return ours(values)[1:]

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] / 2

    def other_gradients(values: list[Any]) -> Sequence[Tensor]:
        return ours([values[0], Halved.apply(values[1])])

    assert problem.mismatch(other_outputs, gradients=False) == "output"
    assert problem.mismatch(fewer, gradients=False) == "2 outputs"
    assert problem.mismatch(other_gradients, gradients=False) is None
    assert problem.mismatch(other_gradients, gradients=True) == "gradient"


def test_an_unwritten_gradient_does_not_match() -> None:
    """FBGEMM's operator leaves the gradients of unused keys as the memory was."""
    problem = Problem(tiny("skip half"), CPU, keyed=True)
    theirs = FUNCTION[MODULE](problem.workload, CPU)
    # Which memory it gets is the allocator's business: it need not be wrong every time.
    assert "gradient" in [problem.mismatch(theirs, gradients=True) for _ in range(10)]
    assert problem.mismatch(FUNCTION[OURS](problem.workload, CPU), gradients=True) is None


def test_sums_may_round_otherwise_but_not_much() -> None:
    problem = Problem(tiny("64 repeats"), CPU, keyed=False)
    ours = OPERATOR[OURS](problem.workload, CPU)
    assert problem.mismatch(ours, gradients=True) is None
    problem.grads[0][0] += 0.01  # what is right is computed from the same gradients
    assert problem.mismatch(ours, gradients=True) is None
    right = problem.backward

    def off(outputs: Sequence[Tensor]) -> list[Tensor | None]:
        return [None if g is None else g + 1e-3 for g in right(outputs)]

    problem.backward = off
    assert problem.mismatch(ours, gradients=True) == "gradient"


def test_bytes_moved() -> None:
    problem = Problem(tiny("published", batch=1), CPU, keyed=False)
    assert problem.moved(FORWARD) == 2 * 129_280 * 4
    assert problem.moved(BOTH) == 4 * 129_280 * 4
    cast = Problem(tiny("cast to bf16", batch=1), CPU, keyed=False)
    assert cast.moved(FORWARD) == 129_280 * (4 + 2)
    half = Problem(tiny("skip half", batch=1), CPU, keyed=False)
    used = sum(half.column_map.out_widths)
    # Unused keys are not read, but their gradients are written.
    assert half.moved(FORWARD) == 2 * used * 4
    assert half.moved(BOTH) == half.moved(FORWARD) + (used + 129_280) * 4


def test_plain_copy_copies_half_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_COPY_BYTES", 1000)
    copied: list[int] = []
    real = Tensor.copy_

    def spy(self: Tensor, source: Tensor) -> Tensor:
        copied.append(source.nbytes)
        return real(self, source)

    monkeypatch.setattr(Tensor, "copy_", spy)
    measuring.copy_of(2 * 2300, CPU)()
    assert copied == [1000, 1000, 300]


def test_peak_memory_of_a_call() -> None:
    size = 64 << 20

    def call() -> list[Tensor]:
        torch.ones(size, dtype=torch.uint8)  # gone before the second
        return [torch.ones(size // 2, dtype=torch.uint8), torch.ones(size // 2, dtype=torch.uint8)]

    def both() -> list[Tensor]:
        passing = torch.ones(size, dtype=torch.uint8)
        return [torch.ones(size, dtype=torch.uint8), *[passing][1:]]

    # The peak is that of the whole process, in which other threads may allocate as well.
    assert pytest.approx(size, rel=0.1) in [peak_growth(call, Clock(CPU), 3) for _ in range(4)]
    assert pytest.approx(2 * size, rel=0.1) in [peak_growth(both, Clock(CPU), 1) for _ in range(4)]
    assert peak_growth(lambda: [torch.ones(10)], Clock(CPU), 1) is None


def test_suites_hold_the_cases_that_they_promise() -> None:
    names = {suite: [case.name for case in cases(suite, quick=False)] for suite in SUITE_ORDER}
    assert names["function"][:2] == ["published", "published dup"]
    assert names["operator"] == list(operator_workloads())
    every = names["function"] + names["shapes"]
    assert set(function_workloads()) - {"published B=4096"} <= set(every)
    assert {"batch 1", "batch 65536", "width 1 alone", "width 10 alone"} <= set(names["shapes"])
    assert names["plan"] == ["10 keys", "100 keys", "1000 keys", "10000 keys", "100000 keys"]
    for suite in SUITE_ORDER:
        assert len(names[suite]) == len(set(names[suite]))
        quick = [case.name for case in cases(suite, quick=True)]
        assert quick
        # So that a quick run can be compared with a full one.
        assert set(quick) <= set(names[suite])
    with pytest.raises(ValueError, match="there is no suite 'nonesuch'; there are function"):
        cases("nonesuch", quick=True)


def test_copying_case_has_every_candidate_in_every_mode() -> None:
    case = copying_case("function", tiny("published dup"), FUNCTION, keyed=True, budget=Budget(3, 1))
    rows = case.run(QUICKLY)
    assert [row.mode for row in rows] == [FORWARD, BOTH]
    for row in rows:
        assert list(row.figures) == [*FUNCTION, COPY, *([CLONE] if row.mode == FORWARD else [])]
        for name, found in row.figures.items():
            assert isinstance(found, Figure), name
            assert 0 < found.p50 <= found.p90
            assert found.host_p50 == found.p50
            assert found.match is (None if name in (COPY, CLONE) else True), name
        assert row.ours_failed() == []


def test_operator_case() -> None:
    workload = dataclasses.replace(next(iter(operator_workloads().values())), batch=3)
    (row,) = copying_case(
        "operator", workload, OPERATOR, keyed=False, budget=Budget(3, 1), modes=(FORWARD,)
    ).run(QUICKLY)
    assert list(row.figures) == [*OPERATOR, COPY, CLONE]
    assert all(isinstance(found, Figure) and found.match is not False for found in row.figures.values())


def test_peers_that_cannot_run_say_so() -> None:
    def absent(workload: Workload, device: torch.device) -> Any:
        raise ModuleNotFoundError("No module named 'fbgemm_gpu'", name="fbgemm_gpu")

    def broken(workload: Workload, device: torch.device) -> Any:
        def call(values: list[Any]) -> Sequence[Tensor]:
            raise RuntimeError("first line\nsecond line")

        return call

    workload = tiny("64 repeats")
    factories = {OURS: OPERATOR[OURS], "absent": absent, "broken": broken} | {
        name: OPERATOR[name] for name in ("permute_pooled_embs",)
    }
    forward, both = copying_case("operator", workload, factories, keyed=False, budget=Budget(1, 1)).run(
        QUICKLY
    )
    for row in (forward, both):
        assert row.figures["absent"] == NotRun("fbgemm_gpu is not installed")
        assert row.figures["broken"] == NotRun("RuntimeError: first line")
        assert row.figures["permute_pooled_embs"] == NotRun("takes every key exactly once")
        assert row.figure(OURS) is not None


def test_a_wrong_gradient_marks_the_backward_alone() -> None:
    factories = {name: FUNCTION[name] for name in (OURS, MODULE)}
    forward, both = copying_case("shapes", tiny("skip half"), factories, keyed=True, budget=Budget(1, 1)).run(
        QUICKLY
    )
    found = [row.figure(MODULE) for row in (forward, both)]
    assert [f and (f.match, f.mismatch) for f in found] == [(True, None), (False, "gradient")]
    assert not both.ours_failed()


def test_candidates_can_be_left_out() -> None:
    settings = dataclasses.replace(QUICKLY, without=("torchrec", "fbgemm"))
    row = copying_case("function", tiny("host"), FUNCTION, keyed=True, budget=Budget(1, 1)).run(settings)[0]
    assert MODULE not in row.figures
    assert not set(ALIKE) & set(row.figures)
    assert OURS in row.figures


def test_host_cost_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler itself is not what is tested: it would take most of a minute.
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend="eager", **options))
    rows = cases("host", quick=True)[0].run(QUICKLY)
    assert [row.mode for row in rows] == list(host.MODES)
    for row in rows:
        assert {OURS, MODULE} <= row.figures.keys()
        # What there is to a call beside the torch calls shows where Python makes them.
        assert (BARE in row.figures) == (row.mode in ("no_grad", "grad", "forward + backward"))
        for name, found in row.figures.items():
            assert isinstance(found, Figure), (row.mode, name, found)
            assert found.match is True, (row.mode, name)
        assert row.moved is None


def test_plan_cost_and_its_match(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = cases("plan", quick=True)[0].run(QUICKLY)
    assert set(row.figures) == set(plan._PLANNERS)
    for found in row.figures.values():
        assert isinstance(found, Figure)
        assert found.match is True
    planner, columns = plan._PLANNERS[OURS]
    wrong = lambda workload, made: columns(workload, made).flip(0)  # noqa: E731
    monkeypatch.setitem(plan._PLANNERS, OURS, (planner, wrong))
    (row,) = cases("plan", quick=True)[0].run(QUICKLY)
    assert row.ours_failed() == [OURS]


def test_traces_of_every_candidate(tmp_path: Path) -> None:
    settings = dataclasses.replace(QUICKLY, trace=tmp_path)
    factories = {name: OPERATOR[name] for name in (OURS, "cat/split")}
    copying_case("operator", tiny("host"), factories, keyed=False, budget=Budget(1, 1)).run(settings)
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json"))
    assert written == [
        "operator/host-forward-backward-cat-split.json",
        "operator/host-forward-backward-ours.json",
        "operator/host-forward-cat-split.json",
        "operator/host-forward-ours.json",
    ]
    events = json.loads((tmp_path / written[0]).read_text())["traceEvents"]
    assert any(event.get("name") == "aten::cat" for event in events)


def test_memory_of_nan_is_handed_out_again() -> None:
    values = [torch.zeros(3, 100)]

    def seen() -> bool:
        measuring._poison(values)
        return any(math.isnan(float(torch.empty(3, 100).sum())) for _ in range(4))

    assert any(seen() for _ in range(10))
