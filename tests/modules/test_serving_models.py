"""Models as they are served: quantised and sharded collections, traced, scripted, saved and loaded."""

# TorchScript reads the annotations of traced code.
# ruff: noqa: UP006, UP035

from typing import Any, Dict, Iterator, List

import pytest
import torch
import torch.distributed as dist
import torchrec.fx
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.global_settings import set_propogate_device
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.inference.modules import (
    assign_weights_to_tbe,
    get_table_to_weights_from_tbe,
    quantize_inference_model,
    shard_quant_model,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_kt import KTRegroupAsDict, regroup_as_dict

from .helpers import assert_regrouped, module, same, through_a_file

GROUPS = [["w1", "f2"], ["f3", "f1", "w1"]]
NAMES = ["user", "item"]
CPU = torch.device("cpu")
BATCHES = (5, 1, 64)


def collection(dims: Dict[str, int], means: List[str], weighted: bool) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(
            name=f"t_{key}",
            embedding_dim=dim,
            num_embeddings=20,
            feature_names=[key],
            pooling=PoolingType.MEAN if key in means else PoolingType.SUM,
        )
        for key, dim in dims.items()
    ]
    return EmbeddingBagCollection(tables=tables, device=CPU, is_weighted=weighted)


class Model(nn.Module):
    """Two collections, a regroup, a layer per group."""

    def __init__(self, by_function: bool = False) -> None:
        super().__init__()
        self.plain = collection({"f1": 8, "f2": 16, "f3": 4}, ["f2"], False)
        self.weighted = collection({"w1": 12, "w2": 8}, [], True)
        self.regroup = KTRegroupAsDict(GROUPS, NAMES)
        self.by_function = by_function
        self.user = nn.Linear(28, 3)
        self.item = nn.Linear(24, 3)

    def forward(self, plain: KeyedJaggedTensor, weighted: KeyedJaggedTensor) -> Tensor:
        kts = [self.plain(plain), self.weighted(weighted)]
        if self.by_function:
            groups = regroup_as_dict(kts, [["w1", "f2"], ["f3", "f1", "w1"]], ["user", "item"])
        else:
            groups = self.regroup(kts)
        return self.user(groups["user"]) + self.item(groups["item"])


def ids(keys: List[str], batch: int, weighted: bool) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 4, (len(keys) * batch,))
    total = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.randint(0, 20, (total,)),
        lengths=lengths,
        weights=torch.rand(total) if weighted else None,
    )


def batch_of(size: int) -> Any:
    return ids(["f1", "f2", "f3"], size, False), ids(["w1", "w2"], size, True)


def prepared(model: Any, prepare: str) -> Any:
    if prepare == "layout":
        model.regroup.prepare([model.plain, model.weighted])
        with torch.no_grad():  # TorchRec's collections need a first batch themselves
            for part, inputs in zip((model.plain, model.weighted), batch_of(3)):
                part(inputs)
    else:
        with torch.no_grad():
            model(*batch_of(3))
    return model


def traced_and_scripted(model: nn.Module) -> Any:
    tracer = torchrec.fx.Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"])
    return torch.jit.script(torch.fx.GraphModule(model, tracer.trace(model)))


