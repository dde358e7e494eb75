"""The library for processes without Python, whose checks run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

VARIABLE = "TORCHREC_KT_SERVING_LIBRARY"


@pytest.mark.parametrize("checks", ["check_serving", "check_serving_kernel"])
def test_serving_library(checks: str, device: torch.device) -> None:
    library = os.environ.get(VARIABLE)
    assert library, f"build the serving library with the kernel for {device} and name it in {VARIABLE}"
    command = ["-W", "ignore", "-m", f"tests.ops.{checks}", library, "--device", device.type]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-6000:]
