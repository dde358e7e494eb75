"""The contract of ``regroup_values``: values, gradients of every order, refusals, states of torch."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tests.layouts import Case, cases
from tests.reference import (
    ALL_DTYPES,
    COMPLEX_DTYPES,
    FLOAT8_DTYPES,
    INTEGER_DTYPES,
    REAL_DTYPES,
    STRIDES,
    apply_moves,
    as_bytes,
    assert_independent,
    assert_same,
    conjugate_view,
    dense_of_groups,
    distinct,
    gradient_reference,
    negative_view,
    poison,
    random_bits,
    random_values,
    regroup_reference,
    same_bytes,
)
from tests.transforms import TRANSFORMS, assert_close, assert_same_transformed, cubic, tensors_of
from torchrec_kt.ops import RegroupPlan, regroup_values
from torchrec_kt.ops import cost as cost_rule
from torchrec_kt.ops import regroup as regroup_module

LAYOUTS = [(["a", "b"], [3, 5]), (["c", "d"], [2, 4])]
ONCE = [["a", "c"], ["d", "b"]]
REPEATED = [["a", "c", "a"], ["d", "b"], ["a", "d"]]
OMITTED = [["b"], ["d", "b"]]
MOVERS = ("slices", "columns", "rows")


def build(groups: Sequence[Sequence[str]] = ONCE) -> RegroupPlan:
    return RegroupPlan.build(LAYOUTS, groups)


def make(
    rows: int = 3, dtype: torch.dtype = torch.float32, *, grad: bool = False, widths: Sequence[int] = (8, 6)
) -> list[Tensor]:
    return [random_values((rows, width), dtype).requires_grad_(grad) for width in widths]


def prefer(patch: pytest.MonkeyPatch, strategy: str) -> None:
    """Move columns in this way wherever it can serve."""

    def cheapest(costs: dict[str, float]) -> str:
        return strategy if strategy in costs else "slices"

    patch.setattr(cost_rule, "cheapest", cheapest)


@pytest.fixture(params=MOVERS)
def mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test once per way to move columns."""
    prefer(monkeypatch, request.param)
    return request.param


