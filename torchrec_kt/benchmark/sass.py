"""Reads the machine code of the compiled library: loops, loads, stores.

Needs ``cuobjdump`` and ``nvdisasm``, from a CUDA toolkit or from the packages nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import NamedTuple

__all__ = ["Instruction", "Loop", "copy_loops", "instructions_per_16_bytes", "kernel_code"]


class Instruction(NamedTuple):
    """One line of machine code."""

    address: int
    name: str  # with its suffixes, such as LDG.E.128
    text: str


class Loop(NamedTuple):
    """The instructions from a backward branch's target to the branch."""

    body: list[Instruction]

    def count(self, *prefixes: str) -> int:
        """Instructions whose name starts with one of these."""
        return sum(i.name.startswith(prefixes) for i in self.body)

    @property
    def loads_before_first_store(self) -> int:
        """Loads from global memory ahead of the first store."""
        names = [i.name for i in self.body if i.name.startswith(("LDG", "STG"))]
        return next((n for n, name in enumerate(names) if name.startswith("STG")), len(names))


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)[^;]*);")
_SUFFIX_BYTES = {".U8": 1, ".S8": 1, ".U16": 2, ".64": 8, ".128": 16}


def tools() -> dict[str, str]:
    """An environment in which ``cuobjdump`` finds ``nvdisasm``."""
    packaged = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders = [str(folder) for folder in packaged.glob("*/bin")]
    return os.environ | {"PATH": os.pathsep.join([os.environ.get("PATH", ""), *folders])}


def kernel_code(library: Path, architecture: str = "sm_90") -> dict[str, list[Instruction]]:
    """The instructions of every kernel, by mangled name."""
    environment = tools()
    program = shutil.which("cuobjdump", path=environment["PATH"])
    if program is None:
        raise FileNotFoundError(
            "cuobjdump is not on the PATH; install a CUDA toolkit or nvidia-cuda-cuobjdump"
        )
    done = subprocess.run(
        [program, "-arch", architecture, "-sass", library],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    kernels: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in done.stdout.splitlines():
        if "Function :" in line:
            current = kernels.setdefault(line.split(":", 1)[1].strip(), [])
        elif found := _LINE.search(line):
            current.append(Instruction(int(found[1], 16), found[3], found[2]))
    return kernels


def loops(code: list[Instruction]) -> list[Loop]:
    """The innermost loops."""
    place = {instruction.address: n for n, instruction in enumerate(code)}
    found: list[Loop] = []
    for n, instruction in enumerate(code):
        target = re.search(r"\bBRA(?:\.\w+)*\s+(?:!?U?P\w+,\s*)?0x([0-9a-f]+)", instruction.text)
        if target and (start := place.get(int(target[1], 16))) is not None and start < n:
            found.append(Loop(code[start : n + 1]))
    return found


def vector_bytes(name: str) -> int:
    """Bytes that a load or store of global memory moves."""
    return next((size for suffix, size in _SUFFIX_BYTES.items() if name.endswith(suffix)), 4)


def copy_loops(library: Path) -> dict[int, Loop]:
    """The loop of the copying kernel for each length of vector, in bytes."""
    code = next(code for name, code in kernel_code(library).items() if "CopyKernel" in name)
    found: dict[int, Loop] = {}
    for loop in loops(code):
        stores = {vector_bytes(i.name) for i in loop.body if i.name.startswith("STG")}
        if len(stores) == 1 and loop.count("LDG") == loop.count("STG") > 1:
            found[stores.pop()] = loop
    return found


def instructions_per_16_bytes(library: Path) -> dict[int, float]:
    """Instructions of a copying loop for every 16 bytes that a thread moves, by length of vector."""
    return {
        size: len(loop.body) * 16 / (loop.count("STG") * size)
        for size, loop in sorted(copy_loops(library).items(), reverse=True)
    }
