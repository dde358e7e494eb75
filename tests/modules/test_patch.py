"""``patch_keyed_tensor`` and ``patch_fbgemm``: in force, in graphs, nested, and taken back."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torchrec.fx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec.modules.regroup import KTRegroupAsDict as TorchRecKTRegroupAsDict
from torchrec.sparse.jagged_tensor import (
    KeyedTensor,
    _fbgemm_permute_pooled_embs,
    _regroup_keyed_tensors,
    permute_multi_embedding,
    regroup_kts,
)

import torchrec_kt
from torchrec_kt import patch_fbgemm, patch_keyed_tensor

from .helpers import (
    GROUPS,
    LAYOUT,
    OMITTED,
    OTHER_INPUTS,
    REPEATED,
    SWAPPED,
    Kts,
    Late,
    assert_regrouped,
    assert_regroups,
    gradients,
    make_kts,
    reference,
    same,
    tensors,
    through_a_file,
    uninitialised_is_nan,
    values_of,
)
from .models import OnClass, OnClassAsDict

PATCHES: dict[str, Callable[[], Any]] = {"KeyedTensor": patch_keyed_tensor, "FBGEMM": patch_fbgemm}
BOTH = pytest.mark.parametrize("what", PATCHES)

THEIRS = dict(KeyedTensor.__dict__)


def in_force(what: str) -> bool:
    """Asked of what is patched, not of the patch."""
    if what == "KeyedTensor":
        return KeyedTensor.regroup is torchrec_kt.regroup
    values = [torch.zeros(1, 2, dtype=torch.float64)]
    plan = torch.ops.fbgemm.kt_regroup_arguments(torch.empty(0), [["a", "b"]], [[1, 1]], [["b"]])
    try:
        torch.ops.fbgemm.permute_multi_embedding(values, *plan)
        torch.ops.fbgemm.permute_multi_embedding_function(values, *plan)
    except NotImplementedError:  # FBGEMM has no float64
        return False
    return True


@pytest.fixture(autouse=True)
def _nothing_is_left_patched() -> Any:
    assert not any(map(in_force, PATCHES))
    yield
    assert not any(map(in_force, PATCHES))
    for name in ("regroup", "regroup_as_dict"):
        assert KeyedTensor.__dict__[name] is THEIRS[name]


# --- putting on and taking off --------------------------------------------------------------------


@BOTH
def test_context(what: str) -> None:
    with PATCHES[what]() as patch:
        assert in_force(what)
        assert "in force" in repr(patch)
    assert not in_force(what)
    assert "undone" in repr(patch)


@BOTH
def test_plain_call(what: str) -> None:
    patch = PATCHES[what]()
    assert in_force(what)
    patch.undo()
    assert not in_force(what)
    patch.undo()
    assert not in_force(what)


@BOTH
def test_the_patch_outlives_its_object(what: str) -> None:
    patch = PATCHES[what]()
    PATCHES[what]()  # dropped at once: this one is for good
    patch.undo()
    assert in_force(what)
    # Only for the sake of the other tests.
    (
        torchrec_kt.modules.patch._KEYED_TENSOR
        if what == "KeyedTensor"
        else torchrec_kt.modules.patch._FBGEMM
    ).leave()


@BOTH
def test_errors_inside_pass_and_take_it_off(what: str) -> None:
    with pytest.raises(KeyError, match="zz"), PATCHES[what]():
        torchrec_kt.regroup(make_kts(), [["zz"]])
    assert not in_force(what)


@BOTH
def test_nested(what: str) -> None:
    with PATCHES[what]():
        with PATCHES[what]():
            assert in_force(what)
        assert in_force(what)
        inner = PATCHES[what]()
    assert in_force(what)
    inner.undo()
    assert not in_force(what)


@BOTH
def test_undone_in_any_order(what: str) -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [1, 0, 2]):
        patches = [PATCHES[what]() for _ in range(3)]
        for n, i in enumerate(order):
            patches[i].undo()
            patches[i].undo()
            assert in_force(what) == (n < 2)


def test_both_at_once_in_any_order() -> None:
    first, second = patch_keyed_tensor(), patch_fbgemm()
    first.undo()
    assert (in_force("KeyedTensor"), in_force("FBGEMM")) == (False, True)
    third = patch_keyed_tensor()
    second.undo()
    assert (in_force("KeyedTensor"), in_force("FBGEMM")) == (True, False)
    third.undo()


@BOTH
def test_an_undone_patch_is_not_entered_again(what: str) -> None:
    patch = PATCHES[what]()
    patch.undo()
    with pytest.raises(RuntimeError, match=r"patch_\w+\(\) again"), patch:
        pass


@BOTH
def test_an_entered_patch_may_be_undone_inside(what: str) -> None:
    with PATCHES[what]() as patch:
        patch.undo()
        assert not in_force(what)


@BOTH
def test_from_many_threads(what: str) -> None:
    start = threading.Barrier(8)

    def work(n: int) -> bool:
        start.wait()
        good = True
        for i in range(50):
            if (n + i) % 2:
                with PATCHES[what]():
                    good = good and in_force(what)
            else:
                patch = PATCHES[what]()
                good = good and in_force(what)
                patch.undo()
        return good

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@BOTH
def test_one_patch_undone_by_many_threads(what: str) -> None:
    with PATCHES[what]():
        patch, start = PATCHES[what](), threading.Barrier(8)

        def undo(_: int) -> None:
            start.wait()
            patch.undo()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(undo, range(8)))
        assert in_force(what)


def test_a_later_patch_by_somebody_else_is_left(caplog: pytest.LogCaptureFixture) -> None:
    patch = patch_keyed_tensor()
    foreign = staticmethod(lambda keyed_tensors, groups: [])
    KeyedTensor.regroup = foreign  # pyright: ignore[reportAttributeAccessIssue]
    with caplog.at_level(logging.WARNING, logger="torchrec_kt"):
        patch.undo()
    try:
        assert KeyedTensor.__dict__["regroup"] is foreign
        assert KeyedTensor.__dict__["regroup_as_dict"] is THEIRS["regroup_as_dict"]
        assert [r.getMessage() for r in caplog.records] == [
            "KeyedTensor.regroup was replaced again after patch_keyed_tensor(); left as it is"
        ]
    finally:
        KeyedTensor.regroup = THEIRS["regroup"]


def test_without_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrec_kt.modules.patch, "_OPERATOR", "no_such_operator")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="fbgemm::no_such_operator"):
            patch_fbgemm()


def test_a_patch_that_fails_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def impl(library: Any, name: str, fn: Any, key: str, **options: Any) -> None:
        if key == "Autograd":
            raise RuntimeError("no")
        original(library, name, fn, key, **options)

    original = torch.library.Library.impl
    monkeypatch.setattr(torch.library.Library, "impl", impl)
    with pytest.raises(RuntimeError, match="no"):
        patch_fbgemm()
    assert not in_force("FBGEMM")
    monkeypatch.undo()
    with patch_fbgemm():
        assert in_force("FBGEMM")


# --- KeyedTensor ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", OTHER_INPUTS)
def test_the_static_methods_of_keyed_tensor(case: str) -> None:
    with patch_keyed_tensor():
        for groups in (GROUPS, REPEATED, OMITTED):
            names = [f"out{i}" for i in range(len(groups))]
            kts = OTHER_INPUTS[case]()
            assert_regroups(lambda given, g=groups: KeyedTensor.regroup(given, g), kts, groups)
            as_dict = KeyedTensor.regroup_as_dict(keyed_tensors=kts, groups=groups, keys=names)
            assert list(as_dict) == names
            assert_regrouped(as_dict, kts, groups)
            assert_regrouped(KeyedTensor.regroup([Late(kt) for kt in kts], groups), kts, groups)  # pyright: ignore


def test_instances_and_subclasses_see_it_too() -> None:
    class Mine(KeyedTensor):
        pass

    kts = make_kts(key_dim=0)  # which TorchRec's method refuses
    with patch_keyed_tensor():
        assert_regrouped(Mine.regroup(kts, GROUPS), kts)
        assert_regrouped(kts[0].regroup(kts, GROUPS), kts)


def test_helpers_of_torchrec_go_on_working() -> None:
    kts = make_kts()
    with patch_keyed_tensor():
        for call in (
            permute_multi_embedding,
            regroup_kts,
            _regroup_keyed_tensors,
            _fbgemm_permute_pooled_embs,
        ):
            assert_regrouped(call(kts, GROUPS), kts)
        m = TorchRecKTRegroupAsDict(GROUPS, ["x", "y"])
        assert_regrouped(m(kts), kts)
        assert_regrouped(torch.jit.script(m)(kts), kts)


STATIC_GRAPHS: dict[str, Callable[[nn.Module], Any]] = {
    "script": torch.jit.script,
    "saved script": lambda m: through_a_file(torch.jit.script(m)),
    "torch.fx": torch.fx.symbolic_trace,
    "torchrec.fx": torchrec.fx.symbolic_trace,
    "scripted trace": lambda m: torch.jit.script(torch.fx.symbolic_trace(m)),
    "saved scripted trace": lambda m: through_a_file(torch.jit.script(torchrec.fx.symbolic_trace(m))),
}


def text_of(graph: Any) -> str:
    if isinstance(graph, torch.fx.GraphModule):
        return "torchrec_kt" if "torchrec_kt" in graph.code else graph.code
    return str(graph.inlined_graph)


@pytest.mark.parametrize("model", [OnClass, OnClassAsDict])
@pytest.mark.parametrize("kind", STATIC_GRAPHS)
def test_graphs_of_models_that_call_the_static_methods(kind: str, model: type[nn.Module]) -> None:
    groups = [["a", "c", "a"], ["d", "b"]]

    def make(model: type[nn.Module]) -> Any:
        # A class of its own, since TorchScript compiles each class once.
        return STATIC_GRAPHS[kind](type(model.__name__, (model,), {"__module__": model.__module__})())

    before = make(model)
    with patch_keyed_tensor():
        inside = make(model)
        for graph in (before, inside):
            for batch in (3, 5, 0):
                assert_regroups(graph, make_kts(batch=batch, grad=True), groups)
        assert_regroups(inside, make_kts(SWAPPED, grad=True), groups)
    after = make(model)
    for graph in (before, inside, after):
        assert_regroups(graph, make_kts(grad=True), groups)
    assert ["torchrec_kt" in text_of(graph) for graph in (before, inside, after)] == [False, True, False]


def test_scripting_first_under_the_patch() -> None:
    # TorchScript compiles the class once for the process: here while it is patched.
    code = """
