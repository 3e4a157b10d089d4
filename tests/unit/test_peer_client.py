"""The client of peer transfers against a peer on loopback that does as it is told; every spot is given back exactly once."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from peer_rig import KEY, PAGES, SHAPE, CountingLanding, Peer, as_asked, page, raw, sends

from context_daemon import metrics, page_stream, peer_client
from context_daemon.kv_metrics import ABSENT_PAGES
from context_daemon.kv_slots import frame, identity
from context_daemon.page_records import Shape
from context_daemon.page_stream import HEADER, End, PageHead, pack_end, send_pages
from context_daemon.peer_client import PeerClient
from context_daemon.pieces import Piece


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


@pytest.fixture(params=[True, False], ids=["arena", "plain"])
def landing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CountingLanding:
    made = CountingLanding(request.param)

    def receive(connection: socket.socket, room: list[memoryview]) -> tuple[list[PageHead], End | None]:
        made.receiving |= {id(view) for view in room}
        try:
            return page_stream.receive_pages(connection, room)
        finally:
            made.receiving -= {id(view) for view in room}

    monkeypatch.setattr(peer_client, "receive_pages", receive)
    return made


@pytest.fixture
async def client(landing: CountingLanding) -> AsyncIterator[PeerClient]:
    made = PeerClient(landing)
    yield made
    await made.close()


async def fetched(client: PeerClient, peer: Peer, landing: CountingLanding, first: int = 0) -> list[Piece]:
    assert await client.describe(peer.address, [KEY], "lay", 5.0) == {KEY: PAGES * 4}
    async with aclosing(client.fetch(peer.address, KEY, SHAPE, first, PAGES, landing.ends.append)) as pieces:
        got = [piece async for piece in pieces]
    for number, piece in enumerate(got, first):
        assert (piece.number, piece.source) == (number, "peer")
        assert landing.bytes_of(piece) == raw(number, piece.slots), "never a wrong byte"
    return got


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "condition never held"
        await asyncio.sleep(0.01)


def absent(reason: str) -> float:
    return ABSENT_PAGES.labels(reason)._value.get()


def failures(reason: str) -> float:
    return metrics.PEER_FAILURES.labels(reason)._value.get()


async def test_all_pages_come_in_order(client: PeerClient, peer: Peer, landing: CountingLanding) -> None:
    assert [piece.slots for piece in await fetched(client, peer, landing)] == [4] * PAGES
    assert [piece.number for piece in await fetched(client, peer, landing, first=7)] == [7, 8, 9]
    assert [(r.token, r.first, r.until) for r in peer.asked] == [("token", 0, PAGES), ("token", 7, PAGES)]
    assert landing.settled()


UNSEALED = bytearray(page(1))
UNSEALED[HEADER.size + 2 * SHAPE.row_bytes] ^= 1  # in the third slot


@pytest.mark.parametrize(
    ("parts", "slots", "reason"),
    [
        ([page(0), page(2), page(3)], [4], "order"),
        ([page(1)], [], "order"),
        ([page(0), page(0)], [4], "order"),
        ([page(0), page(1, epoch=2)], [4], "mismatch"),
        ([page(0), page(1, sealed=2)], [4], "mismatch"),
        ([page(0), bytes(UNSEALED), page(2)], [4, 2], "mismatch"),
        ([page(0), page(1, claims=3), page(2)], [4, 3], ""),
        ([page(0), page(1, claims=5)], [4, 4], "none"),
        ([page(0), page(1, claims=0)], [4], ""),
        ([page(0), page(1, claims=1 << 31)], [4, 4], "none"),
        ([page(0), page(1, slots=2), page(2)], [4, 2], ""),
        ([page(0), page(1, slots=2, claims=4), page(2)], [4, 2], "any"),
    ],
)  # fmt: skip
async def test_the_prefix_ends_where_a_page_is_not_what_it_should_be(
    client: PeerClient, peer: Peer, landing: CountingLanding, parts: list[bytes], slots: list[int], reason: str
) -> None:
    before = absent(reason)
    peer.scripts = [sends(*parts, end=pack_end(End.DONE))]
    got = await fetched(client, peer, landing)
    assert [piece.slots for piece in got][: len(slots)] == slots
    assert sum(piece.slots for piece in got) == sum(slots)
    assert len(peer.asked) == 1, "a peer that is wrong is not asked again"
    if reason in ("order", "mismatch"):
        assert absent(reason) == before + 1
    assert landing.settled()


@pytest.mark.parametrize(("end", "reason"), [(End.DONE, ""), (End.BUSY, "busy"), (End.REFUSED, "refused")])
@pytest.mark.parametrize("after", [0, 1, 4, 5])
async def test_the_peers_own_end(
    client: PeerClient, peer: Peer, landing: CountingLanding, end: End, reason: str, after: int
) -> None:
    before = failures(reason)
    peer.scripts = [sends(*map(page, range(after)), end=pack_end(end))]
    assert len(await fetched(client, peer, landing)) == after
    assert len(peer.asked) == 1 and failures(reason) == before + bool(reason)
    assert landing.settled()


WRONG = [
    HEADER.pack(5, 1, 4, SHAPE.block_bytes + 1) + bytes(SHAPE.block_bytes + 1),  # more than a page
    HEADER.pack(5, 1, 4, (1 << 32) - 1),
    HEADER.pack(77, 0, 0, 0),  # an end of an unknown kind
    page(5)[:-1],  # closed in the middle of a page
    page(5)[: HEADER.size - 1],
    b"",
]


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_stream_that_breaks_goes_on_with_the_next_page(
    client: PeerClient, peer: Peer, landing: CountingLanding, wrong: bytes
) -> None:
    peer.scripts = [sends(*map(page, range(5)), wrong), as_asked]
    assert len(await fetched(client, peer, landing)) == PAGES
    first, second = peer.asked
    assert first.first == 0 and second.first == 4, "the fifth came with the one that broke"
    assert landing.settled()


async def test_a_stream_that_breaks_always_is_given_up(
    client: PeerClient, peer: Peer, landing: CountingLanding
) -> None:
    peer.scripts = [sends(*map(page, range(4)), b"\xff"), sends(b"\xff")]
    assert len(await fetched(client, peer, landing)) == 4
    assert [request.first for request in peer.asked] == [0, 4, 4]
    assert landing.settled()


async def test_a_peer_that_went_away_gives_nothing(client: PeerClient, peer: Peer, landing: CountingLanding) -> None:
    await client.describe(peer.address, [KEY], "lay", 5.0)
    peer._listener.shutdown(socket.SHUT_RDWR)
    peer._listener.close()
    peer._listener = socket.create_server(("127.0.0.1", 0))  # for the end of the fixture
    async with aclosing(client.fetch(peer.address, KEY, SHAPE, 0, PAGES, landing.ends.append)) as pieces:
        assert [piece async for piece in pieces] == []
    assert landing.settled()


async def test_a_peer_that_stalls_is_not_asked_again(
    client: PeerClient, peer: Peer, landing: CountingLanding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_client, "_STALL_S", 0.2)
    before = failures("stalled")
    peer.scripts = [peer.hangs(*map(page, range(4)), page(4)[:100])]
    assert len(await fetched(client, peer, landing)) == 4
    assert len(peer.asked) == 1 and failures("stalled") == before + 1
    assert landing.settled()


@pytest.mark.parametrize("after", range(PAGES + 1))
@pytest.mark.parametrize("there", [0, 2, 7, PAGES])
async def test_closed_early(client: PeerClient, peer: Peer, landing: CountingLanding, after: int, there: int) -> None:
    """The reader goes after some pages; the peer has sent some, half of one more, and hangs."""
    peer.scripts = [peer.hangs(*map(page, range(there)), page(there)[:50])]
    await client.describe(peer.address, [KEY], "lay", 5.0)
    pieces = client.fetch(peer.address, KEY, SHAPE, 0, PAGES, landing.ends.append)
    for _ in range(min(after, there // 4 * 4)):  # pages of one turn come together
        await anext(pieces)
    await pieces.aclose()
    assert landing.settled(), "by when aclose returned"


@pytest.mark.parametrize("cancels", [1, 2])
@pytest.mark.parametrize("there", [0, 6])
async def test_cancelled_while_it_waits(
    client: PeerClient, peer: Peer, landing: CountingLanding, there: int, cancels: int
) -> None:
    peer.scripts = [peer.hangs(*map(page, range(there)), page(there)[:50])]
    task = asyncio.create_task(fetched(client, peer, landing))
    await until(lambda: landing.receiving and landing.taken - len(landing.out) >= there // 4 * 4)
    for _ in range(cancels):
        task.cancel()
        await asyncio.sleep(0)  # its clean-up begins, and is cancelled in its turn
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(landing.settled)


async def test_a_reader_that_breaks_gives_everything_back(
    client: PeerClient, peer: Peer, landing: CountingLanding
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with aclosing(client.fetch(peer.address, KEY, SHAPE, 0, PAGES, landing.ends.append)) as pieces:
            await client.describe(peer.address, [KEY], "lay", 5.0)
            async for _ in pieces:
                raise ZeroDivisionError
    assert landing.settled()


@pytest.mark.parametrize("positions", [[], [4, 4], None])
async def test_a_wrong_description_is_no_description(
    client: PeerClient, peer: Peer, landing: CountingLanding, positions: list[int] | None
) -> None:
    peer.positions = positions
    if positions is None:
        peer.door = 1 << 16
    before = failures("wrong")
    assert await client.describe(peer.address, [KEY], "lay", 5.0) == {}
    assert failures("wrong") == before + 1


async def test_who_does_not_answer_describes_nothing(client: PeerClient, peer: Peer) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    assert await client.describe(f"127.0.0.1:{silent.getsockname()[1]}", [KEY], "lay", 0.2) == {}
    silent.close()


async def test_a_page_that_no_slab_holds_lands_in_plain_memory(peer: Peer) -> None:
    landing, wide = CountingLanding(), Shape("wide", 1 << 16, 4)
    client = PeerClient(landing)
    body = frame(identity(KEY, 1, "wide"), 0, bytes(4 << 16), 1 << 16)
    peer.scripts = [sends(HEADER.pack(0, 1, 4, len(body)), body, end=pack_end(End.DONE))]
    await client.describe(peer.address, [KEY], "wide", 5.0)
    async with aclosing(client.fetch(peer.address, KEY, wide, 0, 1, landing.ends.append)) as pieces:
        assert [piece.data async for piece in pieces] == [body]
    assert landing.settled()
    await client.close()


def test_a_reader_may_be_slow_as_long_as_it_reads() -> None:
    """One page takes longer than the limit of a stall; a reader that stops meets it."""
    sender, reader = socket.socketpair()
    for end, option in ((sender, socket.SO_SNDBUF), (reader, socket.SO_RCVBUF)):
        end.setsockopt(socket.SOL_SOCKET, option, 4096)
    sender.settimeout(1.0)
    pages = [(PageHead(0, 1, 4), memoryview(bytes(60_000)))]

    def read() -> None:
        for _ in range(12):
            threading.Event().wait(0.15)
            reader.recv(5000)

    thread = threading.Thread(target=read)
    thread.start()
    with pytest.raises(TimeoutError):  # the reader takes about 60,000 bytes over 1.8 s, then stops
        send_pages(sender, pages * 3)
    assert not thread.is_alive(), "as long as it read, it was served"
    thread.join()
    sender.close()
    reader.close()


# -- how fast it is -----------------------------------------------------------------------------------------------------
async def test_a_probe_reads_no_more_than_it_must(client: PeerClient, peer: Peer) -> None:
    """A slow link is known after a moment; the peer finds the connection closed then."""
    hung_up = threading.Event()

    def trickle(connection: socket.socket, request: page_stream.StreamRequest) -> None:
        assert request.probe > 0
        try:
            for _ in range(1000):
                connection.sendall(bytes(10_000))
                time.sleep(0.005)
        except OSError:
            hung_up.set()

    peer.scripts = [trickle]
    client.introduce(peer.address, peer.door, "t")
    rate = await client.probe(peer.address)
    assert rate is not None and rate.bytes_per_s < 3e6
    assert await asyncio.to_thread(hung_up.wait, 10)


@pytest.mark.parametrize(
    "script", [sends(pack_end(End.BUSY)), sends(pack_end(End.REFUSED)), sends(), sends(b"\0" * 99)]
)
async def test_a_peer_that_is_not_probed_is_unknown(client: PeerClient, peer: Peer, script: Any) -> None:
    peer.scripts = [script]
    client.introduce(peer.address, peer.door, "t")
    assert await client.probe(peer.address) is None
