"""Values of every type, stride and device through ``KTRegroupAsDict``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torchrec.modules.embedding_configs import data_type_to_dtype
from torchrec.modules.regroup import KTRegroupAsDict as TorchRecKTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedTensor
from torchrec.types import DataType

from .helpers import (
    GROUPS,
    LAYOUT,
    NAMES,
    OMITTED,
    REPEATED,
    SIZES,
    SWAPPED,
    Kts,
    Layout,
    assert_regrouped,
    assert_regroups,
    gradients,
    layout_of,
    make_kts,
    module,
    on_meta,
    reference,
    same,
    tensors,
    total,
    uninitialised_is_nan,
    values_of,
    whole_weights,
)

# --- dtypes -----------------------------------------------------------------------------------------

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
NARROW_FLOATS = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
INTEGERS = [
    torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
DTYPE_SIZES = [(1, 4, 3), (3, 4, 3), (64, 40, 4), (8, 200, 1), (256, 12, 16)]

half_complex_warns = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@half_complex_warns
@pytest.mark.parametrize("size", DTYPE_SIZES, ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, *NARROW_FLOATS, *COMPLEX, *INTEGERS], ids=str)
def test_forward_copies_the_bytes_of_every_dtype(dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    batch, keys, width = size
    layout, names = layout_of(keys, width)
    kts: Kts = []
    for ks, widths in layout:
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (batch, sum(widths) * dtype.itemsize))
        # Any bit pattern: NaNs with their payload, infinities, negative zeros, subnormals.
        kts.append(KeyedTensor(list(ks), list(widths), raw.to(torch.uint8).view(dtype)))
    groups = [names[::-1], names[::3], names[:1] * 3]
    outs = tensors(module(groups)(kts))
    as_bytes = [
        KeyedTensor(kt.keys(), [w * dtype.itemsize for w in kt.length_per_key()], bytes_of(kt.values()))
        for kt in kts
    ]
    assert [out.dtype for out in outs] == [dtype] * 3
    assert same(map(bytes_of, outs), reference(as_bytes, groups))


@half_complex_warns
@pytest.mark.parametrize("size", DTYPE_SIZES, ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, *NARROW_FLOATS, *COMPLEX], ids=str)
def test_gradients_of_every_floating_and_complex_dtype(
    dtype: torch.dtype, size: tuple[int, int, int]
) -> None:
    batch, keys, width = size
    layout, names = layout_of(keys, width)
    groups = [names[::-1], names[::3], names[:1] * 2]
    kts = make_kts(layout, batch, dtype=dtype, grad=True)
    with uninitialised_is_nan():
        outs = tensors(module(groups)(kts))
        weights = [torch.ones(out.shape).to(dtype) for out in outs]
        found = torch.autograd.grad(outs, values_of(kts), weights)
    uses = torch.tensor([float(sum(group.count(key) for group in groups)) for key in names])
    # float8_e8m0fnu holds powers of two only, so the expected value is rounded as the sum is.
    expected = uses.repeat_interleave(width).expand(batch, -1).to(dtype)
    assert [grad.dtype for grad in found] == [dtype] * 2
    assert torch.equal(bytes_of(torch.cat(found, 1)), bytes_of(expected))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_need_no_gradient(dtype: torch.dtype) -> None:
    kts = [*make_kts(LAYOUT[:1], grad=True), *make_kts(LAYOUT[1:], dtype=dtype)]
    out = module([["d"], ["a"]])([kts[1], kts[0]]) if dtype == torch.int64 else module([["d"]])(kts)
    assert torch.equal(out["out0"].to(dtype), kts[1].values()[:, 2:])
    assert not module([["d"]])(kts[1:])["out0"].requires_grad


def test_the_parent_may_be_double() -> None:
    model = nn.ModuleDict({"regroup": module(), "linear": nn.Linear(5, 2)})
    model["regroup"](make_kts())
    model.double()
    kts = make_kts(dtype=torch.float64, grad=True)
    out = model["linear"](model["regroup"](kts)["out0"])
    assert out.dtype == torch.float64
    assert_regroups(model["regroup"], kts)


MIXED = [
    (torch.float32, torch.float16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float64),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.int64),
    (torch.int32, torch.int64),
    (torch.bool, torch.float16),
    (torch.uint8, torch.int8),
    (torch.float64, torch.complex64),
    (torch.float32, torch.complex64),
]


@pytest.mark.parametrize("groups", [GROUPS, REPEATED], ids=["once", "repeated"])
@pytest.mark.parametrize("size", [(3, 8), (64, 400), (1, 8)], ids=str)
@pytest.mark.parametrize(("left", "right"), MIXED, ids=str)
def test_mixed_dtypes_are_promoted_as_cat_does(
    left: torch.dtype, right: torch.dtype, size: tuple[int, int], groups: list[list[str]]
) -> None:
    batch, total = size
    floating = left.is_floating_point, right.is_floating_point or right.is_complex
    layout: Layout = [(["a", "b"], [3, total - 3]), (["c", "d"], [2, 4])]
    kts = [
        *make_kts(layout[:1], batch, dtype=left, grad=floating[0]),
        *make_kts(layout[1:], batch, dtype=right, grad=floating[1]),
    ]
    result = torch.promote_types(left, right)
    m = module(groups)
    for _ in range(2):
        outs = tensors(m(kts))
        whole = [KeyedTensor(kt.keys(), kt.length_per_key(), kt.values().to(result)) for kt in kts]
        expected = reference(whole, groups)
        assert same([o.detach() for o in outs], [e.detach() for e in expected])
        inputs = [v for v in values_of(kts) if v.requires_grad]
        if inputs:
            weights = whole_weights(expected)
            assert same(gradients(outs, inputs, weights), gradients(expected, inputs, weights))


def test_types_that_torch_does_not_promote_are_a_type_error() -> None:
    kts = [*make_kts(LAYOUT[:1]), *make_kts(LAYOUT[1:], dtype=torch.float8_e4m3fn)]
    m = module()
    with pytest.raises(TypeError, match=r"values\[1\] is torch.float8_e4m3fn"):
        m(kts)
    assert_regroups(m, make_kts(grad=True))


def test_an_unused_input_does_not_promote() -> None:
    kts = [*make_kts(LAYOUT[:1], dtype=torch.float16), *make_kts(LAYOUT[1:], dtype=torch.float64)]
    assert_regrouped(module([["b", "a"]])(kts), kts[:1], [["b", "a"]])


def test_autocast_with_float32_and_bfloat16_inputs() -> None:
    m = module()
    with torch.autocast("cpu", torch.bfloat16):
        left = torch.randn(3, 4) @ torch.randn(4, 8)
        assert left.dtype == torch.bfloat16
        kts = [KeyedTensor(["a", "b"], [3, 5], left), *make_kts(LAYOUT[1:], grad=True)]
        assert_regroups(m, kts)
    assert m(kts)["out0"].dtype == torch.float32


# --- emb_dtype --------------------------------------------------------------------------------------

CASTS = [dt for dt in DataType if dt not in (DataType.INT4, DataType.INT2)]


def castable_kts(batch: int, dtype: torch.dtype, key_dim: int, grad: bool = False) -> Kts:
    """Values that every target holds, unsigned ones too."""
    kts = make_kts(batch=batch, dtype=dtype, key_dim=key_dim)
    for kt in kts:
        kt.values().clamp_(0, 100).requires_grad_(grad)
    return kts


@pytest.mark.parametrize("groups", [GROUPS, REPEATED, OMITTED], ids=["once", "repeated", "omitted"])
@pytest.mark.parametrize("key_dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("emb_dtype", CASTS, ids=str)
def test_emb_dtype_casts_as_to_does(
    emb_dtype: DataType, dtype: torch.dtype, key_dim: int, groups: list[list[str]]
) -> None:
    target = data_type_to_dtype(emb_dtype)
    m = module(groups, emb_dtype=emb_dtype)
    for batch in (3, 0, 70):
        kts = castable_kts(batch, dtype, key_dim)
        outs = tensors(m(kts))
        assert [t.dtype for t in outs] == [target] * 2
        assert same(map(bytes_of, outs), [bytes_of(t.to(target)) for t in reference(kts, groups)])


@pytest.mark.parametrize("groups", [GROUPS, REPEATED, OMITTED], ids=["once", "repeated", "omitted"])
@pytest.mark.parametrize("key_dim", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("emb_dtype", CASTS, ids=str)
def test_gradients_through_emb_dtype_return_in_the_type_of_the_input(
    emb_dtype: DataType,
    dtype: torch.dtype,
    key_dim: int,
    groups: list[list[str]],
    request: pytest.FixtureRequest,
) -> None:
    target = data_type_to_dtype(emb_dtype)
    m = module(groups, emb_dtype=emb_dtype)
    for batch in (3, 0, 70):
        kts = castable_kts(batch, dtype, key_dim, grad=True)
        outs = tensors(m(kts))
        if not target.is_floating_point:
            assert not any(t.requires_grad for t in outs)
            continue
        found = torch.autograd.grad(outs, values_of(kts), [torch.ones(t.shape).to(target) for t in outs])
        assert [g.dtype for g in found] == [dtype] * 2
        assert same(found, gradients(reference(kts, groups), values_of(kts)))


@pytest.mark.parametrize("emb_dtype", [DataType.INT4, DataType.INT2], ids=str)
def test_an_emb_dtype_that_cannot_be_cast_to_is_an_error_at_construction(emb_dtype: DataType) -> None:
    with pytest.raises(ValueError, match=f"emb_dtype is {emb_dtype}"):
        module(emb_dtype=emb_dtype)


def test_emb_dtype_may_be_set_later() -> None:
    """As in TorchRec's module, which looks at it in each call."""
    m, theirs = module(), TorchRecKTRegroupAsDict(GROUPS, NAMES)
    for emb_dtype in (None, DataType.FP16, DataType.FP32, None, DataType.BF16):
        m._emb_dtype = theirs._emb_dtype = emb_dtype
        for kts in (make_kts(), make_kts(), make_kts(key_dim=0)):
            target = torch.float32 if emb_dtype is None else data_type_to_dtype(emb_dtype)
            assert [t.dtype for t in tensors(m(kts))] == [target] * 2
        assert [t.dtype for t in tensors(theirs(make_kts()))] == [target] * 2
        scripted = torch.jit.script(m)
        assert [t.dtype for t in tensors(scripted(make_kts(key_dim=0)))] == [target] * 2
    with pytest.raises(ValueError, match="emb_dtype is INT4"):
        m._emb_dtype = DataType.INT4


