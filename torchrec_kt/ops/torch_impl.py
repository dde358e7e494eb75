"""The column map in pure torch: the CPU path, and the fallback on every other device.

:func:`compile_map` turns a map and the shapes it will meet into a *program*, a function from input
tensors to output tensors. All checks, choices and index tensors happen there, once per shape; the
steady state is a handful of torch calls. There are three ways to move the columns, and
:mod:`torchrec_kt.ops.cost` picks one:

``slices``
    split every input once at all borders, ``torch.cat`` the parts of each output. No index, any
    layout, casts on the way; costs about a microsecond per part.
``columns``
    for each stretch of an output, one ``index_select`` of granules (the widest common column block)
    straight into the output; where a stretch comes from several inputs, as in gradients, from a copy
    that joins their columns. Cheap per part; a call or two per stretch.
``rows``
    for a block of rows at a time, join all inputs in a cache-sized scratch buffer and
    ``index_select`` its granules row by row. Indifferent to how inputs alternate, as they do in
    gradients.

All three write the first source of every column, zeros where there is none; further sources are
added afterwards, in order.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import cost
from ._memory import HUGE_PAGE_BYTES, empty
from .plan import ColumnMap, Piece

__all__ = ["Program", "Strategy", "TensorMeta", "accumulate_dtype", "compile_map", "strategy_counts"]

Tensors = list[Tensor] | tuple[Tensor, ...]
Program = Callable[[Tensors], list[Tensor]]
Strategy = cost.Strategy

# ATen shares a loop among threads only beyond this many elements, each thread taking at least as many.
_GRAIN = 1 << 15
# More ranges of columns than this are not joined for one stretch.
_MAX_RANGES = 64
# Sums of repeated columns are taken over at most this many elements at a time where they need a
# buffer in a wider type, so that the buffer stays in cache.
_SUM_BLOCK_ELEMENTS = 1 << 16


class TensorMeta(NamedTuple):
    """What a program depends on, of one input."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Geometry(NamedTuple):
    """Everything the strategies share: one map applied to inputs of one set of shapes."""

    column_map: ColumnMap
    inputs: Sequence[TensorMeta]
    dtype: torch.dtype
    device: torch.device
    key_dim: int
    out_shapes: tuple[tuple[int, ...], ...]
    rows: int  # product of the dimensions before key_dim
    inner: int  # product of the dimensions after key_dim

    @property
    def size(self) -> int:
        """Bytes of all outputs."""
        return _out_bytes(self, sum(self.column_map.out_widths))

    @property
    def far(self) -> bool:
        return cost.is_far(self.rows, self.size)

    @property
    def used(self) -> list[TensorMeta]:
        return [self.inputs[i] for i in self.column_map.used_inputs]

    @property
    def casts(self) -> bool:
        return any(meta.dtype != self.dtype for meta in self.used)

    @property
    def zero_dtype(self) -> torch.dtype:
        """Of zeros that are concatenated with parts of the inputs."""
        return self.used[0].dtype if self.used else self.dtype

    @property
    def cat_can_cast(self) -> bool:
        """Whether ``torch.cat`` joins the inputs into an output of this type."""
        try:
            functools.reduce(torch.promote_types, {meta.dtype for meta in self.used}, self.zero_dtype)
        except RuntimeError:
            return False  # it promotes first, even where the type is given
        return all(torch.can_cast(meta.dtype, self.dtype) for meta in self.used)


def compile_map(
    column_map: ColumnMap,
    inputs: Sequence[TensorMeta],
    dtype: torch.dtype,
    key_dim: int,
    strategy: Strategy | Literal["composite"] | None = None,
) -> Program:
    """Prepare the application of ``column_map`` to inputs of the given shapes.

    Args:
        column_map: the map.
        inputs: one entry per input. Those that the map uses must agree in rank, device and every
            dimension but ``key_dim``, and be at least as wide as the map says; the caller checks.
        dtype: of the outputs.
        key_dim: the dimension that holds the columns, not negative.
        strategy: force one; by default the cheapest by :mod:`torchrec_kt.ops.cost`. "composite" uses
            out-of-place operators only, which tensors of the old ``vmap`` (``is_grads_batched``) need.

    Returns:
        A function from the input tensors to new, contiguous, independent output tensors. It records
        no autograd history of its own and must be called with autograd off or on inputs that do
        not require a gradient.
    """
    geometry = _geometry(column_map, inputs, dtype, key_dim)
    if geometry.device.type == "meta" or geometry.rows * geometry.inner == 0:
        return _shapes_only(geometry)
    if strategy == "composite":
        return _composite(geometry)
    copy = _BUILDERS[strategy or _choose(geometry)](geometry)
    return _summing(geometry, copy) if column_map.max_fan_in > 1 else copy