def whole_numbers(outs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of which all sums are exact."""
    return [distinct(out.shape, out.dtype, start=1 + 3 * n) for n, out in enumerate(outs)]


def ones_like(outs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(out) for out in outs]


# Values


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.usefixtures("mover")
def test_forward_copies_bytes(dtype: torch.dtype, rows: int) -> None:
    """NaN payloads, negative zeros and subnormal numbers included, all bit patterns in fact."""
    layouts = [(["a", "b"], [4, 8]), (["c", "d"], [12, 40])]
    values = [random_bits((rows, 12), dtype), random_bits((rows, 52), dtype)]
    for groups in (ONCE, REPEATED, OMITTED, [["d", "c"]], [["a", "b"], ["c", "d"]]):
        outs = regroup_values(values, RegroupPlan.build(layouts, groups))
        expected = regroup_reference(values, layouts, groups, dtype=dtype)
        assert len(outs) == len(expected)
        assert all(same_bytes(a, b) for a, b in zip(outs, expected))


@pytest.mark.parametrize(
    ("dtype", "integer", "patterns"),
    [
        (torch.float64, torch.int64, [1, -(2**63), 0x7FF0_0000_0000_0001, 0x7FF8_0000_DEAD_BEEF, -1]),
        (torch.float32, torch.int32, [1, -(2**31), 0x7F80_0001, 0x7FC0_BEEF, -1]),
        (torch.float16, torch.int16, [1, -(2**15), 0x7C01, 0x7E42, -1]),
        (torch.bfloat16, torch.int16, [1, -(2**15), 0x7F81, 0x7FC5, -1]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("mover")
def test_special_numbers_keep_their_bits(
    dtype: torch.dtype, integer: torch.dtype, patterns: list[int]
) -> None:
    plan = RegroupPlan.build([(list("abcde"), [1] * 5)], [list("edcba"), list("aab")])
    for rows in (1, 6):
        values = torch.tensor(patterns, dtype=integer).expand(rows, 5).view(dtype)
        reversed_, repeated = regroup_values([values], plan)
        assert reversed_.view(integer)[-1].tolist() == patterns[::-1]
        assert repeated.view(integer)[-1].tolist() == [patterns[0], patterns[0], patterns[1]]


@given(
    cases(),
    st.sampled_from(MOVERS),
    st.sampled_from((1, 2, 3, 9)),
    st.sampled_from((torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool)),
    st.lists(st.sampled_from(sorted(STRIDES)), min_size=3, max_size=3),
    st.lists(st.sampled_from((0, 0, 1, 2)), min_size=3, max_size=3),
)
def test_values_of_any_plan(
    case: Case,
    strategy: str,
    rows: int,
    dtype: torch.dtype,
    strides: list[str],
    padding: list[int],
) -> None:
    values = [
        STRIDES[stride](distinct((rows, sum(widths) + spare), dtype, start=7 * n))
        for n, ((_, widths), spare, stride) in enumerate(zip(case.layouts, padding, strides))
    ]
    before = [as_bytes(v) for v in values]
    with pytest.MonkeyPatch.context() as patch:
        prefer(patch, strategy)
        outs = regroup_values(values, case.plan)
    assert_same(outs, regroup_reference(values, case.layouts, case.groups, dtype=dtype))
    assert_independent(outs, values)
    assert all(torch.equal(as_bytes(v), b) for v, b in zip(values, before))


SHAPES = [(14,), (4, 14), (14, 4), (14, 14), (2, 14, 3), (14, 2, 3), (2, 3, 14), (2, 3, 4, 14), (2, 14, 3, 4)]


@pytest.mark.parametrize(
    ("shape", "key_dim"),
    [
        (shape, dim)
        for shape in SHAPES
        for axis, size in enumerate(shape)
        if size == 14
        for dim in (axis, axis - len(shape))
    ],
)
@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED, [[], ["a"]]], ids=str)
@pytest.mark.usefixtures("mover")
def test_any_rank_and_key_dim(shape: tuple[int, ...], key_dim: int, groups: list[list[str]]) -> None:
    layouts = [(["a", "b"], [6, 8]), (["c", "d"], [10, 4])]
    plan = RegroupPlan.build(layouts, groups)
    for stride in ("contiguous", "transposed", "padded rows"):
        values = [STRIDES[stride](random_values(shape, torch.float64)).requires_grad_() for _ in range(2)]
        outs = regroup_values(values, plan, key_dim=key_dim)
        assert_same(outs, regroup_reference(values, layouts, groups, key_dim=key_dim))
        assert all(out.is_contiguous() for out in outs)
        grads = whole_numbers(outs)
        poison(*values)
        actual = torch.autograd.grad(outs, values, grads, allow_unused=True)
        assert_same(actual, gradient_reference(values, grads, layouts, groups, key_dim=key_dim))


@pytest.mark.parametrize("key_dim", [2, -3, 5])
def test_a_key_dim_that_does_not_exist(key_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"key_dim is {key_dim}.*\(3, 8\)"):
        regroup_values(make(), build(), key_dim=key_dim)


@pytest.mark.usefixtures("mover")
def test_batch_changes() -> None:
    plan = build(REPEATED)
    for rows in (4, 1, 7, 0, 3, 200, 0, 1, 4):
        values = make(rows, grad=True)
        outs = regroup_values(values, plan)
        assert_same(outs, regroup_reference(values, LAYOUTS, REPEATED))
        grads = whole_numbers(outs)
        actual = torch.autograd.grad(outs, values, grads)
        assert_same(actual, [g.float() for g in gradient_reference(values, grads, LAYOUTS, REPEATED)])


@pytest.mark.parametrize("groups", [[], [[]], [[], []], [["z"], [], ["z", "z"]]])
def test_outputs_without_columns(groups: list[list[str]]) -> None:
    layouts = [(["a", "z"], [3, 0])]
    value = random_values((4, 3), torch.float32).requires_grad_()
    outs = regroup_values([value], RegroupPlan.build(layouts, groups))
    assert [tuple(out.shape) for out in outs] == [(4, 0)] * len(groups)
    assert all(out.dtype == torch.float32 for out in outs)
    if any(out.requires_grad for out in outs):
        sum((out.sum() for out in outs), start=torch.zeros(())).backward()
        assert value.grad is None or torch.equal(value.grad, torch.zeros(4, 3))


def test_hundreds_of_keys_of_width_one() -> None:
    keys = [f"k{n}" for n in range(300)]
    values = [random_values((2, 150), torch.float32).requires_grad_() for _ in range(2)]
    groups = [keys[::-1], keys[::2], keys[7::3]]
    layouts = [(keys[:150], [1] * 150), (keys[150:], [1] * 150)]
    outs = regroup_values(values, RegroupPlan.build(layouts, groups))
    assert_same(outs, regroup_reference(values, layouts, groups))
    grads = whole_numbers(outs)
    actual = torch.autograd.grad(outs, values, grads)
    assert_same(actual, [g.float() for g in gradient_reference(values, grads, layouts, groups)])


@pytest.mark.parametrize("view", [conjugate_view, negative_view])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.usefixtures("mover")
def test_conjugate_and_negative_views_of_complex(
    view: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    plain = make(dtype=dtype)
    values = [view(v) for v in plain]
    assert all(v.is_conj() or v.is_neg() for v in values)
    outs = regroup_values(values, build(REPEATED))
    assert_same(outs, regroup_reference(plain, LAYOUTS, REPEATED))
    assert not any(out.is_conj() or out.is_neg() for out in outs)


@pytest.mark.usefixtures("mover")
def test_negative_view_of_real() -> None:
    plain = make()
    values = [v.to(torch.complex64).mul(1j).conj().imag.neg() for v in plain] + [
        negative_view(v) for v in plain
    ]
    for pair in (values[:2], values[2:]):
        assert_same(regroup_values(pair, build(REPEATED)), regroup_reference(plain, LAYOUTS, REPEATED))


def test_inputs_that_share_memory() -> None:
    buffer = random_values((5, 20), torch.float32)
    for values in ([buffer[:, :8], buffer[:, 4:10]], [buffer[:, :8], buffer[:, :6]]):
        assert_same(regroup_values(values, build(REPEATED)), regroup_reference(values, LAYOUTS, REPEATED))
    same = random_values((5, 8), torch.float32).requires_grad_()
    layouts = [(["a", "b"], [3, 5]), (["c", "d"], [2, 6])]
    outs = regroup_values([same, same], RegroupPlan.build(layouts, ONCE))
    assert_same(outs, regroup_reference([same, same], layouts, ONCE))
    torch.autograd.backward(outs, ones_like(outs))
    assert same.grad is not None
    assert torch.equal(same.grad, torch.full((5, 8), 2.0))


def test_values_can_be_any_sequence_and_are_left_alone() -> None:
    values = make()
    versions = [v._version for v in values]
    expected = regroup_reference(values, LAYOUTS, ONCE)
    plan = build()
    as_list = list(values)
    assert_same(regroup_values(as_list, plan), expected)
    assert_same(regroup_values(tuple(values), plan), expected)
    assert_same(regroup_values([torch.nn.Parameter(v) for v in values], plan), expected)
    assert len(as_list) == 2
    assert all(a is b for a, b in zip(as_list, values))
    assert [v._version for v in values] == versions
    assert type(regroup_values(values, plan)) is list


# Types


CASTS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8]
CASTS += [torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("source", CASTS, ids=str)
@pytest.mark.parametrize("target", CASTS, ids=str)
@pytest.mark.parametrize("rows", [1, 7])
def test_casts(source: torch.dtype, target: torch.dtype, rows: int) -> None:
    values = [distinct((rows, 8), source), distinct((rows, 6), source, start=3)]
    for groups in (ONCE, REPEATED, OMITTED):
        outs = regroup_values(values, build(groups), target)
        expected = [out.to(target) for out in regroup_reference(values, LAYOUTS, groups, dtype=source)]
        assert all(same_bytes(a, b) for a, b in zip(outs, expected, strict=True))
        assert_independent(outs, values)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.usefixtures("mover")
def test_casts_round_as_torch_does(target: torch.dtype) -> None:
    values = [random_values((50, 8), torch.float32).mul(10), random_values((50, 6), torch.float32)]
    values[0][0, :5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40])
    outs = regroup_values(values, build(), target)
    expected = [out.to(target) for out in regroup_reference(values, LAYOUTS, ONCE)]
    for out, right in zip(outs, expected, strict=True):
        # Which of the many NaNs comes out is nobody's promise.
        nan = right.float().isnan()
        assert torch.equal(out.float().isnan(), nan)
        zero = torch.zeros((), dtype=target)
        assert same_bytes(out.where(~nan, zero), right.where(~nan, zero))


PAIRS = [
    (torch.float32, torch.float16),
    (torch.float16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.float64),
    (torch.float32, torch.int64),
    (torch.int64, torch.float16),
    (torch.bool, torch.int8),
    (torch.uint8, torch.int8),
    (torch.int32, torch.int64),
    (torch.complex64, torch.float64),
    (torch.bfloat16, torch.complex64),
    (torch.uint16, torch.float32),
]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED, [["b"], ["a"]], [["d"], []]], ids=str)
@pytest.mark.usefixtures("mover")
def test_mixed_types_are_promoted_as_cat_does(
    first: torch.dtype, second: torch.dtype, groups: list[list[str]]
) -> None:
    values = [distinct((4, 8), first), distinct((4, 6), second)]
    outs = regroup_values(values, build(groups))
    assert_same(outs, regroup_reference(values, LAYOUTS, groups))
    assert_independent(outs, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn], ids=str)
def test_mixed_types_with_a_cast(dtype: torch.dtype) -> None:
    for first, second in PAIRS:
        if first.is_complex or second.is_complex:
            continue
        values = [distinct((4, 8), first), distinct((4, 6), second)]
        outs = regroup_values(values, build(REPEATED), dtype)
        assert_same(outs, regroup_reference(values, LAYOUTS, REPEATED, dtype=dtype))


def test_mixed_types_that_torch_does_not_promote() -> None:
    values = [distinct((4, 8), torch.float8_e4m3fn), distinct((4, 6), torch.float32)]
    with pytest.raises(TypeError, match=r"values\[1\].*float32.*float8_e4m3fn"):
        regroup_values(values, build())
    assert_same(regroup_values(values, build(OMITTED[:1])), [values[0][:, 3:]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_mixed_types_that_torch_does_not_promote_with_a_cast(dtype: torch.dtype) -> None:
    """With the type given there is nothing to promote."""
    values = [distinct((4, 8), torch.float8_e4m3fn), distinct((4, 6), torch.float32)]
    outs = regroup_values(values, build(REPEATED), dtype)
    assert_same(outs, regroup_reference(values, LAYOUTS, REPEATED, dtype=dtype))


def test_types_change_between_calls() -> None:
    plan = build(REPEATED)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.float32, torch.bool):
        values = [distinct((4, 8), dtype), distinct((4, 6), dtype)]
        assert_same(regroup_values(values, plan), regroup_reference(values, LAYOUTS, REPEATED))
        assert_same(
            regroup_values(values, plan, torch.float64),
            regroup_reference(values, LAYOUTS, REPEATED, dtype=torch.float64),
        )


# What fits and what does not


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.usefixtures("mover")
def test_padding_columns_are_ignored(rows: int) -> None:
    values = make(rows, grad=True, widths=(8 + 5, 6 + 1))
    for groups in (ONCE, REPEATED, OMITTED, [["a", "b", "c", "d"]]):
        outs = regroup_values(values, build(groups))
        assert_same(outs, regroup_reference(values, LAYOUTS, groups))
        grads = whole_numbers(outs)
        poison(*values)
        actual = torch.autograd.grad(outs, values, grads)
        assert_same(actual, [g.float() for g in gradient_reference(values, grads, LAYOUTS, groups)])


@pytest.mark.parametrize(
    ("shapes", "key_dim", "pattern"),
    [
        ([(3, 7), (3, 6)], 1, r"values\[0\].*\(3, 7\).*7 columns.*8"),
        ([(3, 8), (3, 5)], 1, r"values\[1\].*\(3, 5\).*5 columns.*6"),
        ([(3, 8), (3, 0)], 1, r"values\[1\].*\(3, 0\)"),
        ([(7, 3), (6, 3)], 0, r"values\[0\].*\(7, 3\).*dimension 0"),
        ([(3, 8), (2, 6)], 1, r"values\[1\].*\(2, 6\).*\(3, 8\)"),
        ([(2, 8), (3, 6)], 1, r"values\[1\].*\(3, 6\).*\(2, 8\)"),
        ([(3, 8), (1, 6)], 1, r"values\[1\].*\(1, 6\).*\(3, 8\)"),
        ([(0, 8), (3, 6)], 1, r"values\[1\].*\(3, 6\).*\(0, 8\)"),
        ([(3, 8), (3, 6, 2)], 1, r"values\[1\].*\(3, 6, 2\).*\(3, 8\)"),
        ([(3, 8, 2), (3, 6)], 1, r"values\[1\].*\(3, 6\).*\(3, 8, 2\)"),
        ([(3, 8, 2), (3, 6, 1)], 1, r"values\[1\].*\(3, 6, 1\)"),
        ([(3, 8)], 1, "1 value tensors.*2"),
        ([(3, 8), (3, 6), (3, 1)], 1, "3 value tensors.*2"),
        ([], 1, "0 value tensors.*2"),
        ([(8,), (6,)], 1, r"key_dim is 1.*\(8,\)"),
        ([(), ()], 0, r"key_dim is 0.*\(\)"),
    ],
)
def test_shapes_that_do_not_fit(shapes: list[tuple[int, ...]], key_dim: int, pattern: str) -> None:
    for groups in (ONCE, REPEATED):
        plan = build(groups)
        for grad in (False, True):
            values = [torch.randn(shape, requires_grad=grad) for shape in shapes]
            for _ in range(2):
                with pytest.raises(ValueError, match=pattern):
                    regroup_values(values, plan, key_dim=key_dim)
                # Nor do they fit after calls that did.
                for _ in range(2):
                    regroup_values(make(grad=grad), plan)


DISTURBANCES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "rows": lambda values: [v[:2].clone() for v in values],
    "dtype": lambda values: [v.double() for v in values],
    "one dtype": lambda values: [values[0], values[1].double()],
    "padding": lambda values: [torch.cat([v, v], 1) for v in values],
    "parameters": lambda values: [torch.nn.Parameter(v.detach()) for v in values],
    "strides": lambda values: [v.T.contiguous().T for v in values],
    "gradient": lambda values: [v.detach().requires_grad_(not v.requires_grad) for v in values],
    "one gradient": lambda values: [values[0].detach(), values[1].detach().requires_grad_()],
    "negative": lambda values: [negative_view(v) for v in values],
    "one tensor twice": lambda values: [values[0], values[0][:, :6]],
}


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("change", DISTURBANCES.values(), ids=DISTURBANCES)
def test_a_call_unlike_the_last(
    change: Callable[[list[Tensor]], list[Tensor]],
    grad: bool,
    guarded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last call is recognised; one that differs in anything gets what is its own, as does the next."""
    if not guarded:  # another torch may lack them
        monkeypatch.setattr(regroup_module, "TensorGuards", None)
    plan = build(REPEATED)
    for _ in range(3):
        for values in (make(grad=grad), make(grad=grad), change(make(grad=grad))):
            outs = regroup_values(values, plan)
            assert_same(outs, regroup_reference(values, LAYOUTS, REPEATED))
            assert [out.requires_grad for out in outs] == [any(v.requires_grad for v in values)] * 3
            with torch.no_grad():
                assert not any(out.requires_grad for out in regroup_values(values, plan))
            wanting = [v for v in values if v.requires_grad]
            if wanting:
                grads = whole_numbers(outs)
                poison(*wanting)
                expected = torch.autograd.grad(regroup_reference(values, LAYOUTS, REPEATED), wanting, grads)
                assert_same(torch.autograd.grad(outs, wanting, grads), expected)


def test_a_call_like_the_last_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build()

    def passes() -> list[Tensor]:
        values = make(grad=True)
        outs = regroup_values(values, plan)
        return list(torch.autograd.grad(outs, values, whole_numbers(outs)))

    wanted = passes()
    monkeypatch.setattr(regroup_module, "call_for", None)  # the way that describes the inputs
    assert_same(passes(), wanted)


def test_narrower_values_are_refused_even_where_the_used_columns_exist() -> None:
    """A key is cut off somewhere: the layout is not that of these values."""
    with pytest.raises(ValueError, match=r"values\[0\].*8"):
        regroup_values(make(widths=(7, 6)), build([["a"], ["c"]]))


def test_no_values_and_no_layouts() -> None:
    with pytest.raises(ValueError, match="no value tensors"):
        regroup_values([], RegroupPlan.build([], [[]]))


@pytest.mark.parametrize("devices", [("cpu", "meta"), ("meta", "cpu")])
@pytest.mark.parametrize("warm", [False, True])
def test_devices_must_agree(devices: tuple[str, str], warm: bool) -> None:
    plan = build()
    if warm:
        regroup_values(make(), plan)
        regroup_values([v.to("meta") for v in make()], plan)
    values = [v.to(device) for v, device in zip(make(), devices)]
    with pytest.raises(ValueError, match=rf"values\[1\] is on {devices[1]}, values\[0\] on {devices[0]}"):
        regroup_values(values, plan)


@pytest.mark.parametrize(
    "spare",
    [
        pytest.param(torch.randn(5, 6), id="other-batch"),
        pytest.param(torch.randn(5), id="other-rank"),
        pytest.param(torch.randn(3, 2), id="narrower"),
        pytest.param(torch.randn(()), id="number"),
        pytest.param(torch.randn(3, 6, dtype=torch.float64), id="other-type"),
        pytest.param(torch.randn(3, 6, dtype=torch.complex64), id="complex"),
        pytest.param(torch.zeros(3, 6, dtype=torch.uint8).view(torch.float8_e4m3fn), id="float8"),
        pytest.param(torch.randn(3, 6, device="meta"), id="meta"),
        pytest.param(torch.randn(3, 6).to_sparse(), id="sparse"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_an_input_that_no_group_uses_is_not_looked_at(spare: Tensor, place: int) -> None:
    used = random_values((3, 8), torch.float32).requires_grad_()
    spare = spare.detach().requires_grad_()
    layouts = [(["a", "b"], [3, 5]), (["c", "d"], [2, 4])]
    values = [used, spare]
    if place == 0:
        layouts, values = layouts[::-1], values[::-1]
    outs = regroup_values(values, RegroupPlan.build(layouts, [["b"], [], ["a", "b"]]))
    assert_same(outs, [used[:, 3:], torch.empty(3, 0), used])
    torch.autograd.backward(outs, ones_like(outs))
    assert used.grad is not None
    assert torch.equal(used.grad, torch.tensor([1.0] * 3 + [2.0] * 5).expand(3, 8))
    if spare.grad is not None:
        assert spare.grad.shape == spare.shape
        assert spare.grad.dtype == spare.dtype
        assert spare.grad.device == spare.device
        if spare.device.type == "cpu":
            assert not as_bytes(spare.grad.to_dense()).any()


LOOKALIKES: dict[str, Callable[[Tensor], Any]] = {
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "none": lambda t: None,
    "list": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("places", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("kind", sorted(LOOKALIKES))
@pytest.mark.usefixtures("mover")
def test_what_is_not_a_strided_tensor_is_refused(kind: str, warm: bool, places: tuple[int, ...]) -> None:
    """By name, also right after strided tensors of the same shape were accepted."""
    for groups in (ONCE, REPEATED):
        plan = build(groups)
        for grad in (False, True) if kind in ("coo", "csr") else (False,):
            values: list[Any] = make()
            if warm:
                regroup_values([v.requires_grad_(grad) for v in values], plan)
            for place in places:
                values[place] = LOOKALIKES[kind](values[place].detach())
            if grad:
                values = [v.detach().requires_grad_() for v in values]
            with pytest.raises((TypeError, ValueError), match=rf"values\[{places[0]}\]"):
                regroup_values(values, plan)


def test_a_single_sparse_row_is_refused() -> None:
    plan = build()
    values = make(1)
    regroup_values(values, plan)
    with pytest.raises(ValueError, match=r"values\[0\]"):
        regroup_values([v.to_sparse() for v in values], plan)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    parts = [torch.randn(2, 8), torch.randn(3, 8)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    with pytest.raises((TypeError, ValueError), match=r"values\[0\]"):
        regroup_values([nested, torch.randn(2, 6)], build())


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_lone_tensor_is_refused(warm: bool) -> None:
    plan = RegroupPlan.build([(["a"], [3]), (["b"], [3])], [["b", "a"]])
    stacked = torch.randn(2, 4, 3)
    if warm:
        regroup_values(list(stacked), plan)
    for tensor in (stacked, torch.randn(()), torch.randn(0, 3)):
        with pytest.raises(TypeError, match="single tensor"):
            regroup_values(tensor, plan)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("plan", [None, LAYOUTS, "plan", build().column_map, RegroupPlan])
def test_what_is_not_a_plan_is_refused(plan: Any) -> None:
    with pytest.raises(TypeError, match=r"RegroupPlan\.build"):
        regroup_values(make(), plan)


@pytest.mark.parametrize("dtype", ["float32", float, 6, torch.Tensor])
def test_what_is_not_a_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"dtype is .*torch\.dtype"):
        regroup_values(make(), build(), dtype)


@pytest.mark.parametrize("values", [None, 5, object()])
def test_what_is_not_a_sequence_is_refused(values: Any) -> None:
    with pytest.raises(TypeError):
        regroup_values(values, build())


def test_a_refusal_leaves_no_trace() -> None:
    plan = build()
    with pytest.raises(ValueError, match=r"values\[1\]"):
        regroup_values([torch.randn(3, 8), torch.randn(2, 6)], plan)
    with pytest.raises(TypeError):
        regroup_values(make(), plan, "float32")  # pyright: ignore[reportArgumentType]
    values = make()
    assert_same(regroup_values(values, plan), regroup_reference(values, LAYOUTS, ONCE))


# Outputs


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("groups", [ONCE, [["a", "b"], ["a", "b"], ["c", "d"]], [["a"], ["a"]]], ids=str)
@pytest.mark.usefixtures("mover")
def test_outputs_are_independent(groups: list[list[str]], grad: bool, rows: int) -> None:
    values = make(rows, grad=grad)
    outs = regroup_values(values, build(groups))
    assert_independent(outs, values)
    assert all(out._base is None for out in outs)
    before = [out.detach().clone() for out in outs]
    with torch.no_grad():
        outs[0].zero_()
        values[0].fill_(7)
    assert_same(outs[1:], before[1:])


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.usefixtures("mover")
def test_outputs_can_be_changed_in_place_in_a_graph(rows: int) -> None:
    values = make(rows, torch.float64, grad=True)
    outs = regroup_values(values, build(REPEATED))
    outs[0].mul_(2)
    outs[1][:, 0] = 0
    outs[2].add_(outs[0][:, :7].sum()).pow_(2)
    actual = torch.autograd.grad(sum((out.sum() for out in outs), start=torch.zeros(())), values)
    twins = [v.detach().clone().requires_grad_() for v in values]
    wanted = regroup_reference(twins, LAYOUTS, REPEATED)
    wanted[0] = wanted[0] * 2
    wanted[1] = wanted[1] * torch.cat([torch.zeros(1), torch.ones(8)]).double()
    wanted[2] = (wanted[2] + wanted[0][:, :7].sum()) ** 2
    loss = sum((out.sum() for out in wanted), start=torch.zeros(()))
    expected = torch.autograd.grad(loss, twins)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(actual, expected, strict=True))


def test_inputs_can_be_changed_between_forward_and_backward() -> None:
    """Nothing of the inputs is kept for the backward pass."""
    values = make(dtype=torch.float64, grad=True)
    outs = regroup_values(values, build(REPEATED))
    with torch.no_grad():
        for v in values:
            v.fill_(float("nan"))
    grads = whole_numbers(outs)
    actual = torch.autograd.grad(outs, values, grads)
    assert_same(actual, gradient_reference(values, grads, LAYOUTS, REPEATED))


# States of torch


def test_meta_tensors_before_and_after_real_ones() -> None:
    plan = build(REPEATED)
    values = make(grad=True)
    expected = regroup_reference(values, LAYOUTS, REPEATED)
    for _ in range(2):
        for dtype in (None, torch.float16):
            metas = [v.detach().to("meta").requires_grad_() for v in values]
            outs = regroup_values(metas, plan, dtype)
            assert [tuple(out.shape) for out in outs] == [tuple(e.shape) for e in expected]
            assert all(out.is_meta and out.dtype == (dtype or torch.float32) for out in outs)
            torch.autograd.backward(outs, ones_like(outs))
            for meta, value in zip(metas, values):
                assert meta.grad is not None
                assert meta.grad.is_meta
                assert meta.grad.shape == value.shape
                assert meta.grad.dtype == torch.float32
        assert_same(regroup_values(values, plan), expected)


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_fake_tensors_before_and_after_real_ones(device: str) -> None:
    plan = build(REPEATED)
    values = make(grad=True)
    expected = regroup_reference(values, LAYOUTS, REPEATED)
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=False):
            # A CPU build of torch aborts on recording any operation on fake CUDA tensors.
            grad = device != "cuda"
            fakes = [torch.empty(3, width, device=device, requires_grad=grad) for width in (8, 6)]
            for dtype in (None, torch.bfloat16):
                outs = regroup_values(fakes, plan, dtype)
                assert all(isinstance(out, FakeTensor) for out in outs)
                assert [tuple(out.shape) for out in outs] == [tuple(e.shape) for e in expected]
                assert all(out.dtype == (dtype or torch.float32) for out in outs)
                assert all(out.device.type == device for out in outs)
                grads = torch.autograd.grad(outs, fakes, ones_like(outs)) if grad else fakes
                assert [tuple(g.shape) for g in grads] == [(3, 8), (3, 6)]
                assert all(g.device.type == device and g.dtype == torch.float32 for g in grads)
        outs = regroup_values(values, plan)
        assert_same(outs, expected)
        assert not any(isinstance(out, FakeTensor) for out in outs)
        torch.autograd.grad(outs, values, ones_like(outs))


def test_fake_tensors_outside_of_their_mode() -> None:
    """As ``torch.cat`` and all other operators take them."""
    with FakeTensorMode():
        fakes = [torch.empty(3, 8), torch.empty(3, 6)]
    plan = build()
    assert torch.cat(fakes, 1).shape == (3, 14)
    outs = regroup_values(fakes, plan)
    assert all(isinstance(out, FakeTensor) for out in outs)
    assert [tuple(out.shape) for out in outs] == [(3, 5), (3, 9)]
    values = make()
    assert_same(regroup_values(values, plan), regroup_reference(values, LAYOUTS, ONCE))


@pytest.mark.parametrize(
    ("spare", "dtype"),
    [
        ((3, 2), torch.float32),
        ((3, 6), torch.float64),
    ],
)
def test_fake_and_meta_tensors_that_no_group_uses(spare: tuple[int, ...], dtype: torch.dtype) -> None:
    """Shapes and types are those of the same call on real data."""
    plan = build([["b"], ["a"]])
    real = regroup_values([torch.empty(3, 8), torch.empty(spare, dtype=dtype)], plan)
    metas = [torch.empty(3, 8, device="meta"), torch.empty(spare, dtype=dtype, device="meta")]
    assert [(m.shape, m.dtype) for m in regroup_values(metas, plan)] == [(r.shape, r.dtype) for r in real]
    with FakeTensorMode():
        fakes = regroup_values([torch.empty(3, 8), torch.empty(spare, dtype=dtype)], plan)
    assert [(f.shape, f.dtype) for f in fakes] == [(r.shape, r.dtype) for r in real]


@pytest.mark.parametrize("spare", [(5, 6), (6,)])
def test_fake_inputs_that_no_group_uses_must_fit_all_the_same(spare: tuple[int, ...]) -> None:
    """A graph cannot read the plan, so there every input counts as used; it says what does not fit."""
    with FakeTensorMode(), pytest.raises(ValueError, match=r"values\[1\]"):
        regroup_values([torch.empty(3, 8), torch.empty(spare)], build([["b"], ["a"]]))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.usefixtures("mover")
def test_first_call_without_gradients_then_training(mode: Callable[[], Any]) -> None:
    for rows in (1, 3):
        plan = build(REPEATED)
        values = make(rows, torch.float64, grad=True)
        expected = regroup_reference(values, LAYOUTS, REPEATED)
        with mode():
            outs = regroup_values(values, plan)
            assert_same(outs, expected)
            assert not any(out.requires_grad for out in outs)
        outs = regroup_values(values, plan)
        assert_same(outs, expected)
        assert not any(out.is_inference() for out in outs)
        grads = whole_numbers(outs)
        actual = torch.autograd.grad(outs, values, grads)
        assert_same(actual, gradient_reference(values, grads, LAYOUTS, REPEATED))
        with mode():
            assert_same(regroup_values(values, plan), expected)


def test_inference_tensors_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        values = make()
    outs = regroup_values(values, build(REPEATED))
    assert_same(outs, regroup_reference(values, LAYOUTS, REPEATED))
    outs[0].mul_(2)


@pytest.mark.usefixtures("mover")
def test_default_device_and_dtype_do_not_matter() -> None:
    for rows in (1, 3):
        plan = build(REPEATED)
        values = make(rows, grad=True)
        grads = [distinct((rows, width), torch.float32) for width in plan.out_widths]
        expected = regroup_reference(values, LAYOUTS, REPEATED)
        wanted = [g.float() for g in gradient_reference(values, grads, LAYOUTS, REPEATED)]
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            outs = regroup_values(values, plan)
            actual = torch.autograd.grad(outs, values, grads)
        torch.set_default_dtype(torch.float16)
        assert_same(outs, expected)
        assert_same(actual, wanted)
        assert_same(torch.autograd.grad(regroup_values(values, plan), values, grads), wanted)
        torch.set_default_dtype(torch.float32)
        assert_same(regroup_values(values, plan), expected)


@pytest.mark.usefixtures("mover")
def test_first_call_from_many_threads() -> None:
    rows = 17
    plans = [build(REPEATED) for _ in range(20)]
    values = make(rows, torch.float64)
    expected = regroup_reference(values, LAYOUTS, REPEATED)
    grads = whole_numbers(expected)
    wanted = gradient_reference(values, grads, LAYOUTS, REPEATED)
    barrier = threading.Barrier(8)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            leaves = [v.clone().requires_grad_() for v in values]
            for plan in plans:
                barrier.wait(60)
                outs = regroup_values(leaves, plan)
                actual = torch.autograd.grad(outs, leaves, grads)
                assert_same(outs, expected)
                assert_same(actual, wanted)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.usefixtures("mover")
def test_the_number_of_threads_does_not_matter() -> None:
    values = [random_values((3000, width), torch.float32).requires_grad_() for width in (8, 6)]
    results: list[list[Tensor]] = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        outs = regroup_values(values, build(REPEATED))
        grads = [out.detach() * 0.3 for out in outs]
        results.append([*(o.detach() for o in outs), *torch.autograd.grad(outs, values, grads)])
    assert_same(results[0][:3], regroup_reference(values, LAYOUTS, REPEATED))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


SHAPES_OF_SUMS = [(5_000, 2, 3), (64, 100, 200), (33, 1, 1000), (9, 7, 64)]


@pytest.mark.parametrize(
    ("uses", "width", "rows", "dtype"),
    [
        (70_000, 1, 1, torch.float32),
        *[(*shape, dtype) for shape in SHAPES_OF_SUMS for dtype in (torch.float32, torch.bfloat16)],
    ],
    ids=str,
)
def test_sums_do_not_depend_on_the_number_of_threads(
    uses: int, width: int, rows: int, dtype: torch.dtype
) -> None:
    plan = RegroupPlan.build([(["a"], [width])], [["a"] * uses])
    value = torch.zeros(rows, width, dtype=dtype, requires_grad=True)
    (out,) = regroup_values([value], plan)
    incoming = random_values(out.shape, dtype)
    grads: list[Tensor] = []
    for count in (1, 2, 3, 1):
        torch.set_num_threads(count)
        (grad,) = torch.autograd.grad(out, value, incoming, retain_graph=True)
        grads.append(grad)
    for grad in grads[1:]:
        assert same_bytes(grad, grads[0])


@pytest.mark.parametrize(("uses", "width", "rows"), SHAPES_OF_SUMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_do_not_depend_on_strides(uses: int, width: int, rows: int, dtype: torch.dtype) -> None:
    plan = RegroupPlan.build([(["a"], [width])], [["a"] * uses])
    value = torch.zeros(rows, width, dtype=dtype, requires_grad=True)
    (out,) = regroup_values([value], plan)
    incoming = random_values(out.shape, dtype)
    (expected,) = torch.autograd.grad(out, value, incoming, retain_graph=True)
    for stride in ("padded rows", "transposed", "column step", "offset"):
        (grad,) = torch.autograd.grad(out, value, STRIDES[stride](incoming), retain_graph=True)
        assert same_bytes(grad, expected), stride


def test_autocast() -> None:
    values = make(grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        half = values[1] @ torch.eye(6)
        assert half.dtype == torch.bfloat16
        outs = regroup_values([values[0], half], build(REPEATED))
        assert_same(outs, regroup_reference([values[0], half], LAYOUTS, REPEATED))
        assert all(out.dtype == torch.float32 for out in outs)
        low = regroup_values([half], RegroupPlan.build([(["c", "d"], [2, 4])], [["d", "c"]]))
        assert_same(low, [torch.cat([half[:, 2:], half[:, :2]], 1)])
        loss = sum((out.sum() for out in outs), start=torch.zeros(()))
    first, second = torch.autograd.grad(loss, values)
    assert torch.equal(first, torch.tensor([3.0] * 3 + [1.0] * 5).expand(3, 8))
    assert torch.equal(second, torch.tensor([1.0] * 2 + [2.0] * 4).expand(3, 6))


def test_saved_tensor_hooks_see_nothing_of_the_regroup() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    values = make(dtype=torch.float64, grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outs = regroup_values(values, build(REPEATED))
        assert not packed
        loss = sum((out.square().sum() for out in outs), start=torch.zeros(()))
    assert len(packed) >= 3
    grads = [2 * out.detach() for out in outs]
    assert_same(torch.autograd.grad(loss, values), gradient_reference(values, grads, LAYOUTS, REPEATED))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    plan = build(REPEATED)

    def step(*values: Tensor) -> Tensor:
        outs = regroup_values([v.sin() for v in values], plan)
        return sum((out.square().sum() for out in outs), start=torch.zeros((), dtype=torch.float64))

    values = make(dtype=torch.float64, grad=True)
    expected = torch.autograd.grad(step(*values), values)
    step_again: Any = checkpoint(step, *values, use_reentrant=use_reentrant)
    step_again.backward()
    assert_same([v.grad for v in values], expected)


def test_anomaly_mode_and_gradient_hooks() -> None:
    values = make(dtype=torch.float64, grad=True)
    seen: list[Tensor] = []
    with torch.autograd.detect_anomaly(check_nan=True):
        outs = regroup_values(values, build(OMITTED))
        outs[0].register_hook(lambda grad: seen.append(grad) or grad * 3)
        poison(*values)
        torch.autograd.backward(outs, ones_like(outs))
    assert len(seen) == 1
    assert values[0].grad is not None
    assert torch.equal(values[0].grad[0], torch.tensor([0.0] * 3 + [4.0] * 5, dtype=torch.float64))


@pytest.mark.parametrize("cast", [None, torch.float32])
def test_compiled_autograd(cast: torch.dtype | None) -> None:
    torch._dynamo.reset()
    plan = build(REPEATED)
    for rows in (3, 3, 5):
        values = make(rows, torch.float64, grad=True)
        outs = regroup_values(values, plan, cast)
        grads = whole_numbers(outs)
        with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
            torch.autograd.backward(outs, grads)
        assert_same([v.grad for v in values], gradient_reference(values, grads, LAYOUTS, REPEATED))
    torch._dynamo.reset()


def kept_bytes(plan: RegroupPlan) -> int:
    """Memory of the tensors that are kept beside the map of a plan."""
    kept: dict[int, int] = {}
    for entry in plan.column_map.recipes.values():
        for tensor in entry if isinstance(entry, tuple) else (entry,):
            if isinstance(tensor, Tensor):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(kept.values())


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        ("slices", None),
        ("columns", None),
        ("rows", None),
        ("slices", torch.float64),
        ("rows", torch.float64),
    ],
)
def test_what_is_kept_does_not_grow_with_the_number_of_batch_sizes(
    strategy: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, strategy)
    plan = build(REPEATED)
    regroup_values(make(400), plan, dtype)
    few = kept_bytes(plan)
    for rows in range(1, 400):
        values = make(rows)
        assert regroup_values(values, plan, dtype)[0].shape == (rows, 8)
    assert kept_bytes(plan) <= 4 * few + 4096
    assert len(plan.column_map.calls) < 300


# First derivatives


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("dtype", [*REAL_DTYPES, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    "groups", [[["b"], ["d"]], [["b", "b"], ["d", "b"]], [["a", "b"]], [["d"]], [[], ["c"]]], ids=str
)
@pytest.mark.usefixtures("mover")
def test_columns_that_no_group_uses_have_gradient_zero(
    groups: list[list[str]], dtype: torch.dtype, rows: int
) -> None:
    """In memory that holds NaN from its last use."""
    plan = build(groups)
    values = [v.requires_grad_() for v in make(rows, dtype)]
    outs = regroup_values(values, plan)
    grads = [distinct(out.shape, dtype) for out in outs]
    expected = [g.to(dtype) for g in gradient_reference(values, grads, LAYOUTS, groups)]
    for _ in range(3):
        poison(*values)
        actual = torch.autograd.grad(outs, values, grads, allow_unused=True, retain_graph=True)
        filled = [torch.zeros_like(v) if g is None else g for g, v in zip(actual, values)]
        assert_same(filled, expected)


def test_weights_of_an_unused_key_do_not_move() -> None:
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(64, 8))
    plan = RegroupPlan.build([(["a", "b"], [3, 5])], [["b"]])
    optimizer = torch.optim.SGD([weight], lr=0.1)
    start = weight.detach().clone()
    for _ in range(5):
        optimizer.zero_grad()
        (out,) = regroup_values([weight * 1], plan)
        poison(weight, copies=64)
        out.square().mean().backward()
        optimizer.step()
    assert torch.equal(weight[:, :3], start[:, :3])
    assert not torch.equal(weight[:, 3:], start[:, 3:])
    assert bool(weight.isfinite().all())


@given(
    cases(min_groups=1),
    st.sampled_from(MOVERS),
    st.sampled_from((1, 2, 9)),
    st.lists(st.sampled_from(sorted(STRIDES)), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=3, max_size=3).filter(any),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.lists(st.sampled_from((0, 0, 1, 2)), min_size=3, max_size=3),
)
def test_gradients_of_any_plan(
    case: Case,
    strategy: str,
    rows: int,
    strides: list[str],
    needs: list[bool],
    in_loss: list[bool],
    padding: list[int],
) -> None:
    """Exact in float64; for some inputs only, from some outputs only, with gradients of any strides."""
    values = [
        distinct((rows, sum(widths) + spare), torch.float64, start=7 * n).requires_grad_(need)
        for n, ((_, widths), spare, need) in enumerate(zip(case.layouts, padding, needs))
    ]
    with pytest.MonkeyPatch.context() as patch:
        prefer(patch, strategy)
        outs = regroup_values(values, case.plan)
        grads = [
            STRIDES[stride](distinct(out.shape, torch.float64, start=3 * n)) if use else None
            for n, (out, stride, use) in enumerate(zip(outs, strides, in_loss))
        ]
        pairs = [(o, g) for o, g in zip(outs, grads) if g is not None and o.requires_grad]
        poison(*values, copies=8)
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    expected = gradient_reference(values, grads, case.layouts, case.groups)
    for value, need, wanted in zip(values, needs, expected):
        if need and pairs:
            assert torch.equal(value.grad if value.grad is not None else torch.zeros_like(value), wanted)
        else:
            assert value.grad is None


@pytest.mark.parametrize("uses", [1, 2, 3, 4, 30])
@pytest.mark.parametrize("spread", [False, True], ids=["one-group", "many-groups"])
@pytest.mark.usefixtures("mover")
def test_uses_are_summed(uses: int, spread: bool) -> None:
    groups = [["b", "a"], *[["a"]] * (uses - 1)] if spread else [["b", *["a"] * uses]]
    value = torch.ones(5, 5, requires_grad=True)
    outs = regroup_values([value], RegroupPlan.build([(["a", "b"], [3, 2])], groups))
    flat = torch.cat(outs, 1)
    weights = torch.tensor([1.0] * 2 + [float(n) for n in range(1, uses + 1) for _ in range(3)])
    (flat * weights).sum().backward()
    total = uses * (uses + 1) / 2
    assert value.grad is not None
    assert torch.equal(value.grad, torch.tensor([total] * 3 + [1.0] * 2).expand(5, 5))


@pytest.mark.parametrize(
    ("dtype", "uses"),
    [
        (torch.bfloat16, 1024),
        (torch.float16, 4096),
        (torch.float8_e4m3fn, 256),
        (torch.float8_e5m2, 64),
        (torch.float8_e4m3fnuz, 128),
        (torch.float8_e5m2fnuz, 64),
        (torch.float8_e8m0fnu, 64),
        (torch.float32, 1024),
        (torch.complex32, 2048),
    ],
    ids=str,
)
@pytest.mark.usefixtures("mover")
def test_many_uses_do_not_stall_in_a_narrow_type(dtype: torch.dtype, uses: int) -> None:
    """Adding 1 in bfloat16 stops at 256."""
    value = torch.ones(2, 3).to(dtype).requires_grad_()
    (out,) = regroup_values([value], RegroupPlan.build([(["a", "b"], [1, 2])], [["a"] * uses + ["b"]]))
    (grad,) = torch.autograd.grad(out, value, torch.ones(out.shape).to(dtype))
    assert grad.dtype == dtype
    assert torch.equal(grad.to(torch.complex64), torch.tensor([[uses, 1, 1]] * 2, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("uses", [2, 64])
@pytest.mark.usefixtures("mover")
def test_sums_are_taken_in_float32_in_the_order_of_the_groups(dtype: torch.dtype, uses: int) -> None:
    layouts, groups = [(["a", "b"], [7, 2])], [["a"] * (uses // 2), ["b", *["a"] * (uses - uses // 2)]]
    plan = RegroupPlan.build(layouts, groups)
    value = random_values((20, 9), dtype).requires_grad_()
    outs = regroup_values([value], plan)
    grads = [torch.rand(out.shape).to(dtype) for out in outs]
    (actual,) = torch.autograd.grad(outs, value, grads)
    swapped = [(o, i, at_out, at_in, n) for i, o, at_in, at_out, n in plan.column_map.moves]
    (wanted,) = apply_moves(grads, swapped, [9], key_dim=1, dtype=dtype, sum_dtype=torch.float32)
    assert same_bytes(actual, wanted)


def test_sums_of_float32_are_taken_in_order() -> None:
    value = torch.zeros(1, 1, requires_grad=True)
    (out,) = regroup_values([value], RegroupPlan.build([(["a"], [1])], [["a"] * 4]))
    (grad,) = torch.autograd.grad(out, value, torch.tensor([[1.0, 1e8, -1e8, 1.0]]))
    assert grad.item() == 1.0  # the first one is lost in 1e8, in this order
    outs = regroup_values([value], RegroupPlan.build([(["a"], [1])], [["a"] * 2, ["a"] * 2]))
    (grad,) = torch.autograd.grad(outs, value, [torch.tensor([[1e8, 1.0]]), torch.tensor([[-1e8, 1.0]])])
    assert grad.item() == 1.0


@pytest.mark.parametrize("chosen", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
@pytest.mark.usefixtures("mover")
def test_some_outputs_in_the_loss(chosen: tuple[int, ...]) -> None:
    values = make(dtype=torch.float64, grad=True)
    outs = regroup_values(values, build(REPEATED))
    grads = [distinct(out.shape, out.dtype) if n in chosen else None for n, out in enumerate(outs)]
    expected = gradient_reference(values, grads, LAYOUTS, REPEATED)
    poison(*values, *outs)
    torch.autograd.backward([outs[n] for n in chosen], [g for g in grads if g is not None])
    assert_same([v.grad for v in values], expected)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED, [["a"]], [["c"]]], ids=str)
@pytest.mark.usefixtures("mover")
def test_some_inputs_need_a_gradient(needs: tuple[bool, bool], groups: list[list[str]]) -> None:
    values = [v.requires_grad_(need) for v, need in zip(make(dtype=torch.float64), needs)]
    outs = regroup_values(values, build(groups))
    grads = whole_numbers(outs)
    expected = gradient_reference(values, grads, LAYOUTS, groups)
    poison(*values)
    torch.autograd.backward(outs, grads)
    for value, need, wanted in zip(values, needs, expected):
        if need:
            assert value.grad is not None
            assert torch.equal(value.grad, wanted)
        else:
            assert value.grad is None


def test_needs_change_between_calls() -> None:
    plan = build(REPEATED)
    for needs in [(True, True), (True, False), (False, True), (False, False), (True, True)]:
        values = [v.requires_grad_(need) for v, need in zip(make(dtype=torch.float64), needs)]
        outs = regroup_values(values, plan)
        assert all(out.requires_grad == any(needs) for out in outs)
        if any(needs):
            grads = whole_numbers(outs)
            expected = gradient_reference(values, grads, LAYOUTS, REPEATED)
            torch.autograd.backward(outs, grads)
            assert_same([v.grad for v in values], [g if n else None for g, n in zip(expected, needs)])


@pytest.mark.parametrize("stride", sorted(STRIDES))
@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED, [["a", "b", "c", "d"]]], ids=str)
@pytest.mark.usefixtures("mover")
def test_gradients_of_any_strides(stride: str, groups: list[list[str]]) -> None:
    for rows in (1, 5):
        values = make(rows, torch.float64, grad=True)
        outs = regroup_values(values, build(groups))
        grads = [STRIDES[stride](grad) for grad in whole_numbers(outs)]
        expected = gradient_reference(values, grads, LAYOUTS, groups)
        poison(*values)
        assert_same(torch.autograd.grad(outs, values, grads), expected)


def test_gradient_of_a_sum_is_an_expanded_one() -> None:
    values = make(dtype=torch.float64, grad=True)
    outs = regroup_values(values, build(REPEATED))
    sum((out.sum() for out in outs), start=torch.zeros(())).backward()
    first, second = (v.grad for v in values)
    assert first is not None
    assert second is not None
    assert torch.equal(first[0], torch.tensor([3.0] * 3 + [1.0] * 5, dtype=torch.float64))
    assert torch.equal(second[0], torch.tensor([1.0] * 2 + [2.0] * 4, dtype=torch.float64))


def test_gradients_are_independent_of_each_other_and_of_what_came_in() -> None:
    values = make(grad=True)
    layouts = [(["a"], [8]), (["b"], [6])]
    outs = regroup_values(values, RegroupPlan.build(layouts, [["a"], ["b"]]))
    incoming = whole_numbers(outs)
    grads = torch.autograd.grad(outs, values, incoming)
    assert_independent(grads, incoming)
    kept = [g.clone() for g in incoming]
    for grad in grads:
        grad.zero_()
    assert_same(incoming, kept)


def test_backward_twice_and_accumulation() -> None:
    values = make(dtype=torch.float64, grad=True)
    outs = regroup_values(values, build(REPEATED))
    grads = whole_numbers(outs)
    expected = gradient_reference(values, grads, LAYOUTS, REPEATED)
    torch.autograd.backward(outs, grads, retain_graph=True)
    torch.autograd.backward(outs, grads)
    assert_same([v.grad for v in values], [2 * g for g in expected])


@pytest.mark.parametrize("dtype", COMPLEX_DTYPES, ids=str)
@pytest.mark.parametrize("view", [torch.clone, conjugate_view, negative_view])
@pytest.mark.usefixtures("mover")
def test_complex_gradients(dtype: torch.dtype, view: Callable[[Tensor], Tensor]) -> None:
    if dtype == torch.complex32 and view is not torch.clone:
        view = STRIDES["padded rows"]  # torch negates and conjugates complex32 nowhere
    values = [v.requires_grad_() for v in make(dtype=dtype)]
    outs = regroup_values(values, build(REPEATED))
    grads = [view(distinct(out.shape, dtype)) for out in outs]
    expected = [g.to(dtype) for g in gradient_reference(values, grads, LAYOUTS, REPEATED)]
    poison(*values)
    assert_same(torch.autograd.grad(outs, values, grads), expected)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.float32, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.complex64, torch.float32),
        (torch.float64, torch.complex64),
        (torch.bfloat16, torch.complex64),
        (torch.complex64, torch.complex128),
    ],
    ids=str,
)
@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED, [["a", "c"]]], ids=str)
def test_gradients_return_in_the_type_of_each_input(
    first: torch.dtype, second: torch.dtype, groups: list[list[str]]
) -> None:
    """Of a complex gradient a real input takes the real part."""
    for needs in ((True, True), (True, False), (False, True)):
        values = [distinct((4, 8), first), distinct((4, 6), second)]
        values = [v.requires_grad_(need) for v, need in zip(values, needs)]
        outs = regroup_values(values, build(groups))
        grads = [distinct(out.shape, out.dtype, start=2) for out in outs]
        expected = gradient_reference(values, grads, LAYOUTS, groups)
        poison(*values)
        leaves = [v for v, need in zip(values, needs) if need]
        if not any(out.requires_grad for out in outs):
            continue
        actual = torch.autograd.grad(outs, leaves, grads, allow_unused=True)
        wanted = [g.to(v.dtype) for g, v, need in zip(expected, values, needs) if need]
        assert_same([torch.zeros_like(v) if g is None else g for g, v in zip(actual, leaves)], wanted)


FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("source", FLOATING, ids=str)
@pytest.mark.parametrize("target", FLOATING, ids=str)
@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED], ids=str)
@pytest.mark.usefixtures("mover")
def test_gradients_through_a_cast_return_in_the_type_of_the_input(
    source: torch.dtype, target: torch.dtype, groups: list[list[str]]
) -> None:
    values = [distinct((4, 8), source).requires_grad_(), distinct((4, 6), source).requires_grad_()]
    outs = regroup_values(values, build(groups), target)
    assert all(out.dtype == target and out.requires_grad for out in outs)
    grads = [distinct(out.shape, target, start=2) for out in outs]
    twins = [v.detach().clone().requires_grad_() for v in values]
    wanted = [out.to(target) for out in regroup_reference(twins, LAYOUTS, groups, dtype=source)]
    poison(*values)
    actual = torch.autograd.grad(outs, values, grads)
    assert_same(actual, torch.autograd.grad(wanted, twins, grads))


