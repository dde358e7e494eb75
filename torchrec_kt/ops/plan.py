"""Regroup plans: names and widths in, column maps out. Pure Python, no tensors.

A regroup is a linear map on columns. :class:`ColumnMap` describes such a map as coalesced pieces;
:class:`RegroupPlan` builds one from key names and widths and reports every naming error. The
gradient of a map is its :meth:`ColumnMap.transpose`, which is again a :class:`ColumnMap`.
"""

from __future__ import annotations

import difflib
import itertools
import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["ColumnMap", "Layout", "Move", "Piece", "RegroupPlan", "UnknownKeyError"]


def in_graph() -> bool:
    """Whether a compiler follows this code. The operators, which know compilers, replace it."""
    return False


class UnknownKeyError(KeyError):
    """A group names a key that no input holds. A ``KeyError`` whose text is readable."""

    def __str__(self) -> str:
        # KeyError would print the repr of its argument, quotes and all.
        return str(self.args[0]) if self.args else ""


class Layout(NamedTuple):
    """Keys and widths of one input, in column order."""

    keys: tuple[Hashable, ...]
    widths: tuple[int, ...]


class Move(NamedTuple):
    """Copy ``length`` columns. Field order is that of the first five columns of an FBGEMM plan."""

    in_tensor: int
    out_tensor: int
    in_offset: int
    out_offset: int
    length: int


class Piece(NamedTuple):
    """Columns ``[start, start + length)`` of one output and the ``(tensor, offset)`` they come from.

    No source means zeros, several mean their sum, taken in the order given.
    """

    start: int
    length: int
    sources: tuple[tuple[int, int], ...]


class ColumnMap:
    """A linear map on columns: ``out[t][:, c] = sum over the sources of (t, c)``.

    Args:
        moves: column ranges to copy, in the order in which sums are taken. They may overlap on
            the output side (sum) and may leave gaps there (zeros).
        in_widths: number of columns of each input that the map knows of.
        out_widths: number of columns of each output.

    Attributes:
        outputs: for each output its pieces, adjacent, ascending, covering the whole width.
        used_inputs: indices of the inputs that some move names, ascending.
        in_graph: whether the map was built inside of a function that is being compiled.
        recipes: what implementations derive from the map alone, kept here.
        calls: what they derive from the map and the shapes that it met, kept here; see
            :mod:`torchrec_kt.ops.regroup`.
        last_call: the one of these met last, kept here.

    Raises:
        ValueError: a move names a tensor that does not exist or columns outside its width.
    """

    __slots__ = (
        "_transposed",
        "calls",
        "in_graph",
        "in_widths",
        "last_call",
        "moves",
        "out_widths",
        "outputs",
        "recipes",
        "used_inputs",
    )

    def __init__(
        self, moves: Iterable[Sequence[int]], in_widths: Sequence[int], out_widths: Sequence[int]
    ) -> None:
        self.in_graph = in_graph()
        self.in_widths = tuple(in_widths)
        self.out_widths = tuple(out_widths)
        self.moves = _coalesce(_checked_moves(moves, self.in_widths, self.out_widths))
        per_output: list[list[Move]] = [[] for _ in self.out_widths]
        for move in self.moves:
            per_output[move.out_tensor].append(move)
        self.outputs: tuple[tuple[Piece, ...], ...] = tuple(
            _cover(out_moves, width) for out_moves, width in zip(per_output, self.out_widths)
        )
        self.used_inputs = tuple(sorted({move.in_tensor for move in self.moves}))
        self.recipes: dict[Any, Any] = {}
        self.calls: dict[Any, Any] = {}
        self.last_call: Any = None
        self._transposed: dict[Any, ColumnMap] = {}

    @property
    def max_fan_in(self) -> int:
        """Largest number of sources of any column: 1 for a plain copy, 0 for a map of zeros."""
        return max((len(p.sources) for pieces in self.outputs for p in pieces), default=0)

    def transpose(
        self, in_widths: Sequence[int] | None = None, inputs: Sequence[int] | None = None
    ) -> ColumnMap:
        """The map that carries gradients of the outputs back to the inputs.

        Args:
            in_widths: the real widths where inputs are wider than the map knows (padding columns,
                whose gradient is zero).
            inputs: the inputs whose gradients are wanted, which become the outputs of the
                transposed map in this order. All of them by default.
        """
        widths = self.in_widths if in_widths is None else tuple(in_widths)
        wanted = tuple(range(len(widths))) if inputs is None else tuple(inputs)
        found = self._transposed.get((widths, wanted))
        if found is None:
            place = {tensor: n for n, tensor in enumerate(wanted)}
            moves = [
                Move(m.out_tensor, place[m.in_tensor], m.out_offset, m.in_offset, m.length)
                for m in self.moves
                if m.in_tensor in place
            ]
            found = ColumnMap(moves, self.out_widths, [widths[tensor] for tensor in wanted])
            if len(self._transposed) >= 16:  # rarely more than one; keep the memory bounded if so
                self._transposed.clear()
            self._transposed[widths, wanted] = found
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ColumnMap):
            return NotImplemented
        return (self.moves, self.in_widths, self.out_widths) == (
            other.moves,
            other.in_widths,
            other.out_widths,
        )

    def __hash__(self) -> int:
        return hash((self.moves, self.in_widths, self.out_widths))

    def __reduce__(self) -> tuple[Any, ...]:
        return ColumnMap, (self.moves, self.in_widths, self.out_widths)

    def __repr__(self) -> str:
        return f"ColumnMap({len(self.moves)} moves, in_widths={self.in_widths}, out_widths={self.out_widths})"


