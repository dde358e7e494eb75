"""Ours beside the peers on a CPU, workload by workload.

    python -m torchrec_kt.benchmark.cpu                     # every workload
    python -m torchrec_kt.benchmark.cpu --only serving      # those whose name holds the word
    python -m torchrec_kt.benchmark.cpu --json cpu.json
    python -m torchrec_kt.benchmark.cpu --only "ctr small" --json cpu.json --merge   # anew, beside the others
    python -m torchrec_kt.benchmark.cpu --from cpu.json --readme README.md   # its table, generated

Candidates run interleaved; figures are medians of the rounds, and ratios say how many times as fast
ours is. *Bare* is the floor: the fastest of the ways to move the columns, as torch calls with their
indices at hand and nothing around them; with backward, inside an autograd function that does nothing
else. *Match* compares with slicing by key: forward bit for bit, gradients to rounding. Memory is
what the peak of the process grew by during one call, over the bytes that the call returns.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchrec
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.regroup import KTRegroupAsDict as TorchRecKTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedTensor, _regroup_keyed_tensors

from .. import __version__
from ..modules import KTRegroupAsDict, regroup
from ..ops import RegroupPlan
from ..ops.torch_impl import Strategy, TensorMeta, compile_map, strategy_counts
from .calibrate import cpu_name
from .timing import interleaved, medians
from .workloads import Workload, function_workloads

_STRATEGIES: tuple[Strategy, ...] = ("slices", "columns", "rows")
# The floor is measured for inputs of no more than this; beyond, memory decides.
_FLOOR_MEGABYTES = 50
# Above this many copied keys times rows, fewer rounds do: TorchRec's module takes 2 us for each.
_SLOW_STRIPS = 300_000

Regroup = Callable[[list[KeyedTensor]], list[Tensor]]


def candidates(workload: Workload, with_module: bool) -> dict[str, Regroup]:
    """Ours first, then the peers that can run this workload."""
    groups, names = workload.groups, workload.names
    emb_dtype = DataType.BF16 if workload.cast == torch.bfloat16 else None
    ours = KTRegroupAsDict(groups, names, emb_dtype)
    found: dict[str, Regroup] = {"ours": lambda kts: list(ours(kts).values())}
    if emb_dtype is None:
        found["ours, function"] = lambda kts: regroup(kts, groups)
        found["regroup"] = lambda kts: KeyedTensor.regroup(kts, groups)
        found["cat/split"] = lambda kts: _regroup_keyed_tensors(kts, groups)
    else:
        found["regroup"] = lambda kts: [t.to(workload.cast) for t in KeyedTensor.regroup(kts, groups)]
        found["cat/split"] = lambda kts: [t.to(workload.cast) for t in _regroup_keyed_tensors(kts, groups)]
    if with_module:
        theirs = TorchRecKTRegroupAsDict(groups, names, emb_dtype)
        found["module"] = lambda kts: list(theirs(kts).values())
    return found


def reference(workload: Workload, keyed_tensors: list[KeyedTensor]) -> list[Tensor]:
    """Slicing by key, then concatenating."""
    place: dict[str, Tensor] = {}
    for kt in keyed_tensors:
        for key, part in zip(kt.keys(), kt.values().split(kt.length_per_key(), 1)):
            place[key] = part
    outputs = [torch.cat([place[key] for key in group], 1) for group in workload.groups]
    return outputs if workload.cast is None else [t.to(workload.cast) for t in outputs]


def matches(workload: Workload, candidate: Regroup) -> bool:
    """Forward bit for bit; gradients too, but for keys used repeatedly, whose sums may round otherwise."""
    leaves = workload.keyed_tensors(requires_grad=True)
    tensors = [kt.values() for kt in leaves]
    outputs, expected = candidate(leaves), reference(workload, leaves)
    if not all(map(torch.equal, outputs, expected)):
        return False
    grads = [torch.randn_like(t) for t in outputs]
    got = torch.autograd.grad(outputs, tensors, grads, materialize_grads=True)
    exact = torch.autograd.grad(expected, tensors, grads, materialize_grads=True)
    if workload.uses == len({key for group in workload.groups for key in group}):
        return all(map(torch.equal, got, exact))
    # A sum of n terms may differ by n roundings.
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(got, exact))


def bare_calls(workload: Workload) -> tuple[dict[str, Regroup], Regroup]:
    """The torch calls alone: in each of the ways that can serve, and forward and backward as chosen."""
    column_map = RegroupPlan.build(list(zip(workload.keys, workload.widths)), workload.groups).column_map
    dtype = workload.cast or workload.dtype
    cpu = torch.device("cpu")

    def metas(widths: tuple[int, ...], dtype: torch.dtype) -> list[TensorMeta]:
        return [TensorMeta((workload.batch, width), dtype, cpu) for width in widths]

    inputs = metas(column_map.in_widths, workload.dtype)
    transposed = column_map.transpose()
    forward = compile_map(column_map, inputs, dtype, 1)
    backward = compile_map(transposed, metas(column_map.out_widths, dtype), workload.dtype, 1)

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
            return tuple(forward(values))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return tuple(backward(grads))

    ways = {
        f"bare {s}": compile_map(column_map, inputs, dtype, 1, s)
        for s in _STRATEGIES
        if strategy_counts(column_map, inputs, dtype, 1, s) is not None
    }
    return (
        {name: lambda kts, run=run: run([kt.values() for kt in kts]) for name, run in ways.items()}
        | {"bare": lambda kts: forward([kt.values() for kt in kts])},
        lambda kts: list(Bare.apply(*[kt.values() for kt in kts])),  # pyright: ignore[reportGeneralTypeIssues]
    )


def time_workload(workload: Workload, rounds: int, with_module: bool) -> dict[str, Any]:
    """Seconds of every candidate, forward and forward + backward, and of a clone of the inputs."""
    found = candidates(workload, with_module)
    bare, bare_both = bare_calls(workload) if workload.megabytes < _FLOOR_MEGABYTES else ({}, None)
    plain, leaves = workload.keyed_tensors(False), workload.keyed_tensors(True)
    tensors = [kt.values() for kt in leaves]
    grads = [torch.ones_like(t) for t in found["ours"](plain)]

    def forward(run: Regroup) -> Callable[[], Any]:
        def call() -> None:
            with torch.no_grad():
                run(plain)

        return call

    def both(run: Regroup) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(run(leaves), tensors, grads, allow_unused=True)

    result: dict[str, Any] = {
        "name": workload.name,
        "match": matches(workload, found["ours"]),
        "megabytes": workload.megabytes,
        "forward": medians(
            interleaved(
                {"clone": lambda: [kt.values().clone() for kt in plain]}
                | {name: forward(run) for name, run in (found | bare).items()},
                rounds,
            )
        ),
        "forward + backward": medians(
            interleaved(
                {name: both(run) for name, run in found.items()}
                | ({"bare": both(bare_both)} if bare_both else {}),
                rounds,
            )
        ),
    }
    if bare:
        # Kept apart from the choice, whose own calls are among them.
        forward_times = result["forward"]
        forward_times["bare"] = min(time for name, time in forward_times.items() if name.startswith("bare"))
    result["extra memory"] = _extra_memory(found["ours"], plain, leaves, tensors, grads)
    return result


def _extra_memory(
    run: Regroup,
    plain: list[KeyedTensor],
    leaves: list[KeyedTensor],
    tensors: list[Tensor],
    grads: list[Tensor],
) -> dict[str, float] | None:
    """Peak growth over the bytes returned, or None where the system does not tell."""

    def grown(call: Callable[[], Any]) -> float | None:
        gc.collect()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            before = _status("VmHWM")
            kept = call()
            after = _status("VmHWM")
        except OSError:
            return None
        size = sum(t.numel() * t.element_size() for t in kept if t is not None)
        # Small calls live in memory that the allocator holds already.
        return (after - before) / size if size > 64 << 20 else None

    outputs = run(leaves)
    figures = {
        "forward": grown(lambda: run(plain)),
        "backward": grown(lambda: torch.autograd.grad(outputs, tensors, grads, allow_unused=True)),
    }
    return {k: v for k, v in figures.items() if v is not None} or None


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"{field} is not in /proc/self/status")


def show(results: list[dict[str, Any]], console: Console) -> None:
    """Ratios: how many times as fast ours is."""
    for mode in ("forward", "forward + backward"):
        table = Table(title=f"{mode}: time of a peer over ours")
        table.add_column("workload")
        for heading in (
            "MB",
            "ours ms",
            "over clone",
            "function",
            "module",
            "regroup",
            "cat/split",
            "bare",
            "memory",
            "match",
        ):
            table.add_column(heading, justify="right")
        for result in results:
            times = result[mode]
            ours = times["ours"]

            def over(name: str, times: dict[str, float] = times, ours: float = ours) -> str:
                return f"{times[name] / ours:.2f}" if name in times else "-"

            memory = (result["extra memory"] or {}).get("forward" if mode == "forward" else "backward")
            table.add_row(
                result["name"],
                f"{result['megabytes']:.1f}",
                f"{ours * 1e3:.3f}",
                f"{ours / times['clone']:.2f}" if "clone" in times else "-",
                over("ours, function"),
                over("module"),
                over("regroup"),
                over("cat/split"),
                over("bare"),
                "-" if memory is None else f"{memory:.2f}",
                "yes" if result["match"] else "NO",
            )
        console.print(table)


def markdown(run: dict[str, Any]) -> str:
    """The same ratios as a Markdown table, with the conditions under it."""

    def ratio(times: dict[str, float], name: str) -> str:
        if name not in times:
            return "-"
        value = times[name] / times["ours"]
        return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 3 else f"{value:.2f}"

    lines = [
        "| workload | MB | module | `regroup` | cat/split | clone | bare calls | match |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for result in run["results"]:
        forward, both = result["forward"], result["forward + backward"]
        cells = [f"{ratio(forward, n)} / {ratio(both, n)}" for n in ("module", "regroup", "cat/split")]
        cells += [ratio(forward, "clone"), f"{ratio(forward, 'bare')} / {ratio(both, 'bare')}"]
        lines.append(
            f"| {result['name']} | {result['megabytes']:.1f} | {' | '.join(cells)} | "
            f"{'yes' if result['match'] else 'NO'} |"
        )
    made = run["provenance"]
    lines += [
        "",
        "Time of the peer over ours, forward / forward + backward. *module* is TorchRec's `KTRegroupAsDict` over "
        "FBGEMM, *regroup* `KeyedTensor.regroup`, *cat/split* TorchRec's `_regroup_keyed_tensors`, *clone* a "
        "`clone()` of the inputs, forward only. *bare calls*: the torch calls alone, indices at hand, inside an autograd function with "
        "backward; for inputs below 50 MB. *match*: equal to slicing by key, in the same run. "
        f"{made['cpu']}, {made['threads']} threads on {made['cores']} cores, torch {made['torch']}, torchrec "
        f"{made['torchrec']}, medians of interleaved rounds, {made['date']}.",
    ]
    return "\n".join(lines)


def write_into(readme: Path, table: str) -> None:
    """Replace what stands between the two marks."""
    begin, end = "<!-- cpu table: begin -->", "<!-- cpu table: end -->"
    text = readme.read_text()
    if begin not in text or end not in text:
        raise SystemExit(f"{readme} lacks the lines {begin} and {end}, between which the table goes")
    before, rest = text.split(begin, 1)
    readme.write_text(f"{before}{begin}\n{table}\n{end}{rest.split(end, 1)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="the workload of this name, or those whose name holds it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-megabytes", type=float, default=1100, help="leave out larger inputs")
    parser.add_argument(
        "--module-strips",
        type=int,
        default=1_044_480,
        help="leave TorchRec's module out above as many keys x rows",
    )
    parser.add_argument("--without-module", action="store_true", help="leave out TorchRec's slow module")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument(
        "--merge", action="store_true", help="keep the figures of other workloads that the file holds"
    )
    parser.add_argument(
        "--from", type=Path, dest="source", help="show the figures of this file, measure nothing"
    )
    parser.add_argument("--readme", type=Path, help="put the table into this file, between its marks")
    arguments = parser.parse_args()
    console = Console(width=150)
    run = json.loads(arguments.source.read_text()) if arguments.source else measure(arguments, parser)
    show(run["results"], console)
    if arguments.json and arguments.merge and arguments.json.exists():
        run["results"] = merged(json.loads(arguments.json.read_text())["results"], run["results"])
    if arguments.json:
        arguments.json.write_text(json.dumps(run, indent=1) + "\n")
    if arguments.readme:
        write_into(arguments.readme, markdown(run))
    if not all(result["match"] for result in run["results"]):
        raise SystemExit("some results do not match slicing by key, see the last column")


def merged(before: list[dict[str, Any]], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new results, and those before of other workloads, in the order of the workloads."""
    found = {result["name"]: result for result in before + results}
    return [found[name] for name in function_workloads() if name in found]


def measure(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Run the chosen workloads; the figures with where they come from."""
    torch.set_num_threads(arguments.threads)
    every = function_workloads()
    named = [every[arguments.only]] if arguments.only in every else every.values()
    chosen = [w for w in named if arguments.only in w.name and w.megabytes <= arguments.max_megabytes]
    if not chosen:
        parser.error(
            f"no workload's name holds {arguments.only!r}; there are {', '.join(function_workloads())}"
        )
    results: list[dict[str, Any]] = []
    for workload in track(chosen, description="workloads", console=Console(stderr=True)):
        strips = workload.uses * workload.batch
        rounds = min(arguments.rounds, 3) if strips > _SLOW_STRIPS else arguments.rounds
        with_module = not arguments.without_module and strips <= arguments.module_strips
        results.append(time_workload(workload, rounds, with_module))
    provenance = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "torch": torch.__version__,
        "torchrec": torchrec.__version__,
        "torchrec_kt": __version__,
    }
    return {"provenance": provenance, "results": results}


if __name__ == "__main__":
    main()