FLOAT8_CASTS = [(source, torch.float32) for source in FLOAT8_DTYPES[:4]]
FLOAT8_CASTS += [(torch.float8_e5m2, torch.bfloat16), (torch.float8_e5m2, torch.float8_e4m3fn)]
FLOAT8_CASTS += [(torch.float32, torch.float8_e4m3fn), (torch.bfloat16, torch.float8_e5m2)]


@pytest.mark.parametrize(("source", "target"), FLOAT8_CASTS, ids=str)
@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED, [["a"]]], ids=str)
def test_gradients_of_float8_through_a_cast(
    source: torch.dtype, target: torch.dtype, groups: list[list[str]]
) -> None:
    values = [distinct((4, 8), source).requires_grad_(), distinct((4, 6), source).requires_grad_()]
    outs = regroup_values(values, build(groups), target)
    grads = [torch.ones(out.shape).to(target) for out in outs]
    expected = [g.to(source) for g in gradient_reference(values, grads, LAYOUTS, groups)]
    poison(*values)
    actual = torch.autograd.grad(outs, values, grads, allow_unused=True)
    assert_same([torch.zeros_like(v) if g is None else g for g, v in zip(actual, values)], expected)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float32], ids=str)
def test_repeats_through_a_cast_round_once(source: torch.dtype, target: torch.dtype) -> None:
    value = torch.ones(2, 1).to(source).requires_grad_()
    (out,) = regroup_values([value], RegroupPlan.build([(["a"], [1])], [["a"] * 1000]), target)
    (grad,) = torch.autograd.grad(out, value, torch.ones(2, 1000).to(target))
    assert grad.dtype == source
    assert torch.equal(grad.float(), torch.full((2, 1), 1000.0))


