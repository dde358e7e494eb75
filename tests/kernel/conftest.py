"""The builds that the tests in this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel import building
from tests.kernel.encoding import Probe


@pytest.fixture(scope="session")
def host_library() -> Path:
    """The kernel on the host, with sanitizers."""
    folder = building.build("host", TORCHREC_KT_CUDA="OFF", TORCHREC_KT_HOST="ON")
    return folder / "torchrec_kt_host.so"


@pytest.fixture(scope="session")
def plain_host_library() -> Path:
    """The kernel on the host, without."""
    folder = building.build("plain", TORCHREC_KT_CUDA="OFF", TORCHREC_KT_HOST="ON", TORCHREC_KT_SANITIZE="")
    return folder / "torchrec_kt_host.so"


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    library = tmp_path_factory.mktemp("probe") / "probe.so"
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]
    source = Path(__file__).with_name("probe.cpp")
    building.run(["g++", *options, f"-I{building.SOURCES}", source, "-o", library])
    return Probe(library)


@pytest.fixture(scope="session")
def needs_nvcc() -> None:
    if building.nvcc() is None:
        pytest.skip("there is no CUDA compiler: put nvcc on the PATH or its path into CUDACXX")


@pytest.fixture(scope="session")
def cuda_build(needs_nvcc: None) -> Path:
    """Folder of the CUDA library for every architecture."""
    return building.build("cuda", TORCHREC_KT_CUDA="ON")


@pytest.fixture(scope="session")
def cuda_library(cuda_build: Path) -> Path:
    return cuda_build / "torchrec_kt_cuda.so"


@pytest.fixture(scope="session")
def host_serving_library() -> Path:
    """The library for processes without Python, with the kernel on the host, with sanitizers."""
    return building.build_serving("serving-host", TORCHREC_KT_HOST="ON")


@pytest.fixture(scope="session")
def cuda_serving_library(needs_nvcc: None) -> Path:
    """The same with the kernel for one architecture."""
    return building.build_serving(
        "serving-cuda", TORCHREC_KT_CUDA="ON", CMAKE_CUDA_ARCHITECTURES="90-real", CMAKE_CXX_FLAGS="-O1"
    )
