"""How long graphs take to make, and how many it takes, beside TorchRec's module.

    python -m torchrec_kt.benchmark.graphs                      # the published layout of 1,020 keys
    python -m torchrec_kt.benchmark.graphs --workload "ctr small"
    python -m torchrec_kt.benchmark.graphs --json docs/benchmark/graphs.json --readme README.md

Each case makes a graph of a regroup and runs it once. *Cold* modules have seen no batch, *warm* ones
have; *tensors* means a model that builds its KeyedTensors itself, *KeyedTensors* one that is handed
them. Modules take turns within a round, and figures are medians of the rounds, in CPU seconds of the
thread that makes the graph, which other work on the machine does not stretch. *Graphs* is the number of
times the compiler ran for seven batch sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchrec.modules.regroup import KTRegroupAsDict as TorchRecKTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedTensor

from ..modules import KTRegroupAsDict
from .reporting import GRAPHS, write_into_readme
from .results import provenance
from .tables import Table
from .workloads import Workload, function_workloads

BATCHES = (7, 3, 11, 1, 0, 64, 7)
MODULES: dict[str, Any] = {"ours": KTRegroupAsDict, "theirs": TorchRecKTRegroupAsDict}


class FromTensors(nn.Module):
    """Builds the KeyedTensors of a workload from their values."""

    def __init__(self, regroup: nn.Module, workload: Workload) -> None:
        super().__init__()
        self.regroup = regroup
        self.keys, self.widths = workload.keys, workload.widths

    def forward(self, values: list[Tensor]) -> dict[str, Tensor]:
        return self.regroup([KeyedTensor(k, w, v) for k, w, v in zip(self.keys, self.widths, values)])


def compiled(takes: str, backend: str) -> Callable[[nn.Module, Workload, Callable[[], Any]], Any]:
    def make(module: nn.Module, workload: Workload, clock: Callable[[], Any]) -> None:
        kts = workload.keyed_tensors(False, batch=4)
        model = module if takes == "KeyedTensors" else FromTensors(module, workload)
        inputs = kts if takes == "KeyedTensors" else [kt.values() for kt in kts]
        clock()
        torch.compile(model, fullgraph=True, backend=backend)(inputs)

    return make


def exported(strict: bool) -> Callable[[nn.Module, Workload, Callable[[], Any]], Any]:
    def make(module: nn.Module, workload: Workload, clock: Callable[[], Any]) -> None:
        values = [kt.values() for kt in workload.keyed_tensors(False, batch=4)]
        batch = torch.export.Dim("batch", min=1)
        clock()
        torch.export.export(
            FromTensors(module, workload),
            (values,),
            dynamic_shapes=([{0: batch} for _ in values],),
            strict=strict,
        )

    return make


def traced(tracer: Callable[[nn.Module], Any]) -> Callable[[nn.Module, Workload, Callable[[], Any]], Any]:
    def make(module: nn.Module, workload: Workload, clock: Callable[[], Any]) -> None:
        clock()
        tracer(module)

    return make


# Without a plan, scripts and traces of TorchRec's module fail when they run, so there only warm ones count.
WAYS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "compile, tensors": (("cold", "warm"), compiled("tensors", "aot_eager")),
    "compile, KeyedTensors": (("cold", "warm"), compiled("KeyedTensors", "aot_eager")),
    "export": (("cold", "warm"), exported(False)),
    "export, strict": (("cold", "warm"), exported(True)),
    "jit.script": (("warm",), traced(torch.jit.script)),
    "torch.fx": (("warm",), traced(torch.fx.symbolic_trace)),
}


def seconds_to_make(name: str, state: str, way: Callable[..., Any], workload: Workload) -> float:
    """CPU time from a module to the first result of its graph, with nothing compiled before.

    Without garbage collection, as ``timeit`` does it: a full collection takes a quarter of the time of a
    compilation, and into whose time it falls is chance. So it is with memory that Python has to ask the system
    for, which takes up to a tenth of an export: there is enough at hand.
    """
    torch._dynamo.reset()
    module = MODULES[name](workload.groups, workload.names)
    if state == "warm":
        module(workload.keyed_tensors(False, batch=2))
    started = time.thread_time()

    def clock() -> None:
        nonlocal started
        gc.collect()
        gc.disable()
        memory.extend(memory_at_hand())
        started = time.thread_time()

    memory: list[Any] = []
    try:
        way(module, workload, clock)
        return time.thread_time() - started
    finally:
        gc.enable()


def memory_at_hand() -> list[Any]:
    """Makes Python ask for some 50 MB, and keeps it from giving them back while the result is held."""
    return [[] for _ in range(600_000)][::3_000]  # some of each of the pieces that it asks for


def number_of_graphs(name: str, takes: str, dynamic: bool | None, workload: Workload) -> int:
    """How often the compiler runs for ``BATCHES``."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    module = MODULES[name](workload.groups, workload.names)
    model = module if takes == "KeyedTensors" else FromTensors(module, workload)
    call = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=counter)
    for batch in BATCHES:
        kts = workload.keyed_tensors(False, batch=batch)
        call(kts if takes == "KeyedTensors" else [kt.values() for kt in kts])
    return counter.frame_count


