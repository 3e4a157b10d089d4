"""Measured rates of the ways to restore a request: links and prefill. Pure: equal observations give equal rates.

Both are a sum of positive coefficients, each times a known term. `_Fit` learns them by recursive least squares on their
logarithms (an extended Kalman filter: constants below): noise of transfers is a factor, not an addend; coefficients stay
positive; and a link of 1 GB/s and one of 1 MB/s are learnt alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NOISE = 0.2**2  # variance of the log of one observation: about 20 %
SEED_VARIANCE = 1.0  # of the log of a coefficient that was only seeded: a factor of e either way
FORGET = 0.001  # share of certainty lost per observation; with NOISE a new one then weighs about 15 %
STRAY = math.log(3.0)  # an observation further off than this is no noise
MIN_SECONDS = 1e-6  # clocks are no finer
# A coefficient seeded far too small has no share in any prediction and would never be learnt.
MIN_FIXED_S = 1e-4
MIN_TOKEN_S = 1e-9
MIN_ATTENTION_SHARE = 1e-5  # of token_s


@dataclass(frozen=True, slots=True)
class LinkRate:
    bytes_per_s: float
    setup_s: float = 0.0

    def seconds(self, size: int, sharers: int = 0) -> float:
        """To move `size` bytes while `sharers` others use the link."""
        return self.setup_s + size * (1 + sharers) / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class PrefillCost:
    fixed_s: float  # per prefill, however short
    token_s: float
    attention_s: float = 0.0  # per token and token before it
    slowdown: float = 1.0  # above 1 while the engine decodes others

    def seconds(self, start: int, stop: int) -> float:
        """To compute positions `[start, stop)` when the KV of `[0, start)` is there."""
        if stop <= start:
            return 0.0
        fixed, tokens, pairs = _prefill_terms(start, stop)
        return self.slowdown * (self.fixed_s * fixed + self.token_s * tokens + self.attention_s * pairs)


def _prefill_terms(start: int, stop: int) -> tuple[float, float, float]:
    return 1.0, float(stop - start), (stop**2 - start**2) / 2


class _Fit:
    """Coefficients c of seconds = sum(c * term); all terms non-negative, the first of them positive.

    One stray observation pulls little, the wilder the less. Two in a row the same way are a change: what was believed
    counts as a seed again.
    """

    def __init__(self, seed: Sequence[float]) -> None:
        self._logs = [math.log(value) for value in seed]
        self._suspect = 0.0
        self._doubt()

    def _doubt(self) -> None:
        size = range(len(self._logs))
        self._covariance = [[SEED_VARIANCE * (i == j) for j in size] for i in size]

    @property
    def coefficients(self) -> list[float]:
        return [math.exp(value) for value in self._logs]

    def observe(self, terms: Sequence[float], seconds: float) -> None:
        parts = [c * term for c, term in zip(self.coefficients, terms, strict=True)]
        predicted = sum(parts)
        shares = [part / predicted for part in parts]  # the gradient of log(predicted)
        surprise = math.log(max(seconds, MIN_SECONDS) / predicted)
        if self._is_stray(surprise):
            self._correct(shares, STRAY**2 / surprise)
        else:
            pull, variance = self._correct(shares, surprise)
            self._settle(pull, variance)

    def _is_stray(self, surprise: float) -> bool:
        wild = abs(surprise) > STRAY
        # The stray has drawn the estimate towards itself a little: the one that bears it out may be less far off.
        changed = abs(surprise) > STRAY / 2 and surprise * self._suspect > 0
        self._suspect = surprise if wild and not changed else 0.0
        if changed:
            self._doubt()
        return wild and not changed

    def _correct(self, shares: Sequence[float], surprise: float) -> tuple[list[float], float]:
        pull = [_dot(row, shares) for row in self._covariance]
        variance = NOISE + _dot(pull, shares)
        self._logs = [value + p / variance * surprise for value, p in zip(self._logs, pull, strict=True)]
        return pull, variance

    def _settle(self, pull: Sequence[float], variance: float) -> None:
        for i, row in enumerate(self._covariance):
            for j, value in enumerate(row):
                row[j] = (1 - FORGET) * (value - pull[i] * pull[j] / variance) + FORGET * SEED_VARIANCE * (i == j)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


class Bandwidth:
    """Of one link, its fixed set-up told from its slope. Starts from a probe; `seed` starts again from a new one."""

    def __init__(self, bytes_per_s: float, setup_s: float = 0.0) -> None:
        self.seed(bytes_per_s, setup_s)

    def seed(self, bytes_per_s: float, setup_s: float = 0.0) -> None:
        """Raises ValueError unless `bytes_per_s` is positive."""
        if not bytes_per_s > 0:
            raise ValueError(f"a link of {bytes_per_s} bytes/s moves nothing: leave its source out instead")
        self._fit = _Fit([max(setup_s, MIN_FIXED_S), 1 / bytes_per_s])

    def observe(self, size: int, seconds: float, sharers: int = 0) -> None:
        """`size` bytes took `seconds` while `sharers` others used the link."""
        self._fit.observe([1.0, size * (1.0 + sharers)], seconds)

    @property
    def rate(self) -> LinkRate:
        setup_s, byte_s = self._fit.coefficients
        return LinkRate(1 / byte_s, setup_s)


class PrefillRate:
    """Of one engine. Starts from a probe; `seed` starts again from a new one."""

    def __init__(self, cost: PrefillCost) -> None:
        self.seed(cost)

    def seed(self, cost: PrefillCost) -> None:
        """The `slowdown` of `cost` is taken off: it belongs to a moment, not to the engine."""
        token_s = max(cost.token_s, MIN_TOKEN_S)
        attention_s = max(cost.attention_s, MIN_ATTENTION_SHARE * token_s)
        self._fit = _Fit([max(cost.fixed_s, MIN_FIXED_S), token_s, attention_s])

    def observe(self, start: int, stop: int, seconds: float, slowdown: float = 1.0) -> None:
        """Positions `[start, stop)` took `seconds` at that slowdown. Raises ValueError on an empty range."""
        if stop <= start:
            raise ValueError(f"prefill of [{start}, {stop}): nothing was computed")
        self._fit.observe(_prefill_terms(start, stop), seconds / slowdown)

    def cost(self, slowdown: float = 1.0) -> PrefillCost:
        fixed_s, token_s, attention_s = self._fit.coefficients
        return PrefillCost(fixed_s, token_s, attention_s, slowdown)


class PredictionError:
    """How far predictions are off, as running means in log space: half and double count alike."""

    WEIGHT = 0.1  # of a new record, once there are ten

    def __init__(self) -> None:
        self.count = 0
        self.abs_log = 0.0
        self.log_bias = 0.0

    def record(self, predicted_s: float, actual_s: float) -> None:
        error = math.log(max(actual_s, MIN_SECONDS) / max(predicted_s, MIN_SECONDS))
        self.count += 1
        weight = max(self.WEIGHT, 1 / self.count)
        self.abs_log += weight * (abs(error) - self.abs_log)
        self.log_bias += weight * (error - self.log_bias)

    @property
    def factor(self) -> float:
        """Typical error, at least 1: at 1.2 predictions are 20 % off, one way or the other."""
        return math.exp(self.abs_log)

    @property
    def bias(self) -> float:
        """Actual over predicted: above 1 predictions are too hopeful."""
        return math.exp(self.log_bias)
