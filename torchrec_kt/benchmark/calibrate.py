"""Fit the constants of :mod:`torchrec_kt.ops.cost` on this machine.

    python -m torchrec_kt.benchmark.calibrate            # measure, fit, write ops/cost.json
    python -m torchrec_kt.benchmark.calibrate --refit    # fit again from the measurements on disk
    python -m torchrec_kt.benchmark.calibrate --add --seed 1    # measure more, beside those on disk

A seed added once more measures the same again and keeps the lower times.

Random regroups and their transposes are run with every strategy, and the constants fitted to their
times. What counts in the end is printed and stored beside the
constants: how much slower the strategy that the rule picks is than the best one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..ops import cost
from ..ops.plan import ColumnMap, RegroupPlan
from ..ops.torch_impl import Strategy, TensorMeta, compile_map, strategy_counts
from .measuring import Budget, Clock, rounds_of
from .results import cpu_name

STRATEGIES: tuple[Strategy, ...] = ("slices", "columns", "rows")
CONSTANTS = Path(cost.__file__).with_name("cost.json")
MEASUREMENTS = Path(__file__).with_name("calibration.json")

_MAX_BYTES = 96 << 20
# Where the fit starts, in nanoseconds.
_GUESS = {
    "call": 1000.0,
    "part": 400.0,
    "strip": 1.0,
    "far_strip": 5.0,
    "granule": 20.0,
    "block": 2000.0,
    "output": 2000.0,
    "input": 1000.0,
    "byte": 0.03,
    "range": 1000.0,
    "joined_byte": 0.03,
}
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)
_WIDTHS: tuple[tuple[int, ...], ...] = (
    (1,),
    (4,),
    (8,),
    (16,),
    (32,),
    (64,),
    (128,),
    (7, 13, 31),
    (10, 18),
    (16, 32, 48, 64, 96, 128),
    (12, 28, 60, 64, 128, 192, 256),
)


def random_map(rng: random.Random) -> tuple[ColumnMap, str]:
    """A regroup or its transpose, and a word about it."""
    inputs = rng.choice((1, 1, 2, 2, 3, 8, 32))
    keys = rng.choice((2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048))
    groups = rng.choice((1, 2, 2, 3, 4, 16, 64))
    widths = rng.choice(_WIDTHS)
    layouts = [
        (
            [f"{t}.{k}" for k in range(max(1, keys // inputs))],
            [rng.choice(widths) for _ in range(max(1, keys // inputs))],
        )
        for t in range(inputs)
    ]
    names = [name for layout in layouts for name in layout[0]]
    order = rng.choice(("interleaved", "interleaved", "blocks", "shuffled"))
    if order == "shuffled":
        rng.shuffle(names)
    used = names[: max(1, int(len(names) * rng.choice((1.0, 1.0, 0.5))))]
    dealt = (
        [used[len(used) * g // groups : len(used) * (g + 1) // groups] for g in range(groups)]
        if order == "blocks"
        else [used[g::groups] for g in range(groups)]
    )
    column_map = RegroupPlan.build(layouts=layouts, groups=dealt).column_map
    backward = rng.random() < 0.5
    word = f"{inputs} inputs, {keys} keys of {widths}, {groups} groups, {order}"
    return (column_map.transpose(), word + ", backward") if backward else (column_map, word + ", forward")


def measure(samples: int, seed: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds and counts of every strategy on random maps."""
    from rich.progress import track

    rng = random.Random(seed)
    records: list[dict[str, Any]] = []
    for _ in track(range(samples), description="measuring"):
        column_map, word = random_map(rng)
        dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
        row = max(1, sum(column_map.in_widths) * dtype.itemsize)
        # A short single row is not left to the fit.
        short = max(map(sum, (column_map.in_widths, column_map.out_widths))) <= cost.SINGLE_ROW_COLUMNS
        batch = rng.choice([b for b in _BATCHES if b * row <= _MAX_BYTES and not (b == 1 and short)] or [1])
        values = [torch.ones((batch, width), dtype=dtype) for width in column_map.in_widths]
        metas = [TensorMeta(tuple(v.shape), v.dtype, v.device) for v in values]
        counts = {s: strategy_counts(column_map, metas, dtype, 1, s) for s in STRATEGIES}
        programs = {
            s: compile_map(column_map, metas, dtype, 1, s) for s in STRATEGIES if counts[s] is not None
        }
        calls = {s: partial(p, values) for s, p in programs.items()}
        timed = rounds_of(calls, Clock(torch.device("cpu")), Budget(rounds))
        records.append(
            {
                "what": f"batch {batch}, {word}, {str(dtype).removeprefix('torch.')}",
                # The least of the rounds: other work on the machine only ever adds.
                "seconds": {s: min(seconds for seconds, _ in found) for s, found in timed.items()},
                "counts": {s: counts[s] for s in programs},
            }
        )
    return records


