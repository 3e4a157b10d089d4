"""How much KV leaves the node, and which first. Pure.

Tokens are committed every step in every mode, and every step's KV is in the node's arena. `--kv-commit` chooses what of it
goes to the KV store: all (`store`), nothing (`arena`), nothing until a notice comes and then everything (`grace`), or as
much as a bandwidth and a cost budget allow (`auto`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from context_daemon.page_records import Due

GB = 1e9


class KVCommit(StrEnum):
    STORE = "store"
    ARENA = "arena"
    GRACE = "grace"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ShipBudget:
    """`bandwidth` bounds in bytes/s, `cost_per_hour` in money at `price_per_gb` (0: traffic within a zone is free).

    Raises ValueError, by the flags' names, for numbers below 0 and for bounds that would bound nothing.
    """

    mode: KVCommit
    bandwidth: float = math.inf
    cost_per_hour: float = math.inf
    price_per_gb: float = 0.0

    def __post_init__(self) -> None:
        flags = {"--kv-bandwidth": self.bandwidth, "--kv-cost-budget": self.cost_per_hour}
        for flag, value in (flags | {"--kv-price-per-gb": self.price_per_gb}).items():
            if not value >= 0:
                raise ValueError(f"{flag} {value:g}: give a number from 0 up")
        bounds = [flag for flag, value in flags.items() if math.isfinite(value)]
        if bounds and self.mode is not KVCommit.AUTO:
            raise ValueError(f"{bounds[0]} bounds --kv-commit auto only, and this is --kv-commit {self.mode}")
        if math.isfinite(self.cost_per_hour) and self.price_per_gb == 0:
            raise ValueError("--kv-cost-budget bounds nothing as long as traffic is free: give --kv-price-per-gb, too")

    @property
    def bytes_per_s(self) -> float:
        """What `auto` may ship."""
        affordable = math.inf
        if self.price_per_gb > 0 and math.isfinite(self.cost_per_hour):
            affordable = self.cost_per_hour / 3600 / self.price_per_gb * GB
        return min(self.bandwidth, affordable)


class ShipPolicy:
    """Says how many bytes may go now; `spent` is what did go. A token bucket of one second for `auto`."""

    def __init__(self, budget: ShipBudget, now: float) -> None:
        self.budget = budget
        self._tokens = 0.0
        self._at = now

    @property
    def ships(self) -> bool:
        """Whether anything ever goes to the KV store."""
        return self.budget.mode is not KVCommit.ARENA

    def allowance(self, now: float, noticed: bool) -> float:
        """Bytes that may leave now. With a notice everything may, at line rate: what stays is lost with the machine."""
        rate = self.budget.bytes_per_s
        self._tokens = min(rate, self._tokens + rate * max(0.0, now - self._at)) if math.isfinite(rate) else math.inf
        self._at = now
        match self.budget.mode:
            case KVCommit.STORE:
                return math.inf
            case KVCommit.ARENA:
                return 0.0
            case KVCommit.GRACE:
                return math.inf if noticed else 0.0
            case KVCommit.AUTO:
                return math.inf if noticed else self._tokens

    def spent(self, count: int) -> None:
        self._tokens -= count


def dearest_first(due: Sequence[Due]) -> list[Due]:
    """The sequences that cost most to compute again first; within one, by position, for a prefix is all that counts.

    A position costs its own layers and the attention over all before it: per byte shipped, the longest context is dearest.
    """
    reach: dict[object, int] = {}
    for item in due:
        reach[item.key] = max(reach.get(item.key, 0), item.number * item.shape.page_size + item.stop)
    return sorted(
        due, key=lambda item: (-reach[item.key], item.key.job_id, item.key.line, item.key.choice, item.number)
    )


def within(due: Sequence[Due], allowance: float) -> list[Due]:
    """The first of `due` that fit; a whole item or nothing of it, but never nothing at all when some is allowed."""
    chosen: list[Due] = []
    for item in due:
        if allowance <= 0:
            break
        chosen.append(item)
        allowance -= item.bytes
    return chosen
