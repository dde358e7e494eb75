"""The GPU script without a GPU: what can be run of it, and that it fails where it must."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_run", ROOT / "tests" / "gpu" / "run.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_measurement_runs_to_its_end_and_writes_json(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    command = ["-m", "torchrec_kt.benchmark.gpu", "--device", "cpu", "--only", "host", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, *command, "--json", str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())
    assert [row["direction"] for row in found["rows"]] == ["forward", "backward"]
    for row in found["rows"]:
        assert row["match"]
        assert {"copy", "ours", "cat/split", "fbgemm"} <= row["kernel"].keys()
        assert all(seconds > 0 for seconds in row["kernel"].values())
        assert f"{row['name']:<24} {row['direction']:<8}" in done.stdout


def test_measurement_without_torchrec(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torchrec', 'fbgemm_gpu', 'rich', 'hypothesis'): sys.modules[name] = None\n"
        "sys.argv = ['gpu', '--device', 'cpu', '--only', 'host', '--rounds', '1']\n"
        "from torchrec_kt.benchmark.gpu import main\n"
        "raise SystemExit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "host" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_a_failure(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/gpu/run.py"), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "there is no GPU" in done.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["build"]["outcome"].startswith("failed")


def test_a_part_that_hangs_or_fails_fails_the_whole(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = script.Runner(tmp_path)
    assert runner.step("good", [sys.executable, "-c", "print('fine')"], 300)
    assert not runner.step("hangs", [sys.executable, "-c", "import time; time.sleep(60)"], 1)
    assert not runner.step("absent", ["/nowhere/at/all"], 300)
    assert runner.finish() == 1
    outcomes = {k: v["outcome"] for k, v in json.loads((tmp_path / "summary.json").read_text()).items()}
    assert outcomes["good"] == "passed"
    assert outcomes["hangs"] == "timed out"
    assert outcomes["absent"].startswith("did not start")


def test_build_command_builds_a_library_that_loads(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    library = tmp_path / "library.so"
    subprocess.run(script.build_command(library), check=True, capture_output=True, timeout=300)
    code = "from torchrec_kt.ops import has_cuda_kernel; raise SystemExit(not has_cuda_kernel())"
    environment = {"TORCHREC_KT_LIBRARY": str(library), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_serving_build_command_builds_a_library_that_loads(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    # The kernel takes a while to compile, and is compiled above.
    monkeypatch.setattr(script, "KERNEL", [script.SOURCES / "apply.cpp", script.SOURCES / "host.cpp"])
    library = tmp_path / "library.so"
    command = ["-O0" if part == "-O3" else part for part in script.serving_build_command(library)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ops.check_serving", library],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
