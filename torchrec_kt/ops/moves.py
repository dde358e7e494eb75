"""Maps as tensors of moves: what graphs hold, and back again.

A row is ``(in_tensor, out_tensor, in_offset, out_offset, length)``, int32; a sixth column, as FBGEMM's
plans have, is ignored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from . import plan as _plan
from .plan import ColumnMap

__all__ = [
    "FBGEMM_FIELDS",
    "column_map_from_moves",
    "compiler_behind",
    "device_of",
    "graph_moves",
    "hold_in_graph",
    "moves_beside",
    "recording",
]

_plan.in_graph = torch.compiler.is_dynamo_compiling

_CPU = torch.device("cpu")
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state
_set_tracing_state: Any = torch._C._set_tracing_state  # pyright: ignore[reportAttributeAccessIssue]

# Shapes and maps rarely vary much within one process; the bound is there so that they may.
_MAX_MAPS = 64
_MOVE_FIELDS = 5
FBGEMM_FIELDS = 6
_maps: dict[tuple[Any, ...], ColumnMap] = {}
_contents: dict[tuple[Any, ...], tuple[int | None, bytes, Tensor | None]] = {}
# Fields of a row of moves that a ColumnMap takes, and those with inputs and outputs in each other's place.
_IN_ORDER = [0, 1, 2, 3, 4]
_SWAPPED = [1, 0, 3, 2, 4]


def recording() -> bool:
    """Whether something watches the calls made here, so that it should see one operator."""
    return _is_compiling() or _dispatch_modes() > 0 or _tracing_state() is not None


def moves_beside(values: Sequence[Tensor], column_map: ColumnMap) -> Tensor:
    """The map's moves as the operator takes them: int32, ``[moves, 5]``.

    For a graph they lie on the device of the values, so that the graph holds no constant of another
    device and copies nothing between devices; where nothing is recorded, on the CPU.
    """
    if not recording():
        return graph_moves(column_map, _CPU)
    device = device_of(values, column_map.used_inputs)
    if torch.compiler.is_dynamo_compiling():
        if column_map.in_graph:  # the compiler alone knows a map built inside of the graph
            return _new_moves(column_map, device)
        moves = None
        torch._dynamo.comptime.comptime(_hold_moves)  # sets it, where it can  # pyright: ignore[reportAttributeAccessIssue]
        return graph_moves(column_map, device) if moves is None else moves
    mode = detect_fake_mode(values)
    if mode is None:
        return graph_moves(column_map, device)
    try:
        moves = graph_moves(column_map, device)
    except (AssertionError, RuntimeError):
        # A device that this machine lacks: as fake as the values are.
        with _disable_current_modes(), mode:
            return torch.empty((len(column_map.moves), _MOVE_FIELDS), dtype=torch.int32, device=device)
    return moves if mode.allow_non_fake_inputs else torch.ops.aten.lift_fresh(moves)


@torch.compiler.assume_constant_result
def graph_moves(column_map: ColumnMap, device: torch.device) -> Tensor:
    """The map's moves on a device, kept with the map.

    A compiler calls this while it compiles and makes the result a buffer of its graph, instead of
    following how the tensor comes about.
    """
    found = column_map.recipes.get(("moves", device))
    if found is None:
        # Nothing that records or wraps tensors here may get hold of one that is kept.
        no_functions, no_transforms = torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch()
        with _disable_current_modes(), no_functions, no_transforms, torch.inference_mode(False):
            state = _tracing_state()
            if state is not None:
                _set_tracing_state(None)
            try:
                found = column_map.recipes["moves", device] = _new_moves(column_map, device)
            finally:
                if state is not None:
                    _set_tracing_state(state)
    return found


def compiler_behind(context: Any) -> Any:
    """The compiler whose hook, ``comptime``, is given this; nothing of it is promised to stay."""
    return context._i_will_not_complain_if_bc_breaks_InstructionTranslator()


def hold_in_graph(context: Any, local: str, tensor: Tensor) -> None:
    """Make a tensor a constant of the graph that is being compiled, held by a local variable.

    What a function marked as constant returns becomes one too, but under the name of that function, and
    of constants that share a name the compilers behind the first allow one in a graph: so these have names of
    their own. In a region that is compiled once for all its calls, which takes nothing from outside but inputs,
    it becomes an input that the caller finds under a global name.

    Args:
        context: what the compiler's hook, ``comptime``, is given.
        local: the name of the variable in the function that calls the hook.
    """
    from torch._dynamo.source import ConstantSource, GlobalSource
    from torch._dynamo.variables.base import VariableTracker

    compiler = compiler_behind(context)
    if _in_region(compiler):
        name = compiler.output.install_global_by_id("moves", tensor)
        compiler.symbolic_locals[local] = VariableTracker.build(compiler, tensor, GlobalSource(name))
        return
    name = f"moves_{len(compiler.output.nn_modules)}"
    compiler.symbolic_locals[local] = compiler.output.register_attr_or_module(
        tensor, name, source=ConstantSource(name)
    )


def _in_region(compiler: Any) -> bool:
    """Whether what is compiled now is inside of ``torch.compiler.nested_compile_region``."""
    tracer = compiler.output.current_tracer
    while tracer is not None:
        if tracer.source_target is torch.ops.higher_order.invoke_subgraph:
            return True
        tracer = tracer.parent
    return False


def _hold_moves(context: Any) -> None:
    """Set ``moves`` in :func:`moves_beside`; not where something differs in another release of torch."""
    try:
        local = compiler_behind(context).symbolic_locals
        column_map, device = local["column_map"].realize(), local["device"].as_python_constant()
        if column_map.source is not None:
            from torch._dynamo.guards import GuardBuilder, install_guard

            install_guard(column_map.make_guard(GuardBuilder.ID_MATCH))
        hold_in_graph(context, "moves", graph_moves(column_map.value, device))
    except Exception:
        return


def _new_moves(column_map: ColumnMap, device: torch.device) -> Tensor:
    # No view: autograd saves those as a new tensor in every step, and a plan should be one tensor always.
    if not column_map.moves:
        return torch.empty((0, _MOVE_FIELDS), dtype=torch.int32, device=device)
    return torch.tensor(column_map.moves, dtype=torch.int32, device=device)


def device_of(values: Sequence[Tensor], used: Sequence[int]) -> torch.device:
    """Where moves for these values belong; moves without data would be of no use."""
    device = values[used[0] if used else 0].device if values else _CPU
    return _CPU if device.type == "meta" else device


def column_map_from_moves(
    moves: Tensor, in_widths: Sequence[int], out_widths: Sequence[int], transposed: bool = False
) -> ColumnMap:
    """The map that a tensor of moves describes, found by content or built and checked."""
    if not isinstance(moves, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  the dispatcher lets None in
        raise TypeError(f"the plan tensor is {moves!r}; expected an int32 tensor")
    if moves.is_meta:
        raise ValueError(
            "the plan tensor is on the meta device and holds no data; move it to the values' device"
        )
    if moves.dtype != torch.int32 or moves.dim() != 2 or moves.shape[1] not in (_MOVE_FIELDS, FBGEMM_FIELDS):
        raise ValueError(
            f"the plan tensor is {moves.dtype} of shape {tuple(moves.shape)}; expected int32 of shape "
            f"[moves, {_MOVE_FIELDS}] or [moves, {FBGEMM_FIELDS}]"
        )
    content, fields = _content(moves), moves.shape[1]
    key = (content, fields, tuple(in_widths), tuple(out_widths), transposed)
    found = _maps.get(key)
    if found is None:
        # From the bytes at hand: moves on a device are not copied to the host again.
        numbers = memoryview(content).cast("i").tolist()
        order = _SWAPPED if transposed else _IN_ORDER
        rows = ([numbers[start + field] for field in order] for start in range(0, len(numbers), fields))
        found = ColumnMap(rows, in_widths, out_widths)
        if len(_maps) >= _MAX_MAPS:
            _maps.clear()
        _maps[key] = found
    return found


def _content(moves: Tensor) -> bytes:
    """The bytes of a tensor of moves. By content, since a tensor can be changed in place."""
    # A change of an inference tensor leaves no trace.
    return _bytes(moves) if moves.device.type == "cpu" or moves.is_inference() else _bytes_once(moves)


def _bytes_once(moves: Tensor) -> bytes:
    """The bytes of a tensor on a device, copied to the host once: a copy has to wait for the device."""
    # By the storage, not by the address: memory that its tensor does not own, as the constants of an AOTInductor
    # model do not, can become that of another tensor.
    storage = moves.untyped_storage()._cdata
    key = (moves.device, storage, moves.storage_offset(), moves.shape, moves.stride())
    version, content, _ = _contents.get(key, (None, b"", None))
    if version != moves._version:
        content = _bytes(moves)
        if len(_contents) >= _MAX_MAPS:
            _contents.clear()
        # A view is kept, so this storage is no other one as long as the entry is here.
        _contents[key] = moves._version, content, moves.detach()
    return content


def _bytes(moves: Tensor) -> bytes:
    rows = moves.detach().cpu().contiguous()
    return ctypes.string_at(rows.data_ptr(), rows.numel() * 4) if rows.numel() else b""
