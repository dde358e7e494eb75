"""``examples/train_distributed.py`` under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .world import ROOT, environment

pytestmark = pytest.mark.distributed

SCRIPT = "examples/train_distributed.py"
TABLES = {
    f"t_{key}"
    for key in (
        "user_id",
        "age_band",
        "gender",
        "occupation",
        "zip_prefix",
        "item_id",
        "release_year",
        "genres",
    )
}


def run(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return subprocess.run(
        [sys.executable, *torchrun, SCRIPT, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )


def results_of(folder: Path, processes: int, *arguments: str) -> dict[str, Any]:
    path = folder / f"{processes}.json"
    done = run(processes, *arguments, "--json", str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{processes} processes over gloo" in done.stdout
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.quick
def test_a_quick_run_with_both_modules(tmp_path: Path) -> None:
    results = results_of(tmp_path, 2, "--max-steps", "12", "--compare", "--batch-size", "256")
    assert results["steps"] == 12
    assert set(results["tables"]) == TABLES
    assert set(results["models"]) == {"torchrec_kt", "torchrec"}
    for model in results["models"].values():
        assert len(model["train_losses"]) == 12
        assert model["train_losses"][0] == pytest.approx(0.7, abs=0.1)
        assert model["median_step_ms"] > 0 < model["median_regroup_us"]
    assert results["models"]["torchrec_kt"]["unused_table_changed"] is False


def test_two_processes_score_as_one_does(tmp_path: Path) -> None:
    one, two = (results_of(tmp_path, n, "--epochs", "1") for n in (1, 2))
    assert one["steps"] == two["steps"] == 157
    assert {where.split(" on ")[1] for where in one["tables"].values()} == {"0"}
    assert {where.split(" on ")[1] for where in two["tables"].values()} >= {"0", "1"}
    for results in (one, two):
        assert results["test"]["auc"] > 0.77
        assert results["models"]["torchrec_kt"]["unused_table_changed"] is False
    # Seeds differ by up to 0.005 on either number of processes: dropout and initial tables.
    assert two["test"]["auc"] == pytest.approx(one["test"]["auc"], abs=0.01)


def test_wrong_use_says_what_to_do(tmp_path: Path) -> None:
    plain = subprocess.run(
        [sys.executable, SCRIPT], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert plain.returncode == 2
    assert "torchrun --standalone --nproc_per_node 2" in plain.stderr
    done = run(1, "--data", str(tmp_path / "none"))
    assert done.returncode != 0
    assert "error: The data folder" in done.stderr
    assert "pip install" in done.stderr
