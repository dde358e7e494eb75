"""``regroup`` and ``regroup_as_dict``: right answers, the bounded cache of plans, and graphs of them."""

from __future__ import annotations

import copy
import io
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torchrec.fx
from hypothesis import given
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torchrec.sparse.jagged_tensor import KeyedTensor

import torchrec_kt
from torchrec_kt.modules import functional
from torchrec_kt.modules.functional import regroup, regroup_as_dict

from ..reference import poison
from .helpers import (
    GROUPS,
    LAYOUT,
    NAMES,
    OMITTED,
    OTHER_INPUTS,
    REPEATED,
    SIZES,
    SWAPPED,
    Kts,
    Late,
    Layout,
    LikeKeyedTensor,
    assert_regrouped,
    assert_regroups,
    cases,
    gradients,
    layout_of,
    make_kts,
    on_meta,
    reference,
    same,
    through_a_file,
    uninitialised_is_nan,
    values_of,
    whole_weights,
)
from .models import AsDict, AsList, FromTensors, scripted_as_dict

ALL_GROUPS = pytest.mark.parametrize(
    "groups", [GROUPS, REPEATED, OMITTED, [[], ["d"]]], ids=["once", "repeated", "omitted", "empty"]
)


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    functional._plans.clear()
    yield
    functional._plans.clear()


def both_ways(groups: list[list[str]]) -> list[Callable[[Kts], Any]]:
    names = [f"out{i}" for i in range(len(groups))]
    return [lambda kts: regroup(kts, groups), lambda kts: regroup_as_dict(kts, groups, names)]


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["regroup", "regroup_as_dict"])
def test_the_public_names_are_the_functions(name: str) -> None:
    for where in (torchrec_kt, torchrec_kt.modules, functional):
        assert isinstance(getattr(where, name), types.FunctionType)
        assert getattr(where, name) is getattr(functional, name)
    assert name in torchrec_kt.__all__
    assert name in dir(torchrec_kt)


# --- right answers --------------------------------------------------------------------------------


@ALL_GROUPS
@pytest.mark.parametrize("case", OTHER_INPUTS)
def test_every_input(case: str, groups: list[list[str]]) -> None:
    for call in both_ways(groups):
        for _ in range(2):
            assert_regroups(call, OTHER_INPUTS[case](), groups)
        assert_regroups(call, make_kts(grad=True), groups)


@given(cases())
def test_equal_to_torchrec_and_to_slices(case: Any) -> None:
    kts = case.make(grad=True)
    found, theirs = regroup(kts, case.groups), KeyedTensor.regroup(kts, case.groups)
    assert_regrouped(found, kts, case.groups)
    assert same(found, theirs)
    assert [t.requires_grad for t in found] == [t.requires_grad for t in theirs]
    weights = whole_weights(theirs)
    assert same(gradients(found, values_of(kts), weights), gradients(theirs, values_of(kts), weights))
    named = regroup_as_dict(kts, case.groups, case.names)
    assert list(named) == case.names
    assert same(named.values(), found)


@pytest.mark.parametrize(
    ("shape", "key_dim"), [((8, 7), 0), ((8,), 0), ((2, 7, 8), 2), ((2, 7, 8), -1), ((2, 8, 7), 1)], ids=str
)
def test_key_dims_that_torchrec_refuses_when_every_key_is_used_once(
    shape: tuple[int, ...], key_dim: int
) -> None:
    kts: Kts = []
    for keys, widths in LAYOUT:
        sizes = list(shape)
        sizes[key_dim] = sum(widths)
        kts.append(KeyedTensor(list(keys), list(widths), torch.randn(sizes, requires_grad=True), key_dim))
    for groups in (GROUPS, REPEATED):
        assert_regroups(lambda given, g=groups: regroup(given, g), kts, groups)


def test_no_groups_and_empty_groups() -> None:
    assert regroup([], []) == []
    assert regroup_as_dict([], [], []) == {}
    assert regroup(make_kts(), []) == []
    assert [tuple(t.shape) for t in regroup(make_kts(), [[], []])] == [(3, 0), (3, 0)]


