"""Interleaved timing: every candidate runs once per round, so that noise hits all alike."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["interleaved", "medians"]


def interleaved(
    candidates: Mapping[str, Callable[[], Any]], rounds: int = 9, min_seconds: float = 2e-3
) -> dict[str, list[float]]:
    """Seconds per call of each candidate, one figure per round.

    Fast candidates are repeated within a round until it takes ``min_seconds``. Results are dropped
    before the clock stops, so that freeing them counts, as it does in use. Each timed stretch follows an
    untimed one of the same candidate, so that none pays for the caches, the sleeping threads and the
    free memory that the one before it left behind (virtual machines even hand free memory back after
    a second or two).
    """
    _settle_allocator()
    repeats: dict[str, int] = {}
    for name, run in candidates.items():
        run()
        start = time.perf_counter()
        run()
        repeats[name] = max(1, round(min_seconds / max(1e-9, time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            count = repeats[name]
            for _ in range(count):
                run()
            start = time.perf_counter()
            for _ in range(count):
                run()
            seconds[name].append((time.perf_counter() - start) / count)
    return seconds


@functools.cache
def _settle_allocator() -> None:
    """Bring glibc's allocator to where a process that has run for a while has it.

    It returns freed memory to the system from a size on, which grows to 32 MB with the blocks that
    were freed. Until then, whether a call of a few MB pays for page faults depends on what ran before.
    """
    torch.ones(31 << 20, dtype=torch.uint8)


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each candidate's rounds."""
    return {name: statistics.median(rounds) for name, rounds in seconds.items()}
