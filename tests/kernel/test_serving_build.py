"""The library for processes without Python, with the kernel inside: on the host, and as nvcc makes it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.kernel import building
from torchrec_kt.ops import kernel


@pytest.mark.parametrize("checks", ["check_serving", "check_serving_kernel"])
def test_on_the_host_under_sanitizers(host_serving_library: Path, checks: str) -> None:
    environment = building.sanitized(host_serving_library)
    # Little is kept of what was freed, so that memory that grows shows.
    environment["ASAN_OPTIONS"] = f"{environment['ASAN_OPTIONS']}:quarantine_size_mb=8"
    command = [sys.executable, "-W", "ignore", "-m", f"tests.ops.{checks}", host_serving_library]
    output = building.run(command, env=environment).stdout
    assert "runtime error:" not in output
    assert "ERROR: AddressSanitizer" not in output


# --- with CUDA, where there is neither a device nor a driver ------------------------------------------------

REGISTERED = """
import sys, torch
torch.ops.load_library(sys.argv[1])
has = torch._C._dispatch_has_kernel_for_dispatch_key
for name in ("regroup", "regroup_transposed"):
    assert has(f"torchrec_kt::{name}", "CPU") and has(f"torchrec_kt::{name}", "CUDA"), name
names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("torchrec_kt")}
assert not {"_apply_map", "_encode_map"} & names, names
"""


def test_with_cuda_it_loads_beside_a_torch_without(cuda_serving_library: Path) -> None:
    building.python(REGISTERED, str(cuda_serving_library))
    building.run([sys.executable, "-W", "ignore", "-m", "tests.ops.check_serving", cuda_serving_library])


def test_with_cuda_it_uses_the_stable_abi_alone(cuda_serving_library: Path) -> None:
    assert not building.unstable_symbols(cuda_serving_library)
    lines = building.run(["nm", "-D", "--undefined-only", cuda_serving_library]).stdout.splitlines()
    assert [line.split()[-1] for line in lines if "cuda" in line and "device_type" not in line] == [
        "aoti_torch_get_current_cuda_stream"
    ]
    assert (
        "                 w aoti_torch_get_current_cuda_stream" in lines
    )  # which a CPU build of torch lacks
    needed = re.findall(r"NEEDED.*\[(.*)\]", building.run(["readelf", "-d", cuda_serving_library]).stdout)
    assert needed[:2] == ["libtorch.so", "libtorch_cpu.so"]
    assert not [name for name in needed if "cuda" in name]


IN_PYTHON = """
import sys, torch
from torchrec_kt.ops import _native
assert _native.load() is None, _native.load()
names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("torchrec_kt"))
before = [torch._C._dispatch_dump(name) for name in names]
torch.ops.load_library(sys.argv[1])
assert names == sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("torchrec_kt"))
assert before == [torch._C._dispatch_dump(name) for name in names]
"""


def test_in_a_python_process_it_does_nothing(cuda_serving_library: Path, plain_host_library: Path) -> None:
    """Beside the library that Python loads, which holds the same kernel."""
    environment = {"TORCHREC_KT_LIBRARY": str(plain_host_library), "TORCHREC_KT_PURE_TORCH": None}
    told = building.python(IN_PYTHON, str(cuda_serving_library), env=environment)
    assert "defined already, by the Python package" in told


# --- limits ---------------------------------------------------------------------------------------------------


def constant(header: str, name: str) -> int:
    (text,) = re.findall(rf"\b{name} = ([^;]+);", (building.SOURCES / header).read_text())
    found = re.fullmatch(r"(?:int64_t\{)?(\d+)\}?(?: << (\d+))?", text)
    assert found, text
    return int(found[1]) << int(found[2] or 0)


def test_limits_are_those_of_python() -> None:
    assert constant("encode.h", "kMaxColumns") == kernel._MAX_COLUMNS
    assert constant("encode.h", "kMaxPlainColumns") == kernel._MAX_PLAIN_COLUMNS
    assert constant("kernel.h", "kMaxSlots") - 1 == kernel._MAX_TENSORS
    assert 1 << constant("kernel.h", "kSlotShift") == kernel._WINDOW