def measure(workload: Workload, rounds: int, only: str = "") -> list[dict[str, Any]]:
    """One row per way and state."""
    cases = [(way, state) for way, (states, _) in WAYS.items() if only in way for state in states]
    rows: list[dict[str, Any]] = []
    for way, state in track(cases, description="timing"):
        times: dict[str, list[float]] = {name: [] for name in MODULES}
        for turn in range(rounds + 1):
            # Who comes first in a round pays for memory that the one before has given back.
            for name in sorted(MODULES, reverse=turn % 2 == 0):
                seconds = seconds_to_make(name, state, WAYS[way][1], workload)
                if turn:  # the first round pays for imports
                    times[name].append(seconds)
        rows.append(
            {"way": way, "module": state} | {name: statistics.median(found) for name, found in times.items()}
        )
    return rows


def graph_counts(workload: Workload) -> list[dict[str, Any]]:
    """One row per kind of input and setting of ``dynamic``."""
    return [
        {"takes": takes, "dynamic": dynamic}
        | {name: number_of_graphs(name, takes, dynamic, workload) for name in MODULES}
        for takes in ("tensors", "KeyedTensors")
        for dynamic in (None, True)
    ]


def tables(result: dict[str, Any]) -> list[Table]:
    """What was measured."""
    times = [
        [row["way"], row["module"], f"{row['ours']:.3f}", f"{row['theirs']:.3f}"] for row in result["times"]
    ]
    counts = [
        [row["takes"], str(row["dynamic"]), str(row["ours"]), str(row["theirs"])] for row in result["graphs"]
    ]
    return [
        Table("", ("graph", "module", "ours, s", "TorchRec, s"), times, left=2),
        Table("", ("inputs", "dynamic", "graphs, ours", "graphs, TorchRec"), counts, left=2),
    ]


def readme_section(result: dict[str, Any]) -> str:
    """The tables and what they hold for."""
    times, counts = tables(result)
    return (
        f"{times.markdown()}\n\nCPU seconds of the thread that makes the graph, aot_eager, medians of "
        f"{result['rounds']} rounds, modules in turns; workload `{result['workload']}`. {result['cpu']}, "
        f"torch {result['torch']}, torchrec {result['torchrec']}, {result['date'][:10]}. Graphs that the compiler "
        f"makes for batches of {', '.join(map(str, result['batches']))}:\n\n{counts.markdown()}"
    )


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workload", default="published", choices=sorted(function_workloads()))
    parser.add_argument("--counts-workload", default="ctr small", choices=sorted(function_workloads()))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="only the ways whose name holds this; all by default"
    )
    parser.add_argument(
        "--readme", type=Path, metavar="PATH", help="also write the tables between the marks of this file"
    )
    args = parser.parse_args(argv)
    workloads = function_workloads()
    result = provenance(torch.device("cpu")) | {
        "workload": args.workload,
        "rounds": args.rounds,
        "batches": BATCHES,
        "times": measure(workloads[args.workload], args.rounds, args.only),
        "graphs": graph_counts(workloads[args.counts_workload]),
    }
    console = Console()
    for table in tables(result):
        console.print(table.rich())
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.readme is not None:
        write_into_readme(args.readme, readme_section(result), GRAPHS)


if __name__ == "__main__":
    main()
