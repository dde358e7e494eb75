"""Where TorchRec is right, ``KTRegroupAsDict`` does the same: both side by side."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torchrec.fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.regroup import KTRegroupAsDict as TorchRecKTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.types import DataType

from torchrec_kt import KTRegroupAsDict

from .helpers import (
    GROUPS,
    LAYOUT,
    NAMES,
    OMITTED,
    REPEATED,
    SWAPPED,
    Case,
    Kts,
    assert_regrouped,
    assert_regroups,
    cases,
    gradients,
    make_kts,
    same,
    tensors,
    through_a_file,
    values_of,
    whole_weights,
)
from .models import FromTensors, Parent

RegroupClass = type[TorchRecKTRegroupAsDict]
BOTH: list[RegroupClass] = [TorchRecKTRegroupAsDict, KTRegroupAsDict]
BATCHES = (7, 3, 11, 1, 0, 64, 7)


def pair(groups: Any, **options: Any) -> list[TorchRecKTRegroupAsDict]:
    names = [f"out{i}" for i in range(len(groups))]
    return [cls(groups, names, **options) for cls in BOTH]


def gradients_of_used(kts: Kts, groups: Sequence[Sequence[str]], grads: Sequence[Tensor]) -> list[Tensor]:
    """The parts of the gradients that belong to keys in use; TorchRec leaves the others undefined."""
    used = {key for group in groups for key in group}
    found: list[Tensor] = []
    for kt, grad in zip(kts, grads):
        parts = grad.split(kt.length_per_key(), kt.key_dim())
        found.extend(part for key, part in zip(kt.keys(), parts) if key in used)
    return found


def assert_alike(
    modules: Sequence[Callable[[Kts], dict[str, Tensor]]], kts: Kts, groups: Sequence[Sequence[str]]
) -> None:
    """Same keys in the same order, same tensors, flags, types and gradients of what is used."""
    theirs, ours = (m(kts) for m in modules)
    assert list(ours) == list(theirs)
    assert type(ours) is type(theirs)
    assert same([t.detach() for t in ours.values()], [t.detach() for t in theirs.values()])
    for a, b in zip(ours.values(), theirs.values()):
        assert a.requires_grad == b.requires_grad
        assert a.device == b.device
        assert a.is_contiguous()
        assert a.is_leaf == b.is_leaf
    inputs = [v for v in values_of(kts) if v.requires_grad]
    if len(inputs) == len(kts):
        weights = whole_weights(tensors(theirs))
        found, expected = (gradients(out, inputs, weights) for out in (ours, theirs))
        assert [g.dtype for g in found] == [g.dtype for g in expected]
        assert same(gradients_of_used(kts, groups, found), gradients_of_used(kts, groups, expected))


# --- eager ----------------------------------------------------------------------------------------


@given(cases(), st.lists(st.integers(0, 6), max_size=3))
@settings(max_examples=100)
def test_eager_calls(case: Case, batches: list[int]) -> None:
    modules = pair(case.groups)
    assert_alike(modules, case.make(), case.groups)
    assert_alike(modules, case.make(grad=True), case.groups)
    for batch in batches:
        assert_alike(modules, case._replace(batch=batch).make(grad=True), case.groups)


@given(cases(once=True), st.data())
def test_inputs_of_which_some_need_a_gradient(case: Case, data: st.DataObject) -> None:
    kts = case.make()
    for kt in kts:
        kt.values().requires_grad_(data.draw(st.booleans()))
    needs = [kt.values().requires_grad for kt in kts]
    found: list[list[Tensor | None]] = []
    for m in pair(case.groups):
        out = m(kts)
        assert all(t.requires_grad == any(needs) for t in out.values())
        if any(needs):
            torch.autograd.backward(tensors(out), [torch.ones_like(t) for t in out.values()])
        found.append([kt.values().grad for kt in kts])
        for kt in kts:
            kt.values().grad = None
    for theirs, ours, need in zip(*found, needs):
        assert (ours is not None) == (theirs is not None) == need
        assert ours is None or theirs is None or torch.equal(ours, theirs)


@given(cases(), st.sampled_from([DataType.FP32, DataType.FP16, DataType.BF16]))
def test_emb_dtype(case: Case, emb_dtype: DataType) -> None:
    modules = pair(case.groups, emb_dtype=emb_dtype)
    for grad in (True, False):
        assert_alike(modules, case.make(grad=grad), case.groups)


@given(cases(), st.sampled_from([0, -1]))
def test_other_key_dims(case: Case, key_dim: int) -> None:
    modules = pair(case.groups)
    for batch in (case.batch, 2):
        kts = make_kts(case.layout, batch, dtype=case.dtype, key_dim=key_dim, grad=True)
        assert_alike(modules, kts, case.groups)


@pytest.mark.parametrize("groups", [GROUPS, REPEATED, OMITTED], ids=["once", "repeated", "omitted"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(mode: Any, groups: list[list[str]]) -> None:
    modules = pair(groups)
    with mode():
        theirs, ours = (m(make_kts(grad=True)) for m in modules)
        for a, b in zip(ours.values(), theirs.values()):
            assert (a.requires_grad, a.is_inference()) == (b.requires_grad, b.is_inference())
    assert_alike(modules, make_kts(grad=True), groups)


def test_special_values_keep_their_bits() -> None:
    special = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45, 1e-38, 3e38]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.tensor([special, special[::-1]]).to(dtype)
        kts = [KeyedTensor(["a", "b"], [3, 5], values), *make_kts(LAYOUT[1:], 2, dtype=dtype)]
        theirs, ours = (m(kts) for m in pair(REPEATED))
        assert same(*[[t.view(torch.uint8) for t in out.values()] for out in (ours, theirs)])


@pytest.mark.parametrize("cls", BOTH)
def test_outputs_may_be_written_to(cls: RegroupClass) -> None:
    for groups in (GROUPS, REPEATED):
        kts = make_kts(grad=True)
        out = cls(groups, NAMES)(kts)
        expected = [t.detach().clone() for t in out.values()]
        out["x"].mul_(2)
        out["y"].zero_()
        assert torch.equal(out["x"], expected[0] * 2)
        assert not out["y"].any()
        (out["x"].sum() + out["y"].sum()).backward()
        grad = kts[0].values().grad
        assert grad is not None
        assert torch.equal(grad[:, :3], torch.full((3, 3), 2.0 * groups[0].count("a")))
        assert not grad[:, 3:].any()


# --- TorchScript and FX ---------------------------------------------------------------------------


@given(cases())
@settings(max_examples=12)
def test_scripts_after_the_first_call(case: Case) -> None:
    modules = pair(case.groups)
    for m in modules:
        m(case.make())
    scripted = [torch.jit.script(m) for m in modules]
    loaded = [through_a_file(m) for m in scripted]
    for batch in (case.batch, 7, 0, 3):
        kts = case._replace(batch=batch).make(grad=True)
        assert_alike(scripted, kts, case.groups)  # pyright: ignore[reportArgumentType]
        assert_alike(loaded, kts, case.groups)


TRACERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.fx": torch.fx.symbolic_trace,
    "torchrec.fx": torchrec.fx.symbolic_trace,
    "torchrec.fx, leaf": lambda m: torchrec.fx.symbolic_trace(m, leaf_modules=["KTRegroupAsDict"]),
    "Tracer": lambda m: torch.fx.GraphModule(m, torchrec.fx.Tracer().trace(m)),
}


@pytest.mark.parametrize("around", [lambda m: m, Parent], ids=["bare", "in a model"])
@pytest.mark.parametrize("tracer", TRACERS)
@given(case=cases())
@settings(max_examples=8)
def test_traces_after_the_first_call(
    tracer: str, around: Callable[[nn.Module], nn.Module], case: Case
) -> None:
    traced: list[Any] = []
    for m in pair(case.groups):
        m(case.make())
        traced.append(TRACERS[tracer](around(m)))
    for batch in (case.batch, 7, 0, 3):
        assert_alike(traced, case._replace(batch=batch).make(grad=True), case.groups)


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("groups", [GROUPS, REPEATED], ids=["once", "repeated"])
def test_traces_can_be_scripted_and_saved(groups: list[list[str]], tracer: str, cls: RegroupClass) -> None:
    m = cls(groups, NAMES)
    m(make_kts())
    from_tensors = torch.jit.script(TRACERS[tracer](FromTensors(m)))
    from_kts = torch.jit.script(TRACERS[tracer](Parent(m)))
    for batch in (5, 1, 0):
        kts = make_kts(batch=batch)
        for call in (from_tensors, through_a_file(from_tensors)):
            assert_regrouped(call(*values_of(kts)), kts, groups)
        for call in (from_kts, through_a_file(from_kts)):
            assert_regrouped(call(kts), kts, groups)


@pytest.mark.parametrize("cls", BOTH)
def test_graphs_of_key_dim_zero(cls: RegroupClass) -> None:
    m = cls(REPEATED, NAMES)
    m(make_kts(key_dim=0))
    scripted = torch.jit.script(m)
    for call in (scripted, through_a_file(scripted), *(trace(Parent(m)) for trace in TRACERS.values())):
        for batch in (7, 3, 1):
            assert_regroups(call, make_kts(batch=batch, key_dim=0, grad=True), REPEATED)


@pytest.mark.parametrize("cls", BOTH)
def test_a_leaf_may_be_traced_before_the_first_call(cls: RegroupClass) -> None:
    for model in (Parent(cls(REPEATED, NAMES)), Parent(Parent(cls(REPEATED, NAMES)))):
        traced = torchrec.fx.symbolic_trace(model, leaf_modules=["KTRegroupAsDict"])
        for batch in (7, 3, 0):
            assert_regroups(traced, make_kts(batch=batch, grad=True), REPEATED)


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_model_traced_before_the_first_call_runs(tracer: str) -> None:
    # TorchRec's graph fails on every run.
    traced = TRACERS[tracer](Parent(KTRegroupAsDict(REPEATED, NAMES)))
    for batch in (7, 3, 0):
        assert_regroups(traced, make_kts(batch=batch, grad=True), REPEATED)
    assert_regroups(traced, make_kts(SWAPPED, grad=True), REPEATED)
    assert_regroups(traced, make_kts(key_dim=0, grad=True), REPEATED)


def test_five_hundred_inputs_in_a_script() -> None:
    layout = [([f"k{i}_{j}" for j in range(3)], [2, 1, 3]) for i in range(500)]
    names = [key for keys, _ in layout for key in keys]
    groups = [names[::-3], names[1::5]]
    m = KTRegroupAsDict(groups, NAMES, layout=layout)
    assert_regroups(torch.jit.script(m), make_kts(layout, 16, grad=True), groups)


# --- compile and export ---------------------------------------------------------------------------


def compiled_frames(cls: RegroupClass, groups: list[list[str]], warm: bool, backend: str, inputs: str) -> int:
    """Number of graphs for the usual batches; every result is compared."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    m = cls(groups, NAMES)
    if warm:
        m(make_kts())
    if inputs == "KeyedTensors":
        call: Any = torch.compile(m, fullgraph=True, backend=counter)
    else:
        from_tensors = torch.compile(FromTensors(m), fullgraph=True, backend=counter)
        call = lambda kts: from_tensors(*values_of(kts))  # noqa: E731
    for batch in BATCHES:
        assert_regroups(call, make_kts(batch=batch, grad=True), groups)
    return counter.frame_count


