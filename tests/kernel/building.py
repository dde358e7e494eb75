"""Builds of the compiled parts, once, under the repository's ``build`` folder, and what looks into them."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "torchrec_kt" / "ops" / "csrc"
BUILDS = ROOT / "build" / "kernel"


def path() -> str:
    """Where programs are looked for: first among those of this environment."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str | None] | None = None,
    cwd: Path = ROOT,
    check: bool = True,
    timeout: float = 1500,
) -> subprocess.CompletedProcess[str]:
    """Run a command, both outputs joined. ``env`` changes the environment; None takes a name away."""
    environment = dict(os.environ, PATH=path())
    for name, value in (env or {}).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
    )
    assert not check or done.returncode == 0, (
        f"{command} exits with {done.returncode}:\n{done.stdout[-6000:]}"
    )
    return done


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other test runs out of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(name: str, source: Path = SOURCES, **defines: str) -> Path:
    """The folder of a CMake build; what has been built there before is used again."""
    folder = BUILDS / name
    with locked(folder):
        run(["cmake", "-S", source, "-B", folder, "-G", "Ninja", *(f"-D{k}={v}" for k, v in defines.items())])
        log = run(["cmake", "--build", folder]).stdout
        if "ptxas info" in log:
            (folder / "ptxas.log").write_text(log)
    return folder


def build_serving(name: str, **defines: str) -> Path:
    """The library for processes without Python, of another build for each name."""
    folder = build(name, SOURCES / "serving", TORCH_ROOT=torch.__path__[0], **defines)
    return folder / "libtorchrec_kt_serving.so"


def unstable_symbols(library: Path) -> list[str]:
    """What a library needs of torch's C++ interface, whose names are mangled; those of the C one are not."""
    lines = run(["nm", "-D", "--undefined-only", library]).stdout.splitlines()
    unstable = ("_ZN2at", "_ZNK2at", "_ZN3c10", "_ZNK3c10", "_ZN5torch")
    return [name for name in (line.split()[-1] for line in lines) if name.startswith(unstable)]


def nvcc() -> str | None:
    """A CUDA compiler, as CMake would find it."""
    return os.environ.get("CUDACXX") or shutil.which("nvcc", path=path())


def nvidia_tool(name: str) -> Path:
    """A program from one of NVIDIA's packages on PyPI."""
    distribution = f"nvidia-cuda-{name}"
    for file in importlib.metadata.files(distribution) or ():
        if file.name == name:
            return Path(str(file.locate()))
    raise FileNotFoundError(f"{distribution} holds no {name}")


def sanitized(library: Path) -> dict[str, str | None]:
    """Environment for a Python that loads a library built with sanitizers."""
    # The sanitizers' runtime has to come first. Without the C++ runtime beside it, it finds no
    # function to throw exceptions with.
    preloaded = [
        run(["g++", f"-print-file-name={name}"]).stdout.strip() for name in ("libasan.so", "libstdc++.so.6")
    ]
    return {
        "LD_PRELOAD": " ".join(preloaded),
        # No memory is filled by outputs that a refusal was expected for; short stacks for each of many blocks.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=4096:malloc_context_size=6",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        "TORCHREC_KT_LIBRARY": str(library),
        "TORCHREC_KT_PURE_TORCH": None,
    }


def python(
    code: str, *arguments: str, env: Mapping[str, str | None] | None = None, check: bool = True
) -> str:
    """What a fresh interpreter prints."""
    return run([sys.executable, "-c", code, *arguments], env=env, check=check).stdout
