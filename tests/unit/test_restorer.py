"""The restorer over a real arena and page table; the store and the peer are in memory, and break as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing

import pytest

from context_daemon.kv_slots import frame, identity
from context_daemon.landing import Keep
from context_daemon.links import Links, guessed
from context_daemon.page_records import Held, Shape
from context_daemon.page_table import PageTable
from context_daemon.pieces import Piece
from context_daemon.rates import Bandwidth, LinkRate, PrefillCost
from context_daemon.records import (
    Endpoint,
    FencingToken,
    KVSegment,
    RequestKey,
    RequestRecord,
    RequestSpec,
    RequestState,
    SamplingParams,
)
from context_daemon.restorer import Restorer, Wish
from context_daemon.store import StoreUnavailable

KEY, SHAPE = RequestKey("job", 1), Shape("lay", 8, 4)
SLOW_PREFILL = PrefillCost(0.0, 10.0)
HERE, THERE = "10.0.0.1:7070", "10.0.0.2:7070"


def framed(page: int, epoch: int, slots: int = 4) -> bytes:
    raw = b"".join(bytes([position]) * 8 for position in range(page * 4, page * 4 + slots))
    return frame(identity(KEY, epoch, "lay"), page * 4, raw, 8)


class Store:
    """Pages by number; `away_after` pages it stops to answer."""

    def __init__(self, pages: Mapping[int, bytes], away_after: int = 1000) -> None:
        self.pages, self.away_after = pages, away_after
        self.asked: list[int] = []

    async def read_pages(
        self, key: RequestKey, epochs: Mapping[int, int], layout: str, pages: Iterable[int]
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        for page in pages:
            self.asked.append(page)
            if len(self.asked) > self.away_after:
                raise StoreUnavailable("gone")
            if page not in self.pages:
                return
            yield page, self.pages[page]


class Peer:
    """Says that it holds `positions`, gives `pages` pages of them; a probe finds `rate`."""

    def __init__(self, positions: int, pages: int, rate: LinkRate | None = None) -> None:
        self.positions, self.pages, self.rate = positions, pages, rate
        self.asked: list[str] = []
        self.probed: list[str] = []

    async def probe(self, address: str) -> LinkRate | None:
        self.probed.append(address)
        await asyncio.sleep(0.01)
        return self.rate

    async def describe(
        self, address: str, keys: Sequence[RequestKey], layout: str, timeout_s: float
    ) -> Mapping[RequestKey, int]:
        self.asked.append(address)
        return dict.fromkeys(keys, self.positions)

    async def fetch(
        self, address: str, key: RequestKey, shape: Shape, first_page: int, until_page: int, keep: Keep
    ) -> AsyncGenerator[Piece, None]:
        for page in range(first_page, min(self.pages, until_page)):
            slots = min(4, self.positions - page * 4)
            yield Piece(page, 1, slots, "peer", data=framed(page, 1, slots))


def record(tokens: int, watermark: int, kv_at: str = THERE, layout: str = "lay") -> RequestRecord:
    spec = RequestSpec(1, "c1", Endpoint.COMPLETIONS, tuple(range(10)), SamplingParams(seed=1, max_tokens=100))
    return RequestRecord(
        key=KEY, spec=spec, state=RequestState.LEASED, token=FencingToken(1, 3), worker_id="w", tokens=(1,) * tokens,
        watermark=watermark, layout=layout, segments=(KVSegment(1, 0),), numerics_class="", exact=True, attempts=0,
        interruptions=1, kv_at=kv_at,
    )  # fmt: skip


def links(store: float = 1e9, peer: float = 1e9) -> Links:
    return Links(Bandwidth(1e10), Bandwidth(store), {THERE: Bandwidth(peer)})


def lend(held: Held, keep: Keep) -> Piece:
    return Piece(held.number, held.epoch, held.slots, "arena", block=held.block)


def table_with(slots: int, committed: int = 100) -> PageTable:
    """What an owner under epoch 1 wrote here."""
    table = PageTable(lambda block: None, lambda: 0.0)
    if slots:
        table.announce(KEY, SHAPE, 1, 10, 0, list(range(-(-slots // 4))), slots)
        table.committed(KEY, 1, committed)
    return table


async def restored(restorer: Restorer, wish: Wish) -> list[tuple[int, int, str]]:
    async with aclosing(restorer.pages(wish, await restorer.choose(wish), lambda end: None)) as pieces:
        return [(piece.number, piece.slots, piece.source) async for piece in pieces]


def made(table: PageTable, store: Store, peer: Peer | None, rates: Links | None = None) -> Restorer:
    return Restorer(table, lend, store, peer, rates or links(), HERE)


FULL = {page: framed(page, 1) for page in range(5)}


async def test_what_lies_here_is_taken_from_here() -> None:
    store, peer = Store(FULL), Peer(19, 5)
    got = await restored(made(table_with(19), store, peer), Wish(record(10, 19), SHAPE, SLOW_PREFILL))
    assert got == [(0, 4, "arena"), (1, 4, "arena"), (2, 4, "arena"), (3, 4, "arena"), (4, 3, "arena")]
    assert store.asked == []


@pytest.mark.parametrize(("store_rate", "peer_rate", "source"), [(1e9, 1e6, "store"), (1e6, 1e9, "peer")])
async def test_the_sooner_of_peer_and_store(store_rate: float, peer_rate: float, source: str) -> None:
    restorer = made(table_with(0), Store(FULL), Peer(19, 5), links(store_rate, peer_rate))
    got = await restored(restorer, Wish(record(10, 19), SHAPE, SLOW_PREFILL))
    assert [item[2] for item in got] == [source] * 5 and sum(item[1] for item in got) == 19


async def test_nothing_comes_when_computing_is_sooner() -> None:
    restorer = made(table_with(0), Store(FULL), Peer(19, 5), links(1.0, 1.0))
    assert await restored(restorer, Wish(record(10, 19), SHAPE, PrefillCost(0.0, 1e-6))) == []


async def test_where_the_peer_breaks_off_the_store_goes_on() -> None:
    restorer = made(table_with(0), Store(FULL), Peer(19, 2), links(1e6, 1e9))
    got = await restored(restorer, Wish(record(10, 19), SHAPE, SLOW_PREFILL))
    assert [item[2] for item in got] == ["peer", "peer", "store", "store", "store"]


async def test_where_this_nodes_pages_end_another_source_gives_the_whole_page() -> None:
    restorer = made(table_with(10), Store(FULL), None)
    got = await restored(restorer, Wish(record(10, 19), SHAPE, SLOW_PREFILL))
    assert got[-1] == (4, 3, "store") and sum(item[1] for item in got) == 19
    assert [item[2] for item in got if item[0] == 2] == ["store"], "two slots of page 2 lie here, four in the store"


async def test_a_store_that_goes_away_ends_the_prefix_there() -> None:
    got = await restored(
        made(table_with(0), Store(FULL, away_after=2), None), Wish(record(10, 19), SHAPE, SLOW_PREFILL)
    )
    assert got == [(0, 4, "store"), (1, 4, "store")]


async def test_bad_bytes_end_the_prefix_and_never_pass() -> None:
    damaged = bytearray(FULL[1])
    damaged[2 * 24] ^= 1  # the third slot
    got = await restored(
        made(table_with(0), Store({**FULL, 1: bytes(damaged)}), None), Wish(record(10, 19), SHAPE, SLOW_PREFILL)
    )
    assert got == [(0, 4, "store"), (1, 2, "store")]


async def test_nothing_past_the_watermark_or_of_another_layout() -> None:
    got = await restored(made(table_with(0), Store(FULL), None), Wish(record(10, 6), SHAPE, SLOW_PREFILL))
    assert got == [(0, 4, "store"), (1, 2, "store")]
    other = Wish(record(10, 19, layout="old"), SHAPE, SLOW_PREFILL)
    assert await restored(made(table_with(0), Store(FULL), None), other) == []


async def test_the_own_address_is_no_peer() -> None:
    peer = Peer(19, 5)
    await restored(made(table_with(0), Store(FULL), peer), Wish(record(10, 19, kv_at=HERE), SHAPE, SLOW_PREFILL))
    assert peer.asked == []
    await restored(made(table_with(0), Store(FULL), peer), Wish(record(10, 19), SHAPE, SLOW_PREFILL))
    assert peer.asked == [THERE]


async def test_what_a_fetch_took_is_learnt_and_nothing_stays_under_way() -> None:
    rates = links(store=1.0)  # far too low a guess
    restorer = made(table_with(0), Store(FULL), None, rates)
    await restored(restorer, Wish(record(10, 19), SHAPE, PrefillCost(0.0, 1e6)))
    await restored(restorer, Wish(record(10, 19), SHAPE, PrefillCost(0.0, 1e6)))
    await restored(restorer, Wish(record(10, 19), SHAPE, PrefillCost(0.0, 1e6)))
    assert rates.store.rate.bytes_per_s > 100 and restorer.error.factor > 2
    assert set(rates.under_way.values()) == {0}


# -- links that nothing came over yet -----------------------------------------------------------------------------------
@pytest.mark.parametrize(("rate", "source"), [(1e3, "store"), (1e9, "peer")])
async def test_a_peer_is_probed_once_before_it_is_weighed(rate: float, source: str) -> None:
    rates, peer = Links(Bandwidth(1e10), Bandwidth(1e4)), Peer(19, 5, LinkRate(rate, 1e-3))
    restorer, wish = made(table_with(0), Store(FULL), peer, rates), Wish(record(10, 19), SHAPE, SLOW_PREFILL)
    chosen = await asyncio.gather(*(restorer.choose(wish) for _ in range(3)))
    assert [choice.order[0].kind for choice in chosen] == [source] * 3
    assert peer.probed == [THERE]
    assert await restored(restorer, wish) and peer.probed == [THERE]


async def test_a_peer_that_could_not_be_probed_is_guessed_and_probed_again() -> None:
    rates, peer = Links(Bandwidth(1e10), Bandwidth(1e4)), Peer(19, 5)
    restorer, wish = made(table_with(0), Store(FULL), peer, rates), Wish(record(10, 19), SHAPE, SLOW_PREFILL)
    assert (await restorer.choose(wish)).order[0].kind == "peer"
    peer.rate = LinkRate(1e3)
    assert (await restorer.choose(wish)).order[0].kind == "store"
    assert peer.probed == [THERE] * 2


async def test_the_store_is_seeded_once_it_answers_unless_it_is_known_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("context_daemon.links._AGAIN_S", 0.0)
    for fetched, expected in ((False, 3e6), (True, 3e7)):
        rates, answers = Links(Bandwidth(1e10), guessed()), iter([None, None, LinkRate(3e6, 1e-3)])

        async def probe(answers: Iterator[LinkRate | None] = answers) -> LinkRate | None:
            return next(answers)

        if fetched:
            monkeypatch.setattr(asyncio, "sleep", _observing(rates.store))
        await rates.meet_store(probe)
        assert rates.store.rate.bytes_per_s == pytest.approx(expected, rel=0.2)


def _observing(link: Bandwidth) -> Callable[[float], Awaitable[None]]:
    async def sleep(seconds: float) -> None:
        for _ in range(5):
            link.observe(3 * 10**8, 10.0)

    return sleep
