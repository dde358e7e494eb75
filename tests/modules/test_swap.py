"""``swap_regroup``: TorchRec's module in an existing model becomes this package's, in place."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrec.fx
from torch import Tensor, nn
from torchrec.modules.regroup import KTRegroupAsDict as TorchRecKTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedTensor
from torchrec.types import CacheMixin, DataType

import torchrec_kt
from torchrec_kt import KTRegroupAsDict, swap_regroup

from .helpers import (
    GROUPS,
    LAYOUT,
    NAMES,
    OMITTED,
    OTHER_INPUTS,
    REPEATED,
    SWAPPED,
    Kts,
    assert_regrouped,
    assert_regroups,
    make_kts,
    on_meta,
    same,
    tensors,
    through_a_file,
    uninitialised_is_nan,
)
from .models import FromTensors, Parent


def theirs(groups: Any = GROUPS, **options: Any) -> TorchRecKTRegroupAsDict:
    return TorchRecKTRegroupAsDict(groups, [f"out{i}" for i in range(len(groups))], **options)


def warm(groups: Any = GROUPS, kts: Kts | None = None, **options: Any) -> TorchRecKTRegroupAsDict:
    m = theirs(groups, **options)
    m(make_kts() if kts is None else kts)
    return m


def swapped(m: nn.Module) -> Any:
    found = swap_regroup(m)
    assert found is m
    return found


# --- what is replaced -----------------------------------------------------------------------------


class Nested(nn.Module):
    """The module in every kind of place, one instance in two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = theirs()
        self.shared = theirs(REPEATED)
        self.by_list = nn.ModuleList([theirs(), nn.Identity(), self.shared])
        self.by_name = nn.ModuleDict({"deep": nn.Sequential(nn.Sequential(theirs(OMITTED)))})
        self.ours = KTRegroupAsDict(GROUPS, NAMES)
        self.unregistered = [self.plain]
        self.dense = nn.Linear(2, 2)


def test_every_instance_is_replaced_and_nothing_else() -> None:
    model = Nested()
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    ours, dense = model.ours, model.dense
    swapped(model)
    found = {n: type(m) for n, m in model.named_modules() if isinstance(m, TorchRecKTRegroupAsDict)}
    assert found == dict.fromkeys(
        ["plain", "shared", "by_list.0", "by_name.deep.0.0", "ours"], KTRegroupAsDict
    )
    assert [name for name, _ in model.named_modules(remove_duplicate=False)] == names
    assert model.ours is ours
    assert model.dense is dense
    assert model.by_list[2] is model.shared
    assert model.unregistered[0] is model.plain
    for m, groups in [(model.plain, GROUPS), (model.shared, REPEATED), (model.by_name["deep"], OMITTED)]:
        for case in ("same", "keys swapped", "inputs swapped", "float64", "empty batch"):
            assert_regroups(m, OTHER_INPUTS[case](), groups)


def test_the_model_itself() -> None:
    m = swapped(theirs(REPEATED))
    assert type(m) is KTRegroupAsDict
    assert_regroups(m, make_kts(grad=True), REPEATED)


def test_a_second_call_finds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = swapped(Nested())
    model.plain(make_kts())
    state = {n: dict(vars(m)) for n, m in model.named_modules()}
    with caplog.at_level(logging.DEBUG, logger="torchrec_kt"):
        caplog.clear()
        swapped(model)
    assert caplog.records == []
    for name, module in model.named_modules():
        assert all(vars(module)[key] is value for key, value in state[name].items()), name


def test_what_is_replaced_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torchrec_kt"):
        swap_regroup(Nested())
        swap_regroup(theirs())
    assert [r.getMessage() for r in caplog.records] == [
        "plain: KTRegroupAsDict replaced",
        "shared: KTRegroupAsDict replaced",
        "by_list.0: KTRegroupAsDict replaced",
        "by_name.deep.0.0: KTRegroupAsDict replaced",
        "the model itself: KTRegroupAsDict replaced",
    ]
    assert {r.levelname for r in caplog.records} == {"INFO"}


def test_no_module() -> None:
    for given in (KeyedTensor.regroup, [theirs()], theirs):
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
            swap_regroup(given)  # pyright: ignore[reportArgumentType]


