"""One guard for a list of names or widths, in place of one for each of its items.

The compiler of ``torch.compile`` knows a list of an input item by item, and guards each item as soon as
something looks at it, as the constructor of KeyedTensors does. At a thousand keys these guards are a third of
the time of a compilation, and every call checks them. The compiler's hook ``comptime`` is meant for adding
guards by hand, among other uses; what lies behind that hook may change with any release of torch. It is used
here and, for constants of graphs, in :mod:`torchrec_kt.ops.moves`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch._dynamo.comptime import ComptimeContext, comptime
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torchrec.sparse.jagged_tensor import KeyedTensor

from ..ops.moves import compiler_behind

_PLAIN = frozenset((str, int))
_ON_VALUES = frozenset(("CONSTANT_MATCH", "EQUALS_MATCH"))

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
    whole: set[Any] = set()
    call = GuardedCall([], [], [], _guarded(compiler, local[groups], whole))
    for item in inputs.items:
        kt: Any = item.realize()
        if not isinstance(kt, UserDefinedObjectVariable) or type(kt.value) is not KeyedTensor:
            return None
        call.names.append(_guarded(compiler, _attribute(compiler, kt, "_keys"), whole))
        call.widths.append(_guarded(compiler, _attribute(compiler, kt, "_length_per_key"), whole))
        call.dims.append(_guarded(compiler, _attribute(compiler, kt, "_key_dim"), whole))
    _drop_guards_of_items(compiler, whole)
    return call


def constants(context: ComptimeContext, *names: str) -> list[Any]:
    """What these local variables hold, which the compiler knows."""
    compiler = compiler_behind(context)
    return [compiler.symbolic_locals[name].as_python_constant() for name in names]


def set_locals(context: ComptimeContext, **values: int | tuple[int, ...]) -> None:
    """Give local variables of the function that is being compiled these constants: all of them or none."""
    compiler = compiler_behind(context)
    built = {name: VariableTracker.build(compiler, value) for name, value in values.items()}
    compiler.symbolic_locals.update(built)


def _attribute(compiler: Any, variable: Any, name: str) -> Any:
    arguments = [variable, VariableTracker.build(compiler, name)]
    return VariableTracker.build(compiler, getattr).call_function(compiler, arguments, {})


def _guarded(compiler: Any, variable: Any, whole: set[Any]) -> Any:
    """What a variable holds, with a guard on it.

    Args:
        whole: the sources of lists that are guarded as a whole are added here.
    """
    if isinstance(variable, LazyVariableTracker):
        if variable.is_realized():
            variable = variable.unwrap()
        else:
            value = variable.peek_value()
            if _is_plain(value) and not _is_tracked(compiler, value):
                _guard(compiler, variable.original_source(), GuardBuilder.EQUALS_MATCH)
                return value
            variable = variable.realize()
    if type(variable) is ConstantVariable:
        return variable.value
    if _is_list(variable):
        values = list(map(_constant, variable.items))
        if (
            variable.source is not None
            and _all_plain(values)
            and not compiler.output.side_effects.is_modified(variable)
        ):
            if _guard(compiler, variable.source, GuardBuilder.EQUALS_MATCH):
                whole.add(variable.source)
            return values
        return [_guarded(compiler, item, whole) for item in variable.items]
    if isinstance(variable, SymNodeVariable):
        return variable.evaluate_expr()
    return variable.as_python_constant()


def _constant(item: Any) -> Any:
    """What an item of a list holds, as far as that can be told without a guard; else None."""
    item = item.unwrap()
    if type(item) is ConstantVariable:
        return item.value
    # The compiler's classes answer isinstance() in Python, which among thousands of names counts.
    return item.peek_value() if issubclass(type(item), LazyVariableTracker) else None


def _guard(compiler: Any, source: Any, kind: Any) -> bool:
    """Guard a value as a whole; false where the compiler takes no guards at present."""
    guard = source.make_guard(kind)
    install_guard(guard)
    # Where code of a region is used again, what it read is compared; torch 2.11 does not do that yet.
    getattr(compiler.output.current_tracer, "traced_sources", set()).add(source)
    return guard in compiler.output.guards.inner


def _drop_guards_of_items(compiler: Any, whole: set[Any]) -> None:
    """Drop the guards on values of items of lists that have a guard as a whole, which implies them.

    Those compare types as well, which ``==`` does not: what is dropped had been looked at, perhaps for
    being a string and not an enum. Equal items that are plain are of the same type.
    """
    guards = compiler.output.guards.inner
    implied: dict[Any, list[Any]] = {}
    for guard in guards:
        source = getattr(guard.originating_source, "base", None)
        if source in whole and guard.create_fn_name() in _ON_VALUES:
            implied.setdefault(source, []).append(guard)
    for source, of_items in implied.items():
        if _guard(compiler, source, EQUALS_MATCH):
            for guard in of_items:
                guards.discard(guard)


def EQUALS_MATCH(builder: Any, guard: Any) -> None:
    """Guard the items of a list as plain ones.

    In addition to the compiler's guard of this name: by the name it finds what it has to know about a guard.
    """
    reason = f"{{*map(type, {builder.arg_ref(guard)})}} <= {{str, int}}"
    builder.get_guard_manager(guard).add_lambda_guard(
        _all_plain, get_verbose_code_parts(reason, guard), guard.user_stack
    )


def _all_plain(items: Any) -> bool:
    return _PLAIN.issuperset(map(type, items))


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
    return _all_plain(value) or all(map(_is_plain, value))
