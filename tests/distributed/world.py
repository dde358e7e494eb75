"""Runs test cases on several processes and tells pytest how each rank fared.

A case is a function under :func:`in_world`. It is collected as one pytest test per world size and
parameter; what pytest calls only looks up the outcome. The first such test starts the processes
of its world size, once, with all cases of that size that pytest has selected: importing torch
and torchrec takes seconds, a case mostly less than one. Between cases the process group is torn down
and made anew over a file store, so that a case that fails on one rank, and leaves the others waiting in a
collective until its time-out, does not touch the next.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=120)
"""Within a case. Long, since the machine may be busy: only a failing case reaches it."""

CASE_TIMEOUT = 300
"""Seconds for one case, after which its processes are ended. Longer than a case that fails by time-out."""


@dataclass(frozen=True)
class Case:
    """One call of a test function in a world."""

    module: str
    function: str
    world: int
    parameters: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return "-".join([str(self.world), *(str(value) for _, value in self.parameters)])

    @property
    def key(self) -> str:
        return f"{self.module}:{self.function}[{self.name}]"


def in_world(
    *sizes: int,
    where: Callable[..., bool] | None = None,
    quick: Callable[..., bool] | None = None,
    **parameters: Iterable[Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the function on every rank of worlds of these sizes, once for each combination of parameters.

    Args:
        where: which of them to run; called with ``world`` and the parameters. All by default.
        quick: which of them belong to the quick subset; none by default.
        parameters: names and their values, which must survive JSON.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        marked: list[Any] = []
        for world, *values in product(sizes, *parameters.values()):
            case = Case(function.__module__, function.__name__, world, tuple(zip(parameters, values)))
            chosen = {"world": world, **dict(case.parameters)}
            if where is not None and not where(**chosen):
                continue
            is_quick = quick is not None and quick(**chosen)
            marks = [pytest.mark.quick] if is_quick else []
            marked.append(pytest.param(case, marks=marks, id=case.name))

        @pytest.mark.distributed
        @pytest.mark.parametrize("case", marked)
        def test(case: Case, request: pytest.FixtureRequest) -> None:
            check(case, request)

        test.__name__, test.__qualname__, test.__doc__ = (
            function.__name__,
            function.__qualname__,
            function.__doc__,
        )
        test.__module__ = function.__module__
        test.in_world = function  # pyright: ignore[reportFunctionMemberAccess]
        return test

    return decorate


# --- in pytest's process --------------------------------------------------------------------------

_outcomes = pytest.StashKey[dict[int, dict[str, dict[int, dict[str, Any]]]]]()


def check(case: Case, request: pytest.FixtureRequest) -> None:
    """Pass if every rank finished the case without an error."""
    worlds = request.session.stash.setdefault(_outcomes, {})
    if case.world not in worlds:
        selected = (getattr(item, "callspec", None) for item in request.session.items)
        cases = [spec.params.get("case") for spec in selected if spec is not None]
        worlds[case.world] = run_world(
            case.world, [c for c in cases if isinstance(c, Case) and c.world == case.world]
        )
    ranks = worlds[case.world].get(case.key, {})
    problems = [
        f"rank {rank}: " + ranks.get(rank, {"error": "did not finish"})["error"]
        for rank in range(case.world)
        if ranks.get(rank, {"error": "did not finish"})["error"]
    ]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


def run_world(size: int, cases: list[Case]) -> dict[str, dict[int, dict[str, Any]]]:
    """Run the cases on ``size`` new processes: case -> rank -> what happened."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    waiting = list(cases)
    while waiting:
        with tempfile.TemporaryDirectory() as folder:
            done, errors = _run_processes(size, waiting, Path(folder))
        for key, ranks in done.items():
            found.setdefault(key, {}).update(ranks)
        rest = [case for case in waiting if len(done.get(case.key, {})) < size]
        if rest:
            # The processes ended early or were ended: the case at hand is to blame, the others get new ones.
            blamed = found.setdefault(rest[0].key, {})
            for rank in range(size):
                blamed.setdefault(rank, {"error": f"the process ended or hung in this case\n{errors[rank]}"})
        waiting = rest[1:]
    return found


def _run_processes(
    size: int, cases: list[Case], folder: Path
) -> tuple[dict[str, dict[int, dict[str, Any]]], list[str]]:
    jobs = folder / "jobs.json"
    jobs.write_text(
        json.dumps([[c.module, c.function, c.world, c.parameters] for c in cases]), encoding="utf-8"
    )
    logs = [folder / f"{rank}.log" for rank in range(size)]
    processes: list[subprocess.Popen[bytes]] = []
    for rank in range(size):
        with logs[rank].open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.distributed.world", str(rank), str(size), str(folder)],
                    cwd=ROOT,
                    env=environment(),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    try:
        _wait(processes, folder)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for rank in range(size):
        path = folder / f"{rank}.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            entry = json.loads(line)
            found.setdefault(entry["case"], {})[rank] = entry
    return found, [log.read_text(encoding="utf-8", errors="replace")[-3000:] for log in logs]


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Until all have ended, one has failed, or no rank has finished a case for too long."""
    progress, since = -1, time.monotonic()
    while any(process.poll() is None for process in processes):
        if any(process.poll() not in (None, 0) for process in processes):
            time.sleep(1)  # the others may just be ending too
            return
        size = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
        if size != progress:
            progress, since = size, time.monotonic()
        if time.monotonic() - since > CASE_TIMEOUT:
            return
        time.sleep(0.05)


def environment() -> dict[str, str]:
    """For processes of a world: one thread each, the loopback device, the same hashes on every rank."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # TorchRec's reshard makes tags of messages from hash(str), which must agree.
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


# --- in a process of the world --------------------------------------------------------------------


def main(rank: int, size: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torchrec.distributed import comm

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    store = dist.FileStore(str(folder / "store"), size)
    store.set_timeout(datetime.timedelta(seconds=2 * CASE_TIMEOUT))
    with (folder / f"{rank}.jsonl").open("a", encoding="utf-8") as results:
        jobs = json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
        for n, (module, function, world, parameters) in enumerate(jobs):
            case = Case(module, function, world, tuple((name, value) for name, value in parameters))
            torch.manual_seed(0)
            started = time.monotonic()
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(str(n), store),
                rank=rank,
                world_size=size,
                timeout=COLLECTIVE_TIMEOUT,
            )
            error = ""
            try:
                getattr(importlib.import_module(module), function).in_world(**dict(case.parameters))
            except BaseException:
                error = traceback.format_exc()
            # By the store: a process group that failed can no longer be used to wait for the others.
            if store.add(f"done {n}", 1) == size:
                store.set(f"all done {n}", "")
            store.wait([f"all done {n}"])
            dist.destroy_process_group()
            comm._INTRA_PG = comm._CROSS_PG = None  # TorchRec keeps them for the life of a process
            entry = {"case": case.key, "error": error, "seconds": time.monotonic() - started}
            results.write(json.dumps(entry) + "\n")
            results.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
