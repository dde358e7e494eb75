"""What a compiler follows in place of an eager call.

A plan depends on names and widths alone, which a compiler knows, so it is looked up while compiling and
its moves become a constant of the graph. Code that is handed other names or widths has to be compiled
anew, which guards see to. A compiler that follows the look-up guards every name by itself: at a thousand
keys that takes tenths of a second, and every call checks them one by one. Where the compiler is one that
:mod:`._dynamo` knows, each list has one guard instead.
"""

import operator
from collections import OrderedDict
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from ..ops.moves import device_of, graph_moves, hold_in_graph, moves_beside
from ..ops.plan import RegroupPlan, UnknownKeyError
from ..ops.regroup import regroup_by_moves
from ._inputs import PlanCache, common_key_dim, unpack

try:
    from . import _dynamo as dynamo
except ImportError:  # no release of torch promises to keep what it is made of
    dynamo: Any = None

__all__ = ["numbered_plan", "regroup_compiled"]

_plans = PlanCache(size=64)
# Compilers take numbers for constants, and plans not. A number is read by the compilation that asked for it.
_numbered: OrderedDict[int, RegroupPlan] = OrderedDict()
_numbers = count()


class HoldsMoves(Protocol):
    """A module that keeps moves for graphs."""

    def _moves_for_export(self) -> Tensor:
        """The moves kept."""
        ...

    def _holds_moves(self, plan_number: int, device: torch.device) -> bool:
        """Whether they are those of this plan, on this device."""
        ...


def regroup_compiled(
    keyed_tensors: list[KeyedTensor],
    groups: list[list[str]],
    dtype: torch.dtype | None = None,
    holder: HoldsMoves | None = None,
) -> list[Tensor]:
    """What the compilers of ``torch.compile`` and ``torch.export`` follow.

    In one function as far as it goes: each call that they follow costs them some half a millisecond.
    """
    plan_number, key_dim, out_widths, used, moves = -1, 1, (), (), None
    if dynamo is not None:
        dynamo.comptime(_look_up)  # sets all but the moves, where it can
    if plan_number >= 0:
        values = [kt._values for kt in keyed_tensors]
    elif len(keyed_tensors) == 0 and len(groups) == 0:
        return []
    else:
        values, plan_number, key_dim, out_widths, used = _look_up_step_by_step(keyed_tensors, groups)
    device = device_of(values, used)
    # A program that is exported takes the module's own buffer along. Compiled code does not: the module
    # may hold another plan later, and nothing would tell the code to be compiled anew.
    if holder is not None and torch.compiler.is_exporting() and holder._holds_moves(plan_number, device):
        moves = holder._moves_for_export()
    elif torch.compiler.is_dynamo_compiling():
        if dynamo is not None:
            dynamo.comptime(_hold_moves)  # sets them, where it can
        if moves is None:
            moves = _moves(plan_number, device)
    else:
        moves = moves_beside(values, numbered_plan(plan_number).column_map)
    return regroup_by_moves(values, moves, out_widths, used, key_dim, dtype)


def _look_up_step_by_step(
    keyed_tensors: list[KeyedTensor], groups: list[list[str]]
) -> tuple[list[Tensor], int, int, tuple[int, ...], tuple[int, ...]]:
    unpacked = unpack(keyed_tensors)
    if unpacked is None:
        raise TypeError(
            "keyed_tensors holds torch.fx proxies, which cannot be compiled; expected KeyedTensors"
        )
    names, widths, values, dims = unpacked
    # Integers that the compiler would let vary become constants.
    widths = [list(map(operator.index, row)) for row in widths]
    plan_number, kind, message = _number(groups, names, widths)
    if plan_number < 0:  # raised here, the compiler knows the exception, so that compiled code may catch it
        if kind == "UnknownKeyError":
            raise UnknownKeyError(message)
        if kind == "TypeError":
            raise TypeError(message)
        raise ValueError(message)
    out_widths, used = _widths_and_inputs(plan_number)
    key_dim = common_key_dim(list(map(operator.index, dims)), values, used)
    return values, plan_number, key_dim, out_widths, used


def numbered_plan(plan_number: int) -> RegroupPlan:
    """The plan of this number."""
    return _numbered[plan_number]


# --- what a compiler runs while it compiles, and takes the results for constants -------------------


@torch.compiler.assume_constant_result
def _number(groups: Any, names: Any, widths: Any) -> tuple[int, str, str]:
    """The number of the plan for these; or -1, and the name and text of the exception."""
    try:
        plan = _plans.find(groups, names, widths).plan
    except (KeyError, TypeError, ValueError) as error:
        return -1, type(error).__name__, str(error)
    number = next(_numbers)
    _numbered[number] = plan
    if len(_numbered) > 64:
        _numbered.popitem(last=False)
    return number, "", ""


@torch.compiler.assume_constant_result
def _widths_and_inputs(plan_number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = numbered_plan(plan_number)
    return plan.out_widths, plan.column_map.used_inputs


@torch.compiler.assume_constant_result
def _moves(plan_number: int, device: torch.device) -> Tensor:
    return graph_moves(numbered_plan(plan_number).column_map, device)


def _hold_moves(context: Any) -> None:
    """Set ``moves`` of :func:`regroup_compiled` to a constant of the graph."""
    try:
        plan_number, device = dynamo.constants(context, "plan_number", "device")
        hold_in_graph(context, "moves", graph_moves(numbered_plan(plan_number).column_map, device))
    except Exception:
        return


def _look_up(context: Any) -> None:
    """Set what :func:`regroup_compiled`, which is being compiled, has to know of its plan.

    Not where something is unusual, wrong, or differs in another release of torch: the compiler then
    follows the function, and guards added before hold all the same.
    """
    try:
        call = dynamo.guarded_call(context, "keyed_tensors", "groups")
        if call is not None and call.dims.count(call.dims[0]) == len(call.dims):
            number, _, _ = _number(call.groups, call.names, call.widths)
            if number >= 0:
                out_widths, used = _widths_and_inputs(number)
                dynamo.set_locals(
                    context, plan_number=number, key_dim=call.dims[0], out_widths=out_widths, used=used
                )
    except Exception:
        return
