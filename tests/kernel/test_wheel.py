"""What ``pip wheel`` makes with and without a CUDA compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import torchrec_kt
from tests.kernel import building

LIBRARY = "torchrec_kt/ops/torchrec_kt_cuda.so"


def pip_wheel(
    folder: Path,
    cuda: str | None,
    *,
    compilers: bool = True,
    defines: tuple[str, ...] = (),
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    environment: dict[str, str | None] = {"TORCHREC_KT_CUDA": cuda}
    if not compilers:
        tools = folder / "bin"
        tools.mkdir(parents=True)
        for name in ("cmake", "ninja"):
            (tools / name).symlink_to(shutil.which(name, path=building.path()) or name)
        environment |= {"PATH": str(tools), "CUDACXX": None, "CXX": None, "CC": None, "CUDA_PATH": None}
    settings = [f"build-dir={folder / 'build'}", *(f"cmake.define.{define}" for define in defines)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-v"]
    command += [
        "--no-build-isolation",
        "--no-deps",
        "--no-cache-dir",
        "--wheel-dir",
        str(folder),
        str(building.ROOT),
    ]
    return building.run([*command, *(f"-C{s}" for s in settings)], env=environment, check=check)


def names_in(folder: Path) -> set[str]:
    (wheel,) = folder.glob("*.whl")
    version = torchrec_kt.__version__
    assert re.fullmatch(rf"torchrec_kt-{re.escape(version)}-py3-none-\w+\.whl", wheel.name)
    return set(zipfile.ZipFile(wheel).namelist())


def check_pure(folder: Path) -> None:
    names = names_in(folder)
    assert not [name for name in names if name.endswith(".so")]
    assert {"torchrec_kt/__init__.py", "torchrec_kt/ops/cost.json", "torchrec_kt/ops/csrc/kernel.h"} <= names
    assert not [name for name in names if name.startswith(("tests", "build", "examples"))]


def test_without_cuda_nothing_is_compiled(tmp_path: Path) -> None:
    log = pip_wheel(tmp_path, "OFF").stdout
    check_pure(tmp_path)
    assert "No CUDA library: CUDA tensors will take the pure torch path" in log
    assert "Building C" not in log
    assert "compiler identification" not in log


@pytest.mark.parametrize("cuda", ["OFF", "AUTO", None])
def test_without_any_compiler(tmp_path: Path, cuda: str | None) -> None:
    log = pip_wheel(tmp_path, cuda, compilers=False).stdout
    check_pure(tmp_path)
    assert "No CUDA library: CUDA tensors will take the pure torch path" in log


def test_cuda_demanded_without_a_compiler(tmp_path: Path) -> None:
    done = pip_wheel(tmp_path, "ON", compilers=False, check=False)
    assert done.returncode != 0
    assert re.search(r"CMake Error[\s\S]*CMAKE_\w+_COMPILER", done.stdout)
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.usefixtures("needs_nvcc")
def test_with_cuda_the_library_is_inside_and_loads(tmp_path: Path) -> None:
    log = pip_wheel(tmp_path, "ON", defines=("CMAKE_CUDA_ARCHITECTURES=90-real",)).stdout
    assert "CUDA library for architectures 90-real" in log
    names = names_in(tmp_path)
    assert [name for name in names if name.endswith(".so")] == [LIBRARY]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import torchrec_kt.ops as ops; from torchrec_kt.ops import _native\n"
        "print(ops.__file__, ops.has_cuda_kernel(), _native.report())"
    )
    environment = {
        "PYTHONPATH": str(tmp_path / "site"),
        "TORCHREC_KT_LIBRARY": None,
        "TORCHREC_KT_PURE_TORCH": None,
    }
    done = building.run([sys.executable, "-S", "-c", _ISOLATED + code], env=environment, cwd=tmp_path)
    site = tmp_path / "site"
    assert done.stdout == f"{site / 'torchrec_kt/ops/__init__.py'} True loaded from {site / LIBRARY}\n"


# The packages of this environment, without the hooks of an editable install of this one.
_ISOLATED = f"import sys; sys.path += {[path for path in sys.path if path.endswith('site-packages')]!r}\n"


def test_no_build_is_left_in_the_sources() -> None:
    assert not list(building.SOURCES.glob("**/CMakeCache.txt"))
    assert not list(building.SOURCES.glob("**/*.so"))
    assert os.path.isdir(building.SOURCES)
