"""Save the MovieLens model for servers: as TorchScript and as an AOTInductor package.

Run from the root of the repository, either way::

    python -m examples.movielens.export --out served
    python examples/movielens/export.py --out served --epochs 30

Writes into the folder

* ``model.pt``: the model traced by ``torchrec.fx`` and scripted;
* ``model.pt2``: the model exported by ``torch.export`` and compiled by AOTInductor;
* ``batch.pt``: a batch of the test split, one buffer per input, for ``examples/serve_cpp``;
* ``scores.txt``: this process's logits for that batch, one a line;
* ``libraries.txt``: what a process without Python has to load first, one path a line, beside
  ``libtorchrec_kt_serving.so``, which ``examples/serve_cpp`` builds.

A server hands over tensors, not ``KeyedJaggedTensor``; ``Scorer`` is the model with such a signature. The
plan of the regroup comes from the two embedding collections, before there is any data.
"""

# No `from __future__ import annotations`: TorchScript reads the annotations of traced code.

import argparse
import sys
from pathlib import Path
from typing import Any

import fbgemm_gpu
import torch
import torchrec.fx
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

if __package__ in (None, ""):
    # Run as a file: Python then puts this folder, not the repository root, on the path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.movielens.data import (
    ITEM_KEYS,
    USER_KEYS,
    Batch,
    DataError,
    load_movielens,
    split_interactions,
)
from examples.movielens.model import MovieLensModel, regroup_factory
from examples.movielens.train import positive_int, train


class Scorer(nn.Module):
    """The model as servers call it.

    Takes ``user``, int64 ``[B, len(USER_KEYS)]``, one index per key; and the items' indices as bags:
    ``item_values``, int64 ``[N]``, and ``item_lengths``, int64 ``[len(ITEM_KEYS) * B]``, both key by key.
    Returns the logits, float32 ``[B]``.
    """

    def __init__(self, model: MovieLensModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, user: Tensor, item_values: Tensor, item_lengths: Tensor) -> Tensor:
        user_kjt = KeyedJaggedTensor(
            keys=list(USER_KEYS),
            values=user.t().flatten(),
            lengths=torch.ones_like(user).t().flatten(),
        )
        item_kjt = KeyedJaggedTensor(keys=list(ITEM_KEYS), values=item_values, lengths=item_lengths)
        return self.model.score(user_kjt, item_kjt)


def inputs_of(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of a ``Scorer`` for a batch."""
    user = batch.user.values().reshape(len(USER_KEYS), -1).t().contiguous()
    return user, batch.item.values(), batch.item.lengths()


def scripted(scorer: Scorer) -> torch.jit.ScriptModule:
    """Trace by ``torchrec.fx``, then script; any batch from 0 on."""
    graph = torch.fx.GraphModule(scorer, torchrec.fx.Tracer().trace(scorer))
    return torch.jit.script(graph)  # pyright: ignore[reportReturnType]


def exported(scorer: Scorer, example: tuple[Tensor, Tensor, Tensor]) -> torch.export.ExportedProgram:
    """Export with a dynamic batch, from 1 on."""
    batch, values = torch.export.Dim("batch", min=1), torch.export.Dim("values", min=1)
    shapes = ({0: batch}, {0: values}, {0: len(ITEM_KEYS) * batch})
    return torch.export.export(scorer, example, dynamic_shapes=shapes)


class Container(nn.Module):
    """Tensors in a file that C++ reads too."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        for n, tensor in enumerate(tensors):
            self.register_buffer(f"input_{n}", tensor)

    def forward(self) -> int:
        return 0


def libraries() -> list[Path]:
    """FBGEMM's libraries in the order in which its Python package loads them.

    Both saved forms call ``fbgemm`` operators to turn lengths into offsets. For this model
    ``fbgemm_gpu_py.so`` alone does; quantised tables need the rest.
    """
    folder = Path(fbgemm_gpu.__path__[0])
    return [folder / f"{name}.so" for name in fbgemm_gpu.fbgemm_gpu_libraries]


@torch.no_grad()
def save(model: MovieLensModel, batch: Batch, folder: Path) -> None:
    """Write everything listed at the top into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    scorer = Scorer(model).eval()
    regroup: Any = model.regroup
    regroup.prepare([model.user_embeddings, model.item_embeddings])
    inputs = inputs_of(batch)
    torch.jit.save(scripted(scorer), folder / "model.pt")
    program = exported(scorer, inputs)
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
    torch.jit.save(torch.jit.script(Container(inputs)), folder / "batch.pt")
    scores = scorer(*inputs)
    (folder / "scores.txt").write_text("".join(f"{score:.9g}\n" for score in scores.tolist()))
    (folder / "libraries.txt").write_text("".join(f"{path}\n" for path in libraries()))


def main(argv: list[str] | None = None) -> int:
    """Run the example; return the exit status."""
    parser = argparse.ArgumentParser(
        description="Train the MovieLens model and save it for servers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--epochs", type=positive_int, default=1, help="most passes over the train split")
    parser.add_argument("--batch-size", type=positive_int, default=512, help="interactions in batch.pt")
    parser.add_argument("--data", metavar="DIR", help="as for train.py")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        data = load_movielens(args.data)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    split = split_interactions(data.rating.numel())
    torch.manual_seed(0)
    model = MovieLensModel(data.vocabulary_sizes, regroup_factory("torchrec_kt"), device=torch.device("cpu"))
    train(model, data, split, epochs=args.epochs, batch_size=512, seed=0)
    save(model, data.batch(split.test[: args.batch_size]), args.out)
    print(f"written to {args.out}: " + ", ".join(sorted(path.name for path in args.out.iterdir())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