import torch
from torchrec.sparse.jagged_tensor import KeyedTensor
from tests.modules.models import OnClass, OnClassAsDict
from torchrec_kt import patch_keyed_tensor
kts = [KeyedTensor(["a", "b"], [3, 5], torch.randn(2, 8)), KeyedTensor(["c", "d"], [2, 4], torch.randn(2, 6))]
with patch_keyed_tensor():
    inside = torch.jit.script(OnClassAsDict())
after = torch.jit.script(OnClass())
for y in (inside(kts)["y"], after(kts)[1]):
    assert torch.equal(y, torch.cat([kts[1]["d"], kts[0]["b"]], 1))
print(["torchrec_kt" in str(graph.inlined_graph) for graph in (inside, after)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[True, False]", done.stderr


# --- FBGEMM ---------------------------------------------------------------------------------------


def theirs(groups: Any, kts: Kts | None = None) -> TorchRecKTRegroupAsDict:
    m = TorchRecKTRegroupAsDict(groups, [f"out{i}" for i in range(len(groups))])
    m(make_kts() if kts is None else kts)
    return m


CALLERS: dict[str, Callable[[Any], Callable[[Kts], Any]]] = {
    "module": theirs,
    "script": lambda groups: torch.jit.script(theirs(groups)),
    "saved script": lambda groups: through_a_file(torch.jit.script(theirs(groups))),
    "scripted trace": lambda groups: torch.jit.script(torch.fx.symbolic_trace(theirs(groups))),
    "permute_multi_embedding": lambda groups: lambda kts: permute_multi_embedding(kts, groups),
    "regroup_kts": lambda groups: lambda kts: regroup_kts(kts, groups),
    "compiled": lambda groups: torch.compile(theirs(groups), backend="aot_eager", fullgraph=True),
}


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize(
    "groups", [OMITTED, [["b", "b"], ["d", "b"]]], ids=["omitted", "repeated and omitted"]
)
def test_whoever_calls_the_operator_gets_right_gradients(caller: str, groups: list[list[str]]) -> None:
    torch._dynamo.reset()
    call = CALLERS[caller](groups)
    if caller != "compiled":  # which would keep the graph compiled before
        with uninitialised_is_nan():
            kts = make_kts(grad=True)
            assert not same(
                gradients(call(kts), values_of(kts)), gradients(reference(kts, groups), values_of(kts))
            )
    with patch_fbgemm(), uninitialised_is_nan():
        for batch in (4, 1, 0, 33):
            assert_regroups(call, make_kts(batch=batch, grad=True), groups)
    kts = make_kts()
    assert_regrouped(call(kts), kts, groups)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64, torch.bool], ids=str)
