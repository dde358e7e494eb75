"""Train the MovieLens-100K model and compare it with a bias-only baseline.

Run from the root of the repository, either way::

    python examples/movielens/train.py
    python -m examples.movielens.train --regroup torchrec

The task is to tell ratings of 4 or 5 from lower ones. The 100,000 interactions are cut at
random into 80% train, 10% validation and 10% test, by a fixed seed that does not depend on
``--seed`` (see ``data.py``). Training minimises the mean binary cross entropy with Adam, stops
when the validation log loss has not improved for ``PATIENCE`` epochs, and goes back to the best
weights. The sizes and rates below were chosen on the validation split; the test split is scored
once, at the end.

The baseline is a logistic model of a global mean, a user bias and an item bias, fitted on the
same train split in the same run. The exit status is 0 when the model beats it on test AUC and
test log loss, 1 when it does not or the data cannot be read, 2 for a wrong option.
``--max-steps`` makes a quick run that skips this check.

Two times are printed, both medians over the training steps: a whole step (forward, backward and
optimiser, in milliseconds, without building the batch), and the regroup call in forward (in
microseconds). Run with both values of ``--regroup`` to compare. Given one seed and one thread
the losses of the two are the same, bit for bit: regrouping only copies, and the gradient of a
key that is used twice is the same sum of two terms.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

if __package__ in (None, ""):
    # Run as a file: Python then puts this folder, not the repository root, on the path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.movielens.baseline import fit_baseline
from examples.movielens.data import (
    SPLIT_SEED,
    DataError,
    MovieLens,
    Split,
    load_movielens,
    split_interactions,
)
from examples.movielens.metrics import Scores
from examples.movielens.model import (
    REGROUP_CHOICES,
    UNUSED_KEY,
    MovieLensModel,
    MovieLensTrainModel,
    regroup_factory,
)

EMBEDDING_RATE = 3e-3
EMBEDDING_L2 = 3e-4
DENSE_RATE = 1e-3
PATIENCE = 4
EVALUATION_BATCH_SIZE = 5_000


class CallTimer:
    """Times the forward calls of a module in training mode, in seconds, through two hooks.

    Calls in evaluation mode are left out. The clock is the host's.
    """

    def __init__(self, module: nn.Module) -> None:
        self.seconds: list[float] = []
        self._started = 0.0
        self._handles = [
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after),
        ]

    def _before(self, module: nn.Module, args: Any) -> None:
        self._started = time.perf_counter()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        elapsed = time.perf_counter() - self._started
        if module.training:
            self.seconds.append(elapsed)

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()


@dataclass
class History:
    """What training recorded.

    Attributes:
        train_losses: mean binary cross entropy in nats of each step's batch, in order.
        step_seconds: time of each step.
        regroup_seconds: time of the regroup call in the forward pass of each step.
        unused_gradient_steps: number of steps with a non-zero gradient in the table of the key
            that no group uses.
        validation: scores after each epoch.
        best_epoch: number, from 1, of the epoch whose weights were kept.
    """

    train_losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    regroup_seconds: list[float] = field(default_factory=list)
    unused_gradient_steps: int = 0
    validation: list[Scores] = field(default_factory=list)
    best_epoch: int = 0


def make_optimizer(model: nn.Module) -> torch.optim.Adam:
    """Adam with a higher rate, and an L2 penalty, for the embedding tables."""
    embeddings: list[nn.Parameter] = []
    dense: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (embeddings if "embedding_bags" in name else dense).append(parameter)
    return torch.optim.Adam(
        [
            {"params": embeddings, "lr": EMBEDDING_RATE, "weight_decay": EMBEDDING_L2},
            {"params": dense, "lr": DENSE_RATE},
        ]
    )


@torch.no_grad()
def predict(model: MovieLensModel, data: MovieLens, rows: Tensor) -> Tensor:
    """Return the logits of the interactions ``rows``, float32 ``[len(rows)]``, in their order."""
    was_training = model.training
    model.eval()
    logits = [model(batch) for batch in data.batches(rows, EVALUATION_BATCH_SIZE)]
    model.train(was_training)
    return torch.cat(logits)


def train(
    model: MovieLensModel,
    data: MovieLens,
    split: Split,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    max_steps: int | None = None,
) -> History:
    """Train ``model`` in place and leave it with its best weights on the validation split.

    Args:
        epochs: most passes over the train split.
        batch_size: interactions a step.
        seed: of the order of the batches.
        max_steps: stop after so many steps; ``None`` for no such limit.
    """
    train_model = MovieLensTrainModel(model).train()
    optimizer = make_optimizer(model)
    shuffle = torch.Generator().manual_seed(seed)
    history = History()
    best_loss = float("inf")
    best_weights = copy.deepcopy(model.state_dict())
    unused = model.user_embeddings.embedding_bags.get_parameter(f"t_{UNUSED_KEY}.weight")
    timer = CallTimer(model.regroup)

    steps_an_epoch = -(-split.train.numel() // batch_size)
    total = epochs * steps_an_epoch
    with tqdm(total=total if max_steps is None else min(total, max_steps), unit="step") as bar:
        for epoch in range(1, epochs + 1):
            bar.set_description(f"epoch {epoch}/{epochs}")
            for batch in data.batches(split.train, batch_size, shuffle):
                started = time.perf_counter()
                optimizer.zero_grad()
                loss, _ = train_model(batch)
                loss.backward()
                optimizer.step()
                history.step_seconds.append(time.perf_counter() - started)
                history.train_losses.append(loss.item())
                # NaN counts as non-zero, as it should here.
                if unused.grad is not None and int(unused.grad.count_nonzero()) > 0:
                    history.unused_gradient_steps += 1
                bar.update()
                if len(history.train_losses) == max_steps:
                    break
            scores = Scores.of(predict(model, data, split.validation), data.label[split.validation])
            history.validation.append(scores)
            bar.set_postfix(val_auc=f"{scores.auc:.4f}", val_loss=f"{scores.log_loss:.4f}")
            if scores.log_loss < best_loss:
                best_loss = scores.log_loss
                best_weights = copy.deepcopy(model.state_dict())
                history.best_epoch = epoch
            if epoch - history.best_epoch >= PATIENCE or len(history.train_losses) == max_steps:
                break
    timer.remove()
    history.regroup_seconds = timer.seconds
    model.load_state_dict(best_weights)
    return history


def positive_int(text: str) -> int:
    """Parse a whole number of 1 or more, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given, expected a whole number of 1 or more")
    return value


