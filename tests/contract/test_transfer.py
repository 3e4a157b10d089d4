"""Pages between daemons on two hosts of their own, over a real link that is slow, cut and gone."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from daemon_rig import until
from netns import Host, forwarded, missing, two_hosts
from store_samples import job_record, spec

from context_daemon import wire
from context_daemon.client import ContextClient, Restored
from context_daemon.kv_writer import KVWriter
from context_daemon.page_stream import HEADER, End, StreamRequest, pack_request
from context_daemon.records import (
    FencingToken,
    InterruptionCause,
    KVLayout,
    KVWatermark,
    Lease,
    RequestKey,
    TokenCommit,
)
from context_daemon.redis_server import EmbeddedServers
from context_daemon.redis_store import RedisStore
from context_daemon.store import LeaseRequest
from protos import context_pb2 as pb
from protos.context_pb2_grpc import ContextServiceStub

reason = missing()
pytestmark = [pytest.mark.skipif(bool(reason), reason=reason or "two hosts"), pytest.mark.timeout(120)]

LAYOUT = KVLayout("fp", "cpu-1", "float32", num_layers=4, num_kv_heads=4, head_dim=64)  # 8 KiB a slot, 128 KiB a page
PROMPT = 1600
PAGES = PROMPT // LAYOUT.page_size
BYTES = PROMPT * LAYOUT.slot_bytes
RAW = os.urandom(BYTES)


class Node:
    """A daemon on a host of its own."""

    def __init__(self, host: Host, durable: str, kv: str, *flags: str) -> None:
        self.host = host
        self.process: subprocess.Popen[bytes] | None = None
        self._command = host.command(sys.executable, "-m", "context_daemon", "--node-id", host.name)
        self._command += [
            "--listen",
            "0.0.0.0:7070",
            "--advertise",
            f"{host.peer}:7070",
            "--arena-bytes",
            str(256 << 20),
        ]
        self._command += ["--durable-url", f"redis://{durable}/0", "--kv-url", f"redis://{kv}/0", *flags]
        self._command += ["--metrics-host", "0.0.0.0", "--metrics-port", "7071"]

    def start(self) -> ContextClient:
        self.process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        with grpc.insecure_channel(f"{self.host.control}:7070") as channel:
            grpc.channel_ready_future(channel).result(30)
        self.client = ContextClient(f"{self.host.control}:7070")
        return self.client

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{self.host.control}:7071/metrics", timeout=5) as answer:
            found = re.findall(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(found[0]) if found else 0.0

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)


class Pair:
    """Source and target, and a request whose KV lies in the source's arena; its owner there is no more."""

    def __init__(self, source: Node, target: Node, servers: EmbeddedServers) -> None:
        self.source, self.target, self.servers = source, target, servers
        self.lease: Lease

    async def write(self, stored: bool = False) -> None:
        store = RedisStore(self.servers.durable.url)
        await store.create_job(job_record("job"))
        await store.add_requests("job", [spec(1, PROMPT)])
        await store.start_job("job", 1)
        key = RequestKey("job", 1)
        (first,) = await store.lease("job", 1, [LeaseRequest(key, 0, "w1", "cpu-1")])
        writer = KVWriter(self.source.client, LAYOUT, spare_blocks=PAGES)
        writer.attach()
        while (written := writer.write(key, first.token.epoch, PROMPT, 0, RAW)) is None:
            writer.announce([])
        writer.announce([written])
        owned = (key, first.token.epoch)
        until(lambda: not stored or writer.announce([], [owned]).progress[owned].stored >= PROMPT)
        mark = KVWatermark(PROMPT, 0, LAYOUT.fingerprint) if stored else None
        self.source.client.commit([TokenCommit(key, first.token, 0, (5,), mark)])
        self.arena = writer._attachment.path if writer._attachment else ""
        await store.requeue("job", 1, [(key, first.token)], InterruptionCause.WORKER_DIED)
        (self.lease,) = await store.lease("job", 1, [LeaseRequest(key, 2, "w2", "cpu-1")])
        await store.close()

    def restore(self, **options: Any) -> Restored:
        writer = KVWriter(self.target.client, LAYOUT, spare_blocks=1)
        writer.attach()
        return self.target.client.restore(self.lease.key, self.lease.token, "w2", LAYOUT, arena=writer, **options)


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    flags: tuple[str, ...] = getattr(request, "param", ())
    with ExitStack() as stack:
        a, b = stack.enter_context(two_hosts())
        servers = stack.enter_context(EmbeddedServers(tmp_path))
        nodes = []
        for host in (a, b):
            ports = (servers.durable.port, servers.kv.port)
            durable, kv = (stack.enter_context(forwarded(host, port)) for port in ports)
            node = Node(host, durable, kv, *flags)
            stack.callback(node.kill)
            stack.callback(node.start().close)
            nodes.append(node)
        yield Pair(nodes[0], nodes[1], servers)


def whole(restored: Restored) -> bool:
    return restored.positions == PROMPT and bytes(restored.kv) == RAW


