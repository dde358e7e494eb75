"""Sharded models give what the unsharded one gives, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.shard import shard as shard_one
from torchrec.distributed.shard import shard_modules
from torchrec.distributed.sharding_plan import table_wise
from torchrec.distributed.types import EmbeddingModuleShardingPlan

from torchrec_kt import KTRegroupAsDict, swap_regroup

from ..modules.helpers import uninitialised_is_nan
from .models import (
    CPU,
    PLAIN,
    PLANS,
    Model,
    WithLoss,
    all_rows,
    assert_same_state,
    collection,
    global_batch,
    load_whole,
    local_batches,
    make_regroup,
    model_in,
    module_sharding_plan,
    not_fused,
    optimizer_of,
    parts,
    plan_of,
    rows_of,
    shard,
    sharder,
    sharding_plan,
    update_during_backward,
    world_env,
)
from .world import in_world

SEEDS = [1, 2, 3]

# Plans after which the collections hand out their keys in another order than the unsharded ones.
REORDERING = ["table_wise", "column_wise", "mixed"]


def warm(model: Model) -> None:
    """A batch through the unsharded model."""
    model(global_batch(0).batch(all_rows()))


def groups_here(sharded: nn.Module, seed: int, empty: int | None = None) -> dict[str, Tensor]:
    """What the regroup of the sharded model gives for the rows of this rank."""
    model = model_in(sharded)
    rows = rows_of(dist.get_rank(), dist.get_world_size(), empty)
    return model.groups(global_batch(seed).batch(rows))


def groups_expected(model: Model, seed: int, empty: int | None = None) -> dict[str, Tensor]:
    """The same rows of what the unsharded model gives for the global batch."""
    rows = rows_of(dist.get_rank(), dist.get_world_size(), empty)
    return {name: group[rows] for name, group in model.groups(global_batch(seed).batch(all_rows())).items()}


def assert_same_groups(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, group in expected.items():
        assert torch.equal(found[name], group), name


def assert_trains_alike(
    sharded: Any, whole: Model, seeds: Sequence[int] = SEEDS, empty: int | None = None
) -> None:
    """Groups, logits, losses, gradients and updates of a few steps of SGD equal the unsharded model's."""
    size = dist.get_world_size()
    rows = rows_of(dist.get_rank(), size, empty)
    unused = whole.state_dict()["ebc.embedding_bags.t_f4.weight"].clone()
    reference, sgd = WithLoss(whole, 1), torch.optim.SGD(whole.parameters(), lr=0.25)
    optimizer = optimizer_of(sharded)
    for seed, batch in zip(seeds, local_batches(seeds, empty)):
        optimizer.zero_grad()
        sgd.zero_grad()
        loss, logits = sharded(batch)
        expected_loss, expected_logits = reference(global_batch(seed).batch(all_rows()))
        torch.testing.assert_close(logits, expected_logits[rows], rtol=1e-5, atol=1e-6)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / size, expected_loss.detach(), rtol=1e-5, atol=1e-6)
        loss.backward()
        expected_loss.backward()
        gradients = {f"model.{name}": p.grad for name, p in whole.named_parameters()}
        compared = 0
        for name, parameter in not_fused(sharded).items():
            torch.testing.assert_close(
                parameter.grad,
                gradients[name],
                rtol=1e-5,
                atol=1e-6,
                msg=lambda m, n=name: f"gradient of {n}: {m}",
            )
            compared += 1
        assert compared >= sum("embedding_bags" not in name for name in gradients)
        optimizer.step()
        sgd.step()
        assert_same_state(sharded, {f"model.{name}": value for name, value in whole.state_dict().items()})
    # Nothing depends on the table of the key that no group uses: not a bit of it may change.
    assert torch.equal(whole.state_dict()["ebc.embedding_bags.t_f4.weight"], unused)
    for name, held, part in parts(sharded, {f"model.{n}": value for n, value in whole.state_dict().items()}):
        assert "t_f4" not in name or torch.equal(held, part)


# --- DistributedModelParallel ---------------------------------------------------------------------


@in_world(
    1,
    2,
    4,
    plan=PLANS,
    warmed=["before", "after"],
    where=lambda world, plan, warmed: warmed == "before" or world == 2,
    quick=lambda world, plan, warmed: world == 2 and plan == "mixed",
)
def test_like_the_unsharded_model(plan: str, warmed: str) -> None:
    whole, model = Model(make_regroup()), Model(make_regroup())
    if warmed == "before":
        warm(model)
    sharded = shard(WithLoss(model, dist.get_world_size()), plan)
    assert_same_groups(groups_here(sharded, 8), groups_expected(whole, 8))
    with uninitialised_is_nan():
        assert_trains_alike(sharded, whole)
    sharded.eval()
    with torch.no_grad():
        found, expected = groups_here(sharded, 9), groups_expected(whole, 9)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# Their gradients travel by an all-gather of equal parts on gloo, whoever regroups.
NEED_EQUAL_BATCHES = ["row_wise", "table_row_wise", "grid_shard", "mixed"]


