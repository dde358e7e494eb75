"""``KTRegroupAsDict``: a drop-in for TorchRec's module of that name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torchrec.modules.embedding_configs import DataType, data_type_to_dtype
from torchrec.modules.regroup import KTRegroupAsDict as TorchRecKTRegroupAsDict
from torchrec.modules.regroup import PermuteMultiEmbedding as TorchRecPermuteMultiEmbedding
from torchrec.sparse.jagged_tensor import KeyedTensor

from ..ops.compat import plan_rows
from ..ops.plan import ColumnMap, RegroupPlan
from ..ops.regroup import apply_column_map
from ._compiled import numbered_plan, regroup_compiled
from ._inputs import CachedPlan, PlanCache, check_names, common_key_dim, unpack
from .layout import Layout, read_layout

__all__ = ["KTRegroupAsDict", "PermuteMultiEmbedding"]

# Layouts alternate when one module serves several sources, or while a model is being sharded.
_PLANS_PER_MODULE = 8


class _Lists(List[Any]):
    """Lists that exporters take for a single value; through plain ones they walk item by item."""


class PermuteMultiEmbedding(TorchRecPermuteMultiEmbedding):
    """Holds one plan as tensors and applies it: the part of :class:`KTRegroupAsDict` that graphs see.

    Args:
        groups: keys of each output; kept for readers, the plan decides.
        multi_device: move the plan to the device of the values in each call.
    """

    _groups: List[List[str]]
    _layout_keys: List[List[str]]
    _layout_widths: List[List[int]]

    def __init__(self, groups: List[List[str]], multi_device: bool = False) -> None:
        super().__init__(groups, multi_device)
        self._groups = _Lists(groups)
        # What the plan was made for: kept beside it, since shallow copies of the owner share both.
        self._layout_keys = []
        self._layout_widths = []
        self._key_dim = 1
        self.register_buffer("_permutes", torch.empty((0, 6), dtype=torch.int32), persistent=False)
        self.register_buffer("_in_shapes", torch.empty(0, dtype=torch.int32), persistent=False)
        self.register_buffer("_out_shapes", torch.empty(0, dtype=torch.int32), persistent=False)

    def forward(
        self, values: List[Tensor], key_dim: int = 1, dtype: Optional[torch.dtype] = None
    ) -> List[Tensor]:
        """Rearrange the columns of ``values`` by the plan held.

        Args:
            values: one tensor per input, columns in dimension ``key_dim``.
            key_dim: the dimension that holds the columns.
            dtype: of the outputs; by default that of the values.

        Raises:
            RuntimeError: there is no plan yet.
        """
        out_lengths = self._out_lengths
        if out_lengths is None:
            raise RuntimeError(
                "PermuteMultiEmbedding has no plan yet; call init_tensors, or run or prepare the KTRegroupAsDict "
                "it belongs to"
            )
        permutes = self._permutes
        if self._multi_device:
            permutes = permutes.to(values[0].device, non_blocking=True)
        return torch.ops.torchrec_kt.regroup(values, permutes, out_lengths, key_dim, dtype)

    @torch.jit.export
    def set_device(self, device: str) -> None:
        """Move the plan. One that was on the meta device is written anew by the owner."""
        if not torch.jit.is_scripting() and self._permutes.is_meta:
            self.forget(device)
        else:
            self._permutes = self._permutes.to(device)
            self._in_shapes = self._in_shapes.to(device)
            self._out_shapes = self._out_shapes.to(device)

    @torch.jit.unused
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Scripts take this method over, so there is no super() to call.
        apply = torch.nn.Module._apply
        if isinstance(self, torch.jit.ScriptModule):
            return apply(self, fn, recurse)
        # to_empty replaces buffers by uninitialised ones; unlike weights, nothing fills these later.
        before = self._permutes, self._in_shapes, self._out_shapes
        apply(self, fn, recurse)
        for old, new in zip(before, (self._permutes, self._in_shapes, self._out_shapes)):
            if old.is_meta and not new.is_meta:
                self._out_lengths = None
            elif not new.is_meta and old is not new and not isinstance(new, FakeTensor):
                new.copy_(old)
        return self

    @torch.jit.unused
    def show(self, plan: RegroupPlan, key_dim: int, device: Any = None) -> None:
        """Hold this plan."""
        target = self.plan_device() if device is None else torch.device(device)
        if target.type == "meta":
            target = torch.device("cpu")  # a plan on meta would hold no data
        with torch.inference_mode(False):
            permutes, in_shapes, out_shapes = (
                torch.tensor(rows, dtype=torch.int32, device=target)
                for rows in (plan_rows(plan), plan.in_widths, plan.out_widths)
            )
            if not permutes.numel():
                permutes = torch.empty((0, 6), dtype=torch.int32, device=target)
        self.init_tensors(permutes, in_shapes, out_shapes, list(plan.out_widths))
        self._layout_keys, self._layout_widths = _names(plan)
        self._key_dim = key_dim

    @torch.jit.unused
    def holds(self, plan: RegroupPlan, key_dim: int) -> bool:
        """Whether this is the plan held, with its data."""
        return (
            self._out_lengths is not None
            and not self._permutes.is_meta
            and (self._layout_keys, self._layout_widths) == _names(plan)
            and self._key_dim == key_dim
        )

    @torch.jit.unused
    def was_taken_over(self) -> bool:
        """Whether this is a plan of TorchRec's module, see :func:`swap_regroup`; no RegroupPlan tells of it."""
        return self._out_lengths is not None and len(self._layout_keys) > 0

    @torch.jit.unused
    def plan_device(self) -> torch.device:
        """Where the plan is, or will be."""
        return torch.device("cpu") if self._permutes.is_meta else self._permutes.device

    @torch.jit.unused
    def forget(self, device: Any) -> None:
        """Hold no plan; the next one goes to ``device``."""
        self._permutes = torch.empty((0, 6), dtype=torch.int32, device=device)
        self._in_shapes = torch.empty(0, dtype=torch.int32, device=device)
        self._out_shapes = torch.empty(0, dtype=torch.int32, device=device)
        self._out_lengths = None
        self._layout_keys, self._layout_widths, self._key_dim = [], [], 1