@pytest.mark.parametrize("batch", [3, 256])
def test_outputs_are_contiguous_and_alias_nothing(batch: int) -> None:
    kts = make_kts(batch=batch, grad=True)
    for groups in (GROUPS, [["a", "b"], ["a"]]):
        outs = regroup(kts, groups)
        assert all(t.is_contiguous() for t in outs)
        assert len({t.untyped_storage().data_ptr() for t in [*outs, *values_of(kts)]}) == 4
        kept = [t.detach().clone() for t in outs]
        outs[0].mul_(2)
        assert torch.equal(outs[0], kept[0] * 2)
        assert torch.equal(outs[1], kept[1])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_omitted_features_have_zero_gradients_in_poisoned_memory(size: tuple[int, int, int]) -> None:
    batch, keys, width = size
    layout, names = layout_of(keys, width)
    groups = [names[1::2][::-1], [names[1]] * 2]
    for _ in range(3):
        kts = make_kts(layout, batch, grad=True)
        outs = regroup(kts, groups)
        poison(*values_of(kts), copies=4)
        expected = gradients(reference(kts, groups), values_of(kts))
        poison(*values_of(kts), copies=4)
        assert same(gradients(outs, values_of(kts)), expected)


def test_nothing_uninitialised_reaches_outputs_or_gradients() -> None:
    with uninitialised_is_nan():
        for groups in (GROUPS, REPEATED, OMITTED):
            assert_regroups(lambda kts, g=groups: regroup(kts, g), make_kts(padding=2, grad=True), groups)


def test_gradients_of_a_thousand_uses_do_not_stall() -> None:
    values = torch.randn(2, 4).bfloat16().requires_grad_()
    (out,) = regroup([KeyedTensor(["a", "b"], [3, 1], values)], [["a"] * 1024 + ["b"]])
    assert gradients([out], [values])[0].tolist() == [[1024.0] * 3 + [1.0]] * 2


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: regroup(make_kts(), [["a", "zz"]]), KeyError, r"key 'zz', named by groups\[0\].*'a', 'b', 'c', 'd'"),
        (lambda: regroup(make_kts([]), [["a"]]), KeyError, "no keys at all"),
        (lambda: regroup([], [[]]), ValueError, "no value tensors"),
        (
            lambda: regroup(make_kts([(["a", "b"], [3, 5]), (["a"], [2])]), [["a"]]),
            ValueError,
            r"key 'a', used by groups\[0\], appears more than once: input 0.*input 1",
        ),
        (lambda: regroup_as_dict(make_kts(), GROUPS, ["x", "x"]), ValueError, "'x' is given more than once"),
        (lambda: regroup_as_dict(make_kts(), GROUPS, ["x"]), ValueError, "2 groups and 1 keys"),
        (lambda: regroup(make_kts(), ["a", "b"]), TypeError, "string"),  # pyright: ignore[reportArgumentType]
        (lambda: regroup(make_kts(), "ab"), TypeError, "string"),  # pyright: ignore[reportArgumentType]
        (lambda: regroup(make_kts()[0], GROUPS), TypeError, "KeyedTensor.*list|list.*KeyedTensor"),  # pyright: ignore[reportArgumentType]
        (lambda: regroup([None], GROUPS), TypeError, r"keyed_tensors\[0\] is a NoneType"),  # pyright: ignore[reportArgumentType]
        (lambda: regroup([torch.randn(3, 8)], GROUPS), TypeError, r"keyed_tensors\[0\] is a Tensor"),  # pyright: ignore[reportArgumentType]
        (
            lambda: regroup([*make_kts(LAYOUT[:1], 7), *make_kts(LAYOUT[1:], 3)], GROUPS),
            ValueError,
            r"values\[1\] has shape \(3, 6\), values\[0\] has \(7, 8\)",
        ),
        (
            lambda: regroup([KeyedTensor(["a"], [8], torch.randn(3, 6))], [["a"]]),
            ValueError,
            r"\(3, 6\), 6 columns.* add up to 8",
        ),
        (lambda: regroup([KeyedTensor(["a", "b"], [8], torch.randn(3, 8))], [["a"]]), ValueError, "2 keys but 1 widths"),
        (lambda: regroup([KeyedTensor(["a"], [8, 1], torch.randn(3, 9))], [["a"]]), ValueError, "1 keys but 2 widths"),
        (lambda: regroup([KeyedTensor(["a", "b"], [10, -2], torch.randn(3, 8))], [["a"]]), ValueError, "is -2"),
        (
            lambda: regroup([*make_kts(LAYOUT[:1]), *make_kts(LAYOUT[1:], key_dim=0)], GROUPS),
            ValueError,
            r"keyed_tensors\[1\] has key_dim 0, keyed_tensors\[0\] has 1",
        ),
        (
            lambda: regroup([*make_kts(LAYOUT[:1]), *on_meta(make_kts(LAYOUT[1:]))], GROUPS),
            ValueError,
            r"values\[1\] is on meta, values\[0\] on cpu",
        ),
    ],
    ids=[
        "unknown key", "no inputs", "no inputs, empty group", "repeated key", "repeated name", "too few names",
        "string group", "string groups", "single KeyedTensor", "list of None", "list of tensors", "batches differ",
        "too narrow", "more keys than widths", "fewer keys than widths", "negative width", "key_dims differ",
        "devices differ",
    ],
)  # fmt: skip
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    for _ in range(2):
        with pytest.raises(error, match=message):
            call()
    assert_regroups(lambda kts: regroup(kts, GROUPS), make_kts(grad=True))


