"""Shows a node's KV traffic as metrics. The counters are the only source: what they grew by is what is shown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from context_daemon import metrics
from context_daemon.observability import Gauge, reading
from context_daemon.traffic import Figures, Meter, Tariff, Way

_EVERY_S = 1.0


class TrafficGauges:
    """`run` until cancelled. What does not follow from the tariff is absent, not 0."""

    def __init__(self, tariff: Tariff) -> None:
        self._meter = Meter(_totals, time.monotonic, tariff)
        for way in Way:
            self._show(metrics.KV_TRAFFIC.labels(way.place, way.direction), partial(_rate, way))
            if tariff.nic_bytes_per_s is not None:
                self._show(metrics.KV_NIC_SHARE.labels(way.place, way.direction), partial(_share, way))
        for what in self.figures().per_hour:
            self._show(metrics.MONEY_PER_HOUR.labels(what), partial(_cost, what))

    def _show(self, gauge: Gauge, pick: Callable[[Figures], float]) -> None:
        gauge.set_function(lambda: pick(self._meter.figures()))

    def figures(self) -> Figures:
        return self._meter.figures()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            self._meter.tick()


def _rate(way: Way, found: Figures) -> float:
    return found.bytes_per_s[way]


def _share(way: Way, found: Figures) -> float:
    return found.nic_share[way]


def _cost(what: str, found: Figures) -> float:
    return found.per_hour[what]


def _totals() -> dict[Way, float]:
    return {
        Way.STORE_OUT: reading(metrics.KV_BYTES),
        Way.STORE_IN: reading(metrics.KV_BYTES_READ),
        Way.PEER_OUT: reading(metrics.PEER_BYTES.labels("out")),
        Way.PEER_IN: reading(metrics.PEER_BYTES.labels("in")),
    }
