"""The bias-only baseline: a logistic model of a global mean, a user bias and an item bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from examples.movielens.data import MovieLens, Split
from examples.movielens.metrics import Scores

L2_GRID: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Penalties tried; the one with the lowest validation log loss is kept."""


@dataclass(frozen=True)
class BiasBaseline:
    """The fitted baseline.

    Attributes:
        mean: float32 ``[]``, the global logit.
        user_bias: float32 ``[U]``, added for each user.
        item_bias: float32 ``[I]``, added for each item.
        l2: penalty on the squared biases it was fitted with.
    """

    mean: Tensor
    user_bias: Tensor
    item_bias: Tensor
    l2: float

    def logits(self, data: MovieLens, rows: Tensor) -> Tensor:
        """Return the logits of the interactions ``rows`` (int64 ``[B]``), float32 ``[B]``."""
        users, items = data.user_index[rows], data.item_index[rows]
        return self.mean + self.user_bias[users] + self.item_bias[items]


def fit_biases(data: MovieLens, rows: Tensor, l2: float, max_iterations: int = 100) -> BiasBaseline:
    """Fit the biases to the interactions ``rows`` by full-batch L-BFGS; the problem is convex."""
    users, items, labels = data.user_index[rows], data.item_index[rows], data.label[rows]
    mean = torch.zeros((), requires_grad=True)
    user_bias = torch.zeros(len(data.user_features), requires_grad=True)
    item_bias = torch.zeros(len(data.item_features), requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [mean, user_bias, item_bias], max_iter=max_iterations, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = mean + user_bias[users] + item_bias[items]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        penalty = user_bias.square().sum() + item_bias.square().sum()
        objective = loss + l2 / (2 * rows.numel()) * penalty
        objective.backward()
        return objective

    optimizer.step(closure)
    return BiasBaseline(mean.detach(), user_bias.detach(), item_bias.detach(), l2)


def fit_baseline(data: MovieLens, split: Split) -> BiasBaseline:
    """Fit on the train split for each penalty of ``L2_GRID``; keep the best on validation."""

    def validation_loss(baseline: BiasBaseline) -> float:
        logits = baseline.logits(data, split.validation)
        return Scores.of(logits, data.label[split.validation]).log_loss

    return min((fit_biases(data, split.train, l2) for l2 in L2_GRID), key=validation_loss)
