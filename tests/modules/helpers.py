"""What the tests of this folder share: inputs, the right answer, and poisoned memory."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_kt import KTRegroupAsDict

Kts = list[KeyedTensor]
Layout = Sequence[tuple[Sequence[str], Sequence[int]]]

# The default case: two inputs, two groups that use every key once.
LAYOUT: Layout = [(["a", "b"], [3, 5]), (["c", "d"], [2, 4])]
GROUPS = [["a", "c"], ["d", "b"]]
NAMES = ["x", "y"]

REPEATED = [["a", "c", "a"], ["d", "b"]]
OMITTED = [["b"], ["d"]]
SWAPPED: Layout = [(["b", "a"], [5, 3]), (["c", "d"], [2, 4])]


def make_kts(
    layout: Layout = LAYOUT,
    batch: int = 3,
    *,
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
    key_dim: int = 1,
    rank: int = 2,
    padding: int = 0,
) -> list[KeyedTensor]:
    """KeyedTensors of random values, all dimensions but ``key_dim`` of size ``batch``."""
    found: list[KeyedTensor] = []
    for keys, widths in layout:
        shape = [batch] * rank
        shape[key_dim] = sum(widths) + padding
        values = random_values(shape, dtype)
        found.append(KeyedTensor(list(keys), list(widths), values.requires_grad_(grad), key_dim))
    return found


# Inputs other than the default one.
OTHER_INPUTS: dict[str, Callable[[], Kts]] = {
    "same": lambda: make_kts(grad=True),
    "other batch": lambda: make_kts(batch=7, grad=True),
    "empty batch": lambda: make_kts(batch=0, grad=True),
    "batch of one": lambda: make_kts(batch=1, grad=True),
    "bfloat16": lambda: make_kts(dtype=torch.bfloat16, grad=True),
    "float64": lambda: make_kts(dtype=torch.float64, grad=True),
    "keys swapped": lambda: make_kts(SWAPPED, grad=True),
    "keys swapped, widths in place": lambda: make_kts([(["b", "a"], [3, 5]), LAYOUT[1]], grad=True),
    "inputs swapped": lambda: make_kts(LAYOUT[::-1], grad=True),
    "keys moved to the other input": lambda: make_kts(
        [(["a", "d"], [3, 5]), (["c", "b"], [2, 4])], grad=True
    ),
    "widths changed, total kept": lambda: make_kts([(["a", "b"], [4, 4]), LAYOUT[1]], grad=True),
    "widths grown": lambda: make_kts([(["a", "b"], [6, 10]), LAYOUT[1]], grad=True),
    "widths shrunk": lambda: make_kts([(["a", "b"], [1, 1]), (["c", "d"], [1, 1])], grad=True),
    "widths zero": lambda: make_kts([(["a", "b"], [0, 5]), (["c", "d"], [2, 0])], grad=True),
    "one more input": lambda: make_kts([*LAYOUT, (["e"], [3])], grad=True),
    "one more input in front": lambda: make_kts([(["e"], [3]), *LAYOUT], grad=True),
    "more keys": lambda: make_kts([(["p", "a", "q", "b"], [2, 3, 1, 5]), LAYOUT[1]], grad=True),
    "all in one": lambda: make_kts([(["a", "b", "c", "d"], [3, 5, 2, 4])], grad=True),
    "one each": lambda: make_kts([(["d"], [4]), (["c"], [2]), (["b"], [5]), (["a"], [3])], grad=True),
    "padding columns": lambda: make_kts(padding=3, grad=True),
    "key_dim 0": lambda: make_kts(key_dim=0, grad=True),
    "key_dim 0, square": lambda: make_kts(
        [(["a", "b"], [3, 5]), (["c", "d"], [4, 4])], 8, key_dim=0, grad=True
    ),
    "key_dim -1": lambda: make_kts(key_dim=-1, grad=True),
    "three dimensions": lambda: make_kts(rank=3, grad=True),
    "three dimensions, key_dim 2": lambda: make_kts(rank=3, key_dim=2, grad=True),
}


# (batch, keys, width): chosen so that every way of moving columns gets its turn.
SIZES = [
    (1, 6, 3),
    (4, 4, 4),
    (3, 400, 1),
    (64, 40, 4),
    (64, 40, 7),
    (512, 30, 16),
    (1024, 12, 33),
    (2, 3, 20_000),
]


def layout_of(keys: int, width: int) -> tuple[Layout, list[str]]:
    names = [f"k{i}" for i in range(keys)]
    half = keys // 2
    return [(names[:half], [width] * half), (names[half:], [width] * (keys - half))], names


def on_meta(kts: Kts) -> Kts:
    return [KeyedTensor(kt.keys(), kt.length_per_key(), kt.values().to("meta"), kt.key_dim()) for kt in kts]


def module(groups: Any = GROUPS, **options: Any) -> KTRegroupAsDict:
    return KTRegroupAsDict(groups, [f"out{i}" for i in range(len(groups))], **options)


def random_values(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


def reference(kts: Sequence[KeyedTensor], groups: Sequence[Sequence[Any]]) -> list[Tensor]:
    """The right answer: the slice of every key, concatenated group by group."""
    columns: dict[Any, Tensor] = {}
    for kt in kts:
        start = 0
        for key, width in zip(kt.keys(), kt.length_per_key()):
            columns[key] = kt.values().narrow(kt.key_dim(), start, width)
            start += width
    found: list[Tensor] = []
    dim = kts[0].key_dim() if kts else 1
    for group in groups:
        # An empty group has all dimensions but that of the columns.
        parts = [columns[key] for key in group] or [kts[0].values().narrow(dim, 0, 0)]
        found.append(torch.cat(parts, dim))
    return found


def total(parts: Iterable[Tensor]) -> Tensor:
    """The sum of all elements of all tensors."""
    return torch.stack([part.sum() for part in parts]).sum()


def tensors(outputs: Mapping[str, Tensor] | Sequence[Tensor]) -> list[Tensor]:
    return list(outputs.values()) if isinstance(outputs, Mapping) else list(outputs)


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    """Equal in number, shape, dtype and every bit that ``torch.equal`` compares."""
    lefts, rights = list(left), list(right)
    return len(lefts) == len(rights) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(lefts, rights)
    )


def assert_regrouped(
    outputs: Mapping[str, Tensor] | Sequence[Tensor],
    kts: Sequence[KeyedTensor],
    groups: Sequence[Sequence[Any]] = GROUPS,
) -> None:
    found, expected = tensors(outputs), reference(kts, groups)
    assert [tuple(t.shape) for t in found] == [tuple(t.shape) for t in expected]
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    for i, (a, b) in enumerate(zip(found, expected)):
        assert torch.equal(a, b), f"output {i} differs from the slices of its keys"


def values_of(kts: Sequence[KeyedTensor]) -> list[Tensor]:
    return [kt.values() for kt in kts]


def gradients(
    outputs: Mapping[str, Tensor] | Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Gradients with zeros for None."""
    outs = tensors(outputs)
    if weights is None:
        weights = [torch.ones_like(out) for out in outs]
    grads = torch.autograd.grad(outs, list(inputs), list(weights), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs)]


