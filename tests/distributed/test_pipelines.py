"""TorchRec's train pipelines: the losses of the plain loop, and every sharded module pipelined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil
from torchrec.distributed.train_pipeline.runtime_forwards import BaseForward
from torchrec.distributed.train_pipeline.train_pipelines import (
    PrefetchTrainPipelineSparseDist,
    StagedTrainPipeline,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_kt import regroup_as_dict, swap_regroup

from .models import CPU, GROUPS, Batch, Model, WithLoss, local_batches, make_regroup, optimizer_of, shard
from .world import in_world

SEEDS = [1, 2, 3, 4, 5]


class WithLosses(WithLoss):
    """Hands the loss out, which pipelines keep to themselves."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, _ = super().forward(batch)
        return loss, loss.detach()


# --- where the regroup is -------------------------------------------------------------------------


@torch.fx.wrap
def keyed(dense: Tensor) -> KeyedTensor:
    return KeyedTensor(["d1", "d2"], [1, 2], dense)


class Everywhere(Model):
    """Regroups before, between and after the calls of the collections; computes what :class:`Model` does."""

    def __init__(self, package: str) -> None:
        super().__init__(make_regroup(package, {name: GROUPS[name] for name in ("user", "cross")}))
        self.before = make_regroup(package, {"dense": ["d1", "d2"]})
        self.between = make_regroup(package, {"object": GROUPS["object"]})

    def forward(self, batch: Batch) -> Tensor:
        dense = self.before([keyed(batch.dense)])["dense"]
        plain = self.ebc(batch.plain)
        item = self.between([plain])["object"]
        groups = self.regroup([plain, self.webc(batch.weighted)])
        user, cross = self.towers["user"](groups["user"]), self.towers["cross"](groups["cross"])
        return (self.dense(dense) + user + self.towers["object"](item) + cross).squeeze(1)


class InAList(Model):
    """A tracer looks into modules in a list, and finds its proxies there."""

    def __init__(self, package: str) -> None:
        super().__init__(nn.ModuleList([make_regroup(package)]))

    def groups(self, batch: Batch) -> dict[str, Tensor]:
        (regroup,) = self.regroup  # pyright: ignore[reportGeneralTypeIssues]
        return regroup([self.ebc(batch.plain), self.webc(batch.weighted)])


class ByFunction(Model):
    """Calls the function, in the part of the model that is traced."""

    def __init__(self, package: str) -> None:
        super().__init__(nn.Identity())

    def groups(self, batch: Batch) -> dict[str, Tensor]:
        kts = [self.ebc(batch.plain), self.webc(batch.weighted)]
        return regroup_as_dict(kts, list(GROUPS.values()), list(GROUPS))


PLACES: dict[str, Callable[[str], Model]] = {
    "after": lambda package: Model(make_regroup(package)),
    "everywhere": Everywhere,
    "in a list": InAList,
    "function": ByFunction,
}


# --- pipelines ------------------------------------------------------------------------------------


class CpuStream:
    """What pipelines made for accelerators ask of a stream."""

    device = CPU


def staged(model: Any, optimizer: Any) -> Callable[[Iterator[Batch]], Tensor]:
    stream: Any = CpuStream()
    dist_util: Any = SparseDataDistUtil(model, stream)
    dist_util.data_dist_stream = None  # which tells the rest of it that there is none
    pipeline = StagedTrainPipeline(
        [
            PipelineStage("copy", lambda batch: batch.to(CPU), stream),
            PipelineStage(
                "input dist",
                dist_util.start_sparse_data_dist,
                stream,
                fill_callback=dist_util.wait_sdd_fill_callback,
            ),
        ],
        compute_stream=stream,
    )

    def progress(batches: Iterator[Batch]) -> Tensor:
        batch = pipeline.progress(batches)
        if batch is None:
            raise StopIteration
        optimizer.zero_grad()
        loss, out = model(batch)
        dist_util.wait_sparse_data_dist()
        loss.backward()
        optimizer.step()
        return out

    return progress


def pipeline_of(kind: str, model: Any, optimizer: Any) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "base": lambda: TrainPipelineBase(model, optimizer, CPU),
        "sparse dist": lambda: TrainPipelineSparseDist(model, optimizer, CPU),
        "sparse dist, postproc": lambda: TrainPipelineSparseDist(
            model, optimizer, CPU, pipeline_postproc=True
        ),
        "sparse dist, late": lambda: TrainPipelineSparseDist(
            model, optimizer, CPU, enqueue_batch_after_forward=True
        ),
        "sparse dist, jit": lambda: TrainPipelineSparseDist(model, optimizer, CPU, apply_jit=True),
        "lite": lambda: TrainPipelineSparseDistLite(model, optimizer, CPU),
        "prefetch": lambda: PrefetchTrainPipelineSparseDist(model, optimizer, CPU),
        "semi-sync": lambda: TrainPipelineSemiSync(model, optimizer, CPU, start_batch=0),
        "fused": lambda: TrainPipelineFusedSparseDist(model, optimizer, CPU),
    }
    return made[kind]()