class RegroupPlan:
    """Where every column of every group comes from. Immutable, hashable, picklable; holds no data.

    Build one with :meth:`build` and hand it to :func:`torchrec_kt.ops.regroup_values`.

    Attributes:
        layouts: keys and widths of each input.
        groups: keys of each output, in column order.
        in_widths: columns of each input, the sum of its widths.
        out_widths: columns of each output.
        column_map: the map itself; its transpose is the gradient.

    Example:
        >>> plan = RegroupPlan.build(
        ...     layouts=[(["a", "b"], [3, 5]), (["c"], [2])], groups=[["c", "a"], ["b", "a"]]
        ... )
        >>> plan.out_widths
        (5, 8)
        >>> plan.column_map.moves[0]
        Move(in_tensor=1, out_tensor=0, in_offset=0, out_offset=0, length=2)
    """

    __slots__ = ("_hash", "column_map", "groups", "in_widths", "layouts", "out_widths")

    layouts: tuple[Layout, ...]
    groups: tuple[tuple[Hashable, ...], ...]
    in_widths: tuple[int, ...]
    out_widths: tuple[int, ...]
    column_map: ColumnMap

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(
            "RegroupPlan is not constructed directly; use RegroupPlan.build(layouts=..., groups=...)"
        )

    @classmethod
    def build(
        cls,
        layouts: Sequence[tuple[Sequence[Hashable], Sequence[int]]],
        groups: Sequence[Sequence[Hashable]],
    ) -> RegroupPlan:
        """Resolve ``groups`` against ``layouts``.

        Args:
            layouts: one ``(keys, widths)`` pair per input; widths are column counts, 0 allowed.
            groups: one sequence of keys per output. A key may be used any number of times, or not
                at all; a group may be empty.

        Raises:
            TypeError: an argument is not of that form, or a width is not an integer.
            ValueError: keys and widths of a layout differ in number, a width is negative, or a
                key that a group uses appears more than once in the layouts.
            UnknownKeyError: (a ``KeyError``) a group names a key that no layout holds.
        """
        checked_layouts = _checked_layouts(layouts)
        checked_groups = _checked_groups(groups)
        try:
            hash((checked_layouts, checked_groups))
        except TypeError as error:
            raise TypeError(f"keys must be hashable, as strings are: {error}") from None
        where, repeated = locate_keys(checked_layouts)

        moves: list[Move] = []
        out_widths: list[int] = []
        for g, group in enumerate(checked_groups):
            out_offset = 0
            for key in group:
                if key in repeated:
                    raise ValueError(_repeated_message(key, g, checked_layouts))
                place = where.get(key)
                if place is None:
                    raise UnknownKeyError(_unknown_message(key, g, where))
                tensor, in_offset, width = place
                moves.append(Move(tensor, g, in_offset, out_offset, width))
                out_offset += width
            out_widths.append(out_offset)

        self = object.__new__(cls)
        in_widths = tuple(sum(layout.widths) for layout in checked_layouts)
        set_field = object.__setattr__
        set_field(self, "layouts", checked_layouts)
        set_field(self, "groups", checked_groups)
        set_field(self, "in_widths", in_widths)
        set_field(self, "out_widths", tuple(out_widths))
        set_field(self, "column_map", ColumnMap(moves, in_widths, out_widths))
        set_field(self, "_hash", hash((checked_layouts, checked_groups)))
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"RegroupPlan is immutable; cannot set {name!r}. Build a new plan instead")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"RegroupPlan is immutable; cannot delete {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RegroupPlan):
            return NotImplemented
        return self._hash == other._hash and self.layouts == other.layouts and self.groups == other.groups

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return RegroupPlan.build, (self.layouts, self.groups)

    def __copy__(self) -> RegroupPlan:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RegroupPlan:
        return self

    def __repr__(self) -> str:
        keys = sum(len(layout.keys) for layout in self.layouts)
        return (
            f"RegroupPlan({len(self.layouts)} inputs with {keys} keys, widths {self.in_widths}, "
            f"to {len(self.groups)} groups, widths {self.out_widths})"
        )


