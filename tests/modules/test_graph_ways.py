"""Every way into a graph, for the module and both functions, before and after the first batch.

Each way makes a graph of a model and says how to call it and how many regroup operators it holds.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torchrec.fx
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.passes import move_to_device_pass
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten_with_path, tree_leaves
from torchrec.modules.regroup import KTRegroupAsDict as TorchRecKTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedTensor
from torchrec.types import DataType

from torchrec_kt import KTRegroupAsDict, regroup, regroup_as_dict

from .helpers import (
    LAYOUT,
    NAMES,
    OMITTED,
    OTHER_INPUTS,
    Kts,
    assert_regroups,
    gradients,
    make_kts,
    reference,
    same,
    tensors,
    through_a_file,
    uninitialised_is_nan,
    values_of,
    whole_weights,
)
from .models import AsDict, AsList, FromTensors, Parent

# Repeats a key and leaves one out; the functions' models have their groups in place.
GROUPS = [["a", "c", "a"], ["d", "b"]]
REPEATED_AND_OMITTED = [["a", "c", "a"], ["b"]]


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Subject(NamedTuple):
    model: Callable[[], nn.Module]
    groups: list[list[str]]
    dtype: torch.dtype | None = None


def module(groups: Any, state: str, **options: Any) -> KTRegroupAsDict:
    m = KTRegroupAsDict(groups, NAMES, layout=LAYOUT if state == "layout" else None, **options)
    if state == "warm":
        m(make_kts())
    return m


SUBJECTS: dict[str, Subject] = {
    "regroup": Subject(AsList, GROUPS),
    "regroup_as_dict": Subject(AsDict, GROUPS),
}
for _state in ("cold", "warm", "layout"):
    SUBJECTS[f"module, {_state}"] = Subject(lambda s=_state: module(GROUPS, s), GROUPS)
    SUBJECTS[f"module in a model, {_state}"] = Subject(
        lambda s=_state: Parent(module(REPEATED_AND_OMITTED, s)), REPEATED_AND_OMITTED
    )
    SUBJECTS[f"module with emb_dtype, {_state}"] = Subject(
        lambda s=_state: Parent(module(OMITTED, s, emb_dtype=DataType.BF16)), OMITTED, torch.bfloat16
    )


class Graph(NamedTuple):
    call: Callable[[Kts], Any]
    operators: int
    trains: bool = True
    batches: tuple[int, ...] = (4, 9, 1, 0)


def count(graph: Any) -> int:
    """Calls of the regroup operator in an FX graph, or of the leaf that makes one call."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    names = [str(getattr(node.target, "__name__", node.target)) for node in calls]
    return sum(name in ("regroup.default", "regroup", "_regroup") for name in names)


def in_script(scripted: Any) -> int:
    code = str(scripted.inlined_graph)
    return code.count("torchrec_kt::regroup(") + code.count("torchrec_kt::regroup_by_keys(")


def from_values(call: Any) -> Callable[[Kts], Any]:
    return lambda kts: call(*values_of(kts))


def scripted(model: nn.Module) -> Graph:
    found = torch.jit.script(model)
    return Graph(through_a_file(found), in_script(found))


def traced_by_jit(model: nn.Module) -> Graph:
    found: Any = torch.jit.trace(
        FromTensors(model), tuple(values_of(make_kts(batch=5))), strict=False, check_trace=False
    )
    return Graph(from_values(through_a_file(found)), in_script(found))


def traced(tracer: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Graph]:
    def make(model: nn.Module) -> Graph:
        found = tracer(model)
        leaves = [node for node in found.graph.nodes if node.op == "call_module"]
        return Graph(found, count(found) + len(leaves))

    return make


def traced_with_leaves(model: nn.Module) -> Graph:
    tracer = torchrec.fx.Tracer(leaf_modules=["KTRegroupAsDict"])
    return traced(lambda m: torch.fx.GraphModule(m, tracer.trace(m)))(model)


def traced_then_scripted(model: nn.Module) -> Graph:
    return scripted(torchrec.fx.symbolic_trace(model))


def compiled(backend: str, dynamic: bool | None) -> Callable[[nn.Module], Graph]:
    def make(model: nn.Module) -> Graph:
        counter = CompileCounterWithBackend(backend)
        call = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=counter)
        call(make_kts(batch=3))
        return Graph(call, max(count(graph) for graph in counter.graphs))

    return make


