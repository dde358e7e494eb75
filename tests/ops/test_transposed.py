"""``torchrec_kt::regroup_transposed``: the same plan tensor, read the other way round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference import assert_same, gradient_reference, random_values

from .test_operator import LAYOUTS, OMITTED, ONCE, REPEATED, build, make, plan_tensor, whole_numbers

op: Any = torch.ops.torchrec_kt.regroup_transposed
WIDTHS = [8, 6]


def gradients_of(groups: list[list[str]], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return whole_numbers([torch.empty(3, width, dtype=dtype) for width in build(groups).out_widths])


def test_schema() -> None:
    forward = str(torch.ops.torchrec_kt.regroup.default._schema)
    assert str(op.default._schema) == forward.replace("::regroup(", "::regroup_transposed(")


@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED], ids=str)
@pytest.mark.parametrize("fields", [5, 6])
def test_gradients_of_a_regroup(groups: list[list[str]], fields: int) -> None:
    grads = gradients_of(groups)
    found = op(grads, plan_tensor(build(groups), fields), WIDTHS)
    assert_same(found, gradient_reference(make(dtype=torch.float64), grads, LAYOUTS, groups))


@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED], ids=str)
def test_opcheck(groups: list[list[str]]) -> None:
    grads = [g.requires_grad_() for g in gradients_of(groups)]
    result = torch.library.opcheck(op.default, (grads, plan_tensor(build(groups)), WIDTHS))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("groups", [ONCE, REPEATED, OMITTED], ids=str)
def test_derivatives_of_every_order(groups: list[list[str]]) -> None:
    moves = plan_tensor(build(groups))
    grads = [torch.randn(2, w, dtype=torch.float64, requires_grad=True) for w in build(groups).out_widths]

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(part**2 for part in op(list(values), moves, WIDTHS))

    assert torch.autograd.gradcheck(call, grads, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, grads)


def test_vmap() -> None:
    moves = plan_tensor(build(REPEATED))
    batched = [torch.randn(5, 3, width) for width in build(REPEATED).out_widths]
    found = torch.vmap(lambda *v: tuple(op(list(v), moves, WIDTHS)))(*batched)
    for n in range(5):
        assert_same([part[n] for part in found], op([v[n] for v in batched], moves, WIDTHS))
    value = random_values((3, 8), torch.float32)
    with pytest.raises(ValueError, match="one plan serves the whole batch"):
        torch.vmap(lambda m: tuple(op([value], m, [1])))(torch.zeros(2, 1, 5, dtype=torch.int32))


def test_a_plan_that_changes_in_place() -> None:
    moves = plan_tensor(build(REPEATED))
    grads = gradients_of(REPEATED)
    before = op(grads, moves, WIDTHS)
    moves[:, 4] = 1
    after = op(grads, moves, WIDTHS)
    assert not all(map(torch.equal, before, after))
    assert_same(after, op(grads, moves.clone(), WIDTHS))


def test_plans_made_in_inference_mode() -> None:
    found: list[Tensor] = []
    with torch.inference_mode():
        moves = plan_tensor(build(REPEATED))
        grads = gradients_of(REPEATED)
        found = op(grads, moves, WIDTHS)
        moves[:, 4] = 0  # such tensors do not tell that they changed
        assert not any(part.any() for part in op(grads, moves, WIDTHS))
    expected = gradient_reference(make(dtype=torch.float64), [g.clone() for g in grads], LAYOUTS, REPEATED)
    assert_same(found, expected)


@pytest.mark.parametrize(
    "moves",
    [None, torch.zeros(5, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 5)],
    ids=["None", "one dimension", "four fields", "float"],
)
def test_what_is_not_a_plan_tensor(moves: Any) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"plan tensor|moves"):
        op(gradients_of(ONCE), moves, WIDTHS)


def test_a_plan_that_leaves_its_tensors() -> None:
    moves = plan_tensor(build(ONCE))
    moves[0, 2] = 7
    with pytest.raises(ValueError, match="row 0 of the plan writes"):
        op(gradients_of(ONCE), moves, WIDTHS)