@pytest.mark.parametrize("dtype", [*INTEGER_DTYPES[:5], torch.bool], ids=str)
def test_integer_outputs_do_not_require_a_gradient(dtype: torch.dtype) -> None:
    values = [distinct((3, 8), torch.float32).requires_grad_(), distinct((3, 6), torch.float32)]
    outs = regroup_values(values, build(), dtype)
    assert not any(out.requires_grad for out in outs)
    assert_same(outs, regroup_reference(values, LAYOUTS, ONCE, dtype=dtype))
    integers = [distinct((3, 8), dtype), distinct((3, 6), dtype)]
    outs = regroup_values(integers, build(), torch.float32)
    assert not any(out.requires_grad for out in outs)
    assert all(out.dtype == torch.float32 for out in outs)


def test_integer_and_floating_inputs_together() -> None:
    values = [distinct((3, 8), torch.int64), distinct((3, 6), torch.float32).requires_grad_()]
    outs = regroup_values(values, build(REPEATED))
    grads = whole_numbers(outs)
    expected = gradient_reference(values, grads, LAYOUTS, REPEATED)[1]
    torch.autograd.backward(outs, grads)
    assert values[0].grad is None
    assert values[1].grad is not None
    assert torch.equal(values[1].grad, expected.float())


# Derivatives of every order