def exported(takes: str, strict: bool) -> Callable[[nn.Module], Graph]:
    def make(model: nn.Module) -> Graph:
        batch = {0: torch.export.Dim("batch", min=0, max=1000)}
        kts = make_kts(batch=5)
        if takes == "tensors":
            program = torch.export.export(
                FromTensors(model), tuple(values_of(kts)), dynamic_shapes=(batch, batch), strict=strict
            )
        else:
            program = torch.export.export(
                Parent(model), (kts,), dynamic_shapes=([[batch], [batch]],), strict=strict
            )
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        with torch.serialization.safe_globals([KeyedTensor]):  # the example inputs are in the file too
            call: Any = torch.export.load(buffer).module()
        # Only tensors that no gradient leads to, as servers have them.
        return Graph(from_values(call) if takes == "tensors" else call, count(program), trains=False)

    return make


def made_by_make_fx(model: nn.Module) -> Graph:
    found = make_fx(FromTensors(model), tracing_mode="symbolic", _allow_non_fake_inputs=True)(
        *values_of(make_kts(batch=5))
    )
    return Graph(from_values(found), count(found), batches=(4, 9))


WAYS: dict[str, Callable[[nn.Module], Graph]] = {
    "script": scripted,
    "jit.trace": traced_by_jit,
    "torch.fx": traced(torch.fx.symbolic_trace),
    "torchrec.fx": traced(torchrec.fx.symbolic_trace),
    "torchrec.fx with leaves": traced_with_leaves,
    "torchrec.fx, then script": traced_then_scripted,
    "compile eager": compiled("eager", None),
    "compile aot_eager": compiled("aot_eager", None),
    "compile aot_eager dynamic": compiled("aot_eager", True),
    "export tensors": exported("tensors", strict=False),
    "export tensors strict": exported("tensors", strict=True),
    "export KeyedTensors": exported("KeyedTensors", strict=False),
    "export KeyedTensors strict": exported("KeyedTensors", strict=True),
    "make_fx": made_by_make_fx,
}


def needs_a_layout(way: str, subject: str) -> bool:
    """A plan has to come from somewhere: scripts, and traces of the module itself, cannot build one."""
    return subject.endswith("cold") and (
        "script" in way or (subject == "module, cold" and way in ("torch.fx", "torchrec.fx"))
    )


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("way", WAYS)
def test_ways_into_a_graph(way: str, subject: str) -> None:
    model, groups, dtype = SUBJECTS[subject]
    if needs_a_layout(way, subject):
        with pytest.raises(Exception, match=r"layout=|[Rr]un one batch"):
            WAYS[way](model()).call(make_kts())
        return
    if way == "torchrec.fx with leaves" and subject.startswith("module, "):
        return  # a leaf has to be inside of something
    graph = WAYS[way](model())
    assert graph.operators == 1
    for batch in graph.batches:
        kts = make_kts(batch=batch, grad=graph.trains)
        with uninitialised_is_nan():
            outs = tensors(graph.call(kts))
        expected = [t if dtype is None else t.to(dtype) for t in reference(kts, groups)]
        assert same(outs, expected)
        if graph.trains:
            weights = whole_weights(expected)
            with uninitialised_is_nan():
                found = gradients(outs, values_of(kts), weights)
            assert same(found, gradients(expected, values_of(kts), weights))


@pytest.mark.parametrize("subject", ["module, warm", "regroup_as_dict"])
def test_packages_of_aotinductor(subject: str) -> None:
    model, groups, _ = SUBJECTS[subject]
    batch = {0: torch.export.Dim("batch", min=1, max=1000)}
    program = torch.export.export(
        FromTensors(model()), tuple(values_of(make_kts(batch=5))), dynamic_shapes=(batch, batch)
    )
    package: Any = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program))
    for size in (9, 4, 1):
        kts = make_kts(batch=size)
        assert same(package(*values_of(kts)).values(), reference(kts, groups))


def test_inductor_trains() -> None:
    compiled_model = torch.compile(FromTensors(module(REPEATED_AND_OMITTED, "cold")), fullgraph=True)
    for batch in (7, 3, 1, 0):
        with uninitialised_is_nan():
            assert_regroups(
                from_values(compiled_model), make_kts(batch=batch, grad=True), REPEATED_AND_OMITTED
            )


# --- other layouts --------------------------------------------------------------------------------

OTHER_LAYOUTS = [
    "keys swapped", "keys swapped, widths in place", "inputs swapped", "keys moved to the other input",
    "widths changed, total kept", "widths grown", "widths shrunk", "one more input", "more keys", "all in one",
]  # fmt: skip


@pytest.mark.parametrize("case", OTHER_LAYOUTS)
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_exported_programs_refuse_another_layout(state: str, case: str) -> None:
    call = exported("KeyedTensors", strict=False)(module(GROUPS, state)).call
    with pytest.raises(Exception, match=r"(?i)spec|inputs"):
        call(OTHER_INPUTS[case]())


