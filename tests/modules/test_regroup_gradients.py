"""Derivatives of ``KTRegroupAsDict``: unused and repeated features, higher orders, transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from ..reference import poison
from .helpers import (
    GROUPS,
    LAYOUT,
    OMITTED,
    REPEATED,
    SIZES,
    assert_regrouped,
    assert_regroups,
    gradients,
    layout_of,
    make_kts,
    module,
    reference,
    same,
    tensors,
    total,
    uninitialised_is_nan,
    values_of,
    whole_weights,
)

# --- features that no group uses --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_omitted_features_have_zero_gradients_in_poisoned_memory(
    size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    batch, keys, width = size
    layout, names = layout_of(keys, width)
    used = names[1::2]
    groups = [used[::-1], [used[0], used[0]], []]
    m = module(groups)
    for _ in range(6):
        kts = make_kts(layout, batch, dtype=dtype, grad=True)
        outs = tensors(m(kts))
        poison(*values_of(kts), copies=4)
        found = gradients(outs, values_of(kts))
        for kt, grad in zip(kts, found):
            for key, part in zip(kt.keys(), grad.split(kt.length_per_key(), 1)):
                uses = sum(group.count(key) for group in groups)
                assert torch.equal(part, torch.full_like(part, uses)), key


@pytest.mark.parametrize("key_dim", [0, 1, 2])
@pytest.mark.parametrize("size", SIZES[:-1], ids=str)
def test_nothing_uninitialised_reaches_outputs_or_gradients(size: tuple[int, int, int], key_dim: int) -> None:
    batch, keys, width = size
    layout, names = layout_of(keys, width)
    scattered = [names[::3], names[1::3][::-1], names[:1] * 2]
    with_one_gap = [names[: max(1, keys // 4)][::-1]]
    for groups in (scattered, with_one_gap):
        kts = make_kts(layout, min(batch, 16), grad=True, key_dim=key_dim, rank=max(2, key_dim + 1))
        with uninitialised_is_nan():
            assert_regroups(module(groups), kts, groups)


@pytest.mark.parametrize(
    "groups", [OMITTED, [["a", "b"]], [["b", "b"], ["d", "b"]], [[], ["d"]], [["a"]]], ids=str
)
@pytest.mark.parametrize("batch", [4, 1024])
def test_omissions_of_every_kind(groups: list[list[str]], batch: int) -> None:
    m = module(groups)
    for _ in range(40):
        kts = make_kts(batch=batch, grad=True)
        outs = tensors(m(kts))
        poison(*values_of(kts), copies=8)
        expected = gradients(reference(kts, groups), values_of(kts))
        assert same(gradients(outs, values_of(kts)), expected)


def test_a_wholly_unused_input_gets_no_gradient_or_zeros() -> None:
    m = module([["a"]])
    for _ in range(100):
        kts = make_kts([(["a"], [4]), (["b"], [4])], grad=True)
        out = m(kts)["out0"]
        poison(*values_of(kts))
        out.sum().backward()
        unused = kts[1].values().grad
        assert unused is None or torch.equal(unused, torch.zeros(3, 4))


def test_padding_columns_have_zero_gradients() -> None:
    m = module()
    with uninitialised_is_nan():
        kts = make_kts(padding=3, grad=True)
        grads = gradients(m(kts), values_of(kts))
    assert all(torch.equal(g[:, -3:], torch.zeros(3, 3)) for g in grads)
    assert all(torch.equal(g[:, :-3], torch.ones_like(g[:, :-3])) for g in grads)


def test_a_group_outside_the_loss_has_zero_gradients() -> None:
    m = module()
    with uninitialised_is_nan():
        kts = make_kts(grad=True)
        out = m(kts)["out0"]
        grads = gradients([out], values_of(kts))
    assert grads[0].tolist() == [[1] * 3 + [0] * 5] * 3
    assert grads[1].tolist() == [[1] * 2 + [0] * 4] * 3


def test_memory_used_by_other_operators_leaves_no_trace() -> None:
    m = module(OMITTED)
    for _ in range(200):
        x = torch.randn(4, 8) @ torch.randn(8, 8)
        del x
        kts = make_kts(batch=4, grad=True)
        grads = gradients(m(kts), values_of(kts))
        assert not grads[0][:, :3].any()
        assert not grads[1][:, :2].any()


def test_sgd_does_not_touch_a_feature_that_no_group_uses() -> None:
    weight = nn.Parameter(torch.randn(64, 8))
    before = weight.detach().clone()
    m = module([["b"]])
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        loss = (m([KeyedTensor(["a", "b"], [3, 5], weight)])["out0"] ** 2).sum()
        poison(weight)
        loss.backward()
        optimizer.step()
    assert torch.equal(weight[:, :3], before[:, :3])
    assert torch.allclose(weight[:, 3:], before[:, 3:] * 0.8**20, rtol=1e-4, atol=1e-6)


# --- features used more than once -------------------------------------------------------------------


@pytest.mark.parametrize("uses", [2, 3, 4, 5])
def test_gradients_of_a_repeated_feature_add_up(uses: int) -> None:
    groups = [["a", "b"]] + [["a"]] * (uses - 1)
    kts = make_kts([(["a", "b"], [3, 2])], 5, grad=True)
    outs = tensors(module(groups)(kts))
    loss = total((i + 1) * out for i, out in enumerate(outs))
    loss.backward()
    grad = kts[0].values().grad
    assert grad is not None
    assert grad.tolist() == [[uses * (uses + 1) / 2] * 3 + [1] * 2] * 5


@pytest.mark.parametrize(
    "groups",
    [[["a", "a"]], [["a"], ["a"]], [["a", "b"], ["a", "b"]], [["b", "a", "b", "b", "d"], ["a", "a"]]],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_repetitions_within_and_across_groups(groups: list[list[str]], dtype: torch.dtype) -> None:
    assert_regroups(module(groups), make_kts(batch=6, dtype=dtype, grad=True), groups)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("uses", [2, 16, 64, 256])
@pytest.mark.parametrize("across", [False, True], ids=["in one group", "across groups"])
def test_sums_of_gradients_are_rounded_once(dtype: torch.dtype, uses: int, across: bool) -> None:
    groups = [["a"]] * uses if across else [["a"] * uses]
    values = torch.randn(3, 5).to(dtype).requires_grad_()
    outs = tensors(module(groups)([KeyedTensor(["a", "b"], [4, 1], values)]))
    weights = [torch.rand(out.shape).to(dtype) for out in outs]
    (found,) = gradients(outs, [values], weights)
    flat = torch.cat([w.reshape(3, -1, 4) for w in weights], 1)
    exact = flat.double().sum(1)
    if dtype == torch.float32:
        assert torch.allclose(found[:, :4].double(), exact, rtol=uses * 2**-24, atol=0)
    else:
        # float32 sums of so few values are exact enough to round to the same half, ties aside.
        assert torch.equal(found[:, :4], flat.float().sum(1).to(dtype)) or torch.allclose(
            found[:, :4].double(), exact, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=0
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_thousand_uses_do_not_stall(dtype: torch.dtype) -> None:
    values = torch.randn(2, 4).to(dtype).requires_grad_()
    outs = module([["a"] * 1024 + ["b"]])([KeyedTensor(["a", "b"], [3, 1], values)])
    assert gradients(outs, [values])[0].tolist() == [[1024.0] * 3 + [1.0]] * 2


def test_gradients_are_the_same_in_every_run() -> None:
    groups = [["a", "b", "a"], ["a", "b"], ["b", "a", "c"]]
    kts = make_kts(batch=128, grad=True)
    m = module(groups)
    outs = tensors(m(kts))
    weights = [torch.randn_like(out) for out in outs]
    first = gradients(outs, values_of(kts), weights)
    for other in (m, module(groups)):
        for _ in range(5):
            assert same(gradients(other(kts), values_of(kts), weights), first)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_backward_twice_and_in_anomaly_mode() -> None:
    kts = make_kts(grad=True)
    with torch.autograd.detect_anomaly():
        loss = total(module(OMITTED)(kts).values())
        poison(*values_of(kts))
        loss.backward(retain_graph=True)
        loss.backward()
    grads = [kt.values().grad for kt in kts]
    assert grads[0] is not None
    assert grads[1] is not None
    assert grads[0].tolist() == [[0] * 3 + [2] * 5] * 3
    assert grads[1].tolist() == [[0] * 2 + [2] * 4] * 3


# --- derivatives of other kinds ---------------------------------------------------------------------


def function_of(m: nn.Module, key_dim: int = 1) -> Callable[..., tuple[Tensor, ...]]:
    def call(*values: Tensor) -> tuple[Tensor, ...]:
        kts = [KeyedTensor(list(k), list(w), v, key_dim) for (k, w), v in zip(LAYOUT, values)]
        return tuple(m(kts).values())

    return call


ALL_GROUPS = pytest.mark.parametrize(
    "groups", [GROUPS, REPEATED, OMITTED, [[], ["d"]]], ids=["once", "repeated", "omitted", "empty"]
)


@ALL_GROUPS
def test_double_backward(groups: list[list[str]]) -> None:
    kts = make_kts(dtype=torch.float64, grad=True)

    def second(outs: Sequence[Tensor]) -> list[Tensor]:
        inputs = values_of(kts)
        first = torch.autograd.grad(
            total(t**3 for t in outs), inputs, create_graph=True, materialize_grads=True
        )
        products = total(g * x for g, x in zip(first, inputs))
        return list(torch.autograd.grad(products, inputs, materialize_grads=True))

    for a, b in zip(second(tensors(module(groups)(kts))), second(reference(kts, groups))):
        assert torch.allclose(a, b)


def test_second_derivative_of_a_square() -> None:
    x = torch.randn(2, 5, requires_grad=True)
    out = module([["b"], ["a"]])([KeyedTensor(["a", "b"], [2, 3], x)])
    (first,) = torch.autograd.grad((out["out0"] ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [[0, 0, 2, 2, 2]] * 2


@ALL_GROUPS
@pytest.mark.parametrize("key_dim", [0, 1])
def test_gradcheck_and_gradgradcheck(groups: list[list[str]], key_dim: int) -> None:
    f = function_of(module(groups), key_dim)
    inputs = tuple(values_of(make_kts(batch=2, dtype=torch.float64, grad=True, key_dim=key_dim)))
    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, inputs)


@ALL_GROUPS
def test_function_transforms(groups: list[list[str]]) -> None:
    f = function_of(module(groups))
    kts = make_kts()
    inputs = tuple(values_of(kts))
    tangents = tuple(torch.randn_like(x) for x in inputs)
    moved = [KeyedTensor(kt.keys(), kt.length_per_key(), t) for kt, t in zip(kts, tangents)]
    outs, pushed = torch.func.jvp(f, inputs, tangents)  # pyright: ignore[reportAssignmentType]
    assert_regrouped(outs, kts, groups)
    assert_regrouped(pushed, moved, groups)

    outs, pull = torch.func.vjp(f, *inputs)  # pyright: ignore[reportAssignmentType]
    weights = whole_weights(outs)
    leaves = make_kts(grad=True)
    assert same(pull(tuple(weights)), gradients(reference(leaves, groups), values_of(leaves), weights))

    batched = tuple(torch.randn(4, *x.shape) for x in inputs)
    mapped = torch.func.vmap(f)(*batched)
    each = [f(*(x[i] for x in batched)) for i in range(4)]
    assert same(mapped, [torch.stack(parts) for parts in zip(*each)])

    jacobian = torch.func.jacrev(lambda x: f(x, inputs[1])[1].sum(0))(inputs[0])
    forward = torch.func.jacfwd(lambda x: f(x, inputs[1])[1].sum(0))(inputs[0])
    assert torch.equal(jacobian, forward)
    gradient = torch.func.grad(lambda x: f(x, inputs[1])[1].sum())(inputs[0])
    assert torch.equal(gradient, jacobian.sum(0))


def test_a_first_call_under_a_transform_leaves_nothing_behind() -> None:
    m = module()
    torch.func.vmap(function_of(m))(torch.randn(2, 3, 8), torch.randn(2, 3, 6))
    assert_regroups(m, make_kts(grad=True))
    assert_regrouped(torch.jit.script(m)(kts := make_kts()), kts)
