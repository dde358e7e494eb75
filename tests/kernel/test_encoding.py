"""The encoder's map says what the column map says, and the kernel touches each byte as often as it has to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel.encoding import (
    BFLOAT16,
    BYTES,
    DOUBLE,
    FLOAT,
    HALF,
    ITEM_BYTES,
    WINDOW,
    Decoded,
    Probe,
    decode,
)
from tests.layouts import column_maps
from torchrec_kt.ops.kernel import encoder_input
from torchrec_kt.ops.plan import ColumnMap

MAX_SLOTS = 112


def check_map(
    decoded: Decoded, column_map: ColumnMap, logs: Sequence[int], max_log: int, scale: int = 1
) -> None:
    """Every column of every output once, from the right sources in the right order, by vectors that fit."""
    used = column_map.used_inputs
    n_in = decoded.n_in
    assert n_in == len(used)
    assert decoded.out_widths == [w * scale for w in column_map.out_widths]
    assert decoded.has_sums == (column_map.max_fan_in > 1)
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    needed, needed_log = [0] * n_in, [0] * n_in
    for launch in decoded.launches:
        assert 0 < len(launch.slots) <= MAX_SLOTS
        assert len(set(launch.slots)) == len(launch.slots)
        assert len({slot[:2] for slot in launch.slots}) == len(launch.slots)
        longest: dict[tuple[int, int], int] = {}
        for kind, log, tensor, column, sources in launch.vectors:
            assert tensor >= n_in
            assert kind == min(len(sources), 2)
            for t, at in [(tensor, column), *sources]:
                assert at % (1 << log) == 0
                assert log <= min(max_log, logs[t])
                window = t, at // WINDOW
                longest[window] = max(longest.get(window, 0), log)
            for t, at in sources:
                assert 0 <= t < n_in
                needed[t] = max(needed[t], at + (1 << log))
                needed_log[t] = max(needed_log[t], log)
            for n in range(1 << log):
                place = tensor - n_in, column + n
                assert place not in found, f"column {place} is written twice"
                found[place] = [(used[t], at + n) for t, at in sources]
        assert longest == {(slot.tensor, slot.window): slot.alignment for slot in launch.slots}
        begin = 0
        for _, _, at, count in launch.segments:  # adjacent, none empty
            assert at == begin
            assert count > 0
            begin += count
    expected = {
        (out, (piece.start + n) * scale + s): [(t, (at + n) * scale + s) for t, at in piece.sources]
        for out, pieces in enumerate(column_map.outputs)
        for piece in pieces
        for n in range(piece.length)
        for s in range(scale)
    }
    assert found == expected
    assert decoded.needed == needed
    assert decoded.needed_log == needed_log


def decoded_of(
    probe: Probe, column_map: ColumnMap, logs: Sequence[int], max_log: int, scale: int = 1
) -> Decoded:
    map_words, header = probe.encode(encoder_input(column_map, scale), logs, max_log)
    return decode([word & 0xFFFFFFFF for word in map_words.tolist()], header.tolist())


@settings(max_examples=150)
@given(st.data())
def test_maps_say_what_column_maps_say(probe: Probe, data: st.DataObject) -> None:
    column_map = data.draw(column_maps())
    count = len(column_map.used_inputs) + len(column_map.out_widths)
    logs = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    max_log, scale = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 3))
    check_map(decoded_of(probe, column_map, logs, max_log, scale), column_map, logs, max_log, scale)


def test_vectors_are_as_long_as_they_can_be(probe: Probe) -> None:
    column_map = ColumnMap([(0, 0, 1, 1, 47), (0, 0, 2, 49, 30)], [48], [80])
    (launch,) = decoded_of(probe, column_map, [4, 4], 4).launches
    lengths = Counter({(1, log): 0 for log in range(5)})
    for vector in launch.vectors:
        lengths[vector.kind, vector.log] += 1
    # 1, 2, 4, 8, 16, 16 columns from an odd place on; single ones where source and destination differ by one
    assert lengths == {(1, 0): 1 + 30, (1, 1): 1, (1, 2): 1, (1, 3): 1, (1, 4): 2, (0, 0): 3}


@pytest.mark.parametrize("transposed", [False, True])
def test_many_tensors(probe: Probe, transposed: bool) -> None:
    rng = random.Random(1)
    moves = [
        (rng.randrange(180), rng.randrange(170), rng.randrange(4), rng.randrange(6), rng.randrange(5))
        for _ in range(1500)
    ]
    column_map = ColumnMap(moves, [9] * 180, [11] * 170)
    if transposed:
        column_map = column_map.transpose()
    logs = [rng.randrange(4) for _ in range(len(column_map.used_inputs) + len(column_map.out_widths))]
    decoded = decoded_of(probe, column_map, logs, 2)
    assert len(decoded.launches) > 1
    check_map(decoded, column_map, logs, 2)


def test_as_many_tensors_as_a_launch_reaches(probe: Probe) -> None:
    column_map = ColumnMap([(i, 0, 0, 0, 4) for i in range(MAX_SLOTS - 1)], [4] * (MAX_SLOTS - 1), [4])
    decoded = decoded_of(probe, column_map, [2] * MAX_SLOTS, 2)
    assert [len(launch.slots) for launch in decoded.launches] == [MAX_SLOTS]
    check_map(decoded, column_map, [2] * MAX_SLOTS, 2)


def test_windows(probe: Probe) -> None:
    """Columns beyond 2^24 are reached from slots of their own; no vector lies in two."""
    near = 2 * WINDOW - 7
    moves = [(0, 0, near, 3, 20), (1, 0, WINDOW - 3, 10, 30), (0, 0, 5, 60, 4)]
    column_map = ColumnMap(moves, [near + 20, WINDOW + 40], [64])
    for logs in ([4, 4, 4], [0, 3, 4], [2, 2, 2]):
        decoded = decoded_of(probe, column_map, logs, 4)
        check_map(decoded, column_map, logs, 4)
        assert {slot[:2] for slot in decoded.launches[0].slots} == {
            (0, 0),
            (0, 1),
            (0, 2),
            (1, 0),
            (1, 1),
            (2, 0),
        }


# --- bytes -------------------------------------------------------------------------------------------

BASE = 1 << 40  # no memory of this process


class Fake(NamedTuple):
    """A tensor at an address where nothing is."""

    address: int
    columns: int
    row_stride: int
    column_stride: int

    def bytes_of(self, row: int, column: int, item: int) -> int:
        return self.address + (row * self.row_stride + column * self.column_stride) * item


def alignment(tensor: Fake, item: int, rows: int) -> int:
    if tensor.column_stride != 1:
        return 0
    for log in (4, 3, 2, 1):
        step = item << log
        if tensor.address % step == 0 and (rows == 1 or tensor.row_stride * item % step == 0):
            return log
    return 0


TYPES = [(BYTES, BYTES, n, n) for n in (1, 2, 4, 8, 16)] + [
    (a, b, ITEM_BYTES[a], ITEM_BYTES[b]) for a in ITEM_BYTES for b in ITEM_BYTES
]


@settings(max_examples=400)
@given(st.data())
def test_each_byte_of_the_outputs_is_written_once(probe: Probe, data: st.DataObject) -> None:
    """And each byte of the inputs is read once for each use, and nothing else is touched."""
    column_map = data.draw(column_maps().filter(lambda m: m.used_inputs))
    types = data.draw(st.sampled_from([t for t in TYPES if column_map.max_fan_in < 2 or t[0] != BYTES]))
    in_item, out_item = types[2:]
    rows = data.draw(st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 129, 300])))
    at = BASE
    tensors: list[Fake] = []
    for i in column_map.used_inputs:
        width = column_map.in_widths[i]
        step = data.draw(st.sampled_from([1, 1, 1, 2]))
        stride = width * step + data.draw(st.sampled_from([0, 0, 1, 3, 4, 8]))
        at += data.draw(st.sampled_from([0, 1, 2, 4, 8])) * in_item
        tensors.append(Fake(at, width, stride, step))
        at += (rows * stride * in_item // 64 + 1) * 64
    outputs = len(tensors)
    at = -(-at // 64) * 64
    for width in column_map.out_widths:
        tensors.append(Fake(at, width, width, 1))
        at += (rows * width * out_item // 64 + 1) * 64
    max_log = {1: 4, 2: 3, 4: 2, 8: 1, 16: 0}[max(in_item, out_item)]
    logs = [
        max(
            0,
            min(
                max_log,
                alignment(t, in_item if n < outputs else out_item, rows)
                - data.draw(st.sampled_from([0, 0, 1])),
            ),
        )
        for n, t in enumerate(tensors)
    ]
    if rows == 1:
        tensors = [t._replace(row_stride=0) for t in tensors]
    walk = probe.walk(
        probe.encode(encoder_input(column_map), logs, max_log),
        tensors,
        rows,
        types[:2],
        types[2:],
        (BASE, at - BASE),
        resident_threads=data.draw(st.sampled_from([1, 256, 1 << 20])),
    )
    assert walk is not None
    assert walk.loads is not None
    assert walk.stores is not None
    assert (walk.outside, walk.misaligned) == (0, 0)
    loads, stores = torch.zeros_like(walk.loads), torch.zeros_like(walk.stores)
    uses = Counter(
        (t, o + n) for ps in column_map.outputs for p in ps for t, o in p.sources for n in range(p.length)
    )
    for (tensor, column), count in uses.items():
        fake = tensors[column_map.used_inputs.index(tensor)]
        for row in range(rows):
            begin = fake.bytes_of(row, column, in_item) - BASE
            loads[begin : begin + in_item] += count
    for fake in tensors[outputs:]:
        begin = fake.address - BASE
        stores[begin : begin + rows * fake.columns * out_item] = 1
    assert torch.equal(walk.stores, stores)
    assert torch.equal(walk.loads, loads)


@pytest.mark.parametrize("item", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rows", [2**31 + 3, 2**33 + 1])
def test_the_last_bytes_of_outputs_beyond_any_memory(probe: Probe, rows: int, item: int) -> None:
    """64-bit offsets on both sides, more rows than a launch has threads."""
    width, tail = 16, 1 << 16
    column_map = ColumnMap([(0, 0, 0, 0, 7), (0, 0, 8, 8, 8)], [width], [width])
    size = rows * width * item
    tensors = [Fake(BASE, width, width, 1), Fake(BASE + size, width, width, 1)]
    max_log = {1: 4, 2: 3, 4: 2, 8: 1, 16: 0}[item]
    encoded = probe.encode(encoder_input(column_map), [max_log] * 2, max_log)
    all_of_it = probe.walk(
        encoded, tensors, rows, (BYTES, BYTES), (item, item), (BASE, 2 * size), count=False, blocks=2
    )
    assert all_of_it is not None
    assert (all_of_it.outside, all_of_it.misaligned) == (0, 0)
    # A thread walks a tile of rows, so the last rows are with the last threads of each segment. There is
    # one segment per length of vector here; enough of the last blocks hold them all for one vector alone.
    single = ColumnMap([(0, 0, 0, 0, width)], [width], [width])
    encoded = probe.encode(encoder_input(single), [max_log] * 2, max_log)
    walk = probe.walk(
        encoded, tensors, rows, (BYTES, BYTES), (item, item), (BASE + 2 * size - tail, tail), blocks=2
    )
    assert walk is not None
    assert walk.stores is not None
    assert bool(walk.stores.eq(1).all())


def test_rows_of_the_last_tile(probe: Probe) -> None:
    """Every number of rows around the lengths of batches and tiles."""
    column_map = ColumnMap([(0, 0, 0, 0, 5)], [5], [6])
    for types, items in (((BYTES, BYTES), (4, 4)), ((HALF, DOUBLE), (2, 8)), ((BFLOAT16, FLOAT), (2, 4))):
        encoded = probe.encode(encoder_input(column_map), [0, 0], 0)
        for rows in range(1, 150):
            stride = 0 if rows == 1 else 1
            tensors = [Fake(BASE, 5, 5 * stride, 1), Fake(BASE + 65536, 6, 6 * stride, 1)]
            walk = probe.walk(
                encoded,
                tensors,
                rows,
                types,
                items,
                (BASE + 65536, rows * 6 * items[1] + 99),
                resident_threads=1,
            )
            assert walk is not None
            assert walk.stores is not None
            assert bool(walk.stores[: rows * 6 * items[1]].eq(1).all())
            assert not walk.stores[rows * 6 * items[1] :].any()


@pytest.mark.parametrize("misplaced", ["address", "row stride", "column stride"])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_aligned_is_refused(probe: Probe, side: int, misplaced: str) -> None:
    """Also in a later launch than the first, before any runs."""
    pairs = 60
    column_map = ColumnMap([(i, i, 0, 0, 8) for i in range(pairs)], [8] * pairs, [8] * pairs)
    encoded = probe.encode(encoder_input(column_map), [2] * 2 * pairs, 2)
    tensors = [Fake(BASE + 4096 * i, 8, 8, 1) for i in range(2 * pairs)]
    arguments = 3, (BYTES, BYTES), (4, 4), (BASE, 4096 * 2 * pairs)
    walk = probe.walk(encoded, tensors, *arguments)
    assert walk is not None
    assert walk.launches == 2
    for i in (0, 30, pairs - 1):
        changed = list(tensors)
        at = i + side * pairs
        changed[at] = {
            "address": tensors[at]._replace(address=tensors[at].address + 8),
            "row stride": tensors[at]._replace(row_stride=10),
            "column stride": tensors[at]._replace(column_stride=2),
        }[misplaced]
        assert probe.walk(encoded, changed, *arguments) is None


# --- arithmetic ----------------------------------------------------------------------------------------


def test_division(probe: Probe) -> None:
    rng = random.Random(2)
    counts = {n + d for k in range(1, 31) for n in (1 << k,) for d in (-1, 0, 1) if n + d > 0}
    counts |= {rng.randrange(1, 1 << rng.randrange(1, 31)) for _ in range(200)} | {
        641,
        6_700_417,
        715_827_883,
    }
    wrong = {count: found for count in sorted(counts) if (found := probe.wrong_quotients(count, 700_001))}
    assert not wrong


def test_tiles(probe: Probe) -> None:
    """Whole batches of rows; more rows only where the device stays full; never more threads than a launch has."""
    for rows in (1, 7, 8, 100, 65_536, 2**22, 2**31, 2**36):
        for vectors in (1, 3, 1000, 2**20, 2**24):
            for resident in (1, 256, 132 * 1024):
                tile = probe.tile(rows, vectors, resident)
                assert tile >= 8
                assert tile & (tile - 1) == 0
                threads = vectors * -(-rows // tile)
                assert threads <= 2**30
                if 8 < tile <= 64:
                    assert threads >= 16 * resident
                if tile < 64:
                    assert vectors * -(-rows // (2 * tile)) < 16 * resident
                if tile > 64:
                    assert vectors * -(-rows // (tile // 2)) > 2**30