# --- the cache of plans ---------------------------------------------------------------------------


def test_a_known_plan_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = list(OTHER_INPUTS.values())
    for make in makers:
        regroup(make(), GROUPS)

    def build(*_: Any, **__: Any) -> Any:
        raise AssertionError("a plan is built although it is known")

    monkeypatch.setattr(torchrec_kt.ops.RegroupPlan, "build", build)
    for make in makers * 2:
        assert_regroups(lambda kts: regroup(kts, copy.deepcopy(GROUPS)), make())


def test_the_cache_is_bounded_and_what_fell_out_is_built_again() -> None:
    size = functional._plans._size
    layouts: list[Layout] = [[(["a", "b"], [n, 5]), (["c", "d"], [2, n])] for n in range(1, 2 * size + 10)]
    for _ in range(2):
        for layout in layouts:
            assert_regroups(lambda kts: regroup(kts, GROUPS), make_kts(layout, 2, grad=True))
            assert len(functional._plans) <= size
    assert len(functional._plans) == size


def test_plans_in_use_stay_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    build = torchrec_kt.ops.RegroupPlan.build

    def noting(**arguments: Any) -> Any:
        built.append(arguments["groups"])
        return build(**arguments)

    monkeypatch.setattr(torchrec_kt.ops.RegroupPlan, "build", noting)
    kts = make_kts()
    for n in range(3 * functional._plans._size):
        assert_regrouped(regroup(kts, GROUPS), kts)
        regroup(make_kts([(["e"], [n])]), [["e"]])
    assert built.count(GROUPS) == 1


def test_layouts_and_groups_in_turn() -> None:
    inputs = [make_kts(grad=True), make_kts(SWAPPED, grad=True), make_kts(LAYOUT[::-1], 5, grad=True)]
    for _ in range(3):
        for kts in inputs:
            for groups in (GROUPS, REPEATED, OMITTED):
                assert_regroups(lambda given, g=groups: regroup(given, g), kts, groups)


def test_editing_the_lists_of_a_keyed_tensor_in_place_is_seen() -> None:
    keys, widths = ["a", "b"], [3, 5]
    kts = [KeyedTensor(keys, widths, torch.randn(3, 8)), *make_kts(LAYOUT[1:])]
    assert_regrouped(regroup(kts, GROUPS), kts)
    keys[:] = ["b", "a"]
    assert_regrouped(regroup(kts, GROUPS), kts)
    widths[:] = [2, 6]
    assert_regrouped(regroup(kts, GROUPS), kts)
    keys[0] = "z"
    with pytest.raises(KeyError, match="'b'"):
        regroup(kts, GROUPS)


def test_editing_the_groups_in_place_is_seen() -> None:
    kts = make_kts()
    groups = [list(group) for group in GROUPS]
    assert_regrouped(regroup(kts, groups), kts, groups)
    groups[0].append("b")
    assert_regrouped(regroup(kts, groups), kts, groups)
    groups[0], groups[1] = groups[1], groups[0]
    assert_regrouped(regroup(kts, groups), kts, groups)
    groups.append(["a"])
    assert_regrouped(regroup(kts, groups), kts, groups)
    del groups[0]
    assert_regrouped(regroup(kts, groups), kts, groups)
    groups[0][0] = "zz"
    with pytest.raises(KeyError, match="'zz'"):
        regroup(kts, groups)


