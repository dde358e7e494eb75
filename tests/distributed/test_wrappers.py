"""DistributedDataParallel, FSDP2, activation checkpoints, and checkpoints between TorchRec's module and ours."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchrec.distributed.shard import shard_modules
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_kt import KTRegroupAsDict, swap_regroup

from ..modules.helpers import uninitialised_is_nan
from .models import (
    CPU,
    RATE,
    Batch,
    Model,
    WithLoss,
    all_rows,
    assert_same_state,
    global_batch,
    load_whole,
    local_batches,
    make_regroup,
    optimizer_of,
    rows_of,
    shard,
    sharder,
    sharding_plan,
    train_unsharded,
    world_env,
)
from .world import in_world

SEEDS = [1, 2, 3]


def train(model: Any, optimizer: Any, seeds: list[int] = SEEDS) -> list[Tensor]:
    """Logits of the rows of this rank, before each step."""
    found: list[Tensor] = []
    for batch in local_batches(seeds):
        optimizer.zero_grad()
        loss, logits = model(batch)
        loss.backward()
        optimizer.step()
        found.append(logits)
    return found


def assert_same_logits(found: list[Tensor], whole: list[Tensor]) -> None:
    rows = rows_of(dist.get_rank(), dist.get_world_size())
    assert len(found) == len(whole)
    for here, everywhere in zip(found, whole):
        torch.testing.assert_close(here, everywhere[rows], rtol=1e-5, atol=1e-6)


# --- DistributedDataParallel ----------------------------------------------------------------------


@in_world(
    2,
    4,
    case=["cold", "warm", "swapped before", "swapped after"],
    where=lambda world, case: world == 2 or case == "warm",
    quick=lambda world, case: world == 2 and case == "cold",
)
def test_ddp(case: str) -> None:
    whole = Model(make_regroup())
    model = Model(make_regroup("torchrec" if "swapped" in case else "torchrec_kt"))
    if case != "cold":
        model(global_batch(9).batch(all_rows()))
    if case == "swapped before":
        swap_regroup(model)
    wrapped = DistributedDataParallel(WithLoss(model, dist.get_world_size()))
    if case == "swapped after":
        swap_regroup(wrapped)
    assert type(model.regroup) is KTRegroupAsDict
    with uninitialised_is_nan():
        found = train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=RATE))
    assert_same_logits(found, train_unsharded(whole, SEEDS)[1])
    assert_same_state(model, whole.state_dict())


# --- FSDP2 ----------------------------------------------------------------------------------------


class Over(nn.Module):
    """The part of the model above the collections, regroup and all."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.regroup, self.towers, self.dense = model.regroup, model.towers, model.dense

    def forward(self, dense: Tensor, keyed_tensors: list[KeyedTensor]) -> Tensor:
        groups = self.regroup(keyed_tensors)
        towers = [self.towers[name](group) for name, group in groups.items()]
        return (self.dense(dense) + sum(towers)).squeeze(1)


class Apart(Model):
    def __init__(self, regroup: nn.Module) -> None:
        super().__init__(regroup)
        self.over = Over(self)
        del self.regroup, self.towers, self.dense

    def forward(self, batch: Batch) -> Tensor:
        return self.over(batch.dense, [self.ebc(batch.plain), self.webc(batch.weighted)])


@in_world(2, inside=["regroup too", "layers only"], plan=["table_wise", "column_wise"])
def test_fsdp_around_the_dense_part(inside: str, plan: str) -> None:
    whole, model, size = Apart(make_regroup()), Apart(make_regroup()), dist.get_world_size()
    model(global_batch(9).batch(all_rows()))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    options: Any = {"env": world_env(), "device": CPU, "sharders": [sharder()]}
    shard_modules(model, plan=sharding_plan(model, plan, size), **options)
    load_whole(model, state)
    mesh = init_device_mesh("cpu", (size,))
    for part in (
        [model.over] if inside == "regroup too" else [*model.over.towers.children(), model.over.dense]
    ):
        fully_shard(part, mesh=mesh)
    dense = torch.optim.SGD(model.over.parameters(), lr=RATE)
    with uninitialised_is_nan():
        found = train(WithLoss(model, size), dense)
    assert_same_logits(found, train_unsharded(whole, SEEDS)[1])
    for name, parameter in model.over.named_parameters():
        full: Any = parameter
        torch.testing.assert_close(
            full.full_tensor(), whole.over.get_parameter(name), rtol=1e-5, atol=1e-6, check_device=False
        )


