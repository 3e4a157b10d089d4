from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_daemon.rates import Bandwidth, LinkRate, PredictionError, PrefillCost, PrefillRate

LINK = LinkRate(bytes_per_s=1e9, setup_s=0.02)
ENGINE = PrefillCost(fixed_s=0.03, token_s=1e-4, attention_s=2e-8)
SIZES = (100_000, 3_000_000, 40_000_000, 500_000_000)
RANGES = ((0, 100), (0, 3000), (3000, 4000), (0, 20_000), (16_000, 32_000))


def off(estimate: float, true: float) -> float:
    """A factor of at least 1."""
    return math.exp(abs(math.log(estimate / true)))


def noise(rng: Random, sigma: float) -> float:
    return math.exp(rng.gauss(0, sigma))


def watched(bandwidth: Bandwidth, times: int, sigma: float = 0.0, link: LinkRate = LINK) -> Bandwidth:
    rng = Random(1)
    for n in range(times):
        size = SIZES[n % len(SIZES)]
        bandwidth.observe(size, link.seconds(size) * noise(rng, sigma))
    return bandwidth


def worked(rate: PrefillRate, times: int, sigma: float = 0.0) -> PrefillRate:
    rng = Random(2)
    for n in range(times):
        start, stop = RANGES[n % len(RANGES)]
        rate.observe(start, stop, ENGINE.seconds(start, stop) * noise(rng, sigma))
    return rate


def test_seconds_of_a_link() -> None:
    assert LINK.seconds(500_000_000) == pytest.approx(0.52)
    assert LINK.seconds(500_000_000, sharers=3) == pytest.approx(2.02)  # the set-up is not shared


def test_seconds_of_a_prefill() -> None:
    assert ENGINE.seconds(100, 100) == ENGINE.seconds(7, 3) == 0.0
    assert ENGINE.seconds(1000, 3000) == pytest.approx(0.03 + 0.2 + 2e-8 * 4_000_000)
    assert PrefillCost(0.03, 1e-4, 0.0, slowdown=2.0).seconds(0, 1000) == pytest.approx(0.26)


def test_an_estimate_starts_at_its_seed() -> None:
    rate = Bandwidth(2e9, 0.01).rate
    assert (rate.bytes_per_s, rate.setup_s) == pytest.approx((2e9, 0.01))
    assert PrefillRate(ENGINE).cost(slowdown=3.0).seconds(5, 900) == pytest.approx(3 * ENGINE.seconds(5, 900))


def test_a_new_seed_forgets_what_was_observed() -> None:
    bandwidth = watched(Bandwidth(1e9), 20)
    bandwidth.seed(5e6, 1.0)
    assert bandwidth.rate.seconds(5_000_000) == pytest.approx(2.0)


@pytest.mark.parametrize("wrong", [1e-3, 0.2, 5.0, 1e3])
def test_set_up_is_told_from_slope_from_whatever_seed(wrong: float) -> None:
    rate = watched(Bandwidth(LINK.bytes_per_s * wrong, LINK.setup_s * wrong), 60).rate
    assert off(rate.bytes_per_s, LINK.bytes_per_s) < 1.1
    assert off(rate.setup_s, LINK.setup_s) < 1.1


def test_a_set_up_seeded_as_nothing_is_learnt() -> None:
    assert off(watched(Bandwidth(1e9), 60).rate.setup_s, LINK.setup_s) < 1.1


def test_noise_is_averaged_out() -> None:
    rate = watched(Bandwidth(2e9, 0.01), 200, sigma=0.25).rate
    assert all(off(rate.seconds(size), LINK.seconds(size)) < 1.25 for size in SIZES)


def test_few_observations_correct_a_wrong_seed_where_they_were_made() -> None:
    bandwidth = Bandwidth(4e8, 0.02)
    bandwidth.observe(500_000_000, LINK.seconds(500_000_000))
    assert off(bandwidth.rate.seconds(500_000_000), LINK.seconds(500_000_000)) < 1.1
    assert off(bandwidth.rate.setup_s, 0.02) < 1.1  # it said nothing of the set-up


