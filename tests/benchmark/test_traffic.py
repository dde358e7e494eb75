"""The kernel asks memory for hardly more than it needs, counted on its body."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torchrec_kt.benchmark.traffic import Counter, count_workload, counter
from torchrec_kt.benchmark.workloads import function_workloads
from torchrec_kt.ops import RegroupPlan


@pytest.fixture(scope="module")
def count() -> Iterator[Counter]:
    with counter() as built:
        yield built


def narrow(width: int, keys: int = 64) -> RegroupPlan:
    names = [f"k{n}" for n in range(keys)]
    order = [names[n * 37 % keys] for n in range(keys)]
    return RegroupPlan.build(layouts=[(names, [width] * keys)], groups=[order])


@pytest.mark.parametrize("name", function_workloads())
def test_no_sector_is_asked_for_twice(count: Counter, name: str) -> None:
    workload = function_workloads()[name]
    forward, backward = count_workload(count, workload)
    for traffic in (forward, backward):
        assert traffic.store_efficiency >= 0.95
        assert traffic.load_efficiency >= 0.95
        if workload.batch >= 64:
            assert traffic.map_share <= 0.03  # the map, read once, beside what the call moves
            assert traffic.idle <= 0.02


@pytest.mark.parametrize("width", [4, 8, 12, 16, 20, 128])
def test_whole_sectors_for_four_floats_and_more(count: Counter, width: int) -> None:
    column_map = narrow(width).column_map
    for applied in (column_map, column_map.transpose()):
        traffic = count(applied, [64 * width], 256, torch.float32, torch.float32)
        assert traffic.load_bytes == traffic.store_bytes == 256 * 64 * width * 4
        assert traffic.load_efficiency >= 0.95
        assert traffic.store_efficiency >= 0.95
        # 16 bytes an access: a warp's request is 512 bytes.
        assert traffic.store_requests == traffic.store_bytes // 512


def test_one_odd_key_does_not_slow_the_others(count: Counter) -> None:
    widths = [128] * 20 + [3] + [128] * 20 + [1]
    names = [f"k{n}" for n in range(len(widths))]
    plan = RegroupPlan.build(layouts=[(names, widths)], groups=[names[::-1]])
    traffic = count(plan.column_map, [sum(widths)], 512, torch.float32, torch.float32)
    even = count(narrow(128, 40).column_map, [40 * 128], 512, torch.float32, torch.float32)
    # A key of 3 floats leaves what follows it 8 bytes off: half of the columns here, in vectors half as long.
    assert traffic.store_requests <= 1.6 * even.store_requests
    assert traffic.fullness >= 0.9


def test_counts_of_a_plain_copy(count: Counter) -> None:
    plan = RegroupPlan.build(layouts=[(["a"], [1024])], groups=[["a"]])
    traffic = count(plan.column_map, [1024], 64, torch.float32, torch.float32)
    nbytes = 64 * 1024 * 4
    assert (traffic.load_bytes, traffic.store_bytes) == (nbytes, nbytes)
    assert (traffic.load_sectors, traffic.store_sectors) == (nbytes // 32, nbytes // 32)
    assert traffic.fullness == 1.0
    assert traffic.idle == 0.0


def test_a_missed_vector_shows(count: Counter) -> None:
    """The measure can fail: single columns, eight apart, fill an eighth of their sectors."""
    names = [f"k{n}" for n in range(512)]
    plan = RegroupPlan.build(
        layouts=[(names, [1] * 512)], groups=[[n for k in range(8) for n in names[k::8]]]
    )
    traffic = count(plan.column_map, [512], 64, torch.float32, torch.float32)
    assert traffic.fullness < 0.3
    assert traffic.store_requests == traffic.store_bytes // 128