@in_world(2, 4, plan=PLANS, quick=lambda world, plan: world == 2 and plan in ("table_wise", "mixed"))
def test_an_empty_batch_on_one_rank(plan: str) -> None:
    whole, model = Model(make_regroup()), Model(make_regroup())
    warm(model)
    sharded = shard(WithLoss(model, dist.get_world_size()), plan)
    for empty in (1, 0):
        assert rows_of(empty, dist.get_world_size(), empty) == []
        assert_same_groups(groups_here(sharded, 8, empty), groups_expected(whole, 8, empty))
    for empty in (1, 0) if plan not in NEED_EQUAL_BATCHES else ():
        with uninitialised_is_nan():
            assert_trains_alike(sharded, whole, SEEDS[:1], empty)


@in_world(2, plan=REORDERING)
def test_torchrecs_module_is_wrong_if_warmed_before_and_ours_is_right(plan: str) -> None:
    whole = Model(make_regroup())
    expected = groups_expected(whole, 4)
    outcomes: dict[str, bool] = {}
    for package in ("torchrec", "torchrec_kt"):
        model = Model(make_regroup(package))
        warm(model)
        sharded = shard(WithLoss(model, dist.get_world_size()), plan)
        some = global_batch(4).batch([0]).plain
        assert model.ebc(some).keys() != whole.ebc(some).keys()
        found = groups_here(sharded, 4)
        assert [tuple(g.shape) for g in found.values()] == [tuple(g.shape) for g in expected.values()]
        outcomes[package] = all(torch.equal(found[name], expected[name]) for name in expected)
        if package == "torchrec":
            # No error, shapes as expected: nothing but the values tells. A swap mends it where it is.
            swap_regroup(sharded)
            assert_same_groups(groups_here(sharded, 4), expected)
    assert outcomes == {"torchrec": False, "torchrec_kt": True}


@in_world(2, when=["cold, before", "warm, before", "warm, after", "running, after"], plan=["mixed"])
def test_swapped(when: str, plan: str) -> None:
    whole, model = Model(make_regroup()), Model(make_regroup("torchrec"))
    state, moment = when.split(", ")
    if state != "cold":
        warm(model)
    if moment == "before":
        swap_regroup(model)
    sharded = shard(WithLoss(model, dist.get_world_size()), plan)
    if state == "running":
        groups_here(sharded, 0)
    swap_regroup(sharded)
    assert type(model.regroup) is KTRegroupAsDict
    with uninitialised_is_nan():
        assert_trains_alike(sharded, whole)


@in_world(2)
def test_torchrecs_module_spoils_the_table_of_an_unused_key() -> None:
    # What the zero gradient is for; "f4" is looked up and in no group.
    for package, spoilt in (("torchrec", True), ("torchrec_kt", False)):
        sharded = shard(WithLoss(Model(make_regroup(package)), dist.get_world_size()), "table_wise")
        with uninitialised_is_nan():
            for batch in local_batches(SEEDS):
                sharded(batch)[0].backward()
        (table,) = [
            shard_.tensor
            for name, value in sharded.state_dict().items()
            if "t_f4" in name
            for shard_ in value.local_shards()
        ] or [torch.full((1, 1), float("nan") if spoilt else 0.0)]  # the other rank holds it
        assert bool(table.isnan().any()) is spoilt


# --- sharding by hand, and anew -------------------------------------------------------------------


@in_world(2, how=["shard_modules", "shard"], plan=REORDERING)
def test_sharded_by_the_functions(how: str, plan: str) -> None:
    whole, model = Model(make_regroup()), Model(make_regroup())
    warm(model)
    size = dist.get_world_size()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    env = world_env()
    if how == "shard_modules":
        plans = sharding_plan(model, plan, size)
        shard_modules(model, env=env, device=CPU, plan=plans, sharders=[sharder()])  # pyright: ignore
    else:
        for name, plans in zip(("ebc", "webc"), plan_of(plan, size)):
            module_plan = module_sharding_plan(getattr(model, name), plans, size)
            options: Any = {"env": env, "device": CPU, "sharder": sharder()}
            setattr(model, name, shard_one(getattr(model, name), module_plan, **options))
    load_whole(model, state)
    for seed in SEEDS:
        assert_same_groups(groups_here(model, seed), groups_expected(whole, seed))


@in_world(2, 4)
def test_resharded_in_place() -> None:
    size = dist.get_world_size()
    whole, model = Model(make_regroup()), Model(make_regroup())
    warm(model)
    sharded = shard(WithLoss(model, size), "table_wise")
    assert_trains_alike(sharded, whole, SEEDS[:1])
    before = model.ebc(next(iter(local_batches([0]))).plain).keys()
    # The tables of "f1" and "f4" change places, and with them the order of the keys.
    moved = {"t_f1": table_wise(0), "t_f4": table_wise(size - 1)}
    generators = plan_of("table_wise", size)[0] | moved
    like_before = collection(PLAIN, False, 1)
    update_during_backward(like_before, generators)
    module_plan = module_sharding_plan(like_before, generators, size)
    changed = EmbeddingModuleShardingPlan({name: module_plan[name] for name in moved})
    sharded.reshard({"model.ebc": (0.0, changed)}, "model.ebc")
    assert model.ebc(next(iter(local_batches([0]))).plain).keys() != before
    with uninitialised_is_nan():
        assert_trains_alike(sharded, whole, SEEDS[1:])