def assert_served_as_eager(model: Any, by_function: bool) -> None:
    with torch.no_grad():
        scripted = traced_and_scripted(model)
        graph = str(scripted.inlined_graph)
        operator = "torchrec_kt::regroup_by_keys(" if by_function else "torchrec_kt::regroup("
        assert graph.count("torchrec_kt::") == graph.count(operator) == 1
        for call in (scripted, through_a_file(scripted)):
            for size in BATCHES:
                inputs = batch_of(size)
                assert torch.equal(call(*inputs), model(*inputs))


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("prepare", ["layout", "first batch"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantised_models_are_served_as_they_are_eagerly(prepare: str, by_function: bool) -> None:
    model = prepared(quantize_inference_model(Model(by_function).eval()), prepare)
    # The order of the keys is that of pooling types, not that of the tables.
    kts: List[KeyedTensor] = [model.plain(batch_of(2)[0])]
    assert kts[0].keys() == ["f1", "f3", "f2"]
    assert_served_as_eager(model, by_function)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("prepare", ["layout", "first batch"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sharded_quantised_models_are_served_as_they_are_eagerly(prepare: str, world_size: int) -> None:
    set_propogate_device(True)
    try:
        quantised = quantize_inference_model(Model().eval())
        weights = get_table_to_weights_from_tbe(quantised)
        expected = {size: quantised(*inputs) for size in BATCHES for inputs in [_fixed(size)]}
        sharded: Any
        sharded, _ = shard_quant_model(
            quantised, world_size=world_size, compute_device="cpu", sharding_device="cpu"
        )
        assign_weights_to_tbe(sharded, weights)
        prepared(sharded, prepare)
        with torch.no_grad():
            scripted = through_a_file(traced_and_scripted(sharded))
            for size in BATCHES:
                inputs = _fixed(size)
                found = scripted(*inputs)
                assert torch.equal(found, sharded(*inputs))
                assert torch.equal(found, expected[size])
    finally:
        set_propogate_device(False)


def _fixed(size: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(size)
        return batch_of(size)


@pytest.mark.parametrize("by_function", [False, True])
def test_a_model_of_collections_is_trained_by_compiled_code(by_function: bool) -> None:
    torch._dynamo.reset()
    model = Model(by_function)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for size in (5, 7, 64, 3):
        inputs = _fixed(size)
        found, expected = compiled(*inputs), model(*inputs)
        assert torch.equal(found, expected)
        parameters = list(model.parameters())
        grads = [
            torch.autograd.grad(out.square().sum(), parameters, materialize_grads=True)
            for out in (found, expected)
        ]
        torch.testing.assert_close(grads[0], grads[1])
    assert counter.frame_count <= 2
    for graph in counter.graphs:
        assert sum("torchrec_kt" in str(node.target) for node in graph.graph.nodes) == 1
    torch._dynamo.reset()


# --- training shards ------------------------------------------------------------------------------


@pytest.fixture
def one_process(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SHARDINGS: Dict[str, Dict[str, Any]] = {
    "table wise": {"f1": table_wise(rank=0), "f2": table_wise(rank=0), "f3": table_wise(rank=0)},
    "in the order of sharding": {"f1": data_parallel(), "f2": table_wise(rank=0), "f3": data_parallel()},
    "row wise and table wise": {"f1": table_wise(rank=0), "f2": row_wise(), "f3": table_wise(rank=0)},
    "column wise": {"f1": table_wise(rank=0), "f2": column_wise(ranks=[0, 0]), "f3": data_parallel()},
}


def shard(model: Model, by_key: Dict[str, Any]) -> Any:
    sharder: Any = EmbeddingBagCollectionSharder()
    options: Any = {"sharder": sharder, "local_size": 1, "world_size": 1, "device_type": "cpu"}
    plans: Any = {
        "plain": construct_module_sharding_plan(
            model.plain, {f"t_{key}": how for key, how in by_key.items()}, **options
        ),
        "weighted": construct_module_sharding_plan(
            model.weighted, {"t_w1": table_wise(rank=0), "t_w2": table_wise(rank=0)}, **options
        ),
    }
    world: Any = dist.GroupMember.WORLD
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(world),
        device=CPU,
        plan=ShardingPlan(plans),
        sharders=[sharder],
    )


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_sharded_collections_as_layout(sharding: str) -> None:
    sharded = shard(Model(), SHARDINGS[sharding])
    plain, weighted = sharded.module.plain, sharded.module.weighted
    m = module(GROUPS, layout=[plain, weighted])
    inputs = batch_of(4)
    outputs = [plain(inputs[0]), weighted(inputs[1])]
    kts = [KeyedTensor(o.keys(), o.length_per_key(), o.values().detach()) for o in outputs]
    if sharding == "in the order of sharding":
        assert kts[0].keys() != ["f1", "f2", "f3"]
    # A script refuses any other layout than the one it was made for.
    for call in (torch.jit.script(m), torch.fx.symbolic_trace(m), m):
        assert_regrouped(call(kts), kts, GROUPS)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("sharding", ["in the order of sharding", "column wise"])
def test_a_model_warmed_up_before_it_is_sharded(sharding: str) -> None:
    model = Model()
    inputs = _fixed(6)
    model(*inputs)
    sharded = shard(model, SHARDINGS[sharding])
    found = sharded(*inputs)
    # By name: the module's groups equal slices of what the sharded collections return.
    outputs = [sharded.module.plain(inputs[0]), sharded.module.weighted(inputs[1])]
    kts = [KeyedTensor(o.keys(), o.length_per_key(), o.values()) for o in outputs]
    groups = sharded.module.regroup(kts)
    assert_regrouped(groups, kts, GROUPS)
    assert same([found], [sharded.module.user(groups["user"]) + sharded.module.item(groups["item"])])