@pytest.mark.parametrize("emb_dtype", CASTS, ids=str)
def test_emb_dtype_on_meta_and_on_an_empty_batch(emb_dtype: DataType) -> None:
    target = data_type_to_dtype(emb_dtype)
    m = module(emb_dtype=emb_dtype)
    meta = [KeyedTensor(kt.keys(), kt.length_per_key(), kt.values().to("meta")) for kt in make_kts()]
    with FakeTensorMode():
        fake = tensors(m(make_kts()))
    for outs in (tensors(m(meta)), fake, tensors(m(make_kts(batch=0))), tensors(m(make_kts()))):
        assert [t.dtype for t in outs] == [target] * 2


def test_emb_dtype_of_mixed_inputs() -> None:
    kts = [*make_kts(LAYOUT[:1], grad=True), *make_kts(LAYOUT[1:], dtype=torch.float64, grad=True)]
    outs = tensors(module(emb_dtype=DataType.FP16)(kts))
    cast = [KeyedTensor(kt.keys(), kt.length_per_key(), kt.values().to(torch.float16)) for kt in kts]
    assert_regrouped(outs, cast)
    assert [g.dtype for g in gradients(outs, values_of(kts))] == [torch.float32, torch.float64]


# --- strides and aliasing ---------------------------------------------------------------------------


