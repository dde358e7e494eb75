"""Two runs beside each other, by ratios to what was measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from .candidates import BARE
from .results import OURS, Figure, Results, ResultsError, Row
from .tables import Table, optional, ratio

__all__ = ["NOISE", "Change", "changes", "comparison", "regressions"]

# A candidate of ours may take up to this share more time, in units of the others, before that counts as
# slower. Repeated runs on an idle machine differ by less in all rows; see the report of two runs.
NOISE = 0.5


@dataclass(frozen=True)
class Change:
    """One candidate of ours in a row that both files have.

    Attributes:
        time: new seconds over old.
        relative: the same in units of the peers and yardsticks of the same row, the median over
            them; None where the rows share none.
        references: how many those are.
    """

    row: Row
    name: str
    time: float
    relative: float | None
    references: int


def changes(old: Results, new: Results) -> list[Change]:
    """Every candidate of ours that both have.

    Raises:
        ResultsError: they have no row in common, or were measured on different devices.
    """
    devices = [{run.get("device") for run in results.runs} for results in (old, new)]
    if devices[0] != devices[1]:
        names = [" and ".join(sorted(map(str, found))) for found in devices]
        raise ResultsError(
            f"the old results are of the device {names[0]}, the new ones of {names[1]}: not comparable"
        )
    before = old.by_key()
    found = [
        _change(before[row.key], row, name)
        for row in new.rows
        if row.key in before
        for name in row.figures
        if name.startswith(OURS) and row.figure(name) and before[row.key].figure(name)
    ]
    if not found:
        raise ResultsError("the two files have no case in common that ours ran in both")
    return found


def _change(old: Row, new: Row, name: str) -> Change:
    was, now = _seconds(old), _seconds(new)
    # The bare calls are ours as well: what slows them down slows ours down.
    references = [other for other in now if other in was and other != BARE and not other.startswith(OURS)]
    time = now[name] / was[name]
    relative = [time / (now[other] / was[other]) for other in references]
    return Change(new, name, time, statistics.median(relative) if relative else None, len(references))


def _seconds(row: Row) -> dict[str, float]:
    return {name: found.p50 for name, found in row.figures.items() if isinstance(found, Figure)}


def regressions(old: Results, new: Results, noise: float = NOISE) -> list[str]:
    """One line for each candidate of ours that got slower beyond the noise, fails, or does not match.

    Raises:
        ResultsError: as :func:`changes`.
    """
    found = [
        f"{_place(change.row)}: {change.name} takes {change.relative:.2f} times as long as before, measured by "
        f"{change.references} others in the same run; {1 + noise:.2f} is allowed"
        for change in changes(old, new)
        if change.relative is not None and change.relative > 1 + noise
    ]
    before = old.by_key()
    for row in new.rows:
        if row.key in before:
            found += [
                f"{_place(row)}: {name} ran before and does not now"
                for name in before[row.key].figures
                if name.startswith(OURS) and before[row.key].figure(name) and not row.figure(name)
            ]
    return found + new.failures()


def _place(row: Row) -> str:
    return f"{row.suite}, {row.case}, {row.mode}"


def comparison(old: Results, new: Results, noise: float = NOISE) -> Table:
    """A line for each candidate of ours that both have."""
    return Table(
        "New time over old",
        ("suite", "case", "mode", "candidate", "time", "in units of the others", "verdict"),
        [
            (
                change.row.suite,
                change.row.case,
                change.row.mode,
                change.name,
                ratio(change.time),
                optional(change.relative, ratio),
                _verdict(change.relative, noise),
            )
            for change in changes(old, new)
        ],
        left=4,
    )


def _verdict(relative: float | None, noise: float) -> str:
    if relative is None:
        return "nothing to compare by"
    if relative > 1 + noise:
        return "slower"
    return "faster" if relative < 1 / (1 + noise) else "as before"


def differences(old: Results, new: Results) -> list[str]:
    """What the two were measured with that is not the same, in words."""
    found: list[str] = []
    for name in ("cpu", "gpu", "cores", "threads", "torch", "torchrec", "fbgemm", "torchrec_kt", "commit"):
        was, now = (_all(run.get(name) for run in results.runs) for results in (old, new))
        if was != now:
            found.append(f"{name}: {was} before, {now} now")
    return found


def _all(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values)) or "nothing"
