"""The benchmark of making graphs, and the README's tables of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from torchrec_kt.benchmark import graphs
from torchrec_kt.benchmark.reporting import GRAPHS
from torchrec_kt.benchmark.workloads import function_workloads

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "docs" / "benchmark" / "graphs.json"


@pytest.mark.parametrize("state", ["cold", "warm"])
@pytest.mark.parametrize("way", graphs.WAYS)
@pytest.mark.parametrize("name", graphs.MODULES)
def test_every_way_makes_a_graph(name: str, way: str, state: str) -> None:
    states, make = graphs.WAYS[way]
    if state not in states:
        return  # there is nothing to make of TorchRec's module then
    made: list[float] = []

    def clocked(module: torch.nn.Module, workload: graphs.Workload, clock: object) -> None:
        make(module, workload, clock)
        made.append(1)

    assert graphs.seconds_to_make(name, state, clocked, function_workloads()["host"]) > 0
    assert made


def test_graphs_are_counted() -> None:
    workload = function_workloads()["host"]
    assert graphs.number_of_graphs("ours", "KeyedTensors", None, workload) == 4
    assert graphs.number_of_graphs("ours", "tensors", True, workload) == 3


def test_the_command_writes_file_and_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "WAYS", {"torch.fx": graphs.WAYS["torch.fx"]})
    monkeypatch.setattr(graphs, "graph_counts", lambda workload: [])
    readme, file = tmp_path / "README.md", tmp_path / "graphs.json"
    begin, end = GRAPHS
    readme.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    graphs.main(["--workload", "host", "--rounds", "1", "--json", str(file), "--readme", str(readme)])
    result = json.loads(file.read_text())
    assert [row["way"] for row in result["times"]] == ["torch.fx"]
    assert readme.read_text() == f"before\n{begin}\n{graphs.readme_section(result)}\n{end}\nafter\n"


def test_readme_holds_the_stored_figures() -> None:
    begin, end = GRAPHS
    stored = (ROOT / "README.md").read_text().split(begin)[1].split(end)[0].strip("\n")
    assert stored == graphs.readme_section(json.loads(STORED.read_text()))
