"""Layouts given before any data: pairs, KeyedTensors, collections of embedding bags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchrec.fx
from torch import nn
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_kt import KTRegroupAsDict

from .helpers import (
    GROUPS,
    LAYOUT,
    SWAPPED,
    Kts,
    assert_regrouped,
    assert_regroups,
    make_kts,
    module,
)


def assert_ready_for(m: KTRegroupAsDict, kts: Kts, groups: list[list[str]] = GROUPS) -> None:
    """The module can be scripted and traced without a first batch, and is right on this input."""
    assert m._is_inited
    scripted, traced = torch.jit.script(m), torch.fx.symbolic_trace(m)
    for call in (scripted, traced, torchrec.fx.symbolic_trace(m), m):
        assert_regroups(call, kts, groups)


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT,
        tuple(LAYOUT),
        [[list(k), list(w)] for k, w in LAYOUT],
        [(tuple(k), tuple(w)) for k, w in LAYOUT],
        make_kts(),
        [make_kts()[0], LAYOUT[1]],
    ],
    ids=["pairs", "tuple of pairs", "lists", "tuples", "KeyedTensors", "both"],
)
def test_layouts_before_data(layout: Any) -> None:
    assert_ready_for(module(layout=layout), make_kts(grad=True))
    m = module()
    assert m.prepare(layout) is m
    assert_ready_for(m, make_kts(grad=True))
    m.clear_cache()
    m.prepare(layout, device=torch.device("cpu"))
    assert_ready_for(m, make_kts(grad=True))


def test_preparing_again_replaces_the_layout_of_graphs() -> None:
    m = module(layout=LAYOUT)
    m.prepare(SWAPPED)
    assert_ready_for(m, make_kts(SWAPPED, grad=True))


def test_a_call_with_another_layout_replaces_the_layout_of_graphs() -> None:
    m = module(layout=LAYOUT)
    m(make_kts(SWAPPED))
    assert_ready_for(m, make_kts(SWAPPED, grad=True))


def test_keyed_tensors_of_a_layout_bring_their_key_dim() -> None:
    assert_ready_for(module(layout=make_kts(key_dim=0)), make_kts(key_dim=0, grad=True))
    m = module(layout=make_kts(rank=3, key_dim=-1))
    assert_ready_for(m, make_kts(rank=3, key_dim=-1, grad=True))
    with pytest.raises(ValueError, match="key_dims"):
        m.prepare([*make_kts(LAYOUT[:1]), *make_kts(LAYOUT[1:], key_dim=0)])


def table(
    name: str, dim: int, features: list[str], pooling: PoolingType = PoolingType.SUM
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, embedding_dim=dim, num_embeddings=10, feature_names=features, pooling=pooling
    )


def collection(tables: list[EmbeddingBagConfig], **options: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=tables, device=torch.device("cpu"), **options)


def features(keys: list[str], batch: int = 3, weighted: bool = False) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 4, (len(keys) * batch,))
    total = int(lengths.sum())
    return KeyedJaggedTensor.from_lengths_sync(
        keys=keys,
        values=torch.randint(0, 10, (total,)),
        lengths=lengths,
        weights=torch.rand(total) if weighted else None,
    )


def test_embedding_bag_collections_as_layout() -> None:
    plain = collection([table("t1", 8, ["f1", "f2"]), table("t2", 4, ["f3"], PoolingType.MEAN)])
    weighted = collection([table("t3", 12, ["w1"])], is_weighted=True)
    groups = [["w1", "f2"], ["f3", "f1", "w1"]]
    for m in (module(groups, layout=[plain, weighted]), module(groups).prepare([plain, weighted])):
        kts = [plain(features(["f1", "f2", "f3"])), weighted(features(["w1"], weighted=True))]
        assert_ready_for(m, kts, groups)


def test_a_feature_shared_by_two_tables_has_the_names_torchrec_gives_it() -> None:
    shared = collection([table("t1", 8, ["f1", "f2"]), table("t2", 4, ["f2", "f3"])])
    kts = [shared(features(["f1", "f2", "f3"]))]
    assert kts[0].keys() == ["f1", "f2@t1", "f2@t2", "f3"]
    groups = [["f2@t2", "f1"], ["f3", "f2@t1"]]
    assert_ready_for(module(groups, layout=[shared]), kts, groups)
    with pytest.raises(KeyError, match=r"'f2'.*'f2@t1'.*'f2@t2'"):
        module([["f2"]], layout=[shared])


def test_a_table_without_feature_names_is_its_own_feature() -> None:
    bare = collection([table("t1", 8, [])])
    kts = [bare(features(["t1"]))]
    assert_ready_for(module([["t1"]], layout=[bare]), kts, [["t1"]])


def quantised(model: EmbeddingBagCollection) -> Any:
    return quantize_embeddings(nn.Sequential(model), dtype=torch.qint8, inplace=False)[0]  # pyright: ignore[reportArgumentType, reportIndexIssue]


def test_a_quantised_collection_as_layout() -> None:
    model = quantised(collection([table("t1", 8, ["f1", "f2"]), table("t2", 4, ["f2"])]))
    kts = [model(features(["f1", "f2"]))]
    groups = [["f2@t2"], ["f2@t1", "f1"]]
    assert_ready_for(module(groups, layout=[model]), kts, groups)


def test_a_quantised_collection_that_orders_its_tables_by_pooling() -> None:
    tables = [
        table("t1", 8, ["f1"], PoolingType.SUM),
        table("t2", 4, ["f2"], PoolingType.MEAN),
        table("t3", 12, ["f3"], PoolingType.SUM),
    ]
    model = quantised(collection(tables))
    kts = [model(features(["f1", "f2", "f3"]))]
    assert kts[0].keys() == ["f1", "f3", "f2"]
    groups = [["f2"], ["f1", "f3"]]
    assert_ready_for(module(groups, layout=[model]), kts, groups)


def test_variable_batches_per_feature_come_out_as_one() -> None:
    model = collection([table("t1", 8, ["f1"]), table("t2", 4, ["f2"])])
    inverse = torch.tensor([[0, 1, 0], [1, 1, 0]])
    kjt = KeyedJaggedTensor(
        keys=["f1", "f2"],
        values=torch.tensor([0, 1, 2, 3, 4]),
        lengths=torch.tensor([1, 1, 1, 2]),
        stride_per_key_per_rank=[[2], [2]],
        inverse_indices=(["f1", "f2"], inverse),
    )
    groups = [["f2"], ["f1"]]
    kts = [model(kjt)]
    out = module(groups)(kts)
    assert_regrouped(out, kts, groups)
    weights = [bag.weight for bag in model.embedding_bags.values()]
    assert torch.equal(out["out1"], torch.stack([weights[0][0], weights[0][1], weights[0][0]]))  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        ([(["a", "b"], [3, 5])], KeyError, "'c'"),
        ([(["a", "b", "c"], [3, 5]), (["d"], [4])], ValueError, "3 keys but 2 widths"),
        ([(["a", "b"], [3, -5]), (["c", "d"], [2, 4])], ValueError, "-5"),
        ([(["a", "b"], [3, 5.5]), (["c", "d"], [2, 4])], TypeError, "5.5"),
        ([(["a", "b"], [3, 5]), (["a", "c", "d"], [1, 2, 4])], ValueError, "'a'.*more than once"),
        ([None], TypeError, r"layout\[0\] is a NoneType"),
        (["abc"], TypeError, r"layout\[0\] is a str"),
        ([(["a", "b"],)], TypeError, r"layout\[0\] is a tuple"),
        ([nn.Linear(2, 2)], TypeError, r"layout\[0\] is a Linear"),
        ("ab", TypeError, "layout is a str"),
        ({"a": 3}, TypeError, "layout is a dict"),
        (make_kts()[0], TypeError, "layout is a KeyedTensor"),
        (5, TypeError, "layout is a int"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_wrong_layouts(layout: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        module(layout=layout)
    m = module(layout=SWAPPED)
    with pytest.raises(error, match=message):
        m.prepare(layout)
    assert_ready_for(m, make_kts(SWAPPED, grad=True))


@pytest.mark.parametrize(
    "layout", [(["a", "b"], [3, 5]), [["a", "b"], [3, 5]], (["a", "b", "c"], [3, 5, 2])], ids=str
)
def test_a_pair_that_is_not_in_a_list_says_so(layout: Any) -> None:
    with pytest.raises(TypeError, match=r"layout.*pair"):
        module([["a"]], layout=layout)


def test_keys_of_a_layout_that_are_a_string_are_an_error() -> None:
    with pytest.raises(TypeError, match="string"):
        module([["a"]], layout=[("ab", [1, 2])])


def test_prepare_on_a_device_that_is_not_there() -> None:
    m = module(layout=SWAPPED)
    with pytest.raises(RuntimeError, match="nonsense"):
        m.prepare(LAYOUT, device="nonsense")  # pyright: ignore[reportArgumentType]
    assert_ready_for(m, make_kts(SWAPPED, grad=True))


def test_prepare_on_meta_keeps_the_plan() -> None:
    m = module().prepare(LAYOUT, device=torch.device("meta"))
    assert_ready_for(m, make_kts(grad=True))