def test_inputs_of_exported_programs_whose_key_dim_would_be_lost() -> None:
    assert len(tree_flatten_with_path(make_kts())[0]) == 2
    with pytest.raises(ValueError, match="key_dim 0"):
        tree_flatten_with_path(make_kts(key_dim=0))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("subject", ["module, cold", "module, layout", "regroup_as_dict"])
@pytest.mark.parametrize("first", range(0, len(OTHER_LAYOUTS), 3))
def test_compiled_code_follows_the_layout(first: int, subject: str, dynamic: bool | None) -> None:
    model, groups, _ = SUBJECTS[subject]
    call = torch.compile(model(), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    # No more of them at once than a function may be compiled for.
    for case in (*OTHER_LAYOUTS[first : first + 3], "same", OTHER_LAYOUTS[first]):
        assert_regroups(call, OTHER_INPUTS[case](), groups)


def test_compiled_code_outlives_the_plan_that_the_module_shows() -> None:
    """The module writes another plan into the buffer that graphs take along; nothing is compiled anew."""
    m = module(GROUPS, "layout")
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(m, fullgraph=True, backend=counter)
    assert_regroups(call, make_kts(grad=True), GROUPS)
    for event in (
        lambda: m.prepare([(["b", "a"], [5, 3]), (["c", "d"], [2, 4])]),
        lambda: torch.jit.script(m),
        lambda: m.clear_cache(),
    ):
        event()
        assert_regroups(call, make_kts(grad=True), GROUPS)
    assert counter.frame_count == 1


def test_an_unknown_key_is_named_while_compiling() -> None:
    call = torch.compile(lambda kts: regroup(kts, [["a", "zz"]]), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"'zz'"):
        call(make_kts())


def test_a_plan_that_is_built_inside_of_compiled_code() -> None:
    from torchrec_kt.ops import RegroupPlan, regroup_values

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(*values: Tensor) -> list[Tensor]:
        return regroup_values(values, RegroupPlan.build(layouts=LAYOUT, groups=GROUPS))

    assert_regroups(from_values(call), make_kts(grad=True), GROUPS)


# --- how many graphs ------------------------------------------------------------------------------

SEVEN_BATCHES = (7, 3, 11, 1, 0, 64, 7)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("inputs", ["KeyedTensors", "tensors"])
def test_seven_batches_need_no_more_graphs_than_with_torchrec(inputs: str, dynamic: bool | None) -> None:
    def graphs(call: Callable[[Kts], Any]) -> int:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        inner: Any = call if inputs == "KeyedTensors" else FromTensors(call)
        fast: Any = torch.compile(inner, fullgraph=True, dynamic=dynamic, backend=counter)
        for batch in SEVEN_BATCHES:
            kts = make_kts(batch=batch, grad=True)
            out = fast(kts) if inputs == "KeyedTensors" else fast(*values_of(kts))
            assert same(tensors(out), reference(kts, GROUPS))
        return counter.frame_count

    assert graphs(KTRegroupAsDict(GROUPS, NAMES)) <= graphs(TorchRecKTRegroupAsDict(GROUPS, NAMES))
    assert graphs(lambda kts: regroup_as_dict(kts, GROUPS, NAMES)) <= graphs(
        lambda kts: KeyedTensor.regroup_as_dict(kts, GROUPS, NAMES)
    )


# --- graphs for CUDA, made without a GPU ----------------------------------------------------------


def step_of(model: nn.Module) -> Callable[..., Any]:
    """A training step: outputs, and gradients of the values."""

    def step(first: Tensor, second: Tensor) -> tuple[Any, ...]:
        leaves = [first.detach().requires_grad_(), second.detach().requires_grad_()]
        outs = tensors(FromTensors(model)(*leaves))
        return tuple(outs), torch.autograd.grad(outs, leaves, [out.detach() for out in outs])

    return step


def assert_stays_on(graph: torch.fx.GraphModule, device: torch.device, operators: list[str]) -> None:
    """Nothing in a graph is elsewhere, comes from elsewhere, or goes elsewhere."""
    calls = [str(node.target) for node in graph.graph.nodes if "torchrec_kt" in str(node.target)]
    assert calls == operators
    for node in graph.graph.nodes:
        where = [
            value.device
            for value in tree_leaves(node.meta.get("val", node.meta.get("example_value")))
            if isinstance(value, Tensor)
        ]
        if node.op == "get_attr":
            where.append(getattr(graph, str(node.target)).device)
        assert all(found == device for found in where), (node, where)
        assert not any(isinstance(part, torch.device) for part in [*node.args, *node.kwargs.values()])
        if node.op == "call_function":
            copies = ("_to_copy", "device_put", "aten.copy_", "lift_fresh")
            assert not any(word in str(node.target) for word in copies)


CUDA = torch.device("cuda", 0)
FOR_CUDA = [
    "module, cold",
    "module, warm",
    "module, layout",
    "module with emb_dtype, cold",
    "regroup",
    "regroup_as_dict",
]


def on_cuda(batch: int = 5) -> list[Tensor]:
    return [torch.empty(batch, sum(widths), device=CUDA) for _, widths in LAYOUT]


@pytest.mark.parametrize("subject", FOR_CUDA)
def test_graphs_made_for_cuda_copy_nothing_between_devices(subject: str) -> None:
    model = FromTensors(SUBJECTS[subject].model())
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(model)(*on_cuda())
    assert_stays_on(graph, CUDA, ["torchrec_kt.regroup.default"])


@pytest.mark.parametrize("subject", FOR_CUDA)
def test_a_training_step_reads_one_plan_in_both_directions(subject: str) -> None:
    # On the CPU, since autograd asks for the stream of CUDA tensors, fake ones included.
    graph = make_fx(step_of(SUBJECTS[subject].model()))(*values_of(make_kts()))
    assert_stays_on(
        graph,
        torch.device("cpu"),
        ["torchrec_kt.regroup.default", "torchrec_kt.regroup_transposed.default"],
    )
    # The plan is the only constant; nothing is computed from it.
    constants = [node for node in graph.graph.nodes if node.op == "get_attr"]
    assert len({node.target for node in constants}) == 1
    assert all("torchrec_kt.regroup" in str(user.target) for node in constants for user in node.users)


def test_gradients_of_fake_cuda_tensors_are_where_they_belong() -> None:
    with FakeTensorMode():
        moves = torch.empty((3, 5), dtype=torch.int32, device=CUDA)
        grads = [torch.empty(4, width, device=CUDA, dtype=torch.bfloat16) for width in (8, 9)]
        found = torch.ops.torchrec_kt.regroup_transposed(grads, moves, [8, 6], 1, torch.float32)
    assert [(t.shape, t.dtype, t.device) for t in found] == [
        ((4, 8), torch.float32, CUDA),
        ((4, 6), torch.float32, CUDA),
    ]


@pytest.mark.parametrize("subject", FOR_CUDA)
def test_programs_exported_for_cuda_copy_nothing_between_devices(subject: str) -> None:
    model = FromTensors(SUBJECTS[subject].model())
    batch = {0: torch.export.Dim("batch", min=1, max=1000)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = tuple(on_cuda())
        model.to(CUDA)
    program = torch.export.export(model, inputs, dynamic_shapes=(batch, batch))
    assert_stays_on(program.graph_module, CUDA, ["torchrec_kt.regroup.default"])
    (call,) = [node for node in program.graph.nodes if "torchrec_kt" in str(node.target)]
    assert call.args[1].op == "placeholder"  # a buffer or a constant of the program
    if "cold" not in subject and subject.startswith("module"):
        assert str(call.args[1]) == "b_regroup__permute_pooled_embs_impl__permutes"


def test_an_exported_program_moves_to_another_device_with_its_plan() -> None:
    """The way of publishing from a machine without a GPU; the meta device stands in for one."""
    batch = {0: torch.export.Dim("batch", min=1, max=1000)}
    for state in ("cold", "layout"):
        program = torch.export.export(
            FromTensors(module(GROUPS, state)), tuple(values_of(make_kts())), dynamic_shapes=(batch, batch)
        )
        moved = move_to_device_pass(program, "meta")
        plans = [*moved.constants.values()]
        assert plans
        assert all(plan.device.type == "meta" for plan in plans if isinstance(plan, Tensor))
        assert_stays_on(moved.graph_module, torch.device("meta"), ["torchrec_kt.regroup.default"])


def test_the_plan_of_a_graph_is_one_tensor_for_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Implementations that read a plan from a device do so once for each tensor, never in later steps."""
    implementation = sys.modules["torchrec_kt.ops.operators"]
    seen: list[Tensor] = []
    original = implementation.column_map_from_moves
    monkeypatch.setattr(
        implementation,
        "column_map_from_moves",
        lambda moves, *rest: seen.append(moves) or original(moves, *rest),
    )
    call = torch.compile(FromTensors(module(GROUPS, "cold")), fullgraph=True, backend="inductor")
    for _ in range(4):
        kts = make_kts(grad=True)
        outs = list(call(*values_of(kts)).values())
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    forward, backward = seen[0::2], seen[1::2]
    assert len(forward) == len(backward) == 4
    for tensors_seen in (forward, backward):
        assert all(moves is tensors_seen[0] for moves in tensors_seen)
