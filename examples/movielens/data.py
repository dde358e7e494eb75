"""MovieLens-100K as KeyedJaggedTensor batches.

The rating files are the ones shipped inside the ``recbole`` wheel
(``recbole/dataset_example/ml-100k``): tab separated text with typed headers such as
``user_id:token``. Nothing is downloaded and ``recbole`` itself is never imported.

Two sets of features are made, one per side of the model:

* user side (``USER_KEYS``): user id, age band, gender, occupation, zip-code prefix;
  exactly one value each.
* item side (``ITEM_KEYS``): item id, release year, and genres, a bag of one or more values.

The label of an interaction is 1 when its rating is 4 or 5 (``POSITIVE_RATING`` and above).

Split: the interactions are shuffled once with the fixed seed ``SPLIT_SEED`` and cut 80/10/10
into train, validation and test. The split is random over interactions, not over users, items
or time: it asks how well unseen ratings of known users are filled in. It does not depend on
the training seed, so runs with different training seeds are scored on the same rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

USER_KEYS: tuple[str, ...] = ("user_id", "age_band", "gender", "occupation", "zip_prefix")
ITEM_KEYS: tuple[str, ...] = ("item_id", "release_year", "genres")

POSITIVE_RATING = 4.0
SPLIT_SEED = 100_000
SPLIT_FRACTIONS: tuple[float, float] = (0.8, 0.1)
"""Train and validation shares; the rest is the test split."""

UNKNOWN = "unknown"
AGE_BANDS: tuple[tuple[int, str], ...] = (
    (18, "under 18"),
    (25, "18-24"),
    (35, "25-34"),
    (45, "35-44"),
    (50, "45-49"),
    (56, "50-55"),
)
"""(exclusive upper age in years, name); older people fall into ``OLDEST_BAND``."""
OLDEST_BAND = "56 and over"
NON_US_ZIP = "non-US"

_DATASET_DIR = ("dataset_example", "ml-100k")
_INTER_COLUMNS = ("user_id:token", "item_id:token", "rating:float", "timestamp:float")
_USER_COLUMNS = (
    "user_id:token",
    "age:token",
    "gender:token",
    "occupation:token",
    "zip_code:token",
)
_ITEM_COLUMNS = (
    "item_id:token",
    "movie_title:token_seq",
    "release_year:token",
    "class:token_seq",
)
_INSTALL_HINT = (
    "install the wheel that carries them with `pip install --no-deps recbole==1.2.1`, "
    "or pass --data DIR with a folder that holds ml-100k.inter, ml-100k.item and ml-100k.user"
)


class DataError(Exception):
    """The data files are missing or do not have the expected format."""


def find_data_dir(data_dir: str | Path | None = None) -> Path:
    """Return the folder that holds ``ml-100k.{inter,item,user}``.

    Args:
        data_dir: folder to use; ``None`` looks inside the installed ``recbole`` package.

    Raises:
        DataError: no such folder, or one of the three files is not in it.
    """
    if data_dir is not None:
        folder = Path(data_dir)
    else:
        # find_spec on a top-level name locates the package without importing it.
        spec = importlib.util.find_spec("recbole")
        locations = list(spec.submodule_search_locations or []) if spec is not None else []
        if not locations:
            raise DataError(
                "The MovieLens-100K files were not found: the package `recbole` is not "
                f"installed. To get them, {_INSTALL_HINT}."
            )
        folder = Path(locations[0], *_DATASET_DIR)
    missing = [
        name for name in ("ml-100k.inter", "ml-100k.item", "ml-100k.user") if not (folder / name).is_file()
    ]
    if missing:
        raise DataError(
            f"The data folder {str(folder)!r} lacks {', '.join(missing)}. To get the files, {_INSTALL_HINT}."
        )
    return folder


def _read_table(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """Read a tab-separated file with the given typed header; return its rows as strings."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{str(path)!r} is not UTF-8 text ({error}); {_INSTALL_HINT}.") from error
    header = lines[0].split("\t") if lines else []
    if header != list(columns):
        raise DataError(
            f"{str(path)!r} has the header {header}, expected the tab-separated columns "
            f"{list(columns)}. Use the unmodified files: {_INSTALL_HINT}."
        )
    rows = [line.split("\t") for line in lines[1:] if line]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(columns):
            raise DataError(
                f"{str(path)!r}, line {number}: {len(row)} tab-separated fields, expected "
                f"{len(columns)} ({', '.join(columns)}). Use the unmodified files: {_INSTALL_HINT}."
            )
    return rows


