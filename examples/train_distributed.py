"""Train the MovieLens model on several processes: sharded tables, pipelined input, fused optimizer.

On one machine, or on several (the same line on each of them, ``host0`` being one of them)::

    torchrun --standalone --nproc_per_node 2 examples/train_distributed.py
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint host0:29400 \\
        --rdzv_id movielens examples/train_distributed.py

With GPUs every process takes one and they talk over NCCL; without, gloo. TorchRec's planner chooses
how to shard the tables, ``DistributedModelParallel`` shards them, and ``TrainPipelineSparseDist``
sends the ids of the next batch while the current one is computed. The tables are updated by FBGEMM's
fused row-wise Adagrad during backward, the dense layers by Adam.

``--batch-size`` counts the interactions of all processes together, and each batch is cut into as many
parts, so that a run on more processes takes the same steps on the same batches. What differs is noise:
dropout and the initial tables are drawn on each process. Split, early stopping and scores are those
of ``examples/movielens/train.py``, which is the same model on one process without any of this.

``--compare`` trains a second model with TorchRec's own ``KTRegroupAsDict`` along, step by step in turns,
and prints both step times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedTensor, ShardingEnv, ShardingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from tqdm import tqdm

if __package__ in (None, ""):
    # Run as a file: Python then puts this folder, not the repository root, on the path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.movielens.data import Batch, DataError, MovieLens, load_movielens, split_interactions
from examples.movielens.metrics import Scores
from examples.movielens.model import (
    REGROUP_CHOICES,
    UNUSED_KEY,
    MovieLensModel,
    MovieLensTrainModel,
    regroup_factory,
)
from examples.movielens.train import (
    DENSE_RATE,
    EVALUATION_BATCH_SIZE,
    PATIENCE,
    CallTimer,
    positive_int,
    seed_number,
)

TABLE_RATE = 0.1
SHARDING = [ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value]
"""What the planner may choose from: kinds that the fused optimizer serves, on CPUs too."""


class Trainer:
    """One model, sharded over the processes, with its optimizers and its pipeline."""

    def __init__(self, data: MovieLens, regroup: str, device: torch.device, seed: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        # Tables on meta: each process makes the parts that it will hold.
        model = MovieLensModel(
            data.vocabulary_sizes, regroup_factory(regroup), device=torch.device("meta"), dense_device=device
        )
        torch.manual_seed(seed * size + rank)
        tables = [*model.user_embeddings.parameters(), *model.item_embeddings.parameters()]
        apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": TABLE_RATE})
        sharders: Any = [EmbeddingBagCollectionSharder()]
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=size,
                local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
                compute_device=device.type,
            ),
            constraints={
                f"t_{key}": ParameterConstraints(sharding_types=SHARDING) for key in data.vocabularies
            },
        )
        world: Any = dist.group.WORLD
        train_model = MovieLensTrainModel(model)
        self.model = DistributedModelParallel(
            train_model,
            env=ShardingEnv.from_process_group(world),
            device=device,
            plan=planner.collective_plan(train_model, sharders, world),
            sharders=sharders,
        )
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.optimizer = CombinedOptimizer(
            [
                self.model.fused_optimizer,
                KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=DENSE_RATE)),
            ]
        )
        self.device = device
        self.pipeline = TrainPipelineSparseDist(self.model, self.optimizer, device)
        self.timer = CallTimer(model.regroup)
        self.step_seconds: list[float] = []
        self.losses: list[Tensor] = []
        self._unused = [tensor.clone() for tensor in self.unused_table()]

    def step(self, batches: Iterator[Batch]) -> bool:
        """One step; False when there are no more batches."""
        started = time.perf_counter()
        try:
            loss, _, _ = self.pipeline.progress(batches)
        except StopIteration:
            return False
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.step_seconds.append(time.perf_counter() - started)
        self.losses.append(loss)
        return True

    @torch.no_grad()
    def predict(self, data: MovieLens, rows: Tensor) -> Tensor:
        """Logits of the interactions ``rows``, computed by all processes together; on each of them, in order."""
        rank, size = dist.get_rank(), dist.get_world_size()
        model = self.pipeline.detach().eval()
        # The collectives inside want equally many calls of every process.
        places = torch.arange(rows.numel()).tensor_split(size * -(-rows.numel() // EVALUATION_BATCH_SIZE))
        mine = places[rank::size]
        logits = [model(data.batch(rows[part]).to(self.device))[1][1].cpu() for part in mine]
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, (torch.cat(mine), torch.cat(logits)))
        found = torch.empty(rows.numel())
        for where, values in gathered:
            found[where] = values
        self.pipeline.attach(model.train())
        return found

    def local_tensors(self) -> dict[str, list[Tensor]]:
        """The weights that this process holds, by name."""
        return {
            name: [shard.tensor for shard in value.local_shards()]
            if isinstance(value, ShardedTensor)
            else [value]
            for name, value in self.model.state_dict().items()
        }

    def unused_table(self) -> list[Tensor]:
        """What this process holds of the table of the key that no group uses."""
        return [t for name, held in self.local_tensors().items() if f"t_{UNUSED_KEY}." in name for t in held]

    def unused_table_changed(self) -> bool:
        """Whether that table has changed anywhere since the start; it should not."""
        changed = any(not torch.equal(now, then) for now, then in zip(self.unused_table(), self._unused))
        total = torch.tensor([float(changed)], device=self.device)
        dist.all_reduce(total)
        return bool(total.item())

    def where_tables_are(self) -> dict[str, str]:
        """Kind of sharding and processes of each table."""
        return {
            table: f"{how.sharding_type} on {','.join(map(str, how.ranks))}"
            for tables in self.model.plan.plan.values()
            for table, how in tables.items()  # pyright: ignore[reportAttributeAccessIssue]
        }


def batches_of(data: MovieLens, rows: Tensor, batch_size: int, shuffle: torch.Generator) -> Iterator[Batch]:
    """This process's parts of the global batches of ``rows``, equally large on all processes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = rows[torch.randperm(rows.numel(), generator=shuffle)]
    rows = rows[: rows.numel() - rows.numel() % size]
    for part in rows.split(batch_size):
        yield data.batch(part[rank::size])


