"""The rule that picks how to move columns on a CPU.

Each strategy's time beyond the unavoidable traffic is modelled as a sum of counts times constants
(nanoseconds). The constants are fitted by ``python -m torchrec_kt.benchmark.calibrate``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

__all__ = ["COLUMNS", "ROWS", "SLICES", "Counts", "Strategy", "cheapest", "columns", "rows", "slices"]

Strategy = Literal["slices", "columns", "rows"]
Counts = float


class _Slices(NamedTuple):
    call: float = 1000.0
    part: float = 450.0
    strip: float = 8.0


class _Columns(NamedTuple):
    call: float = 4000.0
    granule: float = 25.0
    strip: float = 9.0

    def granule_cost(self, rows: int) -> float:
        return self.granule + self.strip * rows


class _Rows(NamedTuple):
    block: float = 6000.0
    output: float = 3000.0
    granule: float = 5.0
    byte: float = 0.05
    scratch_bytes: int = 4 << 20
    single_elements: int = 512


SLICES, COLUMNS, ROWS = _Slices(), _Columns(), _Rows()


def slices(*, calls: int, parts: int, strips: int) -> Counts:
    return SLICES.call * calls + SLICES.part * parts + SLICES.strip * strips


def columns(*, calls: int, granules: int, rows: int) -> Counts:
    return COLUMNS.call * calls + COLUMNS.granule_cost(rows) * granules


def rows(*, blocks: int, outputs: int, granules: int, scratch_bytes: int) -> Counts:
    return (ROWS.block + ROWS.output * outputs) * blocks + ROWS.granule * granules + ROWS.byte * scratch_bytes


def cheapest(costs: Mapping[Strategy, Counts]) -> Strategy:
    return min(costs, key=costs.__getitem__)
