"""FBGEMM-shaped operators beside FBGEMM's own: same plans and values, right gradients, no crashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torchrec.sparse.jagged_tensor import _kt_regroup_arguments

import torchrec_kt.ops.compat
from tests.layouts import Case, cases
from tests.reference import (
    STRIDES,
    apply_dense,
    assert_independent,
    assert_same,
    dense_of_groups,
    dense_of_moves,
    distinct,
    gradient_reference,
    locate,
    poison,
    random_values,
    regroup_reference,
    same_bytes,
)
from tests.transforms import TRANSFORMS, assert_same_transformed
from torchrec_kt.ops import RegroupPlan
from torchrec_kt.ops.compat import plan_rows

KEYS, LENGTHS = [["a", "b"], ["c", "d"]], [[3, 5], [2, 4]]
LAYOUTS = list(zip(KEYS, LENGTHS))
ONCE = [["a", "c"], ["d", "b"]]
REPEATED = [["a", "c", "a"], ["d", "b"], ["a", "d"]]
OMITTED = [["b"], ["d", "b"]]
GROUPINGS = [ONCE, REPEATED, OMITTED, [["a", "b"]], [[], ["c"]]]

Plan = tuple[Tensor, Tensor, Tensor, list[int]]

permute: Callable[..., list[Tensor]] = torch.ops.torchrec_kt.permute_multi_embedding
arguments: Callable[..., Plan] = torch.ops.torchrec_kt.kt_regroup_arguments
regroup_keyed: Callable[..., list[Tensor]] = torch.ops.torchrec_kt.regroup_keyed_tensor
OURS: Any = torch.ops.torchrec_kt
FBGEMM: Any = torch.ops.fbgemm

REFUSALS = (ValueError, RuntimeError, TypeError)


def make(
    rows: int = 3, dtype: torch.dtype = torch.float32, *, grad: bool = False, widths: Sequence[int] = (8, 6)
) -> list[Tensor]:
    return [random_values((rows, width), dtype).requires_grad_(grad) for width in widths]


def build(groups: Sequence[Sequence[str]] = ONCE) -> Plan:
    return arguments(torch.empty(0), KEYS, LENGTHS, groups)


def whole_numbers(outs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of which all sums are exact."""
    return [distinct(out.shape, out.dtype, start=1 + 3 * n) for n, out in enumerate(outs)]


def assert_same_plan(actual: Plan, expected: Any) -> None:
    assert list(actual[3]) == list(expected[3])
    for a, b in zip(actual[:3], expected[:3]):
        assert a.dtype == b.dtype == torch.int32
        assert a.shape == b.shape
        assert torch.equal(a, b)


ENTRIES = ("permute_multi_embedding", "regroup_keyed_tensor", "regroup_by_keys")


def apply(
    entry: str,
    values: Sequence[Tensor],
    groups: Sequence[Sequence[str]],
    keys: Sequence[Sequence[str]] = KEYS,
    lengths: Sequence[Sequence[int]] = LENGTHS,
) -> list[Tensor]:
    if entry == "permute_multi_embedding":
        return permute(values, *arguments(torch.empty(0), keys, lengths, groups))
    return getattr(OURS, entry)(values, keys, lengths, groups)


# Plans


def test_schemas() -> None:
    for name, others in (
        ("permute_multi_embedding", "permute_multi_embedding"),
        ("kt_regroup_arguments", "kt_regroup_arguments"),
        ("regroup_keyed_tensor", "regroup_keyed_tensor"),
    ):
        ours = getattr(OURS, name).default._schema
        theirs = getattr(FBGEMM, others).default._schema
        assert [str(a.type) for a in ours.arguments] == [str(a.type) for a in theirs.arguments]
        assert [a.name for a in ours.arguments] == [a.name for a in theirs.arguments]
        assert [str(r.type) for r in ours.returns] == [str(r.type) for r in theirs.returns]


@given(cases(max_inputs=4, min_groups=1, widths=(1, 2, 3, 8)))
@settings(max_examples=100)
def test_plan_rows_are_those_of_the_peers(case: Case) -> None:
    keys, lengths = [list(k) for k, _ in case.layouts], [list(w) for _, w in case.layouts]
    embs = torch.empty(0)
    plan = arguments(embs, keys, lengths, case.groups)
    assert_same_plan(plan, FBGEMM.kt_regroup_arguments(embs, keys, lengths, case.groups))
    if any(case.groups):
        assert_same_plan(plan, _kt_regroup_arguments(embs, keys, lengths, case.groups))
    assert plan[0].tolist() == [list(row) for row in plan_rows(case.plan)]
    assert plan[1].tolist() == list(case.plan.in_widths)
    assert plan[2].tolist() == list(case.plan.out_widths) == list(plan[3])


