"""Hypothesis strategies: names and widths, groups of them, raw moves."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

from torchrec_kt.ops.plan import ColumnMap, RegroupPlan


class Case(NamedTuple):
    layouts: list[tuple[list[str], list[int]]]
    groups: list[list[str]]

    @property
    def plan(self) -> RegroupPlan:
        return RegroupPlan.build(self.layouts, self.groups)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    max_inputs: int = 3,
    max_keys: int = 4,
    widths: tuple[int, ...] = (0, 1, 2, 3, 4, 8),
    min_groups: int = 0,
    max_groups: int = 4,
    max_group: int = 6,
) -> Case:
    """Layouts with unique keys; groups with repeats, omissions, width-0 keys, empty ones."""
    layouts: list[tuple[list[str], list[int]]] = []
    known: list[str] = []
    for i in range(draw(st.integers(1, max_inputs))):
        count = draw(st.integers(0, max_keys))
        keys = [f"{chr(ord('a') + i)}{n}" for n in range(count)]
        layouts.append((keys, draw(st.lists(st.sampled_from(widths), min_size=count, max_size=count))))
        known += keys
    group = st.lists(st.sampled_from(known), max_size=max_group) if known else st.just([])
    # Adjacent keys in order are the common case and what coalescing is about.
    run = (
        st.tuples(st.integers(0, len(known)), st.integers(0, len(known))).map(
            lambda ends: known[min(ends) : max(ends)]
        )
        if known
        else st.just([])
    )
    groups = draw(st.lists(st.one_of(group, run), min_size=min_groups, max_size=max_groups))
    return Case(layouts, groups)


class RawMap(NamedTuple):
    moves: list[tuple[int, int, int, int, int]]
    in_widths: list[int]
    out_widths: list[int]

    @property
    def column_map(self) -> ColumnMap:
        return ColumnMap(self.moves, self.in_widths, self.out_widths)


@st.composite
def raw_maps(draw: st.DrawFn, *, scale: tuple[int, ...] = (1, 2, 4)) -> RawMap:
    """Valid moves in any order, with gaps and with overlaps (sums) on the output side.

    All numbers are multiples of a granule, which is often more than one.
    """
    granule = draw(st.sampled_from(scale))
    in_widths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    out_widths = draw(st.lists(st.integers(0, 8), min_size=1, max_size=3))
    moves: list[tuple[int, int, int, int, int]] = []
    for _ in range(draw(st.integers(0, 6))):
        i = draw(st.integers(0, len(in_widths) - 1))
        o = draw(st.integers(0, len(out_widths) - 1))
        in_offset = draw(st.integers(0, in_widths[i]))
        out_offset = draw(st.integers(0, out_widths[o]))
        length = draw(st.integers(0, min(in_widths[i] - in_offset, out_widths[o] - out_offset)))
        moves.append((i, o, in_offset * granule, out_offset * granule, length * granule))
    return RawMap(moves, [w * granule for w in in_widths], [w * granule for w in out_widths])


def column_maps() -> st.SearchStrategy[ColumnMap]:
    """Maps of plans, their transposes, and raw ones."""
    plans = cases(min_groups=1).map(lambda case: case.plan.column_map)
    raw = raw_maps().map(lambda m: m.column_map)
    return st.one_of(plans, plans.map(lambda m: m.transpose()), raw, raw.map(lambda m: m.transpose()))
