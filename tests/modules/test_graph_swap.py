"""Graphs that were traced with TorchRec's regroups, rewritten to this package's."""

# TorchScript reads these annotations, also from traced graphs.
# ruff: noqa: UP006, UP035

import copy
import pickle
from collections import Counter
from typing import Any, Callable, Dict, List

import pytest
import torch
import torchrec.fx
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torchrec.modules.regroup import KTRegroupAsDict as TorchRecKTRegroupAsDict
from torchrec.sparse import jagged_tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_kt.modules.graph_swap import swap_graph

from .helpers import (
    GROUPS,
    LAYOUT,
    NAMES,
    OMITTED,
    OTHER_INPUTS,
    REPEATED,
    assert_regrouped,
    assert_regroups,
    make_kts,
    through_a_file,
    uninitialised_is_nan,
    values_of,
)
from .models import FromTensors, Parent


class ByMethod(nn.Module):
    def forward(self, keyed_tensors: List[KeyedTensor]) -> List[Tensor]:
        return KeyedTensor.regroup(keyed_tensors, [["a", "c", "a"], ["d", "b"]])


class ByMethodAsDict(nn.Module):
    def forward(self, keyed_tensors: List[KeyedTensor]) -> Dict[str, Tensor]:
        out = KeyedTensor.regroup_as_dict(
            keyed_tensors, groups=[["a", "c", "a"], ["d", "b"]], keys=["x", "y"]
        )
        return {"x": out["x"], "y": out["y"]}