@pytest.mark.parametrize(
    "groups", [*GROUPINGS, [["a"]] * 5, [["a", "b", "a", "b", "a"], ["b"], ["a"]]], ids=str
)
def test_plan_rows_of_known_layouts(groups: list[list[str]]) -> None:
    embs = torch.empty(0)
    assert_same_plan(build(groups), FBGEMM.kt_regroup_arguments(embs, KEYS, LENGTHS, groups))
    assert_same_plan(build(groups), _kt_regroup_arguments(embs, KEYS, LENGTHS, groups))


def test_plan_rows_by_hand() -> None:
    rows = [
        [0, 0, 0, 0, 3, 2],
        [1, 0, 0, 3, 2, 0],
        [0, 0, 0, 5, 3, -5],
        [1, 1, 2, 0, 4, 6],
        [0, 1, 3, 4, 5, 0],
        [0, 2, 0, 0, 3, -7],
        [1, 2, 2, 3, 4, -7],
    ]
    assert build(REPEATED)[0].tolist() == rows
    assert [list(row) for row in plan_rows(RegroupPlan.build(LAYOUTS, REPEATED))] == rows


@given(cases())
def test_plan_rows_describe_the_map(case: Case) -> None:
    rows = plan_rows(case.plan)
    matrix = dense_of_moves(rows, case.plan.in_widths, case.plan.out_widths)
    assert torch.equal(matrix, dense_of_groups(case.layouts, case.groups))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_plan_is_int32_on_every_device(dtype: torch.dtype) -> None:
    real = arguments(torch.empty(3, 8, dtype=dtype), KEYS, LENGTHS, REPEATED)
    meta = arguments(torch.empty(3, 8, dtype=dtype, device="meta"), KEYS, LENGTHS, REPEATED)
    with FakeTensorMode():
        fake = arguments(torch.empty(3, 8, dtype=dtype, device="cuda"), KEYS, LENGTHS, REPEATED)
    for plan, device in ((real, "cpu"), (meta, "meta"), (fake, "cuda")):
        assert [t.dtype for t in plan[:3]] == [torch.int32] * 3
        assert [t.device.type for t in plan[:3]] == [device] * 3
        assert [tuple(t.shape) for t in plan[:3]] == [(7, 6), (2,), (3,)]
        assert list(plan[3]) == [8, 9, 7]


def test_plan_without_groups_or_keys() -> None:
    permutes, in_shapes, out_shapes, out_lengths = arguments(torch.empty(0), KEYS, LENGTHS, [])
    assert permutes.shape == (0, 6)
    assert in_shapes.tolist() == [8, 6]
    assert out_shapes.shape == (0,)
    assert list(out_lengths) == []
    assert permutes.dtype == in_shapes.dtype == out_shapes.dtype == torch.int32
    assert permute(make(), permutes, in_shapes, out_shapes, out_lengths) == []
    permutes, in_shapes, out_shapes, out_lengths = arguments(torch.empty(0), [[]], [[]], [[], []])
    assert permutes.shape == (0, 6)
    assert out_shapes.tolist() == list(out_lengths) == [0, 0]


# Values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", GROUPINGS, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5, 64])
def test_forward_equals_fbgemm(rows: int, groups: list[list[str]], dtype: torch.dtype) -> None:
    values = make(rows, dtype)
    theirs = FBGEMM.permute_multi_embedding(
        values, *FBGEMM.kt_regroup_arguments(values[0], KEYS, LENGTHS, groups)
    )
    assert len(theirs) == len(groups)
    for entry in ENTRIES:
        outs = apply(entry, values, groups)
        assert all(same_bytes(a, b) for a, b in zip(outs, theirs, strict=True))
        assert_same(outs, regroup_reference(values, LAYOUTS, groups))
        assert_independent(outs, values)


@given(cases(min_groups=1, widths=(1, 2, 4)), st.sampled_from((1, 3)), st.sampled_from(ENTRIES))
def test_values_and_gradients_of_any_plan(case: Case, rows: int, entry: str) -> None:
    """In types that FBGEMM's CPU operator does not have, too."""
    keys, lengths = [list(k) for k, _ in case.layouts], [list(w) for _, w in case.layouts]
    values = [
        distinct((rows, sum(w)), torch.float64, start=7 * n).requires_grad_() for n, w in enumerate(lengths)
    ]
    outs = apply(entry, values, case.groups, keys, lengths)
    assert_same(outs, regroup_reference(values, case.layouts, case.groups, dtype=torch.float64))
    grads = whole_numbers(outs)
    expected = gradient_reference(values, grads, case.layouts, case.groups)
    poison(*values, copies=8)
    assert_same(torch.autograd.grad(outs, values, grads), expected)


