"""Tests of the examples: the MovieLens data and model, the command line, the quickstart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # The examples are run from the checkout, not installed.

from examples.movielens import data as movielens_data  # noqa: E402
from examples.movielens.baseline import fit_biases  # noqa: E402
from examples.movielens.data import (  # noqa: E402
    ITEM_KEYS,
    USER_KEYS,
    Batch,
    DataError,
    MovieLens,
    Split,
    age_band,
    load_movielens,
    release_year,
    split_interactions,
    zip_prefix,
)
from examples.movielens.metrics import Scores, auc  # noqa: E402
from examples.movielens.model import (  # noqa: E402
    GROUPS,
    REGROUP_CHOICES,
    UNUSED_KEY,
    MovieLensModel,
    MovieLensTrainModel,
    regroup_factory,
)
from examples.movielens.train import CallTimer, parse_args  # noqa: E402

QUICK_STEPS = 20


@pytest.fixture(scope="module")
def movielens() -> MovieLens:
    return load_movielens()


@pytest.fixture(scope="module")
def split(movielens: MovieLens) -> Split:
    return split_interactions(movielens.rating.numel())


@pytest.fixture(scope="module")
def batch(movielens: MovieLens, split: Split) -> Batch:
    return movielens.batch(split.train[:64])


def make_model(movielens: MovieLens, regroup: str = "torchrec_kt") -> MovieLensModel:
    torch.manual_seed(0)
    return MovieLensModel(movielens.vocabulary_sizes, regroup_factory(regroup))


def run_script(*args: str) -> subprocess.CompletedProcess[str]:
    """Run Python from the repository root, with the checkout's packages on the path."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )


# Data


def test_counts(movielens: MovieLens) -> None:
    assert movielens.rating.shape == (100_000,)
    assert movielens.user_features.shape == (943, len(USER_KEYS))
    assert movielens.item_features.shape == (1682, len(ITEM_KEYS) - 1)
    counts = [int((movielens.rating == stars).sum()) for stars in range(1, 6)]
    assert counts == [6_110, 11_370, 27_145, 34_174, 21_201]
    assert int(movielens.label.sum()) == 34_174 + 21_201


def test_vocabularies(movielens: MovieLens) -> None:
    assert movielens.vocabulary_sizes == {
        "user_id": 943,
        "age_band": 7,
        "gender": 2,
        "occupation": 21,
        "zip_prefix": 11,
        "item_id": 1682,
        "release_year": 72,
        "genres": 19,
    }
    for key, names in movielens.vocabularies.items():
        assert len(set(names)) == len(names), key
    for position, key in enumerate(USER_KEYS):
        used = movielens.user_features[:, position].unique()
        assert used.tolist() == list(range(movielens.vocabulary_sizes[key])), key


def test_known_rows(movielens: MovieLens) -> None:
    """The first user and item of the files, and the items with missing or garbled values."""
    names = movielens.vocabularies

    def user(index: int) -> list[str]:
        row = movielens.user_features[index].tolist()
        return [names[key][value] for key, value in zip(USER_KEYS, row, strict=True)]

    def item(name: str) -> tuple[str, list[str]]:
        index = names["item_id"].index(name)
        year = names["release_year"][int(movielens.item_features[index, 1])]
        genres = [names["genres"][g] for g in movielens.item_genres[index].tolist() if g >= 0]
        return year, genres

    assert user(0) == ["1", "18-24", "M", "technician", "8"]
    assert item("1") == ("1995", ["Animation", "Children's", "Comedy"])
    assert item("267") == ("unknown", ["unknown"])
    assert item("1373") == ("1971", ["unknown"])
    assert item("1412") == ("unknown", ["Animation", "Children's"])
    # The first line of the interaction file.
    assert names["user_id"][int(movielens.user_index[0])] == "196"
    assert names["item_id"][int(movielens.item_index[0])] == "242"
    assert float(movielens.rating[0]) == 3.0


@pytest.mark.parametrize(
    ("age", "band"),
    [(7, "under 18"), (17, "under 18"), (18, "18-24"), (55, "50-55"), (56, "56 and over")],
)
def test_age_band(age: float, band: str) -> None:
    assert age_band(age) == band


def test_zip_prefix_and_release_year() -> None:
    assert [zip_prefix(code) for code in ("85711", "T8H1N", "")] == ["8", "non-US", "non-US"]
    assert [release_year(text) for text in ("1995", "V", "unkonwn", "")] == ["1995"] + 3 * ["unknown"]


