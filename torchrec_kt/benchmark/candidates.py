"""What is measured side by side: this package's ways to regroup, TorchRec's and FBGEMM's.

Each factory takes a workload and a device and returns a function of the inputs, or raises: then the
table shows the reason. TorchRec and FBGEMM are imported when a factory of theirs runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from ..ops import regroup_values
from ..ops.plan import ColumnMap
from ..ops.torch_impl import Program, Strategy, TensorMeta, compile_map, strategy_counts
from .measuring import Budget, CannotRun, Clock, rounds_of
from .results import OURS
from .workloads import Workload

__all__ = ["ALIKE", "BARE", "CAT_SPLIT", "FUNCTION", "MODULE", "OPERATOR", "REGROUP", "Candidate", "Factory"]

Candidate = Callable[[list[Any]], Sequence[Tensor]]
Factory = Callable[[Workload, torch.device], Candidate]

MODULE = "TorchRec module"
REGROUP = "KeyedTensor.regroup"
CAT_SPLIT = "cat/split"
# The floor of ours on a CPU, made of its own parts: a yardstick, not a peer.
BARE = "bare calls"


def our_module(workload: Workload, device: torch.device) -> Candidate:
    """The drop-in module."""
    from ..modules import KTRegroupAsDict

    module = KTRegroupAsDict(workload.groups, workload.names, _emb_dtype(workload))
    return lambda kts: list(module(kts).values())


def our_function(workload: Workload, device: torch.device) -> Candidate:
    """The function, with its cache of plans."""
    from ..modules import regroup

    if workload.cast is not None:
        raise CannotRun("takes no target type")
    return lambda kts: regroup(kts, workload.groups)


def torchrec_module(workload: Workload, device: torch.device) -> Candidate:
    """TorchRec's module, over FBGEMM's ``permute_multi_embedding``, its plan kept."""
    from torchrec.modules.regroup import KTRegroupAsDict

    module = KTRegroupAsDict(workload.groups, workload.names, _emb_dtype(workload))
    return lambda kts: list(module(kts).values())


def keyed_tensor_regroup(workload: Workload, device: torch.device) -> Candidate:
    """The static method: FBGEMM's older operator, or slicing where keys repeat or are left out."""
    from torchrec.sparse.jagged_tensor import KeyedTensor

    return _cast_after(workload, lambda kts: KeyedTensor.regroup(kts, workload.groups))


def cat_split(workload: Workload, device: torch.device) -> Candidate:
    """TorchRec's ``_regroup_keyed_tensors``: one ``torch.cat`` of slices, then a split into views."""
    from torchrec.sparse.jagged_tensor import _regroup_keyed_tensors

    return _cast_after(workload, lambda kts: _regroup_keyed_tensors(kts, workload.groups))


def two_operators(workload: Workload, device: torch.device) -> Candidate:
    """FBGEMM's planner in C++ and its permute, both in each call."""
    from torchrec.sparse.jagged_tensor import permute_multi_embedding

    return _cast_after(workload, lambda kts: permute_multi_embedding(kts, workload.groups))


def one_operator(workload: Workload, device: torch.device) -> Candidate:
    """The same as one operator."""
    from torchrec.sparse.jagged_tensor import regroup_kts

    return _cast_after(workload, lambda kts: regroup_kts(kts, workload.groups))


def bare_calls(workload: Workload, device: torch.device) -> Candidate:
    """The torch calls that move the columns in the fastest way, indices at hand, nothing around them.

    With gradients they run inside an autograd function that does nothing else.
    """
    if device.type != "cpu":
        raise CannotRun("are how columns are moved on a CPU")
    column_map = workload.plan.column_map
    into, out = workload.dtype, workload.cast or workload.dtype
    forwards = _Programs(column_map, into, out, workload.batch)
    backwards = _Programs(column_map.transpose(), out, into, workload.batch)

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
            return tuple(forwards[values[0].size(0)](values))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return tuple(backwards[grads[0].size(0)](grads))

    def call(kts: list[Any]) -> Sequence[Tensor]:
        values = [kt.values() for kt in kts]
        if torch.is_grad_enabled():
            return Bare.apply(*values)  # pyright: ignore[reportReturnType]
        return forwards[values[0].size(0)](values)

    return call


class _Programs(dict[int, Program]):
    """One map for each number of rows, moved in the way that is fastest for ``rows``."""

    def __init__(self, column_map: ColumnMap, into: torch.dtype, out: torch.dtype, rows: int) -> None:
        super().__init__()
        self._map, self._into, self._out = column_map, into, out
        ways = {way: self.compiled(rows, way) for way in get_args(Strategy) if self.serves(rows, way)}
        values = [torch.ones(rows, width, dtype=into) for width in column_map.in_widths]
        moved = 2 * sum(value.nbytes for value in values)
        calls = {way: partial(program, values) for way, program in ways.items()}
        timed = rounds_of(calls, Clock(torch.device("cpu")), Budget(rounds=5, seconds=3), moved)
        # By the least of the rounds: other work on the machine only ever adds.
        self._way: Strategy = min(ways, key=lambda way: min(timed[way]))
        self[rows] = ways[self._way]

    def __missing__(self, rows: int) -> Program:
        return self.setdefault(rows, self.compiled(rows, self._way))

    def serves(self, rows: int, way: Strategy) -> bool:
        return strategy_counts(self._map, self._inputs(rows), self._out, 1, way) is not None

    def compiled(self, rows: int, way: Strategy) -> Program:
        return compile_map(self._map, self._inputs(rows), self._out, 1, way)

    def _inputs(self, rows: int) -> list[TensorMeta]:
        return [TensorMeta((rows, width), self._into, torch.device("cpu")) for width in self._map.in_widths]