def test_names_are_no_part_of_the_plan() -> None:
    kts = make_kts()
    names = list(NAMES)
    assert list(regroup_as_dict(kts, GROUPS, names)) == ["x", "y"]
    names.reverse()
    out = regroup_as_dict(kts, GROUPS, names)
    assert list(out) == ["y", "x"]
    assert_regrouped(out, kts)


def test_tuples_are_as_good_as_lists() -> None:
    kts = make_kts()
    groups: Any = tuple(map(tuple, GROUPS))
    tupled: Any = tuple(KeyedTensor(tuple(k), tuple(w), kt.values()) for (k, w), kt in zip(LAYOUT, kts))  # pyright: ignore[reportArgumentType]
    for _ in range(2):
        assert_regrouped(regroup(tupled, groups), kts)
        assert_regrouped(regroup(kts, groups), kts)
        assert_regrouped(regroup_as_dict(tupled, groups, tuple(NAMES)), kts)  # pyright: ignore[reportArgumentType]
        assert_regrouped(regroup(tupled, GROUPS), kts)


def test_objects_that_answer_like_keyed_tensors() -> None:
    for make in OTHER_INPUTS.values():
        for kind in (LikeKeyedTensor, Late):
            assert_regroups(lambda kts, k=kind: regroup([k(kt) for kt in kts], GROUPS), make())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("how", ["meta", "fake", "no_grad", "inference_mode"])
def test_a_first_call_without_data_or_gradients_leaves_nothing_behind(how: str) -> None:
    if how == "meta":
        assert [t.device.type for t in regroup(on_meta(make_kts()), REPEATED)] == ["meta"] * 2
    elif how == "fake":
        with FakeTensorMode():
            assert all(isinstance(t, FakeTensor) for t in regroup(make_kts(), REPEATED))
    else:
        with getattr(torch, how)():
            kts = make_kts()
            assert_regrouped(regroup(kts, REPEATED), kts, REPEATED)
    assert_regroups(lambda kts: regroup(kts, REPEATED), make_kts(grad=True), REPEATED)


def test_many_threads_at_once() -> None:
    layouts: list[Layout] = [LAYOUT, SWAPPED, LAYOUT[::-1]]

    def work(worker: int) -> None:
        for turn in range(60):
            if worker == 0:
                functional._plans.clear()
            layout = layouts[(worker + turn) % 3]
            groups = (GROUPS, REPEATED, OMITTED)[turn % 3]
            assert_regroups(
                lambda kts, g=groups: regroup(kts, g), make_kts(layout, 1 + turn % 4, grad=True), groups
            )

    with ThreadPoolExecutor(8) as pool:
        for result in [pool.submit(work, n) for n in range(8)]:
            result.result(timeout=120)
    assert len(functional._plans) <= 9


# --- graphs ---------------------------------------------------------------------------------------


MODELS = pytest.mark.parametrize("model", [AsDict, AsList])
TRACERS = pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, torchrec.fx.symbolic_trace])


@MODELS
def test_scripts(model: Callable[[], nn.Module]) -> None:
    scripted = torch.jit.script(model())
    for call in (scripted, through_a_file(scripted)):
        for batch in (7, 3, 0, 1):
            assert_regroups(call, make_kts(batch=batch, grad=True), REPEATED)
        for case in (
            "keys swapped",
            "inputs swapped",
            "widths changed, total kept",
            "one more input",
            "all in one",
        ):
            assert_regroups(call, OTHER_INPUTS[case](), REPEATED)


@MODELS
@TRACERS
def test_traces_follow_their_input(
    trace: Callable[[nn.Module], nn.Module], model: Callable[[], nn.Module]
) -> None:
    traced = trace(model())
    for make in OTHER_INPUTS.values():
        assert_regroups(traced, make(), REPEATED)


@MODELS
@TRACERS
def test_traces_can_be_scripted_and_saved(
    trace: Callable[[nn.Module], nn.Module], model: Callable[[], nn.Module]
) -> None:
    scripted = torch.jit.script(trace(model()))
    for call in (scripted, through_a_file(scripted)):
        for batch in (7, 3, 0):
            assert_regroups(call, make_kts(batch=batch, grad=True), REPEATED)


def test_omitted_features_have_zero_gradients_in_scripts() -> None:
    with uninitialised_is_nan():
        assert_regroups(
            lambda kts: scripted_as_dict(kts, OMITTED, ["x", "y"]), make_kts(batch=4, grad=True), OMITTED
        )


