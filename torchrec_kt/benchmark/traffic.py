"""What the CUDA kernel asks memory for, counted on the host: no GPU needed.

    python -m torchrec_kt.benchmark.traffic                  # every workload
    python -m torchrec_kt.benchmark.traffic --only ctr --library torchrec_kt_cuda.so

The kernel's body is compiled for the host and walked warp by warp over a sample of its blocks, watching
every access instead of making it. A *request* is one load or store instruction of a warp, a *sector* is 32
bytes. *Loads* and *stores* say what share of the sectors requested are needed: those in which the bytes
that the warp moves lie, each counted once. *Full* is the bytes moved over the bytes of all sectors
requested; narrow or misaligned keys fill their sectors in part, whoever moves them. *Map* is the size
of the encoded map over the bytes that a call moves, *Read* what its threads read of it, mostly from the
cache. *Idle* is the share of threads that move nothing. Needs g++; instructions are read from a compiled
library if one is given.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from ..ops.kernel import VECTOR_BYTES, encoder_input, longest_vector
from ..ops.plan import ColumnMap
from .sass import instructions_per_16_bytes
from .workloads import Workload, function_workloads

__all__ = ["Traffic", "count_workload", "counter"]

# As Element in csrc/backend.h.
_ELEMENTS = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.float64: 4}
_SECTOR_BYTES = 32
# An H200: 132 processors, 1,024 threads of 64 registers on each.
_RESIDENT_THREADS = 132 * 1024
_SAMPLED_BLOCKS = 150


class Traffic(NamedTuple):
    """Counts over the sampled blocks of one application of a map."""

    threads: int
    idle_threads: int
    load_bytes: int
    store_bytes: int
    load_requests: int
    store_requests: int
    load_sectors: int
    store_sectors: int
    load_needed: int
    store_needed: int
    map_bytes: int
    map_size: int  # of the whole map
    moved: int  # bytes that the whole call reads and writes

    @property
    def load_efficiency(self) -> float:
        """Sectors needed over sectors requested."""
        return self.load_needed / self.load_sectors if self.load_sectors else 1.0

    @property
    def store_efficiency(self) -> float:
        """Sectors needed over sectors requested."""
        return self.store_needed / self.store_sectors

    @property
    def fullness(self) -> float:
        """Bytes moved over the bytes of all sectors requested."""
        return (self.load_bytes + self.store_bytes) / (
            _SECTOR_BYTES * (self.load_sectors + self.store_sectors)
        )

    @property
    def map_share(self) -> float:
        """Size of the map over the bytes that a call moves."""
        return self.map_size / self.moved

    @property
    def map_reads(self) -> float:
        """Bytes of the map that threads read over the bytes they move."""
        return self.map_bytes / (self.load_bytes + self.store_bytes)

    @property
    def idle(self) -> float:
        """Share of threads that move nothing."""
        return self.idle_threads / self.threads


class Counter:
    """The counting build of the kernel."""

    def __init__(self, library: Path) -> None:
        self._count = ctypes.CDLL(str(library)).count_traffic
        self._count.restype = ctypes.c_int

    def __call__(
        self,
        column_map: ColumnMap,
        in_widths: list[int],
        rows: int,
        source: torch.dtype,
        target: torch.dtype,
        stride: int = 1,
    ) -> Traffic:
        """Count over every ``stride``-th block; ``in_widths`` are the real widths of the inputs in use."""
        arithmetic = source != target or column_map.max_fan_in > 1
        max_log = longest_vector(source, target)
        widths = [*in_widths, *column_map.out_widths]
        logs = [min(max_log, (width & -width).bit_length() - 1) if rows > 1 else max_log for width in widths]
        pieces = encoder_input(column_map)
        counts = (ctypes.c_int64 * (len(Traffic._fields) - 1))()
        filled = self._count(
            (ctypes.c_int64 * len(pieces))(*pieces),
            ctypes.c_int64(len(pieces)),
            (ctypes.c_int64 * len(logs))(*logs),
            ctypes.c_int64(len(widths)),
            max_log,
            (ctypes.c_int64 * len(widths))(*widths),
            ctypes.c_int64(rows),
            _ELEMENTS[source] if arithmetic else 0,
            _ELEMENTS[target] if arithmetic else 0,
            source.itemsize,
            target.itemsize,
            ctypes.c_int64(_RESIDENT_THREADS),
            ctypes.c_int64(stride),
            counts,
        )
        if filled != len(counts):
            raise RuntimeError("the counting build failed; its message is on the standard error stream")
        copied = sum(move.length for move in column_map.moves)
        moved = rows * (copied * source.itemsize + sum(column_map.out_widths) * target.itemsize)
        return Traffic._make([*counts, moved])


@contextmanager
def counter() -> Iterator[Counter]:
    """Compile the counting build; takes some seconds and needs g++."""
    with (
        resources.as_file(resources.files("torchrec_kt.ops").joinpath("csrc")) as sources,
        tempfile.TemporaryDirectory() as folder,
    ):
        library = Path(folder) / "count.so"
        command = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-o", library, sources / "count.cpp"]
        subprocess.run(command, check=True)
        yield Counter(library)


def count_workload(count: Counter, workload: Workload) -> tuple[Traffic, Traffic]:
    """Forward and backward."""
    column_map = workload.plan.column_map
    in_widths = [sum(workload.widths[i]) for i in column_map.used_inputs]
    target = workload.cast or workload.dtype
    item_bytes = max(workload.dtype.itemsize, target.itemsize)
    threads = workload.batch * sum(column_map.out_widths) * item_bytes // VECTOR_BYTES // 8
    stride = max(1, threads // 256 // _SAMPLED_BLOCKS)
    forward = count(column_map, in_widths, workload.batch, workload.dtype, target, stride)
    transposed = column_map.transpose()
    out_widths = [transposed.in_widths[i] for i in transposed.used_inputs]
    return forward, count(transposed, out_widths, workload.batch, target, workload.dtype, stride)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="workloads whose name holds this word")
    parser.add_argument("--library", type=Path, help="compiled CUDA library to read instructions from")
    arguments = parser.parse_args()
    table = Table("Workload", "%", "Loads", "Stores", "Full", "Map", "Read", "Idle")
    with counter() as count:
        for name, workload in function_workloads().items():
            if arguments.only not in name:
                continue
            for direction, traffic in zip(("forward", "backward"), count_workload(count, workload)):
                shares = (
                    traffic.load_efficiency,
                    traffic.store_efficiency,
                    traffic.fullness,
                    traffic.map_share,
                    traffic.map_reads,
                    traffic.idle,
                )
                table.add_row(
                    name if direction == "forward" else "", direction, *(f"{100 * s:.1f}" for s in shares)
                )
    console = Console()
    console.print(table)
    if arguments.library:
        for size, instructions in instructions_per_16_bytes(arguments.library).items():
            console.print(
                f"{size:>2}-byte vectors: {instructions:.2f} instructions per 16 bytes copied (sm_90)"
            )


if __name__ == "__main__":
    main()
