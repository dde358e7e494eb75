"""What people read: tables, the page, the README's section and the charts say what the file says."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from torchrec_kt.benchmark.candidates import ALIKE, BARE, MODULE, REGROUP
from torchrec_kt.benchmark.charts import BAR_CASES, bar_chart, line_chart, write_charts
from torchrec_kt.benchmark.reporting import (
    BEGIN,
    END,
    README_PEERS,
    chart_paths,
    readme_section,
    report,
    write_into_readme,
    write_report,
)
from torchrec_kt.benchmark.results import OURS, Results, ResultsError
from torchrec_kt.benchmark.suites.copying import BOTH, FORWARD
from torchrec_kt.benchmark.tables import Table, conditions, legend, number, ratio, show, summary_of, tables_of

from . import sample

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "docs" / "benchmark" / "cpu.json"


def test_numbers_have_three_digits_that_count() -> None:
    assert [number(v) for v in (1234.6, 99.94, 9.994, 0.12345)] == ["1235", "99.9", "9.99", "0.123"]
    assert [ratio(v) for v in (123.4, 19.94, 2.994, 0.5, 0.0123)] == ["123", "19.9", "2.99", "0.50", "0.012"]


def test_details_of_a_row() -> None:
    table = tables_of(sample.sample(), "function")[0]
    assert table.title == "Function level: published, forward, 64.0 MB in 512 rows"
    lines = {line[0]: list(line[1:]) for line in table.rows}
    assert lines[OURS] == ["20.0", "22.0", "10.0", "93", "6.40", "50%", "1.00", "5", "yes"]
    assert lines["TorchRec module"] == ["400", "440", "200", "93", "0.320", "2%", "20", "5", "yes"]
    assert lines["copy"] == ["10.0", "11.0", "5.00", "-", "12.8", "100%", "0.50", "5", "-"]
    assert lines["KeyedTensor.regroup"][-1] == "not run: the | reason [why]"


def test_summary_has_a_line_per_case() -> None:
    results = sample.sample()
    results.rows[1].figures["cat/split"] = sample.figure(10, match=False)
    table = summary_of("x", results.of_suite("function"))
    assert table.headings == [
        *("case", "MB", "ours, ms", "of copy", "ours, function", "TorchRec module", "KeyedTensor.regroup"),
        *("cat/split", "clone", "match"),
    ]
    assert table.rows[0] == [
        *("published", "64.0", "20.0 / 20.0", "50% / 50%", "1.05 / 1.05", "20 / 20", "- / -"),
        *("2.50 / 0.50", "1.50", "NO: cat/split, gradient"),
    ]
    assert table.rows[1][-1] == "yes"


def test_summary_of_chosen_peers() -> None:
    """Rows that lack one show that; yardsticks are last where none are chosen."""
    results = sample.sample()
    rows = results.of_suite("function")
    table = summary_of("x", rows, [MODULE, BARE, REGROUP])
    assert table.headings[4:] == ["TorchRec module", "bare calls", "KeyedTensor.regroup", "match"]
    assert table.rows[0][4:] == ["20 / 20", "- / -", "- / -", "yes"]
    rows[0].figures = {BARE: sample.figure(15)} | rows[0].figures
    assert summary_of("x", rows, [BARE]).rows[0][4:] == ["0.75 / -", "yes"]
    assert list(summary_of("x", rows).headings[4:])[-3:] == ["bare calls", "clone", "match"]


def test_times_per_call_and_per_plan() -> None:
    (host,) = tables_of(sample.sample(), "host")
    assert host.rows[0][:3] == ["host", "no_grad", "20000 (22000)"]
    assert host.headings[-2:] == ["speed-up over TorchRec module", "match"]
    (plan,) = tables_of(sample.sample(), "plan")
    assert [line[0] for line in plan.rows] == ["10 keys", "100 keys"]
    assert plan.rows[0][1] == "20.0 (22.0)"


def _cells_of_terminal(results: Results) -> str:
    out = io.StringIO()
    show(results, Console(file=out, width=250))
    return out.getvalue()


def test_terminal_and_page_show_the_same_numbers() -> None:
    results = sample.sample()
    terminal, page = _cells_of_terminal(results), report(results, [])
    count = 0
    for suite in results.suites():
        for table in tables_of(results, suite):
            assert table.title in terminal
            assert table.title in page
            for row in table.rows:
                pattern = r"\s*│\s*".join(re.escape(cell) for cell in row)
                assert re.search(pattern, terminal), row
                assert f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" in page
                count += 1
    assert count > 40


def test_brackets_are_not_taken_for_markup() -> None:
    table = Table("t", ("a",), [("x [bold]y",)])
    out = io.StringIO()
    Console(file=out).print(table.rich())
    assert "[bold]y" in out.getvalue()


def test_conditions_are_stated() -> None:
    results = sample.sample()
    text = conditions(results, results.rows)
    for fact in ("Some CPU", "2 threads on 4 cores", "torch 2.13.0", "torchrec 1.9.2", "FBGEMM 1.8.0"):
        assert fact in text
    assert "commit 0123456789" in text
    assert "2026-01-02" in text
    assert "quick" not in text
    results.runs.append(sample.RUN | {"quick": True, "date": "2026-01-04 00:00 UTC", "gpu": "Some GPU"})
    results.rows[0].run = 1
    text = conditions(results, results.rows)
    assert text.startswith("Some GPU")
    assert "2026-01-02 to 2026-01-04" in text
    assert text.endswith("A quick run: few rounds.")


def test_legend_explains_what_is_there() -> None:
    results = sample.sample()
    assert "Host and plan cost" in legend(results.rows)
    assert "Host and plan cost" not in legend(results.of_suite("function"))
    assert "one operator" not in legend(results.rows)
    results.rows[0].figures[ALIKE[0]] = sample.figure(1)
    assert "one operator" in legend(results.rows)
    assert "bare calls" not in legend(results.rows)
    results.rows[0].figures[BARE] = sample.figure(1)
    assert "bare calls" in legend(results.rows)


def test_legend_of_one_summary_is_of_its_columns() -> None:
    results = sample.sample()
    results.rows[0].figures[ALIKE[0]] = sample.figure(1)
    text = legend(results.of_suite("function"), README_PEERS)
    assert "bare calls" in text
    assert "Column of a peer: time of the peer over ours" in text
    for absent in ("one operator", "operator level", "speed-up of ours", "GB/s", "peak MiB", "host ms"):
        assert absent not in text
        assert absent in legend(results.rows)


def test_charts_are_written_in_a_readable_size(tmp_path: Path) -> None:
    written = write_charts(sample.sample(), *chart_paths(tmp_path / "new", "cpu"))
    assert [path.name for path in written] == ["cpu-bars.png", "cpu-lines.png"]
    for path in written:
        with Image.open(path) as image:
            assert image.width == 1500
            assert 700 <= image.height <= 900
            assert len(image.convert("L").getcolors() or ()) > 20  # not a blank sheet


def test_bar_chart_shows_the_figures() -> None:
    chart = bar_chart(sample.sample())
    assert chart is not None
    assert [axis.get_title() for axis in chart.axes] == [
        "every key once: published",
        "with repeated keys: published dup",
    ]
    axis = chart.axes[0]
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == ["ours", "ours, function", "TorchRec module", "KeyedTensor.regroup", "cat/split", "clone"]
    widths = sorted(bar.get_width() for bar in axis.patches)  # pyright: ignore[reportAttributeAccessIssue]
    assert widths == pytest.approx(sorted([20, 21, 400, 50, 30] * 2))
    labels = [text.get_text() for text in axis.texts]
    assert labels.count("400") == 2
    assert labels.count("not run") == 1
    assert "Some CPU" in _caption(chart)


def test_line_chart_shows_the_figures() -> None:
    chart = line_chart(sample.sample())
    assert chart is not None
    batch, width = chart.axes
    ours = next(line for line in batch.lines if line.get_label() == "torchrec_kt (ours)")
    points = ours.get_xydata().tolist()  # pyright: ignore[reportAttributeAccessIssue]
    assert points == [[1, 51.2], [8, 6.4], [64, pytest.approx(0.8)]]
    assert batch.get_title() == "26 keys of width 64, two inputs, two groups"
    assert width.get_title() == "512 rows of about 104 columns"
    assert len(width.lines) == 5  # KeyedTensor.regroup was not run
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in width.lines}
    assert len(looks) == 5
    assert "Some CPU" in _caption(chart)


def _caption(chart: object) -> str:
    return " ".join(chart.get_supxlabel().split("\n"))  # pyright: ignore[reportAttributeAccessIssue]


def test_no_chart_without_its_rows(tmp_path: Path) -> None:
    results = Results([dict(sample.RUN)], [sample.row("host", "host", "no_grad")])
    assert write_charts(results, *chart_paths(tmp_path, "cpu")) == []
    assert [path.name for path in write_report(results, tmp_path)] == ["cpu.md"]


def test_readme_section(tmp_path: Path) -> None:
    results = sample.sample()
    page, *charts = write_report(results, tmp_path / "docs")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    section = readme_section(results, charts, page, readme)
    write_into_readme(readme, section)
    text = readme.read_text()
    assert text == f"before\n{BEGIN}\n{section}\n{END}\nafter\n"
    assert "![Time per call, bars](docs/cpu-bars.png)" in section
    assert "[cpu.md](docs/cpu.md)" in section
    assert "Some CPU" in section
    assert "| narrow | 64.0 | 20.0 / 20.0 |" in section
    (headings,) = [line for line in section.splitlines() if line.startswith("| case |")]
    assert headings.endswith(
        "| TorchRec module | KeyedTensor.regroup | cat/split | bare calls | clone | match |"
    )
    assert "| candidate |" not in section  # one table: the others are on the page
    assert "batch 64" not in section  # the sweeps are in the charts
    write_into_readme(readme, section)
    assert readme.read_text() == text


def test_readme_needs_both_marks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    with pytest.raises(ResultsError, match=r"README\.md cannot be read"):
        write_into_readme(readme, "x")
    for text in ("", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}"):
        readme.write_text(text)
        with pytest.raises(ResultsError, match="must hold the line <!-- benchmark: begin -->"):
            write_into_readme(readme, "x")
        assert readme.read_text() == text


def test_readme_section_needs_its_suites(tmp_path: Path) -> None:
    results = Results([dict(sample.RUN)], [sample.row("host", "host", "no_grad")])
    with pytest.raises(ResultsError, match="no rows of the suites function and shapes"):
        readme_section(results, [], tmp_path / "cpu.md", tmp_path / "README.md")


def test_stored_report_is_made_of_the_stored_file(tmp_path: Path) -> None:
    """Page and README hold what the JSON gives, to the letter: no number was typed."""
    results = Results.load(STORED)
    page = STORED.with_suffix(".md")
    charts = [path for path in chart_paths(STORED.parent, "cpu") if path.exists()]
    assert len(charts) == 2
    assert page.read_text() == report(results, charts)
    readme = ROOT / "README.md"
    stored = readme.read_text().split(BEGIN)[1].split(END)[0].strip("\n")
    assert stored == readme_section(results, charts, page, readme)


def test_stored_results_are_complete_and_right() -> None:
    results = Results.load(STORED)
    assert results.suites() == ["function", "operator", "shapes", "host", "plan"]
    assert results.failures() == []
    cases = {row.case for row in results.of_suite("function")}
    assert any(cases >= set(pair) for pair in BAR_CASES)
    assert {row.mode for row in results.of_suite("function")} == {FORWARD, BOTH}
