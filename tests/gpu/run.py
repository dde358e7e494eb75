"""Build, check and measure everything on a GPU, in under nine minutes.

    python tests/gpu/run.py --out results

Needs torch with CUDA, nvcc, a C++ compiler and pytest; neither torchrec nor a package index. Exits with 1 if
any part fails, no GPU included. Writes ``gpu.json``, ``summary.json`` and logs to the folder given; prints a
short table last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "torchrec_kt" / "ops" / "csrc"
KERNEL = [SOURCES / "apply.cpp", SOURCES / "cuda.cu"]
LIMIT_SECONDS = 530


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--skip-build", action="store_true", help="use the library that is installed")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    runner = Runner(out)

    if not arguments.skip_build:
        library = out / "torchrec_kt_cuda.so"
        if not runner.step("build", build_command(library), 240):
            return runner.finish()
        runner.environment["TORCHREC_KT_LIBRARY"] = str(library)
        serving = out / "libtorchrec_kt_serving.so"
        if not runner.step("build of the serving library", serving_build_command(serving), 120):
            return runner.finish()
        runner.environment["TORCHREC_KT_SERVING_LIBRARY"] = str(serving)
    runner.environment["TORCHREC_KT_TEST_DEVICE"] = "cuda"
    # Parents' conftest.py files ask for more packages than there need to be here.
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "--confcutdir",
        "tests/gpu",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
    ]
    runner.step("tests", [*pytest, "tests/gpu"], 150)
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    small = "copies_are_exact and (odd or mixed) and (uint8 or float32) or test_gradients and 2 or casts and float16"
    memcheck = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
    runner.step("memcheck", [*memcheck, *pytest, "tests/gpu/test_kernel.py", "-k", small], 100)
    left = max(60, runner.left() - 20)
    measure = [
        "-m",
        "torchrec_kt.benchmark.gpu",
        "--json",
        str(out / "gpu.json"),
        "--seconds",
        str(left - 30),
    ]
    runner.step("measurement", [sys.executable, *measure], left)
    return runner.finish()


def build_command(library: Path) -> list[str]:
    """One compiler call for the card at hand. The wheel's CMake build does the same for all architectures."""
    return compiler_command(library, "-std=c++17", *map(str, KERNEL), str(SOURCES / "operator.cpp"))


def serving_build_command(library: Path) -> list[str]:
    """The library for processes without Python. Its CMake build does the same for all architectures."""
    import torch

    sources = [str(SOURCES / "serving" / f"regroup_{name}.cpp") for name in ("serving", "kernel")]
    defines = ["-DTORCHREC_KT_KERNEL", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    include = f"-I{Path(torch.__file__).parent / 'include'}"
    return compiler_command(library, "-std=c++20", *defines, include, *map(str, KERNEL), *sources)


def compiler_command(library: Path, *arguments: str) -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return [sys.executable, "-c", "raise SystemExit('there is no GPU')"]
    number = "{}{}".format(*torch.cuda.get_device_capability())
    return [
        shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc",
        *("-O3", "-shared", "-Xptxas=-v", "-cudart=static"),
        f"-gencode=arch=compute_{number},code=sm_{number}",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        *("-o", str(library), *arguments),
        f"-L{Path(torch.__file__).parent / 'lib'}",
        *("-Xlinker=--no-as-needed", "-ltorch", "-ltorch_cpu"),
    ]


class Runner:
    """Runs the parts, each with a time limit, and keeps what became of them."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.start = time.monotonic()
        self.results: dict[str, dict[str, object]] = {}
        self.environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def left(self) -> float:
        """Seconds until the whole has to be done."""
        return LIMIT_SECONDS - (time.monotonic() - self.start)

    def step(self, name: str, command: list[str], limit: float) -> bool:
        """Run one part with its output in a log; whether it succeeded."""
        start = time.monotonic()
        log = self.out / f"{name}.log"
        with log.open("w") as stream:
            try:
                done = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=self.environment,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    timeout=max(1, min(limit, self.left())),
                )
                outcome = "passed" if done.returncode == 0 else f"failed with {done.returncode}"
            except subprocess.TimeoutExpired:
                outcome = "timed out"
            except OSError as error:
                outcome = f"did not start: {error}"
        seconds = round(time.monotonic() - start, 1)
        self.results[name] = {"outcome": outcome, "seconds": seconds}
        print(f"== {name}: {outcome} after {seconds} s", flush=True)
        if outcome != "passed":
            print(log.read_text()[-3000:], flush=True)
        return outcome == "passed"

    def finish(self) -> int:
        """Write the summary, print the measurement's table, give the exit status."""
        (self.out / "summary.json").write_text(json.dumps(self.results, indent=1) + "\n")
        measured = self.out / "measurement.log"
        if measured.exists():
            print(measured.read_text()[-7000:])
        for name, result in self.results.items():
            print(f"{name}: {result['outcome']}, {result['seconds']} s")
        return 0 if all(r["outcome"] == "passed" for r in self.results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