def strided(kind: str) -> Tensor:
    """Values ``[3, 8]`` with unusual strides."""
    base = torch.randn(3, 8)
    if kind == "transposed":
        return torch.randn(8, 3).t()
    if kind == "column slice":
        return torch.randn(3, 12)[:, 2:10]
    if kind == "row stride":
        return torch.randn(6, 8)[::2]
    if kind == "column stride 2":
        return torch.randn(3, 16)[:, ::2]
    if kind == "expanded rows":
        return torch.randn(1, 8).expand(3, 8)
    if kind == "expanded columns":
        return torch.randn(3, 1).expand(3, 8)
    if kind == "expanded scalar":
        return torch.randn(()).expand(3, 8)
    if kind == "storage offset":
        return torch.randn(25)[1:].view(3, 8)
    if kind == "overlapping rows":
        return torch.randn(20).as_strided((3, 8), (2, 1))
    if kind == "flipped":
        return torch.randn(3, 8).flip(1)
    if kind == "negated view":
        return torch._neg_view(base)
    assert kind == "conjugate view"
    return torch.randn(3, 8, dtype=torch.complex64).conj()


KINDS = [
    "transposed", "column slice", "row stride", "column stride 2", "expanded rows", "expanded columns",
    "expanded scalar", "storage offset", "overlapping rows", "flipped", "negated view", "conjugate view",
]  # fmt: skip