def test_types_that_fbgemm_does_not_know(dtype: torch.dtype) -> None:
    script = torch.jit.script(theirs(REPEATED))
    kts = make_kts(dtype=dtype, grad=dtype.is_floating_point)
    with patch_fbgemm():
        assert_regroups(script, kts, REPEATED)


def test_repeats_are_summed_in_float32() -> None:
    layout = [(["a", "b"], [1, 1])]
    script = torch.jit.script(theirs([["a"] * 1024, ["b"]], make_kts(layout)))
    for expected in (256.0, 1024.0):
        kts = make_kts(layout, batch=1, dtype=torch.bfloat16, grad=True)
        if expected == 256.0:
            (grad,) = gradients(script(kts), values_of(kts))
        else:
            with patch_fbgemm():
                (grad,) = gradients(script(kts), values_of(kts))
        assert grad.tolist() == [[expected, 1.0]]


def operator(values: list[Tensor]) -> list[Tensor]:
    keys, widths = [list(k) for k, _ in LAYOUT], [list(w) for _, w in LAYOUT]
    plan = torch.ops.fbgemm.kt_regroup_arguments(torch.empty(0), keys, widths, [["b", "b"], ["d"]])
    return torch.ops.fbgemm.permute_multi_embedding(values, *plan)


def test_derivatives_of_the_operator() -> None:
    inputs = [torch.randn(2, 8, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)]
    with patch_fbgemm():
        needing = [x.clone().requires_grad_() for x in inputs]
        call: Callable[..., Any] = lambda *values: tuple(operator(list(values)))  # noqa: E731
        assert torch.autograd.gradcheck(call, needing)
        assert torch.autograd.gradgradcheck(call, needing)
        grads = torch.func.grad(lambda first, second: sum((t**2).sum() for t in operator([first, second])))(
            *inputs
        )
    expected = torch.zeros(2, 8, dtype=torch.float64)
    expected[:, 3:] = 4 * inputs[0][:, 3:]
    torch.testing.assert_close(grads, expected)