@pytest.mark.parametrize("groups", [GROUPS, REPEATED], ids=["once", "repeated"])
@pytest.mark.parametrize("inputs", ["KeyedTensors", "tensors"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_compiled_modules_need_no_more_graphs(
    warm: bool, backend: str, inputs: str, groups: list[list[str]]
) -> None:
    theirs, ours = (compiled_frames(cls, groups, warm, backend, inputs) for cls in BOTH)
    assert ours <= theirs


def test_a_compiled_module_follows_the_order_of_keys() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(KTRegroupAsDict(REPEATED, NAMES), fullgraph=True, backend=counter)
    for _ in range(2):
        for layout in (LAYOUT, SWAPPED, LAYOUT[::-1], [(["a", "b"], [4, 4]), LAYOUT[1]]):
            assert_regroups(compiled, make_kts(layout, grad=True), REPEATED)
    # One graph each, and at most one more each when the module first sees that layouts vary.
    assert counter.frame_count <= 8


def test_other_eager_calls_do_not_recompile_a_module() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    m = KTRegroupAsDict(GROUPS, NAMES)
    m(make_kts())
    compiled = torch.compile(m, fullgraph=True, backend=counter)
    for n in range(1, 12):
        assert_regroups(compiled, make_kts(grad=True))
        m(make_kts([(["a", "b"], [3 + n, 5]), LAYOUT[1]]))
    assert counter.frame_count == 1


def test_a_compiled_call_leaves_the_module_usable() -> None:
    torch._dynamo.reset()
    m = KTRegroupAsDict(REPEATED, NAMES)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    assert_regroups(compiled, make_kts(grad=True), REPEATED)
    assert_regroups(m, make_kts(grad=True), REPEATED)
    assert_regroups(torch.jit.script(m), make_kts(grad=True), REPEATED)
    assert_regroups(compiled, make_kts(SWAPPED, grad=True), REPEATED)


def test_inductor() -> None:
    torch._dynamo.reset()
    groups = [["a", "c", "a"], ["d"]]
    compiled = torch.compile(KTRegroupAsDict(groups, NAMES), fullgraph=True, backend="inductor")
    for batch in (7, 3):
        assert_regroups(compiled, make_kts(batch=batch, grad=True), groups)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("groups", [GROUPS, REPEATED, OMITTED], ids=["once", "repeated", "omitted"])
def test_exports_with_a_dynamic_batch(groups: list[list[str]], warm: bool, strict: bool) -> None:
    m = KTRegroupAsDict(groups, NAMES)
    model = FromTensors(m)
    if warm:
        m(make_kts())
    batch = torch.export.Dim("batch", min=1, max=1000)
    exported = torch.export.export(
        model, tuple(values_of(make_kts(batch=4))), dynamic_shapes=({0: batch}, {0: batch}), strict=strict
    )
    assert m._is_inited == warm
    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    assert [str(node.target) for node in calls].count("torchrec_kt.regroup.default") == 1
    for node in calls:
        assert not any(isinstance(arg, torch.device) for arg in [*node.args, *node.kwargs.values()])
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    buffer.seek(0)
    for program in (exported, torch.export.load(buffer), exported.run_decompositions()):
        for size in (4, 9, 1, 2):
            kts = make_kts(batch=size)
            out = program.module()(*values_of(kts))
            assert list(out) == NAMES
            assert_regrouped(out, kts, groups)
    assert_regroups(m, make_kts(grad=True), groups)


# --- a real model ---------------------------------------------------------------------------------


class Model(nn.Module):
    """Two collections of embedding bags, a regroup, and a small network per group."""

    def __init__(self, cls: RegroupClass, groups: dict[str, list[str]], **options: Any) -> None:
        super().__init__()
        dims = {"f1": 8, "f2": 16, "f3": 32, "w1": 4, "w2": 12}
        tables = {
            key: EmbeddingBagConfig(
                name=f"t_{key}", embedding_dim=dim, num_embeddings=50, feature_names=[key]
            )
            for key, dim in dims.items()
        }
        cpu = torch.device("cpu")
        self.plain = EmbeddingBagCollection(tables=[tables[k] for k in ("f1", "f2", "f3")], device=cpu)
        self.weighted = EmbeddingBagCollection(
            tables=[tables[k] for k in ("w1", "w2")], device=cpu, is_weighted=True
        )
        self.regroup = cls(list(groups.values()), list(groups), **options)
        self.towers = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Linear(sum(dims[k] for k in keys), 8), nn.ReLU())
                for name, keys in groups.items()
            }
        )
        self.head = nn.Linear(8 * len(groups), 1)

    def forward(self, plain: KeyedJaggedTensor, weighted: KeyedJaggedTensor) -> Tensor:
        groups = self.regroup([self.plain(plain), self.weighted(weighted)])
        towers = [tower(groups[name]) for name, tower in self.towers.items()]
        return self.head(torch.cat(towers, 1)).squeeze(1)


