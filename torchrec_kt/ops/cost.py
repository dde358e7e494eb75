"""The rule that picks how to move columns on a CPU.

The time of each strategy is modelled as counts times constants, in nanoseconds. The constants are in
``cost.json``, which ``python -m torchrec_kt.benchmark.calibrate`` measures and writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib import resources
from typing import Any, Literal, NamedTuple

__all__ = ["COLUMNS", "ROWS", "SLICES", "Strategy", "cheapest", "is_far"]

Strategy = Literal["slices", "columns", "rows"]


# A strip of one element is a step of a loop, not a loop of its own.
LONE_STRIP = 0.2
# The strips of a part lie a whole row apart. While everything fits the caches, or rows are
# so short that the next strip has been fetched with this one, that costs little; else every strip
# is a cache miss. Strips are "far" where the outputs and their rows exceed these.
NEAR_BYTES = 4 << 20
NEAR_ROW_BYTES = 1 << 10


class Slices(NamedTuple):
    """Splitting and concatenating.

    A *part* is one view made and copied, a *strip* is one row of a part. Here and below, what threads
    share counts as the share of one.
    """

    call: float
    part: float
    strip: float
    far_strip: float
    byte: float

    def counts(self, *, calls: int, parts: int, strips: float, far: bool, size: float) -> tuple[float, ...]:
        return calls, parts, *_by_distance(strips, far), size

    def cost(self, **counted: Any) -> float:
        return _dot(self, self.counts(**counted))


class Columns(NamedTuple):
    """Selecting granules of columns: per output, call, granule, and row of a granule (strip).

    Where columns of several inputs are joined first: per range of columns, and per byte joined.
    """

    output: float
    call: float
    granule: float
    strip: float
    far_strip: float
    byte: float
    range: float
    joined_byte: float

    def granule_cost(self, rows: int, far: bool) -> float:
        """Of one granule of ``rows`` rows."""
        return self.granule + (self.far_strip if far else self.strip) * rows

    def counts(
        self,
        *,
        outputs: int,
        calls: int,
        granules: float,
        strips: float,
        far: bool,
        size: float,
        ranges: int,
        joined: float,
    ) -> tuple[float, ...]:
        return outputs, calls, granules, *_by_distance(strips, far), size, ranges, joined

    def cost(self, **counted: Any) -> float:
        return _dot(self, self.counts(**counted))


class Rows(NamedTuple):
    """Joining rows and selecting granules, in blocks of rows.

    Per block, per output of a block, per input of a block where there are several (each is cut
    then), and per granule.
    """

    block: float
    output: float
    input: float
    granule: float
    byte: float

    def counts(
        self, *, blocks: int, outputs: int, inputs: int, granules: float, size: float
    ) -> tuple[float, ...]:
        return blocks, outputs * blocks, inputs * blocks if blocks > 1 else 0, granules, size

    def cost(self, **counted: Any) -> float:
        return _dot(self, self.counts(**counted))


def is_far(rows: int, size: int) -> bool:
    """Whether neighbouring strips of outputs of ``size`` bytes and ``rows`` rows are cache misses."""
    return size > NEAR_BYTES and size > NEAR_ROW_BYTES * rows


def _by_distance(strips: float, far: bool) -> tuple[float, float]:
    return (0, strips) if far else (strips, 0)


def _dot(constants: tuple[float, ...], counts: tuple[float, ...]) -> float:
    return sum(a * b for a, b in zip(constants, counts))


_constants = json.loads(resources.files("torchrec_kt.ops").joinpath("cost.json").read_text())["nanoseconds"]
SLICES = Slices(**_constants["slices"])
COLUMNS = Columns(**_constants["columns"])
ROWS = Rows(**_constants["rows"])

# Rows are joined in a scratch buffer of at most this size, which should stay in the last cache.
SCRATCH_BYTES = 4 << 20
# A single row with no more columns than this, read or written, is gathered one column at a time.
SINGLE_ROW_COLUMNS = 512


# Slices are taken unless another way promises at least a tenth less: they are what one would write by
# hand, so that a wrong guess in their favour costs little.
WORTH_IT = 0.9


def cheapest(costs: Mapping[Strategy, float]) -> Strategy:
    """The strategy to use, by what each is expected to cost."""
    best = min(costs, key=costs.__getitem__)
    plain = costs.get("slices", math.inf)
    return best if costs[best] < plain * WORTH_IT else "slices"
