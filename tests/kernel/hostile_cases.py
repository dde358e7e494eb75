"""Maps and headers that no encoder makes: an exception or outputs not written, never memory outside the tensors.

Run by test_host_build.py under sanitizers, which end the process at the first access outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchrec_kt.ops import _native

encode: Callable[..., tuple[Tensor, Tensor]] = torch.ops.torchrec_kt._encode_map
apply: Callable[..., list[Tensor]] = torch.ops.torchrec_kt._apply_map
INPUTS, OUTPUTS = 2, 2
HEADER_WORDS = 4 + OUTPUTS + 2 * INPUTS  # before the launches


@pytest.fixture(autouse=True)
def _host_kernel() -> None:
    assert _native.has_kernel("cpu"), _native.why_not()


class Call(NamedTuple):
    values: list[Tensor]
    map: Tensor
    header: Tensor
    cast: int


def make(
    dtype: torch.dtype = torch.float32,
    cast: int = -1,
    *,
    sums: bool = True,
    rows: int = 3,
    many: bool = False,
) -> Call:
    """A call that works: vectors of several lengths, gaps, a sum, an input whose columns are one in memory."""
    n_in = 120 if many else INPUTS
    widths = [24, 12]
    pieces = [n_in, OUTPUTS, *widths]
    for start, length, sources in (
        (0, 8, [(0, 0)]),
        (8, 5, [(1, 3)]),
        (13, 3, []),
        (16, 8, [(0, 8), (0, 0)]),
    ):
        pieces += [0, start, length, len(sources) if sums else min(1, len(sources))]
        pieces += [n for pair in sources[: None if sums else 1] for n in pair]
    for i in range(n_in - 1 if many else 1):
        pieces += [1, i % 12 if many else 2, 1 if many else 10, 1, i if many else 0, 4]
    item = dtype.itemsize if cast < 0 else max(dtype.itemsize, (2, 2, 4, 8)[cast])
    max_log = {1: 4, 2: 3, 4: 2, 8: 1, 16: 0}[item]
    values = [torch.ones(rows, 16).to(dtype) for _ in range(n_in)]
    values[1] = torch.ones(rows, 1).to(dtype).expand(rows, 16)
    logs = [max_log] * n_in + [min(max_log, 3), min(max_log, 2)]
    logs[1] = 0
    header_and_map = encode(torch.tensor(pieces), torch.tensor(logs), max_log)
    return Call(values, *header_and_map, cast)


def attempt(call: Call) -> list[Tensor] | None:
    """Whatever comes of it. Leaves the inputs alone."""
    before = [v.clone() for v in call.values]
    try:
        outs = apply(*call)
    except (ValueError, RuntimeError, TypeError):
        return None
    finally:
        assert all(map(torch.equal, before, call.values))
    for out in outs:
        out.sum()  # readable from end to end
    return outs


KINDS = {
    "copies": {"sums": False},
    "bytes": {"dtype": torch.uint8, "sums": False},
    "widest": {"dtype": torch.complex128, "sums": False},
    "sums": {},
    "narrowing": {"dtype": torch.float64, "cast": 0},
    "widening": {"dtype": torch.float16, "cast": 3},
    "single row": {"rows": 1},
    "launches": {"many": True},
}
kinds = st.sampled_from(list(KINDS))
numbers = st.one_of(
    st.integers(-2, 130),
    st.sampled_from(
        [n + d for n in (2**24, 2**31, 2**32, 2**48, 2**56, 2**62) for d in (-1, 0, 1)]
        + [2**63 - 1, -(2**63)]
    ),
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_calls_work(kind: str) -> None:
    outs = attempt(make(**KINDS[kind]))
    assert outs is not None
    first, second = outs
    assert torch.equal(
        first[:, :16], torch.tensor([1] * 13 + [0] * 3).expand(first.shape[0], 16).to(first.dtype)
    )
    assert bool(first[:, 16:].eq(2 if KINDS[kind].get("sums", True) else 1).all())
    assert bool(second[:, 2:].eq(second[:, 2:3]).all())


@settings(max_examples=1500)
@given(kinds, st.data())
def test_changed_headers(kind: str, data: st.DataObject) -> None:
    call = make(**KINDS[kind])
    header = call.header.clone()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(header) - 1))
        value = data.draw(numbers)
        if 4 <= at < 4 + OUTPUTS and 2**16 < value < 2**56:
            continue  # an output of that width could be there, and fill the machine
        header[at] = value
    attempt(call._replace(header=header))


@settings(max_examples=1500)
@given(kinds, st.data())
def test_changed_launches(kind: str, data: st.DataObject) -> None:
    """The part of the header that the kernel's parameters come from, by small steps."""
    call = make(**KINDS[kind])
    header = call.header.clone()
    begin = HEADER_WORDS if len(call.values) == INPUTS else 4 + OUTPUTS + 2 * len(call.values)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(begin, len(header) - 1))
        header[at] += data.draw(st.integers(-4, 4))
    attempt(call._replace(header=header))


