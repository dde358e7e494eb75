"""What every test gets: a fixed seed, restored global state, one Hypothesis profile; and the order of files."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite",
    deadline=None,
    max_examples=50,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
# New random examples in every run, and more of them: HYPOTHESIS_PROFILE=search
settings.register_profile("search", settings.get_profile("suite"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))

# Files go to whoever is free, in this order: those that take a minute or more must not come last.
LONGEST = ("kernel", "distributed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
