"""The registered operator ``torchrec_kt::regroup``: the same answers, in graphs, and hostile plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.layouts import Case, RawMap, cases, raw_maps
from tests.reference import (
    STRIDES,
    apply_dense,
    assert_independent,
    assert_same,
    dense_of_moves,
    distinct,
    gradient_reference,
    poison,
    random_values,
    regroup_reference,
)
from tests.transforms import TRANSFORMS, assert_same_transformed
from torchrec_kt.ops import RegroupPlan, _native, has_cuda_kernel, operators, regroup_values
from torchrec_kt.ops.moves import moves_beside

LAYOUTS = [(["a", "b"], [3, 5]), (["c", "d"], [2, 4])]
ONCE = [["a", "c"], ["d", "b"]]
REPEATED = [["a", "c", "a"], ["d", "b"], ["a", "d"]]
OMITTED = [["b"], ["d", "b"]]

regroup: Callable[..., list[Tensor]] = torch.ops.torchrec_kt.regroup
regroup_default: Any = torch.ops.torchrec_kt.regroup.default


def build(groups: Sequence[Sequence[str]] = ONCE) -> RegroupPlan:
    return RegroupPlan.build(LAYOUTS, groups)


def plan_tensor(plan: RegroupPlan, fields: int = 5) -> Tensor:
    """Rows of moves, with any junk in fields that are ignored."""
    rows = [[*move, *[-7] * (fields - 5)] for move in plan.column_map.moves]
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, fields)


def make(
    rows: int = 3, dtype: torch.dtype = torch.float32, *, grad: bool = False, widths: Sequence[int] = (8, 6)
) -> list[Tensor]:
    return [random_values((rows, width), dtype).requires_grad_(grad) for width in widths]


def whole_numbers(outs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of which all sums are exact."""
    return [distinct(out.shape, out.dtype, start=1 + 3 * n) for n, out in enumerate(outs)]


# The same answers


def test_schema() -> None:
    assert str(regroup_default._schema) == (
        "torchrec_kt::regroup(Tensor[] values, Tensor moves, SymInt[] out_widths, int key_dim=1, "
        "ScalarType? dtype=None) -> Tensor[]"
    )


def test_has_cuda_kernel() -> None:
    assert has_cuda_kernel() is _native.has_kernel("cuda")


@given(cases())
def test_moves_of_a_plan(case: Case) -> None:
    moves = moves_beside([], case.plan.column_map)
    assert torch.equal(moves, plan_tensor(case.plan))
    assert moves.dtype == torch.int32
    assert moves.device.type == "cpu"
    assert not moves.is_inference()


@given(
    cases(),
    st.sampled_from((0, 1, 2, 9)),
    st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
    st.sampled_from((5, 6)),
    st.lists(st.sampled_from(sorted(STRIDES)), min_size=3, max_size=3),
    st.lists(st.sampled_from((0, 0, 1, 2)), min_size=3, max_size=3),
)
def test_equals_regroup_values_and_reference(
    case: Case, rows: int, dtype: torch.dtype, fields: int, strides: list[str], padding: list[int]
) -> None:
    plan = case.plan
    values = [
        STRIDES[stride](distinct((rows, sum(widths) + spare), dtype, start=7 * n)).requires_grad_()
        for n, ((_, widths), spare, stride) in enumerate(zip(case.layouts, padding, strides))
    ]
    moves = plan_tensor(plan, fields)
    outs = regroup(values, moves, plan.out_widths)
    assert_same(outs, regroup_reference(values, case.layouts, case.groups, dtype=dtype))
    assert_same(outs, regroup_values(values, plan))
    assert_independent(outs, values)
    if outs:
        grads = [g.mul(0.25) for g in whole_numbers(outs)]
        expected = [g.to(dtype) for g in gradient_reference(values, grads, case.layouts, case.groups)]
        poison(*values, copies=8)
        actual = torch.autograd.grad(outs, values, grads)
        assert_same(actual, expected)


@pytest.mark.parametrize(
    ("shape", "key_dim"),
    [
        ((14,), 0),
        ((14,), -1),
        ((14, 3), 0),
        ((3, 14), -1),
        ((2, 14, 3), 1),
        ((2, 3, 14), 2),
        ((2, 14, 3, 4), -3),
    ],
)
@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED], ids=str)
def test_key_dim(shape: tuple[int, ...], key_dim: int, groups: list[list[str]]) -> None:
    layouts = [(["a", "b"], [6, 8]), (["c", "d"], [10, 4])]
    plan = RegroupPlan.build(layouts, groups)
    values = [random_values(shape, torch.float64).requires_grad_() for _ in range(2)]
    outs = regroup(values, plan_tensor(plan), plan.out_widths, key_dim)
    assert_same(outs, regroup_reference(values, layouts, groups, key_dim=key_dim))
    grads = whole_numbers(outs)
    poison(*values)
    actual = torch.autograd.grad(outs, values, grads)
    assert_same(actual, gradient_reference(values, grads, layouts, groups, key_dim=key_dim))


