"""What this package claims to mend is really broken upstream.

A failure here is good news: the claim that it names no longer holds and has to go from the documentation.
Faults that can bring the process down are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.regroup import KTRegroupAsDict as TorchRecKTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedTensor, permute_multi_embedding, regroup_kts

from .helpers import (
    GROUPS,
    LAYOUT,
    NAMES,
    OMITTED,
    REPEATED,
    SWAPPED,
    Kts,
    Layout,
    make_kts,
    on_meta,
    reference,
    same,
    total,
    uninitialised_is_nan,
    values_of,
)
from .models import Parent


def module(groups: Any = GROUPS) -> TorchRecKTRegroupAsDict:
    return TorchRecKTRegroupAsDict(groups, [f"out{i}" for i in range(len(groups))])


def warm(groups: Any = GROUPS, kts: Kts | None = None) -> TorchRecKTRegroupAsDict:
    m = module(groups)
    m(make_kts() if kts is None else kts)
    return m


def raises(error: type[BaseException], call: Callable[[], Any]) -> bool:
    try:
        call()
    except error:
        return True
    return False


def wrong(call: Callable[[Kts], Any], kts: Kts, groups: Any = GROUPS) -> bool:
    """Something comes back, and it is not the slices."""
    outputs = call(kts)
    outs = list(outputs.values()) if isinstance(outputs, dict) else list(outputs)
    return not same([t.detach() for t in outs], [t.detach() for t in reference(kts, groups)])


def omitted_gradients_are_not_zero(call: Callable[[Kts], list[Tensor]]) -> bool:
    with uninitialised_is_nan():
        kts = make_kts(grad=True)
        grads = torch.autograd.grad(total(call(kts)), values_of(kts))
    return not torch.equal(grads[0][:, :3], torch.zeros(3, 3))


def gradient_of_an_unused_input_is_not_zero() -> bool:
    with uninitialised_is_nan():
        kts = make_kts([(["a"], [4]), (["b"], [4])], grad=True)
        module([["a"]])(kts)["out0"].sum().backward()
    grad = kts[1].values().grad
    return grad is not None and not torch.equal(grad, torch.zeros(3, 4))


def double_backward_is_not_twice(call: Callable[[Kts], list[Tensor]]) -> bool:
    x = torch.randn(2, 5, requires_grad=True)
    (out,) = call([KeyedTensor(["a", "b"], [2, 3], x)])
    (first,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * x).sum(), x)
    return not torch.allclose(second, 4 * x)


def sum_of_1024(call: Callable[[Kts], list[Tensor]]) -> float:
    x = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    (out,) = call([KeyedTensor(["a", "b"], [1, 1], x)])
    (grad,) = torch.autograd.grad(out.sum(), x)
    return grad[0, 0].item()


def shrunk_widths_read_other_rows() -> bool:
    m = warm([["a", "b"]], [KeyedTensor(["a", "b"], [3, 5], torch.zeros(2, 8))])
    memory = torch.arange(100.0)  # so large that nothing behind it is read
    out = m([KeyedTensor(["a", "b"], [1, 1], memory[:4].view(2, 2))])["out0"]
    return out.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7, 8, 9]]


def another_key_dim_fails() -> bool:
    memory = torch.randn(2, 100)  # so large that nothing behind it is read
    kts = [
        KeyedTensor(list(keys), list(widths), memory[i, : 3 * sum(widths)].view(-1, 3), 0)
        for i, (keys, widths) in enumerate(LAYOUT)
    ]
    return raises(IndexError, lambda: warm()(kts))


def narrow_values_read_other_rows() -> bool:
    memory = torch.arange(100.0)
    out = module([["a"]])([KeyedTensor(["a"], [7], memory[:10].view(2, 5))])["out0"]
    return out[0].tolist() == [0, 1, 2, 3, 4, 5, 6]


def meta_first_gives_zeros() -> bool:
    m = warm(kts=on_meta(make_kts()))
    return all(t.device.type == "cpu" and not t.any() for t in m(make_kts()).values())


def clear_cache_keeps_the_key_dim() -> bool:
    square: Layout = [(["a", "b"], [3, 5]), (["c", "d"], [3, 5])]
    m = warm(kts=make_kts(square, 8))
    m.clear_cache()
    kts = make_kts(square, 8, key_dim=0)
    return m(kts)["out0"].shape != reference(kts, GROUPS)[0].shape


def compiled_module_is_stale() -> bool:
    torch._dynamo.reset()
    compiled = torch.compile(module(), fullgraph=True, backend="eager")
    compiled(make_kts())
    return wrong(compiled, make_kts(SWAPPED))


def function_transform_fails(transform: str) -> bool:
    m = warm([["b", "a"]], make_kts(LAYOUT[:1]))

    def call(values: Tensor) -> Tensor:
        return m([KeyedTensor(["a", "b"], [3, 5], values)])["out0"]

    x = torch.randn(3, 8)
    return raises(
        RuntimeError,
        {
            "jvp": lambda: torch.func.jvp(call, (x,), (x,)),
            "vjp": lambda: torch.func.vjp(call, x),
            "vmap": lambda: torch.func.vmap(call)(torch.randn(2, 3, 8)),
        }[transform],
    )


def repeated_key_takes_the_last() -> bool:
    kts = [
        KeyedTensor(["a", "b"], [2, 3], torch.ones(1, 5)),
        KeyedTensor(["a"], [2], torch.full((1, 2), 9.0)),
    ]
    first = regroup_kts(kts, [["a"]])[0]
    return module([["a"]])(kts)["out0"].tolist() == [[9, 9]] and first.tolist() == [[1, 1]]


def traced_model_fails() -> bool:
    traced = torch.fx.symbolic_trace(Parent(module()))
    return raises(ValueError, lambda: traced(make_kts()))


def regroup_outputs_are_views() -> bool:
    kts = make_kts(grad=True)
    outs = KeyedTensor.regroup(kts, GROUPS)
    return not outs[0].is_contiguous() and raises(RuntimeError, lambda: outs[0].mul_(2))


def parent_in_double_fails() -> bool:
    model = nn.ModuleList([warm()]).double()
    return raises(NotImplementedError, lambda: model[0](make_kts(dtype=torch.float64)))


def as_list(groups: Any) -> Callable[[Kts], list[Tensor]]:
    return lambda kts: list(module(groups)(kts).values())


EQUAL_WIDTHS: Layout = [(["a", "b"], [4, 4]), (["c", "d"], [4, 4])]

CLAIMS: dict[str, Callable[[], bool]] = {
    # The plan that is kept.
    "KTRegroupAsDict: swapped keys give the columns of the old order": lambda: wrong(
        warm(), make_kts(SWAPPED)
    ),
    "KTRegroupAsDict: swapped inputs give the columns of the old order": lambda: wrong(
        warm(kts=make_kts(EQUAL_WIDTHS)), make_kts(EQUAL_WIDTHS[::-1])
    ),
    "KTRegroupAsDict: changed widths give columns of the old widths": lambda: wrong(
        warm(), make_kts([(["a", "b"], [4, 4]), LAYOUT[1]])
    ),
    "KTRegroupAsDict: renamed keys give the columns of other keys": lambda: (
        not raises(KeyError, lambda: warm()(make_kts([(["z", "b"], [3, 5]), LAYOUT[1]])))
    ),
    "KTRegroupAsDict: shrunk widths read other rows": shrunk_widths_read_other_rows,
    "KTRegroupAsDict: another key_dim fails": another_key_dim_fails,
    "KTRegroupAsDict: clear_cache does not forget the key_dim": clear_cache_keeps_the_key_dim,
    "KTRegroupAsDict: a compiled module keeps the old order of keys": compiled_module_is_stale,
    "KTRegroupAsDict: a script keeps the old order of keys": lambda: wrong(
        torch.jit.script(warm()), make_kts(SWAPPED)
    ),
    # Gradients.
    "KTRegroupAsDict: gradients of unused keys are uninitialised": lambda: omitted_gradients_are_not_zero(
        as_list(OMITTED)
    ),
    "regroup_kts: gradients of unused keys are uninitialised": lambda: omitted_gradients_are_not_zero(
        lambda kts: regroup_kts(kts, OMITTED)
    ),
    "permute_multi_embedding: gradients of unused keys are uninitialised": lambda: (
        omitted_gradients_are_not_zero(lambda kts: permute_multi_embedding(kts, OMITTED))
    ),
    "KTRegroupAsDict: the gradient of an unused input is uninitialised": gradient_of_an_unused_input_is_not_zero,
    "KTRegroupAsDict: the second derivative is wrong": lambda: double_backward_is_not_twice(
        as_list([["b", "a"]])
    ),
    "KTRegroupAsDict: 1024 gradients of 1 in bfloat16 add up to 256": lambda: (
        sum_of_1024(as_list([["a"] * 1024 + ["b"]])) == 256
    ),
    "KeyedTensor.regroup: 1024 gradients of 1 in bfloat16 add up to 256": lambda: (
        sum_of_1024(lambda kts: KeyedTensor.regroup(kts, [["a"] * 1024 + ["b"]])) == 256
    ),
    **{
        f"KTRegroupAsDict: torch.func.{name} fails": lambda name=name: function_transform_fails(name)
        for name in ("jvp", "vjp", "vmap")
    },
    # Types and shapes.
    **{
        f"KTRegroupAsDict: {dtype} is not supported": lambda dtype=dtype: raises(
            NotImplementedError, lambda: module()(make_kts(dtype=dtype))
        )
        for dtype in (torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)
    },
    "KTRegroupAsDict: a model in float64 fails": parent_in_double_fails,
    "KTRegroupAsDict: inputs of different types fail": lambda: raises(
        RuntimeError, lambda: module()([*make_kts(LAYOUT[:1]), *make_kts(LAYOUT[1:], dtype=torch.float16)])
    ),
    "KTRegroupAsDict: three-dimensional values lose their last dimension": lambda: (
        module()(make_kts(rank=3))["out0"].dim() == 2
    ),
    "KTRegroupAsDict: values narrower than their widths read other rows": narrow_values_read_other_rows,
    "KeyedTensor.regroup: key_dim 0 fails when every key is used once": lambda: raises(
        RuntimeError, lambda: KeyedTensor.regroup(make_kts(key_dim=0), GROUPS)
    ),
    "KeyedTensor.regroup: outputs are strided views that cannot be written to": regroup_outputs_are_views,
    # Names.
    "KTRegroupAsDict takes the last of a repeated key, regroup_kts the first": repeated_key_takes_the_last,
    "KTRegroupAsDict: a repeated output name loses a group": lambda: (
        len(TorchRecKTRegroupAsDict(GROUPS, ["x", "x"])(make_kts())) == 1
    ),
    "KTRegroupAsDict: no inputs and no groups fail at the first call": lambda: raises(
        AssertionError, lambda: module([])([])
    ),
    "KeyedTensor.regroup: no groups fail": lambda: raises(
        ValueError, lambda: KeyedTensor.regroup(make_kts(), [])
    ),
    # Graphs and devices.
    "KTRegroupAsDict: a first call on meta makes later results zeros": meta_first_gives_zeros,
    "KTRegroupAsDict: a script made before the first call fails": lambda: raises(
        RuntimeError, lambda: torch.jit.script(module())(make_kts())
    ),
    "KTRegroupAsDict: torch.fx fails before the first call": lambda: raises(
        AttributeError, lambda: torch.fx.symbolic_trace(module())
    ),
    "KTRegroupAsDict: a model traced before the first call never runs": traced_model_fails,
}


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")
@pytest.mark.parametrize("claim", CLAIMS)
def test_upstream_still_shows(claim: str) -> None:
    assert CLAIMS[claim](), (
        f"not seen with torchrec {version('torchrec')}: drop this claim from the documentation: {claim}"
    )


def test_these_checks_can_tell_right_from_wrong() -> None:
    """The observers find no fault where upstream is right."""
    kts = make_kts()
    assert not wrong(warm(), kts)
    assert not wrong(warm(REPEATED), kts, REPEATED)
    assert not omitted_gradients_are_not_zero(lambda given: KeyedTensor.regroup(given, OMITTED))
    assert not double_backward_is_not_twice(lambda given: KeyedTensor.regroup(given, [["b", "a"]]))
    assert list(TorchRecKTRegroupAsDict(GROUPS, NAMES)(kts)) == NAMES
