"""What a call costs on the host before the device has anything to do: ours beside FBGEMM's operator.

    python -m torchrec_kt.benchmark.launch_cost                    # builds the kernel for the host first
    python -m torchrec_kt.benchmark.launch_cost --library PATH     # a build made before, without sanitizers

Tensors on the CPU are so small that checks, look-ups, parameters and outputs are all there is, and take
the path that tensors on a CUDA device take: the same program and the same operator, which ends in a walk
of the kernel's few threads instead of a launch. FBGEMM's is its operator for the CPU, which has less to do
than the one for CUDA: that one also fills pinned buffers and copies them to the device.

*Allocations* are tensors allocated by a forward call, as torch's profiler sees them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import RegroupPlan, _native, kernel, regroup_values
from .measuring import Budget, Clock, interleaved
from .results import cpu_name

_CASES = ((1, 2, 8), (2, 2, 8), (4, 8, 32), (16, 16, 128), (64, 64, 256))  # inputs, outputs, keys
_WIDTH, _ROWS = 4, 2


class Figures(NamedTuple):
    inputs: int
    outputs: int
    keys: int
    microseconds: dict[str, float]
    allocations: dict[str, tuple[int, int]]  # number, bytes
    output_bytes: int


def build(folder: Path) -> Path:
    """The kernel for the host, optimised and without sanitizers."""
    sources = Path(kernel.__file__).parent / "csrc"
    defines = ["-DTORCHREC_KT_CUDA=OFF", "-DTORCHREC_KT_HOST=ON", "-DTORCHREC_KT_SANITIZE="]
    for command in (
        ["cmake", "-S", str(sources), "-B", str(folder), *defines],
        ["cmake", "--build", str(folder)],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "torchrec_kt_host.so"


def allocations(run: Callable[[], object]) -> tuple[int, int]:
    """Tensors that a call allocates, and their bytes."""
    run()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as found:
        result = run()
    del result
    events: Any = found.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    sizes = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    return len(sizes), sum(sizes)


def measure(inputs: int, outputs: int, keys: int, rounds: int) -> Figures:
    """Keys in turn: each output takes a share of the keys of every input."""
    per_input = keys // inputs
    layouts = [([f"{i}.{n}" for n in range(per_input)], [_WIDTH] * per_input) for i in range(inputs)]
    names = [key for keys_of, _ in layouts for key in keys_of]
    groups = [names[o::outputs] for o in range(outputs)]
    plan = RegroupPlan.build(layouts, groups)
    leaves = [torch.randn(_ROWS, per_input * _WIDTH, requires_grad=True) for _ in range(inputs)]
    values = [v.detach() for v in leaves]
    grads = [torch.randn(_ROWS, width) for width in plan.out_widths]

    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: regroup_values(values, plan),
        "ours, with backward": lambda: torch.autograd.grad(regroup_values(leaves, plan), leaves, grads),
    }
    calls["ours"]()
    program = next(iter(plan.column_map.calls.values())).program
    if not isinstance(program, kernel._Program):
        raise RuntimeError("the kernel is not what answers")
    variant, apply_map = program.variant, torch.ops.torchrec_kt._apply_map
    calls["ours, operator"] = lambda: apply_map(values, variant.encoded, variant.header, program.cast)
    fbgemm = _fbgemm(groups, layouts, values)
    if fbgemm is not None:
        theirs, arguments = fbgemm
        calls["fbgemm"] = lambda: theirs(values, *arguments)
        calls["fbgemm, with backward"] = lambda: torch.autograd.grad(
            theirs(leaves, *arguments), leaves, grads
        )
        if not all(map(torch.equal, calls["fbgemm"](), calls["ours"]())):
            raise RuntimeError("FBGEMM's operator gives another result")
    with torch.no_grad():
        counted = {name: allocations(call) for name, call in calls.items() if "backward" not in name}
    timed = interleaved(calls, Clock(torch.device("cpu")), Budget(rounds))
    microseconds = {name: 1e6 * found.p50 for name, found in timed.items()}
    return Figures(inputs, outputs, keys, microseconds, counted, _ROWS * 4 * sum(plan.out_widths))


def _fbgemm(
    groups: list[list[str]], layouts: list[tuple[list[str], list[int]]], values: list[Tensor]
) -> tuple[Callable[..., list[Tensor]], tuple[Any, ...]] | None:
    try:
        import fbgemm_gpu  # noqa: F401  registers the operators
    except Exception:  # a build for another torch raises what it likes
        return None
    names, lengths = [keys for keys, _ in layouts], [widths for _, widths in layouts]
    arguments = torch.ops.fbgemm.kt_regroup_arguments(values[0], names, lengths, groups)
    return torch.ops.fbgemm.permute_multi_embedding, tuple(arguments)


def table(figures: list[Figures]) -> str:
    """Markdown."""
    columns = ("ours, operator", "ours", "fbgemm", "ours, with backward", "fbgemm, with backward")
    lines = [
        "| inputs | outputs | keys | " + " | ".join(columns) + " | allocated |",
        "|---:" * (4 + len(columns)) + "|",
    ]
    for f in figures:
        times = [f"{f.microseconds[name]:.1f}" if name in f.microseconds else "-" for name in columns]
        counts = " / ".join(
            str(f.allocations[n][0]) if n in f.allocations else "-" for n in ("ours", "fbgemm")
        )
        lines.append(f"| {f.inputs} | {f.outputs} | {f.keys} | {' | '.join(times)} | {counts} |")
    alone = all(f.allocations["ours"] == (f.outputs, f.output_bytes) for f in figures)
    lines += [
        "",
        f"Microseconds per call, medians of interleaved rounds, float32 [{_ROWS}, {_WIDTH} a key] on the CPU. *ours,"
        " operator*: the compiled operator alone; *ours*: `regroup_values`; *fbgemm*: `permute_multi_embedding`."
        f" *allocated*: tensors by a forward call, ours / fbgemm; ours are {'' if alone else 'not '}the outputs"
        f" alone. {cpu_name()}, torch {torch.__version__}.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", type=Path, help="a host build of the kernel; built if not given")
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_native.LIBRARY_VARIABLE] = str(options.library or build(Path(folder)))
        if not _native.has_kernel("cpu"):
            raise SystemExit(f"no host build of the kernel: {_native.why_not()}")
        kernel._cpu_kernel = True
        print(table([measure(*case, options.rounds) for case in _CASES]))


if __name__ == "__main__":
    main()
