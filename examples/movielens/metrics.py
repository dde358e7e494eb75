"""The two figures the example reports: AUC and log loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the area under the ROC curve, 0 to 1.

    It is the chance that a random positive scores above a random negative, ties counting one
    half: the rank-sum statistic with tied scores sharing their mean rank.

    Args:
        scores: ``[N]``, higher meaning more likely positive.
        labels: ``[N]``, 1 for a positive and 0 for a negative; both must occur.
    """
    if scores.dim() != 1 or scores.shape != labels.shape:
        raise ValueError(
            f"scores have shape {tuple(scores.shape)} and labels {tuple(labels.shape)}, expected "
            "two vectors of one length"
        )
    positive = labels > 0
    positives = int(positive.sum())
    negatives = labels.numel() - positives
    if not (positives and negatives):
        raise ValueError(f"labels hold {positives} positives and {negatives} negatives, expected both")
    # NaN compares equal to nothing, so it has no rank.
    if bool(scores.isnan().any()):
        raise ValueError("scores hold NaN, expected numbers that can be ranked")
    _, group, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last_rank = counts.cumsum(0).double()
    mean_rank = last_rank - (counts.double() - 1) / 2
    rank_sum = float(mean_rank[group[positive]].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


@dataclass(frozen=True)
class Scores:
    """Quality on one split.

    Attributes:
        auc: area under the ROC curve, 0 to 1, higher is better.
        log_loss: mean binary cross entropy in nats, lower is better.
    """

    auc: float
    log_loss: float

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> Scores:
        """Score float32 logits ``[N]`` against 0/1 labels ``[N]``."""
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return cls(auc=auc(logits, labels), log_loss=loss.item())
