"""What a run has measured: rows with figures per candidate, where they come from, and their file."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__

__all__ = [
    "COPY",
    "FORMAT",
    "OURS",
    "Figure",
    "NotRun",
    "Results",
    "ResultsError",
    "Row",
    "cpu_name",
    "provenance",
]

FORMAT = 1
OURS = "ours"
COPY = "copy"
# Runs that differ in these are not put into one file.
_CONDITIONS = ("device", "gpu", "cpu", "threads", "torch")


class ResultsError(ValueError):
    """A file of results that cannot be used, with the reason."""


@dataclass(frozen=True)
class Figure:
    """One candidate in one row; seconds and bytes per call.

    Attributes:
        p50, p90: time on the device; on a CPU that of the call.
        host_p50, host_p90: time until the call returned.
        rounds: how many rounds it took part in.
        memory: by how much the peak of the memory in use grew during a call, P90; None where
            that is too little to be told.
        match: whether the results are those of slicing by key; None for yardsticks.
        mismatch: what is not, where ``match`` is False.
    """

    p50: float
    p90: float
    host_p50: float
    host_p90: float
    rounds: int
    memory: int | None = None
    match: bool | None = None
    mismatch: str | None = None


@dataclass(frozen=True)
class NotRun:
    """Why a candidate has no figures in a row."""

    reason: str


@dataclass
class Row:
    """All candidates on one case in one mode, measured together.

    Attributes:
        moved: bytes that a call has to read and write; None where that is not what it does.
        sweep: ``(axis, value)`` of the rows that the line chart shows.
        run: index into :attr:`Results.runs`.
    """

    suite: str
    case: str
    mode: str
    batch: int
    keys: int
    input_bytes: int
    moved: int | None
    sweep: tuple[str, int] | None
    figures: dict[str, Figure | NotRun] = field(default_factory=dict)
    run: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.suite, self.case, self.mode

    def figure(self, name: str) -> Figure | None:
        found = self.figures.get(name)
        return found if isinstance(found, Figure) else None

    def seconds(self, name: str) -> float | None:
        found = self.figure(name)
        return found.p50 if found else None

    def ratio(self, name: str, over: str) -> float | None:
        """Time of one candidate over that of another."""
        above, below = self.seconds(name), self.seconds(over)
        return above / below if above is not None and below else None

    def speed_up(self, name: str) -> float | None:
        """How many times as fast ours is."""
        return self.ratio(name, OURS)

    def of_copy(self, name: str) -> float | None:
        """Speed as a share of that of a plain copy of as many bytes."""
        return self.ratio(COPY, name)

    def gigabytes_per_second(self, name: str) -> float | None:
        seconds = self.seconds(name)
        return self.moved / seconds / 1e9 if self.moved and seconds else None

    def peak_memory(self, name: str) -> int | None:
        """Bytes: the inputs and what a call adds to them at its peak."""
        found = self.figure(name)
        return None if found is None or found.memory is None else self.input_bytes + found.memory

    def ours_failed(self) -> list[str]:
        """Candidates of ours that did not run or do not match."""
        return [
            name
            for name, found in self.figures.items()
            if name.startswith(OURS) and isinstance(found, Figure) and found.match is False
        ] + ([OURS] if isinstance(self.figures.get(OURS), NotRun) else [])


@dataclass
class Results:
    """Rows and the runs that they come from."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def of_suite(self, suite: str) -> list[Row]:
        return [row for row in self.rows if row.suite == suite]

    def suites(self) -> list[str]:
        return list(dict.fromkeys(row.suite for row in self.rows))

    def by_key(self) -> dict[tuple[str, str, str], Row]:
        return {row.key: row for row in self.rows}

    def runs_of(self, rows: Iterable[Row]) -> list[dict[str, Any]]:
        return [self.runs[index] for index in sorted({row.run for row in rows})]

    def failures(self) -> list[str]:
        """One line per candidate of ours that did not run or does not match."""
        return [
            f"{row.suite}, {row.case}, {row.mode}: {name} {_what_failed(row.figures[name])}"
            for row in self.rows
            for name in row.ours_failed()
        ]

    def merge(self, new: Results, whole_suites: Iterable[str] = ()) -> Results:
        """These with the new rows in place of older ones; of ``whole_suites`` no older row stays.

        Raises:
            ResultsError: the runs were made on different machines or with different settings.
        """
        dropped = set(whole_suites)
        replaced = {row.key for row in new.rows}
        kept = [row for row in self.rows if row.suite not in dropped and row.key not in replaced]
        for old_run in self.runs_of(kept):
            for new_run in new.runs:
                for name in _CONDITIONS:
                    if old_run.get(name) != new_run.get(name):
                        raise ResultsError(
                            f"the rows there were measured with {name} {old_run.get(name)!r}, the new ones with "
                            f"{new_run.get(name)!r}; write them to another file"
                        )
        merged = Results([*self.runs, *new.runs])
        shift = len(self.runs)
        fresh = [dataclasses.replace(row, run=row.run + shift) for row in new.rows]
        order = {row.key: place for place, row in enumerate(self.rows)}
        # Rows stay where they were; new ones come after those of their suite.
        merged.rows = sorted([*kept, *fresh], key=lambda row: order.get(row.key, len(order)))
        merged.rows.sort(key=lambda row: _place(SUITE_ORDER, row.suite))
        used = sorted({row.run for row in merged.rows})
        merged.runs = [merged.runs[index] for index in used]
        # Copies: the rows kept belong to these results as well, whose runs have other places.
        merged.rows = [dataclasses.replace(row, run=used.index(row.run)) for row in merged.rows]
        return merged

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(_row_to_json(row)) for row in self.rows]
        runs = json.dumps(self.runs, indent=1)
        # One row a line: a file that can be looked through and compared.
        joined = ",\n".join(lines)
        text = f'{{"format": {FORMAT},\n"runs": {runs},\n"rows": [\n{joined}\n]}}\n'
        aside = path.with_name(path.name + ".part")
        aside.write_text(text)
        aside.replace(path)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file that :meth:`save` wrote.

        Raises:
            ResultsError: it is not there, or not such a file.
        """
        try:
            content = json.loads(path.read_text())
        except OSError as error:
            raise ResultsError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ResultsError(f"{path} is not JSON: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ResultsError(
                f"{path} is not a file of results in format {FORMAT}, as --json of this command writes them"
            )
        try:
            found = cls(content["runs"], [_row_from_json(row) for row in content["rows"]])
            found.runs_of(found.rows)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ResultsError(f"{path} is damaged: {type(error).__name__}: {error}") from None
        return found


SUITE_ORDER = ("function", "operator", "shapes", "host", "plan")


def _place(order: tuple[str, ...], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _what_failed(found: Figure | NotRun) -> str:
    return (
        f"did not run: {found.reason}" if isinstance(found, NotRun) else f"does not match: {found.mismatch}"
    )


def _row_to_json(row: Row) -> dict[str, Any]:
    content = dataclasses.asdict(row)
    content["figures"] = {
        name: {"not run": found.reason} if isinstance(found, NotRun) else dataclasses.asdict(found)
        for name, found in row.figures.items()
    }
    return content


def _row_from_json(content: dict[str, Any]) -> Row:
    figures: dict[str, Figure | NotRun] = {
        name: NotRun(found["not run"]) if "not run" in found else Figure(**found)
        for name, found in content["figures"].items()
    }
    sweep = content["sweep"]
    rest = {name: value for name, value in content.items() if name not in ("figures", "sweep")}
    return Row(**rest, sweep=tuple(sweep) if sweep else None, figures=figures)


def provenance(device: torch.device, **settings: Any) -> dict[str, Any]:
    """What figures depend on."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "device": device.type,
        "gpu": None,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchrec": _version("torchrec"),
        "fbgemm": _version("fbgemm-gpu-cpu") or _version("fbgemm-gpu"),
        "torchrec_kt": __version__,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
    return found | settings


def cpu_name() -> str:
    """The processor's model, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit that this package lies in, marked if files differ from it; None outside of a clone."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):
            return None  # installed below somebody else's clone
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..")
        return git("rev-parse", "--short=10", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
