"""``KTRegroupAsDict``: plans that follow the input, errors, containers, threads, size."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedTensor

import torchrec_kt
from torchrec_kt import KTRegroupAsDict

from .helpers import (
    GROUPS,
    LAYOUT,
    NAMES,
    OMITTED,
    OTHER_INPUTS,
    REPEATED,
    SWAPPED,
    Kts,
    Late,
    Layout,
    LikeKeyedTensor,
    assert_regrouped,
    assert_regroups,
    gradients,
    layout_of,
    make_kts,
    module,
    random_values,
    reference,
    same,
    uninitialised_is_nan,
    values_of,
)

# --- the plan follows the input ---------------------------------------------------------------------


@pytest.mark.parametrize("groups", [GROUPS, REPEATED], ids=["once", "repeated"])
@pytest.mark.parametrize("case", OTHER_INPUTS)
def test_the_plan_is_that_of_the_input_at_hand(case: str, groups: list[list[str]]) -> None:
    m = module(groups)
    assert_regroups(m, make_kts(grad=True), groups)
    assert_regroups(m, OTHER_INPUTS[case](), groups)
    assert_regroups(m, make_kts(batch=2, grad=True), groups)


@pytest.mark.parametrize("case", OTHER_INPUTS)
def test_a_prepared_or_copied_or_cleared_module_follows_its_input(case: str) -> None:
    used = module()
    used(make_kts())
    copied = copy.deepcopy(used)
    pickled = pickle.loads(pickle.dumps(used))
    used.clear_cache()
    for m in (module(layout=LAYOUT), copied, pickled, used):
        assert_regroups(m, OTHER_INPUTS[case](), GROUPS)


def test_every_input_after_every_other_in_one_module() -> None:
    m = module()
    for _ in range(2):
        for make in OTHER_INPUTS.values():
            assert_regroups(m, make(), GROUPS)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("kts", "missing"),
    [
        (lambda: make_kts([(["z", "b"], [3, 5]), LAYOUT[1]]), "a"),
        (lambda: make_kts(LAYOUT[:1]), "c"),
        (lambda: make_kts(LAYOUT[1:]), "a"),
        (lambda: make_kts([]), "a"),
        (lambda: make_kts([([], []), ([], [])]), "a"),
    ],
    ids=["renamed", "last input missing", "first input missing", "no inputs", "no keys"],
)
def test_a_missing_key_is_an_error(warm: bool, kts: Callable[[], Kts], missing: str) -> None:
    m = module()
    if warm:
        m(make_kts())
    with pytest.raises(KeyError, match=f"key '{missing}', named by groups"):
        m(kts())
    assert_regroups(m, make_kts(grad=True))


def test_fewer_inputs_are_enough_when_they_hold_every_used_key() -> None:
    m = module([["b"]])
    assert_regroups(m, make_kts([(["a"], [2]), (["b"], [2])], grad=True), [["b"]])
    assert_regroups(m, make_kts([(["b"], [2])], grad=True), [["b"]])


def test_shrunk_widths_read_no_other_row_and_nothing_behind_the_tensor() -> None:
    m = module([["a", "b"]])
    m([KeyedTensor(["a", "b"], [3, 5], torch.zeros(2, 8))])
    memory = torch.arange(100.0)
    out = m([KeyedTensor(["a", "b"], [1, 1], memory[:4].view(2, 2))])["out0"]
    assert out.tolist() == [[0, 1], [2, 3]]


def test_shrunk_widths_write_no_gradient_behind_the_tensor() -> None:
    m = module([["a", "b"]])
    m(make_kts([(["a", "b"], [40, 50])], grad=True))["out0"].sum().backward()
    for _ in range(20):
        values = torch.ones(2, 2, requires_grad=True)
        m([KeyedTensor(["a", "b"], [1, 1], values)])["out0"].sum().backward()
        assert values.grad is not None
        assert values.grad.tolist() == [[1, 1], [1, 1]]


def test_a_huge_plan_followed_by_a_small_input() -> None:
    m = module([["a"]])
    meta = KeyedTensor(["a"], [80_000_000], torch.empty(1, 80_000_000, device="meta"))
    assert m([meta])["out0"].shape == (1, 80_000_000)
    assert_regrouped(m([small := KeyedTensor(["a"], [2], torch.randn(1, 2))]), [small], [["a"]])


@pytest.mark.parametrize("other", OTHER_INPUTS)
def test_an_alternating_module_keeps_both_plans(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m = module()
    first, second = make_kts(), OTHER_INPUTS[other]()
    m(first)
    m(second)

    def build(*_: Any, **__: Any) -> Any:
        raise AssertionError("a plan is built although it is known")

    monkeypatch.setattr(torchrec_kt.ops.RegroupPlan, "build", build)
    for _ in range(3):
        assert_regrouped(m(first), first)
        assert_regrouped(m(second), second)


def test_many_layouts_in_turn_keep_the_cache_small_and_the_results_right() -> None:
    m = module()
    layouts: list[Layout] = [[(["a", "b"], [n, 5]), (["c", "d"], [2, n])] for n in range(1, 60)]
    for _ in range(2):
        for layout in layouts:
            assert_regroups(m, make_kts(layout, 2, grad=True))
    assert len(m._plans) < len(layouts)


def test_editing_the_lists_of_a_keyed_tensor_in_place_is_seen() -> None:
    m = module()
    keys, widths = ["a", "b"], [3, 5]
    kts = [KeyedTensor(keys, widths, torch.randn(3, 8)), *make_kts(LAYOUT[1:])]
    assert_regrouped(m(kts), kts)
    keys[:] = ["b", "a"]
    assert_regrouped(m(kts), kts)
    widths[:] = [2, 6]
    assert_regrouped(m(kts), kts)
    keys[0] = "z"
    with pytest.raises(KeyError, match="'b'"):
        m(kts)


@pytest.mark.parametrize("warm", [False, True])
def test_editing_the_lists_of_the_constructor_changes_nothing(warm: bool) -> None:
    groups, names = [list(group) for group in GROUPS], list(NAMES)
    m = KTRegroupAsDict(groups, names)
    if warm:
        m(make_kts())
    groups[0].append("d")
    groups.append(["a"])
    names[0] = "other"
    kts = make_kts()
    out = m(kts)
    assert list(out) == NAMES
    assert_regrouped(out, kts)
    assert_regrouped(torch.jit.script(m)(kts), kts)


# --- inputs that contradict themselves --------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: [*make_kts(LAYOUT[:1], 7), *make_kts(LAYOUT[1:], 3)],
            ValueError,
            r"values\[1\] has shape \(3, 6\), values\[0\] has \(7, 8\)",
        ),
        (
            lambda: [*make_kts(LAYOUT[:1], 1), *make_kts(LAYOUT[1:], 3)],
            ValueError,
            r"values\[1\] has shape \(3, 6\), values\[0\] has \(1, 8\)",
        ),
        (
            lambda: [KeyedTensor(["a", "b"], [3, 5], torch.randn(3, 6)), *make_kts(LAYOUT[1:])],
            ValueError,
            r"values\[0\] has shape \(3, 6\), 6 columns.* add up to 8",
        ),
        (
            lambda: [KeyedTensor(["a", "b", "e"], [3, 5], torch.randn(3, 8)), *make_kts(LAYOUT[1:])],
            ValueError,
            "3 keys but 2 widths",
        ),
        (
            lambda: [KeyedTensor(["a", "b"], [3, 5, 1], torch.randn(3, 9)), *make_kts(LAYOUT[1:])],
            ValueError,
            "2 keys but 3 widths",
        ),
        (
            lambda: [KeyedTensor(["a", "b"], [10, -2], torch.randn(3, 8)), *make_kts(LAYOUT[1:])],
            ValueError,
            "width of key 'b'.* is -2",
        ),
        (
            lambda: [*make_kts(LAYOUT[:1]), *make_kts(LAYOUT[1:], rank=3)],
            ValueError,
            r"values\[1\] has shape \(3, 6, 3\), values\[0\] has \(3, 8\)",
        ),
        (
            lambda: [*make_kts(LAYOUT[:1]), KeyedTensor(["c", "d"], [2, 4], torch.randn(6, 3), 0)],
            ValueError,
            r"keyed_tensors\[1\] has key_dim 0, keyed_tensors\[0\] has 1",
        ),
        (
            lambda: (
                make_kts([(["a", "b"], [3, 5]), (["c", "d"], [2, 4])], key_dim=0, batch=3)[:1]
                + make_kts(LAYOUT[1:], 3)
            ),
            ValueError,
            r"keyed_tensors\[1\] has key_dim 1, keyed_tensors\[0\] has 0",
        ),
        (
            lambda: [KeyedTensor(list(k), list(w), torch.randn(3, sum(w)), 2) for k, w in LAYOUT],
            ValueError,
            r"key_dim is 2, but values\[0\] has shape \(3, 8\)",
        ),
        (
            lambda: [KeyedTensor(list(k), list(w), torch.randn(3, sum(w)), -3) for k, w in LAYOUT],
            ValueError,
            r"key_dim is -3, but values\[0\] has shape \(3, 8\)",
        ),
        (
            lambda: [KeyedTensor(list(k), list(w), torch.tensor(1.0)) for k, w in LAYOUT],
            ValueError,
            r"key_dim is 1, but values\[0\] has shape \(\)",
        ),
        (
            lambda: [
                *make_kts(LAYOUT[:1]),
                KeyedTensor(["c", "d"], [2, 4], torch.randn(3, 6, device="meta")),
            ],
            ValueError,
            r"values\[1\] is on meta, values\[0\] on cpu",
        ),
    ],
    ids=[
        "batches differ",
        "batch one is not broadcast",
        "values too narrow",
        "more keys than widths",
        "fewer keys than widths",
        "negative width",
        "ranks differ",
        "key_dims differ",
        "key_dims differ, other way",
        "key_dim too large",
        "key_dim too small",
        "scalar values",
        "devices differ",
    ],
)
def test_contradictory_inputs_raise_and_leave_the_module_usable(
    warm: bool, make: Callable[[], Kts], error: type[Exception], message: str
) -> None:
    m = module()
    if warm:
        m(make_kts())
    with pytest.raises(error, match=message):
        m(make())
    assert_regroups(m, make_kts(grad=True))


@pytest.mark.parametrize("warm", [False, True])
def test_sparse_values_are_an_error(warm: bool) -> None:
    m = module()
    if warm:
        m(make_kts())
    kts = [KeyedTensor(["a", "b"], [3, 5], torch.randn(3, 8).to_sparse()), *make_kts(LAYOUT[1:])]
    with pytest.raises(ValueError, match=r"values\[0\] is not a strided tensor"):
        m(kts)
    assert_regroups(m, make_kts(grad=True))


def test_unused_inputs_may_be_of_any_shape_and_device() -> None:
    m = module([["a"], ["b"]])
    kts = [
        *make_kts(LAYOUT[:1], grad=True),
        KeyedTensor(["c"], [2], torch.randn(9, 2)),
        KeyedTensor(["d"], [4], torch.randn(3, 4, device="meta")),
        KeyedTensor(["e"], [4], torch.randn(4, 3), 0),
        KeyedTensor(["f"], [4], torch.randint(9, (3, 4))),
    ]
    assert_regroups(m, kts, [["a"], ["b"]])


def test_a_key_dim_outside_the_values_is_an_error_beside_one_inside() -> None:
    kts = [KeyedTensor(["a", "b"], [3, 5], torch.randn(3, 8), 3), *make_kts(LAYOUT[1:])]
    with pytest.raises(ValueError, match="key_dim"):
        module()(kts)


# --- key_dim and rank -------------------------------------------------------------------------------

AXES = [
    (1, 0), (1, -1),
    (2, 0), (2, 1), (2, -1), (2, -2),
    (3, 0), (3, 1), (3, 2), (3, -1), (3, -2),
    (4, 0), (4, 1), (4, 2), (4, 3), (4, -1),
]  # fmt: skip


@pytest.mark.parametrize("groups", [GROUPS, REPEATED, OMITTED, [[], ["d", "a"]]], ids=str)
@pytest.mark.parametrize(("rank", "key_dim"), AXES)
def test_every_key_dim_of_every_rank(rank: int, key_dim: int, groups: list[list[str]]) -> None:
    m = module(groups)
    assert_regroups(m, make_kts(rank=rank, key_dim=key_dim, grad=True), groups)
    assert_regroups(m, make_kts(batch=2, rank=rank, key_dim=key_dim, grad=True), groups)


def test_three_dimensional_values_keep_their_last_dimension() -> None:
    values = torch.randn(2, 5, 3)
    out = module([["a"], ["b"]])([KeyedTensor(["a", "b"], [2, 3], values)])
    assert torch.equal(out["out0"], values[:, :2])
    assert torch.equal(out["out1"], values[:, 2:])


def test_key_dims_that_name_the_same_dimension_go_together() -> None:
    kts = [*make_kts(LAYOUT[:1], grad=True), *make_kts(LAYOUT[1:], key_dim=-1, grad=True)]
    assert_regroups(module(), kts)
    assert_regroups(module(), kts[::-1])


# --- keys and groups --------------------------------------------------------------------------------


def test_an_unknown_key_is_named_with_its_group_and_what_is_near() -> None:
    kts = make_kts([(["user_id", "user_age"], [3, 5]), (["item"], [2])])
    with pytest.raises(KeyError) as caught:
        module([["item"], ["user_ids"]])(kts)
    message = str(caught.value)
    assert "'user_ids'" in message
    assert "groups[1]" in message
    assert "'user_id'" in message


def test_an_unknown_key_that_is_near_nothing_lists_the_known_ones() -> None:
    with pytest.raises(KeyError) as caught:
        module([["zzzzzz"]])(make_kts())
    message = str(caught.value)
    assert "'zzzzzz'" in message
    assert all(repr(key) in message for key in "abcd")


@pytest.mark.parametrize(
    "layout",
    [[(["a", "b"], [3, 5]), (["a", "d"], [2, 4])], [(["a", "a", "b"], [3, 3, 2]), (["d"], [4])]],
    ids=["in two inputs", "in one input"],
)
@pytest.mark.parametrize("key_dim", [0, 1])
def test_a_used_key_that_appears_twice_is_an_error(layout: Layout, key_dim: int) -> None:
    m = module([["d"], ["a"]])
    with pytest.raises(
        ValueError, match=r"key 'a', used by groups\[1\], appears more than once: input 0.*input"
    ):
        m(make_kts(layout, key_dim=key_dim))
    assert_regroups(m, make_kts([(["a", "d"], [2, 4])]), [["d"], ["a"]])


@pytest.mark.parametrize("key_dim", [0, 1])
def test_an_unused_key_may_appear_twice(key_dim: int) -> None:
    kts = make_kts([(["a", "z", "b"], [3, 1, 5]), (["z", "d"], [2, 4])], key_dim=key_dim, grad=True)
    assert_regroups(module([["d", "a"], ["b"]]), kts, [["d", "a"], ["b"]])


@pytest.mark.parametrize("names", [["x"], ["x", "y", "z"], []])
def test_as_many_names_as_groups(names: list[str]) -> None:
    with pytest.raises(ValueError, match=f"2 groups and {len(names)} keys"):
        KTRegroupAsDict(GROUPS, names)


def test_a_repeated_output_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="'x' is given more than once"):
        KTRegroupAsDict(GROUPS, ["x", "x"])


@pytest.mark.parametrize("groups", [["ab", "cd"], [["a"], "b"], "ab"], ids=str)
def test_a_group_that_is_a_string_is_an_error(groups: Any) -> None:
    with pytest.raises(TypeError, match="string"):
        KTRegroupAsDict(groups, NAMES)


@pytest.mark.parametrize("groups", [[[], ["a", "b"]], [["a"], []], [[], []], [["d"], [], ["a"], []]], ids=str)
@pytest.mark.parametrize("batch", [0, 3])
def test_empty_groups(groups: list[list[str]], batch: int) -> None:
    m = module(groups)
    kts = make_kts(batch=batch, grad=True)
    out = m(kts)
    assert_regrouped(out, kts, groups)
    grads = gradients(out, values_of(kts))
    assert same(
        grads, gradients([t for t in reference(kts, groups) if t.requires_grad] or out, values_of(kts))
    )


def test_no_groups() -> None:
    assert KTRegroupAsDict([], [])(make_kts()) == {}
    assert KTRegroupAsDict([], [])([]) == {}


def test_no_inputs_but_an_empty_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="got no value tensors"):
        module([[]])([])


def test_all_widths_zero() -> None:
    kts = make_kts([(["a", "b"], [0, 0])], grad=True)
    out = module([["b", "a"], ["a"]])(kts)
    assert [tuple(t.shape) for t in out.values()] == [(3, 0), (3, 0)]
    assert gradients(out, values_of(kts))[0].shape == (3, 0)


def test_inputs_without_keys_beside_others() -> None:
    kts = make_kts([([], []), *LAYOUT, ([], [])], grad=True)
    assert_regroups(module(), kts)


def test_keys_that_are_no_strings() -> None:
    groups: Any = [[3, 1], [2]]
    assert_regroups(module(groups), make_kts([([1, 2], [3, 5]), ([3], [2])], grad=True), groups)  # pyright: ignore[reportArgumentType]


def test_groups_and_keys_and_widths_that_are_tuples() -> None:
    kts = [KeyedTensor(tuple(k), tuple(w), torch.randn(3, sum(w))) for k, w in LAYOUT]  # pyright: ignore[reportArgumentType]
    m = KTRegroupAsDict(tuple(map(tuple, GROUPS)), tuple(NAMES))  # pyright: ignore[reportArgumentType]
    for _ in range(2):
        assert_regrouped(m(kts), kts)
    assert_regroups(m, make_kts(SWAPPED))


def test_hundreds_of_keys_of_width_one() -> None:
    names = [f"k{i}" for i in range(300)]
    assert_regroups(module([names[::-1]]), make_kts([(names, [1] * 300)], 2, grad=True), [names[::-1]])


# --- containers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", [list, tuple])
def test_lists_and_tuples_of_keyed_tensors(container: Callable[[Kts], Any]) -> None:
    kts = make_kts(grad=True)
    m = module()
    for _ in range(2):
        assert_regroups(lambda given: m(container(given)), kts)


@pytest.mark.parametrize("groups", [GROUPS, REPEATED, OMITTED], ids=["once", "repeated", "omitted"])
def test_objects_that_answer_like_keyed_tensors(groups: list[list[str]]) -> None:
    m = module(groups)
    for kts in (make_kts(grad=True), make_kts(SWAPPED, grad=True), make_kts(key_dim=0, grad=True)):
        assert_regroups(lambda given: m([LikeKeyedTensor(kt) for kt in given]), kts, groups)  # pyright: ignore[reportArgumentType]
        assert_regroups(lambda given: m([given[0], LikeKeyedTensor(given[1])]), kts, groups)  # pyright: ignore[reportArgumentType]


def test_awaitables() -> None:
    m = module(REPEATED)
    for kts in (make_kts(grad=True), make_kts(SWAPPED, grad=True), make_kts(key_dim=0, grad=True)):
        assert_regroups(lambda given: m([Late(kt) for kt in given]), kts, REPEATED)  # pyright: ignore[reportArgumentType]


def test_a_subclass_of_keyed_tensor_is_asked_and_not_looked_into() -> None:
    class Doubled(KeyedTensor):
        def values(self) -> torch.Tensor:
            return 2 * super().values()

    kts = make_kts()
    doubled: Kts = [Doubled(kt.keys(), kt.length_per_key(), kt.values()) for kt in kts]
    twice = [KeyedTensor(kt.keys(), kt.length_per_key(), 2 * kt.values()) for kt in kts]
    assert_regrouped(module()(doubled), twice)
    assert_regrouped(module()([doubled[0], twice[1]]), twice)


@pytest.mark.parametrize("warm", [False, True])
def test_a_single_keyed_tensor_is_a_type_error(warm: bool) -> None:
    m = module([["a"]])
    if warm:
        m(make_kts())
    with pytest.raises(TypeError, match=r"KeyedTensor.*expected a list|single KeyedTensor"):
        m(make_kts()[0])  # pyright: ignore[reportArgumentType]
    assert_regrouped(m(kts := make_kts()), kts, [["a"]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([None], r"keyed_tensors\[0\] is a NoneType"),
        ([torch.randn(3, 8)], r"keyed_tensors\[0\] is a Tensor"),
        ({"a": 1}, "keyed_tensors"),
        (None, "keyed_tensors|NoneType"),
        (5, "keyed_tensors|int"),
    ],
    ids=["list of None", "list of tensors", "dict", "None", "number"],
)
def test_other_things_are_type_errors(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        module()(given)


def test_the_argument_may_be_named() -> None:
    kts = make_kts()
    assert_regrouped(module()(keyed_tensors=kts), kts)


# --- threads ----------------------------------------------------------------------------------------


def test_first_calls_from_many_threads_at_once() -> None:
    workers = 8
    inputs = [make_kts(), make_kts(SWAPPED), make_kts(LAYOUT[::-1], 5), make_kts(key_dim=0)]
    expected = [reference(kts, GROUPS) for kts in inputs]
    state: dict[str, Any] = {}
    barrier = threading.Barrier(workers)

    def work(worker: int) -> list[str]:
        wrong: list[str] = []
        for turn in range(80):
            if barrier.wait() == 0:
                state["module"] = module(layout=LAYOUT if turn % 2 else None)
            barrier.wait()
            for call in range(3):
                case = (worker + call + turn) % len(inputs)
                if not same(state["module"](inputs[case]).values(), expected[case]):
                    wrong.append(f"round {turn}, worker {worker}, input {case}")
        return wrong

    with ThreadPoolExecutor(workers) as pool:
        found = [result.result(timeout=120) for result in [pool.submit(work, n) for n in range(workers)]]
    assert found == [[]] * workers
    kts = make_kts()
    state["module"](kts)
    assert_regrouped(torch.jit.script(state["module"])(kts), kts)


def test_training_from_many_threads_at_once() -> None:
    m = module(REPEATED)
    layouts = [LAYOUT, SWAPPED, LAYOUT[::-1]]

    def work(worker: int) -> None:
        for turn in range(30):
            assert_regroups(m, make_kts(layouts[(worker + turn) % 3], 1 + turn % 5, grad=True), REPEATED)

    with ThreadPoolExecutor(8) as pool:
        for result in [pool.submit(work, n) for n in range(8)]:
            result.result(timeout=120)
    assert_regroups(m, make_kts(grad=True), REPEATED)


def test_any_number_of_torch_threads() -> None:
    before = torch.get_num_threads()
    kts = make_kts(batch=6, grad=True)
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            assert_regroups(module(REPEATED), kts, REPEATED)
    finally:
        torch.set_num_threads(before)


# --- size -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["once", "ten random keys each", "one group"])
def test_five_hundred_inputs(kind: str) -> None:
    layout: Layout = [([f"k{i}_{j}" for j in range(3)], [2, 1, 3]) for i in range(500)]
    names = [key for keys, _ in layout for key in keys]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(names), generator=generator).tolist()
    shuffled = [names[i] for i in order]
    if kind == "once":
        groups = [shuffled[i : i + 3] for i in range(0, 1500, 3)]
    elif kind == "one group":
        groups = [shuffled]
    else:
        picks = torch.randint(0, 1500, (500, 10), generator=generator).tolist()
        groups = [[names[i] for i in row] for row in picks]
    with uninitialised_is_nan():
        assert_regroups(module(groups), make_kts(layout, 16, grad=True), groups)


def test_five_thousand_keys() -> None:
    layout, names = layout_of(5000, 2)
    assert_regroups(module([names[::-1]]), make_kts(layout, 8, grad=True), [names[::-1]])


def test_a_very_wide_key_and_a_very_large_batch() -> None:
    wide: Layout = [(["a", "b"], [70_000, 3])]
    assert_regroups(module([["b", "a"]]), make_kts(wide, 3, grad=True), [["b", "a"]])
    tall: Layout = [(["a", "b"], [2, 3])]
    assert_regroups(module([["b", "a"]]), make_kts(tall, 200_000, grad=True), [["b", "a"]])


def test_wide_outputs_use_every_byte() -> None:
    # Above the size from which outputs are placed on huge pages.
    layout, names = layout_of(40, 96)
    batch = math.ceil((5 << 20) / 4 / (40 * 96))
    groups = [names[::-1], names[::7]]
    with uninitialised_is_nan():
        assert_regroups(module(groups), make_kts(layout, batch, grad=True), groups)


def test_random_values_helper_covers_booleans() -> None:
    assert set(random_values((100,), torch.bool).tolist()) == {False, True}