class ByHelper(nn.Module):
    """Calls a function of TorchRec's by its name in the module, where its fx.wrap holds."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, keyed_tensors: List[KeyedTensor]) -> List[Tensor]:
        return getattr(jagged_tensor, self.name)(keyed_tensors, groups=[["a", "c", "a"], ["d", "b"]])


MODELS: Dict[str, Callable[[], nn.Module]] = {
    "regroup": ByMethod,
    "regroup_as_dict": ByMethodAsDict,
    "permute_multi_embedding": lambda: ByHelper("permute_multi_embedding"),
    "regroup_kts": lambda: ByHelper("regroup_kts"),
    "_regroup_keyed_tensors": lambda: ByHelper("_regroup_keyed_tensors"),
    "_fbgemm_permute_pooled_embs": lambda: ByHelper("_fbgemm_permute_pooled_embs"),
}
BY_NAME = [case for case in OTHER_INPUTS if case not in ("float64",)]


def targets(graph_module: torch.fx.GraphModule) -> Counter[str]:
    return Counter(
        getattr(node.target, "__name__", str(node.target))
        for node in graph_module.graph.nodes
        if node.op == "call_function"
    )


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, torchrec.fx.symbolic_trace])
@pytest.mark.parametrize("model", MODELS)
def test_calls_by_name(model: str, trace: Callable[[nn.Module], Any]) -> None:
    traced = trace(MODELS[model]())
    assert swap_graph(traced) == 1
    found = targets(traced)
    assert found["_regroup"] == 1
    assert not set(found) - {"_regroup", "getitem"}
    for case in BY_NAME:
        with uninitialised_is_nan():
            assert_regroups(traced, OTHER_INPUTS[case](), REPEATED)
    assert swap_graph(traced) == 0


@pytest.mark.parametrize("model", ["regroup", "regroup_as_dict", "_fbgemm_permute_pooled_embs"])
def test_swapped_graphs_can_be_scripted_saved_copied_pickled_and_traced_again(model: str) -> None:
    traced: Any = torch.fx.symbolic_trace(MODELS[model]())
    swap_graph(traced)
    scripted = torch.jit.script(traced)
    assert "torchrec_kt::regroup_by_keys" in str(scripted.inlined_graph)
    assert "fbgemm::" not in str(scripted.inlined_graph)
    again = torch.fx.symbolic_trace(traced)
    assert targets(again)["_regroup"] == 1
    for call in (
        scripted,
        through_a_file(scripted),
        copy.deepcopy(traced),
        pickle.loads(pickle.dumps(traced)),
        again,
    ):
        for batch in (7, 1, 0):
            assert_regroups(call, make_kts(batch=batch, grad=True), REPEATED)


def test_methods_that_a_tracer_takes_for_leaves() -> None:
    graph = torch.fx.Graph()
    kts = graph.placeholder("keyed_tensors")
    as_list = graph.call_function(KeyedTensor.regroup, (kts, GROUPS))
    as_dict = graph.call_function(
        KeyedTensor.regroup_as_dict, (), {"keyed_tensors": kts, "groups": GROUPS, "keys": NAMES}
    )
    graph.output((as_list, as_dict))
    module = torch.fx.GraphModule(nn.Module(), graph)
    assert swap_graph(module) == 2
    for batch in (4, 0):
        inputs = make_kts(batch=batch, grad=True)
        assert_regroups(lambda kts: module(kts)[0], inputs)
        assert_regroups(lambda kts: module(kts)[1], inputs)


def warm(groups: Any) -> TorchRecKTRegroupAsDict:
    theirs = TorchRecKTRegroupAsDict(groups, NAMES)
    theirs(make_kts())
    return theirs


@pytest.mark.parametrize("groups", [GROUPS, REPEATED, OMITTED], ids=["once", "repeated", "omitted"])
@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, torchrec.fx.symbolic_trace])
def test_the_operator_in_a_trace_of_torchrecs_module(trace: Callable[[nn.Module], Any], groups: Any) -> None:
    traced = trace(Parent(warm(groups)))
    assert swap_graph(traced) == 1
    attributes = [node for node in traced.graph.nodes if node.op == "get_attr"]
    assert [str(node.target).rsplit(".", 1)[-1] for node in attributes] == ["_permutes"]
    assert targets(traced)["regroup"] == 1
    scripted = torch.jit.script(traced)
    for batch in (5, 1, 0):
        for call in (traced, scripted, through_a_file(scripted)):
            with uninitialised_is_nan():
                assert_regroups(call, make_kts(batch=batch, grad=True), groups)
    # A plan by position; what leaves its inputs is refused, where FBGEMM reads on.
    with pytest.raises(ValueError, match="columns"):
        traced(OTHER_INPUTS["widths shrunk"]())


@pytest.mark.parametrize("groups", [GROUPS, REPEATED, OMITTED], ids=["once", "repeated", "omitted"])
@pytest.mark.parametrize("decomposed", [False, True])
def test_the_operator_in_an_exported_program(decomposed: bool, groups: Any) -> None:
    batch = torch.export.Dim("batch", min=1, max=1000)
    program = torch.export.export(
        FromTensors(warm(groups)), tuple(values_of(make_kts())), dynamic_shapes=({0: batch}, {0: batch})
    )
    if decomposed:
        program = program.run_decompositions()
    unlifted: Any = program.module()
    assert swap_graph(unlifted) == 1
    assert not any("fbgemm" in str(node.target) for node in unlifted.graph.nodes)
    for size in (9, 1):
        kts = make_kts(batch=size)
        assert_regrouped(unlifted(*values_of(kts)), kts, groups)
    # The program itself, which is what can be saved and compiled further.
    assert swap_graph(program.graph_module) == 1
    kts = make_kts(batch=5)
    assert_regrouped(program.module()(*values_of(kts)), kts, groups)


@pytest.mark.parametrize("backward", [False, True])
def test_both_directions_of_the_operator(backward: bool) -> None:
    """What a compiler makes of a training step, in which FBGEMM's operator appears reversed."""
    module = warm(REPEATED)

    def step(*values: Tensor) -> Any:
        leaves = [v.detach().requires_grad_() for v in values]
        kts = [KeyedTensor(list(k), list(w), v) for (k, w), v in zip(LAYOUT, leaves)]
        outs = list(module(kts).values())
        return torch.autograd.grad(outs, leaves, [out.detach() for out in outs]) if backward else outs

    values = values_of(make_kts())
    graph: Any = make_fx(step, _allow_non_fake_inputs=True)(*values)
    assert swap_graph(graph) == 1 + backward
    assert not any("fbgemm" in str(node.target) for node in graph.graph.nodes)
    values = values_of(make_kts())
    with uninitialised_is_nan():
        found = graph(*values)
    for a, b in zip(found, step(*values)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_the_planning_operators() -> None:
    graph = torch.fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    keys, widths = [list(k) for k, _ in LAYOUT], [list(w) for _, w in LAYOUT]
    fbgemm = torch.ops.fbgemm
    plan = graph.call_function(fbgemm.kt_regroup_arguments, (first, keys, widths, REPEATED))
    parts = [graph.call_function(lambda p, i: p[i], (plan, i)) for i in range(4)]
    permuted = graph.call_function(
        fbgemm.permute_multi_embedding.default, ([first, second], *parts[:3], parts[3])
    )
    direct = graph.call_function(fbgemm.regroup_keyed_tensor, ([first, second], keys, widths, REPEATED))
    graph.output((permuted, direct))
    module = torch.fx.GraphModule(nn.Module(), graph)
    assert swap_graph(module) == 3
    assert not any("fbgemm" in str(node.target) for node in module.graph.nodes)
    kts = make_kts(grad=True)
    for part in range(2):
        assert_regroups(lambda kts, part=part: module(*values_of(kts))[part], kts, REPEATED)


def test_other_graphs_stay_as_they_are() -> None:
    traced: Any = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    code = traced.code
    assert swap_graph(traced) == 0
    assert traced.code == code
