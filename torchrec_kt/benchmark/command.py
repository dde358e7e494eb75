"""The command: measure, show, write, compare."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .comparing import NOISE, comparison, differences, regressions
from .reporting import readme_section, write_into_readme, write_report
from .results import Results, ResultsError, Row, provenance
from .suites import SUITE_ORDER, Case, Settings, cases
from .tables import show

__all__ = ["app"]

# Wide enough for the tables where the output is not a terminal, which has a width of its own.
_WIDTH = 240

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Ours beside TorchRec and FBGEMM. Without --suite, all suites run.",
)


class Suite(StrEnum):
    function = "function"
    operator = "operator"
    shapes = "shapes"
    host = "host"
    plan = "plan"


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_WIDTH)


@app.callback(invoke_without_command=True)
def measure(
    context: typer.Context,
    suite: Annotated[list[Suite] | None, typer.Option(help="may be given several times")] = None,
    device: Annotated[Device, typer.Option()] = Device.cpu,
    quick: Annotated[bool, typer.Option("--quick", help="fewer cases and rounds, under two minutes")] = False,
    only: Annotated[str, typer.Option(help="cases whose name holds this")] = "",
    without: Annotated[
        list[str] | None, typer.Option(help="leave out candidates whose name holds this, such as torchrec")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="most rounds per candidate")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="torch's own choice by default")] = None,
    max_megabytes: Annotated[float, typer.Option(help="leave out larger inputs")] = 2300,
    json: Annotated[
        Path | None, typer.Option(help="put the figures in here; other suites' figures in it stay")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="leave out the cases that the file of --json has already")
    ] = False,
    source: Annotated[
        Path | None, typer.Option("--from", help="show the figures of this file, measure nothing")
    ] = None,
    report_to: Annotated[
        Path | None, typer.Option("--report", help="write Markdown and charts into this folder")
    ] = None,
    readme: Annotated[
        Path | None, typer.Option(help="put tables and charts between its marks; needs --report")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="write a Chrome trace per candidate below this folder")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="fail if ours got slower than in this file, beyond the noise")
    ] = None,
    noise: Annotated[float, typer.Option(min=0, help="of --check, as a share of the time")] = NOISE,
    names: Annotated[bool, typer.Option("--list", help="list suites and cases, measure nothing")] = False,
) -> None:
    """Measure the suites, show the tables, and write what was asked for."""
    if context.invoked_subcommand is not None:
        return
    console = _console()
    suites = [str(name) for name in suite or SUITE_ORDER]
    if names:
        for name in suites:
            console.print(f"{name}: {', '.join(case.name for case in cases(name, quick))}", soft_wrap=True)
        return
    if readme is not None and report_to is None:
        raise typer.BadParameter("--readme shows the charts that --report FOLDER writes; give both")
    if resume and json is None:
        raise typer.BadParameter("--resume goes on with the file of --json; give both")
    if source is not None and (suite or only or trace or json):
        raise typer.BadParameter(
            "--from shows a file as it is; it goes without --suite, --only, --trace, --json"
        )
    try:
        baseline = None if check is None else Results.load(check)
        earlier = Results.load(json) if json is not None and json.exists() else Results()
        if source is not None:
            results = found = Results.load(source)
        else:
            every = [case for name in dict.fromkeys(suites) for case in cases(name, quick)]
            chosen = _chosen(every, only, max_megabytes)
            if resume:
                known = {(row.suite, row.case) for row in earlier.rows}
                chosen = [case for case in chosen if (case.suite, case.name) not in known]
            settings = Settings(_device(device), quick, rounds, tuple(without or ()), trace)
            if threads is not None:
                torch.set_num_threads(threads)
            results, found = _measure(chosen, settings, earlier, json, whole=chosen == every)
        show(results if resume else found, console)
        if report_to is not None:
            for path in _write(results, report_to, readme):
                console.print(f"wrote {path}", soft_wrap=True)
        problems = found.failures()
        if baseline is not None:
            for line in differences(baseline, found):
                console.print(f"note: not measured under the same conditions: {line}", soft_wrap=True)
            problems = regressions(baseline, results if resume else found, noise)
    except ResultsError as error:
        raise typer.BadParameter(str(error)) from None
    for line in problems:
        console.print(f"FAILED: {line}", soft_wrap=True, markup=False)
    if problems:
        raise typer.Exit(1)
    if baseline is not None:
        console.print(f"nothing of ours is slower than in {check}, beyond {noise:.0%}", soft_wrap=True)


@app.command("report")
def compare(
    old: Annotated[Path, typer.Argument(help="a file that --json wrote")],
    new: Annotated[Path, typer.Argument(help="a later one")],
    noise: Annotated[float, typer.Option(min=0, help="differences up to this share are as before")] = NOISE,
) -> None:
    """Compare two runs: how much longer ours takes, also in units of what ran beside it."""
    console = _console()
    try:
        before, after = Results.load(old), Results.load(new)
        console.print(comparison(before, after, noise).rich())
        for line in differences(before, after):
            console.print(f"note: {line}", soft_wrap=True)
    except ResultsError as error:
        raise typer.BadParameter(str(error)) from None


def _device(device: Device) -> torch.device:
    if device == Device.cuda and not torch.cuda.is_available():
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
        raise typer.BadParameter(f"--device cuda: {why}; use --device cpu")
    return torch.device(str(device))


def _chosen(every: list[Case], only: str, max_megabytes: float) -> list[Case]:
    found = [case for case in every if only in case.name and case.megabytes <= max_megabytes]
    if not found:
        raise typer.BadParameter(
            f"no case's name holds {only!r} with inputs of {max_megabytes:g} MB or less; "
            f"there are {', '.join(case.name for case in every)}"
        )
    return found


def _measure(
    chosen: list[Case], settings: Settings, earlier: Results, json: Path | None, whole: bool
) -> tuple[Results, Results]:
    """Everything that is known now, and what was measured. The file is written after every case."""
    found = Results()
    merged = earlier
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True)) as progress:
        bar = progress.add_task("starting", total=len(chosen))
        for suite in dict.fromkeys(case.suite for case in chosen):
            started = time.monotonic()
            rows: list[Row] = []
            new = Results()
            for case in chosen:
                if case.suite != suite:
                    continue
                progress.update(bar, description=f"{suite}: {case.name}")
                rows += case.run(settings)
                progress.advance(bar)
                seconds = round(time.monotonic() - started, 1)
                run = provenance(
                    settings.device, quick=settings.quick, rounds=settings.rounds, seconds=seconds
                )
                new = Results([run], rows)
                if json is not None:
                    merged.merge(new).save(json)
            # Rows of cases that are no longer measured go once all others are there.
            merged = merged.merge(new, whole_suites=[suite] if whole else [])
            found = found.merge(new)
            if json is not None:
                merged.save(json)
    return merged, found


def _write(results: Results, folder: Path, readme: Path | None) -> list[Path]:
    written = write_report(results, folder)
    if readme is not None:
        page, *charts = written
        write_into_readme(readme, readme_section(results, charts, page, readme))
        written.append(readme)
    return written