@pytest.mark.parametrize("dtypes", [("float32", "float16"), ("int64", "float32"), ("complex64", "float64")])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.complex128], ids=str)
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_types(dtypes: tuple[str, str], dtype: torch.dtype | None) -> None:
    values = [distinct((3, w), getattr(torch, d)) for w, d in zip((8, 6), dtypes)]
    leaves = [v.requires_grad_() for v in values if v.is_floating_point() or v.is_complex()]
    for groups in (ONCE, REPEATED):
        plan = build(groups)
        outs = regroup(values, plan_tensor(plan), plan.out_widths, 1, dtype)
        twins = regroup_values(values, plan, dtype)
        assert_same(outs, twins)
        grads = whole_numbers(outs)
        assert_same(torch.autograd.grad(outs, leaves, grads), torch.autograd.grad(twins, leaves, grads))


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED, [["a"]]], ids=str)
def test_some_inputs_need_a_gradient(needs: tuple[bool, bool], groups: list[list[str]]) -> None:
    plan = build(groups)
    values = [v.requires_grad_(need) for v, need in zip(make(dtype=torch.float64), needs)]
    outs = regroup(values, plan_tensor(plan), plan.out_widths)
    assert all(out.requires_grad == any(needs) for out in outs)
    if any(needs):
        grads = whole_numbers(outs)
        expected = gradient_reference(values, grads, LAYOUTS, groups)
        poison(*values)
        torch.autograd.backward(outs, grads)
        assert_same([v.grad for v in values], [g if need else None for g, need in zip(expected, needs)])


def test_some_outputs_in_the_loss() -> None:
    plan = build(REPEATED)
    for chosen in range(3):
        values = make(dtype=torch.float64, grad=True)
        outs = regroup(values, plan_tensor(plan), plan.out_widths)
        grads = [g if n == chosen else None for n, g in enumerate(whole_numbers(outs))]
        expected = gradient_reference(values, grads, LAYOUTS, REPEATED)
        poison(*values)
        outs[chosen].backward(grads[chosen])
        assert_same([v.grad for v in values], expected)


def test_many_uses_do_not_stall_in_bfloat16() -> None:
    plan = RegroupPlan.build([(["a", "b"], [1, 2])], [["a"] * 1024 + ["b"]])
    value = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    (out,) = regroup([value], plan_tensor(plan), plan.out_widths)
    out.sum().backward()
    assert value.grad is not None
    assert value.grad[0].tolist() == [1024.0, 1.0, 1.0]


def test_overlapping_rows_are_summed_and_gaps_are_zero() -> None:
    rows = [(0, 0, 0, 1, 2), (0, 0, 2, 2, 2), (0, 1, 3, 0, 1)]
    moves = torch.tensor(rows, dtype=torch.int32)
    value = torch.tensor([[1.0, 10.0, 100.0, 1000.0]], requires_grad=True)
    for _ in range(5):
        poison(torch.empty(1, 5), torch.empty(1, 2))
        outs = regroup([value], moves, [5, 2])
        assert_same(outs, [torch.tensor([[0.0, 1.0, 110.0, 1000.0, 0.0]]), torch.tensor([[1000.0, 0.0]])])
        (grad,) = torch.autograd.grad(outs, value, [torch.ones(1, 5), torch.ones(1, 2)])
        assert grad.tolist() == [[1.0, 1.0, 1.0, 2.0]]


@pytest.mark.parametrize("out_widths", [[], [0], [4, 0, 2]])
def test_no_moves(out_widths: list[int]) -> None:
    value = torch.randn(3, 8, requires_grad=True)
    poison(torch.empty(3, 4), torch.empty(3, 2))
    outs = regroup([value], torch.empty(0, 5, dtype=torch.int32), out_widths)
    assert_same(outs, [torch.zeros(3, width) for width in out_widths])
    if sum(out_widths):
        poison(value)
        (grad,) = torch.autograd.grad(outs, value, [torch.ones_like(out) for out in outs])
        assert torch.equal(grad, torch.zeros(3, 8))


@pytest.mark.parametrize(
    ("spare", "grad"),
    [
        pytest.param((5, 6), False, id="other-batch"),
        pytest.param((5, 6), True, id="other-batch-grad"),
        pytest.param((3, 2), False, id="narrower"),
        pytest.param((3, 2), True, id="narrower-grad"),
        pytest.param((6,), False, id="other-rank"),
        pytest.param((6,), True, id="other-rank-grad"),
    ],
)
def test_an_input_that_no_move_names_is_not_looked_at(spare: tuple[int, ...], grad: bool) -> None:
    plan = build([["b"], ["a"]])
    values = [torch.randn(3, 8, requires_grad=grad), torch.randn(spare, requires_grad=grad)]
    outs = regroup(values, plan_tensor(plan), plan.out_widths)
    assert_same(outs, [values[0][:, 3:], values[0][:, :3]])
    if grad:
        poison(*values)
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
        assert values[0].grad is not None
        assert torch.equal(values[0].grad, torch.ones(3, 8))
        assert values[1].grad is None or torch.equal(values[1].grad, torch.zeros(spare))


