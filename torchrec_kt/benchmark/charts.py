"""The two charts: time of the published cases, and speed over the batch and the width."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files only: no display is needed

from matplotlib.figure import Figure as Chart
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .candidates import CAT_SPLIT, MODULE, REGROUP
from .results import COPY, OURS, Results, Row
from .suites.copying import BOTH, CLONE, FORWARD
from .tables import conditions, number

__all__ = ["BAR_CASES", "bar_chart", "line_chart", "write_charts"]

# Full runs have the first pair, quick ones the second.
BAR_CASES = (("published", "published dup"), ("published B=64", "published dup B=64"))

# Okabe and Ito's colours, told apart by the colour-blind; line styles and markers differ, too.
_BLUE, _SKY, _ORANGE, _GREEN, _PURPLE, _GREY = (
    "#0072B2",
    "#56B4E9",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#7F7F7F",
)
_LINES = {
    OURS: ("torchrec_kt (ours)", _BLUE, "o", "-", 2.6),
    CAT_SPLIT: ("cat/split", _GREEN, "s", "-", 1.6),
    REGROUP: ("KeyedTensor.regroup", _PURPLE, "^", "-", 1.6),
    MODULE: ("TorchRec module (KTRegroupAsDict)", _ORANGE, "D", "-", 1.6),
    COPY: ("plain copy", _GREY, "", "--", 1.4),
    CLONE: ("clone", _GREY, "", ":", 1.4),
}
_DPI = 150


def write_charts(results: Results, bars: Path, lines: Path) -> list[Path]:
    """Write the charts that the rows suffice for; the files written."""
    written: list[Path] = []
    for chart, path in ((bar_chart(results), bars), (line_chart(results), lines)):
        if chart is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Without the version of matplotlib in it, the file depends on the figures alone.
            chart.savefig(path, dpi=_DPI, metadata={"Software": None})
            written.append(path)
    return written


def bar_chart(results: Results) -> Chart | None:
    """Milliseconds per call of every candidate, with and without repeated keys; None without such rows."""
    known = {(row.case, row.mode): row for row in results.of_suite("function")}
    pairs = [pair for pair in BAR_CASES if any((case, FORWARD) in known for case in pair)]
    if not pairs:
        return None
    cases = [case for case in pairs[0] if (case, FORWARD) in known]
    chart = Chart(figsize=(10, 5.6), layout="constrained")
    axes = _row_of_axes(chart, len(cases))
    rows: list[Row] = []
    for axis, case in zip(axes, cases):
        forward, both = known[case, FORWARD], known.get((case, BOTH))
        rows += [row for row in (forward, both) if row is not None]
        _bars(axis, forward, both)
        repeats = "with repeated keys" if "dup" in case else "every key once"
        axis.set_title(f"{repeats}: {case}", fontsize=11)
    axes[0].legend(loc="lower right", fontsize=9, frameon=False)
    first = rows[0]
    chart.suptitle(
        f"Time per call: {first.batch} rows, {first.input_bytes / 1e6:.0f} MB in {first.keys} keys "
        "(shorter is better)",
        fontsize=12,
    )
    _caption(
        chart, "P50; the dashed line is a plain copy of the forward's bytes. " + conditions(results, rows)
    )
    return chart


def _bars(axis: Any, forward: Row, both: Row | None) -> None:
    names = [name for name in forward.figures if name != COPY]
    longest = max(
        (row.seconds(name) or 0.0 for row in (forward, both) if row is not None for name in names),
        default=0.0,
    )
    for place, name in enumerate(names):
        ours = name.startswith(OURS)
        for row, shift, colour, label in (
            (forward, -0.2, _BLUE if ours else _GREY, "forward (dark)"),
            (both, 0.2, _SKY if ours else "#C4C4C4", "forward + backward (light)"),
        ):
            seconds = row.seconds(name) if row is not None else None
            if seconds is None:
                if row is forward:
                    axis.text(
                        longest * 10, place + shift, "not run", fontsize=8, va="center", color="#444444"
                    )
                continue
            axis.barh(place + shift, seconds * 1e3, 0.38, color=colour, label=label if name == OURS else None)
            axis.text(
                seconds * 1e3 + longest * 12, place + shift, number(seconds * 1e3), fontsize=8, va="center"
            )
    copy = forward.seconds(COPY)
    if copy is not None:
        axis.axvline(copy * 1e3, color="black", linestyle="--", linewidth=1)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, longest * 1e3 * 1.14)
    axis.set_xlabel("milliseconds")
    _bare(axis)


def line_chart(results: Results) -> Chart | None:
    """GB/s of the forward over the batch and over the width; None without such rows."""
    sweeps: dict[str, list[Row]] = {}
    for row in results.rows:
        if row.sweep is not None and row.mode == FORWARD:
            sweeps.setdefault(row.sweep[0], []).append(row)
    axes_names = [name for name in ("batch", "width") if len(sweeps.get(name, ())) > 1]
    if not axes_names:
        return None
    chart = Chart(figsize=(10, 5.2), layout="constrained")
    axes = _row_of_axes(chart, len(axes_names), sharey=True)
    for axis, name in zip(axes, axes_names):
        rows = sorted(sweeps[name], key=lambda row: row.sweep[1] if row.sweep else 0)
        for candidate, (label, colour, marker, style, thick) in _LINES.items():
            points = [(row.sweep[1], row.gigabytes_per_second(candidate)) for row in rows if row.sweep]
            known = [(x, y) for x, y in points if y is not None]
            if known:
                axis.plot(
                    *zip(*known), label=label, color=colour, marker=marker, linestyle=style, linewidth=thick
                )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        values = [row.sweep[1] for row in rows if row.sweep]
        axis.xaxis.set_major_locator(FixedLocator(values))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.tick_params(axis="x", labelrotation=45 if name == "batch" else 0)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axis.set_title(_sweep_title(name, rows), fontsize=11)
        axis.set_xlabel("rows of the batch" if name == "batch" else "width of every key, columns")
        axis.grid(True, which="major", color="#E0E0E0", linewidth=0.7)
        _bare(axis)
    axes[0].set_ylabel("GB/s read and written (log)")
    handles, labels = axes[0].get_legend_handles_labels()
    chart.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    shown = [row for name in axes_names for row in sweeps[name]]
    _caption(chart, "Forward, P50, higher is better. " + conditions(results, shown))
    return chart


def _sweep_title(name: str, rows: Sequence[Row]) -> str:
    first = rows[0]
    if name == "batch":
        return f"{first.keys} keys of width 64, two inputs, two groups"
    columns = first.keys * (first.sweep[1] if first.sweep else 0)
    return f"{first.batch} rows of about {columns:,} columns"


def _row_of_axes(chart: Chart, count: int, sharey: bool = False) -> list[Any]:
    return list(chart.subplots(1, count, squeeze=False, sharey=sharey)[0])


def _bare(axis: Any) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _caption(chart: Chart, text: str) -> None:
    chart.supxlabel("\n".join(textwrap.wrap(text, 150)), fontsize=8, color="#444444")
