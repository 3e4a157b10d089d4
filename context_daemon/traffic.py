"""What a node's KV traffic is: bytes a second, the share of its network interface, and money an hour. Pure but for `Meter`'s
readings of counters; all figures are over a sliding window."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

GB = 1e9
WINDOW_S = 60.0
_LEAST_S = 1.0  # a daemon that has just begun has no rate of its first millisecond


class Way(StrEnum):
    STORE_OUT = "store out"
    STORE_IN = "store in"
    PEER_OUT = "peer out"
    PEER_IN = "peer in"

    @property
    def place(self) -> str:
        return self.split()[0]

    @property
    def direction(self) -> str:
        return self.split()[1]


Totals = Mapping[Way, float]  # bytes since the process began


@dataclass(frozen=True, slots=True)
class Tariff:
    """What the flags tell: None is not known, and what follows from it is not shown. Money in any one currency.

    Raises ValueError, by the flags' names, for what is no price and no bandwidth.
    """

    store_per_gb: float | None = None
    peer_per_gb: float | None = None
    instance_per_hour: float | None = None
    nic_bytes_per_s: float | None = None  # in each direction

    def __post_init__(self) -> None:
        prices = {
            "--kv-price-per-gb": self.store_per_gb,
            "--peer-price-per-gb": self.peer_per_gb,
            "--instance-price": self.instance_per_hour,
        }
        for flag, price in prices.items():
            if price is not None and not 0 <= price < float("inf"):
                raise ValueError(f"{flag} {price:g}: give a number from 0 up")
        if self.nic_bytes_per_s is not None and not self.nic_bytes_per_s > 0:
            raise ValueError(f"--nic-bandwidth {self.nic_bytes_per_s:g}: give bytes a second, more than 0")


@dataclass(frozen=True, slots=True)
class Figures:
    bytes_per_s: Mapping[Way, float]
    nic_share: Mapping[Way, float]  # of the direction's bandwidth; empty when that is not known
    per_hour: Mapping[str, float]  # "store", "peer" and "instance", as far as their prices are known


def figures(before: Totals, after: Totals, seconds: float, tariff: Tariff) -> Figures:
    """Of the bytes between two readings. What comes from a peer is paid for by that peer, so that the sum over all nodes
    counts each byte once; the KV store has no daemon, so both directions are paid for here."""
    rates = {way: (after[way] - before[way]) / max(seconds, _LEAST_S) for way in Way}
    nic = tariff.nic_bytes_per_s
    costs = {
        "store": _times(tariff.store_per_gb, 3600 * (rates[Way.STORE_OUT] + rates[Way.STORE_IN]) / GB),
        "peer": _times(tariff.peer_per_gb, 3600 * rates[Way.PEER_OUT] / GB),
        "instance": tariff.instance_per_hour,
    }
    return Figures(
        bytes_per_s=rates,
        nic_share={way: rate / nic for way, rate in rates.items()} if nic else {},
        per_hour={what: cost for what, cost in costs.items() if cost is not None},
    )


def _times(price: float | None, gigabytes: float) -> float | None:
    return None if price is None else price * gigabytes


class Meter:
    """`tick` about once a second; `figures` at any time, from any thread, over the last `WINDOW_S` or less."""

    def __init__(self, read: Callable[[], Totals], clock: Callable[[], float], tariff: Tariff) -> None:
        self._read, self._clock, self._tariff = read, clock, tariff
        self._readings = deque([(clock(), read())])

    def tick(self) -> None:
        now = self._clock()
        self._readings.append((now, self._read()))
        while len(self._readings) > 1 and self._readings[0][0] < now - WINDOW_S:
            self._readings.popleft()

    def figures(self) -> Figures:
        since, before = self._readings[0]
        return figures(before, self._read(), self._clock() - since, self._tariff)
