"""What each way that pages can come is believed to carry: seeded by a short probe, corrected by what is fetched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from context_daemon.arena import Arena
from context_daemon.observability import get_logger
from context_daemon.rates import Bandwidth, LinkRate
from context_daemon.restore_plan import SourceKind

log = get_logger()

GUESS = LinkRate(5e8, 2e-3)  # half a 10 Gbit/s link: of what could not be probed
_AGAIN_S = 5.0


@dataclass(slots=True)
class Links:
    """For one event loop."""

    arena: Bandwidth
    store: Bandwidth
    peers: dict[str, Bandwidth] = field(default_factory=dict)
    under_way: dict[SourceKind, int] = field(default_factory=dict)
    _meeting: dict[str, asyncio.Lock] = field(default_factory=dict)

    def peer(self, address: str) -> Bandwidth:
        if address not in self.peers:
            self.peers[address] = guessed()
        return self.peers[address]

    async def meet(self, address: str, probe: Callable[[str], Awaitable[LinkRate | None]]) -> None:
        """Know a peer before its pages are weighed against others'. Whoever asks while it is probed waits for the same
        probe; after one that found nothing it is probed again the next time."""
        link = self.peer(address)
        if not _is_guess(link):
            return
        async with self._meeting.setdefault(address, asyncio.Lock()):
            if _is_guess(link):
                _seed(link, await probe(address), f"peer {address}")

    async def meet_store(self, probe: Callable[[], Awaitable[LinkRate | None]]) -> None:
        """Seed the store's rate as soon as it answers, unless something was fetched from it before."""
        while _is_guess(self.store):
            _seed(self.store, await probe(), "store")
            await asyncio.sleep(_AGAIN_S)


def guessed() -> Bandwidth:
    return Bandwidth(GUESS.bytes_per_s, GUESS.setup_s)


def _is_guess(link: Bandwidth) -> bool:
    return link.rate == guessed().rate


def _seed(link: Bandwidth, found: LinkRate | None, name: str) -> None:
    """Unless a fetch has told more meanwhile."""
    if found is not None and _is_guess(link):
        link.seed(found.bytes_per_s, found.setup_s)
        rate, setup = round(found.bytes_per_s / 1e6, 1), round(1e3 * found.setup_s, 2)
        log.info("link_probed", link=name, mb_per_s=rate, setup_ms=setup)


def links_of(arena: Arena) -> Links:
    """The arena's rate by a copy within it; the store's is a guess until it was met."""
    size = min(8 << 20, arena.total_bytes // 4)
    view, seconds = arena.view, []
    for _ in range(3):
        started = time.perf_counter()
        bytearray(size)[:] = view[:size]
        seconds.append(time.perf_counter() - started)
    return Links(Bandwidth(size / min(seconds), 1e-4), guessed())