def test_plan_tensor_in_any_layout() -> None:
    plan = build(REPEATED)
    values = make()
    expected = regroup_reference(values, LAYOUTS, REPEATED)
    five, six = plan_tensor(plan), plan_tensor(plan, 6)
    wide = torch.cat([torch.full_like(six, 9), six], 1)
    views = [
        five,
        six,
        six[:, :5],
        wide[:, 6:],
        wide[:, 6:11],
        five.T.contiguous().T,
        five.expand(1, -1, -1)[0],
    ]
    for moves in views:
        assert_same(regroup(values, moves, plan.out_widths), expected)
        assert_same(regroup(values, moves, torch.Size(plan.out_widths)), expected)


def test_a_plan_tensor_that_is_changed_in_place_is_read_again() -> None:
    first, second = build([["a"], ["c"]]), build([["a"], ["d"]])
    values = make()
    moves = plan_tensor(first)
    assert_same(regroup(values, moves, [3, 2]), regroup_reference(values, LAYOUTS, first.groups))
    moves[1, 2] = 2
    expected = regroup_reference(values, LAYOUTS, second.groups)
    assert_same(regroup(values, moves, [3, 2]), [expected[0], expected[1][:, :2]])
    moves[0, 2] = 100
    with pytest.raises(ValueError, match="row 0"):
        regroup(values, moves, [3, 2])


def test_a_plan_tensor_that_is_changed_before_the_backward_pass() -> None:
    """The gradient is that of the call that was made, or autograd's usual refusal."""
    values = make(grad=True)
    moves = plan_tensor(build([["a"]]))
    outs = regroup(values, moves, [3])
    moves[0, 2] = 5
    try:
        outs[0].sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert values[0].grad is not None
        assert values[0].grad[0].tolist() == [1.0] * 3 + [0.0] * 5


def test_maps_are_kept_apart() -> None:
    """Plans with equal bytes but other widths or row lengths, many of them."""
    values = [distinct((2, 60), torch.int64)]
    for start in range(0, 50):
        for fields in (5, 6):
            moves = torch.tensor([[0, 0, start, 0, 3, *[0] * (fields - 5)]], dtype=torch.int32)
            for width in (3, 5):
                (out,) = regroup(values, moves, [width])
                expected = torch.zeros(2, width, dtype=torch.int64)
                expected[:, :3] = values[0][:, start : start + 3]
                assert torch.equal(out, expected)


@given(st.lists(st.integers(0, 1), min_size=30, max_size=30))
def test_equal_bytes_in_rows_of_five_and_six(numbers: list[int]) -> None:
    values = [distinct((2, 3), torch.int64), distinct((2, 3), torch.int64, start=7)]
    for fields in (5, 6):
        moves = torch.tensor(numbers, dtype=torch.int32).reshape(-1, fields)
        matrix = dense_of_moves(moves.tolist(), [3, 3], [2, 2])
        assert_same(regroup(values, moves, [2, 2]), apply_dense(values, matrix, [2, 2]))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_first(mode: Callable[[], Any]) -> None:
    plan = build(REPEATED)
    values = make(dtype=torch.float64, grad=True)
    with mode():
        outs = regroup(values, plan_tensor(plan), plan.out_widths)
        assert not any(out.requires_grad for out in outs)
        assert_same(outs, regroup_reference(values, LAYOUTS, REPEATED))
    outs = regroup(values, plan_tensor(plan), plan.out_widths)
    grads = whole_numbers(outs)
    actual = torch.autograd.grad(outs, values, grads)
    assert_same(actual, gradient_reference(values, grads, LAYOUTS, REPEATED))


def test_many_threads() -> None:
    values = make(17, torch.float64)
    plans = [build(groups) for groups in (ONCE, REPEATED, OMITTED)]
    expected = [regroup_reference(values, LAYOUTS, plan.groups) for plan in plans]
    barrier = threading.Barrier(6)
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            barrier.wait(60)
            for n in range(first, first + 60):
                plan = plans[n % 3]
                assert_same(regroup(values, plan_tensor(plan), plan.out_widths), expected[n % 3])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures


# Derivatives


@pytest.mark.parametrize("transform", sorted(TRANSFORMS))
@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED, [["a"], []]], ids=str)
def test_func_transforms(transform: str, groups: list[list[str]]) -> None:
    plan = build(groups)
    moves = plan_tensor(plan)
    assert_same_transformed(
        transform,
        lambda *values: tuple(regroup(values, moves, plan.out_widths)),
        lambda *values: tuple(regroup_reference(values, LAYOUTS, groups)),
        make(2, torch.float64),
    )


