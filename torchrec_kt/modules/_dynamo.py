"""One guard for a list of names or widths, in place of one for each of its items.

The compiler of ``torch.compile`` knows a list of an input item by item, and guards each item as soon as
something looks at it. Its hook ``comptime`` is meant for adding guards by hand, among other uses; what
lies behind that hook may change with any release of torch. It is used here and, for constants of graphs,
in :mod:`torchrec_kt.ops.moves`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch._dynamo.comptime import ComptimeContext, comptime
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torchrec.sparse.jagged_tensor import KeyedTensor

from ..ops.moves import compiler_behind

_PLAIN = frozenset((str, int))

__all__ = ["GuardedCall", "comptime", "constants", "guarded_call", "set_locals"]


class GuardedCall(NamedTuple):
    """What the compiled code is for alone."""

    names: list[list[str]]
    widths: list[list[int]]
    dims: list[int]
    groups: list[list[str]]


def guarded_call(context: ComptimeContext, keyed_tensors: str, groups: str) -> GuardedCall | None:
    """Names, widths and ``key_dim`` of the KeyedTensors and the groups in these local variables.

    Returns:
        None unless the first is a list of one or more KeyedTensors.
    """
    compiler = compiler_behind(context)
    local: dict[str, Any] = compiler.symbolic_locals
    inputs = local[keyed_tensors].realize()
    if not _is_list(inputs) or not inputs.items:
        return None
    call = GuardedCall([], [], [], _guarded(compiler, local[groups]))
    for item in inputs.items:
        kt: Any = item.realize()
        if not isinstance(kt, UserDefinedObjectVariable) or type(kt.value) is not KeyedTensor:
            return None
        call.names.append(_guarded(compiler, _attribute(compiler, kt, "_keys")))
        call.widths.append(_guarded(compiler, _attribute(compiler, kt, "_length_per_key")))
        call.dims.append(_guarded(compiler, _attribute(compiler, kt, "_key_dim")))
    return call


def constants(context: ComptimeContext, *names: str) -> list[Any]:
    """What these local variables hold, which the compiler knows."""
    compiler = compiler_behind(context)
    return [compiler.symbolic_locals[name].as_python_constant() for name in names]


def set_locals(context: ComptimeContext, **values: int | tuple[int, ...]) -> None:
    """Give local variables of the function that is being compiled these constants."""
    compiler = compiler_behind(context)
    for name, value in values.items():
        compiler.symbolic_locals[name] = VariableTracker.build(compiler, value)


def _attribute(compiler: Any, variable: Any, name: str) -> Any:
    arguments = [variable, VariableTracker.build(compiler, name)]
    return VariableTracker.build(compiler, getattr).call_function(compiler, arguments, {})


def _guarded(compiler: Any, variable: Any) -> Any:
    """What a variable holds, with a guard on it."""
    if isinstance(variable, LazyVariableTracker):
        if variable.is_realized():
            variable = variable.unwrap()
        else:
            value = variable.peek_value()
            if _is_plain(value) and not _is_tracked(compiler, value):
                source = variable.original_source()
                install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))
                # Where code of a region is used again, what it read is compared; torch 2.11 does not do that yet.
                getattr(compiler.output.current_tracer, "traced_sources", set()).add(source)
                return value
            variable = variable.realize()
    if _is_list(variable):
        # Most items of a list that was looked at are constants; at a thousand names a call for each counts.
        known = [item.unwrap() for item in variable.items]
        return [
            item.value if type(item) is ConstantVariable else _guarded(compiler, item) for item in known
        ]
    if isinstance(variable, SymNodeVariable):
        return variable.evaluate_expr()
    return variable.as_python_constant()


def _is_list(variable: Any) -> bool:
    return isinstance(variable, (ListVariable, TupleVariable))


def _is_tracked(compiler: Any, value: Any) -> bool:
    """Whether the function may have changed a list, under whatever name; its value here is the old one."""
    if type(value) is not list:
        return False
    return value in compiler.output.side_effects or any(
        _is_tracked(compiler, item) for item in value if type(item) is list
    )


def _is_plain(value: Any) -> bool:
    """Whether equal values are interchangeable: names, integers, and lists of them."""
    if type(value) is not list:
        return type(value) in _PLAIN
    return _PLAIN.issuperset(map(type, value)) or all(map(_is_plain, value))