def derivative_cases() -> list[Any]:
    return [
        pytest.param(LAYOUTS, ONCE, (3,), 1, id="once"),
        pytest.param(LAYOUTS, REPEATED, (2,), 1, id="repeated"),
        pytest.param(LAYOUTS, OMITTED, (2,), 1, id="omitted"),
        pytest.param(LAYOUTS, [["a"]], (2,), 1, id="unused-input"),
        pytest.param(LAYOUTS, REPEATED, (1,), 1, id="one-row"),
        pytest.param(LAYOUTS, REPEATED, (2,), 0, id="key-dim-0"),
        pytest.param(LAYOUTS, REPEATED, (2, 2), -1, id="last-of-three"),
    ]


def derivative_values(batch: tuple[int, ...], key_dim: int, dtype: torch.dtype) -> list[Tensor]:
    values: list[Tensor] = []
    for width in (8, 6):
        shape = list(batch)
        shape.insert(key_dim if key_dim >= 0 else len(shape) + 1 + key_dim, width)
        values.append(random_values(shape, dtype).requires_grad_())
    return values


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize(("layouts", "groups", "batch", "key_dim"), derivative_cases())
def test_gradcheck(
    layouts: Any, groups: list[list[str]], batch: tuple[int, ...], key_dim: int, dtype: torch.dtype
) -> None:
    plan = RegroupPlan.build(layouts, groups)

    def f(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(regroup_values(values, plan, key_dim=key_dim))

    values = derivative_values(batch, key_dim, dtype)
    assert torch.autograd.gradcheck(
        f, values, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(f, values, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradcheck_through_a_nonlinear_use(dtype: torch.dtype) -> None:
    plan = build(REPEATED)

    def f(*values: Tensor) -> tuple[Tensor, ...]:
        outs = regroup_values([values[0].square(), values[1]], plan)
        return tuple(out.square() for out in outs)

    values = derivative_values((1,), 1, dtype)
    assert torch.autograd.gradgradcheck(f, values, check_fwd_over_rev=True)


def double_backward(
    regroup: Callable[[Sequence[Tensor]], Sequence[Tensor]], values: Sequence[Tensor], power: int
) -> list[Tensor]:
    outs = regroup(values)
    loss = sum(((out**power).sum() for out in outs), start=torch.zeros((), dtype=torch.float64))
    first = torch.autograd.grad(loss, values, create_graph=True)
    product = sum(((a * b).sum() for a, b in zip(first, values)), start=torch.zeros((), dtype=torch.float64))
    second = torch.autograd.grad(product, values, create_graph=True)
    third = torch.autograd.grad(sum((s.sum() for s in second), start=torch.zeros(())), values)
    return [*first, *second, *third]


@pytest.mark.parametrize("power", [2, 3])
@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED], ids=str)
@pytest.mark.usefixtures("mover")
def test_derivatives_of_derivatives(groups: list[list[str]], power: int) -> None:
    values = [distinct((3, 8), torch.float64), distinct((3, 6), torch.float64)]
    leaves = [v.requires_grad_() for v in values]
    plan = build(groups)
    actual = double_backward(lambda v: regroup_values(v, plan), leaves, power)
    expected = double_backward(lambda v: regroup_reference(v, LAYOUTS, groups), leaves, power)
    assert_same(actual, expected)
    if groups == ONCE and power == 2:
        assert_same(actual[2:4], [4 * v for v in values])  # of the sum of x * 2x


def test_second_derivative_of_a_square() -> None:
    value = torch.ones(2, 5, requires_grad=True)
    (out, _) = regroup_values([value], RegroupPlan.build([(["a", "b"], [2, 3])], [["b"], ["a"]]))
    (first,) = torch.autograd.grad(out.square().sum(), value, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), value)
    assert torch.equal(second, torch.tensor([0.0, 0.0, 2.0, 2.0, 2.0]).expand(2, 5))


