"""Pages from one node's arena into another's: two real daemons, and all that happens to a connection on the way."""

from __future__ import annotations

import asyncio
import signal
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from daemon_rig import until
from transfer_rig import (
    LAYOUT,
    PAGE,
    ROW,
    Held,
    Node,
    Pair,
    attached,
    hold,
    moved,
    reset,
    restored,
)

from context_daemon.page_stream import End, receive_pages
from context_daemon.records import KVLayout, TokenCommit
from context_daemon.redis_server import EmbeddedServers
from context_daemon.redis_store import RedisStore

ABSENT = "tideover_absent_pages_total"
STREAMS, FAILURES = "tideover_peer_streams_total", "tideover_peer_failures_total"


@pytest.fixture(autouse=True)
def unspoilt(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "pair" in request.fixturenames:
        proxy = request.getfixturevalue("pair").proxy
        proxy.faults, proxy.always = [], None


# -- a connection that fails --------------------------------------------------------------------------------------------
async def test_a_connection_that_is_cut_goes_on_from_the_next_page(pair: Pair, durable: RedisStore, job: str) -> None:
    held = await hold(durable, pair.source.client(), job, 32)
    lease, client = await moved(durable, held), pair.target.client()
    for arena in (None, attached(client)):
        before = len(pair.proxy.carried)
        pair.proxy.faults = [(9 * PAGE, "cut"), (10 * PAGE + 5, "cut")]
        assert restored(client, lease, held, arena, only="peer") == (held.positions, ("peer",))
        carried = pair.proxy.carried[before:]
        assert len(carried) == 3 and sum(carried) < (32 + 2 * 4 + 1) * PAGE, "at most four pages came twice each time"


async def test_a_connection_that_is_always_cut_ends_the_prefix(pair: Pair, durable: RedisStore, job: str) -> None:
    held = await hold(durable, pair.source.client(), job, 32)
    lease, client = await moved(durable, held), pair.target.client()
    pair.proxy.always = (5 * PAGE, "cut")
    positions, sources = restored(client, lease, held, only="peer")
    assert sources == ("peer",) and positions == 3 * 4 * LAYOUT.page_size, "three tries, one turn of four pages each"


@pytest.mark.parametrize("only", ["peer", ""])
async def test_where_a_peer_stalls_the_store_goes_on(pair: Pair, durable: RedisStore, job: str, only: str) -> None:
    size = LAYOUT.page_size
    held = await hold(durable, pair.source.client(), job, 32, marked=24 * size)  # the peer has more: it comes first
    until(held.stored)
    lease, client = await moved(durable, held), pair.target.client()
    there = attached(client)
    used, before = pair.target.used, pair.target.metric(FAILURES, reason="stalled")
    pair.proxy.always = (9 * PAGE + 100, "hang")
    expected = (8 * size, ("peer",)) if only else (24 * size, ("peer", "store"))
    assert restored(client, lease, held, there, only=only) == expected
    assert pair.target.metric(FAILURES, reason="stalled") == before + 1
    until(lambda: pair.target.used == used)


# -- bytes that are not what they were ----------------------------------------------------------------------------------
def flip(arena: memoryview, held: Held) -> None:
    arena[held.blocks[5] + 2 * ROW + 77] ^= 4


def flip_checksum(arena: memoryview, held: Held) -> None:
    arena[held.blocks[5] + 3 * ROW - 9] ^= 1


def wipe(arena: memoryview, held: Held) -> None:
    arena[held.blocks[5] + 2 * ROW : held.blocks[5] + 3 * ROW] = bytes(ROW)


def swap_slots(arena: memoryview, held: Held) -> None:
    third, fourth = (slice(held.blocks[5] + at * ROW, held.blocks[5] + (at + 1) * ROW) for at in (2, 3))
    arena[third], arena[fourth] = bytes(arena[fourth]), bytes(arena[third])


def other_page(arena: memoryview, held: Held) -> None:
    """Right bytes of the same request, in the wrong place."""
    arena[held.blocks[5] : held.blocks[5] + PAGE] = arena[held.blocks[6] : held.blocks[6] + PAGE]


@pytest.mark.parametrize(
    ("damage", "slots", "reason"),
    [(flip, 2, "mismatch"), (flip_checksum, 2, "mismatch"), (wipe, 2, "hole"), (swap_slots, 2, "mismatch"),
     (other_page, 0, "mismatch")],
)  # fmt: skip
async def test_damaged_pages_of_a_peer_never_come_out(
    pair: Pair, durable: RedisStore, job: str, damage: Callable[[memoryview, Held], None], slots: int, reason: str
) -> None:
    held = await hold(durable, pair.source.client(), job, 8)
    until(held.stored)
    lease, client = await moved(durable, held), pair.target.client()
    damage(held.writer._arena.view, held)  # type: ignore[union-attr]  # /proc/PID/fd/N of the source's memfd
    for arena in (None, attached(client)):
        used, before = pair.target.used, pair.target.metric(ABSENT, reason=reason)
        assert restored(client, lease, held, arena, only="peer") == (5 * LAYOUT.page_size + slots, ("peer",))
        assert pair.target.metric(ABSENT, reason=reason) == before + 1
        assert restored(client, lease, held, arena, only="store") == (held.positions, ("store",))
        until(lambda used=used: pair.target.used == used)  # type: ignore[misc]


# -- readers that the source must survive -------------------------------------------------------------------------------
@pytest.fixture
def narrow(servers: EmbeddedServers, pair_folder: Path) -> Iterator[Node]:
    """It serves one reader at a time, and has few descriptors."""
    node = Node("narrow", pair_folder, servers.durable.url, servers.kv.url, "--max-peer-streams", "1",
                "--kv-commit", "grace")  # fmt: skip
    try:
        yield node.ready()
    finally:
        node.kill()


def takes(connection: socket.socket, pages: int) -> list[int]:
    """Numbers of the next pages."""
    heads, _ = receive_pages(connection, [memoryview(bytearray(PAGE)) for _ in range(pages)])
    return [head.page for head in heads]


def end_of(connection: socket.socket) -> End | None:
    with connection:
        heads, end = receive_pages(connection, [memoryview(bytearray(PAGE)) for _ in range(100)])
    assert heads == []
    return end


async def test_one_stream_at_a_time(pair: Pair, narrow: Node, durable: RedisStore, job: str) -> None:
    held = await hold(durable, narrow.client(), job, 64)  # 4 MiB: more than sockets hold
    key, lease, client = held.lease.key, await moved(durable, held), pair.target.client()
    first = narrow.stream(key)
    assert takes(first, 1) == [0]
    until(lambda: end_of(narrow.stream(key)) is End.BUSY)
    before = pair.target.metric(FAILURES, reason="busy")
    assert restored(client, lease, held) == (0, ()), "no other source: it is computed"
    assert pair.target.metric(FAILURES, reason="busy") == before + 1
    assert narrow.metric(STREAMS, end="busy") >= 2
    reset(first)
    until(lambda: restored(client, lease, held, only="peer") == (held.positions, ("peer",)))


async def test_busy_means_the_store(
    pair: Pair, servers: EmbeddedServers, pair_folder: Path, durable: RedisStore, job: str
) -> None:
    node = Node("single", pair_folder, servers.durable.url, servers.kv.url, "--max-peer-streams", "1")
    try:
        held = await hold(durable, node.ready().client(), job, 64, marked=60 * LAYOUT.page_size)
        until(held.stored)
        lease, client = await moved(durable, held), pair.target.client()
        first = node.stream(held.lease.key)
        assert takes(first, 1) == [0]
        assert restored(client, lease, held) == (60 * LAYOUT.page_size, ("store",))
        reset(first)
    finally:
        node.kill()


LENGTHS = struct.Struct("<I")
GARBAGE = {
    "an http request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a huge length": LENGTHS.pack(0xFFFFFFFF),
    "one more than may be": LENGTHS.pack(4097) + bytes(4097),
    "no message": LENGTHS.pack(4) + b"\xc1\xc1\xc1\xc1",
    "another message": LENGTHS.pack(3) + b"\x92\x01\x02",
    "nothing": LENGTHS.pack(0),
}


async def test_wrong_requests_are_refused_and_harm_nobody(
    pair: Pair, narrow: Node, durable: RedisStore, job: str
) -> None:
    held = await hold(durable, narrow.client(), job, 8)
    lease, client, key = await moved(durable, held), pair.target.client(), held.lease.key
    door, token, _ = narrow.door(key)
    for wrong in ("wrong", token[:-1], token + "x", "é" * 32, token.upper() + "\0"):
        assert end_of(narrow.stream(key, token=wrong)) is End.REFUSED, wrong
    assert end_of(narrow.stream(key, token=token, slot_bytes=2 * LAYOUT.slot_bytes)) is End.DONE, "not its layout"
    for change in ({"slot_bytes": -16}, {"page_size": 0}, {"layout": "x"}, {"first": -1}, {"first": 9}, {"until": -5}):
        assert end_of(narrow.stream(key, **change)) is End.DONE, change  # type: ignore[arg-type]
    for name, data in GARBAGE.items():
        with narrow.say(data, door) as connection, suppress(ConnectionResetError):  # it did not read all of it
            assert connection.recv(1) == b"", name
    for half in (b"\x20", LENGTHS.pack(200) + b"half"):
        reset(narrow.say(half, door))
    assert restored(client, lease, held, only="peer") == (held.positions, ("peer",)) and narrow.alive
    assert narrow.metric(STREAMS, end="refused") == 5
    until(lambda: narrow.metric(STREAMS, end="broken") == len(GARBAGE) + 2)
    assert narrow.log.read_text().count("page_stream_ended_early") >= len(GARBAGE) + 2
    assert "page_stream_failed" not in narrow.log.read_text() and "Traceback" not in narrow.log.read_text()


async def test_connections_that_say_nothing_block_nobody(
    pair: Pair, narrow: Node, durable: RedisStore, job: str
) -> None:
    held = await hold(durable, narrow.client(), job, 8)
    lease, client = await moved(durable, held), pair.target.client()
    door, _, _ = narrow.door(held.lease.key)
    open_before = psutil.Process(narrow.process.pid).num_fds()
    silent = [narrow.say(b"" if number % 2 else b"\x10", door) for number in range(40)]
    assert restored(client, lease, held, only="peer") == (held.positions, ("peer",))
    until(lambda: narrow.metric(STREAMS, end="broken") >= 40)  # let go one after the other
    for connection in silent:
        assert connection.recv(1) == b""
        connection.close()
    until(lambda: psutil.Process(narrow.process.pid).num_fds() <= open_before + 1)


async def test_a_flood_of_connections(pair: Pair, narrow: Node, durable: RedisStore, job: str) -> None:
    """More than the daemon has descriptors: it lives on, commits, and gives pages when the flood is over."""
    held = await hold(durable, narrow.client(), job, 8)
    door, _, _ = narrow.door(held.lease.key)
    used = psutil.Process(narrow.process.pid).num_fds()
    psutil.Process(narrow.process.pid).rlimit(psutil.RLIMIT_NOFILE, (used + 30, used + 30))
    flood = [narrow.say(b"", door) for _ in range(60)]
    until(lambda: not narrow.alive or "page_stream_not_accepted" in narrow.log.read_text())
    assert narrow.alive
    (result,) = narrow.clients[0].commit([TokenCommit(held.lease.key, held.lease.token, 1, (8,))])
    assert narrow.alive and result.length == 2
    for connection in flood:
        connection.close()
    lease, client = await moved(durable, held), pair.target.client()
    until(lambda: restored(client, lease, held, only="peer") == (held.positions, ("peer",)))
    assert narrow.alive


# -- a source that dies, and a reader that sleeps -----------------------------------------------------------------------
async def test_a_source_killed_in_the_middle(
    pair: Pair, servers: EmbeddedServers, pair_folder: Path, durable: RedisStore, job: str
) -> None:
    node = Node("mortal", pair_folder, servers.durable.url, servers.kv.url, fault="peer.pages:kill:3")
    try:
        held = await hold(durable, node.ready().client(), job, 32)
        until(held.stored)
        lease, client = await moved(durable, held), pair.target.client()
        there = attached(client)
        used = pair.target.used
        assert restored(client, lease, held, there, only="peer") == (8 * LAYOUT.page_size, ("peer",))
        assert node.process.wait(10) == -signal.SIGKILL
        until(lambda: pair.target.used == used)
        assert restored(client, lease, held, there) == (held.positions, ("store",))
        until(lambda: pair.target.used == used)
    finally:
        node.kill()


BIG = KVLayout("big", "cpu-1", "float32", num_layers=16, num_kv_heads=8, head_dim=64, page_size=16)  # pages of 1 MiB


async def test_a_reader_that_sleeps_costs_the_source_nothing(
    servers: EmbeddedServers, pair_folder: Path, durable: RedisStore, job: str
) -> None:
    """It asks for 256 MiB and takes a little from time to time: no more than a few pages are ever on their way."""
    node = Node("patient", pair_folder, servers.durable.url, servers.kv.url, "--kv-commit", "grace",
                "--arena-bytes", "384MiB")  # fmt: skip
    try:
        client = node.ready().client()
        held = await hold(durable, client, job, 256, BIG)
        before = node.anonymous_bytes()
        seconds, most = [], 0
        with node.stream(held.lease.key, BIG) as reader:
            for position in range(1, 41):
                assert reader.recv(1 << 16)
                began = time.monotonic()
                commit = TokenCommit(held.lease.key, held.lease.token, position, (position,))
                assert client.commit([commit])[0].length == position + 1
                seconds.append(time.monotonic() - began)
                most = max(most, node.anonymous_bytes())
                await asyncio.sleep(0.02)
            assert node.metric(STREAMS, end="served") == node.metric(STREAMS, end="broken") == 0, (
                "it is still under way"
            )
            assert node.metric("tideover_peer_bytes_total", direction="out") < 32 << 20
        assert most - before < 32 << 20
        assert statistics.median(seconds) < 0.2, "a loop that waits for a reader waits for seconds"
    finally:
        node.kill()
