"""What imports what: ``ops`` lives on torch alone, ``plan`` without torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / "torchrec_kt" / "ops"

WITHOUT_TORCHREC = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torchrec", "fbgemm_gpu"):
            raise ImportError(f"{name} is not to be had here")

sys.meta_path.insert(0, Refuse())
"""


def run(code: str, *, without_torchrec: bool = True) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", (WITHOUT_TORCHREC if without_torchrec else "") + code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


def imported_modules(file: Path) -> Iterator[str]:
    """Absolute names of all that a file imports, wherever in the file; under TYPE_CHECKING, too."""
    package = ".".join(file.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


FILES = sorted(OPS.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(OPS).as_posix())
def test_ops_import_neither_torchrec_nor_modules(file: Path) -> None:
    assert len(FILES) >= 6
    for name in imported_modules(file):
        assert name.split(".")[0] not in ("torchrec", "fbgemm_gpu", "torchrec_cpu")
        assert not name.startswith("torchrec_kt.modules")
        assert not name.startswith("torchrec_kt.benchmark")
        assert name not in ("torchrec_kt", "torchrec_kt.KTRegroupAsDict", "torchrec_kt.regroup")


def test_plan_imports_the_standard_library_only() -> None:
    names = list(imported_modules(OPS / "plan.py"))
    assert names
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)


def test_plan_works_without_torch() -> None:
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("plan", {str(OPS / "plan.py")!r})
plan = importlib.util.module_from_spec(spec)
sys.modules["plan"] = plan
spec.loader.exec_module(plan)
print(plan.RegroupPlan.build([(["a", "b"], [1, 2])], [["b", "a", "b"]]).out_widths)
assert "torch" not in sys.modules and "torchrec_kt" not in sys.modules
"""
    result = run(code)
    assert result.stdout.strip() == "(5,)", result.stderr


def test_everything_but_modules_works_without_torchrec() -> None:
    code = """
import torchrec_kt
import torchrec_kt.ops, torchrec_kt.ops.compat
import torch
from torchrec_kt.ops import RegroupPlan, UnknownKeyError, regroup_values
plan = RegroupPlan.build(layouts=[(["a", "b"], [1, 2]), (["c"], [1])], groups=[["c", "a"], ["b", "a"]])
values = [torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True), torch.tensor([[4.0]], requires_grad=True)]
outs = regroup_values(values, plan)
torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
print([out.tolist() for out in outs], [v.grad.tolist() for v in values])
rows = torch.ops.torchrec_kt.kt_regroup_arguments(torch.empty(0), [["a", "b"]], [[1, 2]], [["b"]])
print([t.tolist() for t in torch.ops.torchrec_kt.permute_multi_embedding(values[:1], *rows)])
assert not any(name.split(".")[0] in ("torchrec", "fbgemm_gpu") for name in sys.modules)
assert torchrec_kt.__version__
assert "KTRegroupAsDict" in dir(torchrec_kt)
"""
    result = run(code)
    assert result.stdout.splitlines() == [
        "[[[4.0, 1.0]], [[2.0, 3.0, 1.0]]] [[[2.0, 1.0, 1.0]], [[1.0]]]",
        "[[[2.0, 3.0]]]",
    ], result.stderr


def test_names_that_need_torchrec_say_so() -> None:
    code = """
import torchrec_kt
names = [name for name in torchrec_kt.__all__ if name != "__version__"]
assert "KTRegroupAsDict" in names and "regroup" in names and "regroup_as_dict" in names
for name in names:
    for attempt in range(2):
        try:
            getattr(torchrec_kt, name)
        except ImportError as error:
            assert "torchrec" in str(error) and "torchrec_kt.ops works without" in str(error), error
        else:
            raise AssertionError(f"{name} was found")
try:
    from torchrec_kt import KTRegroupAsDict
except ImportError as error:
    assert "torchrec" in str(error)
else:
    raise AssertionError("imported")
try:
    torchrec_kt.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
else:
    raise AssertionError("found")
from torchrec_kt.ops import regroup_values
print("done")
"""
    result = run(code)
    assert result.stdout.strip() == "done", result.stderr


@pytest.mark.parametrize("first", ["torchrec_kt", "torchrec_kt.ops"])
def test_operators_are_registered_by_importing_the_package(first: str) -> None:
    """Who loads a saved graph imports ``torchrec_kt`` and expects its operators to be there."""
    code = f"""
import torch, {first}
print([hasattr(torch.ops.torchrec_kt, name) for name in
       ("regroup", "permute_multi_embedding", "kt_regroup_arguments", "regroup_keyed_tensor")])
"""
    result = run(code)
    assert result.stdout.strip() == "[True, True, True, True]", result.stdout + result.stderr


def test_public_names() -> None:
    import torchrec_kt.ops

    assert {"RegroupPlan", "UnknownKeyError", "regroup_values"} <= set(torchrec_kt.ops.__all__)
    assert all(hasattr(torchrec_kt.ops, name) for name in torchrec_kt.ops.__all__)
    assert all(hasattr(torchrec_kt, name) for name in torchrec_kt.__all__)
    assert set(torchrec_kt.__all__) <= set(dir(torchrec_kt))


def test_importing_twice_and_in_any_order() -> None:
    code = """
import torchrec_kt.ops.compat, torchrec_kt.ops.regroup, torchrec_kt.ops
import importlib
importlib.import_module("torchrec_kt.ops.compat")
import torch
print(torch.ops.torchrec_kt.regroup([torch.ones(1, 1)], torch.tensor([[0, 0, 0, 0, 1]]).int(), [1]))
"""
    result = run(code)
    assert result.stdout.strip() == "[tensor([[1.]])]", result.stderr
