"""A two-tower click-through-style model over two EmbeddingBagCollections.

The two collections have different embedding widths, so each sample's embeddings arrive in two
KeyedTensors. One regroup call turns them into the inputs of the three towers:

========  =============================================  =================
group     keys                                           tower
========  =============================================  =================
"user"    user_id, age_band, gender, occupation          user vector
"item"    item_id, release_year, genres                  item vector
"cross"   user_id, item_id, genres                       deep part
========  =============================================  =================

``user_id``, ``item_id`` and ``genres`` are each used in two groups; ``zip_prefix`` is looked up
but used in none, as a feature is that has been switched off for an ablation. Nothing depends
on its embeddings, so the gradient of its table has to be exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.movielens.data import ITEM_KEYS, USER_KEYS, Batch

GROUPS: dict[str, tuple[str, ...]] = {
    "user": ("user_id", "age_band", "gender", "occupation"),
    "item": ("item_id", "release_year", "genres"),
    "cross": ("user_id", "item_id", "genres"),
}
UNUSED_KEY = "zip_prefix"
"""The one key that no group uses."""

RegroupFactory = Callable[[list[list[str]], list[str]], nn.Module]
"""Takes the keys of each group and the group names, as ``KTRegroupAsDict`` does."""

REGROUP_CHOICES = ("torchrec_kt", "torchrec")


def regroup_factory(name: str) -> RegroupFactory:
    """Return the ``KTRegroupAsDict`` class of the named package.

    Args:
        name: one of ``REGROUP_CHOICES``; only the chosen package is imported.
    """
    if name == "torchrec_kt":
        try:
            from torchrec_kt import KTRegroupAsDict
        except ImportError as error:
            raise RuntimeError(
                f"The regroup choice 'torchrec_kt' needs the package torchrec_kt ({error}). "
                "Install it from the root of this repository with `pip install -e .`, or choose "
                "'torchrec'."
            ) from error
        return KTRegroupAsDict
    if name == "torchrec":
        from torchrec.modules.regroup import KTRegroupAsDict as TorchRecRegroup

        return TorchRecRegroup
    raise ValueError(f"regroup is {name!r}, expected one of {', '.join(REGROUP_CHOICES)}")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        user_dim: width of every user-side embedding.
        item_dim: width of every item-side embedding.
        vector_dim: width of the user and item vectors whose product is the interaction.
        hidden_dim: width of the hidden layers.
        embedding_std: standard deviation of the initial embeddings.
        dropout: share of the tower inputs dropped in training, 0 to 1.
    """

    user_dim: int = 32
    item_dim: int = 48
    vector_dim: int = 32
    hidden_dim: int = 64
    embedding_std: float = 0.1
    dropout: float = 0.5


def embedding_collection(
    keys: tuple[str, ...],
    vocabulary_sizes: Mapping[str, int],
    dim: int,
    std: float,
    device: torch.device | None = None,
) -> EmbeddingBagCollection:
    """Build one table of width ``dim`` a key; bags are pooled by their mean."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{key}",
                embedding_dim=dim,
                num_embeddings=vocabulary_sizes[key],
                feature_names=[key],
                pooling=PoolingType.MEAN,
                init_fn=partial(nn.init.normal_, std=std),
            )
            for key in keys
        ],
        device=device,
    )


class MovieLensModel(nn.Module):
    """Predicts the logit of "rating of 4 or more".

    The logit is the sum of three parts: a linear one (per-feature effects), the product of a
    user vector and an item vector (the interaction), and a deep part over the cross group.

    Args:
        vocabulary_sizes: number of values of each of ``USER_KEYS`` and ``ITEM_KEYS``.
        regroup: makes the regroup module, see ``regroup_factory``.
        config: sizes of the model.
        device: where the embedding tables are made (``meta`` to have them sharded later).
        dense_device: where the other layers are made; ``device`` where that is ``None``.
    """

    def __init__(
        self,
        vocabulary_sizes: Mapping[str, int],
        regroup: RegroupFactory,
        config: ModelConfig | None = None,
        device: torch.device | None = None,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        config = config or ModelConfig()
        dense_device = device if dense_device is None else dense_device
        self.user_embeddings = embedding_collection(
            USER_KEYS, vocabulary_sizes, config.user_dim, config.embedding_std, device
        )
        self.item_embeddings = embedding_collection(
            ITEM_KEYS, vocabulary_sizes, config.item_dim, config.embedding_std, device
        )
        self.regroup = regroup([list(keys) for keys in GROUPS.values()], list(GROUPS))

        def width(group: str) -> int:
            return sum(config.user_dim if key in USER_KEYS else config.item_dim for key in GROUPS[group])

        def linear(in_features: int, out_features: int) -> nn.Linear:
            return nn.Linear(in_features, out_features, device=dense_device)

        self.user_tower = nn.Sequential(nn.Dropout(config.dropout), linear(width("user"), config.vector_dim))
        self.item_tower = nn.Sequential(nn.Dropout(config.dropout), linear(width("item"), config.vector_dim))
        self.cross_tower = nn.Sequential(
            nn.Dropout(config.dropout),
            linear(width("cross"), config.hidden_dim),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            linear(config.hidden_dim, config.hidden_dim // 2),
            nn.ReLU(),
            linear(config.hidden_dim // 2, 1),
        )
        self.user_linear = linear(width("user"), 1)
        self.item_linear = linear(width("item"), 1)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits, float32 ``[B]``."""
        return self.score(batch.user, batch.item)

    def score(self, user: KeyedJaggedTensor, item: KeyedJaggedTensor) -> Tensor:
        """The same from the two sides of a batch alone, for serving."""
        groups = self.regroup([self.user_embeddings(user), self.item_embeddings(item)])
        user, item, cross = groups["user"], groups["item"], groups["cross"]
        linear = self.user_linear(user) + self.item_linear(item)
        interaction = (self.user_tower(user) * self.item_tower(item)).sum(dim=1, keepdim=True)
        return (linear + interaction + self.cross_tower(cross)).squeeze(1)


class MovieLensTrainModel(nn.Module):
    """Wraps the model so that one call gives the loss, as TorchRec's train pipelines expect.

    Returns ``(loss, (loss, logits, labels))`` from ``forward(batch)``: the mean binary cross
    entropy in nats (a scalar), and detached copies of it, of the logits and of the labels.
    """

    def __init__(self, model: MovieLensModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        logits = self.model(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        return loss, (loss.detach(), logits.detach(), batch.label.detach())
