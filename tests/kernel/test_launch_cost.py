"""The measurement of what a call costs on the host runs, and a call allocates its outputs and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.kernel import building


def test_table(plain_host_library: Path) -> None:
    command = [sys.executable, "-m", "torchrec_kt.benchmark.launch_cost", "--rounds", "1"]
    told = building.run(
        [*command, "--library", plain_host_library], env={"TORCHREC_KT_PURE_TORCH": None}
    ).stdout
    rows = [line.strip("| ").split(" | ") for line in told.splitlines() if line.startswith("| ")]
    head, *cases = rows
    assert head[:3] == ["inputs", "outputs", "keys"]
    assert len(cases) == 5
    for case in cases:
        assert len(case) == len(head)
        assert all(float(figure) > 0 for figure in case[3:-1])
        assert case[-1].split(" / ")[0] == case[1]
    assert "ours are the outputs alone" in told
