"""Results as tables: built once, shown in a terminal or written as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable

from .candidates import ALIKE, BARE, CAT_SPLIT, MODULE
from .results import COPY, OURS, Figure, NotRun, Results, Row
from .suites.copying import BOTH, CLONE, FORWARD

__all__ = ["Table", "conditions", "legend", "show", "summary_of", "tables_of"]

_NONE = "-"
_YARDSTICKS = (BARE, COPY, CLONE)
_TITLES = {
    "function": "Function level",
    "operator": "Operator level",
    "shapes": "Shapes that hurt",
    "host": "Host cost",
    "plan": "Plan cost",
}


@dataclass(frozen=True)
class Table:
    """Headings and cells; the first ``left`` columns are words, the rest numbers."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1

    def rich(self) -> RichTable:
        table = RichTable(title=self.title, title_justify="left", title_style="bold")
        for place, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if place < self.left else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*map(_escaped, row), style="bold" if row[0].startswith(OURS) else None)
        return table

    def markdown(self, level: int = 4) -> str:
        lines = [f"{'#' * level} {self.title}", ""] if self.title else []
        lines.append(f"| {' | '.join(self.headings)} |")
        lines.append("|" + "".join("---|" if n < self.left else "---:|" for n in range(len(self.headings))))
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in self.rows]
        return "\n".join(lines)


def _escaped(cell: str) -> str:
    return cell.replace("[", r"\[")


def show(results: Results, console: Console) -> None:
    """Every table and what holds for all of them."""
    for suite in results.suites():
        for table in tables_of(results, suite):
            console.print(table.rich())
            console.print()
    console.print(legend(results.rows), highlight=False)
    console.print(conditions(results, results.rows), highlight=False)


def tables_of(results: Results, suite: str) -> list[Table]:
    """The tables of one suite."""
    rows = results.of_suite(suite)
    title = _TITLES.get(suite, suite)
    if suite in ("function", "operator"):
        return [_details(title, row) for row in rows] + [summary_of(f"{title}: all cases", rows)]
    if suite == "host":
        return [_times(f"{title}: microseconds per call", rows, 1e6, with_mode=True)]
    if suite == "plan":
        return [_times(f"{title}: milliseconds to build one", rows, 1e3, with_mode=False)]
    return [summary_of(title, rows)]


def _details(title: str, row: Row) -> Table:
    """All figures of one row, a line per candidate."""
    return Table(
        title=f"{title}: {row.case}, {row.mode}, {row.input_bytes / 1e6:.1f} MB in {row.batch} rows",
        headings=(
            "candidate",
            "P50 ms",
            "P90 ms",
            "host ms",
            "peak MiB",
            "GB/s",
            "of copy",
            "speed-up of ours",
            "rounds",
            "match",
        ),
        rows=[_detail(row, name) for name in row.figures],
    )


def _detail(row: Row, name: str) -> list[str]:
    found = row.figures[name]
    if isinstance(found, NotRun):
        return [name, *[_NONE] * 8, f"not run: {found.reason}"]
    memory, share = row.peak_memory(name), row.of_copy(name)
    return [
        name,
        number(found.p50 * 1e3),
        number(found.p90 * 1e3),
        number(found.host_p50 * 1e3),
        _NONE if memory is None else f"{memory / 2**20:.0f}",
        optional(row.gigabytes_per_second(name), number),
        optional(share, "{:.0%}".format),
        optional(row.speed_up(name), ratio),
        str(found.rounds),
        _match(found),
    ]


def _match(found: Figure) -> str:
    if found.match is None:
        return _NONE
    return "yes" if found.match else f"NO: {found.mismatch}"


def summary_of(title: str, rows: Iterable[Row], peers: Sequence[str] | None = None) -> Table:
    """A line per case: how many times as fast ours is, forward / forward + backward.

    Args:
        peers: the candidates that have a column; all that the rows hold by default, yardsticks last.
    """
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.mode] = row
    every = [row for modes in cases.values() for row in modes.values()]
    if peers is None:
        held = dict.fromkeys(name for row in every for name in row.figures if name not in (OURS, COPY))
        peers = sorted(held, key=lambda name: name in _YARDSTICKS)

    def both(modes: dict[str, Row], cell: Callable[[Row], str]) -> str:
        return " / ".join(cell(modes[mode]) for mode in (FORWARD, BOTH) if mode in modes)

    lines: list[list[str]] = []
    for case, modes in cases.items():
        line = [
            case,
            f"{next(iter(modes.values())).input_bytes / 1e6:.1f}",
            both(modes, lambda row: optional(row.seconds(OURS), lambda s: number(s * 1e3))),
            both(modes, lambda row: optional(row.of_copy(OURS), "{:.0%}".format)),
        ]
        for name in peers:
            known = {mode: row for mode, row in modes.items() if name != CLONE or mode == FORWARD}
            line.append(both(known, lambda row, name=name: optional(row.speed_up(name), ratio)))
        line.append(_matches(modes.values()))
        lines.append(line)
    return Table(title, ["case", "MB", "ours, ms", "of copy", *peers, "match"], lines)