def whole_weights(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Small whole numbers, whose sums are exact in every floating type."""
    return [torch.randint(-2, 3, out.shape).to(out.dtype) for out in outputs]


def assert_regroups(
    call: Callable[[list[KeyedTensor]], Mapping[str, Tensor] | Sequence[Tensor]],
    kts: list[KeyedTensor],
    groups: Sequence[Sequence[Any]] = GROUPS,
) -> None:
    """Forward equals the slices and, where inputs ask for one, so does the gradient."""
    outputs = call(kts)
    assert_regrouped(outputs, kts, groups)
    inputs = [v for v in values_of(kts) if v.requires_grad]
    if inputs:
        expected = reference(kts, groups)
        weights = whole_weights(expected)
        found = gradients(outputs, inputs, weights)
        for i, (a, b) in enumerate(zip(found, gradients(expected, inputs, weights))):
            assert torch.equal(a, b), f"the gradient of input {i} differs from that of the slices"


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """Every ``empty`` tensor is filled with NaN, or the largest value of its type."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # pyright: ignore[reportAttributeAccessIssue]


def through_a_file(scripted: Any) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


class LikeKeyedTensor:
    """Answers as a KeyedTensor does without being one."""

    def __init__(self, kt: KeyedTensor) -> None:
        self._kt = kt

    def keys(self) -> list[str]:
        return self._kt.keys()

    def length_per_key(self) -> list[int]:
        return self._kt.length_per_key()

    def values(self) -> Tensor:
        return self._kt.values()

    def key_dim(self) -> int:
        return self._kt.key_dim()


class Late(LazyAwaitable[KeyedTensor]):
    """What sharded modules return: no KeyedTensor, but answers as one once it has waited."""

    def __init__(self, kt: KeyedTensor) -> None:
        super().__init__()
        self._kt = kt

    def _wait_impl(self) -> KeyedTensor:
        return self._kt


class Case(NamedTuple):
    """A random regroup problem."""

    layout: Layout
    groups: list[list[str]]
    batch: int
    dtype: torch.dtype

    @property
    def names(self) -> list[str]:
        return [f"out{i}" for i in range(len(self.groups))]

    def make(self, grad: bool = False) -> Kts:
        return make_kts(self.layout, self.batch, dtype=self.dtype, grad=grad)


@st.composite
def cases(draw: st.DrawFn, *, once: bool = False, widths: st.SearchStrategy[int] | None = None) -> Case:
    """Layouts and groups that TorchRec handles too: something to regroup, every key distinct."""
    width = st.integers(0, 9) if widths is None else widths
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    keys = [f"k{n}" for n in draw(st.permutations(range(sum(counts))))]
    layout: list[tuple[list[str], list[int]]] = []
    for count in counts:
        taken = [keys.pop() for _ in range(count)]
        layout.append((taken, [draw(width) for _ in taken]))
    names = [key for taken, _ in layout for key in taken]
    if once:
        order = list(draw(st.permutations(names)))
        cuts = sorted(draw(st.lists(st.integers(1, len(order)), max_size=3, unique=True)) or [len(order)])
        edges = [0, *(cut for cut in cuts if cut < len(order)), len(order)]
        groups = [order[a:b] for a, b in itertools.pairwise(edges)]
    else:
        groups = draw(
            st.lists(st.lists(st.sampled_from(names), min_size=1, max_size=6), min_size=1, max_size=4)
        )
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return Case(layout, groups, draw(st.integers(0, 6)), dtype)