def _checked_layouts(layouts: Sequence[tuple[Sequence[Hashable], Sequence[int]]]) -> tuple[Layout, ...]:
    checked: list[Layout] = []
    for i, layout in enumerate(_as_tuple(layouts, "layouts", "(keys, widths) pairs")):
        pair = _as_tuple(layout, f"layouts[{i}]", "two items, keys and widths")
        if len(pair) != 2:
            raise TypeError(f"layouts[{i}] must be a (keys, widths) pair; it has {len(pair)} items")
        keys = _as_tuple(pair[0], f"the keys of layouts[{i}]", "key names")
        raw_widths = _as_tuple(pair[1], f"the widths of layouts[{i}]", "integers, one per key")
        if len(keys) != len(raw_widths):
            raise ValueError(
                f"layouts[{i}] has {len(keys)} keys but {len(raw_widths)} widths; give one width per key"
            )
        try:
            widths = tuple(map(operator.index, raw_widths))
        except TypeError:
            bad = next((k, w) for k, w in zip(keys, raw_widths) if not hasattr(w, "__index__"))
            raise TypeError(
                f"the width of key {bad[0]!r} in layouts[{i}] is {bad[1]!r} ({type(bad[1]).__name__}); "
                "widths must be integers"
            ) from None
        if widths and min(widths) < 0:
            bad_key, bad_width = next((k, w) for k, w in zip(keys, widths) if w < 0)
            raise ValueError(
                f"the width of key {bad_key!r} in layouts[{i}] is {bad_width}; widths must be 0 or more"
            )
        checked.append(Layout(keys, widths))
    return tuple(checked)


def _checked_groups(groups: Sequence[Sequence[Hashable]]) -> tuple[tuple[Hashable, ...], ...]:
    return tuple(
        _as_tuple(group, f"groups[{g}]", "key names")
        for g, group in enumerate(_as_tuple(groups, "groups", "groups, each a sequence of keys"))
    )


def _as_tuple(value: Any, name: str, expected: str) -> tuple[Any, ...]:
    # A lone string is iterable and is the usual slip: ["a", "b"] where [["a", "b"]] was meant.
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} is the string {value!r}; expected a sequence of {expected}")
    if isinstance(value, (set, frozenset)):
        raise TypeError(f"{name} is a set, which has no order; expected a sequence of {expected}")
    try:
        return tuple(value)
    except TypeError:
        raise TypeError(
            f"{name} is {value!r} ({type(value).__name__}); expected a sequence of {expected}"
        ) from None


def locate_keys(
    layouts: tuple[Layout, ...],
) -> tuple[dict[Hashable, tuple[int, int, int]], set[Hashable]]:
    """``key -> (input, first column, width)``, and the keys that appear more than once."""
    where: dict[Hashable, tuple[int, int, int]] = {}
    repeated: set[Hashable] = set()
    for tensor, (keys, widths) in enumerate(layouts):
        offset = 0
        for key, width in zip(keys, widths):
            if key in where:
                repeated.add(key)
            else:
                where[key] = (tensor, offset, width)
            offset += width
    return where, repeated