def _names(plan: RegroupPlan) -> Any:
    keys, widths = zip(*plan.layouts) if plan.layouts else ((), ())
    return _Lists(map(list, keys)), _Lists(map(list, widths))


def _fits(names: List[str], lengths: List[int], keys: List[str], widths: List[int]) -> bool:
    """Whether names are where a layout with unnamed columns, key ``""``, has them."""
    if "" not in keys or len(names) != len(lengths):
        return False
    start = 0
    places: Dict[str, List[int]] = {}
    for name, length in zip(names, lengths):
        if name in places:
            places[name] = [-1, -1]  # twice: which one the plan means is unknown
        else:
            places[name] = [start, length]
        start += length
    expected = 0
    for key, width in zip(keys, widths):
        if key != "" and (key not in places or places[key] != [expected, width]):
            return False
        expected += width
    return start == expected


@torch.fx.wrap
def _checked_values(
    keyed_tensors: List[KeyedTensor], keys: List[List[str]], widths: List[List[int]], key_dim: int
) -> List[Tensor]:
    """Values of the KeyedTensors, which must have the layout that the graph was made for."""
    if len(keyed_tensors) != len(keys):
        if len(keys) == 0:
            raise RuntimeError(
                "KTRegroupAsDict was scripted before it knew its input. Run one batch before, or give the layout: "
                "KTRegroupAsDict(..., layout=[(keys, widths), ...]) or module.prepare([(keys, widths), ...])"
            )
        raise ValueError(
            f"this graph was made for {len(keys)} KeyedTensors and got {len(keyed_tensors)}; trace it anew"
        )
    values: List[Tensor] = []
    for i, keyed_tensor in enumerate(keyed_tensors):
        names, lengths = keyed_tensor.keys(), keyed_tensor.length_per_key()
        if (names != keys[i] or lengths != widths[i]) and not _fits(names, lengths, keys[i], widths[i]):
            raise ValueError(
                f"keyed_tensors[{i}] has keys {names} of widths {lengths}; this "
                f"graph was made for keys {keys[i]} of widths {widths[i]}. Trace it anew with that layout"
            )
        value = keyed_tensor.values()
        if keyed_tensor.key_dim() % value.dim() != key_dim % value.dim():
            raise ValueError(
                f"keyed_tensors[{i}] has key_dim {keyed_tensor.key_dim()}; this graph was made for key_dim "
                f"{key_dim}. Trace it anew"
            )
        values.append(value)
    return values