def test_scripts_take_no_inputs_and_no_groups() -> None:
    assert scripted_as_dict([], torch.jit.annotate(list[list[str]], []), []) == {}
    out = scripted_as_dict(make_kts(), [[], ["a"]], ["x", "y"])
    assert [tuple(t.shape) for t in out.values()] == [(3, 0), (3, 3)]


@pytest.mark.parametrize("key_dim", [0, -1])
def test_scripts_take_every_key_dim(key_dim: int) -> None:
    for groups in (GROUPS, REPEATED):
        assert_regroups(
            lambda kts, g=groups: scripted_as_dict(kts, g, NAMES),
            make_kts(key_dim=key_dim, grad=True),
            groups,
        )


@pytest.mark.parametrize("names", [["x", "x"], ["x"], ["x", "y", "z"]], ids=str)
def test_scripts_check_the_names(names: list[str]) -> None:
    with pytest.raises(Exception, match=r"more than once|groups and|as many"):
        scripted_as_dict(make_kts(), GROUPS, names)


def test_scripts_name_an_unknown_key() -> None:
    with pytest.raises(Exception, match="'zz'"):
        scripted_as_dict(make_kts(), [["zz"]], ["x"])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_plan_operator_gives_int32_on_every_device(device: str) -> None:
    def arguments() -> Any:
        keys, widths = [list(k) for k, _ in LAYOUT], [list(w) for _, w in LAYOUT]
        like = torch.empty(0, device=device)
        return torch.ops.torchrec_kt.kt_regroup_arguments(like, keys, widths, REPEATED)

    with FakeTensorMode():
        fake = arguments()
    for found in (arguments(), fake):
        assert [t.dtype for t in found[:3]] == [torch.int32] * 3
        assert [tuple(t.shape) for t in found[:3]] == [(5, 6), (2,), (2,)]
        assert [t.device.type for t in found[:3]] == [device] * 3
        assert found[3] == [8, 9]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_follow_their_input(backend: str) -> None:
    torch._dynamo.reset()
    for groups in (REPEATED, OMITTED):
        compiled = torch.compile(lambda kts, g=groups: regroup(kts, g), fullgraph=True, backend=backend)
        for make in (
            make_kts,
            lambda **_: OTHER_INPUTS["keys swapped"](),
            lambda **_: OTHER_INPUTS["widths grown"](),
        ):
            with uninitialised_is_nan():
                assert_regroups(compiled, make(grad=True), groups)


def test_eager_calls_elsewhere_do_not_recompile_a_graph() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda kts: regroup(kts, GROUPS), fullgraph=True, backend=counter)
    kts = make_kts()
    for n in range(1, 20):
        assert_regrouped(compiled(kts), kts)
        regroup(make_kts([(["e"], [n])]), [["e"]])
    assert counter.frame_count == 1


def test_an_eager_call_before_does_not_change_the_number_of_graphs() -> None:
    counts = []
    for warm in (False, True):
        torch._dynamo.reset()
        functional._plans.clear()
        counter = CompileCounter()
        compiled = torch.compile(lambda kts: regroup(kts, REPEATED), fullgraph=True, backend=counter)
        if warm:
            regroup(make_kts(), REPEATED)
        for batch in (7, 3, 11, 7):
            assert_regroups(compiled, make_kts(batch=batch, grad=True), REPEATED)
        counts.append(counter.frame_count)
    assert counts == [2, 2]


def test_exports_with_a_dynamic_batch() -> None:
    model = FromTensors(lambda kts: regroup(kts, REPEATED))
    batch = torch.export.Dim("batch", min=1, max=1000)
    for strict in (False, True):
        exported = torch.export.export(
            model, tuple(values_of(make_kts())), dynamic_shapes=({0: batch}, {0: batch}), strict=strict
        )
        targets = [str(node.target) for node in exported.graph.nodes]
        assert targets.count("torchrec_kt.regroup.default") == 1
        buffer = io.BytesIO()
        torch.export.save(exported, buffer)
        buffer.seek(0)
        for program in (exported, torch.export.load(buffer)):
            for size in (4, 9, 1, 2):
                kts = make_kts(batch=size)
                assert_regrouped(program.module()(*values_of(kts)), kts, REPEATED)
