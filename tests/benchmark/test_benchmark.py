"""Shapes are as stated, fits recover what they should, stored constants are those of the stored measurements."""

from __future__ import annotations

import json
import random

import pytest
import torch

from torchrec_kt.benchmark import calibrate
from torchrec_kt.benchmark.workloads import function_workloads
from torchrec_kt.ops import cost


def test_published_workload_has_the_published_shape() -> None:
    workload = function_workloads()["published"]
    assert workload.batch == 1024
    assert [len(keys) for keys in workload.keys] == [20, 1000]
    assert [set(widths) for widths in workload.widths] == [{64}, {128}]
    assert [len(group) for group in workload.groups] == [510, 510]
    assert sorted(key for group in workload.groups for key in group) == sorted(
        key for keys in workload.keys for key in keys
    )


def test_repeats_and_omissions_are_as_described() -> None:
    repeated = function_workloads()["published dup"]
    assert [len(group) for group in repeated.groups] == [511, 511]
    assert all(len(set(group)) == len(group) for group in repeated.groups)
    heavy = function_workloads()["64 repeats"]
    assert sum(group.count("f0") for group in heavy.groups) == 1 + 4 * 16
    skipped = function_workloads()["skip half"]
    assert {f"f{n}" for n in range(510)}.isdisjoint(key for group in skipped.groups for key in group)


def test_fit_recovers_constants() -> None:
    rng = random.Random(0)
    true = (1500.0, 300.0, 100.0, 2.0, 0.05)
    records = []
    for _ in range(200):
        counts = [rng.randint(0, 10**digits) for digits in (1, 2, 3, 5, 7)]
        seconds = sum(a * b for a, b in zip(true, counts)) * 1e-9
        records.append(
            {"counts": {"rows": counts}, "seconds": {"rows": seconds * rng.choice((1, 1, 1, 1.01))}}
        )
    fitted = calibrate.fit(records, "rows")
    assert list(fitted) == list(cost.Rows._fields)
    assert list(fitted.values()) == pytest.approx(true, rel=0.05)


def test_constants_are_those_of_the_stored_measurements() -> None:
    records = json.loads(calibrate.MEASUREMENTS.read_text())["records"]
    stored = json.loads(calibrate.CONSTANTS.read_text())
    assert len(records) >= 300
    for strategy in calibrate.STRATEGIES:
        assert stored["nanoseconds"][strategy] == pytest.approx(calibrate.fit(records, strategy), rel=0.02)
    slower = sorted(calibrate.regrets(records, stored["nanoseconds"]))
    assert stored["picked over best"]["median"] == pytest.approx(slower[len(slower) // 2], abs=2e-3)
    # On the measured shapes the rule must beat always taking any one way to move columns.
    for strategy in calibrate.STRATEGIES:
        alone = sorted(r["seconds"].get(strategy, 1e9) / min(r["seconds"].values()) for r in records)
        assert slower[len(slower) * 9 // 10] < alone[len(alone) * 9 // 10]


def test_counts_match_the_models() -> None:
    rng = random.Random(1)
    column_map, _ = calibrate.random_map(rng)
    metas = [
        calibrate.TensorMeta((3, width), torch.float32, torch.device("cpu")) for width in column_map.in_widths
    ]
    for strategy, model in (("slices", cost.SLICES), ("columns", cost.COLUMNS), ("rows", cost.ROWS)):
        counts = calibrate.strategy_counts(column_map, metas, torch.float32, 1, strategy)  # pyright: ignore[reportArgumentType]
        assert counts is not None
        assert len(counts) == len(model)
        assert min(counts) >= 0