@torch.fx.wrap
def _to_dict(keys: List[str], values: List[Tensor]) -> Dict[str, Tensor]:
    return {key: values[i] for i, key in enumerate(keys)}


@dataclass(frozen=True, slots=True)
class _LastCall:
    """In one object, since threads share it."""

    found: CachedPlan
    key_dim: int


class KTRegroupAsDict(TorchRecKTRegroupAsDict):
    """Regroups the columns of KeyedTensors into a dict of tensors, one per group.

    A drop-in for ``torchrec.modules.regroup.KTRegroupAsDict``. The plan is found on every call by
    the names and widths of the input, so that sharding, another order of keys or another source
    gives the columns that were asked for, by name. A handful of plans is kept.

    Args:
        groups: keys of each output. A key may be used any number of times, or not at all.
        keys: the name of each output, all different.
        emb_dtype: cast the outputs to this type while copying. Gradients return in the inputs' type.
        multi_device: inputs may come on a device other than the module's (concerns graphs; eager
            calls always follow their input).
        layout: what the inputs will look like, if known; see :meth:`prepare`.

    Raises:
        ValueError: the numbers of groups and keys differ, or a key repeats.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import KeyedTensor
        >>> from torchrec_kt import KTRegroupAsDict
        >>> kt = KeyedTensor(keys=["f1", "f2"], length_per_key=[1, 2], values=torch.tensor([[1, 2, 3]]))
        >>> KTRegroupAsDict(groups=[["f2", "f1"], ["f1"]], keys=["object", "user"])([kt])
        {'object': tensor([[2, 3, 1]]), 'user': tensor([[1]])}
    """

    _groups: List[List[str]]
    _keys: List[str]
    _graph_plan: Optional[RegroupPlan]
    _last: Optional["_LastCall"]

    # Python state that a scripted module neither has nor needs.
    __jit_ignored_attributes__ = ["_plans", "_graph_plan", "_last"]  # noqa: RUF012

    def __init__(
        self,
        groups: List[List[str]],
        keys: List[str],
        emb_dtype: Optional[DataType] = None,
        multi_device: bool = False,
        *,
        layout: Optional[Sequence[Layout]] = None,
    ) -> None:
        check_names(groups, keys)
        for g, group in enumerate(groups):
            if isinstance(group, str):
                raise TypeError(f"groups[{g}] is the string {group!r}; expected a list of keys")
        # Copies: editing the caller's lists later must not change what is computed.
        groups = [list(group) for group in groups]
        super().__init__(groups, list(keys), emb_dtype, multi_device)
        self._permute_pooled_embs_impl = PermuteMultiEmbedding(groups, multi_device)
        self._plans = PlanCache(_PLANS_PER_MODULE)
        self._graph_plan = None
        self._last = None
        if layout is not None:
            self.prepare(layout)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_emb_dtype":  # may be set at any time, and takes effect as in TorchRec's module
            self._out_dtype = _torch_dtype(value)

    def forward(self, keyed_tensors: List[KeyedTensor]) -> Dict[str, Tensor]:
        """Regroup.

        Args:
            keyed_tensors: values ``[batch, sum of widths]`` each, or any rank with the keys in
                ``key_dim``.

        Returns:
            One new contiguous tensor per output key, ``[batch, sum of the widths of its group]``.

        Raises:
            KeyError: a group names a key that no input holds.
            ValueError: a used key appears twice; batches, devices or key_dims differ; values are
                narrower than their widths say.
            TypeError: an argument is of the wrong type, or dtypes cannot be promoted.
        """
        if not torch.jit.is_scripting():
            if torch.compiler.is_compiling():
                # Here, and without dict(): each call that a compiler follows costs it time.
                named: Dict[str, Tensor] = {}
                outputs = regroup_compiled(keyed_tensors, self._groups, self._out_dtype, self)
                for key, output in zip(self._keys, outputs):
                    named[key] = output
                return named
            regrouped = self._regroup_eagerly(keyed_tensors)
            if regrouped is not None:
                return regrouped
            if self._graph_plan is not None:
                old = self._permute_pooled_embs_impl
                self._show_to_graphs(self._graph_plan, self._dim)
                _tell_tracer(_tracer_of(keyed_tensors), old, self._permute_pooled_embs_impl)
            elif not self._permute_pooled_embs_impl.was_taken_over():
                return _call_at_run_time(self, keyed_tensors)
        elif len(self._keys) == 0 and len(keyed_tensors) == 0:
            nothing: Dict[str, Tensor] = {}
            return nothing
        impl = self._permute_pooled_embs_impl
        values = _checked_values(keyed_tensors, impl._layout_keys, impl._layout_widths, impl._key_dim)
        outputs = impl(values, impl._key_dim, self._out_dtype)
        return _to_dict(self._keys, outputs)

    @torch.jit.unused
    def _regroup_eagerly(self, keyed_tensors: List[KeyedTensor]) -> Optional[Dict[str, Tensor]]:
        """What :meth:`forward` does with KeyedTensors that hold tensors; None for proxies."""
        last = self._last
        if last is not None:  # nearly always this call is like the last
            known, key_dim = last.found, last.key_dim
            if (
                type(keyed_tensors) is list
                and len(keyed_tensors) == len(known.keys)
                and self._groups == known.groups
            ):
                values: List[Tensor] = []
                for kt, keys, widths in zip(keyed_tensors, known.keys, known.widths):
                    if (
                        type(kt) is not KeyedTensor
                        or kt._keys != keys
                        or kt._length_per_key != widths
                        or kt._key_dim != key_dim
                    ):
                        break
                    values.append(kt._values)
                else:
                    outputs = apply_column_map(
                        values, known.plan.column_map, self._out_dtype, key_dim, self._held_moves
                    )
                    return dict(zip(self._keys, outputs))
        unpacked = unpack(keyed_tensors)
        if unpacked is None:
            return None
        names, widths, values, dims = unpacked
        if not values and not self._groups:
            return {}
        found = self._plans.find(self._groups, names, widths)
        column_map = found.plan.column_map
        key_dim = common_key_dim(dims, values, column_map.used_inputs)
        outputs = apply_column_map(values, column_map, self._out_dtype, key_dim, self._held_moves)
        if self._last is None or found.plan is not self._graph_plan or key_dim != self._dim:
            self._remember(found, key_dim)
        return dict(zip(self._keys, outputs))

    @torch.jit.unused
    def _moves_for_export(self) -> Tensor:
        """The plan that exported programs take along, ``[moves, 6]``."""
        return self._permute_pooled_embs_impl._permutes

    @torch.jit.unused
    @torch.compiler.assume_constant_result
    def _holds_moves(self, plan_number: int, device: torch.device) -> bool:
        """Whether :meth:`_moves_for_export` has those of a plan, on a device."""
        plan = numbered_plan(plan_number)
        return plan == self._graph_plan and self._moves_held(device) is not None

    @torch.jit.unused
    def _held_moves(self, column_map: ColumnMap, device: torch.device) -> Optional[Tensor]:
        """The buffer with the moves of this map, if there is one where the values are."""
        plan = self._graph_plan
        return None if plan is None or plan.column_map is not column_map else self._moves_held(device)

    @torch.jit.unused
    def _moves_held(self, device: torch.device) -> Optional[Tensor]:
        plan, impl = self._graph_plan, self._permute_pooled_embs_impl
        if plan is None or not impl.holds(plan, self._dim):
            return None
        moves = impl._permutes
        if moves.device == device:
            return moves
        return moves.to(device, non_blocking=True) if impl._multi_device else None

    @torch.jit.unused
    def prepare(self, layout: Sequence[Layout], device: Optional[torch.device] = None) -> "KTRegroupAsDict":
        """Build the plan before there is any data, so that the module can be traced or scripted.

        Args:
            layout: one entry per input: a ``(keys, widths)`` pair, a KeyedTensor, or an
                EmbeddingBagCollection, plain, quantised or sharded.
            device: where the plan tensors of graphs go; by default they stay where they are.

        Returns:
            The module itself.

        Raises:
            KeyError, ValueError, TypeError: as :meth:`forward`.
        """
        pairs, key_dim = read_layout(layout)
        found = self._plans.find(self._groups, [keys for keys, _ in pairs], [widths for _, widths in pairs])
        self._show_to_graphs(found.plan, key_dim, device)  # first: what can fail must change nothing
        self._remember(found, key_dim)
        return self

    @torch.jit.unused
    def _remember(self, found: CachedPlan, key_dim: int) -> None:
        """Note the plan that the next call will probably use and a graph made from now on should hold."""
        if not self._is_inited:
            self._show_to_graphs(found.plan, key_dim)
        self._last = _LastCall(found, key_dim) if found.keys else None
        self._graph_plan = found.plan
        self._dim = key_dim
        self._use_fbgemm_regroup = key_dim == 1

    @torch.jit.unused
    def _show_to_graphs(self, plan: RegroupPlan, key_dim: int, device: Optional[torch.device] = None) -> None:
        """Write the plan where tracing and scripting look for it.

        Not on every change of plan, since layouts may alternate: after the first one, only when a
        graph is made.
        """
        if torch._C._len_torch_dispatch_stack() == 0:  # else the tensors made here would be fake
            impl = self._permute_pooled_embs_impl
            if device is not None or not impl.holds(plan, key_dim):
                # A new holder, since a graph made before may go on using the old one.
                holder = self._new_holder()
                holder.show(plan, key_dim, device)
                self._permute_pooled_embs_impl = holder
            self._is_inited = True

    @torch.jit.unused
    def _new_holder(self) -> PermuteMultiEmbedding:
        old = self._permute_pooled_embs_impl
        holder = PermuteMultiEmbedding(self._groups, old._multi_device)
        holder.forget(old.plan_device())
        return holder.train(old.training)

    @torch.jit.unused
    def __prepare_scriptable__(self) -> "KTRegroupAsDict":
        # torch.jit.script calls this before it reads the module.
        if self._graph_plan is not None:
            self._show_to_graphs(self._graph_plan, self._dim)
        return self

    @torch.jit.export
    def set_device(self, device: str) -> None:
        """Move the plan tensors of graphs. Eager calls follow the device of their input."""
        self._permute_pooled_embs_impl.set_device(device)

    @torch.jit.unused
    def clear_cache(self) -> None:
        """Forget every plan. TorchRec calls this after sharding."""
        self._plans.clear()
        self._graph_plan = None
        self._last = None
        self._is_inited = False
        self._use_fbgemm_regroup = False
        self._dim = 1
        self._permute_pooled_embs_impl = self._new_holder()


