"""Serving without Python: the library of operators, and the example program that scores a batch with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # The examples are run from the checkout, not installed.

from examples.movielens import export  # noqa: E402
from examples.movielens.data import MovieLens, load_movielens  # noqa: E402
from examples.movielens.model import ModelConfig, MovieLensModel, regroup_factory  # noqa: E402
from tests.kernel.building import unstable_symbols  # noqa: E402


def run(*command: Any, fail: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )
    assert (result.returncode != 0) == fail, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the program and the library, built as their files say."""
    beside_python = Path(sys.executable).with_name("cmake")
    cmake = str(beside_python) if beside_python.exists() else shutil.which("cmake")
    assert cmake, "these tests need cmake: pip install -r requirements/dev.txt"
    folder = tmp_path_factory.mktemp("serve_cpp")
    run(cmake, "-S", ROOT / "examples/serve_cpp", "-B", folder, f"-DTORCH_ROOT={torch.__path__[0]}")
    run(cmake, "--build", folder)
    return folder


@pytest.fixture(scope="module")
def library(build: Path) -> Path:
    return build / "serving" / "libtorchrec_kt_serving.so"


@pytest.fixture(scope="module")
def movielens() -> MovieLens:
    return load_movielens()


@pytest.fixture(scope="module")
def model(movielens: MovieLens) -> MovieLensModel:
    torch.manual_seed(0)
    regroup = regroup_factory("torchrec_kt")
    config = ModelConfig(user_dim=8, item_dim=12, vector_dim=4, hidden_dim=8)
    return MovieLensModel(movielens.vocabulary_sizes, regroup, config, torch.device("cpu")).eval()


@pytest.fixture(scope="module")
def served(model: MovieLensModel, movielens: MovieLens, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the saved model."""
    folder = tmp_path_factory.mktemp("served")
    export.save(model, movielens.batch(torch.arange(64)), folder)
    return folder


def scores(build: Path, served: Path, name: str, batch: Path, *more: Any) -> list[float]:
    libraries = [
        build / "serving" / "libtorchrec_kt_serving.so",
        *(served / "libraries.txt").read_text().split(),
    ]
    options = [part for library in libraries for part in ("--library", library)]
    return [float(line) for line in run(build / "score", *options, served / name, batch).stdout.split()]


def in_python(served: Path, name: str, inputs: tuple[Tensor, ...]) -> Tensor:
    if name == "model.pt":
        return torch.jit.load(served / name)(*inputs)
    package: Any = torch._inductor.aoti_load_package(str(served / name))
    return package(*inputs)


@pytest.mark.parametrize(("name", "batches"), [("model.pt", (64, 7, 1, 0)), ("model.pt2", (64, 7, 1))])
@torch.no_grad()
def test_the_program_scores_as_python_does(
    name: str,
    batches: tuple[int, ...],
    build: Path,
    served: Path,
    model: MovieLensModel,
    movielens: MovieLens,
    tmp_path: Path,
) -> None:
    for size in batches:
        batch = movielens.batch(torch.arange(1000, 1000 + size))
        inputs = export.inputs_of(batch)
        torch.jit.save(torch.jit.script(export.Container(inputs)), tmp_path / "batch.pt")
        found = torch.tensor(scores(build, served, name, tmp_path / "batch.pt"))
        assert torch.equal(found, in_python(served, name, inputs))
        eager = model(batch)
        if name == "model.pt":
            assert torch.equal(found, eager)
        else:
            # A compiler fuses multiplications with additions, which rounds once where eager rounds twice.
            torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-6)


def test_the_files_that_the_export_writes(build: Path, served: Path) -> None:
    expected = [float(line) for line in (served / "scores.txt").read_text().split()]
    assert len(expected) == 64
    assert scores(build, served, "model.pt", served / "batch.pt") == expected


def test_the_saved_graphs_call_one_operator(served: Path, model: MovieLensModel) -> None:
    graph = str(torch.jit.load(served / "model.pt").inlined_graph)
    assert graph.count("torchrec_kt::") == graph.count("torchrec_kt::regroup(") == 1
    inputs = tuple(torch.jit.load(served / "batch.pt").buffers())
    program = export.exported(export.Scorer(model), inputs)  # pyright: ignore[reportArgumentType]
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("torchrec_kt.regroup.default") == 1


def test_a_missing_library_is_named(build: Path, served: Path, library: Path) -> None:
    fbgemm = [part for line in (served / "libraries.txt").read_text().split() for part in ("--library", line)]
    for name in ("model.pt", "model.pt2"):
        error = run(build / "score", *fbgemm, served / name, served / "batch.pt", fail=True).stderr
        assert "torchrec_kt::regroup" in error
    error = run(
        build / "score", "--library", "nowhere.so", served / "model.pt", served / "batch.pt", fail=True
    )
    assert "cannot load the library nowhere.so" in error.stderr
    assert "usage:" in run(build / "score", served / "model.pt", fail=True).stderr


def test_every_operator_of_the_library(library: Path) -> None:
    run(sys.executable, "-m", "tests.ops.check_serving", library)


def test_a_process_in_which_python_has_defined_the_operators(library: Path) -> None:
    code = f"""
import torch, torchrec_kt
before = torch._C._dispatch_dump("torchrec_kt::regroup")
torch.ops.load_library({str(library)!r})
assert torch._C._dispatch_dump("torchrec_kt::regroup") == before
plan = torch.tensor([[0, 0, 1, 0, 2]], dtype=torch.int32)
out = torch.ops.torchrec_kt.regroup([torch.tensor([[1, 2, 3]])], plan, [2])
assert out[0].tolist() == [[2, 3]]
"""
    assert "defined already, by the Python package" in run(sys.executable, "-c", code).stderr


def test_importing_the_package_after_the_library(library: Path) -> None:
    code = f"import torch; torch.ops.load_library({str(library)!r}); import torchrec_kt"
    error = run(sys.executable, "-c", code, fail=True).stderr
    assert "ImportError: the operators of torchrec_kt are defined in this process already" in error


def test_the_library_uses_the_stable_abi_alone(library: Path) -> None:
    assert not unstable_symbols(library)
    assert "torch_call_dispatcher" in run("nm", "-D", "--undefined-only", library).stdout