def train(trainers: dict[str, Trainer], data: MovieLens, args: argparse.Namespace) -> dict[str, Any]:
    """Train all models on the same batches; stop by the scores of the first, which keeps its best weights."""
    split = split_interactions(data.rating.numel())
    first = next(iter(trainers.values()))
    shuffle = torch.Generator().manual_seed(args.seed)
    best_loss, best_epoch, epoch = float("inf"), 0, 0
    best: dict[str, list[Tensor]] = {}
    validation: list[Scores] = []
    total = args.epochs * -(-split.train.numel() // args.batch_size)
    with tqdm(total=min(total, args.max_steps or total), unit="step", disable=dist.get_rank() != 0) as bar:
        for epoch in range(1, args.epochs + 1):
            bar.set_description(f"epoch {epoch}/{args.epochs}")
            steps = list(batches_of(data, split.train, args.batch_size, shuffle))
            if args.max_steps is not None:
                steps = steps[: args.max_steps - len(first.losses)]
            sources = {name: iter(steps) for name in trainers}
            going = True
            while going:
                went = [trainer.step(sources[name]) for name, trainer in trainers.items()]
                going = all(went)
                bar.update(going)
            scores = Scores.of(first.predict(data, split.validation), data.label[split.validation])
            validation.append(scores)
            bar.set_postfix(val_auc=f"{scores.auc:.4f}", val_loss=f"{scores.log_loss:.4f}")
            if scores.log_loss < best_loss:
                best_loss, best_epoch = scores.log_loss, epoch
                best = {name: [t.clone() for t in held] for name, held in first.local_tensors().items()}
            if epoch - best_epoch >= PATIENCE or len(first.losses) == args.max_steps:
                break
    with torch.no_grad():
        for name, held in first.local_tensors().items():
            for tensor, kept in zip(held, best[name]):
                tensor.copy_(kept)
    test = Scores.of(first.predict(data, split.test), data.label[split.test])
    return {
        "processes": dist.get_world_size(),
        "backend": dist.get_backend(),
        "seed": args.seed,
        "batch_size": args.batch_size,
        "steps": len(first.losses),
        "best_epoch": best_epoch,
        "test": asdict(test),
        "validation": [asdict(scores) for scores in validation],
        "tables": first.where_tables_are(),
        "models": {
            name: {
                "median_step_ms": 1e3 * statistics.median(trainer.step_seconds),
                "median_regroup_us": 1e6 * statistics.median(trainer.timer.seconds),
                "unused_table_changed": trainer.unused_table_changed(),
                "train_losses": [loss.item() for loss in trainer.losses],
            }
            for name, trainer in trainers.items()
        },
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Train the MovieLens model with sharded embedding tables; run it by torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--regroup", choices=REGROUP_CHOICES, default="torchrec_kt", help="whose KTRegroupAsDict"
    )
    parser.add_argument(
        "--compare", action="store_true", help="train one with the other module along, for its step time"
    )
    parser.add_argument("--epochs", type=positive_int, default=15, help="most passes over the train split")
    parser.add_argument(
        "--batch-size", type=positive_int, default=512, help="interactions a step, on all processes"
    )
    parser.add_argument("--max-steps", type=positive_int, metavar="N", help="quick run: stop after N steps")
    parser.add_argument(
        "--seed", type=seed_number, default=0, help="of the initial weights, the batches and the dropout"
    )
    parser.add_argument(
        "--data", metavar="DIR", help="folder of the MovieLens-100K files; found in recbole by default"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error(
            "run this by torchrun: torchrun --standalone --nproc_per_node 2 examples/train_distributed.py"
        )
    return args


def print_results(results: dict[str, Any]) -> None:
    """Print scores, times and where the tables are."""
    print(
        f"\n{results['processes']} processes over {results['backend']}; {results['steps']} steps of "
        f"{results['batch_size']} interactions, best epoch {results['best_epoch']}"
    )
    for table, where in results["tables"].items():
        print(f"  {table:16}{where}")
    print(f"test AUC {results['test']['auc']:.4f}, log loss {results['test']['log_loss']:.4f} nats")
    # The regroup is where the first use of the embeddings waits for them to arrive.
    print(f"{'':14}{'step, ms':>10}{'wait and regroup, us':>22}   table of the unused key {UNUSED_KEY!r}")
    for name, model in results["models"].items():
        changed = "CHANGED" if model["unused_table_changed"] else "unchanged"
        print(f"{name:14}{model['median_step_ms']:10.2f}{model['median_regroup_us']:22.1f}   {changed}")


def main(argv: list[str] | None = None) -> int:
    """Run the example; return the exit status."""
    args = parse_args(argv)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    try:
        data = load_movielens(args.data)
    except DataError as error:  # the same on every process
        print(f"error: {error}", file=sys.stderr)
        dist.destroy_process_group()
        return 1
    names = [args.regroup, *(name for name in REGROUP_CHOICES if args.compare and name != args.regroup)]
    results = train({name: Trainer(data, name, device, args.seed) for name in names}, data, args)
    dist.barrier()  # whoever left while others still read from it could end badly
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print_results(results)
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
