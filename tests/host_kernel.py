"""Pytest plugin: tensors on the CPU take the compiled kernel, built for the host.

``TORCHREC_KT_LIBRARY=... pytest -p tests.host_kernel tests/ops``. Fails the run where the kernel was not
what answered.
"""

from __future__ import annotations

from typing import Any

import pytest

from torchrec_kt.ops import _native, kernel

_calls = 0


def pytest_configure(config: pytest.Config) -> None:
    if not _native.has_kernel("cpu"):
        raise pytest.UsageError(f"no host build of the kernel: {_native.why_not()}")
    kernel._cpu_kernel = True
    original = kernel._Program.__call__

    def counted(self: Any, values: Any) -> Any:
        global _calls
        _calls += 1
        return original(self, values)

    kernel._Program.__call__ = counted


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"calls of the host kernel: {_calls}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _calls == 0 and session.testscollected:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
