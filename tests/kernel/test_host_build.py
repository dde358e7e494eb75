"""The kernel on the host, under AddressSanitizer and UBSan: the operator's own tests, and cases beyond them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.kernel import building

#: What is run, the least number of tests that it holds, and the least number of calls of the kernel.
RUNS = {
    "tests/ops": (900, 10_000),
    "tests/kernel/host_cases.py": (550, 4_000),
    "tests/kernel/hostile_cases.py": (50, None),
}


def run_tests(library: Path, target: str, *, kernel: bool) -> tuple[int, str]:
    # Sanitizers write to the standard error, which must not be captured: the process ends after that.
    command = [sys.executable, "-m", "pytest", "--capture=sys", "-p", "no:cacheprovider", target]
    command += ["-p", "tests.host_kernel"] if kernel else []
    done = building.run(command, env=building.sanitized(library), check=False)
    return done.returncode, done.stdout


def figure(pattern: str, output: str) -> int:
    found = re.search(pattern, output)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("target", RUNS)
def test_under_sanitizers(host_library: Path, target: str) -> None:
    tests, calls = RUNS[target]
    status, output = run_tests(host_library, target, kernel=calls is not None)
    assert status == 0, output[-12_000:]
    assert "runtime error:" not in output
    assert "ERROR: AddressSanitizer" not in output
    assert figure(r"(\d+) passed", output) >= tests
    assert "skipped" not in output
    if calls is not None:
        assert figure(r"calls of the host kernel: (\d+)", output) >= calls
