"""Finds and loads the compiled library, once, when it is first asked for.

The library carries implementations alone; the schemas are here. It is quiet about its absence: who
meets a CUDA tensor asks :func:`why_not` and tells the user.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["LIBRARY_VARIABLE", "PURE_TORCH_VARIABLE", "has_kernel", "load", "report", "why_not"]

#: Set to 1 to take the pure torch path everywhere.
PURE_TORCH_VARIABLE = "TORCHREC_KT_PURE_TORCH"
#: Path of a library to load in place of the installed one.
LIBRARY_VARIABLE = "TORCHREC_KT_LIBRARY"

_FILE_NAME = "torchrec_kt_cuda.so"

_SCHEMAS = torch.library.Library("torchrec_kt", "FRAGMENT")
_SCHEMAS.define("_encode_map(Tensor pieces, Tensor alignment, int max_log) -> (Tensor map, Tensor header)")
_SCHEMAS.define("_apply_map(Tensor[] values, Tensor map, Tensor header, int cast) -> Tensor[]")


class _Outcome(NamedTuple):
    path: Path | None
    reason: str | None  # why nothing is loaded


_lock = threading.Lock()
_outcome: _Outcome | None = None


def load() -> str | None:
    """Load the library unless that has been tried; the reason if there is none, else None."""
    global _outcome
    if _outcome is None:
        with _lock:
            if _outcome is None:
                _outcome = _load()
    return _outcome.reason


def _load() -> _Outcome:
    if forced_pure_torch():
        return _Outcome(None, f"{PURE_TORCH_VARIABLE} is set")
    path = _find()
    if path is None:
        return _Outcome(
            None, "the CUDA library was not built; install torchrec_kt from source where nvcc is on the PATH"
        )
    try:
        torch.ops.load_library(path)
    except Exception as error:  # whatever the loader says is what the user has to see
        return _Outcome(path, f"{path} does not load: {error.__cause__ or error}")
    return _Outcome(path, None)


def _find() -> Path | None:
    given = os.environ.get(LIBRARY_VARIABLE)
    if given:
        return Path(given)
    # More than one place where an editable install leaves built files apart from the sources.
    from . import __path__ as places

    return next((path for place in places if (path := Path(place) / _FILE_NAME).exists()), None)


def forced_pure_torch() -> bool:
    """Whether the environment asks for the pure torch path."""
    return os.environ.get(PURE_TORCH_VARIABLE, "") not in ("", "0")


def has_kernel(device_type: str) -> bool:
    """Whether tensors on devices of this type are regrouped by the compiled kernel."""
    return (
        load() is None
        and device_type != "meta"
        and torch._C._dispatch_has_kernel_for_dispatch_key(
            "torchrec_kt::_apply_map", torch._C._dispatch_key_for_device(device_type)
        )
    )


def why_not() -> str:
    """Why :func:`has_kernel` says no."""
    return load() or "the library holds no kernel for this device"


def report() -> str:
    """One line for a bug report."""
    reason = load()
    if reason is None:
        return f"loaded from {_outcome.path if _outcome else None}"
    return f"none, CUDA tensors take the pure torch path: {reason}"
