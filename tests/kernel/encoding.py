"""What the encoder writes, read again; and probe.cpp, which walks the kernel without touching memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

WINDOW = 1 << 24
ZERO, COPY, SUM = range(3)
#: As Element in backend.h; any type that is only copied is BYTES.
BYTES, HALF, BFLOAT16, FLOAT, DOUBLE = range(5)
ITEM_BYTES = {HALF: 2, BFLOAT16: 2, FLOAT: 4, DOUBLE: 8}


class Slot(NamedTuple):
    tensor: int
    window: int
    alignment: int


class Vector(NamedTuple):
    """``2 ** log`` columns of a tensor from ``column`` on, and where they come from."""

    kind: int
    log: int
    tensor: int
    column: int
    sources: list[tuple[int, int]]


class Launch(NamedTuple):
    slots: list[Slot]
    segments: list[tuple[int, int, int, int]]  # kind, log, begin, count
    vectors: list[Vector]


class Decoded(NamedTuple):
    n_in: int
    out_widths: list[int]
    needed: list[int]
    needed_log: list[int]
    has_sums: bool
    launches: list[Launch]


def decode(map_words: Sequence[int], header: Sequence[int]) -> Decoded:
    """By the description in csrc/encode.h."""
    numbers = iter(header)

    def take(count: int) -> list[int]:
        return [next(numbers) for _ in range(count)]

    n_in, n_out, words, has_sums = take(4)
    assert words == len(map_words)
    out_widths, needed, needed_log = take(n_out), take(n_in), take(n_in)
    launches: list[Launch] = []
    for _ in range(next(numbers)):
        begin, size, n_slots, n_segments = take(4)
        slots = [Slot(*take(3)) for _ in range(n_slots)]
        segments = [(kind, log, at, count) for kind, log, at, count in (take(4) for _ in range(n_segments))]
        own = map_words[2 * begin : 2 * begin + size]
        assert len(own) == size
        launches.append(Launch(slots, segments, list(_vectors(own, slots, segments))))
    assert not list(numbers), "words after the last launch"
    return Decoded(n_in, out_widths, needed, needed_log, bool(has_sums), launches)


def _vectors(
    words: Sequence[int], slots: Sequence[Slot], segments: Sequence[tuple[int, int, int, int]]
) -> Iterator[Vector]:
    def place(word: int, log: int) -> tuple[int, int]:
        slot = slots[word >> 24]
        return slot.tensor, slot.window * WINDOW + ((word & 0xFFFFFF) << log)

    for kind, log, begin, count in segments:
        for entry in range(begin, begin + count):
            source, destination = words[2 * entry], words[2 * entry + 1]
            sources: list[int] = []
            if kind == COPY:
                sources = [source]
            elif kind == SUM:
                sources = list(words[source + 1 : source + 1 + words[source]])
                assert len(sources) == words[source] > 1
            yield Vector(kind, log, *place(destination, log), [place(word, log) for word in sources])


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


class Walk(NamedTuple):
    launches: int
    loads: Tensor | None  # per byte watched, how often
    stores: Tensor | None
    outside: int  # bytes accessed that are not watched
    misaligned: int  # accesses


class Probe:
    """probe.cpp, called from Python."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.encode.restype = ctypes.c_bool
        self._library.apply.restype = ctypes.c_int64
        self._library.wrong_quotients.restype = ctypes.c_int64
        self._library.tile.restype = ctypes.c_uint32

    def encode(self, pieces: Sequence[int], alignment: Sequence[int], max_log: int) -> tuple[Tensor, Tensor]:
        """The map (int32) and the header (int64)."""
        numbers, logs, sizes = (
            torch.tensor(pieces),
            torch.tensor(alignment),
            torch.zeros(2, dtype=torch.int64),
        )
        assert self._library.encode(
            _pointer(numbers),
            ctypes.c_int64(len(numbers)),
            _pointer(logs),
            ctypes.c_int64(len(logs)),
            max_log,
            _pointer(sizes),
        )
        n_map, n_header = sizes.tolist()
        map_words = torch.zeros(n_map, dtype=torch.int32)
        header = torch.zeros(n_header, dtype=torch.int64)
        self._library.take(_pointer(map_words), _pointer(header))
        return map_words, header

    def walk(
        self,
        encoded: tuple[Tensor, Tensor],
        tensors: Sequence[tuple[int, int, int, int]],
        rows: int,
        types: tuple[int, int],
        item_bytes: tuple[int, int],
        watch: tuple[int, int],
        *,
        count: bool = True,
        resident_threads: int = 256,
        blocks: int = 1 << 31,
    ) -> Walk | None:
        """Apply a map to ``(address, columns, row stride, column stride)``; None where they are not aligned.

        Only the first and the last ``blocks`` of each launch.
        """
        map_words, header = encoded
        begin, size = watch
        numbers = torch.tensor(tensors, dtype=torch.int64)
        counts = torch.zeros(2, size if count else 0, dtype=torch.uint8)
        faults = torch.zeros(2, dtype=torch.int64)
        launches = self._library.apply(
            _pointer(header),
            ctypes.c_int64(len(header)),
            _pointer(map_words),
            _pointer(numbers),
            ctypes.c_int64(rows),
            *types,
            *item_bytes,
            ctypes.c_int64(resident_threads),
            ctypes.c_uint32(blocks),
            ctypes.c_uint64(begin),
            ctypes.c_uint64(size),
            _pointer(counts[0]) if count else None,
            _pointer(counts[1]) if count else None,
            _pointer(faults),
        )
        assert launches >= -1
        if launches < 0:
            return None
        loads, stores = (counts[0], counts[1]) if count else (None, None)
        return Walk(launches, loads, stores, *faults.tolist())

    def wrong_quotients(self, count: int, step: int) -> int:
        return self._library.wrong_quotients(ctypes.c_uint32(count), ctypes.c_uint32(step))

    def tile(self, rows: int, vectors: int, resident_threads: int) -> int:
        return self._library.tile(*map(ctypes.c_int64, (rows, vectors, resident_threads)))
