"""Names and widths to column maps: moves, pieces, transposes, identity, errors, size."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.layouts import Case, RawMap, cases, column_maps, raw_maps
from tests.reference import dense_of_groups, dense_of_moves
from torchrec_kt.ops import UnknownKeyError
from torchrec_kt.ops.plan import ColumnMap, Move, Piece, RegroupPlan

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = [(["a", "b"], [3, 5]), (["c", "d"], [2, 4])]
GROUPS = [["a", "c"], ["d", "b"]]


def dense_of_pieces(column_map: ColumnMap) -> torch.Tensor:
    """Reads ``outputs`` alone."""
    rows = [
        (tensor, t, offset, piece.start, piece.length)
        for t, pieces in enumerate(column_map.outputs)
        for piece in pieces
        for tensor, offset in piece.sources
    ]
    return dense_of_moves(rows, column_map.in_widths, column_map.out_widths)


def dense(column_map: ColumnMap) -> torch.Tensor:
    return dense_of_moves(column_map.moves, column_map.in_widths, column_map.out_widths)


def assert_pieces_well_formed(column_map: ColumnMap) -> None:
    """Adjacent, ascending, cover the width, none could be joined with the next."""
    assert len(column_map.outputs) == len(column_map.out_widths)
    for pieces, width in zip(column_map.outputs, column_map.out_widths):
        end = 0
        for piece in pieces:
            assert piece.start == end
            assert piece.length > 0
            end += piece.length
        assert end == width
        for piece, following in itertools.pairwise(pieces):
            continued = tuple((t, offset + piece.length) for t, offset in piece.sources)
            assert following.sources != continued


# Maps


def test_moves_and_pieces_of_a_plan() -> None:
    plan = RegroupPlan.build(LAYOUTS, GROUPS)
    assert plan.in_widths == (8, 6)
    assert plan.out_widths == (5, 9)
    assert plan.column_map.moves == (
        Move(in_tensor=0, out_tensor=0, in_offset=0, out_offset=0, length=3),
        Move(in_tensor=1, out_tensor=0, in_offset=0, out_offset=3, length=2),
        Move(in_tensor=1, out_tensor=1, in_offset=2, out_offset=0, length=4),
        Move(in_tensor=0, out_tensor=1, in_offset=3, out_offset=4, length=5),
    )
    assert plan.column_map.outputs == (
        (Piece(0, 3, ((0, 0),)), Piece(3, 2, ((1, 0),))),
        (Piece(0, 4, ((1, 2),)), Piece(4, 5, ((0, 3),))),
    )
    assert plan.column_map.used_inputs == (0, 1)
    assert plan.column_map.max_fan_in == 1


def test_attributes_repeat_the_arguments() -> None:
    plan = RegroupPlan.build(LAYOUTS, GROUPS)
    assert plan.layouts == ((("a", "b"), (3, 5)), (("c", "d"), (2, 4)))
    assert plan.layouts[0].keys == ("a", "b")
    assert plan.layouts[0].widths == (3, 5)
    assert plan.groups == (("a", "c"), ("d", "b"))


@given(cases())
def test_plan_is_the_map_of_the_names(case: Case) -> None:
    column_map = case.plan.column_map
    expected = dense_of_groups(case.layouts, case.groups)
    assert column_map.in_widths == case.plan.in_widths == tuple(sum(widths) for _, widths in case.layouts)
    assert column_map.out_widths == case.plan.out_widths
    assert torch.equal(dense(column_map), expected)
    assert torch.equal(dense_of_pieces(column_map), expected)
    assert_pieces_well_formed(column_map)
    assert all(len(p.sources) == 1 for pieces in column_map.outputs for p in pieces)
    used = [i for i in range(len(case.layouts)) if any(m.in_tensor == i for m in column_map.moves)]
    assert column_map.used_inputs == tuple(used)


@given(raw_maps())
def test_moves_with_gaps_and_sums(raw: RawMap) -> None:
    column_map = raw.column_map
    expected = dense_of_moves(raw.moves, raw.in_widths, raw.out_widths)
    assert torch.equal(dense(column_map), expected)
    assert torch.equal(dense_of_pieces(column_map), expected)
    assert_pieces_well_formed(column_map)
    assert column_map.max_fan_in == (int(expected.sum(0).max()) if expected.numel() else 0)


@given(column_maps())
def test_transpose(column_map: ColumnMap) -> None:
    transposed = column_map.transpose()
    assert transposed.in_widths == column_map.out_widths
    assert transposed.out_widths == column_map.in_widths
    assert torch.equal(dense(transposed), dense(column_map).T)
    assert torch.equal(dense_of_pieces(transposed), dense(column_map).T)
    assert_pieces_well_formed(transposed)
    assert torch.equal(dense_of_pieces(transposed.transpose()), dense(column_map))


@given(cases(), st.data())
def test_transpose_to_some_wider_inputs(case: Case, data: st.DataObject) -> None:
    column_map = case.plan.column_map
    count = len(column_map.in_widths)
    spare = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    wanted = data.draw(
        st.permutations(range(count)).flatmap(lambda p: st.integers(0, count).map(lambda n: p[:n]))
    )
    widths = [w + s for w, s in zip(column_map.in_widths, spare)]
    transposed = column_map.transpose(widths, wanted)
    assert transposed.in_widths == column_map.out_widths
    assert transposed.out_widths == tuple(widths[i] for i in wanted)
    # The same moves between matrices whose inputs are that wide, then the wanted rows in their order.
    whole = dense_of_moves(column_map.moves, widths, column_map.out_widths)
    rows = whole.split(widths, 0)
    expected = torch.cat([rows[i] for i in wanted] or [whole[:0]]).T
    assert torch.equal(dense(transposed), expected)
    assert torch.equal(dense_of_pieces(transposed), expected)
    assert_pieces_well_formed(transposed)


def test_transpose_keeps_its_arguments_apart() -> None:
    """Transposes are remembered; a second request with other arguments is not answered with the first."""
    column_map = RegroupPlan.build(LAYOUTS, GROUPS).column_map
    assert column_map.transpose().out_widths == (8, 6)
    assert column_map.transpose([9, 6]).out_widths == (9, 6)
    assert column_map.transpose([8, 7]).out_widths == (8, 7)
    assert column_map.transpose(inputs=[1]).out_widths == (6,)
    assert column_map.transpose(inputs=[1, 0]).out_widths == (6, 8)
    assert column_map.transpose([9, 6], [0]).out_widths == (9,)
    assert column_map.transpose(inputs=[]).out_widths == ()
    for width in range(8, 60):
        assert column_map.transpose([width, 6]).out_widths == (width, 6)
    assert column_map.transpose().out_widths == (8, 6)


def test_sums_follow_the_groups() -> None:
    plan = RegroupPlan.build([(["a", "b"], [1, 2])], [["b", "a"], ["a"], [], ["a", "b", "a"]])
    ((of_a, of_b),) = plan.column_map.transpose().outputs
    assert of_a == Piece(0, 1, ((0, 2), (1, 0), (3, 0), (3, 3)))
    assert of_b == Piece(1, 2, ((0, 0), (3, 1)))
    assert plan.column_map.transpose().max_fan_in == 4


def test_unused_columns_have_no_source() -> None:
    plan = RegroupPlan.build([(["a", "b", "c"], [1, 2, 3]), (["d"], [4])], [["b"]])
    assert plan.column_map.used_inputs == (0,)
    assert plan.column_map.transpose().outputs == (
        (Piece(0, 1, ()), Piece(1, 2, ((0, 0),)), Piece(3, 3, ())),
        (Piece(0, 4, ()),),
    )


@pytest.mark.parametrize(
    ("layouts", "groups", "lengths"),
    [
        pytest.param([("abc", [1, 2, 3])], ["abc"], [6], id="whole-input"),
        pytest.param([("abc", [1, 2, 3])], ["ab", "c"], [3, 3], id="cut-between-groups"),
        pytest.param([("abc", [1, 2, 3])], ["bca"], [5, 1], id="rotated"),
        pytest.param([("abc", [1, 2, 3])], ["cba"], [3, 2, 1], id="reversed"),
        pytest.param([("abc", [1, 2, 3])], ["aa"], [1, 1], id="repeated"),
        pytest.param([("abc", [1, 2, 3])], ["ac"], [1, 3], id="gap-in-the-input"),
        pytest.param([("abc", [1, 0, 3])], ["ac"], [4], id="only-a-width-0-key-between"),
        pytest.param([("abc", [1, 0, 3])], ["abc"], [4], id="over-a-width-0-key"),
        pytest.param([("ab", [1, 2]), ("cd", [3, 4])], ["abcd"], [3, 7], id="two-inputs"),
        pytest.param(
            [("ab", [1, 2]), ("cd", [3, 0])], ["adb"], [3], id="over-a-width-0-key-of-another-input"
        ),
        pytest.param([("ab", [2, 2]), ("cd", [2, 2])], ["ad"], [2, 2], id="next-offset-of-another-input"),
        pytest.param([("ab", [0, 0])], ["ab", "a"], [], id="nothing"),
    ],
)
def test_adjacent_columns_are_one_move(layouts: list[Any], groups: list[str], lengths: list[int]) -> None:
    plan = RegroupPlan.build([(list(keys), widths) for keys, widths in layouts], [list(g) for g in groups])
    assert [move.length for move in plan.column_map.moves] == lengths
    assert [p.length for pieces in plan.column_map.outputs for p in pieces] == lengths


@pytest.mark.parametrize(
    ("layouts", "groups", "out_widths"),
    [
        ([], [], ()),
        ([], [[]], (0,)),
        ([([], [])], [[], []], (0, 0)),
        ([(["a"], [0])], [["a", "a"]], (0,)),
        ([(["a"], [4])], [], ()),
        ([(["a"], [4]), ([], []), (["b"], [1])], [[], ["b"]], (0, 1)),
    ],
)
def test_empty_layouts_and_groups(
    layouts: list[tuple[list[str], list[int]]], groups: list[list[str]], out_widths: tuple[int, ...]
) -> None:
    plan = RegroupPlan.build(layouts, groups)
    assert plan.out_widths == out_widths
    assert torch.equal(dense_of_pieces(plan.column_map), dense_of_groups(layouts, groups))
    assert torch.equal(dense(plan.column_map.transpose()), dense_of_groups(layouts, groups).T)


def test_keys_of_any_hashable_type_and_widths_of_any_integer_type() -> None:
    layouts = ([(0, ("t", 1)), np.array([2, 3])], (iter(["x"]), (torch.tensor(4),)))
    plan = RegroupPlan.build(layouts, ((("t", 1), "x"), (0,)))  # pyright: ignore[reportArgumentType]
    assert plan.in_widths == (5, 4)
    assert plan.out_widths == (7, 2)
    assert all(type(w) is int for w in (*plan.in_widths, *plan.out_widths, *plan.layouts[0].widths))


@pytest.mark.parametrize(
    ("move", "message"),
    [
        ((2, 0, 0, 0, 1), "row 1 .*input 2 .*2 inputs"),
        ((-1, 0, 0, 0, 1), "row 1 .*input -1 "),
        ((0, 1, 0, 0, 1), "row 1 .*output 1; .*1 outputs"),
        ((0, -1, 0, 0, 1), "row 1 .*output -1"),
        ((0, 0, 3, 0, 2), "row 1 .*reads 2 columns from column 3 of input 0, which has 4"),
        ((0, 0, -1, 0, 2), "row 1 .*column -1 of input 0"),
        ((1, 0, 2, 0, 1), "row 1 .*column 2 of input 1, which has 2"),
        ((0, 0, 0, 0, -1), "row 1 .*-1 columns"),
        ((0, 0, 0, 5, 2), "row 1 .*writes 2 columns to column 5 of output 0, which has 6"),
        ((0, 0, 0, -2, 2), "row 1 .*column -2 of output 0"),
        ((0, 0, 2**31 - 1, 0, 2**31 - 1), "row 1"),
    ],
)
def test_a_move_outside_its_tensors_is_refused(move: tuple[int, ...], message: str) -> None:
    good = (0, 0, 0, 0, 1)
    assert len(ColumnMap([good], [4, 2], [6]).moves) == 1
    with pytest.raises(ValueError, match=message):
        ColumnMap([good, move], [4, 2], [6])


# Identity


def test_plan_cannot_be_changed() -> None:
    plan = RegroupPlan.build(LAYOUTS, GROUPS)
    for name in ("layouts", "groups", "in_widths", "out_widths", "column_map", "something_new"):
        with pytest.raises(AttributeError, match=f"immutable.*{name}"):
            setattr(plan, name, ())
    for name in ("layouts", "column_map"):
        with pytest.raises(AttributeError, match=f"immutable.*{name}"):
            delattr(plan, name)
    assert plan == RegroupPlan.build(LAYOUTS, GROUPS)


def test_plan_keeps_nothing_of_the_callers_lists() -> None:
    keys, widths, group = ["a", "b"], [3, 5], ["b"]
    layouts, groups = [(keys, widths)], [group]
    plan = RegroupPlan.build(layouts, groups)
    keys[0], widths[1] = "z", 9
    group.append("a")
    layouts.clear()
    groups.clear()
    assert plan == RegroupPlan.build([(["a", "b"], [3, 5])], [["b"]])
    assert plan.out_widths == (5,)


def test_plan_is_only_built() -> None:
    with pytest.raises(TypeError, match=r"RegroupPlan\.build"):
        RegroupPlan(LAYOUTS, GROUPS)
    with pytest.raises(TypeError, match=r"RegroupPlan\.build"):
        RegroupPlan()


OTHERS: list[tuple[Any, Any]] = [
    ([(["b", "a"], [3, 5]), (["c", "d"], [2, 4])], GROUPS),
    ([(["a", "b"], [5, 3]), (["c", "d"], [2, 4])], GROUPS),
    ([(["c", "d"], [2, 4]), (["a", "b"], [3, 5])], GROUPS),
    ([(["a", "b", "c", "d"], [3, 5, 2, 4])], GROUPS),
    ([(["a", "b", "e"], [3, 5, 0]), (["c", "d"], [2, 4])], GROUPS),
    (LAYOUTS, [["a", "c"], ["b", "d"]]),
    (LAYOUTS, [["d", "b"], ["a", "c"]]),
    (LAYOUTS, [["a", "c"], ["d", "b"], []]),
    (LAYOUTS, [["a", "c", "d", "b"]]),
]


def test_equality_and_hash() -> None:
    plan = RegroupPlan.build(LAYOUTS, GROUPS)
    same = RegroupPlan.build(tuple((tuple(k), tuple(w)) for k, w in LAYOUTS), tuple(map(tuple, GROUPS)))
    assert plan is not same
    assert plan == same
    assert hash(plan) == hash(same)
    assert plan.column_map == same.column_map
    assert hash(plan.column_map) == hash(same.column_map)
    others = [RegroupPlan.build(*other) for other in OTHERS]
    assert all(plan != other for other in others)
    assert len({plan, same, *others}) == 1 + len(OTHERS)
    assert {plan: "found"}[same] == "found"
    assert plan != (plan.layouts, plan.groups)
    assert plan.column_map != plan.column_map.moves


def test_equal_hashes_are_not_equality() -> None:
    assert hash(-1) == hash(-2)
    layouts = [([-1, -2], [1, 1])]
    first, second = RegroupPlan.build(layouts, [[-1]]), RegroupPlan.build(layouts, [[-2]])
    assert hash(first) == hash(second)
    assert first != second
    assert RegroupPlan.build([([-1], [1])], []) != RegroupPlan.build([([-2], [1])], [])


def test_equality_of_maps_is_that_of_moves_and_widths() -> None:
    column_map = ColumnMap([(0, 0, 0, 0, 2)], [2], [2])
    assert column_map == ColumnMap([(0, 0, 0, 0, 1), (0, 0, 1, 1, 1)], (2,), (2,))
    assert column_map != ColumnMap([(0, 0, 0, 0, 2)], [3], [2])
    assert column_map != ColumnMap([(0, 0, 0, 0, 2)], [2], [3])
    assert column_map != ColumnMap([(0, 0, 0, 0, 1)], [2], [2])


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, *(lambda p, n=n: pickle.loads(pickle.dumps(p, n)) for n in range(6))],
)
def test_copies(duplicate: Callable[[Any], Any]) -> None:
    plan = RegroupPlan.build(LAYOUTS, [["a", "c", "a"], [], ["d"]])
    plan.column_map.transpose()
    for original in (plan, plan.column_map, plan.column_map.transpose()):
        twin = duplicate(original)
        assert type(twin) is type(original)
        assert twin == original
        assert hash(twin) == hash(original)
    twin = duplicate(plan)
    assert twin.groups == plan.groups
    assert twin.column_map.outputs == plan.column_map.outputs
    assert twin.column_map.transpose().outputs == plan.column_map.transpose().outputs
    with pytest.raises(AttributeError, match="immutable"):
        twin.groups = ()


def test_pickle_crosses_processes_with_other_string_hashes() -> None:
    code = """
