"""The harness tells what happened in its processes, and one case does not spoil the next."""

from __future__ import annotations

import pytest

from .world import Case, run_world


@pytest.mark.distributed
def test_outcomes_of_cases_that_fail() -> None:
    names = ["adds_up", "raises_on_one_rank", "adds_up", "ends_one_process", "adds_up"]
    cases = [Case("tests.distributed.broken_cases", name, 2, ()) for name in names]
    done = run_world(2, cases)
    adds_up, raises, ends = (done[case.key] for case in (cases[0], cases[1], cases[3]))
    assert [adds_up[rank]["error"] for rank in (0, 1)] == ["", ""]
    assert raises[0]["error"] == ""
    assert "AssertionError: not the first" in raises[1]["error"]
    assert "the process ended or hung in this case" in ends[1]["error"]
    assert "last words" in ends[1]["error"]
    assert ends[0]["error"]
