"""The command as it is typed."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from torchrec_kt.benchmark import command
from torchrec_kt.benchmark.candidates import FUNCTION
from torchrec_kt.benchmark.measuring import Budget
from torchrec_kt.benchmark.reporting import BEGIN, END
from torchrec_kt.benchmark.results import OURS, Figure, NotRun, Results, Row
from torchrec_kt.benchmark.suites import Case, Settings
from torchrec_kt.benchmark.suites.copying import copying_case
from torchrec_kt.benchmark.workloads import function_workloads

from . import sample

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command.app, [str(argument) for argument in arguments])


def message(result: Result) -> str:
    """What an error box says, without its frame and line breaks."""
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suites of the shapes that tests can afford."""

    def cases(suite: str, quick: bool) -> list[Case]:
        names = {"function": ["published", "published dup"], "shapes": ["host", "odd widths"]}.get(
            suite, ["host"]
        )
        workloads = [
            dataclasses.replace(function_workloads()[name], batch=2, name=f"{name} of {suite}")
            for name in names
        ]
        return [copying_case(suite, w, FUNCTION, keyed=True, budget=Budget(1, 0.1)) for w in workloads]

    monkeypatch.setattr(command, "cases", cases)


@pytest.mark.usefixtures("small")
def test_runs_suites_and_merges_them_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    first = run("--suite", "function", "--json", path)
    assert first.exit_code == 0, first.output
    assert "Function level: published of function, forward" in first.output
    second = run("--suite", "shapes", "--suite", "host", "--json", path, "--rounds", "1")
    assert second.exit_code == 0, second.output
    assert "Function level" not in second.output  # the tables are of what was measured
    results = Results.load(path)
    assert results.suites() == ["function", "shapes", "host"]
    assert [run["rounds"] for run in results.runs] == [None, 1, 1]
    third = run("--suite", "shapes", "--only", "odd", "--json", path)
    assert third.exit_code == 0, third.output
    again = Results.load(path)
    assert len(again.rows) == len(results.rows)
    changed = {row.case for row in again.rows if again.runs[row.run]["rounds"] is None}
    assert changed == {"published of function", "published dup of function", "odd widths of shapes"}
    smaller = run("--suite", "shapes", "--max-megabytes", "0.001", "--json", path)
    assert smaller.exit_code == 0, smaller.output
    assert len(Results.load(path).rows) == len(results.rows)


@pytest.mark.usefixtures("small")
def test_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    small, ran = command.cases, list[str]()

    def watched(suite: str, quick: bool) -> list[Case]:
        def case(of: Case, stop: bool) -> Case:
            def measure(settings: Settings) -> list[Row]:
                if stop:
                    raise KeyboardInterrupt
                ran.append(of.name)
                return of.run(settings)

            return dataclasses.replace(of, run=measure)

        return [case(found, stopping and n == 1) for n, found in enumerate(small(suite, quick))]

    stopping = True
    monkeypatch.setattr(command, "cases", watched)
    assert run("--suite", "shapes", "--json", path).exit_code != 0
    stopping = False
    assert [row.case for row in Results.load(path).rows] == ["host of shapes"] * 2
    result = run("--suite", "shapes", "--json", path, "--resume")
    assert result.exit_code == 0, result.output
    assert ran == ["host of shapes", "odd widths of shapes"]
    assert "host of shapes" in result.output
    assert len(Results.load(path).rows) == 4