def _repeated_message(key: Hashable, group: int, layouts: tuple[Layout, ...]) -> str:
    places = [
        f"input {t} at position {k}"
        for t, layout in enumerate(layouts)
        for k, name in enumerate(layout.keys)
        if name == key
    ]
    return (
        f"key {key!r}, used by groups[{group}], appears more than once: {', '.join(places)}. Which one is "
        "meant is ambiguous; rename one of them, or leave the other out"
    )


def _unknown_message(key: Hashable, group: int, where: dict[Hashable, Any]) -> str:
    names = [name for name in where if isinstance(name, str)]
    near = difflib.get_close_matches(str(key), names, n=3, cutoff=0.6)
    if near:
        hint = "did you mean " + " or ".join(repr(name) for name in near) + "?"
    else:
        shown = ", ".join(repr(name) for name in list(where)[:10])
        more = f", ... ({len(where)} in all)" if len(where) > 10 else ""
        hint = f"known keys: {shown}{more}" if where else "there are no keys at all"
    return f"key {key!r}, named by groups[{group}], is in none of the inputs; {hint}"


def _checked_moves(
    moves: Iterable[Sequence[int]], in_widths: tuple[int, ...], out_widths: tuple[int, ...]
) -> list[Move]:
    n_in, n_out = len(in_widths), len(out_widths)
    checked: list[Move] = []
    for row, fields in enumerate(moves):
        move = fields if isinstance(fields, Move) else Move(*fields)
        in_tensor, out_tensor, in_offset, out_offset, length = move
        if not 0 <= in_tensor < n_in or not 0 <= out_tensor < n_out:
            raise ValueError(
                f"row {row} of the plan moves columns from input {in_tensor} to output {out_tensor}; "
                f"there are {n_in} inputs and {n_out} outputs"
            )
        if length < 0 or in_offset < 0 or in_offset + length > in_widths[in_tensor]:
            raise ValueError(
                f"row {row} of the plan reads {length} columns from column {in_offset} of input {in_tensor}, "
                f"which has {in_widths[in_tensor]} columns"
            )
        if out_offset < 0 or out_offset + length > out_widths[out_tensor]:
            raise ValueError(
                f"row {row} of the plan writes {length} columns to column {out_offset} of output {out_tensor}, "
                f"which has {out_widths[out_tensor]} columns"
            )
        checked.append(move)
    return checked


def _coalesce(moves: list[Move]) -> tuple[Move, ...]:
    """Join moves whose columns are adjacent on both sides; drop those that move nothing."""
    joined: list[Move] = []
    for move in moves:
        if move.length == 0:
            continue
        if joined:
            last = joined[-1]
            if (
                last.in_tensor == move.in_tensor
                and last.out_tensor == move.out_tensor
                and last.in_offset + last.length == move.in_offset
                and last.out_offset + last.length == move.out_offset
            ):
                joined[-1] = last._replace(length=last.length + move.length)
                continue
        joined.append(move)
    return tuple(joined)


def _cover(moves: list[Move], width: int) -> tuple[Piece, ...]:
    """Cut ``[0, width)`` where the set of sources changes."""
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for index, move in enumerate(moves):
        starts.setdefault(move.out_offset, []).append(index)
        ends.setdefault(move.out_offset + move.length, []).append(index)
    cuts = sorted({0, width} | starts.keys() | ends.keys())
    pieces: list[Piece] = []
    active: set[int] = set()
    for start, end in itertools.pairwise(cuts):
        active.difference_update(ends.get(start, ()))
        active.update(starts.get(start, ()))
        sources = tuple(
            (moves[i].in_tensor, moves[i].in_offset + start - moves[i].out_offset) for i in sorted(active)
        )
        if pieces and _continues(pieces[-1], sources):
            pieces[-1] = pieces[-1]._replace(length=end - pieces[-1].start)
        else:
            pieces.append(Piece(start, end - start, sources))
    return tuple(pieces)


def _continues(piece: Piece, sources: tuple[tuple[int, int], ...]) -> bool:
    return len(piece.sources) == len(sources) and all(
        tensor == next_tensor and offset + piece.length == next_offset
        for (tensor, offset), (next_tensor, next_offset) in zip(piece.sources, sources)
    )
