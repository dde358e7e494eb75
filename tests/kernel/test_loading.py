"""When the library is loaded, what is said without it, and what is read from a device."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernel import building
from torchrec_kt.ops import RegroupPlan, has_cuda_kernel, kernel, regroup_values
from torchrec_kt.ops import _native as native
from torchrec_kt.ops import moves as moves_module
from torchrec_kt.ops.kernel import compile_for_kernel
from torchrec_kt.ops.torch_impl import TensorMeta

LIBRARY, PURE = native.LIBRARY_VARIABLE, native.PURE_TORCH_VARIABLE
CPU_ONLY = """
import sys, warnings
warnings.simplefilter("error")
import torch, torchrec_kt.ops
from torchrec_kt.ops import RegroupPlan, regroup_values, _native
plan = RegroupPlan.build([(["a", "b"], [1, 2])], [["b", "a"]])
values = [torch.ones(2, 3, requires_grad=True)]
regroup_values(values, plan)[0].sum().backward()
torch.ops.torchrec_kt.regroup(values, torch.tensor([[0, 0, 0, 0, 1]], dtype=torch.int32), [1])
"""


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As in a new process: nothing tried, nobody warned, no environment."""
    monkeypatch.setattr(native, "_outcome", None)
    monkeypatch.setattr(kernel, "_warned", [])
    monkeypatch.delenv(LIBRARY, raising=False)
    monkeypatch.delenv(PURE, raising=False)
    return monkeypatch


# --- when -----------------------------------------------------------------------------------------------


