"""The column map on the compiled kernel: encoding, upload, and the call.

:func:`compile_for_kernel` makes the same kind of program as :mod:`torchrec_kt.ops.torch_impl` does. The
kernel reads the map in an encoded form that it lists vector by vector; that form is made once per map
and alignment, copied to the device once, and kept with the map. A call then copies nothing to the
device and waits for nothing.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import _native
from .plan import ColumnMap
from .torch_impl import Program, TensorMeta, Tensors, accumulate_dtype

__all__ = ["compile_for_kernel", "encoder_input", "longest_vector"]

# In the order of kCasts in csrc/apply.cpp.
_CASTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Sums and casts of complex numbers are those of their parts.
_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}

VECTOR_BYTES = 16  # at most
# Dimensions after key_dim multiply the columns that the map lists. Beyond this, slices, which are then
# long, are as good and need no map. Without such dimensions a map has as many entries as there are columns
# at most; beyond the second figure it would be hundreds of megabytes, for a few rows.
_MAX_COLUMNS = 1 << 22
_MAX_PLAIN_COLUMNS = 1 << 25
# Tensors that one column can be the sum over: a launch reaches 112, the output among them. A tensor counts
# once for each window of so many columns.
_MAX_TENSORS = 111
_WINDOW = 1 << 24
# Variants of one map for tensors that are aligned differently.
_MAX_VARIANTS = 32


def compile_for_kernel(
    column_map: ColumnMap, inputs: Sequence[TensorMeta], dtype: torch.dtype, key_dim: int
) -> Program | None:
    """Like :func:`torchrec_kt.ops.torch_impl.compile_map`; None where the kernel is not for this call.

    Warns, once, about CUDA tensors for which there is no kernel.
    """
    used = column_map.used_inputs
    if not used:
        return None
    first = inputs[used[0]]
    if first.device.type == "cpu" and not _cpu_kernel:
        return None
    if not _native.has_kernel(first.device.type):
        if first.device.type == "cuda":
            _warn_once()
        return None
    rows, inner = math.prod(first.shape[:key_dim]), math.prod(first.shape[key_dim + 1 :])
    width = sum(column_map.out_widths)
    if rows * inner * width == 0 or width * inner > (_MAX_COLUMNS if inner > 1 else _MAX_PLAIN_COLUMNS):
        return None
    try:
        common = functools.reduce(torch.promote_types, (inputs[i].dtype for i in used))
        if any(inputs[i].dtype != common for i in used) and (common != dtype or column_map.max_fan_in > 1):
            # Whole numbers beside halves are added and converted as they are, not as halves.
            common = torch.promote_types(accumulate_dtype(common), dtype)
    except RuntimeError:  # there is no such type, though there is one for the outputs
        return None
    arithmetic = common != dtype or column_map.max_fan_in > 1
    parts = arithmetic and common in _PARTS and dtype in _PARTS
    in_type, out_type = (_PARTS[common], _PARTS[dtype]) if parts else (common, dtype)
    if arithmetic and not (in_type in _CASTS and out_type in _CASTS):
        return None
    in_windows = max(inputs[i].shape[key_dim] for i in used) * inner * 2 > _WINDOW
    if max(_tensors_per_column(column_map, in_windows)) > _MAX_TENSORS:
        return None
    if common.itemsize not in (1, 2, 4, 8, 16) or str(common).startswith("torch.q"):
        return None
    return _Program(column_map, inputs, key_dim, rows, inner, common, in_type, out_type, parts)


def _tensors_per_column(column_map: ColumnMap, in_windows: bool) -> Iterator[int]:
    if column_map.max_fan_in <= _MAX_TENSORS:
        yield column_map.max_fan_in
    else:
        for pieces in column_map.outputs:
            for piece in pieces:
                yield len(piece.sources if in_windows else {tensor for tensor, _ in piece.sources})


# Whether tensors on the CPU take the kernel, which then is a host build of it: in checks.
_cpu_kernel = False


def _warn_once() -> None:
    if _native.forced_pure_torch() or _warned:
        return
    _warned.append(True)
    warnings.warn(
        f"torchrec_kt regroups CUDA tensors in pure torch, which is slower than its CUDA kernel: "
        f"{_native.why_not()}. Set {_native.PURE_TORCH_VARIABLE}=1 to choose this path without a warning",
        RuntimeWarning,
        stacklevel=2,
    )


_warned: list[bool] = []


# Encoded maps that no plan holds any more. A kernel on any stream may still be reading one, and its memory
# would go to whoever asks next, so none is freed before its device has been waited for.
_dropped: list[Tensor] = []
_freeing = threading.Lock()
_MAX_DROPPED = 64
_MAX_DROPPED_BYTES = 1 << 26


class _Variant:
    """An encoded map on its device, for tensors of one alignment, and its header."""

    __slots__ = ("encoded", "header")

    def __init__(self, encoded: Tensor, header: Tensor) -> None:
        self.encoded = encoded
        self.header = header

    def __del__(self, drop: Callable[[Tensor], None] = _dropped.append) -> None:
        drop(self.encoded)


def _free_dropped() -> None:
    with _freeing:
        dropped = _dropped[:]
        if len(dropped) > _MAX_DROPPED or sum(encoded.nbytes for encoded in dropped) > _MAX_DROPPED_BYTES:
            for device in {encoded.device for encoded in dropped}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            del _dropped[: len(dropped)]  # those that came meanwhile stand behind


class _Program:
    """Applies one map to inputs of one set of shapes."""

    __slots__ = (
        "cast",
        "column_map",
        "common",
        "convert",
        "device",
        "flat",
        "in_type",
        "max_log",
        "out_shapes",
        "parts",
        "plain",
        "rows",
        "scale",
        "used",
        "variant",
    )

    def __init__(
        self,
        column_map: ColumnMap,
        inputs: Sequence[TensorMeta],
        key_dim: int,
        rows: int,
        inner: int,
        common: torch.dtype,
        in_type: torch.dtype,
        out_type: torch.dtype,
        parts: bool,
    ) -> None:
        self.column_map = column_map
        self.used = column_map.used_inputs
        metas = [inputs[i] for i in self.used]
        self.device = metas[0].device
        self.rows = rows
        self.common = common
        self.in_type = in_type
        self.parts = parts
        self.scale = inner * (2 if parts else 1)
        self.cast = -1 if in_type == out_type else _CASTS.index(out_type)
        self.max_log = longest_vector(in_type, out_type)
        self.convert = any(meta.dtype != common for meta in metas)
        self.flat = len(metas[0].shape) == 2 and key_dim == 1
        self.plain = self.flat and not self.convert and not parts and len(self.used) == len(inputs)
        before, after = metas[0].shape[:key_dim], metas[0].shape[key_dim + 1 :]
        self.out_shapes = [(*before, width, *after) for width in column_map.out_widths]
        # What freshly allocated inputs are; other alignments are met when they come.
        widths = [meta.shape[key_dim] * self.scale for meta in metas]
        self.variant = self._variant([self._log_of(0, width) for width in widths])

    def __call__(self, values: Tensors) -> list[Tensor]:
        operands = values if self.plain else self._operands(values)
        variant = self.variant
        outs = torch.ops.torchrec_kt._apply_map(operands, variant.encoded, variant.header, self.cast)
        if not outs and self.out_shapes:
            # A tensor starts or strides at an address that the vectors do not fit.
            logs = [self._alignment(v) for v in operands]
            variant = self._variant(logs)
            outs = torch.ops.torchrec_kt._apply_map(operands, variant.encoded, variant.header, self.cast)
        if self.parts:
            return [torch.view_as_complex(out.view(*shape, 2)) for out, shape in zip(outs, self.out_shapes)]
        return outs if self.flat else [out.view(shape) for out, shape in zip(outs, self.out_shapes)]

    def _operands(self, values: Tensors) -> list[Tensor]:
        """The inputs in use, ``[rows, columns]``, of one type that the kernel knows."""
        operands = [values[i] for i in self.used]
        if self.convert:
            operands = [v.to(self.common) for v in operands]
        if self.parts:
            operands = [torch.view_as_real(v.resolve_conj()) for v in operands]
        if self.flat and not self.parts:
            return operands
        return [v.reshape(self.rows, -1) for v in operands]

    def _alignment(self, value: Tensor) -> int:
        if value.stride(1) != 1:
            return 0
        if value.is_neg() or value.is_conj() or value._is_zerotensor():
            return 0  # the dispatcher hands the kernel another tensor, laid out as it likes
        return self._log_of(value.data_ptr() // self.in_type.itemsize, value.stride(0))

    def _log_of(self, address: int, row_stride: int) -> int:
        """log2 of the elements to which rows at this address and stride are aligned."""
        bits = address | (row_stride if self.rows > 1 else 0)
        lowest = (bits & -bits).bit_length() - 1 if bits else self.max_log
        return min(lowest, self.max_log)

    def _variant(self, in_logs: Sequence[int]) -> _Variant:
        out_logs = [self._log_of(0, width * self.scale) for width in self.column_map.out_widths]
        key = (self.device, self.scale, self.max_log, *in_logs, *out_logs)
        variants = self.column_map.recipes.setdefault("kernel", {})
        found = variants.get(key)
        if found is None:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "torchrec_kt meets this layout, batch alignment or device for the first time while a CUDA graph "
                    "is captured, and has to copy its plan to the device first; run the model once before capture"
                )
            # Kept for every later call, so nothing of the context of this one may stick to it.
            with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
                logs = torch.tensor([*in_logs, *out_logs], dtype=torch.int64, device="cpu")
                pieces = torch.tensor(
                    encoder_input(self.column_map, self.scale), dtype=torch.int64, device="cpu"
                )
                encoded, header = torch.ops.torchrec_kt._encode_map(pieces, logs, self.max_log)
                found = _Variant(encoded.to(self.device), header)
            _free_dropped()
            if len(variants) >= _MAX_VARIANTS:
                variants.clear()
            variants[key] = found
        return found


def longest_vector(source: torch.dtype, target: torch.dtype) -> int:
    """log2 of the elements in the longest vector of these types."""
    return (VECTOR_BYTES // max(source.itemsize, target.itemsize)).bit_length() - 1


def encoder_input(column_map: ColumnMap, scale: int = 1) -> list[int]:
    """The map in the form that ``encode`` in csrc/encode.h describes.

    Inputs that the map does not use are left out; every column counts ``scale`` times.
    """
    place = {tensor: n for n, tensor in enumerate(column_map.used_inputs)}
    numbers = [len(place), len(column_map.out_widths), *(width * scale for width in column_map.out_widths)]
    for out, pieces in enumerate(column_map.outputs):
        for piece in pieces:
            numbers += (out, piece.start * scale, piece.length * scale, len(piece.sources))
            for tensor, offset in piece.sources:
                numbers += (place[tensor], offset * scale)
    return numbers