def test_split_has_no_leakage(movielens: MovieLens, split: Split) -> None:
    parts = (split.train, split.validation, split.test)
    assert [part.numel() for part in parts] == [80_000, 10_000, 10_000]
    assert torch.cat(parts).sort().values.tolist() == list(range(100_000))
    # No pair of user and item is in the data twice, so none is in two parts either.
    pairs = movielens.user_index * 1682 + movielens.item_index
    assert pairs.unique().numel() == 100_000
    again = split_interactions(100_000)
    assert torch.equal(again.test, split.test)


def test_batch_structure(movielens: MovieLens) -> None:
    rows = torch.tensor([0, 5, 99_999, 5])
    batch = movielens.batch(rows)
    assert batch.user.keys() == list(USER_KEYS)
    assert batch.item.keys() == list(ITEM_KEYS)
    assert batch.user.stride() == batch.item.stride() == 4
    assert torch.equal(batch.label, (movielens.rating[rows] >= 4).float())
    users, items = movielens.user_index[rows], movielens.item_index[rows]
    for position, key in enumerate(USER_KEYS):
        assert batch.user[key].lengths().tolist() == [1, 1, 1, 1]
        assert torch.equal(batch.user[key].values(), movielens.user_features[users, position])
    for position, key in enumerate(ITEM_KEYS[:-1]):
        assert batch.item[key].lengths().tolist() == [1, 1, 1, 1]
        assert torch.equal(batch.item[key].values(), movielens.item_features[items, position])
    expected = [[g for g in row if g >= 0] for row in movielens.item_genres[items].tolist()]
    genres = batch.item["genres"]
    assert genres.lengths().tolist() == [len(row) for row in expected]
    assert genres.values().tolist() == [g for row in expected for g in row]


def test_genre_lengths_of_all_rows(movielens: MovieLens) -> None:
    lengths = movielens.batch(torch.arange(100_000)).item["genres"].lengths()
    assert lengths.shape == (100_000,)
    assert int(lengths.min()) == 1
    assert int(lengths.max()) == movielens.item_genres.shape[1] == 6


def test_batches_cover_each_row_once(movielens: MovieLens, split: Split) -> None:
    rows = split.test[:1000]
    generator = torch.Generator().manual_seed(1)
    batches = list(movielens.batches(rows, 300, generator))
    assert [len(batch.label) for batch in batches] == [300, 300, 300, 100]
    seen = torch.cat([batch.user["user_id"].values() for batch in batches])
    assert torch.equal(seen.sort().values, movielens.user_index[rows].sort().values)
    assert not torch.equal(seen, movielens.user_index[rows])
    with pytest.raises(ValueError, match="batch_size is 0"):
        next(movielens.batches(rows, 0))


def test_batch_moves(batch: Batch) -> None:
    moved = batch.to(torch.device("cpu"), non_blocking=True)
    assert torch.equal(moved.item.values(), batch.item.values())
    assert torch.equal(moved.label, batch.label)
    assert batch.to(torch.device("meta"), non_blocking=False).user.device().type == "meta"


def write_data(folder: Path, **replace: str) -> Path:
    """Write a tiny data set, with some of the files replaced."""
    files = {
        "inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\nu\ti\t4\t0\n",
        "item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        "i\tA Title\t1990\t\n",
        "user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
        "u\t30\tF\tartist\t12345\n",
    }
    for name, text in (files | replace).items():
        (folder / f"ml-100k.{name}").write_text(text, encoding="utf-8")
    return folder


def test_item_without_genre(tmp_path: Path) -> None:
    data = load_movielens(write_data(tmp_path))
    assert data.vocabularies["genres"] == ("unknown",)
    assert data.batch(torch.tensor([0])).item["genres"].lengths().tolist() == [1]


INTER_HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        ({"inter": "user\titem\n"}, "has the header.*expected the tab-separated columns"),
        ({"inter": ""}, "has the header"),
        ({"inter": INTER_HEADER}, "0 interactions, expected at least one"),
        ({"inter": INTER_HEADER + "u\ti\t4\n"}, "line 2: 3 tab-separated fields, expected 4"),
        ({"inter": INTER_HEADER + "u\ti\tgood\t0\n"}, "rating holds 'good', expected a number"),
        ({"inter": INTER_HEADER + "x\ti\t4\t0\n"}, "names the id 'x'.*ml-100k.user does not list"),
    ],
)
def test_wrong_files(tmp_path: Path, replace: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_movielens(write_data(tmp_path, **replace))


def test_missing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"lacks ml-100k.inter.*pip install --no-deps recbole"):
        load_movielens(tmp_path)
    monkeypatch.setattr(movielens_data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"not installed.*pip install --no-deps recbole==1\.2\.1"):
        load_movielens()