def _number(text: str, path: Path, column: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise DataError(
            f"{str(path)!r}: column {column} holds {text!r}, expected a number. Use the "
            f"unmodified files: {_INSTALL_HINT}."
        ) from error


def age_band(age: float) -> str:
    """Return the name of the band (see ``AGE_BANDS``) of an age in years."""
    for upper, name in AGE_BANDS:
        if age < upper:
            return name
    return OLDEST_BAND


def zip_prefix(zip_code: str) -> str:
    """Return the first digit of a US zip code, ``NON_US_ZIP`` for any other postal code."""
    first = zip_code[:1]
    return first if first.isdigit() else NON_US_ZIP


def release_year(text: str) -> str:
    """Return a four-digit year as it is, ``UNKNOWN`` for anything else."""
    return text if len(text) == 4 and text.isdigit() else UNKNOWN


@dataclass
class Batch(Pipelineable):
    """One batch of B interactions.

    Attributes:
        user: keys ``USER_KEYS``, B bags each of length 1.
        item: keys ``ITEM_KEYS``, B bags each; length 1 but for ``genres`` (1 or more).
        label: float32 ``[B]``, 1.0 when the rating is ``POSITIVE_RATING`` or more, else 0.0.
    """

    user: KeyedJaggedTensor
    item: KeyedJaggedTensor
    label: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch on ``device``."""
        return Batch(
            user=self.user.to(device, non_blocking=non_blocking),
            item=self.item.to(device, non_blocking=non_blocking),
            label=self.label.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Mark every tensor of the batch as used by ``stream``."""
        # TorchRec annotates the narrower torch.cuda.Stream here; any stream works.
        self.user.record_stream(stream)  # pyright: ignore[reportArgumentType]
        self.item.record_stream(stream)  # pyright: ignore[reportArgumentType]
        self.label.record_stream(stream)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked host memory."""
        return Batch(
            user=self.user.pin_memory(),
            item=self.item.pin_memory(),
            label=self.label.pin_memory(),
        )


@dataclass(frozen=True)
class MovieLens:
    """The whole data set as index tensors; U users, I items, N interactions.

    Attributes:
        vocabularies: feature key -> names of its values, in index order.
        user_features: int64 ``[U, len(USER_KEYS)]``, the value index of each feature.
        item_features: int64 ``[I, len(ITEM_KEYS) - 1]``, item id and release year.
        item_genres: int64 ``[I, G]``, genre indices padded on the right with -1, where G is the
            largest number of genres of one item.
        user_index: int64 ``[N]``, row of ``user_features`` of each interaction.
        item_index: int64 ``[N]``, row of ``item_features`` of each interaction.
        rating: float32 ``[N]``, 1 to 5 stars.
    """

    vocabularies: dict[str, tuple[str, ...]]
    user_features: Tensor
    item_features: Tensor
    item_genres: Tensor
    user_index: Tensor
    item_index: Tensor
    rating: Tensor

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        """Number of values of each feature key."""
        return {key: len(names) for key, names in self.vocabularies.items()}

    @property
    def label(self) -> Tensor:
        """Float32 ``[N]``: 1.0 where the rating is ``POSITIVE_RATING`` or more."""
        return (self.rating >= POSITIVE_RATING).float()

    def batch(self, rows: Tensor) -> Batch:
        """Build the batch of the interactions ``rows`` (int64 ``[B]``)."""
        user = self.user_features[self.user_index[rows]]
        item_index = self.item_index[rows]
        item = self.item_features[item_index]
        genres = self.item_genres[item_index]
        present = genres >= 0
        # A KeyedJaggedTensor is laid out key by key: all B bags of the first key, then the next.
        return Batch(
            user=KeyedJaggedTensor(
                keys=list(USER_KEYS),
                values=user.t().reshape(-1),
                lengths=torch.ones(user.numel(), dtype=torch.int64),
            ),
            item=KeyedJaggedTensor(
                keys=list(ITEM_KEYS),
                values=torch.cat([item.t().reshape(-1), genres[present]]),
                lengths=torch.cat([torch.ones(item.numel(), dtype=torch.int64), present.sum(dim=1)]),
            ),
            label=(self.rating[rows] >= POSITIVE_RATING).float(),
        )

    def batches(
        self, rows: Tensor, batch_size: int, generator: torch.Generator | None = None
    ) -> Iterator[Batch]:
        """Yield the batches of ``rows``, shuffled by ``generator`` where one is given.

        The last batch holds what is left, so every row comes exactly once.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected 1 or more interactions")
        if generator is not None:
            rows = rows[torch.randperm(rows.numel(), generator=generator)]
        for part in rows.split(batch_size):
            yield self.batch(part)


@dataclass(frozen=True)
class Split:
    """Row numbers (int64) of the interactions of each part; disjoint, together all rows."""

    train: Tensor
    validation: Tensor
    test: Tensor


def split_interactions(count: int, seed: int = SPLIT_SEED) -> Split:
    """Shuffle ``count`` row numbers with ``seed`` and cut them 80/10/10."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    train_end = round(count * SPLIT_FRACTIONS[0])
    validation_end = train_end + round(count * SPLIT_FRACTIONS[1])
    return Split(
        train=order[:train_end],
        validation=order[train_end:validation_end],
        test=order[validation_end:],
    )


def _encode(values: Sequence[str], vocabulary: Sequence[str]) -> list[int]:
    index = {name: position for position, name in enumerate(vocabulary)}
    return [index[value] for value in values]


def _look_up(ids: Sequence[str], vocabulary: Sequence[str], path: Path, known_in: str) -> Tensor:
    index = {name: position for position, name in enumerate(vocabulary)}
    try:
        return torch.tensor([index[name] for name in ids], dtype=torch.int64)
    except KeyError as error:
        raise DataError(
            f"{str(path)!r} names the id {error.args[0]!r}, which {known_in} does not list. "
            f"Use three files of the same data set: {_INSTALL_HINT}."
        ) from error


def load_movielens(data_dir: str | Path | None = None) -> MovieLens:
    """Read MovieLens-100K into index tensors.

    Every user and item of the data files has its own index; release years and genres that are
    missing or garbled in the files share the value ``UNKNOWN``.

    Args:
        data_dir: folder of the three files; ``None`` finds them in the ``recbole`` package.

    Raises:
        DataError: files missing, or not in the expected format.
    """
    folder = find_data_dir(data_dir)
    user_path, item_path = folder / "ml-100k.user", folder / "ml-100k.item"
    inter_path = folder / "ml-100k.inter"
    users = _read_table(user_path, _USER_COLUMNS)
    items = _read_table(item_path, _ITEM_COLUMNS)
    interactions = _read_table(inter_path, _INTER_COLUMNS)
    if not (users and items and interactions):
        raise DataError(
            f"{str(folder)!r} holds {len(users)} users, {len(items)} items and "
            f"{len(interactions)} interactions, expected at least one of each: {_INSTALL_HINT}."
        )

    user_columns: dict[str, list[str]] = {
        "user_id": [row[0] for row in users],
        "age_band": [age_band(_number(row[1], user_path, "age")) for row in users],
        "gender": [row[2] for row in users],
        "occupation": [row[3] for row in users],
        "zip_prefix": [zip_prefix(row[4]) for row in users],
    }
    item_columns: dict[str, list[str]] = {
        "item_id": [row[0] for row in items],
        "release_year": [release_year(row[2]) for row in items],
    }
    genre_lists = [row[3].split() or [UNKNOWN] for row in items]

    vocabularies: dict[str, tuple[str, ...]] = {}
    for key, column in (user_columns | item_columns).items():
        is_id = key in ("user_id", "item_id")
        vocabularies[key] = tuple(column) if is_id else tuple(sorted(set(column)))
        if is_id and len(set(column)) != len(column):
            raise DataError(
                f"{str(folder)!r}: the column {key} repeats an id, expected one row an id. Use "
                f"the unmodified files: {_INSTALL_HINT}."
            )
    vocabularies["genres"] = tuple(sorted({name for names in genre_lists for name in names}))

    genres = torch.full((len(items), max(map(len, genre_lists))), -1, dtype=torch.int64)
    for position, names in enumerate(genre_lists):
        genres[position, : len(names)] = torch.tensor(_encode(names, vocabularies["genres"]))

    return MovieLens(
        vocabularies=vocabularies,
        user_features=torch.tensor(
            [_encode(user_columns[key], vocabularies[key]) for key in USER_KEYS],
            dtype=torch.int64,
        ).t(),
        item_features=torch.tensor(
            [_encode(item_columns[key], vocabularies[key]) for key in item_columns],
            dtype=torch.int64,
        ).t(),
        item_genres=genres,
        user_index=_look_up(
            [row[0] for row in interactions], vocabularies["user_id"], inter_path, user_path.name
        ),
        item_index=_look_up(
            [row[1] for row in interactions], vocabularies["item_id"], inter_path, item_path.name
        ),
        rating=torch.tensor(
            [_number(row[2], inter_path, "rating") for row in interactions], dtype=torch.float32
        ),
    )
