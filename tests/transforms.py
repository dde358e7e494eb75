"""``torch.func`` transforms of a regroup, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


def tensors_of(tree: Any) -> list[Tensor]:
    """The leaves of nested tuples and lists."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for part in tree for tensor in tensors_of(part)]


def assert_close(actual: Any, expected: Any) -> None:
    """Nested tuples of double precision tensors, equal up to the order of sums."""
    for a, b in zip(tensors_of(actual), tensors_of(expected), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def cubic(outs: Sequence[Tensor]) -> Tensor:
    """A number with three derivatives that differ everywhere."""
    return sum(((out**3).sum() for out in outs), start=torch.zeros((), dtype=torch.float64))


BOTH = (0, 1)

# Each takes a function of two tensors that returns a tuple of tensors.
TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "grad": lambda f: torch.func.grad(lambda *v: cubic(f(*v)), BOTH),
    "grad of the second": lambda f: torch.func.grad(lambda *v: cubic(f(*v)), 1),
    "grad of grad": lambda f: torch.func.grad(
        lambda *v: torch.func.grad(lambda *w: cubic(f(*w)))(*v).sum(), BOTH
    ),
    "vjp": lambda f: lambda *v: torch.func.vjp(f, *v)[1](tuple(out.sin() for out in f(*v))),  # pyright: ignore[reportCallIssue]
    "jvp": lambda f: lambda *v: torch.func.jvp(f, v, tuple(x.cos() for x in v)),
    "jvp of one": lambda f: lambda *v: torch.func.jvp(lambda x: f(x, v[1]), v[:1], (v[0].cos(),)),
    "jvp of grad": lambda f: (
        lambda *v: torch.func.jvp(
            torch.func.grad(lambda *w: cubic(f(*w)), BOTH), v, tuple(x.cos() for x in v)
        )
    ),
    "jacrev": lambda f: torch.func.jacrev(f, BOTH),
    "jacfwd": lambda f: torch.func.jacfwd(f, BOTH),
    "hessian": lambda f: torch.func.hessian(lambda *v: cubic(f(*v)), BOTH),
    "jacrev of jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(lambda *v: cubic(f(*v)), BOTH), BOTH),
    "jacfwd of jacfwd": lambda f: torch.func.jacfwd(torch.func.jacfwd(lambda *v: cubic(f(*v)), BOTH), BOTH),
    "linearize": lambda f: lambda *v: torch.func.linearize(f, *v)[1](*(x.cos() for x in v)),
    "functionalize": torch.func.functionalize,
    "functionalize of grad": lambda f: torch.func.functionalize(
        torch.func.grad(lambda *v: cubic(f(*v)), BOTH)
    ),
    "grad of functionalize": lambda f: torch.func.grad(
        lambda *v: cubic(torch.func.functionalize(f)(*v)), BOTH
    ),
}


def assert_same_transformed(
    transform: str, function: Function, reference: Function, values: Sequence[Tensor]
) -> None:
    make = TRANSFORMS[transform]
    assert_close(make(function)(*values), make(reference)(*values))
