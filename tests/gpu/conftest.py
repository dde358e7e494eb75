"""Chooses the device: ``TORCHREC_KT_TEST_DEVICE=cuda`` or ``cpu``, the latter with a host build of the kernel."""

from __future__ import annotations

import os

import pytest
import torch

from torchrec_kt.ops import _native

DEVICE = os.environ.get("TORCHREC_KT_TEST_DEVICE")

# Without a device there is nothing to test here; the host build's run of this folder sets one.
collect_ignore_glob = [] if DEVICE else ["test_*.py"]
if DEVICE == "cpu":
    collect_ignore_glob = ["test_cuda.py"]


def pytest_configure() -> None:
    if not DEVICE:
        return
    if DEVICE == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("TORCHREC_KT_TEST_DEVICE is cuda, and there is no GPU")
    if not _native.has_kernel(DEVICE):
        raise pytest.UsageError(f"no kernel for {DEVICE}: {_native.why_not()}")


@pytest.fixture
def device() -> torch.device:
    assert DEVICE
    torch.manual_seed(0)
    return torch.device(DEVICE)
