"""The rule that picks how to move columns on a CPU.

The time of each strategy is modelled as counts times constants, in nanoseconds. The constants are in
``cost.json``, which ``python -m torchrec_kt.benchmark.calibrate`` measures and writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Literal, NamedTuple

__all__ = ["COLUMNS", "ROWS", "SLICES", "Strategy", "cheapest"]

Strategy = Literal["slices", "columns", "rows"]


class Slices(NamedTuple):
    """Splitting and concatenating.

    A *part* is one view made and copied, a *strip* is one row of a part.
    """

    call: float
    part: float
    strip: float
    byte: float

    def counts(self, *, calls: int, parts: int, strips: int, size: int) -> tuple[float, ...]:
        return calls, parts, strips, size

    def cost(self, *, calls: int, parts: int, strips: int, size: int) -> float:
        return _dot(self, self.counts(calls=calls, parts=parts, strips=strips, size=size))


class Columns(NamedTuple):
    """Selecting granules of columns: per call, per granule, and per row of a granule (strip)."""

    call: float
    granule: float
    strip: float
    byte: float

    def granule_cost(self, rows: int) -> float:
        """Of one granule of ``rows`` rows, bytes apart."""
        return self.granule + self.strip * rows

    def counts(self, *, calls: int, granules: int, rows: int, size: int) -> tuple[float, ...]:
        return calls, granules, granules * rows, size

    def cost(self, *, calls: int, granules: int, rows: int, size: int) -> float:
        return _dot(self, self.counts(calls=calls, granules=granules, rows=rows, size=size))


class Rows(NamedTuple):
    """Joining rows and selecting their granules: per block of rows, per output of a block, per granule."""

    block: float
    output: float
    granule: float
    byte: float

    def counts(self, *, blocks: int, outputs: int, granules: int, size: int) -> tuple[float, ...]:
        return blocks, outputs * blocks, granules, size

    def cost(self, *, blocks: int, outputs: int, granules: int, size: int) -> float:
        return _dot(self, self.counts(blocks=blocks, outputs=outputs, granules=granules, size=size))


def _dot(constants: tuple[float, ...], counts: tuple[float, ...]) -> float:
    return sum(a * b for a, b in zip(constants, counts))


_constants = json.loads(resources.files("torchrec_kt.ops").joinpath("cost.json").read_text())["nanoseconds"]
SLICES = Slices(**_constants["slices"])
COLUMNS = Columns(**_constants["columns"])
ROWS = Rows(**_constants["rows"])

# Rows are joined in a scratch buffer of at most this size, which should stay in the last cache.
SCRATCH_BYTES = 4 << 20
# A single row with no more columns than this is gathered one column at a time.
SINGLE_ROW_COLUMNS = 512


def cheapest(costs: Mapping[Strategy, float]) -> Strategy:
    """The strategy of least cost."""
    return min(costs, key=costs.__getitem__)