def seed_number(text: str) -> int:
    """Parse a seed that a torch generator takes, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} given, expected a whole number of 0 to 2**63 - 1")
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Train a click-through-style model on MovieLens-100K, regrouping its "
        "embeddings with KTRegroupAsDict, and compare it with a bias-only baseline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--regroup", choices=REGROUP_CHOICES, default="torchrec_kt", help="whose KTRegroupAsDict"
    )
    parser.add_argument("--epochs", type=positive_int, default=30, help="most passes over the train split")
    parser.add_argument("--batch-size", type=positive_int, default=512, help="interactions a step")
    parser.add_argument(
        "--max-steps",
        type=positive_int,
        metavar="N",
        help="quick run: stop after N steps and do not require the model to beat the baseline",
    )
    parser.add_argument(
        "--seed",
        type=seed_number,
        default=0,
        help="of the initial weights, the batches and the dropout",
    )
    parser.add_argument(
        "--threads",
        type=positive_int,
        default=1,
        help="CPU threads; the tensors are too small to gain from more",
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="folder of ml-100k.inter, ml-100k.item and ml-100k.user; found in the installed "
        "recbole package by default",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    args = parser.parse_args(argv)
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(
            f"argument --json: {str(args.json)!r} given, expected a file name in a folder that exists"
        )
    return args


def print_results(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Print the results table and the times."""
    print(f"\nTest split, {results['split']['test']:,} interactions")
    print(f"{'':20}{'AUC':>8}{'log loss (nats)':>18}")
    for name in ("baseline", "model"):
        scores = results[name]
        title = "bias-only baseline" if name == "baseline" else "model"
        print(f"{title:20}{scores['auc']:8.4f}{scores['log_loss']:18.4f}")
    steps = results["steps"]
    print(f"\nRegroup: {args.regroup}; {steps} steps of {args.batch_size} interactions")
    print(f"  median step time      {results['median_step_ms']:8.2f} ms")
    print(f"  median regroup call   {results['median_regroup_us']:8.1f} us (forward)")
    print(
        f"  unused key {UNUSED_KEY!r}: non-zero gradient in "
        f"{results['unused_gradient_steps']} of {steps} steps (expected 0)"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the example; return the exit status."""
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    try:
        data = load_movielens(args.data)
        regroup = regroup_factory(args.regroup)
    except (DataError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    split = split_interactions(data.rating.numel())
    baseline = fit_baseline(data, split)
    torch.manual_seed(args.seed)
    model = MovieLensModel(data.vocabulary_sizes, regroup, device=torch.device("cpu"))
    history = train(
        model,
        data,
        split,
        epochs=args.epochs,
        batch_size=args.batch_size,
        seed=args.seed,
        max_steps=args.max_steps,
    )

    labels = data.label[split.test]
    baseline_scores = Scores.of(baseline.logits(data, split.test), labels)
    model_scores = Scores.of(predict(model, data, split.test), labels)
    results: dict[str, Any] = {
        "regroup": args.regroup,
        "seed": args.seed,
        "split_seed": SPLIT_SEED,
        "split": {name: rows.numel() for name, rows in vars(split).items()},
        "batch_size": args.batch_size,
        "steps": len(history.train_losses),
        "best_epoch": history.best_epoch,
        "baseline_l2": baseline.l2,
        "baseline": asdict(baseline_scores),
        "model": asdict(model_scores),
        "median_step_ms": 1e3 * statistics.median(history.step_seconds),
        "median_regroup_us": 1e6 * statistics.median(history.regroup_seconds),
        "unused_gradient_steps": history.unused_gradient_steps,
        "validation": [asdict(scores) for scores in history.validation],
        "train_losses": history.train_losses,
    }
    print_results(args, results)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    if args.max_steps is not None:
        print(f"\nQuick run (--max-steps {args.max_steps}): the model was not required to beat the baseline.")
        return 0
    if model_scores.auc > baseline_scores.auc and model_scores.log_loss < baseline_scores.log_loss:
        print("\nThe model beats the baseline on both figures.")
        return 0
    print(
        "\nerror: the model does not beat the bias-only baseline on both figures: AUC "
        f"{model_scores.auc:.4f} against {baseline_scores.auc:.4f}, log loss "
        f"{model_scores.log_loss:.4f} against {baseline_scores.log_loss:.4f}. Train it longer "
        "(--epochs) or go back to the default options.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