async def test_all_pages_come_from_the_other_host_without_any_store(pair: Pair) -> None:
    await pair.write()
    pair.servers.kv.kill()
    used = pair.target.metric("tideover_arena_used_bytes")
    restored = pair.restore()
    assert whole(restored) and restored.sources == ("peer",)
    assert pair.target.metric('tideover_peer_bytes_total{direction="in"}') >= BYTES
    until(lambda: pair.target.metric("tideover_arena_used_bytes") <= used + LAYOUT.slot_bytes * 17)


async def test_a_link_that_is_cut_for_a_moment_is_waited_out(pair: Pair) -> None:
    await pair.write()
    pair.source.host.limit("80mbit")  # 13 MB take more than a second
    cut = threading.Timer(0.4, pair.source.host.link, ["down"])
    mended = threading.Timer(1.0, pair.source.host.link, ["up"])
    cut.start()
    mended.start()
    restored = pair.restore(only="peer")
    assert not cut.is_alive() and whole(restored)


async def test_a_host_that_is_gone_midway_leaves_a_prefix_and_the_store_goes_on(pair: Pair) -> None:
    await pair.write(stored=True)
    pair.source.host.limit("80mbit")
    killed = threading.Timer(0.4, pair.source.kill)
    killed.start()
    restored = pair.restore()
    assert not killed.is_alive() and whole(restored) and restored.sources == ("peer", "store")


async def test_a_host_that_is_gone_midway_and_no_store_is_a_clean_end(pair: Pair) -> None:
    await pair.write()
    pair.source.host.limit("80mbit")
    threading.Timer(0.4, pair.source.kill).start()
    restored = pair.restore(only="peer")
    assert 0 < restored.positions < PROMPT
    assert bytes(restored.kv) == RAW[: restored.positions * LAYOUT.slot_bytes]
    assert pair.target.metric('tideover_peer_failures_total{reason="broken"}') >= 1
    again = pair.restore(only="peer")
    assert again.positions == 0, "nobody is there any more, and nothing hangs"


def flip(arena: Path, slot: bytes) -> None:
    """One bit of a slot, wherever it lies in the arena."""
    with arena.open("r+b") as memory:
        for at in range(0, 256 << 20, 1 << 20):
            memory.seek(at)
            found = memory.read(1 << 20).find(slot[:64])
            if found >= 0:
                memory.seek(at + found + 5)
                memory.write(bytes([slot[5] ^ 1]))
                return
    raise AssertionError("the slot was not found in the arena")


async def test_bytes_that_were_flipped_at_the_source_never_come_out(pair: Pair) -> None:
    await pair.write()
    page = 3
    flip(Path(pair.arena), RAW[page * 16 * LAYOUT.slot_bytes :][: LAYOUT.slot_bytes])
    restored = pair.restore(only="peer")
    assert restored.positions == page * 16 and bytes(restored.kv) == RAW[: page * 16 * LAYOUT.slot_bytes]
    assert pair.target.metric('tideover_absent_pages_total{reason="mismatch"}') >= 1


@pytest.mark.parametrize("pair", [("--max-peer-streams", "1")], indirect=True)
async def test_the_cap_on_streams_and_doors_that_stay_shut(pair: Pair) -> None:
    await pair.write()
    with grpc.insecure_channel(f"{pair.source.host.control}:7070") as channel:
        ask = pb.DescribePagesRequest(keys=[wire.key_to_pb(pair.lease.key)], layout=LAYOUT.fingerprint)
        door = ContextServiceStub(channel).DescribePages(ask)
    assert list(door.positions) == [PROMPT]
    host, size = pair.source.host.control, LAYOUT.page_size
    request = StreamRequest(door.token, pair.lease.key, LAYOUT.fingerprint, LAYOUT.slot_bytes, size, 0, PAGES)

    def opened(data: bytes) -> socket.socket:
        connection = socket.create_connection((host, door.port), timeout=10)
        connection.sendall(data)
        return connection

    def end(connection: socket.socket) -> int:
        """How the stream ended at once; -1: it was closed without a word."""
        try:
            data = connection.recv(HEADER.size, socket.MSG_WAITALL)
        except ConnectionResetError:
            return -1
        return int(HEADER.unpack(data)[0]) if len(data) == HEADER.size else -1

    wrong = StreamRequest("guess", pair.lease.key, LAYOUT.fingerprint, LAYOUT.slot_bytes, size, 0, PAGES)
    with opened(pack_request(wrong)) as refused:
        assert end(refused) == End.REFUSED
    for garbage in (b"\xff" * 64, b"\x08\x00\x00\x00notright", b"\x10\x00"):
        with opened(garbage) as rubbish:
            rubbish.shutdown(socket.SHUT_WR)
            assert end(rubbish) == -1
    with opened(pack_request(request)) as slow:
        slow.recv(1)  # it is served, and reads no further
        with opened(pack_request(request)) as second:
            assert end(second) == End.BUSY
        began = time.monotonic()
        pair.source.client.commit([TokenCommit(pair.lease.key, FencingToken(1, 3), 1, (6,))])
        assert time.monotonic() - began < 1.5, "a slow reader is nobody else's business"
    until(lambda: whole(pair.restore(only="peer")))