def _geometry(
    column_map: ColumnMap, inputs: Sequence[TensorMeta], dtype: torch.dtype, key_dim: int
) -> _Geometry:
    reference = inputs[column_map.used_inputs[0] if column_map.used_inputs else 0]
    before, after = reference.shape[:key_dim], reference.shape[key_dim + 1 :]
    return _Geometry(
        column_map=column_map,
        inputs=inputs,
        dtype=dtype,
        device=reference.device,
        key_dim=key_dim,
        out_shapes=tuple((*before, width, *after) for width in column_map.out_widths),
        rows=math.prod(before),
        inner=math.prod(after),
    )


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which columns of ``dtype`` are summed: float32 for anything narrower."""
    if dtype.is_complex:
        return torch.complex64 if dtype.itemsize < 8 else dtype
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _choose(geometry: _Geometry) -> Strategy:
    if geometry.device.type != "cpu":
        # The cost rule knows CPUs only; slices need nothing on the device but the data.
        return "slices"
    if _is_short_row(geometry) and _count_rows(geometry) is not None:
        return "rows"  # two torch calls and one per output; nothing is cheaper
    return cost.cheapest({name: costs for name in _BUILDERS if (costs := _cost(geometry, name)) is not None})


def strategy_counts(
    column_map: ColumnMap, inputs: Sequence[TensorMeta], dtype: torch.dtype, key_dim: int, strategy: Strategy
) -> tuple[float, ...] | None:
    """What the cost rule counts for a strategy; None where it cannot serve."""
    geometry = _geometry(column_map, inputs, dtype, key_dim)
    counted = _COUNTERS[strategy](geometry)
    return None if counted is None else _MODELS[strategy].counts(**counted)


def _cost(geometry: _Geometry, strategy: Strategy) -> float | None:
    counted = _COUNTERS[strategy](geometry)
    return None if counted is None else _MODELS[strategy].cost(**counted)


def _shapes_only(geometry: _Geometry) -> Program:
    shapes, dtype, device = geometry.out_shapes, geometry.dtype, geometry.device

    def program(values: Tensors) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]

    return program


def _recipe(column_map: ColumnMap, key: Any, build: Callable[[], Any]) -> Any:
    """Derived data kept beside the map. Built aside, published in one assignment: thread-safe."""
    found = column_map.recipes.get(key)
    if found is None:
        found = build()
        column_map.recipes[key] = found
    return found


def _index(values: list[int]) -> Tensor:
    # Never an inference tensor and never on a device from a surrounding context: it outlives the call.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int32, device="cpu")


def _out_bytes(geometry: _Geometry, width: int) -> int:
    return geometry.rows * geometry.inner * width * geometry.dtype.itemsize


def _strips(geometry: _Geometry, length: int) -> float:
    """Strips of so many columns, one for each row, in units of those that hold several elements."""
    return geometry.rows * (cost.LONE_STRIP if length * geometry.inner == 1 else 1)


def _threads(elements: int, grain: int = _GRAIN) -> int:
    """How many threads share a loop over so many elements."""
    return max(1, min(torch.get_num_threads(), -(-elements // grain)))


# --- slices ---------------------------------------------------------------------------------------


class _SliceRecipe(NamedTuple):
    splits: tuple[tuple[int, tuple[int, ...]], ...]  # input, sizes of its parts
    gaps: tuple[int, ...]  # lengths of zero parts; they follow the parts of the inputs
    picks: tuple[tuple[int, ...], ...]  # per output, indices of its parts
    lengths: tuple[tuple[int, int], ...]  # different lengths of the parts picked, and how many have it


def _slice_recipe(column_map: ColumnMap) -> _SliceRecipe:
    def build() -> _SliceRecipe:
        borders: dict[int, set[int]] = {i: {0, column_map.in_widths[i]} for i in column_map.used_inputs}
        first_sources = [[(p, p.sources[0]) for p in ps if p.sources] for ps in column_map.outputs]
        for pairs in first_sources:
            for piece, (tensor, offset) in pairs:
                borders[tensor].update((offset, offset + piece.length))
        splits: list[tuple[int, tuple[int, ...]]] = []
        part_at: dict[tuple[int, int], int] = {}
        count = 0
        for tensor, cuts in borders.items():
            edges = sorted(cuts)
            splits.append((tensor, tuple(b - a for a, b in itertools.pairwise(edges))))
            for n, edge in enumerate(edges):
                part_at[tensor, edge] = count + n
            count += len(edges) - 1
        gaps = sorted({p.length for ps in column_map.outputs for p in ps if not p.sources})
        gap_part = {length: count + n for n, length in enumerate(gaps)}
        picks: list[tuple[int, ...]] = []
        for pieces in column_map.outputs:
            pick: list[int] = []
            for piece in pieces:
                if piece.sources:
                    tensor, offset = piece.sources[0]
                    pick.extend(range(part_at[tensor, offset], part_at[tensor, offset + piece.length]))
                else:
                    pick.append(gap_part[piece.length])
            picks.append(tuple(pick))
        lengths = [length for _, sizes in splits for length in sizes] + gaps
        counted = Counter(lengths[part] for pick in picks for part in pick)
        return _SliceRecipe(tuple(splits), tuple(gaps), tuple(picks), tuple(counted.items()))

    return _recipe(column_map, "slices", build)


def _count_slices(geometry: _Geometry) -> dict[str, Any]:
    recipe = _slice_recipe(geometry.column_map)
    copies = sum(map(len, recipe.picks))
    views = sum(len(sizes) for _, sizes in recipe.splits)
    shares = [
        (length, count / _threads(geometry.rows * geometry.inner * length))
        for length, count in recipe.lengths
    ]
    return {
        "calls": len(recipe.splits) + len(recipe.picks),
        "parts": views + copies,
        "strips": sum(share * _strips(geometry, length) for length, share in shares),
        "far": geometry.far,
        "size": sum(_out_bytes(geometry, length) * share for length, share in shares),
    }


def _slices(geometry: _Geometry) -> Program:
    recipe = _slice_recipe(geometry.column_map)
    dim, dtype, device = geometry.key_dim, geometry.dtype, geometry.device
    # Padding columns, where an input has them, are cut off before it is split.
    splits = [
        (i, sizes, None if geometry.inputs[i].shape[dim] == geometry.column_map.in_widths[i] else sum(sizes))
        for i, sizes in recipe.splits
    ]
    gap_shapes: list[tuple[int, ...]] = []
    for length in recipe.gaps:
        shape = list(geometry.out_shapes[0])
        shape[dim] = length
        gap_shapes.append(tuple(shape))

    # cat chooses the output's memory format by its inputs' from rank 4 on; ours is contiguous.
    into_given = geometry.casts or len(geometry.out_shapes[0] if geometry.out_shapes else ()) > 3
    by_cat, zero_dtype = geometry.cat_can_cast, geometry.zero_dtype
    writers = [
        (_cat_new(dim) if not into_given and _out_bytes(geometry, shape[dim]) < HUGE_PAGE_BYTES
         else _cat_into(shape, dtype, device, dim) if by_cat
         else _copy_into(shape, dtype, device, dim)) if pick else _nothing(shape, dtype, device)
        for shape, pick in zip(geometry.out_shapes, recipe.picks)
    ]  # fmt: skip
    getters = [_getter(pick) for pick in recipe.picks]

    def program(values: Tensors) -> list[Tensor]:
        parts: list[Tensor] = []
        for tensor, sizes, width in splits:
            value = values[tensor] if width is None else values[tensor].narrow(dim, 0, width)
            parts += value.split_with_sizes(sizes, dim)
        if gap_shapes:
            zero = torch.zeros((), dtype=zero_dtype, device=device)
            parts += [zero.expand(shape) for shape in gap_shapes]
        return [write(get(parts)) for write, get in zip(writers, getters)]

    return program


def _getter(pick: tuple[int, ...]) -> Callable[[list[Tensor]], Any]:
    if len(pick) > 1:
        return itemgetter(*pick)
    return lambda parts: tuple(parts[i] for i in pick)


def _cat_new(dim: int) -> Callable[[Any], Tensor]:
    cat = torch.cat
    return lambda parts: cat(parts, dim)


def _cat_into(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, dim: int
) -> Callable[[Any], Tensor]:
    return lambda parts: torch.cat(parts, dim, out=empty(shape, dtype, device))


def _copy_into(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, dim: int
) -> Callable[[Any], Tensor]:
    """For casts that ``cat`` refuses and ``Tensor.to`` allows, such as float to integer."""

    def write(parts: Any) -> Tensor:
        out = empty(shape, dtype, device)
        for target, part in zip(out.split_with_sizes([p.shape[dim] for p in parts], dim), parts):
            target.copy_(part)
        return out

    return write


def _nothing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[Any], Tensor]:
    return lambda parts: torch.empty(shape, dtype=dtype, device=device)


# --- columns --------------------------------------------------------------------------------------


class _Stretch(NamedTuple):
    """Columns ``[start, start + length)`` of one output.

    ``ranges`` of input columns, ``(tensor, first, length)``, hold its granules, whose ``numbers`` count
    through the ranges joined. No numbers: the only range as it is, or zeros where there is none.
    """

    start: int
    length: int
    granule: int
    ranges: tuple[tuple[int, int, int], ...]
    numbers: Tensor | None


class _ColumnCosts(NamedTuple):
    """What :func:`_stretches` weighs against each other."""

    granule: float
    column: float  # of joining one
    block_columns: float  # as many are joined at a time


def _column_recipe(geometry: _Geometry) -> tuple[tuple[_Stretch, ...], ...]:
    # How finely to cut depends on the number of rows, only roughly: one recipe per power of two.
    rows = 1 << max(0, geometry.rows - 1).bit_length()
    threads = _threads(rows * geometry.inner * max(geometry.column_map.out_widths, default=0))
    column_bytes = rows * geometry.inner * geometry.dtype.itemsize
    costs = _ColumnCosts(
        cost.COLUMNS.granule_cost(rows, geometry.far) / threads,
        cost.COLUMNS.joined_byte * column_bytes / threads,
        cost.SCRATCH_BYTES / column_bytes,
    )

    def build() -> tuple[tuple[_Stretch, ...], ...]:
        return tuple(tuple(_stretches(pieces, costs)) for pieces in geometry.column_map.outputs)

    return _recipe(geometry.column_map, ("columns", costs), build)


class _Open(NamedTuple):
    """A stretch that may go on: the piece it starts at, and its ranges as ``{class: [first, end]}``.

    Granules of one class lie whole granules apart in one input.
    """

    first: int
    ranges: dict[tuple[int, int], list[int]]


def _stretches(pieces: tuple[Piece, ...], costs: _ColumnCosts) -> list[_Stretch]:
    """Join neighbouring pieces in one stretch where that beats a stretch for each.

    Shortest path over the piece borders. Pieces of one range are selected from it, if need be with a
    finer granule; pieces of several are selected from a copy of all. Of the stretches that end at a
    border with the same granule, and both from one range or both from several, only one is kept.
    """
    best: list[float] = [0.0]
    came_from: list[tuple[int, int]] = [(0, 0)]  # (first piece of the last stretch, its granule)
    single: dict[int, int] = {}  # granule -> first piece
    joined: dict[int, _Open] = {}  # granule -> the stretch

    def before(first: int, granule: int) -> float:
        """What tells two stretches apart that have the same granule from here on."""
        return best[first] - pieces[first].start / granule * costs.granule

    for n, piece in enumerate(pieces):
        end = piece.start + piece.length
        continues = n > 0 and bool(piece.sources and pieces[n - 1].sources)
        tensor, offset = piece.sources[0] if piece.sources else (-1, 0)
        grown: dict[int, int] = {}
        if continues and tensor == pieces[n - 1].sources[0][0]:
            for granule, first in single.items():
                finer = math.gcd(granule, piece.length, offset - pieces[first].sources[0][1])
                if finer not in grown or before(first, finer) < before(grown[finer], finer):
                    grown[finer] = first
        grown.setdefault(piece.length, n)
        single = grown

        grown_joined: dict[int, _Open] = {}
        if continues:
            for granule, (first, ranges) in joined.items():
                finer = math.gcd(granule, piece.length)
                if finer not in grown_joined or before(first, finer) < before(
                    grown_joined[finer].first, finer
                ):
                    if finer < granule:
                        ranges = _ranges(pieces[first:n], finer)
                    _widen(ranges, piece, finer)
                    if len(ranges) <= _MAX_RANGES:
                        grown_joined[finer] = _Open(first, ranges)
        if piece.sources and piece.length not in grown_joined:
            grown_joined[piece.length] = _Open(n, _ranges((piece,), piece.length))
        joined = grown_joined

        choices = [
            (
                best[first] + cost.COLUMNS.call + (end - pieces[first].start) / granule * costs.granule,
                first,
                granule,
            )
            for granule, first in single.items()
        ]
        for granule, (first, ranges) in joined.items():
            if len(ranges) > 1:
                columns = sum(last - start for start, last in ranges.values())
                blocks = math.ceil(columns / costs.block_columns)
                total = before(first, granule) + end / granule * costs.granule + columns * costs.column
                total += blocks * (2 * cost.COLUMNS.call + len(ranges) * cost.COLUMNS.range)
                choices.append((total, first, granule))
        total, first, granule = min(choices)
        best.append(total)
        came_from.append((first, granule))

    found: list[_Stretch] = []
    n = len(pieces)
    while n:
        first, granule = came_from[n]
        found.append(_stretch(pieces[first:n], granule))
        n = first
    return found[::-1]


def _ranges(pieces: Sequence[Piece], granule: int) -> dict[tuple[int, int], list[int]]:
    ranges: dict[tuple[int, int], list[int]] = {}
    for piece in pieces:
        _widen(ranges, piece, granule)
    return ranges


def _widen(ranges: dict[tuple[int, int], list[int]], piece: Piece, granule: int) -> None:
    tensor, offset = piece.sources[0]
    found = ranges.setdefault((tensor, offset % granule), [offset, offset])
    found[0] = min(found[0], offset)
    found[1] = max(found[1], offset + piece.length)


def _stretch(pieces: tuple[Piece, ...], granule: int) -> _Stretch:
    start, length = pieces[0].start, sum(p.length for p in pieces)
    if not pieces[0].sources:
        return _Stretch(start, length, granule, (), None)
    ranges = _ranges(pieces, granule)
    found = tuple((tensor, first, end - first) for (tensor, _), (first, end) in ranges.items())
    if length == granule:
        return _Stretch(start, length, granule, found, None)
    # Where each range starts among those joined, minus where it starts in its input.
    shift: dict[tuple[int, int], int] = {}
    joined = 0
    for key, (first, end) in ranges.items():
        shift[key] = joined - first
        joined += end - first
    index: list[int] = []
    for piece in pieces:
        tensor, offset = piece.sources[0]
        at = (offset + shift[tensor, offset % granule]) // granule
        index.extend(range(at, at + piece.length // granule))
    return _Stretch(start, length, granule, found, _index(index))


def _column_step(geometry: _Geometry, stretch: _Stretch) -> int:
    """How many rows of the first dimension to take at a time; 0 for all."""
    if geometry.key_dim == 0 or stretch.numbers is None:
        return 0
    outer = geometry.out_shapes[0][0]
    if len(stretch.ranges) > 1:
        joined = _out_bytes(geometry, sum(length for _, _, length in stretch.ranges))
        return 0 if joined <= cost.SCRATCH_BYTES else max(1, outer * cost.SCRATCH_BYTES // joined)
    # Of granules below the grain, threads take one each; above it they share each; at it, neither.
    alone = geometry.rows * geometry.inner * stretch.granule == _GRAIN and torch.get_num_threads() > 1
    many = stretch.length // stretch.granule >= 16  # else not worth a second call
    return -(-outer // 2) if alone and many and outer > 1 else 0


def _count_columns(geometry: _Geometry) -> dict[str, Any] | None:
    if geometry.casts:
        return None
    calls = ranges = 0
    granules = strips = size = joined = 0.0
    for stretches in _column_recipe(geometry):
        for stretch in stretches:
            count = stretch.length // stretch.granule
            step = _column_step(geometry, stretch)
            blocks = -(-geometry.out_shapes[0][0] // step) if step else 1
            elements = geometry.rows * geometry.inner * stretch.granule // blocks
            if stretch.numbers is not None and elements < _GRAIN:
                threads = _threads(count, max(1, _GRAIN // max(1, elements)))
            else:
                threads = _threads(elements)
            calls += blocks
            granules += count * blocks / threads if geometry.rows > 1 else 0  # a lone row is copied at once
            size += _out_bytes(geometry, stretch.length) / threads
            if len(stretch.ranges) > 1:
                calls += blocks
                ranges += len(stretch.ranges) * blocks
                joined += sum(
                    _out_bytes(geometry, length) / _threads(geometry.rows * geometry.inner * length // blocks)
                    for _, _, length in stretch.ranges
                )
            strips += count * _strips(geometry, stretch.granule) / threads
    return {
        "outputs": len(geometry.out_shapes),
        "calls": calls,
        "granules": granules,
        "strips": strips,
        "far": geometry.far,
        "size": size,
        "ranges": ranges,
        "joined": joined,
    }


def _columns(geometry: _Geometry) -> Program:
    dim, dtype, device = geometry.key_dim, geometry.dtype, geometry.device
    # Each stretch with its shape in granules, of any number of them, and how many rows to take at a time.
    outputs = [
        (
            shape,
            [
                (
                    stretch,
                    (*shape[:dim], -1, stretch.granule, *shape[dim + 1 :]),
                    _column_step(geometry, stretch),
                )
                for stretch in stretches
            ],
        )
        for shape, stretches in zip(geometry.out_shapes, _column_recipe(geometry))
    ]

    def program(values: Tensors) -> list[Tensor]:
        outs: list[Tensor] = []
        for shape, stretches in outputs:
            out = empty(shape, dtype, device)
            for (start, length, _, ranges, numbers), granules, step in stretches:
                target = out.narrow(dim, start, length)
                sources = [values[tensor].narrow(dim, first, count) for tensor, first, count in ranges]
                if not sources:
                    target.zero_()
                elif numbers is None:
                    target.copy_(sources[0])
                elif step:
                    for row in range(0, shape[0], step):
                        count = min(step, shape[0] - row)
                        blocks = [source.narrow(0, row, count) for source in sources]
                        _select(blocks, dim, numbers, target.narrow(0, row, count), (count, *granules[1:]))
                else:
                    _select(sources, dim, numbers, target, granules)
            outs.append(out)
        return outs

    return program


def _select(
    sources: list[Tensor], dim: int, numbers: Tensor, target: Tensor, granules: tuple[int, ...]
) -> None:
    source = sources[0] if len(sources) == 1 else torch.cat(sources, dim)
    torch.index_select(source.view(granules), dim, numbers, out=target.view(granules))


# --- rows -----------------------------------------------------------------------------------------


class _RowRecipe(NamedTuple):
    """Where granules lie in a row that joins all used inputs, with a granule of zeros at the end."""

    granule: int
    width: int  # columns of a joined row
    zeros: bool
    columns: tuple[tuple[int, ...], ...]  # per output, granule numbers within a joined row


def _row_granule(column_map: ColumnMap) -> int:
    return math.gcd(
        *(column_map.in_widths[i] for i in column_map.used_inputs),
        *(p.length for pieces in column_map.outputs for p in pieces),
        *(p.sources[0][1] for pieces in column_map.outputs for p in pieces if p.sources),
    )


def _row_recipe(column_map: ColumnMap) -> _RowRecipe:
    def build() -> _RowRecipe:
        granule = _recipe(column_map, "row granule", lambda: _row_granule(column_map))
        first: dict[int, int] = {}
        width = 0
        for tensor in column_map.used_inputs:
            first[tensor] = width
            width += column_map.in_widths[tensor]
        zeros = any(not p.sources for ps in column_map.outputs for p in ps)
        zero_granule = width // granule
        columns: list[tuple[int, ...]] = []
        for pieces in column_map.outputs:
            numbers: list[int] = []
            for piece in pieces:
                count = piece.length // granule
                if piece.sources:
                    tensor, offset = piece.sources[0]
                    at = (first[tensor] + offset) // granule
                    numbers.extend(range(at, at + count))
                else:
                    numbers.extend([zero_granule] * count)
            columns.append(tuple(numbers))
        return _RowRecipe(granule, width + granule * zeros, zeros, tuple(columns))

    return _recipe(column_map, "rows", build)


def _count_rows(geometry: _Geometry) -> dict[str, Any] | None:
    used, column_map = geometry.used, geometry.column_map
    if not used or geometry.key_dim != 1 or len(used[0].shape) != 2 or not geometry.cat_can_cast:
        return None
    granule = _recipe(column_map, "row granule", lambda: _row_granule(column_map))
    width = sum(column_map.in_widths[i] for i in column_map.used_inputs)
    threads = _threads(_block_rows(geometry, width) * width)
    return {
        "blocks": -(-geometry.rows // _block_rows(geometry, width)),
        "outputs": len(column_map.outputs),
        "inputs": len(used),
        "granules": geometry.rows * sum(column_map.out_widths) / granule / threads,
        # Unlike the others this reads every column of the inputs in use.
        "size": (geometry.size + _out_bytes(geometry, width)) / 2 / threads,
    }


def _block_rows(geometry: _Geometry, width: int) -> int:
    return max(1, min(geometry.rows, cost.SCRATCH_BYTES // max(1, width * geometry.dtype.itemsize)))


def _index_rows(geometry: _Geometry, recipe: _RowRecipe, rows: int) -> int:
    """For how many rows to make an index that serves ``rows``: few different numbers."""
    most = max(1, cost.SCRATCH_BYTES // max(1, recipe.width * geometry.dtype.itemsize))
    return min(1 << (rows - 1).bit_length(), max(most, rows))


def _rows(geometry: _Geometry) -> Program:
    recipe = _row_recipe(geometry.column_map)
    small = max((_out_bytes(geometry, w) for w in geometry.column_map.out_widths), default=0)
    if geometry.casts or small >= HUGE_PAGE_BYTES or _block_rows(geometry, recipe.width) < geometry.rows:
        return _rows_in_blocks(geometry, recipe)
    return _rows_at_once(geometry, recipe)


def _joinable(geometry: _Geometry, recipe: _RowRecipe) -> Callable[[Tensors], list[Tensor]] | None:
    """Picks the used inputs, without padding columns, and appends the granule of zeros.

    None where the inputs can be joined as they are.
    """
    used = geometry.column_map.used_inputs
    known = [geometry.column_map.in_widths[i] for i in used]
    padded = [(i, w) if geometry.inputs[i].shape[1] != w else (i, None) for i, w in zip(used, known)]
    if not recipe.zeros and not any(w is not None for _, w in padded):
        everything = tuple(range(len(geometry.inputs)))
        return None if used == everything else lambda values: [values[i] for i in used]
    dtype, device, zeros = geometry.zero_dtype, geometry.device, (geometry.rows, recipe.granule)

    def pick(values: Tensors) -> list[Tensor]:
        inputs = [values[i] if w is None else values[i].narrow(1, 0, w) for i, w in padded]
        if recipe.zeros:
            inputs.append(torch.zeros((), dtype=dtype, device=device).expand(zeros))
        return inputs

    return pick


def _row_indices(column_map: ColumnMap, recipe: _RowRecipe, rows: int, granule: int) -> tuple[Tensor, ...]:
    """Per output, granule numbers in ``rows`` joined rows. A prefix of it serves fewer rows."""
    finer = recipe.granule // granule

    def build() -> tuple[Tensor, ...]:
        with torch.inference_mode(False):
            per_row = [_index(list(columns)) for columns in recipe.columns]
            if finer > 1:
                steps = torch.arange(finer, dtype=torch.int32, device="cpu")
                per_row = [(index[:, None] * finer + steps).reshape(-1) for index in per_row]
            first = torch.arange(rows, dtype=torch.int32, device="cpu") * (recipe.width // granule)
            return tuple((first[:, None] + index).reshape(-1) for index in per_row)

    return _recipe(column_map, ("row index", rows, granule), build)


def _is_short_row(geometry: _Geometry) -> bool:
    column_map = geometry.column_map
    read = sum(column_map.in_widths[i] for i in column_map.used_inputs)
    return geometry.rows == 1 and max(read, sum(column_map.out_widths)) <= cost.SINGLE_ROW_COLUMNS


def _rows_at_once(geometry: _Geometry, recipe: _RowRecipe) -> Program:
    column_map, total = geometry.column_map, geometry.rows
    dtype, device = geometry.dtype, geometry.device
    pick = _joinable(geometry, recipe)
    cat, index_select = torch.cat, torch.index_select
    if _is_short_row(geometry):
        # So few that viewing them as granules would cost more than it saves.
        indices = _row_indices(column_map, recipe, 1, 1)

        def single_row(values: Tensors) -> list[Tensor]:
            joined = cat(values if pick is None else pick(values), 1)
            return [index_select(joined, 1, index) for index in indices]

        return single_row

    granule = recipe.granule
    whole = _row_indices(column_map, recipe, _index_rows(geometry, recipe, total), granule)
    indices = tuple(index.narrow(0, 0, total * len(columns)) for index, columns in zip(whole, recipe.columns))
    outputs = tuple(zip(geometry.out_shapes, indices))

    def program(values: Tensors) -> list[Tensor]:
        source = cat(values if pick is None else pick(values), 1).view(-1, granule)
        outs: list[Tensor] = []
        for shape, index in outputs:
            out = torch.empty(shape, dtype=dtype, device=device)
            index_select(source, 0, index, out=out.view(-1, granule))
            outs.append(out)
        return outs

    return program


def _rows_in_blocks(geometry: _Geometry, recipe: _RowRecipe) -> Program:
    dtype, device, shapes = geometry.dtype, geometry.device, geometry.out_shapes
    granule, width, total = recipe.granule, recipe.width, geometry.rows
    block = _block_rows(geometry, width)
    indices = _row_indices(geometry.column_map, recipe, _index_rows(geometry, recipe, block), granule)
    per_row = [len(columns) for columns in recipe.columns]
    pick = _joinable(geometry, recipe)

    def program(values: Tensors) -> list[Tensor]:
        inputs = values if pick is None else pick(values)
        first = inputs[0]
        in_one = len(inputs) == 1 and first.is_contiguous() and first.dtype == dtype
        scratch = first if in_one else torch.empty((block, width), dtype=dtype, device=device)
        outs = [empty(shape, dtype, device) for shape in shapes]
        for row in range(0, total, block):
            count = min(block, total - row)
            if in_one:
                joined = first.narrow(0, row, count)
            else:
                joined = scratch.narrow(0, 0, count)
                torch.cat([v.narrow(0, row, count) for v in inputs], 1, out=joined)
            source = joined.view(-1, granule)
            for out, index, granules in zip(outs, indices, per_row):
                if granules:
                    target = out.narrow(0, row, count).view(-1, granule)
                    torch.index_select(source, 0, index.narrow(0, 0, count * granules), out=target)
        return outs

    return program


# --- composite ------------------------------------------------------------------------------------


def _composite(geometry: _Geometry) -> Program:
    dim, dtype, wide = geometry.key_dim, geometry.dtype, _sum_dtype(geometry)
    shapes, outputs = geometry.out_shapes, geometry.column_map.outputs

    def part(values: Tensors, piece: Piece, shape: tuple[int, ...]) -> Tensor:
        first, *rest = [values[i].narrow(dim, offset, piece.length) for i, offset in piece.sources] or [
            torch.zeros((), dtype=dtype, device=geometry.device).expand(
                *shape[:dim], piece.length, *shape[dim + 1 :]
            )
        ]
        if rest:
            first = first.to(wide)
            for source in rest:
                first = first + source.to(wide)
        return first.to(dtype)

    def program(values: Tensors) -> list[Tensor]:
        return [
            torch.cat([part(values, piece, shape) for piece in pieces], dim).contiguous()
            if pieces
            else torch.zeros(shape, dtype=dtype, device=geometry.device)
            for shape, pieces in zip(shapes, outputs)
        ]

    return program


# --- sums -----------------------------------------------------------------------------------------


def _sum_dtype(geometry: _Geometry) -> torch.dtype:
    wide = accumulate_dtype(geometry.dtype)
    for meta in geometry.used:
        other = accumulate_dtype(meta.dtype)
        wide = wide if other == wide else torch.promote_types(wide, other)
    return wide


def _summing(geometry: _Geometry, copy: Program) -> Program:
    """Write the sums of repeated columns over what ``copy`` wrote there, their first source.

    One addition after the other, so that the order is the one stated whatever the shape, the strides
    and the number of threads; ``torch.sum`` would choose its own.
    """
    dim, dtype, wide = geometry.key_dim, geometry.dtype, _sum_dtype(geometry)
    repeated = [[p for p in pieces if len(p.sources) > 1] for pieces in geometry.column_map.outputs]

    def program(values: Tensors) -> list[Tensor]:
        outs = copy(values)
        for out, pieces in zip(outs, repeated):
            for piece in pieces:
                target = out.narrow(dim, piece.start, piece.length)
                sources = [values[i].narrow(dim, offset, piece.length) for i, offset in piece.sources]
                if wide == dtype:
                    for source in sources[1:]:
                        target.add_(_addable(source, dtype))
                else:
                    _sum_rounding_once(target, sources, dim, wide)
        return outs

    return program


def _addable(source: Tensor, dtype: torch.dtype) -> Tensor:
    # torch converts while it adds, except from the 8-bit types, which it refuses to promote.
    return source.to(dtype) if source.dtype != dtype and source.dtype.itemsize == 1 else source


def _sum_rounding_once(target: Tensor, sources: Sequence[Tensor], dim: int, wide: torch.dtype) -> None:
    # In blocks of rows, so that the sum in the wider type stays in cache.
    rows = step = target.shape[0]
    if dim > 0 and target.numel() > _SUM_BLOCK_ELEMENTS:
        step = max(1, _SUM_BLOCK_ELEMENTS * rows // target.numel())
    for row in range(0, rows, step):
        count = min(step, rows - row)
        first, *rest = [source.narrow(0, row, count) for source in sources]
        total = first.to(wide, copy=True)
        for source in rest:
            total.add_(_addable(source, wide))
        target.narrow(0, row, count).copy_(total)


_BUILDERS: dict[Strategy, Callable[[_Geometry], Program]] = {
    "slices": _slices,
    "columns": _columns,
    "rows": _rows,
}
_COUNTERS: dict[Strategy, Callable[[_Geometry], dict[str, Any] | None]] = {
    "slices": _count_slices,
    "columns": _count_columns,
    "rows": _count_rows,
}
_MODELS: dict[Strategy, Any] = {"slices": cost.SLICES, "columns": cost.COLUMNS, "rows": cost.ROWS}
