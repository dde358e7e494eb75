"""``python -m torchrec_kt``: what is installed, in a form to paste into a bug report."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

import torch

from . import __version__
from .ops import _native
from .ops._memory import huge_pages

__all__ = ["main", "report"]


def report() -> str:
    """One line per fact."""
    lines = {
        "torchrec_kt": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "cuda": _cuda(),
        "torchrec": _import("torchrec", "torchrec"),
        "fbgemm": _import("fbgemm_gpu", "fbgemm-gpu-cpu", "fbgemm-gpu"),
        "cuda kernel": _native.report(),
        "huge pages": huge_pages(),
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _cuda() -> str:
    if torch.version.cuda is None:
        return "torch is built without it"
    if not torch.cuda.is_available():
        return f"torch is built for {torch.version.cuda}, no device"
    return f"{torch.version.cuda}, {torch.cuda.get_device_name()}"


def _import(module: str, *distributions: str) -> str:
    version = "not installed"
    for name in distributions:
        try:
            version = f"{metadata.version(name)} ({name})"
        except metadata.PackageNotFoundError:
            continue
    try:
        __import__(module)
    except Exception as error:  # a broken binary can raise anything; the report is there to show it
        return f"{version}, import fails: {type(error).__name__}: {error}"
    return version


def main() -> None:
    """Print the report."""
    print(report())


if __name__ == "__main__":
    main()