def test_nothing_is_loaded_or_said_for_cpu_tensors(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    code = CPU_ONLY + "assert _native._outcome is None\nassert not _native._outcome\n"
    assert building.python(code, env={LIBRARY: str(broken), PURE: None}) == ""


def test_loaded_once_by_many_threads(unloaded: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[object] = []

    def slow_load(path: object) -> None:
        calls.append(path)
        time.sleep(0.1)

    unloaded.setenv(LIBRARY, str(tmp_path / "library.so"))
    unloaded.setattr(torch.ops, "load_library", slow_load)
    barrier, results = threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        results.append(native.load())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [tmp_path / "library.so"]
    assert results == [None] * 8
    assert native.load() is None
    assert len(calls) == 1


def test_a_failure_is_not_tried_again(unloaded: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unloaded.setenv(LIBRARY, str(tmp_path / "missing.so"))
    first = native.load()
    assert first is not None
    assert "missing.so" in first
    unloaded.setattr(torch.ops, "load_library", lambda path: pytest.fail("tried again"))
    assert native.load() == first
    assert not has_cuda_kernel()


# --- where ----------------------------------------------------------------------------------------------


def test_library_beside_the_sources_is_found(unloaded: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torchrec_kt.ops

    loaded: list[Path] = []
    unloaded.setattr(torch.ops, "load_library", loaded.append)
    unloaded.setattr(torchrec_kt.ops, "__path__", [str(tmp_path / "sources"), str(tmp_path / "built")])
    assert "was not built" in (native.load() or "")
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "torchrec_kt_cuda.so").touch()
    unloaded.setattr(native, "_outcome", None)
    assert native.load() is None
    assert loaded == [tmp_path / "built" / "torchrec_kt_cuda.so"]
    assert native.report() == f"loaded from {loaded[0]}"


def test_pure_torch_by_the_environment(unloaded: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unloaded.setattr(torch.ops, "load_library", lambda path: pytest.fail("loaded"))
    unloaded.setenv(LIBRARY, str(tmp_path / "library.so"))
    unloaded.setenv(PURE, "1")
    assert native.load() == f"{PURE} is set"
    assert not has_cuda_kernel()
    assert native.report() == f"none, CUDA tensors take the pure torch path: {PURE} is set"


@pytest.mark.parametrize("value", ["", "0"])
def test_pure_torch_switched_off(unloaded: pytest.MonkeyPatch, tmp_path: Path, value: str) -> None:
    loaded: list[Path] = []
    unloaded.setattr(torch.ops, "load_library", loaded.append)
    unloaded.setenv(LIBRARY, str(tmp_path / "library.so"))
    unloaded.setenv(PURE, value)
    assert native.load() is None
    assert len(loaded) == 1


HAS = "from torchrec_kt.ops import _native; print(_native.has_kernel('cpu'), _native.has_kernel('cuda'))"


def test_the_environment_chooses_the_library(plain_host_library: Path) -> None:
    assert building.python(HAS, env={LIBRARY: str(plain_host_library), PURE: None}) == "True False\n"
    assert building.python(HAS, env={LIBRARY: str(plain_host_library), PURE: "1"}) == "False False\n"


def test_a_host_build_takes_no_tensors_by_itself(plain_host_library: Path) -> None:
    code = CPU_ONLY + "assert _native._outcome is None\n"
    assert building.python(code, env={LIBRARY: str(plain_host_library), PURE: None}) == ""


# --- why not --------------------------------------------------------------------------------------------


def broken_libraries() -> dict[str, tuple[Callable[[Path], object], str]]:
    def compiled(source: str) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            path.with_suffix(".c").write_text(source)
            building.run(["gcc", "-shared", "-fPIC", path.with_suffix(".c"), "-o", path])

        return write

    return {
        "missing": (lambda path: None, "No such file or directory"),
        "empty": (Path.touch, "file too short"),
        "text": (lambda path: path.write_text("x" * 5000), "invalid ELF header"),
        "missing symbol": (
            compiled("void aoti_torch_of_another_age(void); void f(void) { aoti_torch_of_another_age(); }"
                     " __attribute__((constructor)) void g(void) { f(); }"),
            "undefined symbol: aoti_torch_of_another_age",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", broken_libraries())
def test_report_says_why_a_library_does_not_load(tmp_path: Path, kind: str) -> None:
    make, reason = broken_libraries()[kind]
    library = tmp_path / "library.so"
    make(library)
    code = "from torchrec_kt.ops import _native; print(_native.report())"
    line = building.python(code, env={LIBRARY: str(library), PURE: None})
    assert "none, CUDA tensors take the pure torch path" in line
    assert f"{library} does not load" in line
    assert reason in line


def test_report_names_the_library(cuda_library: Path) -> None:
    code = "from torchrec_kt.ops import _native; print(_native.report())"
    assert (
        building.python(code, env={LIBRARY: str(cuda_library), PURE: None}) == f"loaded from {cuda_library}\n"
    )


def test_bug_report_holds_the_reason(tmp_path: Path) -> None:
    told = building.run(
        [sys.executable, "-m", "torchrec_kt"], env={LIBRARY: str(tmp_path / "missing.so"), PURE: None}
    ).stdout
    (line,) = [line for line in told.splitlines() if line.startswith("cuda kernel")]
    assert f"{tmp_path / 'missing.so'} does not load" in line


# --- the warning ----------------------------------------------------------------------------------------


def compile_for_cuda(shape: tuple[int, ...] = (2, 3)) -> object:
    plan = RegroupPlan.build([(["a", "b"], [1, 2])], [["b", "a"]])
    meta = TensorMeta(shape, torch.float32, torch.device("cuda", 0))
    return compile_for_kernel(plan.column_map, [meta], torch.float32, 1)


def test_one_warning_for_cuda_tensors(unloaded: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unloaded.setenv(LIBRARY, str(tmp_path / "missing.so"))
    with pytest.warns(RuntimeWarning) as caught:
        assert compile_for_cuda() is None
    (warning,) = caught
    message = str(warning.message)
    assert "pure torch, which is slower than its CUDA kernel" in message
    assert "missing.so does not load" in message
    assert f"Set {PURE}=1 to choose this path without a warning" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_for_cuda((5, 3)) is None


def test_warning_without_a_library_says_what_to_install(unloaded: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torchrec_kt.ops

    unloaded.setattr(torchrec_kt.ops, "__path__", [str(tmp_path)])
    with pytest.warns(
        RuntimeWarning, match="was not built; install torchrec_kt from source where nvcc is on the PATH"
    ):
        assert compile_for_cuda() is None


def test_no_warning_for_who_asked(unloaded: pytest.MonkeyPatch) -> None:
    unloaded.setenv(PURE, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_for_cuda() is None


def test_no_warning_for_other_devices(unloaded: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unloaded.setenv(LIBRARY, str(tmp_path / "missing.so"))
    plan = RegroupPlan.build([(["a", "b"], [1, 2])], [["b", "a"]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in ("cpu", "meta", "xpu"):
            meta = TensorMeta((2, 3), torch.float32, torch.device(device))
            assert compile_for_kernel(plan.column_map, [meta], torch.float32, 1) is None
        regroup_values([torch.ones(2, 3)], plan)


# --- plan tensors on a device -------------------------------------------------------------------------------


class OnDevice:
    """A tensor of moves that says it is elsewhere and counts the copies to the host."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.tensor = torch.tensor(rows, dtype=torch.int32)
        self.device = torch.device("cuda", 0)
        self.copies = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def detach(self) -> OnDevice:
        return self

    def cpu(self) -> Tensor:
        self.copies += 1
        return self.tensor


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    monkeypatch.setattr(moves_module, "_contents", found)
    return found


@pytest.mark.usefixtures("contents")
def test_plan_tensors_are_read_once() -> None:
    moves: Any = OnDevice([[0, 0, 0, 0, 4]])
    assert moves_module._content(moves) == moves.tensor.numpy().tobytes()
    for _ in range(3):
        assert moves_module._content(moves) == moves.tensor.numpy().tobytes()
    assert moves.copies == 1
    moves.tensor[0, 4] = 2  # in place
    assert moves_module._content(moves) == moves.tensor.numpy().tobytes()
    assert moves.copies == 2
    other: Any = OnDevice([[0, 0, 0, 0, 4]])
    moves_module._content(other)
    assert other.copies == 1


@pytest.mark.usefixtures("contents")
def test_a_plan_tensor_in_the_memory_of_another_is_read() -> None:
    """As the constants of a model are that is unloaded before another one is loaded."""
    memory = torch.tensor([[0, 0, 0, 0, 4]], dtype=torch.int32).numpy()
    for length in (4, 2):
        memory[0, 4] = length
        moves: Any = OnDevice([[0]])
        moves.tensor = torch.from_numpy(memory)
        assert moves_module._content(moves) == memory.tobytes()


@pytest.mark.usefixtures("contents")
def test_inference_plan_tensors_are_read_each_time() -> None:
    """A change of one leaves no trace."""
    with torch.inference_mode():
        moves: Any = OnDevice([[0, 0, 0, 0, 4]])
        first = moves_module._content(moves)
        moves.tensor[0, 4] = 2
        assert moves_module._content(moves) != first
    assert moves.copies == 2


def test_views_of_one_plan_tensor_differ(contents: dict[Any, Any]) -> None:
    base = torch.arange(20, dtype=torch.int32).reshape(4, 5)
    for view in (base, base[:2], base[:, :4], base.t()):
        moves: Any = OnDevice([[0]])
        moves.tensor = view
        assert moves_module._content(moves) == view.contiguous().numpy().tobytes()
    assert len(contents) == 4


def test_contents_kept_are_bounded_and_hold_their_tensors(contents: dict[Any, Any]) -> None:
    for n in range(200):
        moves: Any = OnDevice([[n, 0, 0, 0, 4]])
        assert moves_module._content(moves)[:4] == n.to_bytes(4, "little")
        assert len(contents) <= moves_module._MAX_MAPS
    # While an entry is there its tensor is, so that no other one can come to lie at its address.
    assert all(entry[2] is not None for entry in contents.values())


def test_cpu_plan_tensors_are_read_each_time(contents: dict[Any, Any]) -> None:
    moves = torch.tensor([[0, 0, 0, 0, 4]], dtype=torch.int32)
    first = moves_module._content(moves)
    moves.numpy()[0, 4] = 2  # torch does not notice
    assert moves_module._content(moves) != first
    assert not contents