@pytest.mark.parametrize("planner", [FBGEMM.kt_regroup_arguments, _kt_regroup_arguments, arguments])
@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED], ids=str)
def test_plans_of_all_planners_are_accepted(planner: Callable[..., Plan], groups: list[list[str]]) -> None:
    values = make()
    plan = planner(values[0], KEYS, LENGTHS, groups)
    expected = regroup_reference(values, LAYOUTS, groups)
    assert_same(permute(values, *plan), expected)
    assert_same(permute(values, plan[0], plan[1].long(), plan[2].long(), plan[3]), expected)
    assert_same(FBGEMM.permute_multi_embedding(values, *build(groups)), expected)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("stride", sorted(STRIDES))
def test_values_of_any_strides(stride: str, entry: str) -> None:
    values = [STRIDES[stride](v) for v in make()]
    assert_same(apply(entry, values, REPEATED), regroup_reference(values, LAYOUTS, REPEATED))


@pytest.mark.parametrize("dtypes", [("float32", "float16"), ("float16", "bfloat16"), ("int64", "float32")])
@pytest.mark.parametrize("entry", ENTRIES)
def test_mixed_types_are_promoted(entry: str, dtypes: tuple[str, str]) -> None:
    values = [distinct((3, w), getattr(torch, d)) for w, d in zip((8, 6), dtypes)]
    assert_same(apply(entry, values, REPEATED), regroup_reference(values, LAYOUTS, REPEATED))


@pytest.mark.parametrize("entry", ENTRIES)
def test_padding_columns(entry: str) -> None:
    values = make(widths=(8 + 3, 6 + 1), grad=True)
    outs = apply(entry, values, OMITTED)
    assert_same(outs, regroup_reference(values, LAYOUTS, OMITTED))
    grads = whole_numbers(outs)
    expected = [g.float() for g in gradient_reference(values, grads, LAYOUTS, OMITTED)]
    poison(*values)
    assert_same(torch.autograd.grad(outs, values, grads), expected)


@pytest.mark.parametrize(
    ("first", "second", "key_dim"),
    [
        ((8,), (6,), 0),
        ((8, 3), (6, 3), 0),
        ((3, 8), (3, 6), -1),
        ((2, 8, 3), (2, 6, 3), 1),
        ((2, 8, 3), (2, 6, 3), -2),
    ],
)
@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED], ids=str)
def test_regroup_by_keys_along_any_dimension(
    groups: list[list[str]], first: tuple[int, ...], second: tuple[int, ...], key_dim: int
) -> None:
    values = [random_values(shape, torch.float64).requires_grad_() for shape in (first, second)]
    outs = OURS.regroup_by_keys(values, KEYS, LENGTHS, groups, key_dim)
    assert_same(outs, regroup_reference(values, LAYOUTS, groups, key_dim=key_dim))
    grads = whole_numbers(outs)
    poison(*values)
    actual = torch.autograd.grad(outs, values, grads)
    assert_same(actual, gradient_reference(values, grads, LAYOUTS, groups, key_dim=key_dim))
    batched = torch.func.vmap(
        lambda a, b: tuple(OURS.regroup_by_keys([a, b], KEYS, LENGTHS, groups, key_dim))
    )(*(torch.stack([v, 2 * v], 0) for v in values))
    assert_same([b[1] for b in batched], [2 * out for out in outs])


# Gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", GROUPINGS, ids=str)
def test_gradients_equal_those_of_fbgemm_where_it_writes_any(
    groups: list[list[str]], dtype: torch.dtype
) -> None:
    """And are zero where FBGEMM leaves memory as it was."""
    values, twins = make(5, dtype, grad=True), make(5, dtype, grad=True)
    plan = build(groups)
    outs, theirs = permute(values, *plan), FBGEMM.permute_multi_embedding(twins, *plan)
    grads = whole_numbers(outs)
    poison(*values)
    actual = torch.autograd.grad(outs, values, grads)
    expected = torch.autograd.grad(theirs, twins, grads)
    used = [torch.zeros(width, dtype=torch.bool) for width in (8, 6)]
    where = locate(LAYOUTS)
    for key in {key for group in groups for key in group}:
        tensor, offset, width = where[key]
        used[tensor][offset : offset + width] = True
    for a, b, columns in zip(actual, expected, used):
        assert torch.equal(a[:, columns], b[:, columns])
        assert torch.equal(a[:, ~columns], torch.zeros_like(a[:, ~columns]))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("groups", [OMITTED, [["b", "b"], ["d", "b"]], [["a", "b"]]], ids=str)
def test_gradients_of_unused_columns_are_zero(groups: list[list[str]], entry: str) -> None:
    values = make(64, grad=True)
    outs = apply(entry, values, groups)
    grads = whole_numbers(outs)
    expected = [g.float() for g in gradient_reference(values, grads, LAYOUTS, groups)]
    for _ in range(5):
        poison(*values)
        actual = torch.autograd.grad(outs, values, grads, retain_graph=True, allow_unused=True)
        assert_same([torch.zeros_like(v) if g is None else g for g, v in zip(actual, values)], expected)