def test_no_grad_and_inference_mode() -> None:
    kts = make_kts()
    script = torch.jit.script(theirs(REPEATED))
    with patch_fbgemm():
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                assert_regrouped(script(kts), kts, REPEATED)
        assert_regroups(script, make_kts(grad=True), REPEATED)


def test_fake_and_meta_tensors() -> None:
    m = theirs(REPEATED)
    with patch_fbgemm():
        with FakeTensorMode() as mode:
            fake: list[Tensor] = [mode.from_tensor(v) for v in values_of(make_kts(batch=7))]
            outs = operator(fake)
        assert [tuple(t.shape) for t in outs] == [(7, 10), (7, 4)]
        meta = [KeyedTensor(kt.keys(), kt.length_per_key(), kt.values().to("meta")) for kt in make_kts()]
        m.to("meta")
        assert {t.device.type for t in tensors(m(meta))} == {"meta"}
        with pytest.raises(ValueError, match="permutes is on meta"):
            m(make_kts())  # FBGEMM returns zeros


HOSTILE: dict[str, tuple[tuple[int, ...], str]] = {
    "no such input": ((5, 0, 0, 0, 3, 0), "input"),
    "no such output": ((0, 9, 0, 0, 3, 0), "output"),
    "outside the input": ((0, 0, 6, 0, 3, 0), "columns"),
    "outside the output": ((0, 0, 0, 1, 3, 0), "columns"),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("name", ["permute_multi_embedding", "permute_multi_embedding_function"])
def test_plans_that_would_reach_outside_raise(name: str, case: str) -> None:
    # Without the patch some of these bring the process down.
    row, message = HOSTILE[case]
    plan = torch.tensor([row], dtype=torch.int32)
    widths = torch.tensor([8], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    with patch_fbgemm(), pytest.raises(Exception, match=message):
        getattr(torch.ops.fbgemm, name)([torch.zeros(2, 8)], plan, *widths, [3])


def test_the_internal_function_both_ways() -> None:
    values = values_of(make_kts(batch=4))
    keys, widths = [list(k) for k, _ in LAYOUT], [list(w) for _, w in LAYOUT]
    plan = torch.ops.fbgemm.kt_regroup_arguments(torch.empty(0), keys, widths, [["b", "b"], ["d"]])
    permutes, in_shapes, out_shapes, _ = plan
    with patch_fbgemm(), uninitialised_is_nan():
        outs = torch.ops.fbgemm.permute_multi_embedding_function(values, *plan, False)
        back = torch.ops.fbgemm.permute_multi_embedding_function(
            outs, permutes, out_shapes, in_shapes, [8, 6], True
        )
    assert same(outs, reference(make_like(values), [["b", "b"], ["d"]]))
    expected = [torch.zeros(4, 8), torch.zeros(4, 6)]
    expected[0][:, 3:] = 2 * values[0][:, 3:]
    expected[1][:, 2:] = values[1][:, 2:]
    assert same(back, expected)


def make_like(values: list[Tensor]) -> Kts:
    return [KeyedTensor(list(k), list(w), v) for (k, w), v in zip(LAYOUT, values)]


def test_exported_under_the_patch() -> None:
    inputs = tuple(values_of(make_kts(batch=4)))
    module = TorchRecKTRegroupAsDict(GROUPS, ["x", "y"])
    kts = make_kts(batch=4)
    module(kts)

    class Regroup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.regroup = module

        def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
            return self.regroup(make_like([first, second]))

    with patch_fbgemm():
        program = torch.export.export(Regroup(), inputs).run_decompositions()
    assert "torchrec_kt.regroup" in program.graph_module.code
    assert_regrouped(program.module()(*inputs), make_like(list(inputs)))
