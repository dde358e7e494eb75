"""``python -m torchrec_kt.benchmark``: ours beside the peers, in tables, JSON and charts."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command, or say what has to be installed for it."""
    try:
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"the benchmark needs {error.name}, which is not installed: pip install 'torchrec-kt[benchmark]' (or "
            "'.[benchmark]' in a clone) brings typer, rich and matplotlib"
        ) from None
    from .command import app

    app(prog_name="python -m torchrec_kt.benchmark")


if __name__ == "__main__":
    main()
