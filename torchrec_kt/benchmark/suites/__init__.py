"""The suites: lists of cases, each of which measures itself when it is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from ..measuring import Budget
from ..results import SUITE_ORDER, Row

__all__ = ["SUITE_ORDER", "Case", "Settings", "cases"]

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What the user chose.

    Attributes:
        quick: fewer cases and rounds, for a first look.
        rounds: most rounds per candidate, in place of each suite's own.
        without: leave out candidates whose name holds one of these.
        trace: folder for Chrome traces.
    """

    device: torch.device
    quick: bool = False
    rounds: int | None = None
    without: tuple[str, ...] = ()
    trace: Path | None = None

    def limit(self, budget: Budget) -> Budget:
        """A suite's budget, as far as these settings let it."""
        rounds, seconds = budget.rounds, budget.seconds
        if self.quick:
            rounds, seconds = min(rounds, 3), seconds / 10
        return Budget(self.rounds or rounds, seconds)

    def chosen(self, candidates: Mapping[str, T]) -> dict[str, T]:
        """The candidates that are not left out."""
        return {
            name: value
            for name, value in candidates.items()
            if not any(word.lower() in name.lower() for word in self.without)
        }


@dataclass(frozen=True)
class Case:
    """One case of a suite.

    Attributes:
        megabytes: size of its inputs.
        run: measures it in all its modes.
    """

    suite: str
    name: str
    megabytes: float
    run: Callable[[Settings], list[Row]]


def cases(suite: str, quick: bool) -> list[Case]:
    """The cases of a suite, in order.

    Raises:
        ValueError: there is no suite of that name.
    """
    from . import function, host, operator, plan, shapes

    found = {
        "function": function.cases,
        "operator": operator.cases,
        "shapes": shapes.cases,
        "host": host.cases,
        "plan": plan.cases,
    }
    if suite not in found:
        raise ValueError(f"there is no suite {suite!r}; there are {', '.join(SUITE_ORDER)}")
    return found[suite](quick)
