"""Results and their file, what is derived from them, and comparisons of two."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torchrec_kt.benchmark.candidates import BARE, CAT_SPLIT, MODULE, REGROUP
from torchrec_kt.benchmark.comparing import NOISE, changes, comparison, differences, regressions
from torchrec_kt.benchmark.results import COPY, OURS, NotRun, Results, ResultsError, provenance
from torchrec_kt.benchmark.suites.copying import BOTH, FORWARD

from . import sample


def test_file_holds_all_of_it(tmp_path: Path) -> None:
    results = sample.sample()
    path = tmp_path / "below" / "results.json"
    results.save(path)
    assert Results.load(path) == results
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


def test_schema(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    sample.sample().save(path)
    content = json.loads(path.read_text())
    assert content["format"] == 1
    assert {"date", "commit", "device", "cpu", "threads", "torch"} <= content["runs"][0].keys()
    row = content["rows"][0]
    assert row.keys() == {
        *("suite", "case", "mode", "batch", "keys", "input_bytes", "moved", "sweep", "figures", "run")
    }
    assert row["figures"][OURS].keys() == {
        *("p50", "p90", "host_p50", "host_p90", "rounds", "memory", "match", "mismatch")
    }
    assert row["figures"][REGROUP] == {"not run": "the | reason [why]"}


def test_provenance_names_what_figures_depend_on() -> None:
    found = provenance(torch.device("cpu"), quick=True)
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["quick"] is True
    assert found["date"].startswith("20")
    for name in ("cpu", "cores", "commit", "torchrec", "fbgemm", "torchrec_kt", "python"):
        assert found[name], name


def test_derived_figures() -> None:
    row = sample.sample().rows[0]
    assert row.speed_up(MODULE) == pytest.approx(20)
    assert row.speed_up(OURS) == 1
    assert row.of_copy(OURS) == pytest.approx(0.5)
    assert row.gigabytes_per_second(OURS) == pytest.approx(6.4)
    assert row.peak_memory(OURS) == 64_000_000 + (32 << 20)
    assert row.speed_up(REGROUP) is None
    assert row.peak_memory(COPY) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "not a file of results in format 1"),
        ('{"format": 2}', "not a file of results in format 1"),
        ('{"format": 1, "runs": []}', "is damaged: KeyError"),
        ('{"format": 1, "runs": [], "rows": [{"suite": "x", "figures": {}, "sweep": null}]}', "is damaged"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=message):
        Results.load(path)


def test_rows_without_their_run_are_refused(tmp_path: Path) -> None:
    results = sample.sample()
    results.rows[3].run = 7
    path = tmp_path / "x.json"
    results.save(path)
    with pytest.raises(ResultsError, match="is damaged: IndexError"):
        Results.load(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"x\.json cannot be read: No such file"):
        Results.load(tmp_path / "x.json")


def test_merge_replaces_rows_and_keeps_the_others() -> None:
    old = sample.sample()
    again = sample.row("shapes", "narrow", FORWARD, scale=3)
    fresh = sample.row("function", "another", FORWARD)
    merged = old.merge(Results([sample.RUN | {"date": "2027-01-01 00:00 UTC"}], [again, fresh]))
    assert len(merged.rows) == len(old.rows) + 1
    assert [run["date"][:4] for run in merged.runs] == ["2026", "2027"]
    by_key = merged.by_key()
    assert by_key[again.key].seconds(OURS) == pytest.approx(0.06)
    assert by_key[again.key].run == 1
    assert by_key["shapes", "narrow", BOTH].run == 0
    # Suites stay in order, new cases come last in theirs.
    assert merged.suites() == ["function", "operator", "shapes", "host", "plan"]
    assert [row.case for row in merged.of_suite("function")][-1] == "another"
    assert [row.case for row in merged.of_suite("shapes")] == [row.case for row in old.of_suite("shapes")]
    # Neither is changed.
    assert old == sample.sample()
    assert fresh.run == 0


def test_merging_case_by_case_leaves_the_earlier_results_as_they_are() -> None:
    old = sample.sample()
    old.runs = [sample.RUN | {"commit": "first"}, sample.RUN | {"commit": "second"}]
    for row in old.rows[1:]:
        row.run = 1
    before = copy.deepcopy(old)
    new = Results([sample.RUN | {"commit": "new"}], [copy.deepcopy(old.rows[0])])  # of "first" no row is left
    for _ in range(2):  # as a run does that is saved after every case
        merged = old.merge(new)
        assert [merged.runs[row.run]["commit"] for row in merged.rows][:2] == ["new", "second"]
    assert old == before


def test_merge_of_whole_suites_drops_their_older_rows() -> None:
    merged = sample.sample().merge(
        Results([dict(sample.RUN)], [sample.row("shapes", "only", FORWARD)]), ["shapes"]
    )
    assert [row.case for row in merged.of_suite("shapes")] == ["only"]
    assert len(merged.of_suite("function")) == 4


def test_a_run_that_no_row_is_left_of_goes() -> None:
    old = sample.sample()
    merged = old.merge(Results([sample.RUN | {"commit": "other"}], sample.sample().rows))
    assert [run["commit"] for run in merged.runs] == ["other"]


@pytest.mark.parametrize("name", ["device", "cpu", "threads", "torch"])
def test_runs_under_other_conditions_are_not_merged(name: str) -> None:
    new = Results([sample.RUN | {name: "other"}], [sample.row("shapes", "narrow", FORWARD)])
    with pytest.raises(ResultsError, match=f"measured with {name} .*; write them to another file"):
        sample.sample().merge(new)


def test_failures_are_those_of_ours() -> None:
    results = sample.sample()
    assert results.failures() == []
    results.rows[0].figures[MODULE] = sample.figure(1, match=False)
    assert results.failures() == []
    results.rows[0].figures[OURS] = sample.figure(1, match=False)
    results.rows[1].figures[OURS] = NotRun("it broke")
    results.rows[2].figures[f"{OURS}, function"] = sample.figure(1, match=False)
    assert results.failures() == [
        "function, published, forward: ours does not match: gradient",
        "function, published, forward + backward: ours did not run: it broke",
        "function, published dup, forward: ours, function does not match: gradient",
    ]


def test_slower_ours_is_a_regression(tmp_path: Path) -> None:
    old = sample.sample()
    new = sample.edited(old, sample.slower([OURS], 1 + NOISE + 0.1), tmp_path)
    found = regressions(old, new)
    assert len(found) == len(old.rows)
    assert found[0] == (
        "function, published, forward: ours takes 1.60 times as long as before, measured by 4 others in the same run; "
        "1.50 is allowed"
    )


def test_one_slower_row_is_enough(tmp_path: Path) -> None:
    old, new = sample.sample(), sample.sample()
    last = new.rows[-1]
    last.figures[OURS] = dataclasses.replace(sample.figure(0), p50=1.0)
    assert [line.split(":")[0] for line in regressions(old, new)] == ["plan, 100 keys, build"]


def test_differences_within_the_noise_are_none(tmp_path: Path) -> None:
    old = sample.sample()
    assert regressions(old, sample.edited(old, sample.slower([OURS], 1 + NOISE - 0.1), tmp_path)) == []
    assert regressions(old, sample.edited(old, sample.slower([OURS], 0.2), tmp_path)) == []


def test_a_slower_machine_is_no_regression(tmp_path: Path) -> None:
    old = sample.sample()
    new = sample.edited(old, sample.slower([], 7), tmp_path)
    assert regressions(old, new) == []
    first = changes(old, new)[0]
    assert first.time == pytest.approx(7)
    assert first.relative == pytest.approx(1)


def test_one_peer_that_got_faster_is_no_regression(tmp_path: Path) -> None:
    old = sample.sample()
    assert regressions(old, sample.edited(old, sample.slower([MODULE], 0.1), tmp_path)) == []
    # If all but ours did, it is one.
    everyone = [MODULE, CAT_SPLIT, COPY, "clone"]
    assert regressions(old, sample.edited(old, sample.slower(everyone, 0.1), tmp_path))


def test_one_peer_that_got_slower_hides_nothing(tmp_path: Path) -> None:
    old = sample.sample()
    slower = sample.edited(old, sample.slower([MODULE], 10), tmp_path)
    assert regressions(old, sample.edited(slower, sample.slower([OURS], 2), tmp_path))


def test_bare_calls_that_got_slower_with_ours_hide_nothing(tmp_path: Path) -> None:
    old = sample.sample()
    for row in old.rows:
        row.figures[BARE] = sample.figure(15)
    change = changes(old, sample.edited(old, sample.slower([OURS, BARE], 2), tmp_path))[0]
    assert change.relative == pytest.approx(2)
    assert change.references == 4


def test_noise_can_be_chosen(tmp_path: Path) -> None:
    old = sample.sample()
    new = sample.edited(old, sample.slower([OURS], 1.3), tmp_path)
    assert regressions(old, new, noise=0.2)
    assert not regressions(old, new, noise=0.4)


def test_ours_that_fails_or_does_not_match_fails_the_check(tmp_path: Path) -> None:
    old = sample.sample()

    def broken(one: dict[str, Any]) -> None:
        if one["suite"] == "host":
            one["figures"][OURS] = {"not run": "it broke"}
        if one["case"] == "narrow":
            one["figures"][OURS] |= {"match": False, "mismatch": "output"}

    found = regressions(old, sample.edited(old, broken, tmp_path))
    assert "host, host, no_grad: ours ran before and does not now" in found
    assert "shapes, narrow, forward: ours does not match: output" in found


def test_results_that_cannot_be_compared(tmp_path: Path) -> None:
    old = sample.sample()
    other = Results([dict(sample.RUN)], [sample.row("function", "unheard of", FORWARD)])
    with pytest.raises(ResultsError, match="no case in common"):
        regressions(old, other)
    on_a_gpu = Results([sample.RUN | {"device": "cuda"}], old.rows)
    with pytest.raises(ResultsError, match="old results are of the device cpu, the new ones of cuda"):
        changes(old, on_a_gpu)


def test_rows_that_only_one_has_are_left_out() -> None:
    old, new = sample.sample(), sample.sample()
    new.rows = new.rows[:2]
    assert {change.row.case for change in changes(old, new)} == {"published"}
    assert regressions(old, new) == []


def test_comparison_tells_faster_from_slower(tmp_path: Path) -> None:
    old = sample.sample()
    new = sample.edited(old, sample.slower([OURS], 2), tmp_path)
    verdicts = {tuple(line[3:]) for line in comparison(old, new).rows}
    assert verdicts == {("ours", "2.00", "2.00", "slower"), ("ours, function", "1.00", "1.00", "as before")}
    assert {line[-1] for line in comparison(new, old).rows} == {"faster", "as before"}


def test_other_conditions_are_told() -> None:
    new = Results([sample.RUN | {"torch": "3.0", "commit": "b"}], sample.sample().rows)
    assert differences(sample.sample(), new) == [
        "torch: 2.13.0 before, 3.0 now",
        "commit: 0123456789 before, b now",
    ]
