"""``python -m torchrec_kt`` tells what a bug report needs."""

from __future__ import annotations

import subprocess
import sys

import torch

import torchrec_kt
from torchrec_kt.ops import _native


def test_report_names_versions_and_state() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchrec_kt"], check=True, capture_output=True, text=True, timeout=300
    )
    lines = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    told = {name.strip(): value.strip() for name, value in lines.items()}
    assert told["torchrec_kt"] == torchrec_kt.__version__
    assert told["torch"].startswith(torch.__version__)
    assert told["torchrec"].startswith("1.")
    assert "fbgemm-gpu-cpu" in told["fbgemm"]
    assert told["cuda kernel"] == _native.report()
    assert told["huge pages"]


def test_report_shows_why_an_import_fails() -> None:
    code = (
        "import sys, types\n"
        "class Block:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'fbgemm_gpu': raise OSError('undefined symbol: xyz')\n"
        "sys.meta_path.insert(0, Block())\n"
        "from torchrec_kt.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300
    )
    assert "import fails: OSError: undefined symbol: xyz" in done.stdout
