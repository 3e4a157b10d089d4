"""The restore planner: the soonest way to the KV of an interrupted request. Pure; the restorer carries it out.

The engine needs the KV of positions `[0, wanted)`. A source holds a prefix `[0, held)` of it; what is not fetched is
computed by prefill, which needs all positions before. So there is one shape of plan:

    fetch [fetch_from, fetch_to) while computing [0, fetch_from), then compute [fetch_to, wanted)
    seconds = max(prefill(0, fetch_from), fetch(fetch_from, fetch_to)) + prefill(fetch_to, wanted)

Fetching all that a source has (fetch_from = 0) is that source's path, fetching nothing is RECOMPUTE, and doing both at
once is SPLIT. Since a position costs the same to fetch wherever it is but more to compute the later it is, fetch_to =
min(held, wanted) is never beaten by a smaller one: the head is computed, the tail fetched.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from context_daemon.rates import LinkRate, PrefillCost

SPLIT_MARGIN = 0.1  # a split has two ways to fail, so it must save this share of the best single path


class SourceKind(StrEnum):
    """Cheapest on the network first: that one wins a tie."""

    ARENA = "arena"
    PEER = "peer"
    STORE = "store"


class Path(StrEnum):
    ARENA = "arena"
    PEER = "peer"
    STORE = "store"
    RECOMPUTE = "recompute"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class SourceOffer:
    kind: SourceKind
    positions: int  # held, as a prefix
    rate: LinkRate
    sharers: int = 0  # other restores under way over the same link


@dataclass(frozen=True, slots=True)
class RestoreOption:
    """`fetch_from` is on a page border; `fetch_to` is where the source or the request ends, in mid-page or not."""

    path: Path
    source: SourceKind | None
    fetch_from: int
    fetch_to: int
    predicted_s: float


@dataclass(frozen=True, slots=True)
class RestorePlan(RestoreOption):
    in_time: bool  # false: even the soonest way misses the deadline
    alternatives: tuple[RestoreOption, ...]  # all that were weighed, this one among them


@dataclass(frozen=True, slots=True)
class _Need:
    wanted: int
    slot_bytes: int
    page_size: int
    prefill: PrefillCost

    def held(self, offer: SourceOffer) -> int:
        return min(offer.positions, self.wanted)

    def fetch_s(self, offer: SourceOffer, fetch_from: int) -> float:
        return offer.rate.seconds((self.held(offer) - fetch_from) * self.slot_bytes, offer.sharers)

    def option(self, path: Path, offer: SourceOffer, fetch_from: int) -> RestoreOption:
        held = self.held(offer)
        overlapped = max(self.prefill.seconds(0, fetch_from), self.fetch_s(offer, fetch_from))
        predicted_s = overlapped + self.prefill.seconds(held, self.wanted)
        return RestoreOption(path, offer.kind, fetch_from, held, predicted_s)

    def recompute(self) -> RestoreOption:
        return RestoreOption(Path.RECOMPUTE, None, 0, 0, self.prefill.seconds(0, self.wanted))

    def split(self, offer: SourceOffer) -> RestoreOption | None:
        """The best split: at one of the two page borders around where computing begins to outlast fetching."""
        borders = range(self.page_size, self.held(offer), self.page_size)
        crossing = bisect_left(
            borders, True, key=lambda border: self.prefill.seconds(0, border) >= self.fetch_s(offer, border)
        )
        around = borders[max(0, crossing - 1) : crossing + 1]
        return min((self.option(Path.SPLIT, offer, border) for border in around), key=_seconds, default=None)


def _seconds(option: RestoreOption) -> float:
    return option.predicted_s


def _by_network_cost(offers: Iterable[SourceOffer]) -> list[SourceOffer]:
    order = list(SourceKind)
    usable = sorted((offer for offer in offers if offer.positions > 0), key=lambda offer: order.index(offer.kind))
    if len({offer.kind for offer in usable}) < len(usable):
        raise ValueError(f"restore plan: more than one offer of a kind: {[str(offer.kind) for offer in usable]}")
    return usable


def plan(
    wanted: int,
    slot_bytes: int,
    page_size: int,
    offers: Iterable[SourceOffer],
    prefill: PrefillCost,
    deadline_s: float | None = None,
    split_margin: float = SPLIT_MARGIN,
) -> RestorePlan:
    """The soonest way to positions `[0, wanted)`, a split only if it saves `split_margin` of the best single path.

    `deadline_s` is the time left, None if there is no end to it. Raises ValueError when two offers are of one kind.
    """
    need = _Need(wanted, slot_bytes, page_size, prefill)
    usable = _by_network_cost(offers) if wanted > 0 else []
    singles = [need.option(Path(offer.kind), offer, 0) for offer in usable] + [need.recompute()]
    splits = [option for option in map(need.split, usable) if option is not None]
    single = min(singles, key=_seconds)
    split = min(splits, key=_seconds, default=single)
    best = split if split.predicted_s < (1 - split_margin) * single.predicted_s else single
    in_time = deadline_s is None or best.predicted_s <= deadline_s
    chosen = (best.path, best.source, best.fetch_from, best.fetch_to, best.predicted_s)
    return RestorePlan(*chosen, in_time, (*singles, *splits))
