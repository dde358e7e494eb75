"""What nvcc makes of the kernel: architectures, registers, instructions, and what the library needs to load."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.kernel import building

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
TYPES = ("4Half", "8BFloat16", "f", "d")
KERNELS = 1 + len(TYPES) ** 2


class Usage(NamedTuple):
    registers: int
    stack: int
    spilled: int


@pytest.fixture(scope="session")
def usage(cuda_build: Path) -> dict[tuple[str, str], Usage]:
    """By architecture and kernel, from ptxas' report in the build's log."""
    pattern = (
        r"Compiling entry function '(\w+)' for '(sm_\w+)'\n"
        r".*Function properties for \1\n"
        r"\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*Used (\d+) registers"
    )
    log = (cuda_build / "ptxas.log").read_text()
    return {
        (architecture, kernel): Usage(int(registers), int(stack), int(stores) + int(loads))
        for kernel, architecture, stack, stores, loads, registers in re.findall(pattern, log)
    }


class Instruction(NamedTuple):
    address: int
    name: str
    text: str


@pytest.fixture(scope="session")
def sass(cuda_library: Path) -> dict[str, list[Instruction]]:
    """By kernel, for sm_90."""
    disassembler = building.nvidia_tool("nvdisasm")
    path = f"{disassembler.parent}{os.pathsep}{building.path()}"
    tool = building.nvidia_tool("cuobjdump")
    text = building.run(
        [tool, "--dump-sass", "--gpu-architecture", "sm_90", cuda_library], env={"PATH": path}
    ).stdout
    kernels: dict[str, list[Instruction]] = {}
    for part in text.split("Function : ")[1:]:
        lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+\s+)?([A-Z][\w.]*)[^;]*);", part)
        kernels[part.split()[0]] = [Instruction(int(at, 16), name, line) for at, line, name in lines]
    return kernels


def kernel_named(part: str, sass: dict[str, list[Instruction]]) -> list[Instruction]:
    (found,) = [code for name, code in sass.items() if part in name]
    return found


def loops(code: list[Instruction]) -> Iterator[list[Instruction]]:
    """From the target of each branch back to the branch."""
    for branch in code:
        target = re.search(r"BRA.* 0x([0-9a-f]+)", branch.text)
        if target and int(target[1], 16) < branch.address:
            yield [i for i in code if int(target[1], 16) <= i.address <= branch.address]


def loads_before_stores(code: list[Instruction], load: str, store: str) -> int:
    """The most loads between two stores."""
    most = run = 0
    for instruction in code:
        if instruction.name.startswith(store):
            most, run = max(most, run), 0
        run += instruction.name.startswith(load)
    return most


def count(code: list[Instruction], name: str) -> int:
    return sum(i.name.startswith(name) for i in code)


def test_every_architecture_is_in_the_library(cuda_library: Path) -> None:
    tool = building.nvidia_tool("cuobjdump")
    found = re.findall(r"\.(sm_\d+)\.cubin", building.run([tool, "--list-elf", cuda_library]).stdout)
    assert sorted(found) == sorted(ARCHITECTURES)
    assert re.findall(r"\.(sm_\d+)\.ptx", building.run([tool, "--list-ptx", cuda_library]).stdout) == [
        "sm_120"
    ]


def test_no_kernel_spills_or_has_a_stack(usage: dict[tuple[str, str], Usage]) -> None:
    assert len(usage) == len(ARCHITECTURES) * KERNELS
    assert {architecture for architecture, _ in usage} == set(ARCHITECTURES)
    bad = {key: used for key, used in usage.items() if used.stack or used.spilled}
    assert not bad


def test_64_registers_at_most(usage: dict[tuple[str, str], Usage]) -> None:
    """So that a multiprocessor holds 1,024 threads, as the launcher takes for granted."""
    assert len(usage) == len(ARCHITECTURES) * KERNELS
    assert not {key: used.registers for key, used in usage.items() if used.registers > 64}


def test_copies_keep_eight_vectors_in_flight(sass: dict[str, list[Instruction]]) -> None:
    code = kernel_named("CopyKernel", sass)
    for load, store in (("LDG.E.128", "STG.E.128"), ("LDG.E.64", "STG.E.64"), ("LDG.E.U8", "STG.E.U8")):
        assert loads_before_stores(code, load, store) >= 8, load


def test_instructions_per_vector_copied(sass: dict[str, list[Instruction]]) -> None:
    """16 bytes take a load, a store, and the addresses of both."""
    walks = [
        body
        for body in loops(kernel_named("CopyKernel", sass))
        if count(body, "LDG.E.128") == count(body, "STG.E.128") == 8
    ]
    assert len(walks) == 1
    assert len(walks[0]) <= 8 * 8


@pytest.mark.parametrize(
    ("types", "load", "store", "rows"),
    [
        ("IffE", "LDG.E.128", "STG.E.128", 4),
        ("IddE", "LDG.E.128", "STG.E.128", 4),
        ("INS_8BFloat16ES2_E", "LDG.E.128", "STG.E.128", 2),  # 16 floats of sums are enough registers
        ("INS_4HalfES2_E", "LDG.E.128", "STG.E.128", 2),
        ("IfNS_8BFloat16E", "LDG.E.128", "STG.E.64", 4),
        ("INS_4HalfEfE", "LDG.E.64", "STG.E.128", 4),
    ],
)
def test_sums_and_casts_move_whole_vectors(
    sass: dict[str, list[Instruction]], types: str, load: str, store: str, rows: int
) -> None:
    code = kernel_named(f"SumKernel{types}", sass)
    assert loads_before_stores(code, load, store) >= rows
    assert count(code, store) >= rows


def test_no_kernel_touches_local_memory(sass: dict[str, list[Instruction]]) -> None:
    assert len(sass) == KERNELS
    for name, code in sass.items():
        assert len(code) > 300
        names = {i.name.split(".")[0] for i in code}
        assert not names & {"LDL", "STL", "CALL", "LD", "ST"}, name  # nor anything whose place is not known


# --- what the library needs -------------------------------------------------------------------------------


def declared_shims() -> set[str]:
    text = (building.SOURCES / "shims.h").read_text()
    block = text.partition('extern "C" {\n')[2].partition("\n}")[0]
    return set(re.findall(r"\b((?:aoti_|torch_)\w+)\(", block))


def test_only_stable_functions_of_torch_are_needed(cuda_library: Path) -> None:
    lines = building.run(["nm", "-D", "--undefined-only", cuda_library]).stdout.split("\n")
    needed = {line.split()[-1] for line in lines if line}
    weak = {line.split()[-1] for line in lines if line.split()[:1] == ["w"]}
    system = {name for name in needed if re.search(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_", name)}
    markers = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__", "__cxa_finalize"}
    torchs = needed - system - markers
    assert torchs <= declared_shims(), torchs - declared_shims()
    assert {name for name in torchs if name.startswith(("aoti_", "torch_"))} == torchs
    assert len(torchs) > 20
    assert torchs & weak == {"aoti_torch_get_current_cuda_stream"}
    assert not [name for name in needed if "cuda" in name and name not in torchs]


def test_libraries_needed(cuda_library: Path) -> None:
    """The CUDA runtime is inside, and no path of the machine that built it is."""
    dynamic = building.run(["readelf", "-d", cuda_library]).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert needed[:2] == ["libtorch.so", "libtorch_cpu.so"]
    system = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
    assert set(needed[2:]) <= system | {"libdl.so.2", "libpthread.so.0", "librt.so.1"}
    assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic)


def test_no_function_is_offered_by_the_library(cuda_library: Path) -> None:
    """So that it never answers for another library in the process."""
    names = building.run(["nm", "-DC", "--defined-only", cuda_library]).stdout
    assert not re.search(r"torchrec_kt|cuda|aoti", names)


# --- shims.h ----------------------------------------------------------------------------------------------


def compile_beside_torch(folder: Path) -> subprocess.CompletedProcess[str]:
    version = re.search(
        r"kAbiVersion = uint64_t\{(\d+)\} << 56 \| uint64_t\{(\d+)\} << 48", (folder / "shims.h").read_text()
    )
    assert version
    target = int(version[1]) << 56 | int(version[2]) << 48
    return building.run(
        [
            "g++", "-std=c++20", "-fsyntax-only", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={target:#x}",
            f"-I{Path(torch.__file__).parent / 'include'}", f"-I{folder}",
            Path(__file__).with_name("shims_beside_torch.cpp"),
        ],
        check=False,
    )  # fmt: skip


def test_shims_are_declared_as_torch_declares_them() -> None:
    done = compile_beside_torch(building.SOURCES)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            "aoti_torch_get_dim(AtenTensorOpaque*, int64_t*)",
            "aoti_torch_get_dim(AtenTensorOpaque*, int32_t*)",
        ),
        ("int32_t torch_list_size(", "int64_t torch_list_size("),
        ("aoti_torch_get_current_cuda_stream(int32_t,", "aoti_torch_get_current_cuda_stream(int64_t,"),
        (
            "torch_list_push_back(StableListOpaque*, uint64_t)",
            "torch_list_push_back(StableListOpaque*, int64_t)",
        ),
    ],
)
def test_a_difference_does_not_compile(tmp_path: Path, right: str, wrong: str) -> None:
    text = (building.SOURCES / "shims.h").read_text()
    assert text.count(right) == 1
    (tmp_path / "shims.h").write_text(text.replace(right, wrong))
    done = compile_beside_torch(tmp_path)
    assert done.returncode != 0
    assert re.search("conflicting declaration|ambiguating new declaration", done.stdout), done.stdout


def test_every_shim_is_one_of_torchs() -> None:
    """A name that torch does not know would be a declaration of its own, and compile."""
    include = Path(torch.__file__).parent / "include" / "torch" / "csrc"
    headers = [include / "inductor/aoti_torch/c/shim.h", include / "stable/c/shim.h"]
    text = "".join(header.read_text() for header in headers)
    shims = declared_shims()
    assert len(shims) > 20
    assert {name for name in shims if not re.search(rf"\b{name}\(", text)} == set()


# --- loading ----------------------------------------------------------------------------------------------

LOADING = """
import torch
from torchrec_kt.ops import RegroupPlan, has_cuda_kernel, regroup_values, _native
assert _native.load() is None, _native.load()
assert has_cuda_kernel()
assert not _native.has_kernel("cpu") and not _native.has_kernel("meta")
has = torch._C._dispatch_has_kernel_for_dispatch_key
assert has("torchrec_kt::_encode_map", "CPU") and has("torchrec_kt::_apply_map", "CUDA")
from torchrec_kt.ops import kernel
def not_called(*args): raise AssertionError("CPU tensors reach the kernel")
kernel._Program.__init__ = not_called
plan = RegroupPlan.build([(["a", "b"], [1, 2])], [["b", "a", "b"]])
values = [torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)]
(out,) = regroup_values(values, plan)
assert out.tolist() == [[2.0, 3.0, 1.0, 2.0, 3.0]]
out.sum().backward()
assert values[0].grad.tolist() == [[1.0, 2.0, 2.0]]
# What is independent of a device works without one.
map, header = torch.ops.torchrec_kt._encode_map(torch.tensor([1, 1, 4, 0, 0, 4, 1, 0, 0]), torch.tensor([2, 2]), 2)
assert map.dtype == torch.int32 and header.dtype == torch.int64
print("loaded", torch.__version__)
"""


def loads_in(interpreter: str, library: Path) -> str:
    environment = {
        "TORCHREC_KT_LIBRARY": str(library),
        "TORCHREC_KT_PURE_TORCH": None,
        "PYTHONPATH": str(building.ROOT),
    }
    return building.run([interpreter, "-W", "error::RuntimeWarning", "-c", LOADING], env=environment).stdout


#: The environment variable names interpreters of other environments, to try beside this one.
OTHERS = [path for path in os.environ.get("TORCHREC_KT_OTHER_PYTHON", "").split(os.pathsep) if path]


@pytest.mark.parametrize("interpreter", [sys.executable, *OTHERS])
def test_loads_and_registers(cuda_library: Path, interpreter: str) -> None:
    assert loads_in(interpreter, cuda_library).splitlines()[-1].startswith("loaded ")
