"""Cases that do not pass, for the test of the harness itself."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from .world import in_world


@in_world(2)
def adds_up() -> None:
    ranks = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(ranks)
    assert ranks.item() == 3.0
    assert torch.get_num_threads() == 1


@in_world(2)
def raises_on_one_rank() -> None:
    assert dist.get_rank() == 0, "not the first"


@in_world(2)
def ends_one_process() -> None:
    if dist.get_rank() == 1:
        print("last words", flush=True)
        os._exit(3)
    dist.barrier()