def merged(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record for each shape, with the least of its times: other work on the machine only ever adds."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        known = found.setdefault(json.dumps([record["what"], record["counts"]]), record)
        known["seconds"] = {s: min(t, known["seconds"][s]) for s, t in record["seconds"].items()}
    return list(found.values())


def fit(records: list[dict[str, Any]], strategy: Strategy) -> dict[str, float]:
    """Constants in nanoseconds, by a robust fit of the logarithm of the time.

    Logarithms keep the constants positive and weigh large and small shapes alike; the Huber loss
    lets a shape that the machine disturbed count little.
    """
    chosen = [r for r in records if strategy in r["seconds"]]
    counts = torch.tensor([r["counts"][strategy] for r in chosen], dtype=torch.float64)
    times = torch.tensor([r["seconds"][strategy] * 1e9 for r in chosen], dtype=torch.float64)
    names = {"slices": cost.Slices, "columns": cost.Columns, "rows": cost.Rows}[strategy]._fields
    logs = torch.tensor([math.log(_GUESS[name]) for name in names], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logs], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        error = torch.log(counts @ logs.exp()) - times.log()
        value = torch.nn.functional.huber_loss(error, torch.zeros_like(error), delta=0.3)
        value.backward()
        return value

    optimizer.step(loss)  # pyright: ignore[reportArgumentType]
    return {name: float(f"{value:.3g}") for name, value in zip(names, logs.exp().tolist())}


def regrets(records: list[dict[str, Any]], constants: dict[str, dict[str, float]]) -> list[float]:
    """For each record, the time of the picked strategy over that of the best."""
    result: list[float] = []
    for record in records:
        predicted: dict[Strategy, float] = {
            s: sum(a * b for a, b in zip(constants[s].values(), c)) for s, c in record["counts"].items()
        }
        picked = cost.cheapest(predicted)
        result.append(record["seconds"][picked] / min(record["seconds"].values()))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--add", action="store_true", help="keep the measurements on disk, add to them")
    parser.add_argument("--refit", action="store_true", help="use the measurements on disk")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    if arguments.refit:
        stored = json.loads(MEASUREMENTS.read_text())
    else:
        before = json.loads(MEASUREMENTS.read_text())["records"] if arguments.add else []
        records = merged(before + measure(arguments.samples, arguments.seed, arguments.rounds))
        stored = {
            "provenance": {
                "date": datetime.date.today().isoformat(),
                "cpu": cpu_name(),
                "cores": os.cpu_count(),
                "threads": arguments.threads,
                "torch": torch.__version__,
                "samples": len(records),
            },
            "records": records,
        }
        MEASUREMENTS.write_text(
            "{\n"
            + f'"provenance": {json.dumps(stored["provenance"])},\n"records": [\n'
            + ",\n".join(json.dumps(r) for r in stored["records"])
            + "\n]}\n"
        )
    records = stored["records"]
    constants = {s: fit(records, s) for s in STRATEGIES}
    slower = sorted(regrets(records, constants))
    summary = {
        "median": round(slower[len(slower) // 2], 3),
        "p90": round(slower[len(slower) * 9 // 10], 3),
        "worst": round(slower[-1], 3),
    }
    CONSTANTS.write_text(
        json.dumps(
            {"nanoseconds": constants, "picked over best": summary, "provenance": stored["provenance"]},
            indent=2,
        )
        + "\n"
    )
    print(json.dumps({"nanoseconds": constants, "picked over best": summary}, indent=2))
    always = {
        s: sorted(r["seconds"].get(s, float("inf")) / min(r["seconds"].values()) for r in records)
        for s in STRATEGIES
    }
    print(
        "always the same one, median / p90:",
        {s: (v[len(v) // 2], v[len(v) * 9 // 10]) for s, v in always.items()},
    )


if __name__ == "__main__":
    main()
