"""A recommender small enough to train exactly, its batches, and the ways to shard it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ShardedTensor,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.regroup import KTRegroupAsDict as TorchRecKTRegroupAsDict
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from torchrec_kt import KTRegroupAsDict

CPU = torch.device("cpu")
BATCH = 24
"""Rows of a global batch."""

# feature: (width, rows of its table)
PLAIN = {"f1": (4, 12), "f2": (8, 16), "f3": (16, 20), "f4": (8, 8)}
WEIGHTED = {"w1": (4, 12), "w2": (8, 16)}
WIDTHS = {key: width for key, (width, _) in (PLAIN | WEIGHTED).items()}

GROUPS = {"user": ["f1", "w2"], "object": ["f3", "f2"], "cross": ["w1", "f1"]}
"""``f1`` is in two groups, ``f4`` in none."""

REGROUPS: dict[str, Callable[..., nn.Module]] = {
    "torchrec_kt": KTRegroupAsDict,
    "torchrec": TorchRecKTRegroupAsDict,
}


def make_regroup(package: str = "torchrec_kt", groups: Mapping[str, list[str]] = GROUPS) -> nn.Module:
    return REGROUPS[package]([list(keys) for keys in groups.values()], list(groups))


# --- batches --------------------------------------------------------------------------------------


@dataclass
class Batch(Pipelineable):
    """``plain`` and ``weighted`` hold bags of 0 to 3 ids a feature; ``label`` is 0 or 1, float."""

    dense: Tensor
    plain: KeyedJaggedTensor
    weighted: KeyedJaggedTensor
    label: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(*(getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)))

    def record_stream(self, stream: torch.Stream) -> None:
        pass

    def pin_memory(self) -> Batch:
        return self


@dataclass
class Rows:
    """A global batch, from which each rank takes its rows."""

    dense: Tensor
    ids: dict[str, list[list[int]]]
    label: Tensor

    def batch(self, rows: Sequence[int]) -> Batch:
        def jagged(keys: Sequence[str], weighted: bool) -> KeyedJaggedTensor:
            bags = [self.ids[key][row] for key in keys for row in rows]
            ids = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
            return KeyedJaggedTensor(
                keys=list(keys),
                values=ids,
                lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int64),
                # Eighths, as the tables: sums are exact in whatever order they are taken.
                weights=(1 + ids % 3) / 2 if weighted else None,
            )

        at = torch.tensor(list(rows), dtype=torch.int64)
        return Batch(self.dense[at], jagged(list(PLAIN), False), jagged(list(WEIGHTED), True), self.label[at])


def global_batch(seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, count: int) -> list[int]:
        return torch.randint(0, high, (count,), generator=generator).tolist()

    ids = {
        key: [draw(rows, length) for length in draw(4, BATCH)]
        for key, (_, rows) in (PLAIN | WEIGHTED).items()
    }
    dense = torch.randint(-4, 5, (BATCH, 3), generator=generator) / 4
    return Rows(dense, ids, torch.randint(0, 2, (BATCH,), generator=generator).float())


def rows_of(rank: int, size: int, empty: int | None = None) -> list[int]:
    """The rows of a rank, equally many on each, none on the rank ``empty``."""
    ranks = [r for r in range(size) if r != empty]
    return list(range(BATCH))[ranks.index(rank) :: len(ranks)] if rank in ranks else []


def all_rows() -> list[int]:
    return list(range(BATCH))


# --- the model ------------------------------------------------------------------------------------


def collection(features: Mapping[str, tuple[int, int]], weighted: bool, seed: int) -> EmbeddingBagCollection:
    found = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t_{key}", embedding_dim=width, num_embeddings=rows, feature_names=[key])
            for key, (width, rows) in features.items()
        ],
        is_weighted=weighted,
        device=CPU,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for table in found.parameters():
            table.copy_(torch.randint(-8, 9, table.shape, generator=generator) / 8)
    return found


class Model(nn.Module):
    """Two collections, the regroup, one linear layer a group, a sum."""

    def __init__(self, regroup: nn.Module) -> None:
        super().__init__()
        self.ebc = collection(PLAIN, False, 1)
        self.webc = collection(WEIGHTED, True, 2)
        self.regroup = regroup
        generator = torch.Generator().manual_seed(3)
        self.towers = nn.ModuleDict(
            {name: nn.Linear(sum(WIDTHS[key] for key in keys), 1) for name, keys in GROUPS.items()}
        )
        self.dense = nn.Linear(3, 1)
        with torch.no_grad():
            for layer in [*self.towers.children(), self.dense]:
                for parameter in layer.parameters():
                    parameter.copy_(torch.randint(-4, 5, parameter.shape, generator=generator) / 16)

    def groups(self, batch: Batch) -> dict[str, Tensor]:
        return self.regroup([self.ebc(batch.plain), self.webc(batch.weighted)])

    def forward(self, batch: Batch) -> Tensor:
        """The logits, ``[B]``."""
        groups = self.groups(batch)
        user = self.towers["user"](groups["user"])
        item = self.towers["object"](groups["object"])
        cross = self.towers["cross"](groups["cross"])
        return (self.dense(batch.dense) + user + item + cross).squeeze(1)


def model_in(wrapped: nn.Module) -> Model:
    """The :class:`Model` inside of whatever it was wrapped in."""
    return next(module for module in wrapped.modules() if isinstance(module, Model))


class WithLoss(nn.Module):
    """``forward`` gives ``(loss, logits)``, as train pipelines expect.

    The loss is the sum over the rows of this rank over the rows *a rank has on average*: averaged
    over the ranks, as gradients are, it is the mean over the global batch, however its rows are spread.
    """

    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__()
        self.model = model
        self.rows = BATCH / size

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
        return loss / self.rows, logits.detach()


RATE = 0.25


def train_unsharded(model: nn.Module, seeds: Sequence[int]) -> tuple[list[float], list[Tensor]]:
    """Plain SGD on global batches; losses and logits of each."""
    wrapped, optimizer = WithLoss(model, 1), torch.optim.SGD(model.parameters(), lr=RATE)
    losses: list[float] = []
    logits: list[Tensor] = []
    for seed in seeds:
        optimizer.zero_grad()
        loss, out = wrapped(global_batch(seed).batch(all_rows()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        logits.append(out)
    return losses, logits


# --- sharding -------------------------------------------------------------------------------------

Generators = dict[str, Any]


def plan_of(kind: str, size: int) -> tuple[Generators, Generators]:
    """How to shard the tables of both collections; the order of keys changes wherever it can."""
    last = size - 1
    everywhere = list(range(size))
    if kind == "table_wise":
        return (
            {
                "t_f1": table_wise(last),
                "t_f2": table_wise(0),
                "t_f3": table_wise(last),
                "t_f4": table_wise(0),
            },
            {"t_w1": table_wise(last), "t_w2": table_wise(0)},
        )
    if kind == "column_wise":
        return (
            {
                "t_f1": column_wise(ranks=[last]),
                "t_f2": column_wise(ranks=[last, 0]),
                "t_f3": column_wise(ranks=everywhere),
                "t_f4": table_wise(0),
            },
            {"t_w1": table_wise(last), "t_w2": column_wise(ranks=[0, last])},
        )
    if kind == "mixed":
        return (
            {
                "t_f1": row_wise(),
                "t_f2": table_wise(last),
                "t_f3": column_wise(ranks=everywhere),
                "t_f4": row_wise(),
            },
            {"t_w1": data_parallel(), "t_w2": table_wise(0)},
        )
    same = {
        "row_wise": row_wise,
        "data_parallel": data_parallel,
        "table_row_wise": lambda: table_row_wise(host_index=0),
        "grid_shard": lambda: grid_shard(host_indexes=[0]),
    }[kind]
    return {f"t_{key}": same() for key in PLAIN}, {f"t_{key}": same() for key in WEIGHTED}


PLANS = ["table_wise", "row_wise", "column_wise", "table_row_wise", "grid_shard", "data_parallel", "mixed"]


def sharder() -> EmbeddingBagCollectionSharder:
    return EmbeddingBagCollectionSharder()


def update_during_backward(collection: EmbeddingBagCollection, generators: Generators) -> None:
    """Have the tables updated by the fused kernels, but those that each rank holds whole."""
    tables = [
        table.weight
        for name, table in collection.embedding_bags.items()
        if generators[name].__qualname__ != data_parallel().__qualname__
    ]
    if tables:
        apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": RATE})


def module_sharding_plan(
    collection: EmbeddingBagCollection, generators: Generators, size: int
) -> EmbeddingModuleShardingPlan:
    options: dict[str, Any] = {
        "sharder": sharder(),
        "local_size": size,
        "world_size": size,
        "device_type": "cpu",
    }
    return construct_module_sharding_plan(collection, generators, **options)


def sharding_plan(model: nn.Module, kind: str, size: int) -> ShardingPlan:
    """The plan for the :class:`Model` in ``model``, whose tables learn how they are updated."""
    plain, weighted = plan_of(kind, size)
    paths = {id(module): path for path, module in model.named_modules()}
    inner = model_in(model)
    update_during_backward(inner.ebc, plain)
    update_during_backward(inner.webc, weighted)
    return ShardingPlan(
        {
            paths[id(inner.ebc)]: module_sharding_plan(inner.ebc, plain, size),
            paths[id(inner.webc)]: module_sharding_plan(inner.webc, weighted, size),
        }
    )


def world_env() -> ShardingEnv:
    world = dist.group.WORLD
    assert world is not None
    return ShardingEnv.from_process_group(world)


def shard(model: nn.Module, kind: str, **options: Any) -> DistributedModelParallel:
    """Wrap ``model``, which holds a :class:`Model`, for the world at hand."""
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options.setdefault("env", world_env())
    found = DistributedModelParallel(
        model,
        device=CPU,
        plan=sharding_plan(model, kind, dist.get_world_size()),
        sharders=[sharder()],  # pyright: ignore[reportArgumentType]
        **options,
    )
    load_whole(found, whole)
    return found


def not_fused(model: DistributedModelParallel) -> dict[str, nn.Parameter]:
    """The parameters that the sharded tables do not update during backward.

    By the plan: after ``reshard`` the parameters of tables no longer carry the mark that
    ``in_backward_optimizer_filter`` looks for.
    """
    fused = {
        f"{path}.embedding_bags.{table}.weight"
        for path, tables in model.plan.plan.items()
        for table, how in tables.items()  # pyright: ignore[reportAttributeAccessIssue]
        if how.sharding_type != ShardingType.DATA_PARALLEL.value
    }
    return {name: parameter for name, parameter in model.named_parameters() if name not in fused}


def optimizer_of(model: DistributedModelParallel) -> CombinedOptimizer:
    """SGD for all parameters."""
    return CombinedOptimizer(
        [
            model.fused_optimizer,
            KeyedOptimizerWrapper(not_fused(model), lambda p: torch.optim.SGD(p, lr=RATE)),
        ]
    )


def local_batches(seeds: Sequence[int], empty: int | None = None) -> Iterator[Batch]:
    rows = rows_of(dist.get_rank(), dist.get_world_size(), empty)
    return (global_batch(seed).batch(rows) for seed in seeds)


# --- comparing ------------------------------------------------------------------------------------


def parts(sharded: nn.Module, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What this rank holds of each entry of the state: name, tensor, and the same part of ``whole``.

    Raises:
        AssertionError: the names differ.
    """
    state = sharded.state_dict()
    assert set(state) == set(whole), set(state) ^ set(whole)
    for name, value in state.items():
        if not isinstance(value, ShardedTensor):
            yield name, value, whole[name]
            continue
        for shard_ in value.local_shards():
            where = zip(shard_.metadata.shard_offsets, shard_.metadata.shard_sizes)
            yield name, shard_.tensor, whole[name][tuple(slice(start, start + size) for start, size in where)]


def load_whole(sharded: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Take the weights of an unsharded model: sharding on a CPU does not, it makes new ones."""
    with torch.no_grad():
        for _, held, part in parts(sharded, whole):
            held.copy_(part)


def assert_same_state(sharded: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Every shard on this rank, and every tensor held whole, equals its part of the unsharded state."""
    for name, held, part in parts(sharded, whole):
        torch.testing.assert_close(held, part, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