# These run the same kernel as TorchRec's module and plan anew in each call.
ALIKE = ("FBGEMM, two operators", "FBGEMM, one operator")

# Function level: KeyedTensors in, one tensor per group out.
FUNCTION: Mapping[str, Factory] = {
    OURS: our_module,
    f"{OURS}, function": our_function,
    MODULE: torchrec_module,
    REGROUP: keyed_tensor_regroup,
    CAT_SPLIT: cat_split,
    ALIKE[0]: two_operators,
    ALIKE[1]: one_operator,
    BARE: bare_calls,
}


def our_operator(workload: Workload, device: torch.device) -> Candidate:
    """``regroup_values`` with a plan made beforehand."""
    plan = workload.plan
    return lambda values: regroup_values(values, plan, workload.cast)


def our_fbgemm_form(workload: Workload, device: torch.device) -> Candidate:
    """The operator in FBGEMM's form: a plan of tensors, checked on every call."""
    arguments = _plan_tensors(workload, device)
    return lambda values: torch.ops.torchrec_kt.permute_multi_embedding(values, *arguments)


def slices(workload: Workload, device: torch.device) -> Candidate:
    """``split`` and one ``torch.cat`` per group."""

    def call(values: list[Any]) -> list[Tensor]:
        parts: dict[str, Tensor] = {}
        for keys, widths, value in zip(workload.keys, workload.widths, values):
            parts.update(zip(keys, value.split(widths, 1)))
        return [torch.cat([parts[key] for key in group], 1) for group in workload.groups]

    return call


def permute_multi_embedding(workload: Workload, device: torch.device) -> Candidate:
    """FBGEMM's operator with a plan made beforehand."""
    import fbgemm_gpu  # noqa: F401

    arguments = _plan_tensors(workload, device)
    return lambda values: torch.ops.fbgemm.permute_multi_embedding(values, *arguments)


def permute_pooled_embs(workload: Workload, device: torch.device) -> Candidate:
    """FBGEMM's older operator with what its one input and one output take: join before, split after."""
    permute = _pooled(workload, device)
    widths = list(workload.plan.out_widths)
    return lambda values: permute(torch.cat(values, 1)).split(widths, 1)


def permute_pooled_embs_joined(workload: Workload, device: torch.device) -> Candidate:
    """The older operator alone; joining the inputs is not timed. Half of the job."""
    permute = _pooled(workload, device)
    widths = list(workload.plan.out_widths)
    joined: dict[tuple[int, ...], Tensor] = {}

    def call(values: list[Any]) -> Sequence[Tensor]:
        key = tuple(v.data_ptr() for v in values)
        found = joined.get(key)
        if found is None or values[0].requires_grad:
            # With gradients the join is part of the graph.
            found = torch.cat(values, 1)
            if not found.requires_grad:
                joined.clear()
                joined[key] = found
        return permute(found).split(widths, 1)

    return call


# Operator level: tensors in and out, plans made beforehand.
OPERATOR: Mapping[str, Factory] = {
    OURS: our_operator,
    f"{OURS}, FBGEMM's form": our_fbgemm_form,
    "permute_multi_embedding": permute_multi_embedding,
    "permute_pooled_embs": permute_pooled_embs,
    "permute_pooled_embs, joined": permute_pooled_embs_joined,
    CAT_SPLIT: slices,
}


def _emb_dtype(workload: Workload) -> Any:
    if workload.cast is None:
        return None
    from torchrec.modules.embedding_configs import DataType

    return {torch.bfloat16: DataType.BF16, torch.float16: DataType.FP16, torch.float32: DataType.FP32}[
        workload.cast
    ]


def _cast_after(workload: Workload, candidate: Candidate) -> Candidate:
    cast = workload.cast
    return candidate if cast is None else lambda kts: [t.to(cast) for t in candidate(kts)]


def _plan_tensors(workload: Workload, device: torch.device) -> tuple[Any, ...]:
    value = torch.empty(0, device=device)
    return tuple(
        torch.ops.torchrec_kt.kt_regroup_arguments(value, workload.keys, workload.widths, workload.groups)
    )


def _pooled(workload: Workload, device: torch.device) -> Callable[[Tensor], Tensor]:
    import fbgemm_gpu  # noqa: F401

    keys = [key for row in workload.keys for key in row]
    widths = torch.tensor([width for row in workload.widths for width in row])
    used = [key for group in workload.groups for key in group]
    if sorted(used) != sorted(keys):
        raise CannotRun("takes every key exactly once")
    place = {key: n for n, key in enumerate(keys)}
    permute = torch.tensor([place[key] for key in used])
    inverse = torch.empty_like(permute)
    inverse[permute] = torch.arange(len(used))
    offsets = torch.nn.functional.pad(widths.cumsum(0), (1, 0))
    inverse_offsets = torch.nn.functional.pad(widths[permute].cumsum(0), (1, 0))
    arguments = [t.to(device) for t in (offsets, permute, inverse_offsets, inverse)]
    return lambda joined: torch.ops.fbgemm.permute_pooled_embs_auto_grad(joined, *arguments)