def batches(count: int) -> list[tuple[KeyedJaggedTensor, KeyedJaggedTensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def ids(keys: list[str], size: int, weighted: bool) -> KeyedJaggedTensor:
        lengths = torch.randint(0, 4, (len(keys) * size,), generator=generator)
        total = int(lengths.sum())
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.randint(0, 50, (total,), generator=generator),
            lengths=lengths,
            weights=torch.rand(total, generator=generator) if weighted else None,
        )

    found: list[tuple[KeyedJaggedTensor, KeyedJaggedTensor, Tensor]] = []
    for n in range(count):
        size = (32, 32, 1, 7)[n % 4]
        plain = ids(["f1", "f2", "f3"], size, False)
        target = (plain["f1"].lengths() > plain["f2"].lengths()).float()
        found.append((plain, ids(["w1", "w2"], size, True), target))
    return found


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    losses: list[float] = []
    data = batches(4)
    for step in range(steps):
        plain, weighted, target = data[step % len(data)]
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(plain, weighted), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


EACH_ONCE = {"user": ["f1", "w2"], "object": ["f3", "f2"], "cross": ["w1"]}
SOME_TWICE = {"user": ["f1", "w2"], "object": ["f3", "f2"], "cross": ["w1", "f1"]}


def trained(cls: RegroupClass, groups: dict[str, list[str]], **options: Any) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = Model(cls, groups, **options)
    return train(model, 100), model


@pytest.mark.parametrize("groups", [EACH_ONCE, SOME_TWICE], ids=["each key once", "a key twice"])
def test_training_gives_the_same_losses_step_by_step(groups: dict[str, list[str]]) -> None:
    (theirs, their_model), (ours, our_model) = (trained(cls, groups) for cls in BOTH)
    assert ours == theirs
    assert sum(ours[-20:]) < 0.5 * sum(ours[:20])
    assert same(our_model.state_dict().values(), their_model.state_dict().values())


def test_training_from_a_prepared_module() -> None:
    torch.manual_seed(0)
    model = Model(KTRegroupAsDict, EACH_ONCE)
    assert isinstance(model.regroup, KTRegroupAsDict)
    model.regroup.prepare([model.plain, model.weighted])
    assert train(model, 100) == trained(TorchRecKTRegroupAsDict, EACH_ONCE)[0]


def test_training_goes_on_from_a_checkpoint_of_the_other() -> None:
    _, theirs = trained(TorchRecKTRegroupAsDict, SOME_TWICE)
    ours = Model(KTRegroupAsDict, SOME_TWICE)
    ours.load_state_dict(theirs.state_dict())
    assert train(ours, 10) == train(theirs, 10)