import pickle, sys
from torchrec_kt.ops.plan import RegroupPlan
plan = pickle.loads(bytes.fromhex(sys.argv[1]))
fresh = RegroupPlan.build(plan.layouts, plan.groups)
assert plan == fresh and hash(plan) == hash(fresh) and {plan: 1}[fresh] == 1
print(plan.out_widths)
"""
    data = pickle.dumps(RegroupPlan.build(LAYOUTS, GROUPS)).hex()
    for seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", code, data],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed, "PATH": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.stdout.strip() == "(5, 9)", result.stderr


def test_repr_is_short_and_says_what_it_is() -> None:
    plan = RegroupPlan.build([([f"key{n}" for n in range(1000)], [1] * 1000)], [["key7"]])
    assert "1 inputs with 1000 keys" in repr(plan)
    assert "1 groups" in repr(plan)
    assert len(repr(plan)) < 200
    assert len(repr(RegroupPlan.build(LAYOUTS, GROUPS).column_map)) < 200


# Errors


def message_of(error: type[Exception], layouts: Any, groups: Any) -> str:
    with pytest.raises(error) as caught:
        RegroupPlan.build(layouts, groups)
    assert type(caught.value) is error
    return str(caught.value)


def test_unknown_key_names_key_group_and_nearest_names() -> None:
    layouts = [(["user_id", "user_age", "item_id"], [1, 1, 1])]
    message = message_of(UnknownKeyError, layouts, [["item_id"], ["item_id", "user_agee"]])
    assert "'user_agee'" in message
    assert "groups[1]" in message
    assert "'user_age'" in message
    assert "'item_id'" not in message
    assert issubclass(UnknownKeyError, KeyError)


def test_unknown_key_without_near_names_lists_the_known_ones() -> None:
    message = message_of(UnknownKeyError, LAYOUTS, [["zzz"]])
    assert all(repr(key) in message for key in ("zzz", "a", "b", "c", "d"))
    assert not message.startswith(('"', "'"))  # readable, not the repr of a string


def test_unknown_key_among_many_lists_some() -> None:
    keys = [f"k{n}" for n in range(1000)]
    message = message_of(UnknownKeyError, [(keys, [1] * 1000)], [["something else"]])
    assert "1000" in message
    assert len(message) < 300


def test_unknown_key_among_none() -> None:
    assert "no keys" in message_of(UnknownKeyError, [], [["a"]])


def test_unknown_key_that_is_no_string() -> None:
    message = message_of(UnknownKeyError, [([1, 2], [1, 1])], [[3]])
    assert "key 3" in message
    assert "1, 2" in message


def test_unknown_key_error_pickles() -> None:
    with pytest.raises(UnknownKeyError) as caught:
        RegroupPlan.build(LAYOUTS, [["zzz"]])
    twin = pickle.loads(pickle.dumps(caught.value))
    assert type(twin) is UnknownKeyError
    assert str(twin) == str(caught.value)


@pytest.mark.parametrize(
    ("layouts", "places"),
    [
        ([(["a", "b"], [1, 2]), (["c", "a"], [3, 1])], ["input 0 at position 0", "input 1 at position 1"]),
        ([(["x", "a", "a"], [1, 2, 2]), (["c"], [3])], ["input 0 at position 1", "input 0 at position 2"]),
        ([(["a"], [0]), (["a"], [0]), (["a"], [3])], [f"input {n} at position 0" for n in range(3)]),
    ],
)
def test_ambiguous_key_names_key_group_and_all_places(layouts: Any, places: list[str]) -> None:
    message = message_of(ValueError, layouts, [[], ["a"]])
    assert "'a'" in message
    assert "groups[1]" in message
    for place in places:
        assert place in message


def test_ambiguous_key_that_no_group_uses_is_fine() -> None:
    plan = RegroupPlan.build([(["a", "b"], [1, 2]), (["a", "c"], [3, 4])], [["c", "b"]])
    assert plan.column_map.moves == (Move(1, 0, 3, 0, 4), Move(0, 0, 1, 4, 2))


@pytest.mark.parametrize(
    ("error", "layouts", "groups", "pattern"),
    [
        (TypeError, "ab", [["a"]], "layouts is the string 'ab'"),
        (TypeError, 5, [["a"]], "layouts is 5"),
        (TypeError, None, [["a"]], "layouts is None"),
        (TypeError, ["ab"], [["a"]], r"layouts\[0\] is the string 'ab'"),
        (TypeError, [(["a"], [1]), None], [["a"]], r"layouts\[1\] is None"),
        (TypeError, [(["a"],)], [["a"]], r"layouts\[0\] .*\(keys, widths\) pair.* 1 items"),
        (TypeError, [(["a"], [1], 1)], [["a"]], r"layouts\[0\] .*3 items"),
        (TypeError, [("a", [1])], [["a"]], r"keys of layouts\[0\] is the string 'a'"),
        (TypeError, [(b"a", [1])], [["a"]], r"keys of layouts\[0\] is the string b'a'"),
        (TypeError, [(None, [1])], [["a"]], r"keys of layouts\[0\] is None"),
        (TypeError, [(["a"], 1)], [["a"]], r"widths of layouts\[0\] is 1 "),
        (TypeError, [(["a"], "1")], [["a"]], r"widths of layouts\[0\] is the string '1'"),
        (TypeError, [(["a", "b"], [1, 2.0])], [["a"]], r"width of key 'b' in layouts\[0\] is 2\.0 \(float\)"),
        (TypeError, [([], []), (["a"], [None])], [["a"]], r"width of key 'a' in layouts\[1\] is None"),
        (TypeError, [(["a"], ["1"])], [["a"]], r"width of key 'a' in layouts\[0\] is '1' \(str\)"),
        (ValueError, [(["a", "b"], [1, -2])], [["a"]], r"width of key 'b' in layouts\[0\] is -2"),
        (ValueError, [(["a", "b"], [1])], [["a"]], r"layouts\[0\] has 2 keys but 1 widths"),
        (ValueError, [([], []), (["a"], [1, 2])], [["a"]], r"layouts\[1\] has 1 keys but 2 widths"),
        (TypeError, LAYOUTS, "ab", "groups is the string 'ab'"),
        (TypeError, LAYOUTS, ["a", "b"], r"groups\[0\] is the string 'a'"),
        (TypeError, LAYOUTS, [["a"], "b"], r"groups\[1\] is the string 'b'"),
        (TypeError, LAYOUTS, [["a"], None], r"groups\[1\] is None"),
        (TypeError, LAYOUTS, None, "groups is None"),
        (TypeError, LAYOUTS, {"x": ["a"]}, r"groups\[0\] is the string 'x'"),
    ],
)
def test_wrong_arguments_are_named(error: type[Exception], layouts: Any, groups: Any, pattern: str) -> None:
    message = message_of(error, layouts, groups)
    assert re.search(pattern, message), message


# Size


def seconds_to_build(keys: int) -> float:
    layouts = [
        ([f"{i}_{n}" for n in range(keys // 4)], [1 + n % 3 for n in range(keys // 4)]) for i in range(4)
    ]
    names = [key for group in zip(*(k for k, _ in layouts), strict=True) for key in group]
    groups = [names[: keys // 2], names[::-1], names[::7], ["0_0"] * (keys // 10)]
    gc.collect()
    gc.disable()  # its cost depends on everything else that lives in the process
    try:
        start = time.process_time()
        plan = RegroupPlan.build(layouts, groups)
        transposed = plan.column_map.transpose()
        elapsed = time.process_time() - start
    finally:
        gc.enable()
    assert len(transposed.outputs) == 4
    assert len(plan.column_map.moves) >= keys
    return elapsed


def test_build_time_is_linear_in_the_number_of_keys() -> None:
    few = min(seconds_to_build(10_000) for _ in range(3))
    many = seconds_to_build(100_000)
    assert many < 25 * few, f"{few:.3f} s for 10,000 keys, {many:.3f} s for 100,000"


def test_unknown_and_ambiguous_keys_among_many_are_found_quickly() -> None:
    keys = [f"feature_{n}" for n in range(20_000)]
    start = time.process_time()
    assert "feature_1999" in message_of(UnknownKeyError, [(keys, [1] * len(keys))], [["feature_1999x"]])
    message_of(ValueError, [(keys, [1] * len(keys)), (keys[-1:], [1])], [keys])
    assert time.process_time() - start < 30


@pytest.mark.parametrize(
    ("layouts", "groups", "message"),
    [
        ([(["a", ["b"]], [1, 1])], [["a"]], "hashable"),
        ([(["a"], [1])], [[["a"]]], "hashable"),
        ([(["a", "b"], [1, 1])], [{"a", "b"}], r"groups\[0\] is a set"),
        ([({"a", "b"}, [1, 1])], [["a"]], r"layouts\[0\] is a set"),
    ],
)
def test_keys_without_hash_or_order_are_refused(layouts: Any, groups: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        RegroupPlan.build(layouts, groups)
