"""How much KV leaves the node, and which first."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_daemon.commit_mode import KVCommit, ShipBudget, ShipPolicy, dearest_first, within
from context_daemon.page_records import Due, Shape
from context_daemon.records import RequestKey

SHAPE = Shape("lay", 84, 16)  # 100 bytes a slot with its frame
INF = math.inf


def due(line: int, number: int, start: int = 0, stop: int = 16) -> Due:
    return Due(RequestKey("job", line), SHAPE, number, 1, 0, start, stop)


dues = st.builds(
    lambda line, number, start, count: due(line, number, start, start + count),
    st.integers(1, 4), st.integers(0, 5), st.integers(0, 8), st.integers(1, 8),
)  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "before", "noticed"),
    [(KVCommit.STORE, INF, INF), (KVCommit.ARENA, 0, 0), (KVCommit.GRACE, 0, INF), (KVCommit.AUTO, 100, INF)],
)
def test_what_each_mode_ships_before_and_after_a_notice(mode: KVCommit, before: float, noticed: float) -> None:
    policy = ShipPolicy(ShipBudget(mode, bandwidth=100 if mode is KVCommit.AUTO else INF), now=0)
    assert policy.allowance(10, noticed=False) == before
    assert policy.allowance(10, noticed=True) == noticed
    assert policy.allowance(20, noticed=False) == before, "the notice was withdrawn"
    assert policy.ships is (mode is not KVCommit.ARENA)


def test_auto_without_a_budget_ships_all() -> None:
    policy = ShipPolicy(ShipBudget(KVCommit.AUTO), now=0)
    assert policy.allowance(0, noticed=False) == INF
    policy.spent(10**12)
    assert policy.allowance(0, noticed=False) == INF


@pytest.mark.parametrize(
    ("bandwidth", "cost", "price", "rate"),
    [
        (INF, INF, 0.02, INF),
        (INF, 0.072, 0.02, 1e6),  # 3.6 GB an hour
        (5e5, 0.072, 0.02, 5e5),
        (2e6, 0.072, 0.02, 1e6),
        (INF, 0.0, 0.02, 0.0),
        (0.0, INF, 0.0, 0.0),
    ],
)
def test_money_is_bytes_at_the_price_of_a_gb(bandwidth: float, cost: float, price: float, rate: float) -> None:
    assert ShipBudget(KVCommit.AUTO, bandwidth, cost, price).bytes_per_s == pytest.approx(rate)


@pytest.mark.parametrize(
    ("mode", "wrong"),
    [
        (KVCommit.AUTO, {"bandwidth": -1.0}),
        (KVCommit.AUTO, {"bandwidth": math.nan}),
        (KVCommit.AUTO, {"cost_per_hour": -1.0, "price_per_gb": 0.02}),
        (KVCommit.AUTO, {"price_per_gb": math.nan}),
        (KVCommit.AUTO, {"cost_per_hour": 1.0}),  # traffic is free: money bounds nothing
        (KVCommit.STORE, {"bandwidth": 100.0}),
        (KVCommit.GRACE, {"cost_per_hour": 1.0, "price_per_gb": 0.02}),
    ],
)
def test_a_budget_that_bounds_nothing_or_less_is_refused(mode: KVCommit, wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="--kv-"):
        ShipBudget(mode, **wrong)


@given(
    st.floats(0, 1e6),
    st.lists(st.tuples(st.floats(0, 3), st.lists(st.integers(1, 16), max_size=20)), min_size=1, max_size=40),
)
def test_in_no_time_more_leaves_than_bandwidth_bucket_and_an_item(
    rate: float, turns: list[tuple[float, list[int]]]
) -> None:
    policy = ShipPolicy(ShipBudget(KVCommit.AUTO, bandwidth=rate), now=0)
    now, shipped, sums = 0.0, 0, [(0.0, 0)]
    for elapsed, sizes in turns:
        now += elapsed
        chosen = within([due(1, 0, 0, size) for size in sizes], policy.allowance(now, noticed=False))
        count = sum(item.bytes for item in chosen)
        policy.spent(count)
        shipped += count
        for then, before in sums:
            assert shipped - before <= (rate * (now - then + 1) + 1600) * (1 + 1e-9)
        sums.append((now, shipped))
    assert shipped <= (rate * now + 1600) * (1 + 1e-9), "the bucket is empty at first"


@given(st.floats(2e3, 1e6))
def test_what_is_always_due_uses_the_whole_budget(rate: float) -> None:
    policy, shipped = ShipPolicy(ShipBudget(KVCommit.AUTO, bandwidth=rate), now=0), 0
    for turn in range(1, 101):
        chosen = within([due(1, 0)] * 1000, policy.allowance(turn / 10, noticed=False))
        count = sum(item.bytes for item in chosen)
        policy.spent(count)
        shipped += count
    assert shipped >= rate * 10 - 1600


def test_a_clock_that_goes_back_gives_nothing() -> None:
    policy = ShipPolicy(ShipBudget(KVCommit.AUTO, bandwidth=100), now=10)
    assert policy.allowance(10.5, noticed=False) == 50
    assert policy.allowance(3, noticed=False) == 50


@given(st.lists(dues, max_size=30))
def test_the_dearest_request_goes_first_and_each_by_position(items: list[Due]) -> None:
    ordered = dearest_first(items)
    assert sorted(map(repr, ordered)) == sorted(map(repr, items))
    reach: dict[RequestKey, int] = {}
    for item in items:
        reach[item.key] = max(reach.get(item.key, 0), item.number * 16 + item.stop)
    keys = list(dict.fromkeys(item.key for item in ordered))
    assert [item.key for item in ordered] == sorted((item.key for item in ordered), key=keys.index), "one by one"
    assert [reach[key] for key in keys] == sorted(reach.values(), reverse=True)
    for key in keys:
        numbers = [item.number for item in ordered if item.key == key]
        assert numbers == sorted(numbers)


@given(st.lists(dues, max_size=30), st.floats(-1000, 20000) | st.just(INF))
def test_what_goes_is_the_first_that_reach_the_allowance(items: list[Due], allowance: float) -> None:
    chosen = within(items, allowance)
    assert chosen == items[: len(chosen)]
    assert sum(item.bytes for item in chosen[:-1]) < max(allowance, 0) or not chosen
    if len(chosen) < len(items):
        assert sum(item.bytes for item in chosen) >= allowance