def _torch_dtype(emb_dtype: Optional[DataType]) -> Optional[torch.dtype]:
    if emb_dtype is None:
        return None
    dtype = data_type_to_dtype(emb_dtype)
    if not (dtype.is_floating_point or dtype.is_complex) and dtype not in _INTEGERS:
        raise ValueError(
            f"emb_dtype is {emb_dtype}, which torch stores as {dtype}; values cannot be cast to it. Use a floating "
            "or integer type of 8 bits or more"
        )
    return dtype


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def _tracer_of(keyed_tensors: Any) -> Any:
    proxies = [keyed_tensors] if isinstance(keyed_tensors, torch.fx.Proxy) else keyed_tensors
    return next(p.tracer for p in proxies if isinstance(p, torch.fx.Proxy))


def _tell_tracer(tracer: Any, old: PermuteMultiEmbedding, new: PermuteMultiEmbedding) -> None:
    """A tracer notes the paths of modules when it starts; a holder replaced since has its predecessor's."""
    paths = getattr(tracer, "submodule_paths", None)
    if paths and new is not old and old in paths:
        paths[new] = paths[old]


def _call_at_run_time(module: KTRegroupAsDict, keyed_tensors: Any) -> Any:
    """A node that calls the module itself, which by then can find its plan."""
    tracer = _tracer_of(keyed_tensors)
    if getattr(tracer, "root", None) is module:
        raise RuntimeError(
            "KTRegroupAsDict is traced before it knows its input. Run one batch first, or give the layout: "
            "KTRegroupAsDict(..., layout=[(keys, widths), ...]) or module.prepare([(keys, widths), ...])"
        )
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (keyed_tensors,), {})