# Metrics and baseline


@pytest.mark.parametrize("distinct", [2, 7, 1000])
def test_auc_against_brute_force(distinct: int) -> None:
    generator = torch.Generator().manual_seed(distinct)
    scores = torch.randint(distinct, (200,), generator=generator).float() / distinct
    labels = (torch.rand(200, generator=generator) < 0.3).float()
    wins = 0.0
    pairs = 0
    for positive in scores[labels == 1].tolist():
        for negative in scores[labels == 0].tolist():
            wins += 1.0 if positive > negative else 0.5 if positive == negative else 0.0
            pairs += 1
    assert auc(scores, labels) == pytest.approx(wins / pairs, abs=1e-12)


def test_auc_extremes_and_errors() -> None:
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert auc(torch.tensor([1.0, 2.0, 3.0, 4.0]), labels) == 1.0
    assert auc(torch.tensor([4.0, 3.0, 2.0, 1.0]), labels) == 0.0
    assert auc(torch.ones(4), labels) == 0.5
    with pytest.raises(ValueError, match="2 positives and 0 negatives"):
        auc(torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="expected two vectors of one length"):
        auc(torch.ones(3), labels)
    with pytest.raises(ValueError, match="NaN"):
        auc(torch.tensor([0.0, float("nan"), 1.0, 2.0]), labels)


def test_bias_baseline_is_at_its_optimum(movielens: MovieLens, split: Split) -> None:
    """At the optimum the fitted chances of each user sum to the positives, less the penalty."""
    l2 = 1.0
    baseline = fit_biases(movielens, split.train, l2=l2)
    users, labels = movielens.user_index[split.train], movielens.label[split.train]
    residual = labels - baseline.logits(movielens, split.train).sigmoid()
    assert abs(float(residual.mean())) < 1e-3
    per_user = torch.zeros(943).index_add(0, users, residual)
    # In units of ratings; a user has about 85 of them in the train split.
    assert float((per_user - l2 * baseline.user_bias).abs().max()) < 0.5
    scores = Scores.of(baseline.logits(movielens, split.validation), movielens.label[split.validation])
    assert scores.auc > 0.77


# Model


def test_groups_share_and_leave_out_keys() -> None:
    uses = [key for keys in GROUPS.values() for key in keys]
    assert len(GROUPS) >= 3
    assert max(uses.count(key) for key in uses) == 2
    assert set(USER_KEYS + ITEM_KEYS) - set(uses) == {UNUSED_KEY}


@pytest.mark.parametrize("regroup", REGROUP_CHOICES)
def test_forward_shapes(movielens: MovieLens, batch: Batch, regroup: str) -> None:
    model = make_model(movielens, regroup)
    logits = model(batch)
    assert logits.shape == (64,)
    assert logits.dtype == torch.float32
    loss, (detached, pred, label) = MovieLensTrainModel(model)(batch)
    assert loss.shape == ()
    assert loss.requires_grad
    assert not detached.requires_grad
    assert not pred.requires_grad
    assert pred.shape == label.shape == (64,)


def test_group_widths(movielens: MovieLens, batch: Batch) -> None:
    model = make_model(movielens)
    user, item = model.user_embeddings(batch.user), model.item_embeddings(batch.item)
    assert set(user.length_per_key()) != set(item.length_per_key())
    groups = model.regroup([user, item])
    by_key = {**user.to_dict(), **item.to_dict()}
    for name, keys in GROUPS.items():
        assert torch.equal(groups[name], torch.cat([by_key[key] for key in keys], dim=1)), name


def test_gradients(movielens: MovieLens, batch: Batch) -> None:
    """Every parameter gets a gradient but the unused table, whose gradient is exactly zero."""
    model = make_model(movielens)
    # Freed memory of the gradient's size, full of NaN: columns never written may show it.
    for _ in range(4):
        torch.full((64, 5 * 32), float("nan"))
    loss, _ = MovieLensTrainModel(model)(batch)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        if UNUSED_KEY in name:
            assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name
        else:
            assert int(parameter.grad.count_nonzero()) > 0, name


