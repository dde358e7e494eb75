"""Scripts, traces, compiled and exported graphs of ``KTRegroupAsDict``."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchrec.fx
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec.modules.embedding_configs import data_type_to_dtype
from torchrec.sparse.jagged_tensor import KeyedTensor
from torchrec.types import DataType

from torchrec_kt import KTRegroupAsDict

from .helpers import (
    GROUPS,
    LAYOUT,
    OMITTED,
    OTHER_INPUTS,
    REPEATED,
    SWAPPED,
    Kts,
    Late,
    Layout,
    assert_regrouped,
    assert_regroups,
    gradients,
    make_kts,
    module,
    reference,
    same,
    through_a_file,
    total,
    uninitialised_is_nan,
    values_of,
)
from .models import FromTensors, Parent

Graph = Callable[[Kts], Any]


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def from_tensors(graph: Any) -> Graph:
    return lambda kts: graph(*values_of(kts))


def exported(m: nn.Module, kts: Kts) -> Graph:
    batch = torch.export.Dim("batch", min=1, max=1000)
    dim = kts[0].key_dim()
    other = 1 - dim
    program = torch.export.export(
        FromTensors(m), tuple(values_of(kts)), dynamic_shapes=({other: batch}, {other: batch})
    )
    return from_tensors(program.module())


# Each makes a graph of a module that knows the layout of these inputs.
GRAPHS: dict[str, Callable[[nn.Module, Kts], Graph]] = {
    "script": lambda m, kts: torch.jit.script(m),
    "saved script": lambda m, kts: through_a_file(torch.jit.script(m)),
    "frozen script": lambda m, kts: torch.jit.freeze(torch.jit.script(m.eval())),
    "jit.trace": lambda m, kts: from_tensors(
        torch.jit.trace(FromTensors(m), tuple(values_of(kts)), strict=False)
    ),
    "torch.fx": lambda m, kts: torch.fx.symbolic_trace(m),
    "torchrec.fx": lambda m, kts: torchrec.fx.symbolic_trace(Parent(m)),
    "scripted trace": lambda m, kts: torch.jit.script(torch.fx.symbolic_trace(Parent(m))),
    "deepcopied trace": lambda m, kts: copy.deepcopy(torch.fx.symbolic_trace(Parent(m))),
    "pickled trace": lambda m, kts: pickle.loads(pickle.dumps(torch.fx.symbolic_trace(Parent(m)))),
    "compiled, eager": lambda m, kts: torch.compile(m, fullgraph=True, backend="eager"),
    "compiled, aot_eager": lambda m, kts: torch.compile(m, fullgraph=True, backend="aot_eager"),
    "compiled, dynamic": lambda m, kts: torch.compile(m, fullgraph=True, backend="aot_eager", dynamic=True),
    "exported": exported,
}


# --- every kind of graph --------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [GROUPS, REPEATED, OMITTED, [[], ["d", "b"]]], ids=str)
@pytest.mark.parametrize("kind", GRAPHS)
def test_graphs_are_right_for_every_batch(kind: str, groups: list[list[str]]) -> None:
    graph = GRAPHS[kind](module(groups, layout=LAYOUT), make_kts(batch=4))
    for batch in (4, 9, 2):
        kts = make_kts(batch=batch, grad=True)
        with uninitialised_is_nan():
            assert_regroups(graph, kts, groups)


@pytest.mark.parametrize("kind", [kind for kind in GRAPHS if "trace" not in kind or kind == "scripted trace"])
@pytest.mark.parametrize("emb_dtype", [DataType.FP16, DataType.BF16, DataType.NFP8, DataType.INT32], ids=str)
def test_graphs_cast(emb_dtype: DataType, kind: str) -> None:
    target = data_type_to_dtype(emb_dtype)
    graph = GRAPHS[kind](module(emb_dtype=emb_dtype, layout=LAYOUT), make_kts(batch=4))
    kts = make_kts(batch=5, grad=True)
    outs = list(graph(kts).values())
    assert same(
        [t.view(torch.uint8) for t in outs], [t.to(target).view(torch.uint8) for t in reference(kts, GROUPS)]
    )
    if target.is_floating_point:
        weights = [torch.ones(t.shape).to(target) for t in outs]
        assert same(torch.autograd.grad(outs, values_of(kts), weights), [torch.ones(5, 8), torch.ones(5, 6)])


@pytest.mark.parametrize("kind", GRAPHS)
def test_graphs_promote_mixed_types(kind: str) -> None:
    kts = [*make_kts(LAYOUT[:1], 4), *make_kts(LAYOUT[1:], 4, dtype=torch.float64)]
    outs = GRAPHS[kind](module(layout=LAYOUT), kts)(kts)
    wide = [KeyedTensor(kt.keys(), kt.length_per_key(), kt.values().double()) for kt in kts]
    assert_regrouped(outs, wide)


@pytest.mark.parametrize("kind", ["script", "torch.fx", "compiled, eager"])
def test_graphs_take_awaitables(kind: str) -> None:
    kts = make_kts()
    graph = GRAPHS[kind](module(layout=LAYOUT), kts)
    assert_regrouped(graph([Late(kt) for kt in kts]), kts)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoints(use_reentrant: bool) -> None:
    model = FromTensors(module(REPEATED))

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(model(*values).values())

    kts = make_kts(grad=True)
    outs: Any = checkpoint(run, *values_of(kts), use_reentrant=use_reentrant)
    expected = reference(kts, REPEATED)
    assert same(outs, expected)
    total(out**2 for out in outs).backward()
    for kt, grad in zip(kts, gradients([total(out**2 for out in expected)], values_of(kts))):
        assert kt.values().grad is not None
        torch.testing.assert_close(kt.values().grad, grad)


def test_ahead_of_time_compilation() -> None:
    batch = torch.export.Dim("batch", min=1, max=1000)
    program = torch.export.export(
        FromTensors(module(REPEATED)),
        tuple(values_of(make_kts(batch=4))),
        dynamic_shapes=({0: batch}, {0: batch}),
    )
    package = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program))
    for size in (9, 4, 1):
        kts = make_kts(batch=size)
        assert_regrouped(package(*values_of(kts)), kts, REPEATED)


# --- graphs without a plan, and with that of another input ----------------------------------------


# A layout has to come from somewhere: from a first batch, or from prepare and its argument.
SAYS_WHAT_TO_DO = r"prepare|layout=|[Rr]un one batch"


def test_a_script_made_before_there_is_a_plan_says_what_to_do() -> None:
    scripted = torch.jit.script(module())
    with pytest.raises(Exception, match=SAYS_WHAT_TO_DO):
        scripted(make_kts())


def test_a_trace_of_the_module_itself_before_there_is_a_plan_says_what_to_do() -> None:
    for trace in (torch.fx.symbolic_trace, torchrec.fx.symbolic_trace):
        with pytest.raises(RuntimeError, match=r"layout=\[\(keys, widths\)"):
            trace(module())


def test_graphs_made_after_clear_cache_say_what_to_do() -> None:
    m = module(layout=LAYOUT)
    m(make_kts())
    m.clear_cache()
    with pytest.raises(Exception, match=SAYS_WHAT_TO_DO):
        torch.jit.script(m)(make_kts())
    with pytest.raises(RuntimeError, match=SAYS_WHAT_TO_DO):
        torch.fx.symbolic_trace(m)


def test_a_script_of_a_trace_made_before_there_is_a_plan_says_what_to_do() -> None:
    traced = torch.fx.symbolic_trace(Parent(module()))
    with pytest.raises(Exception, match=SAYS_WHAT_TO_DO):
        torch.jit.script(traced)(make_kts())


def test_no_inputs_and_no_groups_can_be_scripted() -> None:
    m = KTRegroupAsDict([], [])
    m([])
    assert torch.jit.script(m)([]) == {}


WRONG_FOR_GRAPHS = [
    "keys swapped", "keys swapped, widths in place", "inputs swapped", "keys moved to the other input",
    "widths changed, total kept", "widths grown", "widths shrunk", "one more input", "more keys", "all in one",
    "one each",
]  # fmt: skip


@pytest.mark.parametrize("case", WRONG_FOR_GRAPHS)
def test_scripts_and_traces_refuse_a_layout_that_is_not_theirs(case: str) -> None:
    m = module(layout=LAYOUT)
    for graph in (
        torch.jit.script(m),
        torch.fx.symbolic_trace(Parent(m)),
        torchrec.fx.symbolic_trace(Parent(m)),
    ):
        with pytest.raises(Exception, match="this graph was made for"):
            graph(OTHER_INPUTS[case]())
        assert_regroups(graph, make_kts(grad=True))


@pytest.mark.parametrize("made_for", [0, 1])
def test_scripts_and_traces_refuse_another_key_dim(made_for: int) -> None:
    square: Layout = [(["a", "b"], [3, 5]), (["c", "d"], [4, 4])]
    m = module(layout=make_kts(square, 8, key_dim=made_for))
    for graph in (torch.jit.script(m), torch.fx.symbolic_trace(m)):
        assert_regroups(graph, make_kts(square, 8, key_dim=made_for, grad=True))
        with pytest.raises(Exception, match="key_dim"):
            graph(make_kts(square, 8, key_dim=1 - made_for))


# What happens to a module after a graph of it was made.
EVENTS: dict[str, Callable[[Any], Any]] = {
    "call": lambda m: m(make_kts(SWAPPED)),
    "trace": lambda m: (m(make_kts(SWAPPED)), torch.fx.symbolic_trace(m)),
    "script": lambda m: (m(make_kts(SWAPPED)), torch.jit.script(m)),
    "prepare": lambda m: m.prepare(SWAPPED),
    "clear_cache": lambda m: (m.clear_cache(), m(make_kts(SWAPPED))),
    "set_device": lambda m: m.set_device("cpu"),
    "key_dim": lambda m: (m(make_kts(key_dim=0)), torch.jit.script(m)),
}


@pytest.mark.parametrize("kind", ["script", "torch.fx", "torchrec.fx", "scripted trace", "leaf"])
@pytest.mark.parametrize("event", EVENTS)
def test_graphs_keep_their_plan_whatever_happens_to_the_module(kind: str, event: str) -> None:
    m = module()
    m(make_kts())
    if kind == "leaf":
        # The part of the module that holds the plan is made to be a leaf.
        model = Parent(m)
        tracer = torchrec.fx.Tracer(leaf_modules=["PermuteMultiEmbedding"])
        graph: Graph = torch.fx.GraphModule(model, tracer.trace(model))
    else:
        graph = GRAPHS[kind](m, make_kts())
    assert_regroups(graph, make_kts(grad=True))
    EVENTS[event](m)
    assert_regroups(graph, make_kts(grad=True))


def test_a_leaf_that_is_the_whole_module_goes_on_following_its_input() -> None:
    model = Parent(module())
    model(make_kts())
    traced = torchrec.fx.symbolic_trace(model, leaf_modules=["KTRegroupAsDict"])
    for event in EVENTS.values():
        event(model.regroup)
        assert_regroups(traced, make_kts(grad=True))
        assert_regroups(traced, make_kts(SWAPPED, grad=True))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "to": lambda graph: graph.to("cpu"),
    "cpu": lambda graph: graph.cpu(),
    "double": lambda graph: graph.double(),
    "half": lambda graph: graph.half(),
    "share_memory": lambda graph: graph.share_memory(),
    "eval": lambda graph: graph.eval(),
    "train": lambda graph: graph.train(),
    "deepcopy": copy.deepcopy,
}
MODULE_GRAPHS = ["script", "saved script", "torch.fx", "torchrec.fx", "scripted trace"]


@pytest.mark.parametrize("kind", MODULE_GRAPHS)
@pytest.mark.parametrize("change", CHANGES)
def test_graphs_can_be_moved_and_changed(kind: str, change: str) -> None:
    changed = CHANGES[change](GRAPHS[kind](module(REPEATED, layout=LAYOUT), make_kts()))
    assert_regroups(changed, make_kts(grad=True), REPEATED)


@pytest.mark.parametrize("kind", MODULE_GRAPHS)
def test_graphs_moved_to_meta_raise(kind: str) -> None:
    # TorchRec's return zeros.
    graph: Any = GRAPHS[kind](module(layout=LAYOUT), make_kts())
    graph.to("meta")
    with pytest.raises(Exception, match="meta device"):
        graph(make_kts())


LATE_GRAPHS: dict[str, Callable[[nn.Module], Any]] = {
    "script": torch.jit.script,
    "script of the parent": lambda m: torch.jit.script(Parent(m)),
    "script of a copy": lambda m: torch.jit.script(copy.deepcopy(m)),
    "script of a pickled parent": lambda m: torch.jit.script(pickle.loads(pickle.dumps(Parent(m)))),
    "trace": torch.fx.symbolic_trace,
    "trace of the parent": lambda m: torchrec.fx.symbolic_trace(Parent(m)),
    "script of a trace with a leaf": lambda m: torch.jit.script(
        torchrec.fx.symbolic_trace(Parent(m), leaf_modules=["KTRegroupAsDict"])
    ),
}


@pytest.mark.parametrize("kind", LATE_GRAPHS)
def test_graphs_made_later_hold_the_layout_seen_last(kind: str) -> None:
    m = module(layout=[(["a", "b", "c", "d"], [1, 1, 1, 1])])
    for last in ("keys swapped", "key_dim 0", "inputs swapped", "widths grown", "same"):
        m(make_kts())
        m(OTHER_INPUTS[last]())
        assert_regroups(LATE_GRAPHS[kind](m), OTHER_INPUTS[last]())


def test_traces_of_keys_that_are_no_strings() -> None:
    groups: Any = [[3, 1], [2]]
    m = module(groups)
    kts = make_kts([([1, 2], [3, 5]), ([3], [2])], grad=True)  # pyright: ignore[reportArgumentType]
    m(kts)
    assert_regroups(torch.fx.symbolic_trace(m), kts, groups)


@pytest.mark.parametrize(
    "groups", [OMITTED, [["b", "b"], ["d", "b"]]], ids=["omitted", "repeated and omitted"]
)
def test_omitted_features_have_zero_gradients_in_graphs(groups: list[list[str]]) -> None:
    m = module(groups, layout=LAYOUT)
    graphs = [
        torch.jit.script(m),
        torch.fx.symbolic_trace(m),
        torch.compile(m, fullgraph=True, backend="eager"),
        torch.compile(m, fullgraph=True, backend="aot_eager"),
    ]
    for graph in graphs:
        with uninitialised_is_nan():
            assert_regroups(graph, make_kts(batch=4, grad=True), groups)