@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED, [["a"]]], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.usefixtures("mover")
def test_forward_mode(groups: list[list[str]], dtype: torch.dtype | None, mode: Callable[[], Any]) -> None:
    plan = build(groups)
    values, tangents = make(dtype=torch.float64), make(dtype=torch.float64)
    for tangent_of in ((True, True), (True, False), (False, True)):
        with forward_ad.dual_level(), mode():
            duals = [
                forward_ad.make_dual(v, t) if use else v for v, t, use in zip(values, tangents, tangent_of)
            ]
            outs = [forward_ad.unpack_dual(out) for out in regroup_values(duals, plan, dtype)]
            outs = [(o.primal.clone(), None if o.tangent is None else o.tangent.clone()) for o in outs]
        used = [t if use else torch.zeros_like(t) for t, use in zip(tangents, tangent_of)]
        assert_same([o for o, _ in outs], regroup_reference(values, LAYOUTS, groups, dtype=dtype))
        expected = regroup_reference(used, LAYOUTS, groups, dtype=dtype)
        filled = [torch.zeros_like(o) if t is None else t for o, t in outs]
        assert_same(filled, expected)


def test_forward_mode_over_reverse() -> None:
    plan = build(REPEATED)
    values, tangents = make(dtype=torch.float64, grad=True), make(dtype=torch.float64)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(v, t) for v, t in zip(values, tangents)]
        outs = regroup_values(duals, plan)
        loss = sum(((out**3).sum() for out in outs), start=torch.zeros((), dtype=torch.float64))
        grads = torch.autograd.grad(loss, values, create_graph=True)
        products = [forward_ad.unpack_dual(g).tangent for g in grads]
        assert all(p is not None for p in products)
        actual = [p.clone() for p in products if p is not None]
    use_counts = gradient_reference(values, [torch.ones_like(out) for out in outs], LAYOUTS, REPEATED)
    expected = [6 * v.detach() * t * n for v, t, n in zip(values, tangents, use_counts)]
    assert all(torch.allclose(a, e, rtol=1e-12) for a, e in zip(actual, expected))


