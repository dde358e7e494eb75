"""``KTRegroupAsDict`` as a part of models: copies, checkpoints, caches, what others read of it."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.regroup import KTRegroupAsDict as TorchRecKTRegroupAsDict
from torchrec.modules.utils import reset_module_states_post_sharding
from torchrec.types import CacheMixin, DataType

import torchrec_kt
from torchrec_kt import KTRegroupAsDict

from .helpers import (
    GROUPS,
    LAYOUT,
    NAMES,
    OMITTED,
    REPEATED,
    SWAPPED,
    Kts,
    Layout,
    assert_regrouped,
    assert_regroups,
    make_kts,
    module,
    reference,
    same,
    values_of,
)

# --- life cycle -------------------------------------------------------------------------------------


def saved_and_loaded(m: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(m, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "save": saved_and_loaded,
}
WARM_UPS: dict[str, Callable[[KTRegroupAsDict], Any]] = {
    "cold": lambda m: None,
    "called": lambda m: m(make_kts()),
    "called with key_dim 0": lambda m: m(make_kts(key_dim=0)),
    "prepared": lambda m: m.prepare(LAYOUT),
    "cleared": lambda m: (m(make_kts()), m.clear_cache()),
}


@pytest.mark.parametrize("warm_up", WARM_UPS)
@pytest.mark.parametrize("way", COPIES)
def test_copies_work_as_the_original(way: str, warm_up: str) -> None:
    m = module(REPEATED, emb_dtype=DataType.FP32)
    WARM_UPS[warm_up](m)
    other = COPIES[way](m)
    assert type(other) is KTRegroupAsDict
    assert (other._groups, other._keys, other._emb_dtype) == (m._groups, m._keys, m._emb_dtype)
    for each in (other, m, other):
        assert_regroups(each, make_kts(grad=True), REPEATED)
        assert_regroups(each, make_kts(SWAPPED, grad=True), REPEATED)
        assert_regroups(each, make_kts(key_dim=0, grad=True), REPEATED)
    assert_regrouped(torch.jit.script(other)(kts := make_kts(key_dim=0)), kts, REPEATED)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_does_not_change_the_graphs_of_the_original(way: str) -> None:
    m = module()
    m(make_kts())
    other = COPIES[way](m)
    other(make_kts(SWAPPED))
    kts = make_kts()
    assert_regrouped(torch.jit.script(m)(kts), kts)


def test_copies_are_independent() -> None:
    m = module(layout=LAYOUT)
    other = copy.deepcopy(m)
    other.clear_cache()
    assert m._is_inited
    assert not other._is_inited
    assert_regrouped(torch.jit.script(m)(kts := make_kts()), kts)


def test_names_of_buffers_parameters_and_modules_are_those_of_torchrec() -> None:
    theirs, ours = TorchRecKTRegroupAsDict(GROUPS, NAMES), KTRegroupAsDict(GROUPS, NAMES)
    for _ in range(2):
        for names in ("named_buffers", "named_parameters", "named_modules"):
            assert [n for n, _ in getattr(ours, names)()] == [n for n, _ in getattr(theirs, names)()]
        for m in (theirs, ours):
            m(make_kts())


def test_state_dict_is_empty_and_checkpoints_load_both_ways() -> None:
    def model(regroup: nn.Module) -> nn.Module:
        return nn.ModuleDict({"regroup": regroup, "linear": nn.Linear(5, 2)})

    ours, theirs = model(KTRegroupAsDict(GROUPS, NAMES)), model(TorchRecKTRegroupAsDict(GROUPS, NAMES))
    for _ in range(2):
        assert list(ours["regroup"].state_dict()) == []  # pyright: ignore[reportIndexIssue]
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
        assert str(theirs.load_state_dict(ours.state_dict())) == "<All keys matched successfully>"
        for m in (ours, theirs):
            m["regroup"](make_kts())  # pyright: ignore[reportIndexIssue]
    kts = make_kts()
    assert_regrouped(ours["regroup"](kts), kts)  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.double(),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.float(),
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu"),
        lambda m: m.to(memory_format=torch.channels_last),
        lambda m: m.eval(),
        lambda m: m.train(),
        lambda m: m.share_memory(),
        lambda m: m.requires_grad_(False),
        lambda m: m.apply(lambda _: None),
        lambda m: m.cpu(),
    ],
    ids=[
        "double", "half", "bfloat16", "float", "to float16", "to cpu", "channels_last",
        "eval", "train", "share_memory", "requires_grad", "apply", "cpu",
    ],
)  # fmt: skip
@pytest.mark.parametrize("warm_up", WARM_UPS)
def test_changes_of_the_parent(change: Callable[[nn.Module], Any], warm_up: str) -> None:
    m = module(REPEATED)
    WARM_UPS[warm_up](m)
    change(nn.ModuleList([m]))
    assert_regroups(m, make_kts(grad=True), REPEATED)
    assert_regroups(torch.jit.script(m), make_kts(grad=True), REPEATED)
    assert {b.dtype for b in m.buffers()} == {torch.int32}


def test_clear_cache_forgets_everything() -> None:
    m = module()
    m(make_kts())
    assert m._is_inited
    m.clear_cache()
    assert not m._is_inited
    assert not m._use_fbgemm_regroup
    assert len(m._plans) == 0
    assert sum(b.numel() for b in m.buffers()) == 0
    with pytest.raises(RuntimeError, match="no plan yet"):
        m._permute_pooled_embs_impl(values_of(make_kts()))
    assert_regroups(m, make_kts(SWAPPED, grad=True))


def test_clear_cache_then_another_key_dim() -> None:
    m = module()
    square: Layout = [(["a", "b"], [3, 5]), (["c", "d"], [3, 5])]
    m(make_kts(square, 8))
    m.clear_cache()
    assert_regroups(m, make_kts(square, 8, key_dim=0, grad=True))
    m.clear_cache()
    assert_regroups(m, make_kts(square, 8, grad=True))


def test_clear_cache_before_the_first_call_and_twice() -> None:
    m = module()
    m.clear_cache()
    m.clear_cache()
    assert_regroups(m, make_kts(grad=True))


def test_the_reset_after_sharding_finds_the_module() -> None:
    model = nn.ModuleDict({"inner": nn.ModuleList([module()])})
    regroup = model["inner"][0]  # pyright: ignore[reportIndexIssue]
    regroup(make_kts())
    reset_module_states_post_sharding(model)
    assert not regroup._is_inited
    assert len(regroup._plans) == 0
    assert_regroups(regroup, make_kts(LAYOUT[::-1], grad=True))


def test_the_module_is_one_of_torchrec_and_shows_what_others_read() -> None:
    m = KTRegroupAsDict(groups=GROUPS, keys=NAMES, emb_dtype=DataType.FP16, multi_device=True)
    assert isinstance(m, TorchRecKTRegroupAsDict)
    assert isinstance(m, CacheMixin)
    assert m._groups == GROUPS
    assert m._keys == NAMES
    assert m._emb_dtype is DataType.FP16
    assert m._permute_pooled_embs_impl._multi_device is True
    assert m._permute_pooled_embs_impl._groups == GROUPS
    assert m._is_inited is False
    m(make_kts())
    assert m._is_inited is True
    impl = m._permute_pooled_embs_impl
    assert impl._permutes.tolist() == [
        [0, 0, 0, 0, 3, 0],
        [1, 0, 0, 3, 2, 0],
        [1, 1, 2, 0, 4, 0],
        [0, 1, 3, 4, 5, 0],
    ]
    assert (impl._in_shapes.tolist(), impl._out_shapes.tolist()) == ([8, 6], [5, 9])
    assert impl._out_lengths == [5, 9]


@pytest.mark.parametrize("groups", [GROUPS, REPEATED, OMITTED, [["a"] * 4, ["b", "a"]]], ids=str)
def test_plan_tensors_are_those_of_torchrec(groups: list[list[str]]) -> None:
    names = [f"out{i}" for i in range(len(groups))]
    theirs, ours = TorchRecKTRegroupAsDict(groups, names), KTRegroupAsDict(groups, names)
    for m in (theirs, ours):
        m(make_kts())
    for (_, a), (_, b) in zip(theirs.named_buffers(), ours.named_buffers()):
        assert torch.equal(a, b)


def test_a_subclass_may_be_made() -> None:
    class Doubled(KTRegroupAsDict):
        def forward(self, keyed_tensors: Kts) -> dict[str, Tensor]:
            return {name: 2 * value for name, value in super().forward(keyed_tensors).items()}

    kts = make_kts()
    out = Doubled(GROUPS, NAMES)(kts)
    assert same(out.values(), [2 * t for t in reference(kts, GROUPS)])


def test_the_signature_extends_that_of_torchrec() -> None:
    theirs = list(inspect.signature(TorchRecKTRegroupAsDict.__init__).parameters.items())
    ours = list(inspect.signature(KTRegroupAsDict.__init__).parameters.items())
    assert [(n, p.default, p.kind) for n, p in ours[: len(theirs)]] == [
        (n, p.default, p.kind) for n, p in theirs
    ]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for _, p in ours[len(theirs) :])
    assert list(inspect.signature(KTRegroupAsDict.forward).parameters) == ["self", "keyed_tensors"]


def test_an_impl_without_a_plan_raises() -> None:
    impl = torchrec_kt.PermuteMultiEmbedding(GROUPS)
    with pytest.raises(RuntimeError, match="no plan yet"):
        impl(values_of(make_kts()))


def test_the_impl_alone_applies_the_plan_it_is_given() -> None:
    m = module()
    m(make_kts())
    held = m._permute_pooled_embs_impl
    impl = torchrec_kt.PermuteMultiEmbedding(GROUPS)
    assert held._out_lengths is not None
    impl.init_tensors(held._permutes, held._in_shapes, held._out_shapes, held._out_lengths)
    kts = make_kts(grad=True)
    assert_regroups(lambda given: impl(values_of(given)), kts)