def losses_of(progress: Callable[[Iterator[Batch]], Any]) -> list[float]:
    batches, losses = iter(list(local_batches(SEEDS))), []
    while True:
        try:
            losses.append(progress(batches).item())
        except StopIteration:
            return losses


def sharded(place: str, package: str = "torchrec_kt", plan: str = "mixed") -> Any:
    return shard(WithLosses(PLACES[place](package), dist.get_world_size()), plan)


def plain_loop(model: Any) -> list[float]:
    optimizer, losses = optimizer_of(model), []
    for batch in local_batches(SEEDS):
        optimizer.zero_grad()
        loss, out = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(out.item())
    return losses


def pipelined(model: Any) -> set[str]:
    """Paths of the modules whose forward the pipeline has replaced."""
    return {
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(vars(module).get("forward"), BaseForward)
    }


WORK = ["base", "sparse dist", "sparse dist, postproc", "sparse dist, late", "sparse dist, jit", "lite"]


@in_world(
    2,
    kind=WORK,
    place=PLACES,
    quick=lambda world, kind, place: (kind, place) in [("sparse dist", "everywhere"), ("base", "after")],
)
def test_same_losses_as_the_plain_loop(kind: str, place: str) -> None:
    expected = plain_loop(sharded(place))
    assert expected == plain_loop(sharded("after"))
    assert len(set(expected)) == len(SEEDS)
    for warmed in (False, True):
        model = sharded(place)
        if warmed:
            model(next(local_batches([9])))
        pipeline = pipeline_of(kind, model, optimizer_of(model))
        found = losses_of(pipeline.progress)
        assert found == expected
        assert pipelined(model) == (set() if kind == "base" else {"ebc", "webc"})


@in_world(2, place=["after", "everywhere", "in a list"])
def test_staged(place: str) -> None:
    expected, model = plain_loop(sharded(place)), sharded(place)
    assert losses_of(staged(model, optimizer_of(model))) == expected
    assert pipelined(model) == {"ebc", "webc"}


@in_world(2, kind=["prefetch", "semi-sync", "fused"])
def test_pipelines_that_need_a_gpu_fail_alike_or_work_alike(kind: str) -> None:
    # TorchRec 1.9.2 asks for caches of FBGEMM or for streams that have a device; nothing of it is ours.
    def outcome(place: str, package: str) -> tuple[str, Any]:
        try:
            model = sharded(place, package)
            return "losses", losses_of(pipeline_of(kind, model, optimizer_of(model)).progress)
        except (AssertionError, AttributeError, RuntimeError) as error:
            return type(error).__name__, str(error)

    expected = outcome("after", "torchrec")
    for place in ("after", "everywhere"):
        assert outcome(place, "torchrec_kt") == expected


@in_world(2, kind=["sparse dist", "base"])
def test_detached_swapped_and_attached_again(kind: str) -> None:
    expected = plain_loop(sharded("after"))
    model = sharded("after", "torchrec")
    pipeline = pipeline_of(kind, model, optimizer_of(model))
    batches, losses = iter(list(local_batches(SEEDS))), []
    for n in range(len(SEEDS)):
        if n == 2 and kind != "base":
            swap_regroup(pipeline.detach())
            pipeline.attach()
        elif n == 3:
            swap_regroup(model)  # while the pipeline holds the model
        losses.append(pipeline.progress(batches).item())
    assert losses == expected
    assert pipelined(model) == (set() if kind == "base" else {"ebc", "webc"})


class Weighing(Model):
    """Feeds a regrouped tensor to a sharded module."""

    def __init__(self, package: str) -> None:
        super().__init__(make_regroup(package))
        self.before = make_regroup(package, {"dense": ["d2", "d1"]})

    def groups(self, batch: Batch) -> dict[str, Tensor]:
        shift = self.before([keyed(batch.dense)])["dense"]
        return self.regroup([self.ebc(batch.plain), self.webc(weigh(batch.weighted, shift))])


@torch.fx.wrap
def weigh(weighted: KeyedJaggedTensor, shift: Tensor) -> KeyedJaggedTensor:
    weights = weighted.weights() + shift.sum()
    return KeyedJaggedTensor(weighted.keys(), weighted.values(), weights, weighted.lengths())


PLACES["weighing"] = Weighing


@in_world(2)
def test_a_sharded_module_that_is_fed_by_a_regroup_is_not_pipelined_and_right() -> None:
    # The rule of the pipeline for whatever changes the input of a sharded module.
    expected = plain_loop(sharded("weighing"))
    assert expected == plain_loop(sharded("weighing", "torchrec"))
    model = sharded("weighing")
    assert losses_of(pipeline_of("sparse dist", model, optimizer_of(model)).progress) == expected
    assert pipelined(model) == {"ebc"}