@pytest.mark.usefixtures("small")
def test_measures_reports_and_checks_in_one_go(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    baseline = tmp_path / "old.json"
    assert run("--suite", "shapes", "--json", baseline).exit_code == 0
    arguments = ("--suite", "shapes", "--report", tmp_path / "docs", "--readme", readme)
    # A call of a few microseconds that the machine interrupts may take any number of times as long.
    result = run(*arguments, "--check", baseline, "--noise", "1e9")
    assert result.exit_code == 0, result.output
    assert "nothing of ours is slower" in result.output
    assert (tmp_path / "docs" / "cpu.md").exists()
    assert "odd widths of shapes" in readme.read_text()


@pytest.mark.usefixtures("small")
def test_check_fails_on_a_regression(tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    assert run("--suite", "host", "--json", path).exit_code == 0
    faster = sample.edited(Results.load(path), sample.slower([OURS], 1e-3), tmp_path)
    faster.save(tmp_path / "old.json")
    result = run("--from", path, "--check", tmp_path / "old.json")
    assert result.exit_code == 1
    assert "FAILED: host, host of host, forward: ours takes 1000.00 times as long" in result.output
    assert run("--from", path, "--check", path).exit_code == 0


@pytest.mark.usefixtures("small")
def test_ours_that_does_not_match_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FUNCTION[OURS]

    def wrong(workload: object, device: object) -> object:
        candidate = right(workload, device)  # pyright: ignore[reportArgumentType]
        return lambda kts: [t.flip(1) for t in candidate(kts)]

    monkeypatch.setitem(FUNCTION, OURS, wrong)  # pyright: ignore[reportArgumentType]
    result = run("--suite", "host")
    assert result.exit_code == 1
    assert "FAILED: host, host of host, forward: ours does not match: output" in result.output


def test_regenerated_report_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "sample.json"
    sample.sample().save(path)
    for folder in ("a", "b"):
        (tmp_path / f"{folder}.md").write_text(f"{BEGIN}\n{END}\n")
        result = run("--from", path, "--report", tmp_path / folder, "--readme", tmp_path / f"{folder}.md")
        assert result.exit_code == 0, result.output
    for name in ("cpu.md", "cpu-bars.png", "cpu-lines.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert "Some CPU" in (tmp_path / "a.md").read_text()
    assert "Shapes that hurt" in result.output


def test_comparing_two_files(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    sample.sample().save(old)
    results = sample.edited(sample.sample(), sample.slower([OURS], 2), tmp_path)
    results.runs[0]["torch"] = "3.0"
    results.save(new)
    result = run("report", old, new)
    assert result.exit_code == 0, result.output
    assert "slower" in result.output
    assert "note: torch: 2.13.0 before, 3.0 now" in result.output
    missing = run("report", old, tmp_path / "none.json")
    assert missing.exit_code == 2
    assert "none.json cannot be read" in message(missing)


def test_traces(tmp_path: Path, small: None) -> None:
    assert run("--suite", "host", "--without", "fbgemm", "--trace", tmp_path).exit_code == 0
    assert (tmp_path / "host" / "host-of-host-forward-ours.json").exists()


def test_list_measures_nothing() -> None:
    result = run("--list", "--suite", "operator", "--suite", "plan")
    assert result.exit_code == 0
    assert "op 1024 x 538432" in result.output
    assert "100000 keys" in result.output
    assert "published" not in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--suite", "nonesuch"],
            "'nonesuch' is not one of 'function', 'operator', 'shapes', 'host', 'plan'",
        ),
        (["--device", "tpu"], "'tpu' is not one of 'cpu', 'cuda'"),
        (["--only", "nonesuch", "--suite", "plan"], "no case's name holds 'nonesuch'"),
        (["--max-megabytes", "-1", "--suite", "plan"], "inputs of -1 MB or less; there are 10 keys"),
        (["--rounds", "0"], "'--rounds': Input should be greater than or equal to 1"),
        (["--threads", "0"], "'--threads': Input should be greater than or equal to 1"),
        (["--readme", "README.md"], "--readme shows the charts that --report FOLDER writes"),
        (["--resume"], "--resume goes on with the file of --json"),
        (["--from", "x.json", "--suite", "plan"], "--from shows a file as it is"),
        (["--from", "/nowhere/x.json"], "/nowhere/x.json cannot be read"),
        (["--check", "/nowhere/x.json"], "/nowhere/x.json cannot be read"),
    ],
)
def test_errors_say_what_to_do(arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in message(result)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu() -> None:
    result = run("--device", "cuda", "--suite", "plan")
    assert result.exit_code == 2
    assert "--device cuda: torch" in message(result)
    assert "use --device cpu" in message(result)


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", ["typer", "rich", "matplotlib"])
def test_what_is_missing_is_named(name: str) -> None:
    done = _python(
        f"import sys\nsys.modules[{name!r}] = None\n"
        "from torchrec_kt.benchmark.__main__ import main\nsys.argv = ['benchmark']\nmain()\n"
    )
    assert done.returncode == 1
    assert (
        f"the benchmark needs {name}, which is not installed: pip install 'torchrec-kt[benchmark]'"
        in done.stderr
    )


def test_the_package_does_not_need_them() -> None:
    done = _python(
        "import sys\n"
        "for name in ('typer', 'rich', 'matplotlib'): sys.modules[name] = None\n"
        "import torchrec_kt\ntorchrec_kt.KTRegroupAsDict\n"
    )
    assert done.returncode == 0, done.stderr


def test_operators_and_plans_without_torchrec(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = _python(
        "import sys, dataclasses\n"
        "for name in ('torchrec', 'fbgemm_gpu'): sys.modules[name] = None\n"
        "from torchrec_kt.benchmark.suites import operator\n"
        "stored = operator.operator_workloads()\n"
        "few = {k: dataclasses.replace(w, batch=2) for k, w in stored.items()}\n"
        "operator.operator_workloads = lambda: few\n"
        "from torchrec_kt.benchmark.command import app\n"
        f"app(['--suite', 'operator', '--suite', 'plan', '--only', '10', '--quick', '--json', {str(path)!r}])\n"
    )
    assert done.returncode == 0, done.stderr
    assert "not run: fbgemm_gpu is not installed" in done.stdout
    rows = {row.suite: row.figures for row in Results.load(path).rows}
    assert rows["operator"]["permute_multi_embedding"] == NotRun("fbgemm_gpu is not installed")
    assert rows["plan"]["TorchRec _remap_to_groups"] == NotRun("torchrec is not installed")
    assert all(isinstance(figures[OURS], Figure) for figures in rows.values())