@pytest.mark.parametrize("key_dim", [1, -1])
@pytest.mark.parametrize("in_dims", [(0, 0), (1, None), (None, 2), (-1, 0)])
def test_vmap(in_dims: tuple[int | None, ...], key_dim: int) -> None:
    plan = build(REPEATED)
    moves = plan_tensor(plan)
    values = [
        random_values((3, width), torch.float64)
        if dim is None
        else random_values((5, 3, width), torch.float64).movedim(0, dim)
        for dim, width in zip(in_dims, (8, 6))
    ]
    actual = torch.func.vmap(lambda *v: tuple(regroup(v, moves, plan.out_widths, key_dim)), in_dims)(*values)
    expected = torch.func.vmap(lambda v, w: tuple(regroup_reference([v, w], LAYOUTS, REPEATED)), in_dims)(
        *values
    )
    assert_same(actual, expected)
    nested = torch.func.vmap(
        torch.func.vmap(lambda *v: tuple(regroup(v, moves, plan.out_widths, key_dim)), in_dims), (0, None)
    )(torch.stack([values[0]] * 2), values[1])
    assert_same([t[1] for t in nested], expected)


def test_vmap_over_the_plan_is_refused() -> None:
    plan = build()
    moves = plan_tensor(plan).expand(4, -1, -1)
    values = make()
    with pytest.raises(ValueError, match="plan tensor is batched"):
        torch.func.vmap(lambda m: tuple(regroup(values, m, plan.out_widths)))(moves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize(
    ("groups", "key_dim"), [(ONCE, 1), (REPEATED, 1), (OMITTED, 0), ([["a"]], -1)], ids=str
)
def test_gradcheck(groups: list[list[str]], key_dim: int, dtype: torch.dtype) -> None:
    plan = build(groups)
    moves = plan_tensor(plan)

    def f(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(regroup(values, moves, plan.out_widths, key_dim))

    values = [v.mT.contiguous() if key_dim == 0 else v for v in make(2, dtype)]
    leaves = [v.requires_grad_() for v in values]
    assert torch.autograd.gradcheck(
        f, leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(f, leaves, check_fwd_over_rev=True, check_rev_over_rev=True)


# Fake tensors, graphs


def fake_samples() -> list[Any]:
    return [
        pytest.param((3, 8), (3, 6), ONCE, 1, None, id="once"),
        pytest.param((3, 8), (3, 9), REPEATED, 1, torch.bfloat16, id="cast"),
        pytest.param((0, 8), (0, 6), OMITTED, -1, None, id="no-rows"),
        pytest.param((8, 2), (6, 2), [["b"], [], ["c"]], 0, torch.float64, id="key-dim-0"),
        pytest.param((2, 8, 4), (2, 6, 4), REPEATED, 1, torch.int64, id="rank-3"),
    ]


@pytest.mark.parametrize("beneath_the_mode", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
@pytest.mark.parametrize(("first", "second", "groups", "key_dim", "dtype"), fake_samples())
def test_fake(
    first: tuple[int, ...],
    second: tuple[int, ...],
    groups: list[list[str]],
    key_dim: int,
    dtype: torch.dtype | None,
    device: str,
    beneath_the_mode: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shape, type and device of the real thing; no GPU is needed to ask."""
    if not beneath_the_mode:
        monkeypatch.setattr(operators, "_beneath", None)
    plan = build(groups)
    real = regroup(
        [torch.zeros(first), torch.zeros(second, dtype=torch.float16)],
        plan_tensor(plan),
        plan.out_widths,
        key_dim,
        dtype,
    )
    with FakeTensorMode() as mode:
        moves = torch.empty(len(plan.column_map.moves), 5, dtype=torch.int32, device=device)
        values = [
            torch.empty(first, device=device),
            torch.empty(second, dtype=torch.float16, device=device),
        ]
        fakes = regroup(values, moves, plan.out_widths, key_dim, dtype)
    assert all(isinstance(fake, FakeTensor) and fake.fake_mode is mode for fake in fakes)
    assert [(f.shape, f.dtype, f.stride()) for f in fakes] == [(r.shape, r.dtype, r.stride()) for r in real]
    assert all(fake.device.type == device for fake in fakes)


def test_many_fake_outputs_with_a_symbolic_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has that batch, and none is a call of its own that the mode has to follow."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    value = mode.from_tensor(torch.empty(5, 50), source=ConstantSource("value"), symbolic_context=context)
    dispatch, calls = FakeTensorMode.dispatch, []

    def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return dispatch(*arguments, **options)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counting)
    with mode:
        moves = torch.empty(50, 5, dtype=torch.int32)
        outs = regroup([value], moves, [1] * 50)
    assert len(calls) < 10
    assert [str(out.shape[0]) for out in outs] == [str(value.shape[0])] * 50
    assert not str(value.shape[0]).isdigit()


@pytest.mark.parametrize(("first", "second", "groups", "key_dim", "dtype"), fake_samples())
def test_meta(
    first: tuple[int, ...],
    second: tuple[int, ...],
    groups: list[list[str]],
    key_dim: int,
    dtype: torch.dtype | None,
) -> None:
    plan = build(groups)
    shapes = [(first, torch.float32), (second, torch.float16)]
    real = regroup(
        [torch.zeros(s, dtype=d) for s, d in shapes], plan_tensor(plan), plan.out_widths, key_dim, dtype
    )
    metas = [torch.empty(s, dtype=d, device="meta", requires_grad=True) for s, d in shapes]
    moves = plan_tensor(plan).to("meta")
    outs = regroup(metas, moves, plan.out_widths, key_dim, dtype)
    assert all(out.is_meta for out in outs)
    assert [(o.shape, o.dtype) for o in outs] == [(r.shape, r.dtype) for r in real]
    if all(out.requires_grad for out in outs):
        grads = torch.autograd.grad(outs, metas, [torch.empty_like(out) for out in outs])
        assert [(g.shape, g.dtype, g.is_meta) for g in grads] == [(m.shape, m.dtype, True) for m in metas]


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_fake_and_real_agree_on_the_type_where_an_input_is_not_used(dtype: torch.dtype | None) -> None:
    """Fake tensors cannot see in the plan which ones are."""
    plan = build([["a"], ["b"]])
    shapes = [((3, 8), torch.float32), ((3, 6), torch.float64)]
    values = [torch.zeros(s, dtype=d) for s, d in shapes]
    real = regroup(values, plan_tensor(plan), plan.out_widths, 1, dtype)
    metas = [v.to("meta") for v in values]
    outs = regroup(metas, plan_tensor(plan).to("meta"), plan.out_widths, 1, dtype)
    with FakeTensorMode():
        fakes = [torch.empty(s, dtype=d) for s, d in shapes]
        moves = torch.empty(1, 5, dtype=torch.int32)
        fake_outs = regroup(fakes, moves, plan.out_widths, 1, dtype)
    assert [o.dtype for o in outs] == [f.dtype for f in fake_outs] == [r.dtype for r in real]


OPCHECKS = [
    pytest.param(ONCE, torch.float32, {}, True, id="once"),
    pytest.param(REPEATED, torch.float64, {}, True, id="repeated"),
    pytest.param(OMITTED, torch.float32, {}, True, id="omitted"),
    pytest.param([["a"]], torch.float32, {}, True, id="unused-input"),
    pytest.param(REPEATED, torch.float32, {"dtype": torch.bfloat16}, True, id="cast"),
    pytest.param(REPEATED, torch.float32, {"key_dim": -1}, True, id="negative-key-dim"),
    pytest.param(ONCE, torch.int64, {}, False, id="integers"),
    pytest.param([["b"], [], ["d"]], torch.float32, {}, False, id="empty-group"),
]


@pytest.mark.parametrize(("groups", "dtype", "options", "grad"), OPCHECKS)
def test_opcheck(groups: list[list[str]], dtype: torch.dtype, options: dict[str, Any], grad: bool) -> None:
    plan = build(groups)
    values = [v.requires_grad_(grad) for v in make(dtype=dtype)]
    result = torch.library.opcheck(regroup_default, (values, plan_tensor(plan), plan.out_widths), options)
    assert set(result.values()) == {"SUCCESS"}


def test_opcheck_key_dim_0() -> None:
    plan = build(REPEATED)
    values = [random_values((w, 3), torch.float32).mT.contiguous().mT.requires_grad_() for w in (8, 6)]
    result = torch.library.opcheck(regroup_default, (values, plan_tensor(plan), plan.out_widths, 0))
    assert set(result.values()) == {"SUCCESS"}


class Counter(TorchDispatchMode):
    """Records the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_one_operator() -> None:
    values = make(dtype=torch.float64, grad=True)
    plan = build(REPEATED)
    with Counter() as counter:
        outs = regroup_values(values, plan)
    assert counter.names.count("torchrec_kt.regroup.default") == 1
    assert not any("split" in name or "cat" in name or "select" in name for name in counter.names)
    assert_same(outs, regroup_reference(values, LAYOUTS, REPEATED))
    grads = whole_numbers(outs)
    with Counter() as counter:
        actual = torch.autograd.grad(outs, values, grads)
    assert [name for name in counter.names if "torchrec_kt" in name] == [
        "torchrec_kt.regroup_transposed.default"
    ]
    assert_same(actual, gradient_reference(values, grads, LAYOUTS, REPEATED))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("through_plan", [False, True])
def test_make_fx(mode: Any, through_plan: bool) -> None:
    plan = build(REPEATED)
    moves = plan_tensor(plan)

    def f(*values: Tensor) -> list[Tensor]:
        outs = regroup_values(values, plan) if through_plan else regroup(values, moves, plan.out_widths)
        return [out * 2 for out in outs]

    graph = make_fx(f, tracing_mode=mode, _allow_non_fake_inputs=True)(*make())
    calls = [node for node in graph.graph.nodes if node.target is regroup_default]
    assert len(calls) == 1
    values = make(7 if mode == "symbolic" else 3)
    assert_same(graph(*values), [2 * out for out in regroup_reference(values, LAYOUTS, REPEATED)])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("through_plan", [False, True])
def test_compile(backend: str, through_plan: bool) -> None:
    torch._dynamo.reset()
    plan = build(REPEATED)
    moves = plan_tensor(plan)

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def f(*values: Tensor) -> list[Tensor]:
        doubled = [v * 2 for v in values]
        return regroup_values(doubled, plan) if through_plan else regroup(doubled, moves, plan.out_widths)

    for rows in (4, 7):
        values = make(rows, torch.float64, grad=True)
        outs = f(*values)
        assert_same(outs, regroup_reference([v * 2 for v in values], LAYOUTS, REPEATED))
        grads = whole_numbers(outs)
        actual = torch.autograd.grad(outs, values, grads)
        assert_same(actual, [2 * g for g in gradient_reference(values, grads, LAYOUTS, REPEATED)])
    torch._dynamo.reset()


def test_compiled_autograd() -> None:
    torch._dynamo.reset()
    plan = build(REPEATED)
    for rows in (3, 5):
        values = make(rows, torch.float64, grad=True)
        outs = regroup(values, plan_tensor(plan), plan.out_widths)
        grads = whole_numbers(outs)
        with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
            torch.autograd.backward(outs, grads)
        assert_same([v.grad for v in values], gradient_reference(values, grads, LAYOUTS, REPEATED))
    torch._dynamo.reset()


class Regroup(torch.nn.Module):
    """The plan as a buffer, as graphs carry it."""

    def __init__(self, plan: RegroupPlan) -> None:
        super().__init__()
        self.register_buffer("moves", plan_tensor(plan))
        self.widths = list(plan.out_widths)

    def forward(self, first: Tensor, second: Tensor) -> list[Tensor]:
        return torch.ops.torchrec_kt.regroup([first, second], self.moves, self.widths)


def test_export_with_a_dynamic_batch() -> None:
    batch = {0: torch.export.Dim("batch", min=2, max=4096)}
    program = torch.export.export(
        Regroup(build(REPEATED)), tuple(make(4)), dynamic_shapes={"first": batch, "second": batch}
    )
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(regroup_default) == 1
    for rows in (4, 9):
        values = make(rows)
        assert_same(program.module()(*values), regroup_reference(values, LAYOUTS, REPEATED))


def test_torchscript() -> None:
    for module in (
        torch.jit.script(Regroup(build(REPEATED))),
        torch.jit.trace(Regroup(build(REPEATED)), tuple(make(4)), check_trace=False),
    ):
        for rows in (1, 5):
            values = make(rows, torch.float64, grad=True)
            outs: list[Tensor] = list(module(*values))  # pyright: ignore[reportCallIssue]
            assert_same(outs, regroup_reference(values, LAYOUTS, REPEATED))
            grads = whole_numbers(outs)
            actual = torch.autograd.grad(outs, values, grads)
            assert_same(actual, gradient_reference(values, grads, LAYOUTS, REPEATED))


@pytest.mark.filterwarnings("ignore:torch.tensor results are registered as constants")
def test_trace_of_regroup_values_records_the_operator() -> None:
    plan = build(REPEATED)
    traced: Any = torch.jit.trace(lambda a, b: tuple(regroup_values([a, b], plan)), tuple(make(4)))
    assert "torchrec_kt::regroup" in str(traced.inlined_graph)
    values = make(9)
    assert_same(traced(*values), regroup_reference(values, LAYOUTS, REPEATED))


class Marked(torch.Tensor):
    """A subclass without behaviour of its own."""


@pytest.mark.parametrize("call", ["plan", "operator"])
def test_subclasses(call: str) -> None:
    plan = build(REPEATED)

    def apply(values: list[Tensor]) -> list[Tensor]:
        return (
            regroup_values(values, plan)
            if call == "plan"
            else regroup(values, plan_tensor(plan), plan.out_widths)
        )

    marked = [v.as_subclass(Marked).requires_grad_() for v in make(dtype=torch.float64)]
    outs = apply(list(marked))
    plain = [v.detach().as_subclass(torch.Tensor) for v in marked]
    expected = regroup_reference(plain, LAYOUTS, REPEATED)
    assert_same([out.detach().as_subclass(torch.Tensor) for out in outs], expected)
    grads = whole_numbers(expected)
    torch.autograd.backward(outs, grads)
    wanted = gradient_reference(plain, grads, LAYOUTS, REPEATED)
    assert_same([None if m.grad is None else m.grad.as_subclass(torch.Tensor) for m in marked], wanted)


@pytest.mark.parametrize("call", ["plan", "operator"])
def test_wrapper_subclasses(call: str) -> None:
    """As distributed tensors are: two tensors behind one, reached only through the dispatcher."""
    plan = build(REPEATED)
    a, b = make(dtype=torch.float64), make(dtype=torch.float64)
    pairs: list[Tensor] = [TwoTensor(x, y).requires_grad_() for x, y in zip(a, b)]
    outs: list[Any] = list(
        regroup_values(pairs, plan) if call == "plan" else regroup(pairs, plan_tensor(plan), plan.out_widths)
    )
    assert_same([out.a for out in outs], regroup_reference(a, LAYOUTS, REPEATED))
    assert_same([out.b for out in outs], regroup_reference(b, LAYOUTS, REPEATED))
    grads = whole_numbers([out.a for out in outs])
    torch.autograd.backward(outs, [TwoTensor(g, g * 2) for g in grads])
    wanted = gradient_reference(a, grads, LAYOUTS, REPEATED)
    found: list[Any] = [p.grad for p in pairs]
    assert_same([g.a for g in found], wanted)
    assert_same([g.b for g in found], [2 * w for w in wanted])


# Hostile arguments


REFUSALS = (ValueError, RuntimeError, TypeError)
BASE = [[0, 0, 0, 0, 3], [1, 0, 0, 3, 2], [1, 1, 2, 0, 4], [0, 1, 3, 4, 5]]


def test_the_base_of_the_hostile_plans_is_good() -> None:
    assert [list(move) for move in build(ONCE).column_map.moves] == BASE
    values = make()
    assert_same(
        regroup(values, torch.tensor(BASE, dtype=torch.int32), [5, 9]),
        regroup_reference(values, LAYOUTS, ONCE),
    )


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [
        *[(row, 0, value) for row in range(4) for value in (2, 5, -1, 2**31 - 1, -(2**31))],
        *[(row, 1, value) for row in range(4) for value in (2, 9, -1, 2**31 - 1, -(2**31))],
        *[(3, 2, value) for value in (4, -1, -4, 10**8, -(10**8), 2**31 - 1, -(2**31))],
        *[(2, 2, value) for value in (3, -4, 10**8)],
        *[(3, 3, value) for value in (5, -3, 10**8, -(10**8), 2**31 - 1, -(2**31))],
        *[(1, 3, value) for value in (4, -1)],
        *[(row, 4, value) for row in range(4) for value in (1000, -1, 10**9, 2**31 - 1, -(2**31))],
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_plan_that_leaves_its_tensors(row: int, field: int, value: int, grad: bool) -> None:
    moves = torch.tensor(BASE, dtype=torch.int32)
    moves[row, field] = value
    values = make(grad=grad)
    with pytest.raises(ValueError, match=f"row {row} of the plan"):
        regroup(values, moves, [5, 9])


@pytest.mark.parametrize(
    "moves",
    [
        pytest.param(torch.tensor(BASE), id="int64"),
        pytest.param(torch.tensor(BASE).short(), id="int16"),
        pytest.param(torch.tensor(BASE).float(), id="float"),
        pytest.param(torch.tensor(BASE, dtype=torch.int32)[0], id="1-D"),
        pytest.param(torch.tensor(BASE, dtype=torch.int32)[None], id="3-D"),
        pytest.param(torch.tensor(5, dtype=torch.int32), id="number"),
        pytest.param(torch.tensor(BASE, dtype=torch.int32)[:, :4], id="4-fields"),
        pytest.param(torch.zeros(4, 7, dtype=torch.int32), id="7-fields"),
        pytest.param(torch.zeros(0, 0, dtype=torch.int32), id="no-fields"),
        pytest.param(torch.tensor(BASE, dtype=torch.int32, device="meta"), id="meta"),
        pytest.param(torch.tensor(BASE, dtype=torch.int32).to_sparse(), id="sparse"),
        pytest.param(None, id="none"),
        pytest.param(BASE, id="list"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_not_a_plan_tensor(moves: Any, grad: bool) -> None:
    with pytest.raises(REFUSALS):
        regroup(make(grad=grad), moves, [5, 9])


@pytest.mark.parametrize(
    "out_widths",
    [[1, 1], [5, 8], [5], [], [9, 5], [5, -9], [-1, 9], [5, 2**40], [5, -(2**63)], None, "59", [5, 9.5]],
)
def test_output_widths_that_do_not_fit(out_widths: Any) -> None:
    with pytest.raises(REFUSALS):
        regroup(make(), torch.tensor(BASE, dtype=torch.int32), out_widths)


@pytest.mark.parametrize("more", [[5, 12], [5, 9, 4], [6, 9, 0]])
def test_output_widths_beyond_the_plan_are_zero(more: list[int]) -> None:
    values = make()
    expected = regroup_reference(values, LAYOUTS, ONCE)
    poison(*[torch.empty(3, width) for width in more])
    outs = regroup(values, torch.tensor(BASE, dtype=torch.int32), more)
    assert [out.shape[1] for out in outs] == more
    assert_same([outs[0][:, :5], outs[1][:, :9]], expected)
    rest = torch.cat([outs[0][:, 5:], outs[1][:, 9:], *outs[2:]], 1)
    assert torch.equal(rest, torch.zeros_like(rest))


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([], id="none"),
        pytest.param([torch.randn(3, 8)], id="one-short"),
        pytest.param([torch.randn(3, 7), torch.randn(3, 6)], id="narrower"),
        pytest.param([torch.randn(3, 8), torch.randn(1, 6)], id="batch-3-1"),
        pytest.param([torch.randn(1, 8), torch.randn(3, 6)], id="batch-1-3"),
        pytest.param([torch.randn(0, 8), torch.randn(3, 6)], id="batch-0-3"),
        pytest.param([torch.randn(3, 8), torch.randn(3, 6, 2)], id="rank-2-3"),
        pytest.param([torch.randn(8), torch.randn(6)], id="1-D"),
        pytest.param([torch.randn(()), torch.randn(())], id="numbers"),
        pytest.param([torch.randn(3, 8), torch.randn(3, 6).to_sparse()], id="sparse"),
        pytest.param([torch.randn(3, 8), torch.randn(3, 6, device="meta")], id="cpu-meta"),
        pytest.param([torch.randn(3, 8, device="meta"), torch.randn(3, 6)], id="meta-cpu"),
        pytest.param([torch.randn(3, 8), None], id="with-none"),
        pytest.param(torch.randn(2, 3, 8), id="tensor-of-wrong-widths"),
        pytest.param(None, id="nothing"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_values_that_do_not_fit(values: Any, warm: bool) -> None:
    moves = torch.tensor(BASE, dtype=torch.int32)
    if isinstance(values, Tensor):
        moves[1:3, 0] = 0
        moves[2, 2] = 5
    if warm:
        regroup(make(), torch.tensor(BASE, dtype=torch.int32), [5, 9])
    with pytest.raises(REFUSALS):
        regroup(values, moves, [5, 9])


@pytest.mark.parametrize("key_dim", [2, -3, 2**31, -(2**63)])
def test_a_key_dim_that_does_not_exist(key_dim: int) -> None:
    with pytest.raises(REFUSALS):
        regroup(make(), torch.tensor(BASE, dtype=torch.int32), [5, 9], key_dim)


def test_a_plan_for_the_other_dimension() -> None:
    square = [torch.randn(8, 8), torch.randn(6, 6)]
    with pytest.raises(ValueError, match=r"values\[1\]"):
        regroup(square, torch.tensor(BASE, dtype=torch.int32), [5, 9], 0)


NEAR = st.one_of(
    st.integers(-2, 9), st.sampled_from((100, -100, 10**8, -(10**8), 2**31 - 1, -(2**31), 2**30, 2**16))
)


@given(
    rows=st.lists(
        st.one_of(
            st.tuples(st.integers(0, 1), st.integers(0, 1), *[st.integers(0, 4)] * 3),
            st.tuples(st.integers(-1, 2), st.integers(-1, 2), NEAR, NEAR, NEAR),
        ),
        max_size=4,
    ),
    fields=st.sampled_from((5, 6)),
    batch=st.sampled_from((0, 1, 3)),
    in_widths=st.lists(st.integers(0, 8), min_size=1, max_size=2),
    out_widths=st.lists(st.integers(0, 8), max_size=2),
)
@settings(max_examples=400)
def test_any_plan_is_refused_or_obeyed(
    rows: list[tuple[int, ...]], fields: int, batch: int, in_widths: list[int], out_widths: list[int]
) -> None:
    """Exactly the plans that stay inside are accepted, and give what the matrix says."""
    moves = torch.tensor([[*row, *[-1] * (fields - 5)] for row in rows], dtype=torch.int32).reshape(
        -1, fields
    )
    values = [distinct((batch, width), torch.int64, start=7 * n) for n, width in enumerate(in_widths)]
    try:
        matrix = dense_of_moves(rows, in_widths, out_widths)
    except IndexError:
        with pytest.raises(REFUSALS):
            regroup(values, moves, out_widths)
    else:
        expected = apply_dense(values, matrix, out_widths) if out_widths else []
        poison(*[torch.empty(batch, width, dtype=torch.int64) for width in out_widths], copies=4)
        assert_same(regroup(values, moves, out_widths), expected)


@given(raw_maps(), st.sampled_from((1, 3, 8)), st.sampled_from((torch.float64, torch.complex128)))
def test_gradients_of_any_plan(raw: RawMap, batch: int, dtype: torch.dtype) -> None:
    values = [distinct((batch, w), dtype, start=7 * n).requires_grad_() for n, w in enumerate(raw.in_widths)]
    moves = torch.tensor(raw.moves, dtype=torch.int32).reshape(-1, 5)
    matrix = dense_of_moves(raw.moves, raw.in_widths, raw.out_widths)
    outs = regroup(values, moves, raw.out_widths)
    assert_same(outs, apply_dense([v.detach() for v in values], matrix, raw.out_widths))
    grads = whole_numbers(outs)
    poison(*values, copies=4)
    actual = torch.autograd.grad(outs, values, grads)
    assert_same(actual, apply_dense(grads, matrix.T, raw.in_widths))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_several_plans_in_one_compiled_graph(backend: str) -> None:
    torch._dynamo.reset()
    plans = [
        RegroupPlan.build(layouts=[(["a", "b"], [2, 3])], groups=[[key], ["b", "a"]]) for key in ("a", "b")
    ]

    def regroup_all(values: Tensor) -> list[Tensor]:
        return [out for plan in (*plans, plans[0]) for out in regroup_values([values], plan)]

    compiled = torch.compile(regroup_all, fullgraph=True, backend=backend)
    for batch in (3, 5):
        values = torch.randn(batch, 5)
        assert all(map(torch.equal, compiled(values), regroup_all(values)))
    plans[:] = plans[::-1]  # another plan in the same place is another graph
    assert all(map(torch.equal, compiled(values), regroup_all(values)))
