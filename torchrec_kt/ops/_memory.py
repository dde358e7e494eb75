"""Output buffers on the host: large ones ask the kernel for huge pages.

A fresh output of hundreds of MB costs more in page faults than in copying. On Linux with
transparent huge pages in ``madvise`` mode (the usual default) one ``madvise`` call per output makes
the kernel hand out 2 MB pages, which cuts the faults by 512. NumPy does the same for its arrays.
The advice covers only whole pages inside the buffer, which is about to be written in full, so the
memory in use does not grow.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["HUGE_PAGE_BYTES", "empty", "huge_pages"]

# Below this size allocators reuse warm memory and there is little left to gain; NumPy's figure too.
HUGE_PAGE_BYTES = 4 << 20

_SWITCH = "TORCHREC_KT_HUGE_PAGES"


def _find_madvise() -> ctypes._FuncPointer | None:
    if not sys.platform.startswith("linux") or os.environ.get(_SWITCH, "1") == "0":
        return None
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise.restype = ctypes.c_int
    return madvise


_madvise = _find_madvise()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty``, contiguous; on the CPU a large result is advised to use huge pages."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if _madvise is not None and device.type == "cpu":
        size = out.numel() * out.element_size()
        if size >= HUGE_PAGE_BYTES:
            page = mmap.PAGESIZE
            first = -(-out.data_ptr() // page) * page
            last = (out.data_ptr() + size) // page * page
            # A refusal (a kernel without huge pages) changes nothing but the speed.
            _madvise(first, last - first, mmap.MADV_HUGEPAGE)
    return out


def huge_pages() -> str:
    """What becomes of the advice on this machine, in words."""
    if _madvise is None:
        return f"not asked for (not Linux, or {_SWITCH}=0)"
    try:
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    except OSError:
        return "asked for; the kernel has none"
    return f"asked for large outputs; the kernel says {modes}"
