"""Results made by hand, for what reads results."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchrec_kt.benchmark.candidates import CAT_SPLIT, MODULE, REGROUP
from torchrec_kt.benchmark.results import COPY, OURS, Figure, NotRun, Results, Row
from torchrec_kt.benchmark.suites.copying import BOTH, CLONE, FORWARD

RUN: dict[str, Any] = {
    "date": "2026-01-02 03:04 UTC",
    "commit": "0123456789",
    "device": "cpu",
    "gpu": None,
    "cpu": "Some CPU",
    "cores": 4,
    "threads": 2,
    "torch": "2.13.0",
    "torchrec": "1.9.2",
    "fbgemm": "1.8.0",
    "torchrec_kt": "0.1.0",
    "quick": False,
    "seconds": 1.0,
}


def figure(milliseconds: float, memory: int | None = 32 << 20, match: bool | None = True) -> Figure:
    seconds = milliseconds / 1e3
    mismatch = "gradient" if match is False else None
    return Figure(seconds, seconds * 1.1, seconds / 2, seconds * 0.6, 5, memory, match, mismatch)


def row(suite: str, case: str, mode: str, scale: float = 1.0, sweep: tuple[str, int] | None = None) -> Row:
    return Row(
        suite=suite,
        case=case,
        mode=mode,
        batch=512,
        keys=26,
        input_bytes=64_000_000,
        moved=128_000_000 if suite in ("function", "operator", "shapes") else None,
        sweep=sweep,
        figures={
            OURS: figure(20 * scale),
            f"{OURS}, function": figure(21 * scale),
            MODULE: figure(400 * scale),
            REGROUP: NotRun("the | reason [why]"),
            CAT_SPLIT: figure(50 * scale),
            COPY: figure(10 * scale, None, None),
            CLONE: figure(30 * scale, None, None),
        },
    )


def sample() -> Results:
    """Some rows of every suite."""
    rows = [
        row("function", case, mode) for case in ("published", "published dup") for mode in (FORWARD, BOTH)
    ]
    rows += [row("operator", "op", FORWARD)]
    rows += [row("shapes", "narrow", mode) for mode in (FORWARD, BOTH)]
    rows += [row("shapes", f"batch {n}", FORWARD, n / 8, ("batch", n)) for n in (1, 8, 64)]
    rows += [row("shapes", f"width {n}", FORWARD, n / 8, ("width", n)) for n in (4, 16)]
    rows += [row("host", "host", mode) for mode in ("no_grad", "compiled")]
    rows += [row("plan", f"{n} keys", "build") for n in (10, 100)]
    return Results([dict(RUN)], rows)


def edited(results: Results, edit: Callable[[dict[str, Any]], object], folder: Path) -> Results:
    """What the file holds after ``edit`` has changed every row of it."""
    path = folder / "edited.json"
    results.save(path)
    content = json.loads(path.read_text())
    for one in content["rows"]:
        edit(one)
    path.write_text(json.dumps(content))
    return Results.load(path)


def slower(names: Sequence[str], factor: float) -> Callable[[dict[str, Any]], None]:
    """Every time of these candidates is ``factor`` times as long; of all if none is named."""

    def edit(one: dict[str, Any]) -> None:
        for name, found in one["figures"].items():
            if "p50" in found and (not names or name in names):
                for field in ("p50", "p90", "host_p50", "host_p90"):
                    found[field] *= factor

    return edit


def duplicate(results: Results) -> Results:
    return copy.deepcopy(results)