# --- what is left ---------------------------------------------------------------------------------


class Subclass(TorchRecKTRegroupAsDict):
    pass


def with_a_forward_of_its_own() -> nn.Module:
    m = theirs()
    m.forward = lambda keyed_tensors: {}  # pyright: ignore[reportAttributeAccessIssue]
    return m


class Fused(nn.Module):
    def forward(self, values: list[Tensor]) -> list[Tensor]:
        return values


def with_another_inner_module() -> nn.Module:
    m = theirs()
    m._permute_pooled_embs_impl = Fused()  # pyright: ignore[reportAttributeAccessIssue]
    return m


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: Subclass(GROUPS, NAMES), "Subclass is a subclass of TorchRec's class"),
    "forward": (with_a_forward_of_its_own, "forward method of this KTRegroupAsDict was replaced"),
    "inner module": (with_another_inner_module, "_permute_pooled_embs_impl is a Fused"),
    "repeated name": (lambda: TorchRecKTRegroupAsDict(GROUPS, ["x", "x"]), "'x' is given more than once"),
    "emb_dtype": (lambda: theirs(emb_dtype=DataType.INT4), "emb_dtype"),
    "scripted": (lambda: torch.jit.script(warm()), "scripted; see patch_fbgemm"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_is_unchanged_and_logged_with_the_reason(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = LEFT[case]
    left = make()
    model = nn.ModuleDict({"left": left, "other": theirs()})
    kind, state = type(left), dict(vars(left))
    with caplog.at_level(logging.WARNING, logger="torchrec_kt"):
        swapped(model)
    (record,) = caplog.records
    assert record.getMessage().startswith("left: left as it is, since")
    assert reason in record.getMessage()
    assert type(left) is kind
    assert all(vars(left)[name] is value for name, value in state.items())
    assert type(model["other"]) is KTRegroupAsDict


def test_scripts_of_this_package_are_not_complained_about(caplog: pytest.LogCaptureFixture) -> None:
    swap_regroup(nn.Sequential(torch.jit.script(KTRegroupAsDict(GROUPS, NAMES, layout=LAYOUT))))
    assert caplog.records == []


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("warmed", [False, True], ids=["cold", "warm"])
def test_hooks_and_mode_are_kept(warmed: bool) -> None:
    seen: list[str] = []
    m = warm() if warmed else theirs()
    model = nn.ModuleDict({"regroup": m})
    m.eval()
    m.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    m.register_forward_hook(lambda module, args, output: seen.append("post"))
    m.register_forward_pre_hook(lambda module, args, kwargs: seen.append("pre kw"), with_kwargs=True)
    handle = m.register_forward_hook(lambda module, args, output: seen.append("removed"))
    m.register_forward_hook(lambda *_: seen.append("always"), always_call=True)
    m.register_state_dict_pre_hook(lambda *_: seen.append("state"))
    model.register_module("again", m)
    swapped(model)
    assert not m.training
    handle.remove()
    m(make_kts())
    m.state_dict()
    assert seen == ["pre", "pre kw", "post", "always", "state"]
    assert model["again"] is m


def test_backward_hooks_are_kept() -> None:
    # torch calls them for modules that return tensors, not for those that return a dict, then and now.
    m = theirs()
    m.register_full_backward_pre_hook(lambda module, outputs: None)
    m.register_full_backward_hook(lambda module, grads, outputs: None)
    before = dict(m._backward_pre_hooks), dict(m._backward_hooks)
    swapped(m)
    assert (dict(m._backward_pre_hooks), dict(m._backward_hooks)) == before
    assert [len(hooks) for hooks in before] == [1, 1]
    with pytest.warns(UserWarning, match="backward hooks"):
        assert_regroups(m, make_kts(grad=True))


@pytest.mark.parametrize("emb_dtype", [DataType.FP16, DataType.BF16, DataType.FP32])
@pytest.mark.parametrize("warmed", [False, True], ids=["cold", "warm"])
def test_emb_dtype(emb_dtype: DataType, warmed: bool) -> None:
    m = (warm if warmed else theirs)(emb_dtype=emb_dtype)
    expected = warm(emb_dtype=emb_dtype)
    swapped(m)
    assert m._emb_dtype == emb_dtype
    kts = make_kts()
    assert same(tensors(m(kts)), tensors(expected(kts)))
    assert same(tensors(torch.jit.script(m)(kts)), tensors(expected(kts)))


@pytest.mark.parametrize("warmed", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("multi_device", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_device_settings(warmed: bool, multi_device: bool, device: str) -> None:
    m: Any = (warm if warmed else theirs)(multi_device=multi_device)
    m._permute_pooled_embs_impl.set_device(device)
    swapped(m)
    impl = m._permute_pooled_embs_impl
    assert impl._multi_device is multi_device
    assert {b.device.type for b in impl.buffers()} == {device}
    assert_regroups(m, make_kts(grad=True))
    assert {b.device.type for b in impl.buffers()} <= {device, "cpu"}


def test_the_interface_of_torchrec_is_kept() -> None:
    m = swapped(warm())
    assert isinstance(m, TorchRecKTRegroupAsDict)
    assert isinstance(m, CacheMixin)
    assert m.state_dict() == {}
    assert [n for n, _ in m.named_buffers()] == [n for n, _ in warm().named_buffers()]
    m.clear_cache()
    assert not m._is_inited
    assert_regroups(m, make_kts(grad=True))


def test_copies_and_pickles_of_a_swapped_model() -> None:
    for make in (theirs, warm):
        model = swapped(Parent(make()))
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(again.regroup) is KTRegroupAsDict
            assert_regroups(again, make_kts(grad=True))
            assert_regroups(torch.jit.script(again), make_kts(grad=True))


def test_the_lists_of_the_caller_are_let_go() -> None:
    groups = [list(g) for g in GROUPS]
    m = swapped(theirs(groups))
    groups[0].reverse()
    assert_regroups(m, make_kts())


# --- a plan that was cached before ----------------------------------------------------------------

PLANS: dict[str, list[list[str]]] = {
    "once": GROUPS,
    "repeated": REPEATED,
    "omitted": OMITTED,
    "in the middle": [["b"], ["c", "b"]],
    "one input": [["d", "c"]],
    "empty group": [[], ["d"]],
}

GRAPHS: dict[str, Callable[[nn.Module], Any]] = {
    "script": torch.jit.script,
    "saved script": lambda m: through_a_file(torch.jit.script(m)),
    "script of the parent": lambda m: torch.jit.script(Parent(m)),
    "torch.fx": torch.fx.symbolic_trace,
    "torch.fx of the parent": lambda m: torch.fx.symbolic_trace(Parent(m)),
    "torchrec.fx of the parent": lambda m: torchrec.fx.symbolic_trace(Parent(m)),
    "scripted trace": lambda m: torch.jit.script(torchrec.fx.symbolic_trace(Parent(m))),
    "leaf": lambda m: torchrec.fx.symbolic_trace(Parent(m), leaf_modules=["KTRegroupAsDict"]),
    "script with a leaf": lambda m: torch.jit.script(
        torchrec.fx.symbolic_trace(Parent(m), leaf_modules=["KTRegroupAsDict"])
    ),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_graphs_of_a_module_that_was_warm(kind: str, plan: str) -> None:
    groups = PLANS[plan]
    graph = GRAPHS[kind](swapped(warm(groups)))
    with uninitialised_is_nan():
        for batch in (3, 5, 0):
            assert_regroups(graph, make_kts(batch=batch, grad=True), groups)


@pytest.mark.parametrize("kind", GRAPHS)
def test_such_graphs_check_where_their_keys_are(kind: str) -> None:
    # Nothing is known about "a" and "c" but that 3 and 2 columns come before.
    groups = [["b"], ["d"]]
    graph = GRAPHS[kind](swapped(warm(groups)))
    assert_regroups(graph, make_kts([(["p", "q", "b"], [1, 2, 5]), (["r", "d"], [2, 4])], grad=True), groups)
    changed: dict[str, Any] = {
        "swapped": SWAPPED,
        "moved by a column": [(["a", "b"], [2, 6]), LAYOUT[1]],
        "wider": [(["a", "b", "e"], [3, 5, 1]), LAYOUT[1]],
        "narrower": [(["a", "b"], [3, 4]), LAYOUT[1]],
        "renamed": [(["a", "B"], [3, 5]), LAYOUT[1]],
        "twice": [(["b", "p", "b"], [1, 2, 5]), LAYOUT[1]],
        "one input less": LAYOUT[:1],
        "inputs swapped": LAYOUT[::-1],
    }
    follows_its_input = kind == "leaf"
    for name, layout in changed.items():
        kts = make_kts(layout)
        if follows_its_input and name not in ("renamed", "twice", "one input less"):
            assert_regrouped(graph(kts), kts, groups)
        else:
            with pytest.raises(Exception, match=r"made for|none of the inputs|more than once"):
                graph(kts)


def test_the_first_batch_brings_the_full_layout() -> None:
    m = swapped(warm(OMITTED))
    m(make_kts(SWAPPED))
    for kind, make in GRAPHS.items():
        graph = make(m)
        assert_regroups(graph, make_kts(SWAPPED, grad=True), OMITTED)
        if kind != "leaf":
            with pytest.raises(Exception, match="made for"):
                graph(make_kts())


def test_eager_calls_do_not_use_the_cached_plan() -> None:
    m = swapped(warm())
    for case in OTHER_INPUTS:
        assert_regroups(m, OTHER_INPUTS[case]())


UNUSABLE: dict[str, Callable[[], TorchRecKTRegroupAsDict]] = {
    "cold": theirs,
    "key_dim 0": lambda: warm(kts=make_kts(key_dim=0)),
    "cleared": lambda: _done(warm(), lambda m: m.clear_cache()),
    "on meta": lambda: warm(kts=on_meta(make_kts())),
    "groups edited": lambda: _done(warm([list(g) for g in GROUPS]), lambda m: m._groups[0].append("d")),
    "keys exchanged": lambda: _done(
        warm([["a", "c"], ["d", "d"]]), lambda m: m._groups[1].__setitem__(0, "b")
    ),
}


def _done(m: Any, change: Callable[[Any], Any]) -> Any:
    change(m)
    return m


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_cache_that_says_nothing_is_dropped(case: str) -> None:
    m: Any = swapped(UNUSABLE[case]())
    groups = [list(g) for g in m._groups]
    impl = m._permute_pooled_embs_impl
    graph = torch.fx.symbolic_trace(Parent(m))  # finds its plan when it runs
    assert impl._out_lengths is None
    with pytest.raises(Exception, match="Run one batch before, or give the layout"):
        torch.jit.script(m)(make_kts())
    for kts in (make_kts(grad=True), make_kts(SWAPPED, grad=True)):
        assert_regroups(graph, kts, groups)
        assert_regroups(m, kts, groups)
    assert_regroups(torch.jit.script(m), make_kts(SWAPPED), groups)


# --- wrapped models -------------------------------------------------------------------------------


def test_inside_a_graph_module() -> None:
    traced = torchrec.fx.symbolic_trace(Parent(theirs(OMITTED)), leaf_modules=["KTRegroupAsDict"])
    swapped(traced)
    with uninitialised_is_nan():
        assert_regroups(traced, make_kts(grad=True), OMITTED)
        assert_regroups(traced, make_kts(SWAPPED, grad=True), OMITTED)


def test_compiled_before_the_swap() -> None:
    torch._dynamo.reset()
    model = FromTensors(theirs(OMITTED))
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    kts = make_kts(grad=True)
    compiled(*[kt.values() for kt in kts])
    swapped(compiled)
    assert type(model.regroup) is KTRegroupAsDict
    with uninitialised_is_nan():
        assert_regroups(lambda given: compiled(*[kt.values() for kt in given]), kts, OMITTED)
    torch._dynamo.reset()


def test_gradients_become_right() -> None:
    m = warm(OMITTED)
    for expect_zero in (False, True):
        kts = make_kts(grad=True)
        with uninitialised_is_nan():
            m(kts)["out0"].sum().backward()
        grad = kts[0].values().grad
        assert grad is not None
        assert torch.equal(grad[:, :3], torch.zeros(3, 3)) is expect_zero
        swapped(m)


def test_public_names() -> None:
    assert torchrec_kt.swap_regroup is torchrec_kt.modules.swap_regroup