@settings(max_examples=1500)
@given(kinds, st.data())
def test_changed_maps(kind: str, data: st.DataObject) -> None:
    call = make(**KINDS[kind])
    map = call.map.clone()
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(map) - 1))
        slot = data.draw(st.integers(0, 5) | st.integers(0, 255))
        offset = data.draw(st.integers(0, 40) | st.integers(0, 2**24 - 1))
        word = data.draw(st.sampled_from([slot << 24 | offset, offset, 2**32 - 1]))
        map[at] = word - 2**32 if word >= 2**31 else word
    attempt(call._replace(map=map))


@settings(max_examples=300)
@given(kinds, st.data())
def test_headers_that_end_early(kind: str, data: st.DataObject) -> None:
    call = make(**KINDS[kind])
    header = call.header[: data.draw(st.integers(0, len(call.header) - 1))].clone()
    assert attempt(call._replace(header=header)) is None


@settings(max_examples=300)
@given(kinds, kinds)
def test_headers_and_maps_of_each_other(one: str, other: str) -> None:
    mine, theirs = make(**KINDS[one]), make(**KINDS[other])
    attempt(mine._replace(header=theirs.header))
    attempt(mine._replace(map=theirs.map))
    attempt(mine._replace(map=theirs.map, header=theirs.header))
    attempt(mine._replace(values=theirs.values))
    attempt(mine._replace(cast=theirs.cast))


def refused(call: Call, match: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=match or None):
        apply(*call)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: {"values": []}, "at least one"),
        (lambda c: {"values": c.values[:1]}, "got 1 tensors; the map is for 2"),
        (lambda c: {"values": [*c.values, c.values[0]]}, "got 3 tensors; the map is for 2"),
        (lambda c: {"values": [c.values[0][:, :15], c.values[1]]}, r"tensor 0 must be \[3, 16 or more\]"),
        (lambda c: {"values": [c.values[0], c.values[1][:2]]}, r"tensor 1 must be \[3, "),
        (lambda c: {"values": [v[0] for v in c.values]}, "tensor 0 must be"),
        (lambda c: {"values": [v[None] for v in c.values]}, "tensor 0 must be"),
        (lambda c: {"values": [c.values[0], c.values[1].double()]}, "tensor 1 differs from tensor 0"),
        (lambda c: {"values": [v.int() for v in c.values]}, "sums and casts are for"),
        (lambda c: {"map": c.map[:-1]}, "as long as its header says"),
        (lambda c: {"map": torch.cat([c.map, c.map])}, "as long as its header says"),
        (lambda c: {"map": c.map.long()}, "int32"),
        (lambda c: {"map": c.map[None]}, "one dimension"),
        (lambda c: {"map": torch.stack([c.map, c.map], 1)[:, 0]}, "contiguous"),
        (lambda c: {"map": torch.cat([c.map[:1], c.map])[1:]}, "multiple of 8 bytes"),
        (lambda c: {"header": c.header.int()}, "header must be a contiguous int64 tensor"),
        (lambda c: {"header": c.header[None]}, "one dimension"),
        (lambda c: {"header": torch.stack([c.header] * 2, 1)[:, 0]}, "contiguous"),
        (lambda c: {"header": c.header[:0]}, "header ends early"),
        (lambda c: {"cast": 4}, "no type has number 4"),
        (lambda c: {"cast": -2}, "no type has number -2"),
        (lambda c: {"map": c.map.to("meta")}, ""),
        (lambda c: {"header": c.header.to("meta")}, ""),
        (lambda c: {"values": [c.values[0], c.values[1].to("meta")]}, ""),
        (lambda c: {"values": [v.to_sparse() for v in c.values]}, ""),
    ],
)
def test_refusals(change: Callable[[Call], dict[str, Any]], match: str) -> None:
    call = make()
    refused(call._replace(**change(call)), match)


def with_word(header: Tensor, at: int, value: int) -> Tensor:
    changed = header.clone()
    changed[at] = value
    return changed


def test_widths_that_no_memory_holds() -> None:
    call = make()
    for width in (-1, 2**45, 2**62, 2**63 - 1):
        refused(call._replace(header=with_word(call.header, 4, width)), "allocate")


def test_rows_without_end() -> None:
    """Rows of an input need no memory; a header without outputs asks for none either."""
    map = torch.zeros(32, dtype=torch.int32)
    header = torch.tensor([1, 0, 32, 0, 1, 0, 1, 0, 32, 1, 1, 0, 0, 0, 1, 0, 0, 16])
    for rows in (2**57, 2**60, 2**62):
        refused(Call([torch.ones(1, 1).expand(rows, 1)], map, header, -1), "more vectors than any tensor has")
    assert apply([torch.ones(1, 1).expand(2**20, 1)], map, header, -1) == []