@pytest.mark.parametrize("wild", [1e-6, 0.02, 5.0, 100.0, 1e6])
def test_one_wild_outlier_moves_next_to_nothing(wild: float) -> None:
    calm, shaken = watched(Bandwidth(1e9, 0.02), 30, 0.1), watched(Bandwidth(1e9, 0.02), 30, 0.1)
    shaken.observe(SIZES[-1], LINK.seconds(SIZES[-1]) * wild)
    assert all(off(shaken.rate.seconds(size), calm.rate.seconds(size)) < 1.2 for size in SIZES)


@pytest.mark.parametrize("factor", [0.05, 0.3, 4.0, 20.0])
def test_a_lasting_change_is_followed_within_three_observations(factor: float) -> None:
    bandwidth, size = watched(Bandwidth(1e9, 0.02), 50, 0.1), SIZES[-1]
    changed = LinkRate(LINK.bytes_per_s * factor, LINK.setup_s)
    for _ in range(3):
        bandwidth.observe(size, changed.seconds(size))
    assert off(bandwidth.rate.seconds(size), changed.seconds(size)) < 1.2


def test_transfers_that_shared_the_link_say_what_it_gives_alone() -> None:
    bandwidth = Bandwidth(5e8, 0.01)
    for n in range(60):
        size, sharers = SIZES[n % len(SIZES)], n % 3
        bandwidth.observe(size, LINK.seconds(size, sharers), sharers)
    assert off(bandwidth.rate.bytes_per_s, LINK.bytes_per_s) < 1.1


def test_prefill_learns_tokens_and_attention_apart() -> None:
    cost = worked(PrefillRate(PrefillCost(0.01, 3e-4, 1e-8)), 100).cost()
    assert off(cost.token_s, ENGINE.token_s) < 1.1
    assert off(cost.attention_s, ENGINE.attention_s) < 1.1


def test_prefill_that_was_only_seen_short_and_long_is_known_between() -> None:
    cost = worked(PrefillRate(PrefillCost(0.01, 3e-4)), 200, sigma=0.2).cost()
    assert all(off(cost.seconds(0, stop), ENGINE.seconds(0, stop)) < 1.25 for stop in (500, 5000, 12_000))


def test_prefill_beside_decoding_says_what_the_engine_does_alone() -> None:
    rate = PrefillRate(ENGINE)
    for _ in range(20):
        rate.observe(0, 3000, ENGINE.seconds(0, 3000) * 2.5, slowdown=2.5)
    assert off(rate.cost().seconds(0, 3000), ENGINE.seconds(0, 3000)) < 1.01


def test_what_teaches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing was computed"):
        PrefillRate(ENGINE).observe(8, 8, 1.0)
    with pytest.raises(ValueError, match="moves nothing"):
        Bandwidth(0.0)


@given(st.lists(st.tuples(st.integers(0, 10**11), st.floats(0, 1e5), st.integers(0, 20)), max_size=60))
def test_rates_stay_positive_and_finite_whatever_is_observed(seen: list[tuple[int, float, int]]) -> None:
    bandwidth = Bandwidth(1e9, 0.01)
    for size, seconds, sharers in seen:
        bandwidth.observe(size, seconds, sharers)
    assert 0 < bandwidth.rate.bytes_per_s < math.inf
    assert 0 < bandwidth.rate.setup_s < math.inf


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**6), st.floats(0, 1e5)), max_size=60))
def test_prefill_never_gets_cheaper_by_being_longer(seen: list[tuple[int, int, float]]) -> None:
    rate = PrefillRate(ENGINE)
    for start, length, seconds in seen:
        rate.observe(start, start + length, seconds)
    times = [rate.cost().seconds(0, stop) for stop in (1, 16, 1000, 100_000)]
    assert times == sorted(times) and times[0] > 0 and times[-1] < math.inf


def test_prediction_error_counts_half_and_double_alike() -> None:
    error = PredictionError()
    assert (error.count, error.factor, error.bias) == (0, 1.0, 1.0)
    error.record(1.0, 2.0)
    assert error.factor == pytest.approx(2.0) and error.bias == pytest.approx(2.0)
    error.record(2.0, 1.0)
    assert error.factor == pytest.approx(2.0) and error.bias == pytest.approx(1.0)


def test_prediction_error_is_of_late() -> None:
    error = PredictionError()
    for _ in range(50):
        error.record(1.0, 4.0)
    for _ in range(50):
        error.record(1.0, 1.1)
    assert error.count == 100 and 1.1 < error.factor < 1.12