@pytest.mark.parametrize("entry", ENTRIES)
def test_repeats_are_summed_in_float32(entry: str) -> None:
    values = make(2, torch.bfloat16, grad=True)
    outs = apply(entry, values, [["a"] * 1024, ["b"]])
    poison(*values)
    torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    assert values[0].grad is not None
    assert values[0].grad[0].tolist() == [1024.0] * 3 + [1.0] * 5


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
@pytest.mark.parametrize("entry", ENTRIES)
def test_some_inputs_need_a_gradient(entry: str, needs: tuple[bool, bool]) -> None:
    values = [v.requires_grad_(need) for v, need in zip(make(dtype=torch.float64), needs)]
    outs = apply(entry, values, REPEATED)
    grads = whole_numbers(outs)
    expected = gradient_reference(values, grads, LAYOUTS, REPEATED)
    torch.autograd.backward(outs, grads)
    assert_same([v.grad for v in values], [g if need else None for g, need in zip(expected, needs)])


@pytest.mark.parametrize("entry", ENTRIES)
def test_second_derivative(entry: str) -> None:
    value = torch.ones(2, 8, requires_grad=True)
    other = torch.ones(2, 6, requires_grad=True)
    outs = apply(entry, [value, other], [["b"], ["a", "c"], ["b"]])
    (first,) = torch.autograd.grad(outs[0].square().sum(), value, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), value)
    assert second[0].tolist() == [0.0] * 3 + [2.0] * 5
    values = make(dtype=torch.float64, grad=True)
    loss = sum((out.square().sum() for out in apply(entry, values, ONCE)), start=torch.zeros(()))
    grads = torch.autograd.grad(loss, values, create_graph=True)
    product = sum(((g * v).sum() for g, v in zip(grads, values)), start=torch.zeros(()))
    assert_same(torch.autograd.grad(product, values), [4 * v.detach() for v in values])


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("groups", [REPEATED, OMITTED], ids=str)
def test_gradcheck(groups: list[list[str]], entry: str) -> None:
    def f(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(apply(entry, values, groups))

    values = make(2, torch.float64, grad=True)
    assert torch.autograd.gradcheck(
        f, values, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(f, values, check_fwd_over_rev=True)


@pytest.mark.parametrize("transform", sorted(TRANSFORMS))
@pytest.mark.parametrize("entry", ENTRIES)
def test_func_transforms(entry: str, transform: str) -> None:
    plan = build(REPEATED)

    def f(*values: Tensor) -> tuple[Tensor, ...]:
        if entry == "permute_multi_embedding":
            return tuple(permute(values, *plan))
        return tuple(apply(entry, values, REPEATED))

    def reference(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(regroup_reference(values, LAYOUTS, REPEATED))

    assert_same_transformed(transform, f, reference, make(2, torch.float64))


@pytest.mark.parametrize("in_dims", [(0, 0), (1, None), (None, 2), (-1, 0)])
@pytest.mark.parametrize("entry", ENTRIES)
def test_vmap(entry: str, in_dims: tuple[int | None, ...]) -> None:
    plan = build(REPEATED)

    def f(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        if entry == "permute_multi_embedding":
            return tuple(permute([first, second], *plan))
        return tuple(apply(entry, [first, second], REPEATED))

    def reference(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        return tuple(regroup_reference([first, second], LAYOUTS, REPEATED))

    values = [
        random_values((3, width), torch.float64)
        if dim is None
        else random_values((5, 3, width), torch.float64).movedim(0, dim)
        for dim, width in zip(in_dims, (8, 6))
    ]
    expected = torch.func.vmap(reference, in_dims)(*values)
    assert_same(torch.func.vmap(f, in_dims)(*values), expected)
    nested = torch.func.vmap(torch.func.vmap(f, in_dims), (0, None))(torch.stack([values[0]] * 2), values[1])
    assert_same([t[1] for t in nested], expected)


def test_vmap_over_the_plan_is_refused() -> None:
    permutes, in_shapes, out_shapes, out_lengths = build()
    values = make()
    with pytest.raises(REFUSALS, match="batched"):
        torch.func.vmap(lambda p: tuple(permute(values, p, in_shapes, out_shapes, out_lengths)))(
            permutes.expand(4, -1, -1)
        )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("entry", ENTRIES)
def test_without_gradients(entry: str, mode: Callable[[], Any]) -> None:
    values = make(grad=True)
    with mode():
        outs = apply(entry, values, REPEATED)
        assert not any(out.requires_grad for out in outs)
    assert_same(outs, regroup_reference(values, LAYOUTS, REPEATED))
    outs = apply(entry, values, REPEATED)
    assert all(out.requires_grad for out in outs)


# Graphs


def check_operator(operator: Any, args: tuple[Any, ...]) -> None:
    assert set(torch.library.opcheck(operator.default, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED], ids=str)
def test_opcheck_permute_multi_embedding(groups: list[list[str]]) -> None:
    check_operator(OURS.permute_multi_embedding, (make(grad=True), *build(groups)))


@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED], ids=str)
def test_opcheck_regroup_keyed_tensor(groups: list[list[str]]) -> None:
    check_operator(OURS.regroup_keyed_tensor, (make(grad=True), KEYS, LENGTHS, groups))


@pytest.mark.parametrize(("groups", "key_dim"), [(ONCE, 1), (REPEATED, -1), (OMITTED, 0)], ids=str)
def test_opcheck_regroup_by_keys(groups: list[list[str]], key_dim: int) -> None:
    values = [random_values((w, 3) if key_dim == 0 else (3, w), torch.float32) for w in (8, 6)]
    leaves = [v.requires_grad_() for v in values]
    check_operator(OURS.regroup_by_keys, (leaves, KEYS, LENGTHS, groups, key_dim))


@pytest.mark.parametrize("groups", [ONCE, REPEATED, [[]]], ids=str)
def test_opcheck_kt_regroup_arguments(groups: list[list[str]]) -> None:
    check_operator(OURS.kt_regroup_arguments, (torch.empty(2, 3), KEYS, LENGTHS, groups))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_and_meta(device: str, entry: str) -> None:
    with FakeTensorMode():
        values = [torch.empty(3, w, device=device, dtype=torch.float16) for w in (8, 6)]
        plan = arguments(values[0], KEYS, LENGTHS, REPEATED)
        if entry == "permute_multi_embedding":
            outs = permute(values, *plan)
        else:
            outs = apply(entry, values, REPEATED)
    assert all(isinstance(out, FakeTensor) for out in outs)
    assert [tuple(out.shape) for out in outs] == [(3, 8), (3, 9), (3, 7)]
    assert all(out.dtype == torch.float16 and out.device.type == device for out in outs)
    values = make()
    assert_same(apply(entry, values, REPEATED), regroup_reference(values, LAYOUTS, REPEATED))


def test_meta_values_and_plan() -> None:
    values = [v.to("meta").requires_grad_() for v in make()]
    outs = permute(values, *arguments(values[0], KEYS, LENGTHS, REPEATED))
    assert [tuple(out.shape) for out in outs] == [(3, 8), (3, 9), (3, 7)]
    assert all(out.is_meta for out in outs)
    grads = torch.autograd.grad(outs, values, [torch.empty_like(out) for out in outs])
    assert [(tuple(g.shape), g.is_meta) for g in grads] == [((3, 8), True), ((3, 6), True)]


def test_torchscript() -> None:
    plan = build(REPEATED)

    def f(values: list[Tensor], permutes: Tensor, in_shapes: Tensor, out_shapes: Tensor) -> list[Tensor]:
        return torch.ops.torchrec_kt.permute_multi_embedding(
            values, permutes, in_shapes, out_shapes, [8, 9, 7]
        )

    scripted: Any = torch.jit.script(f)
    assert "torchrec_kt::permute_multi_embedding" in str(scripted.graph)
    values = make(dtype=torch.float64, grad=True)
    outs = scripted(values, *plan[:3])
    assert_same(outs, regroup_reference(values, LAYOUTS, REPEATED))
    grads = whole_numbers(outs)
    assert_same(
        torch.autograd.grad(outs, values, grads), gradient_reference(values, grads, LAYOUTS, REPEATED)
    )


@pytest.mark.parametrize("entry", ENTRIES)
def test_compile(entry: str) -> None:
    torch._dynamo.reset()
    plan = build(REPEATED)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def f(*values: Tensor) -> list[Tensor]:
        if entry == "permute_multi_embedding":
            return permute([v * 2 for v in values], *plan)
        return getattr(OURS, entry)([v * 2 for v in values], KEYS, LENGTHS, REPEATED)

    for rows in (4, 7):
        values = make(rows, torch.float64, grad=True)
        outs = f(*values)
        assert_same(outs, regroup_reference([v * 2 for v in values], LAYOUTS, REPEATED))
        grads = whole_numbers(outs)
        actual = torch.autograd.grad(outs, values, grads)
        assert_same(actual, [2 * g for g in gradient_reference(values, grads, LAYOUTS, REPEATED)])
    torch._dynamo.reset()


# Hostile arguments


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [
        *[(row, 0, value) for row in range(4) for value in (5, -1, 2**31 - 1, -(2**31))],
        *[(row, 1, value) for row in range(4) for value in (9, -1, 2**31 - 1, -(2**31))],
        *[(3, 2, value) for value in (4, -4, 10**8, -(10**8), 2**31 - 1, -(2**31))],
        *[(3, 3, value) for value in (5, -3, 10**8, -(10**8), 2**31 - 1, -(2**31))],
        *[(row, 4, value) for row in range(4) for value in (1000, -1, 10**9, 2**31 - 1, -(2**31))],
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_row_that_leaves_its_tensors(row: int, field: int, value: int, grad: bool) -> None:
    permutes, in_shapes, out_shapes, out_lengths = build()
    permutes[row, field] = value
    with pytest.raises(ValueError, match=f"row {row} of the plan"):
        permute(make(grad=grad), permutes, in_shapes, out_shapes, out_lengths)


def test_rows_that_overlap_are_refused() -> None:
    values = make()
    permutes, *rest = build()
    for changed in (torch.cat([permutes, permutes[:1]]), torch.cat([permutes[:1], permutes])):
        with pytest.raises(ValueError, match="columns 0 to 2 of output 0"):
            permute(values, changed, *rest)
    permutes[3, 3] = 3
    with pytest.raises(ValueError, match=r"columns 3 to 3 of output 1"):
        permute(values, permutes, *rest)


@pytest.mark.parametrize("drop", [1, 2, 4])
@pytest.mark.parametrize("grad", [False, True])
def test_missing_rows_leave_zeros(drop: int, grad: bool) -> None:
    values = make(grad=grad)
    permutes, *rest = build()
    expected = [torch.zeros(3, 5), torch.zeros(3, 9)]
    for tensor, out, in_offset, out_offset, length, _ in permutes[drop:].tolist():
        columns = values[tensor].detach()[:, in_offset : in_offset + length]
        expected[out][:, out_offset : out_offset + length] = columns
    poison(*expected)
    assert_same(permute(values, permutes[drop:], *rest), expected)
    permutes[:drop, 4] = 0
    poison(*expected)
    assert_same(permute(values, permutes, *rest), expected)


@pytest.mark.parametrize("links", [0, -1, 10**8, -(10**8), 2**31 - 1, -(2**31)])
def test_links_are_not_followed(links: int) -> None:
    """FBGEMM walks them without a look."""
    values = make(dtype=torch.float64, grad=True)
    permutes, *rest = build(REPEATED)
    permutes[:, 5] = links
    outs = permute(values, permutes, *rest)
    assert_same(outs, regroup_reference(values, LAYOUTS, REPEATED))
    grads = whole_numbers(outs)
    assert_same(
        torch.autograd.grad(outs, values, grads), gradient_reference(values, grads, LAYOUTS, REPEATED)
    )


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda p: p.long(), id="int64"),
        pytest.param(lambda p: p.float(), id="float"),
        pytest.param(lambda p: p.reshape(-1), id="1-D"),
        pytest.param(lambda p: p[None], id="3-D"),
        pytest.param(lambda p: p[:, :5], id="5-fields"),
        pytest.param(lambda p: torch.cat([p, p[:, :1]], 1), id="7-fields"),
        pytest.param(lambda p: p.to("meta"), id="meta"),
        pytest.param(lambda p: p.to_sparse(), id="sparse"),
        pytest.param(lambda p: None, id="none"),
        pytest.param(lambda p: p.tolist(), id="list"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_not_a_plan(change: Callable[[Tensor], Any], grad: bool) -> None:
    permutes, *rest = build()
    with pytest.raises(REFUSALS):
        permute(make(grad=grad), change(permutes), *rest)


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize(
    "vector",
    [
        pytest.param(torch.tensor([99, 99], dtype=torch.int32), id="too-large"),
        pytest.param(torch.tensor([-8, 6], dtype=torch.int32), id="negative"),
        pytest.param(torch.tensor([2**31 - 1, 6], dtype=torch.int32), id="huge"),
        pytest.param(torch.tensor([], dtype=torch.int32), id="empty"),
        pytest.param(torch.tensor([8, 6, 1], dtype=torch.int32), id="long"),
        pytest.param(torch.tensor([[8, 6]], dtype=torch.int32), id="2-D"),
        pytest.param(torch.tensor([8.0, 6.0]), id="float"),
        pytest.param(torch.tensor([8, 6], dtype=torch.int32, device="meta"), id="meta"),
        pytest.param(None, id="none"),
        pytest.param([8, 6], id="list"),
    ],
)
def test_shape_vectors_that_do_not_fit(vector: Any, which: int) -> None:
    plan: list[Any] = list(build())
    plan[which] = vector
    with pytest.raises(REFUSALS):
        permute(make(), *plan)


def test_stated_input_widths_that_the_rows_leave() -> None:
    """The plan contradicts itself; at least nothing outside of the values may be read."""
    permutes, _, out_shapes, out_lengths = build()
    values = make()
    try:
        outs = permute(values, permutes, torch.tensor([1, 1], dtype=torch.int32), out_shapes, out_lengths)
    except ValueError as error:
        assert "in_shapes" in str(error)  # noqa: PT017
    else:
        assert_same(outs, regroup_reference(values, LAYOUTS, ONCE))


@pytest.mark.parametrize(
    "out_lengths", [[1, 1], [50, 50], [5], [], [5, 9, 4], [9, 5], [5, -9], [5, 2**40], None, ["5", "9"]]
)
def test_output_widths_that_do_not_fit(out_lengths: Any) -> None:
    permutes, in_shapes, out_shapes, _ = build()
    with pytest.raises(REFUSALS):
        permute(make(), permutes, in_shapes, out_shapes, out_lengths)


@pytest.mark.parametrize("out_lengths", [[1, 1], [5, 8], [5, -9]])
def test_output_widths_that_do_not_fit_the_rows(out_lengths: list[int]) -> None:
    permutes, in_shapes, _, _ = build()
    with pytest.raises(ValueError, match="output|out_lengths"):  # noqa: RUF043
        permute(make(), permutes, in_shapes, torch.tensor(out_lengths, dtype=torch.int32), out_lengths)


BAD_VALUES = [
    pytest.param([], id="none"),
    pytest.param([torch.randn(3, 8)], id="one-short"),
    pytest.param([torch.randn(3, 8), torch.randn(3, 6), torch.randn(3, 1)], id="one-more"),
    pytest.param([torch.randn(3, 7), torch.randn(3, 6)], id="narrower"),
    pytest.param([torch.randn(3, 8), torch.randn(1, 6)], id="batch-3-1"),
    pytest.param([torch.randn(1, 8), torch.randn(3, 6)], id="batch-1-3"),
    pytest.param([torch.randn(0, 8), torch.randn(3, 6)], id="batch-0-3"),
    pytest.param([torch.randn(3, 8, 2), torch.randn(3, 6, 2)], id="3-D"),
    pytest.param([torch.randn(8), torch.randn(6)], id="1-D"),
    pytest.param([torch.randn(()), torch.randn(())], id="numbers"),
    pytest.param([torch.randn(3, 8), torch.randn(3, 6).to_sparse()], id="sparse"),
    pytest.param([torch.randn(3, 8), torch.randn(3, 6, device="meta")], id="cpu-meta"),
    pytest.param([torch.randn(3, 8, device="meta"), torch.randn(3, 6)], id="meta-cpu"),
    pytest.param([torch.randn(3, 8), None], id="with-none"),
    pytest.param(None, id="nothing"),
]


@pytest.mark.parametrize("values", BAD_VALUES)
@pytest.mark.parametrize("entry", ENTRIES[:2])
@pytest.mark.parametrize("warm", [False, True])
def test_values_that_do_not_fit(warm: bool, entry: str, values: Any) -> None:
    if warm:
        apply(entry, make(), ONCE)
    with pytest.raises(REFUSALS):
        apply(entry, values, ONCE)


def test_meta_values_with_a_real_plan() -> None:
    with pytest.raises(ValueError, match="meta"):
        permute([v.to("meta") for v in make()], *build())


@pytest.mark.parametrize(
    ("keys", "lengths", "groups", "pattern"),
    [
        pytest.param(KEYS[:1], LENGTHS, ONCE, "1 lists of keys.*2 lists", id="fewer-keys"),
        pytest.param(KEYS, LENGTHS[:1], ONCE, "2 lists of keys.*1 lists", id="fewer-lengths"),
        pytest.param(KEYS, [[3, 5], [2]], ONCE, "2 keys but 1 widths", id="inner-lengths-short"),
        pytest.param(KEYS, [[3, 5, 1], [2, 4]], ONCE, "2 keys but 3 widths", id="inner-lengths-long"),
        pytest.param(KEYS, [[3, -5], [2, 4]], ONCE, "-5", id="negative"),
        pytest.param(KEYS, LENGTHS, [["a", "zz"]], "'zz'", id="unknown-key"),
        pytest.param([["a", "b"], ["a", "d"]], LENGTHS, ONCE[:1], "'a'", id="ambiguous-key"),
        pytest.param([["a", "a"], ["c", "d"]], LENGTHS, ONCE, "'a'", id="ambiguous-in-one"),
    ],
)
def test_names_that_do_not_fit(keys: Any, lengths: Any, groups: Any, pattern: str) -> None:
    with pytest.raises((*REFUSALS, KeyError), match=pattern):
        arguments(torch.empty(0), keys, lengths, groups)
    with pytest.raises((*REFUSALS, KeyError), match=pattern):
        arguments(torch.empty(0, device="meta"), keys, lengths, groups)
    for operator in (regroup_keyed, OURS.regroup_by_keys):
        with pytest.raises((*REFUSALS, KeyError)):
            operator(make(), keys, lengths, groups)


@pytest.mark.parametrize(
    ("keys", "lengths"),
    [
        pytest.param([*KEYS, ["e"]], [*LENGTHS, [1]], id="more-lists-than-values"),
        pytest.param(KEYS[:1], LENGTHS[:1], id="fewer-lists-than-values"),
        pytest.param(KEYS, [[30, 50], [2, 4]], id="wider-than-the-values"),
        pytest.param(KEYS, [[3, 2**31], [2, 4]], id="2**31"),
        pytest.param(KEYS, [[3, 2**62], [2**62, 4]], id="2**62"),
        pytest.param(None, LENGTHS, id="none"),
        pytest.param("ab", LENGTHS, id="string"),
    ],
)
def test_layouts_that_do_not_fit_the_values(keys: Any, lengths: Any) -> None:
    for operator in (regroup_keyed, OURS.regroup_by_keys):
        with pytest.raises(REFUSALS):
            operator(make(), keys, lengths, [["a", "b"]])


@pytest.mark.parametrize("lengths", [[[3, 2**31], [2, 4]], [[3, 2**62], [2**62, 4]]])
def test_plans_beyond_int32_are_refused(lengths: list[list[int]]) -> None:
    with pytest.raises(REFUSALS):
        arguments(torch.empty(0), KEYS, lengths, ONCE)


ROW = st.tuples(
    *[st.one_of(st.integers(-1, 2), st.sampled_from((5, -(2**31), 2**31 - 1)))] * 2,
    *[st.one_of(st.integers(-1, 8), st.sampled_from((10**8, -(10**8), 2**31 - 1)))] * 3,
    st.sampled_from((0, 1, -4, 2**31 - 1)),
)
GOOD_ROW = st.tuples(st.integers(0, 1), st.integers(0, 1), *[st.integers(0, 3)] * 3, st.just(0))


@given(
    rows=st.lists(st.one_of(GOOD_ROW, ROW), max_size=4),
    batch=st.sampled_from((0, 1, 3)),
    in_widths=st.lists(st.integers(0, 8), min_size=1, max_size=2),
    out_widths=st.lists(st.integers(0, 8), max_size=2),
)
@settings(max_examples=400)
def test_any_plan_is_refused_or_obeyed(
    rows: list[tuple[int, ...]], batch: int, in_widths: list[int], out_widths: list[int]
) -> None:
    permutes = torch.tensor(rows, dtype=torch.int32).reshape(-1, 6)
    values = [distinct((batch, width), torch.int64, start=7 * n) for n, width in enumerate(in_widths)]
    vectors = [torch.tensor(widths, dtype=torch.int32) for widths in (in_widths, out_widths)]
    try:
        matrix = dense_of_moves(rows, in_widths, out_widths)
    except IndexError:
        matrix = None
    if matrix is not None and (not matrix.numel() or int(matrix.sum(0).max()) <= 1):
        expected = apply_dense(values, matrix, out_widths) if out_widths else []
        poison(*[torch.empty(batch, width, dtype=torch.int64) for width in out_widths], copies=4)
        assert_same(permute(values, permutes, *vectors, out_widths), expected)
    else:
        with pytest.raises(REFUSALS):
            permute(values, permutes, *vectors, out_widths)


def test_a_plan_that_is_changed_in_place_is_read_again() -> None:
    values = make()
    permutes, *rest = build([["a"], ["c"]])
    assert_same(permute(values, permutes, *rest), regroup_reference(values, LAYOUTS, [["a"], ["c"]]))
    permutes[1, 2] = 4
    assert_same(permute(values, permutes, *rest), [values[0][:, :3], values[1][:, 4:]])
    permutes[1, 2] = 5
    with pytest.raises(ValueError, match="row 1"):
        permute(values, permutes, *rest)


def test_functions_can_be_called_without_the_dispatcher() -> None:
    module = torchrec_kt.ops.compat
    values = make()
    plan = module.kt_regroup_arguments(values[0], KEYS, LENGTHS, REPEATED)
    expected = regroup_reference(values, LAYOUTS, REPEATED)
    assert_same(module.permute_multi_embedding(values, *plan), expected)
    assert_same(module.regroup_keyed_tensor(values, KEYS, LENGTHS, REPEATED), expected)
    with pytest.raises(TypeError, match="single tensor"):
        module.regroup_keyed_tensor(values[0], KEYS, LENGTHS, REPEATED)  # pyright: ignore[reportArgumentType]