def _matches(rows: Iterable[Row]) -> str:
    wrong = {
        name: found.mismatch
        for row in rows
        for name, found in row.figures.items()
        if isinstance(found, Figure) and found.match is False
    }
    return "; ".join(f"NO: {name}, {what}" for name, what in wrong.items()) or "yes"


def _times(title: str, rows: Sequence[Row], scale: float, with_mode: bool) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row.figures))

    def cell(row: Row, name: str) -> str:
        found = row.figures.get(name)
        if isinstance(found, NotRun):
            return f"not run: {found.reason}"
        return _NONE if found is None else f"{number(found.p50 * scale)} ({number(found.p90 * scale)})"

    against = next((n for n in (MODULE, *names) if n in names and not n.startswith(OURS)), OURS)
    headings = ["case", *(["mode"] if with_mode else []), *names, f"speed-up over {against}", "match"]
    lines = [
        [
            row.case,
            *([row.mode] if with_mode else []),
            *(cell(row, name) for name in names),
            optional(row.speed_up(against), ratio),
            _matches([row]),
        ]
        for row in rows
    ]
    return Table(title, headings, lines, left=2 if with_mode else 1)


def legend(rows: Iterable[Row], peers: Sequence[str] | None = None) -> str:
    """What the columns and the candidates are, as far as the rows have them.

    Args:
        peers: for one :func:`summary_of` these; for all tables by default.
    """
    chosen = list(rows)
    suites = {row.suite for row in chosen}
    names = set(peers or (name for row in chosen for name in row.figures))
    parts: list[str] = []
    if MODULE in names:
        parts.append(
            f"*{MODULE}*: `torchrec.modules.regroup.KTRegroupAsDict`, over FBGEMM's `permute_multi_embedding`; "
            f"*{CAT_SPLIT}*: TorchRec's `_regroup_keyed_tensors`"
            + (", at operator level `split` and `torch.cat`." if "operator" in suites else ".")
        )
    if BARE in names:
        parts.append(
            f"*{BARE}*: the torch calls that move the columns alone, in the fastest of the three ways, indices at "
            "hand; with gradients inside an autograd function that does nothing else."
        )
    if suites & {"function", "operator", "shapes"}:
        ratios = "*speed-up of ours*, and the column of a peer where there is a line per case"
        parts += [
            f"{'Column of a peer' if peers else ratios}: time of the peer over ours, forward / forward + backward. *MB*: the inputs of a call.",
            "*of copy*: speed as a share of that of a plain copy of as many bytes into memory that is there "
            "already (*copy*); *clone* copies the inputs into new memory.",
        ]
        if not peers:
            parts += [
                "*GB/s* counts every byte read and written once. *peak MiB*: the inputs and what a call adds to "
                "the memory in use at its peak, P90, of the process or as CUDA's caching allocator counts; - where "
                "that is too little to be told.",
                "*host ms*: until the call returned; on a CPU the same as the call's time.",
            ]
    if suites & {"host", "plan"}:
        parts.append("Host and plan cost: P50 (P90).")
    if ALIKE[0] in names:
        parts.append(
            "*two operators*: `kt_regroup_arguments`, then `permute_multi_embedding`; *one operator*: "
            "`regroup_keyed_tensor`."
        )
    if "permute_pooled_embs, joined" in names:
        parts.append(
            "*permute_pooled_embs* takes one tensor: the inputs are joined before it; *joined*: that is not timed "
            "(forward)."
        )
    parts.append(
        "*match*: outputs equal to slicing by key bit for bit, and gradients, too, but for sums, to rounding; in "
        "the same run, with as many rows as measured and with 3, in memory that held NaN."
    )
    return " ".join(parts)


def conditions(results: Results, rows: Iterable[Row]) -> str:
    """The machine, versions and dates of these rows."""
    runs = results.runs_of(rows)

    def every(name: str, form: str = "{}") -> str | None:
        values = list(dict.fromkeys(run.get(name) for run in runs if run.get(name) is not None))
        return ", ".join(form.format(value) for value in values) or None

    threads = f"{every('threads')} threads on {every('cores')} cores"
    dates = sorted({str(run.get("date"))[:10] for run in runs})
    facts = [
        every("gpu"),
        every("cpu"),
        threads,
        every("torch", "torch {}"),
        every("torchrec", "torchrec {}"),
        every("fbgemm", "FBGEMM {}"),
        every("torchrec_kt", "torchrec_kt {}"),
        every("commit", "commit {}"),
        "candidates interleaved round by round",
        "to ".join(dict.fromkeys((f"{dates[0]} " if len(dates) > 1 else dates[0], dates[-1])))
        if dates
        else None,
    ]
    quick = any(run.get("quick") for run in runs)
    return ", ".join(filter(None, facts)) + (". A quick run: few rounds." if quick else ".")


def optional(value: float | None, form: Callable[[float], str]) -> str:
    return _NONE if value is None else form(value)


def number(value: float) -> str:
    """Three digits that count."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def ratio(value: float) -> str:
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 3 else f"{value:.2f}"
