"""A rank that raises says why, and does not keep the others beyond the time-out of the process group."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_kt.ops import UnknownKeyError

from .models import Batch, Model, WithLoss, local_batches, make_regroup, shard
from .world import COLLECTIVE_TIMEOUT, ROOT, environment, in_world

SECONDS = 5
"""The time-out of the process group."""


class Spoilt(Model):
    """Regroups what ``spoil`` makes of the output of the first collection."""

    def __init__(self, spoil: Callable[[KeyedTensor], KeyedTensor]) -> None:
        super().__init__(make_regroup())
        self.spoil = spoil

    def groups(self, batch: Batch) -> dict[str, torch.Tensor]:
        return self.regroup([self.spoil(self.ebc(batch.plain)), self.webc(batch.weighted)])


def of(kt: Any, keys: list[str] | None = None, values: torch.Tensor | None = None) -> KeyedTensor:
    return KeyedTensor(keys or kt.keys(), kt.length_per_key(), kt.values() if values is None else values)


def renamed(kt: Any, old: str, new: str) -> list[str]:
    return [new if key == old else key for key in list(kt.keys())]


FAULTS: dict[str, tuple[Callable[[Any], KeyedTensor], type[Exception], str]] = {
    "missing key": (
        lambda kt: of(kt, renamed(kt, "f3", "g3")),
        UnknownKeyError,
        "key 'f3', named by groups",
    ),
    "repeated key": (
        lambda kt: of(kt, renamed(kt, "f3", "f1")),
        ValueError,
        "key 'f1', used by groups",
    ),
    "too narrow": (lambda kt: of(kt, None, kt.values()[:, :-1]), ValueError, r"values\[0\]"),
    "another batch": (
        lambda kt: of(kt, None, kt.values()[:-1]),
        ValueError,
        r"values\[1\] has shape \(12, 12\)",
    ),
}


@in_world(2, fault=FAULTS, quick=lambda world, fault: fault == "missing key")
def test_one_rank_raises(fault: str) -> None:
    spoil, error, message = FAULTS[fault]
    group = dist.new_group(timeout=datetime.timedelta(seconds=SECONDS))
    model = Spoilt(spoil if dist.get_rank() == 1 else lambda kt: kt)
    env = ShardingEnv.from_process_group(group)  # pyright: ignore[reportArgumentType]
    sharded = shard(WithLoss(model, 2), "table_wise", env=env)
    (batch,) = local_batches([1])
    started = time.monotonic()
    if dist.get_rank() == 1:
        with pytest.raises(error, match=message):
            sharded(batch)
    else:
        loss, _ = sharded(batch)  # its own rows are right
        # Gloo says the one or the other, by which of its threads notices first.
        says = rf"Timed out waiting {SECONDS}000ms|Application timeout caused pair closure"
        with pytest.raises(RuntimeError, match=says):
            loss.backward()
    assert time.monotonic() - started < COLLECTIVE_TIMEOUT.total_seconds()  # that of the other groups


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.distributed
def test_a_process_that_ends_by_an_error_ends_its_job() -> None:
    done = subprocess.run(
        [*TORCHRUN, "-m", "tests.distributed.test_failures"],
        cwd=ROOT,
        env={k: v for k, v in environment().items() if k not in ("RANK", "WORLD_SIZE")},
        capture_output=True,
        text=True,
        timeout=500,  # of a job that would hang
    )
    assert done.returncode != 0
    assert "UnknownKeyError: key 'f3', named by groups[1], is in none of the inputs" in done.stderr
    assert "Connection closed by peer" in done.stderr or "SIGTERM" in done.stderr  # what became of the other
    assert "rank 0 is through" not in done.stdout


def main() -> None:
    """A job of two processes, of which one is given a batch without a key."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    model = Spoilt(FAULTS["missing key"][0] if dist.get_rank() == 1 else lambda kt: kt)
    sharded = shard(WithLoss(model, dist.get_world_size()), "table_wise")
    for batch in local_batches(range(1, 100)):
        sharded(batch)[0].backward()
    print(f"rank {os.environ['RANK']} is through", flush=True)


if __name__ == "__main__":
    main()