def test_unused_gradient_is_zero_in_every_step(movielens: MovieLens, split: Split) -> None:
    model = make_model(movielens)
    weight = model.user_embeddings.embedding_bags.get_parameter(f"t_{UNUSED_KEY}.weight")
    for batch in movielens.batches(split.train[:3200], 320):
        model.zero_grad()
        MovieLensTrainModel(model)(batch)[0].backward()
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_regroup_factory_rejects_other_names() -> None:
    with pytest.raises(ValueError, match="'fbgemm', expected one of torchrec_kt, torchrec"):
        regroup_factory("fbgemm")


def test_model_on_meta_device(movielens: MovieLens) -> None:
    model = MovieLensModel(
        movielens.vocabulary_sizes,
        regroup_factory("torchrec_kt"),
        device=torch.device("meta"),
        dense_device=torch.device("cpu"),
    )
    for name, parameter in model.named_parameters():
        assert parameter.device.type == ("meta" if "embedding_bags" in name else "cpu"), name


# Training and the command line


def test_call_timer_counts_training_calls_only() -> None:
    module = torch.nn.Identity()
    timer = CallTimer(module)
    module.train()(torch.ones(1))
    module.eval()(torch.ones(1))
    timer.remove()
    module.train()(torch.ones(1))
    assert len(timer.seconds) == 1
    assert timer.seconds[0] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--regroup", "fbgemm"], "invalid choice: 'fbgemm'"),
        (["--epochs", "0"], "argument --epochs: '0' given, expected a whole number of 1 or more"),
        (["--batch-size", "many"], "argument --batch-size: 'many' given, expected a whole number"),
        (["--seed", "-1"], "argument --seed: '-1' given, expected a whole number of 0"),
        (["--json", "no/such/folder/r.json"], "expected a file name in a folder that exists"),
        (["--color"], "unrecognized arguments: --color"),
    ],
)
def test_wrong_options(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(args)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def quick_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of a quick run with each regroup choice, through both ways to start the script."""
    folder = tmp_path_factory.mktemp("quick")
    results = {}
    for regroup, start in zip(
        REGROUP_CHOICES,
        (["examples/movielens/train.py"], ["-m", "examples.movielens.train"]),
        strict=True,
    ):
        path = folder / f"{regroup}.json"
        done = run_script(*start, "--regroup", regroup, "--max-steps", str(QUICK_STEPS), "--json", str(path))
        assert done.returncode == 0, done.stderr
        assert "the model was not required to beat the baseline" in done.stdout
        results[regroup] = json.loads(path.read_text(encoding="utf-8")) | {"stdout": done.stdout}
    return results


def test_quick_run(quick_runs: dict[str, dict[str, Any]]) -> None:
    results = quick_runs["torchrec_kt"]
    assert results["steps"] == len(results["train_losses"]) == QUICK_STEPS
    assert results["split"] == {"train": 80_000, "validation": 10_000, "test": 10_000}
    assert results["unused_gradient_steps"] == 0
    assert results["median_step_ms"] > 0
    assert results["median_regroup_us"] > 0
    assert 0.77 < results["baseline"]["auc"] < 0.79
    assert results["train_losses"][-1] < results["train_losses"][0]
    for text in ("AUC", "log loss", "bias-only baseline", "median step time", "regroup call"):
        assert text in results["stdout"]


def test_both_regroup_choices_train_alike(quick_runs: dict[str, dict[str, Any]]) -> None:
    ours, theirs = quick_runs["torchrec_kt"], quick_runs["torchrec"]
    assert ours["train_losses"] == theirs["train_losses"]
    assert ours["model"] == theirs["model"]
    assert ours["baseline"] == theirs["baseline"]


def test_weak_model_exits_with_a_message() -> None:
    """One epoch of huge batches leaves the model behind the baseline."""
    done = run_script("examples/movielens/train.py", "--epochs", "1", "--batch-size", "40000")
    assert done.returncode == 1
    assert "error: the model does not beat the bias-only baseline" in done.stderr


def test_missing_data_exits_with_a_message(tmp_path: Path) -> None:
    done = run_script("examples/movielens/train.py", "--data", str(tmp_path / "none"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error: The data folder" in done.stderr
    assert "pip install" in done.stderr


def test_quickstart() -> None:
    done = run_script("examples/quickstart.py")
    assert done.returncode == 0, done.stderr
    assert "gradient of zip_code, unused: [0.0]" in done.stdout
    assert "gradient of item_id, used twice: [2.0]" in done.stdout
    assert "equal to slicing by key and torch.cat" in done.stdout
