"""The shapes to measure on, from ``workloads.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch

from ..ops import RegroupPlan

if TYPE_CHECKING:  # the operators are measured on machines without TorchRec, too
    from torchrec.sparse.jagged_tensor import KeyedTensor

__all__ = ["Workload", "function_workloads", "operator_workloads"]


@dataclass(frozen=True)
class Workload:
    """One regroup: keys and widths of each input, groups, batch and types."""

    name: str
    batch: int
    keys: list[list[str]]
    widths: list[list[int]]
    groups: list[list[str]]
    dtype: torch.dtype
    cast: torch.dtype | None
    note: str

    @property
    def names(self) -> list[str]:
        """A name for each group."""
        return [f"group_{g}" for g in range(len(self.groups))]

    @property
    def uses(self) -> int:
        """Number of keys copied, repeats included."""
        return sum(map(len, self.groups))

    @property
    def plan(self) -> RegroupPlan:
        """The plan, for the operators."""
        return RegroupPlan.build(layouts=list(zip(self.keys, self.widths)), groups=self.groups)

    @property
    def megabytes(self) -> float:
        """Size of the inputs."""
        return self.batch * sum(map(sum, self.widths)) * self.dtype.itemsize / 1e6

    def keyed_tensors(self, requires_grad: bool, batch: int | None = None) -> list[KeyedTensor]:
        """Fresh random inputs; the same ones on every call."""
        from torchrec.sparse.jagged_tensor import KeyedTensor

        generator = torch.Generator().manual_seed(0)
        rows = self.batch if batch is None else batch
        return [
            KeyedTensor(
                keys,
                widths,
                torch.randn(rows, sum(widths), generator=generator)
                .to(self.dtype)
                .requires_grad_(requires_grad),
            )
            for keys, widths in zip(self.keys, self.widths)
        ]


@cache
def function_workloads() -> dict[str, Workload]:
    """Every function-level workload by name."""
    return {entry["name"]: _workload(entry) for entry in _read()["function"]}


@cache
def operator_workloads() -> dict[str, Workload]:
    """Every operator-level workload by name; their groups are numbers of keys."""
    found: dict[str, Workload] = {}
    for entry in _read()["operator"]:
        groups = [[f"f{n}" for n in group] for group in entry["groups"]]
        found[entry["name"]] = Workload(
            entry["name"],
            entry["batch"],
            _names(entry["widths"]),
            entry["widths"],
            groups,
            torch.float32,
            None,
            "",
        )
    return found


def _read() -> dict[str, Any]:
    return json.loads(resources.files("torchrec_kt.benchmark").joinpath("workloads.json").read_text())


def _names(widths: list[list[int]]) -> list[list[str]]:
    keys: list[list[str]] = []
    for row in widths:
        first = sum(map(len, keys))
        keys.append([f"f{first + n}" for n in range(len(row))])
    return keys


def _workload(entry: dict[str, Any]) -> Workload:
    widths: list[list[int]] = entry.get("widths") or [[width] * count for count, width in entry["kts"]]
    keys = _names(widths)
    every = [key for row in keys for key in row]
    used = every[entry.get("skip", 0) :]
    count = entry["groups"]
    if entry["order"] == "block":
        groups = [used[len(used) * g // count : len(used) * (g + 1) // count] for g in range(count)]
    else:
        groups = [used[g::count] for g in range(count)]
    repeats = entry.get("repeats")
    if repeats == "one extra key per group":
        # A key of the next group, so that no group holds a key twice.
        groups = [[*group, groups[(g + 1) % count][0]] for g, group in enumerate(groups)]
    elif repeats:
        groups = [[*group, *[used[0]] * 16] for group in groups]
    cast = entry.get("cast")
    return Workload(
        name=entry["name"],
        batch=entry["batch"],
        keys=keys,
        widths=widths,
        groups=groups,
        dtype=getattr(torch, entry["dtype"]),
        cast=getattr(torch, cast) if cast else None,
        note=entry.get("note", ""),
    )
