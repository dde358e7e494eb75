"""A click-through-style model on MovieLens-100K, built on two EmbeddingBagCollections."""