def test_a_map_larger_than_any() -> None:
    call = make()
    for words in (2**31, 2**32 + len(call.map), 2**63 - 1):
        refused(call._replace(header=with_word(call.header, 2, words)), "size of the map")


def reference(slot: int, place: int) -> int:
    return slot << 24 | place


@pytest.mark.parametrize(("dtype", "cast"), [(torch.float16, 3), (torch.float64, 0), (torch.float32, -1)])
def test_no_input_is_written_and_no_output_read(dtype: torch.dtype, cast: int) -> None:
    """Even where a map asks for it: elements of the one have another size than elements of the other."""
    values = [torch.ones(3, 16, dtype=dtype)]
    header = torch.tensor([1, 1, 2, 0, 16, 16, 0, 1, 0, 2, 2, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 1])
    source, target = reference(0, 15), reference(1, 15)
    for pair, written in (((source, target), True), ((target, source), False), ((target, target), False)):
        map = torch.tensor(pair, dtype=torch.int32)
        before = values[0].clone()
        (out,) = apply(values, map, header, cast)
        assert torch.equal(values[0], before)
        if written:
            assert torch.equal(out[:, 15], torch.ones(3, dtype=out.dtype))


def test_vectors_longer_than_a_slot_is_aligned() -> None:
    """Columns that are one in memory: four of them are not where a vector would look."""
    values = [torch.ones(3, 1).expand(3, 16)]
    for to_log in (0, 2):
        header = torch.tensor([1, 1, 2, 0, 16, 16, 0, 1, 0, 2, 2, 1, 0, 0, 0, 1, 0, to_log, 1, 2, 0, 1])
        apply(values, torch.tensor([reference(0, 3), reference(1, 0)], dtype=torch.int32), header, -1)


# The encoder's own arguments


def piece_lists() -> st.SearchStrategy[list[int]]:
    small = st.integers(-1, 5)
    return st.lists(
        st.one_of(small, small, small, st.sampled_from([2**24, 2**56, 2**62, 2**63 - 1, -(2**63)])),
        max_size=24,
    )


@settings(max_examples=1500)
@given(piece_lists(), st.lists(st.integers(-1, 5), max_size=6), st.integers(-1, 5))
def test_pieces_of_any_kind(pieces: list[int], logs: list[int], max_log: int) -> None:
    lengths = [n for n in pieces if n >= 2**24]
    if lengths and len(pieces) > 6:
        pieces = [min(n, 2**24) for n in pieces]  # a piece may be that long; not one that fills the machine
    try:
        encode(torch.tensor(pieces, dtype=torch.int64), torch.tensor(logs, dtype=torch.int64), max_log)
    except (ValueError, RuntimeError):
        return


@pytest.mark.parametrize(
    ("pieces", "logs", "max_log", "match"),
    [
        ([], [], 2, "pieces ends early"),
        ([1], [0], 2, "pieces ends early"),
        ([1, 1, 8], [0], 2, "alignment has 1 entries; expected one for each of 1 inputs and 1 outputs"),
        ([1, 1, 8], [0, 5], 2, "alignment is 5; expected 0 to 4"),
        ([1, 1, 8], [0, 0], 5, "max_log is 5; expected 0 to 4"),
        ([1, 1, 8], [0, 0], -1, "max_log is -1"),
        ([1, 1, 8, 1, 0, 8, 0], [0, 0], 2, "output is 1; expected 0 to 0"),
        ([1, 1, 8, 0, 9, 0, 0], [0, 0], 2, "start is 9; expected 0 to 8"),
        ([1, 1, 8, 0, 1, 8, 0], [0, 0], 2, "length is 8; expected 0 to 7"),
        ([1, 1, 8, 0, 0, 8, 1, 1, 0], [0, 0], 2, "input is 1; expected 0 to 0"),
        ([1, 1, 8, 0, 0, 8, 1, 0, -1], [0, 0], 2, "offset is -1"),
        ([1, 1, 8, 0, 0, 8, 1, 0], [0, 0], 2, "pieces ends early"),
        ([1, 1, 8, 0, 0, 8, 9, 0, 0], [0, 0], 2, "number of sources is 9; expected 0 to "),
    ],
)
def test_pieces_that_are_refused(pieces: list[int], logs: list[int], max_log: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        encode(torch.tensor(pieces, dtype=torch.int64), torch.tensor(logs, dtype=torch.int64), max_log)


def test_sums_over_more_tensors_than_a_launch_reaches() -> None:
    def pieces(count: int) -> Sequence[int]:
        return [count, 1, 4, 0, 0, 4, count, *(n for i in range(count) for n in (i, 0))]

    encode(torch.tensor(pieces(111)), torch.zeros(112, dtype=torch.int64), 2)
    with pytest.raises((ValueError, RuntimeError), match="sum over 112 tensors; a launch reaches 111"):
        encode(torch.tensor(pieces(112)), torch.zeros(113, dtype=torch.int64), 2)