# torch.func


def functions(groups: list[list[str]]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Of two tensors: the outputs, and those of the reference."""
    plan = build(groups)

    def regroup(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(regroup_values(values, plan))

    def reference(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(regroup_reference(values, LAYOUTS, groups))

    return regroup, reference


@pytest.mark.parametrize(
    "transform",
    sorted(TRANSFORMS),
)
@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED, [["a"], []]], ids=str)
def test_func_transforms(transform: str, groups: list[list[str]]) -> None:
    assert_same_transformed(transform, *functions(groups), make(2, torch.float64))


def test_jacobian_is_the_matrix_of_the_map() -> None:
    regroup, _ = functions(REPEATED)
    values = [random_values((1, 8), torch.float64), random_values((1, 6), torch.float64)]
    blocks = torch.func.jacrev(regroup, argnums=(0, 1))(*values)
    rows = [torch.cat([block.reshape(block.shape[1], -1) for block in row], 1) for row in blocks]
    assert torch.equal(torch.cat(rows).T, dense_of_groups(LAYOUTS, REPEATED).double())


@pytest.mark.parametrize(
    "in_dims",
    [d for d in itertools.product((0, 1, 2, -1, None), repeat=2) if any(x is not None for x in d)],
    ids=str,
)
@pytest.mark.parametrize("out_dims", [0, 1])
def test_vmap(in_dims: tuple[int | None, int | None], out_dims: int) -> None:
    values = [
        random_values((3, width), torch.float64)
        if dim is None
        else random_values((5, 3, width), torch.float64).movedim(0, dim)
        for dim, width in zip(in_dims, (8, 6))
    ]
    for groups in (REPEATED, OMITTED, [["a"]]):
        regroup, reference = functions(groups)
        if groups != REPEATED and in_dims[0] is None:
            continue  # an output of the reference would have no batch at all
        actual = torch.func.vmap(regroup, in_dims, out_dims)(*values)
        assert_same(actual, torch.func.vmap(reference, in_dims, out_dims)(*values))


@pytest.mark.parametrize(
    ("outer", "inner"),
    [((0, None), (None, 0)), ((0, 0), (0, 0)), ((None, 0), (1, 1)), ((1, None), (0, 0)), ((0, 1), (None, 0))],
)
def test_vmap_of_vmap(outer: tuple[int | None, ...], inner: tuple[int | None, ...]) -> None:
    values: list[Tensor] = []
    for width, o, i in zip((8, 6), outer, inner):
        value = random_values((2, width), torch.float64)
        if i is not None:
            value = value.expand(3, 2, width).mul(torch.arange(1.0, 4.0)[:, None, None]).movedim(0, i)
        if o is not None:
            rank = value.dim()
            value = value * torch.arange(1.0, 5.0).reshape(4, *[1] * rank)
            value = value.movedim(0, o)
        values.append(value.double())
    for groups in (REPEATED, OMITTED):
        regroup, reference = functions(groups)
        actual = torch.func.vmap(torch.func.vmap(regroup, inner), outer)(*values)
        assert_same(actual, torch.func.vmap(torch.func.vmap(reference, inner), outer)(*values))


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 1)])
@pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap", "vmap of hessian", "vmap of jvp"])
def test_vmap_with_derivatives(order: str, in_dims: tuple[int | None, ...]) -> None:
    values = [
        random_values((2, width), torch.float64)
        if dim is None
        else random_values((4, 2, width), torch.float64).movedim(0, dim)
        for dim, width in zip(in_dims, (8, 6))
    ]
    regroup, reference = functions(REPEATED)
    both = (0, 1)

    def transformed(f: Callable[..., Any]) -> Callable[..., Any]:
        orders: dict[str, Callable[..., Any]] = {
            "vmap of grad": torch.func.vmap(torch.func.grad(lambda *v: cubic(f(*v)), both), in_dims),
            "grad of vmap": torch.func.grad(lambda *v: cubic(torch.func.vmap(f, in_dims)(*v)), both),
            "vmap of hessian": torch.func.vmap(torch.func.hessian(lambda *v: cubic(f(*v)), both), in_dims),
            "vmap of jvp": torch.func.vmap(
                lambda *v: torch.func.jvp(f, v, tuple(x.cos() for x in v)), in_dims
            ),
        }
        return orders[order]

    assert_close(transformed(regroup)(*values), transformed(reference)(*values))


def test_transforms_before_and_after_plain_calls() -> None:
    """What is remembered for plain tensors serves transformed ones and the other way round."""
    plan = build(REPEATED)

    def regroup(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(regroup_values(values, plan))

    values = make(dtype=torch.float64, grad=True)
    expected = regroup_reference(values, LAYOUTS, REPEATED)
    grads = whole_numbers(expected)
    wanted = gradient_reference(values, grads, LAYOUTS, REPEATED)
    for _ in range(2):
        pulled: Any = torch.func.vjp(regroup, *values)
        assert_same(pulled[0], expected)
        assert_same(pulled[1](tuple(grads)), wanted)
        outs = regroup_values(values, plan)
        assert_same(outs, expected)
        assert_same(torch.autograd.grad(outs, values, grads), wanted)
        batched = torch.func.vmap(regroup)(*(v.expand(2, 3, -1) for v in values))
        assert_same([b[1] for b in batched], expected)


@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED, [["a"]]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_batched_gradients(groups: list[list[str]], dtype: torch.dtype) -> None:
    values = [v.requires_grad_() for v in make(dtype=dtype)]
    outs = regroup_values(values, build(groups))
    grads = [distinct((4, *out.shape), dtype) for out in outs]
    poison(*values)
    actual = torch.autograd.grad(outs, values, grads, is_grads_batched=True, allow_unused=True)
    each = [gradient_reference(values, [g[n] for g in grads], LAYOUTS, groups) for n in range(4)]
    for i, (value, grad) in enumerate(zip(values, actual)):
        wanted = torch.stack([e[i] for e in each]).to(dtype)
        assert torch.equal(torch.zeros_like(wanted) if grad is None else grad, wanted)
        assert grad is None or grad.dtype == value.dtype


def test_batched_gradients_of_some_outputs() -> None:
    values = make(dtype=torch.float64, grad=True)
    outs = regroup_values(values, build(REPEATED))
    grads = distinct((4, 3, 9), torch.float64)
    actual = torch.autograd.grad(outs[1], values, grads, is_grads_batched=True)
    each = [gradient_reference(values, [None, g, None], LAYOUTS, REPEATED) for g in grads]
    assert_same(actual, [torch.stack([e[i] for e in each]) for i in range(2)])


def test_vectorized_jacobian_and_hessian() -> None:
    regroup, reference = functions(REPEATED)
    values = tuple(make(2, torch.float64))
    jacobian: Callable[..., Any] = torch.autograd.functional.jacobian
    hessian: Callable[..., Any] = torch.autograd.functional.hessian
    for strategy in ("reverse-mode", "forward-mode"):
        actual = tensors_of(jacobian(regroup, values, vectorize=True, strategy=strategy))
        assert_same(actual, tensors_of(jacobian(reference, values)))
    actual = hessian(lambda *v: cubic(regroup(*v)), values, vectorize=True)
    assert_close(actual, hessian(lambda *v: cubic(reference(*v)), values))