@pytest.mark.parametrize("groups", [GROUPS, REPEATED, OMITTED], ids=["once", "repeated", "omitted"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_any_strides(kind: str, groups: list[list[str]]) -> None:
    m = module(groups)
    m(make_kts())  # The same shape, contiguous: what was learnt from it must not bind.
    values = strided(kind).requires_grad_()
    kts = [KeyedTensor(["a", "b"], [3, 5], values), *make_kts(LAYOUT[1:], dtype=values.dtype, grad=True)]
    assert_regroups(m, kts, groups)
    assert_regroups(m, kts[::-1], groups)
    assert_regroups(m, make_kts(grad=True), groups)


@pytest.mark.parametrize("batch", [3, 256])
def test_both_inputs_in_one_storage(batch: int) -> None:
    both = torch.randn(batch, 14, requires_grad=True)
    kts = [KeyedTensor(["a", "b"], [3, 5], both[:, :8]), KeyedTensor(["c", "d"], [2, 4], both[:, 8:])]
    assert_regroups(module(), kts)
    same_values = [KeyedTensor(["a", "b"], [3, 5], both), KeyedTensor(["c", "d"], [2, 4], both)]
    outs, expected = tensors(module(REPEATED)(same_values)), reference(same_values, REPEATED)
    weights = whole_weights(expected)
    assert same(gradients(outs, [both], weights), gradients(expected, [both], weights))


@pytest.mark.parametrize("groups", [GROUPS, REPEATED, OMITTED], ids=["once", "repeated", "omitted"])
def test_gradients_of_any_strides(groups: list[list[str]]) -> None:
    m = module(groups)
    kts = make_kts(batch=6, grad=True)
    expected = reference(kts, groups)
    for weights in (
        [torch.tensor(2.0).expand(t.shape) for t in expected],
        [torch.randn(1, t.shape[1]).expand(t.shape) for t in expected],
        [torch.randn(t.shape[1], 6).t() for t in expected],
        [torch.randn(6, t.shape[1] + 4)[:, 2:-2] for t in expected],
        [torch.randn(6, 2 * t.shape[1])[:, ::2] for t in expected],
        [torch._neg_view(torch.randn(t.shape)) for t in expected],
    ):
        found = gradients(m(kts), values_of(kts), weights)
        whole = [w.clone(memory_format=torch.contiguous_format) for w in weights]
        for a, b in zip(found, gradients(expected, values_of(kts), whole)):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "groups", [GROUPS, [["a"]], [["a", "b"]], [["a", "b"], ["a", "b"]], [["a"], ["a"]]], ids=str
)
@pytest.mark.parametrize("batch", [1, 3, 300])
def test_outputs_are_contiguous_and_alias_nothing(groups: list[list[str]], grad: bool, batch: int) -> None:
    kts = make_kts(batch=batch, grad=grad)
    outs = tensors(module(groups)(kts))
    expected = [t.detach().clone() for t in reference(kts, groups)]
    inputs = [v.detach().clone() for v in values_of(kts)]
    assert all(t.is_contiguous() for t in outs)
    assert len({t.untyped_storage().data_ptr() for t in [*outs, *values_of(kts)]}) == len(outs) + len(kts)
    outs[0].mul_(2).add_(1)
    assert torch.equal(outs[0].detach(), expected[0] * 2 + 1)
    assert same([t.detach() for t in outs[1:]], expected[1:])
    assert same([v.detach() for v in values_of(kts)], inputs)
    if grad:
        outs[0].sum().backward()
        first = kts[0].values().grad
        assert first is not None
        assert torch.equal(first[:, :3], torch.full((batch, 3), 2.0))


# --- devices, fake tensors, grad modes --------------------------------------------------------------


@pytest.mark.parametrize("multi_device", [False, True])
def test_meta_first_then_data(multi_device: bool) -> None:
    m = module(multi_device=multi_device)
    outs = tensors(m(on_meta(make_kts())))
    assert [(t.shape, t.device.type) for t in outs] == [((3, 5), "meta"), ((3, 9), "meta")]
    assert_regroups(m, make_kts(grad=True))
    assert_regrouped(torch.jit.script(m)(kts := make_kts()), kts)
    m(on_meta(make_kts()))
    assert_regroups(m, make_kts(grad=True))


def test_all_on_meta() -> None:
    m = module(REPEATED)
    kts = [
        KeyedTensor(
            list(k), list(w), torch.empty(3, sum(w), device="meta", dtype=torch.bfloat16, requires_grad=True)
        )
        for k, w in LAYOUT
    ]
    out = m(kts)
    assert [(t.shape, t.dtype, t.device.type) for t in out.values()] == [
        ((3, 8), torch.bfloat16, "meta"),
        ((3, 9), torch.bfloat16, "meta"),
    ]
    total(out.values()).backward()
    assert [kt.values().grad.shape for kt in kts] == [(3, 8), (3, 6)]  # pyright: ignore[reportOptionalMemberAccess]


def test_fake_first_then_data() -> None:
    m = module(REPEATED)
    with FakeTensorMode():
        kts = make_kts(grad=True)
        out = m(kts)
        assert all(isinstance(t, FakeTensor) for t in out.values())
        assert [tuple(t.shape) for t in out.values()] == [(3, 8), (3, 9)]
        total(out.values()).backward()
        assert [tuple(kt.values().grad.shape) for kt in kts] == [(3, 8), (3, 6)]  # pyright: ignore[reportOptionalMemberAccess]
    assert not any(isinstance(b, FakeTensor) for b in m.buffers())
    assert_regroups(m, make_kts(grad=True), REPEATED)
    assert_regrouped(torch.jit.script(m)(real := make_kts()), real, REPEATED)


def test_fake_tensors_outside_of_their_mode() -> None:
    m = module()
    with FakeTensorMode():
        kts = make_kts()
    out = m(kts)
    assert all(isinstance(t, FakeTensor) for t in out.values())
    assert_regroups(m, make_kts(grad=True))


@pytest.mark.parametrize("size", [(3, 4, 3), *SIZES[:-1]], ids=str)
def test_a_default_device_of_meta_touches_nothing(size: tuple[int, int, int]) -> None:
    batch, keys, width = size
    layout, names = layout_of(keys, width)
    groups = [names[1::2][::-1], [names[1]] * 2]
    kts = make_kts(layout, batch, grad=True)
    with torch.device("meta"):
        m = module(groups)
        outs = tensors(m(kts))
        grads = torch.autograd.grad(outs, values_of(kts), [torch.ones_like(out) for out in outs])
    assert_regrouped(outs, kts, groups)
    assert same(grads, gradients(reference(kts, groups), values_of(kts)))
    assert_regroups(m, kts, groups)
    assert_regroups(torch.jit.script(m), kts, groups)


@pytest.mark.parametrize("warm", [False, True])
def test_a_module_moved_to_meta_still_follows_its_input(warm: bool) -> None:
    m = module()
    if warm:
        m(make_kts())
    m.to("meta")
    assert_regroups(m, make_kts(grad=True))
    assert_regroups(m, make_kts(SWAPPED, grad=True))


@pytest.mark.parametrize(
    "move", [lambda m: m.to("meta"), lambda m: m.set_device("meta")], ids=["to", "set_device"]
)
def test_a_graph_made_of_a_module_on_meta_holds_data(move: Callable[[Any], Any]) -> None:
    m = module(layout=LAYOUT)
    move(m)
    kts = make_kts()
    for graph in (torch.jit.script(m), torch.fx.symbolic_trace(m)):
        assert_regrouped(graph(kts), kts)


@pytest.mark.parametrize("start", ["cpu", "meta"])
def test_to_empty_does_not_lose_the_plan(start: str) -> None:
    # The usual way from meta to a device: parameters are filled from a checkpoint, buffers keep what
    # memory held.
    m = module(layout=LAYOUT)
    m.to(start)
    with uninitialised_is_nan():
        m.to_empty(device="cpu")
    kts = make_kts()
    for graph in (torch.jit.script(m), torch.fx.symbolic_trace(m)):
        assert_regrouped(graph(kts), kts)


def test_set_device() -> None:
    m = module()
    m.set_device("cpu")
    m(make_kts())
    m.set_device("cpu")
    assert {b.device.type for b in m.buffers()} == {"cpu"}
    kts = make_kts()
    assert_regrouped(m(kts), kts)
    assert_regrouped(torch.jit.script(m)(kts), kts)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("device", ["cuda", "nonsense"])
def test_set_device_to_one_that_is_not_there(device: str, warm: bool) -> None:
    if device == "cuda" and torch.cuda.is_available():
        m = module()
        m.set_device(device)
        assert {b.device.type for b in m.buffers()} == {"cuda"}
        return
    m = module()
    if warm:
        m(make_kts())
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|Expected one of"):
        m.set_device(device)
    assert_regroups(m, make_kts(grad=True))


@pytest.mark.parametrize("warm", [False, True])
def test_set_device_to_meta_leaves_eager_calls_right(warm: bool) -> None:
    m = module()
    if warm:
        m(make_kts())
    m.set_device("meta")
    assert_regroups(m, make_kts(grad=True))
    assert_regroups(m, make_kts(SWAPPED, grad=True))


def test_set_device_to_meta_and_back() -> None:
    m = module()
    m(make_kts())
    m.set_device("meta")
    m.set_device("cpu")
    kts = make_kts()
    assert_regrouped(m(kts), kts)
    assert_regrouped(torch.jit.script(m)(kts), kts)


def test_multi_device() -> None:
    m = module(multi_device=True)
    assert m._permute_pooled_embs_impl._multi_device
    kts = make_kts(grad=True)
    assert_regroups(m, kts)
    outs = m(on_meta(make_kts(SWAPPED)))
    assert [t.device.type for t in outs.values()] == ["meta"] * 2
    assert_regroups(m, kts)
    assert_regroups(torch.jit.script(m), kts)
    assert_regroups(torch.fx.symbolic_trace(m), kts)
    traced = torch.fx.symbolic_trace(m)
    assert [tuple(t.shape) for t in traced(on_meta(kts)).values()] == [(3, 5), (3, 9)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("groups", [GROUPS, REPEATED, OMITTED], ids=["once", "repeated", "omitted"])
@pytest.mark.parametrize("size", [(1, 4, 3), (3, 4, 3), (64, 40, 4), (8, 200, 1)], ids=str)
def test_first_call_without_gradients_then_training(
    mode: Any, groups: list[list[str]], size: tuple[int, int, int]
) -> None:
    batch, keys, width = size
    layout, names = layout_of(keys, width)
    groups = [[names["abcd".index(key)] for key in group] for group in groups]
    m = module(groups)
    with mode():
        kts = make_kts(layout, batch)
        outs = m(kts)
        assert_regrouped(outs, kts, groups)
        assert not any(t.requires_grad for t in outs.values())
    assert not any(b.is_inference() for b in m.buffers())
    assert_regroups(m, make_kts(layout, batch, grad=True), groups)
    assert_regroups(torch.jit.script(m), make_kts(layout, batch, grad=True), groups)


def test_inference_mode_on_meta_and_on_data() -> None:
    m = module()
    with torch.inference_mode():
        assert m(on_meta(make_kts()))["out0"].device.type == "meta"
        assert_regrouped(m(kts := make_kts()), kts)


def test_only_inputs_that_need_a_gradient_get_one() -> None:
    kts = [*make_kts(LAYOUT[:1], grad=True), *make_kts(LAYOUT[1:])]
    total(module()(kts).values()).backward()
    grads = [kt.values().grad for kt in kts]
    assert grads[1] is None
    assert grads[0] is not None
    assert torch.equal(grads[0], torch.ones(3, 8))


def test_outputs_of_inputs_without_gradients_need_none() -> None:
    assert not any(t.requires_grad for t in module()(make_kts()).values())