# --- activation checkpoints -----------------------------------------------------------------------


class Checkpointed(Model):
    """Regroups a second time during backward."""

    def __init__(self, regroup: nn.Module, reentrant: bool) -> None:
        super().__init__(regroup)
        self.reentrant = reentrant
        self.calls = 0

    def forward(self, batch: Batch) -> Tensor:
        kts = [self.ebc(batch.plain), self.webc(batch.weighted)]
        layouts = [(kt.keys(), kt.length_per_key()) for kt in kts]

        def over(*values: Tensor) -> Tensor:
            self.calls += 1
            groups = self.regroup([KeyedTensor(*layout, v) for layout, v in zip(layouts, values)])
            return torch.cat([self.towers[name](group) for name, group in groups.items()], 1).sum(1)

        values = [kt.values() for kt in kts]
        towers: Any = checkpoint(over, *values, use_reentrant=self.reentrant)
        return self.dense(batch.dense).squeeze(1) + towers


@in_world(2, reentrant=[False, True])
def test_activation_checkpoints(reentrant: bool) -> None:
    whole, model = Model(make_regroup()), Checkpointed(make_regroup(), reentrant)
    sharded = shard(WithLoss(model, dist.get_world_size()), "table_wise")
    with uninitialised_is_nan():
        found = train(sharded, optimizer_of(sharded))
    assert model.calls == 2 * len(SEEDS)
    assert_same_logits(found, train_unsharded(whole, SEEDS)[1])
    assert_same_state(sharded, {f"model.{name}": value for name, value in whole.state_dict().items()})


# --- checkpoints ----------------------------------------------------------------------------------


def shared_folder() -> Path:
    """One folder for all ranks."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    return Path(names[0])


@in_world(
    2,
    to=["torchrec_kt", "torchrec"],
    how=["state_dict", "file", "distributed"],
    quick=lambda world, to, how: how == "distributed" and to == "torchrec_kt",
)
def test_checkpoints_between_torchrecs_module_and_ours(to: str, how: str) -> None:
    size = dist.get_world_size()
    source = {"torchrec_kt": "torchrec", "torchrec": "torchrec_kt"}[to]
    old: Any = shard(WithLoss(Model(make_regroup(source)), size), "row_wise")
    train(old, optimizer_of(old))
    # Only a distributed checkpoint goes from one sharding to another.
    new = shard(
        WithLoss(Model(make_regroup(to)), size), "column_wise" if how == "distributed" else "row_wise"
    )
    assert set(old.state_dict()) == set(new.state_dict())
    assert not any("regroup" in name for name in new.state_dict())
    if how == "state_dict":
        new.load_state_dict(old.state_dict())
    elif how == "file":
        path = shared_folder() / f"{dist.get_rank()}.pt"
        torch.save(old.state_dict(), path)
        new.load_state_dict(torch.load(path, weights_only=False))
    else:
        folder = shared_folder()
        dcp.save({"model": old.state_dict()}, checkpoint_id=folder)
        dcp.load({"model": new.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for batch in local_batches([7, 8]):
            torch.testing.assert_close(new(batch)[1], old(batch)[1], rtol=1e-5, atol=1e-6)
    # And both go on alike.
    for a, b in zip(train(new, optimizer_of(new)), train(old, optimizer_of(old))):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
