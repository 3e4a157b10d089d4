"""What a client keeps open towards peers that it does not ask any more."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest

from context_daemon import peer_client
from context_daemon.arena import Arena, slab_bytes
from context_daemon.landing import Landing
from context_daemon.peer_channels import PeerChannels
from context_daemon.peer_client import PeerClient
from context_daemon.records import RequestKey
from context_daemon.slabs import Slabs
from protos import context_pb2 as pb
from protos.context_pb2_grpc import ContextServiceServicer, add_ContextServiceServicer_to_server

KEY = RequestKey("job", 1)


class Peer(ContextServiceServicer):
    def DescribePages(self, request: pb.DescribePagesRequest, context: Any) -> pb.DescribePagesResponse:
        return pb.DescribePagesResponse(positions=[4], port=1, token="token")


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "condition never held"
        await asyncio.sleep(0.05)


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PeerClient]:
    monkeypatch.setattr(peer_client, "_IDLE_S", 0.3)
    made = PeerClient(Landing(Arena(1 << 20), Slabs(1 << 20, slab_bytes(1 << 20))))
    yield made
    await made.close()


async def test_a_connection_that_nobody_uses_is_closed_and_made_anew(client: PeerClient) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    add_ContextServiceServicer_to_server(Peer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def connected() -> bool:
        there = psutil.Process().net_connections("tcp")
        return any(end.raddr and end.raddr.port == port and end.status == "ESTABLISHED" for end in there)

    try:
        for _ in range(2):
            assert await client.describe(f"127.0.0.1:{port}", [KEY], "lay", 5.0) == {KEY: 4}
            assert connected() and len(client._channels) == 1
            await until(lambda: not connected() and not len(client._channels))
    finally:
        server.stop(None).wait(10)


async def test_a_peer_that_is_gone_is_not_dialled_for_ever(client: PeerClient) -> None:
    """It takes connections and ends them: each dial is heard, none becomes a channel."""
    last = began = time.monotonic()
    dials = 0

    async def ended(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal last, dials
        last, dials = time.monotonic(), dials + 1
        writer.close()

    server = await asyncio.start_server(ended, "127.0.0.1", 0, family=socket.AF_INET)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert await client.describe(address, [KEY], "lay", 0.3) == {}
    assert dials
    await until(lambda: time.monotonic() - last > 2.5)  # it is dialled every second at most, as long as it is
    assert last - began < 4
    server.close()


async def test_a_channel_in_use_stays_open_however_long_the_call_takes() -> None:
    channels = PeerChannels(0.0)
    with channels.used("127.0.0.1:1") as channel:
        with channels.used("127.0.0.1:1") as same:
            assert same is channel
        for _ in range(5):
            await asyncio.sleep(0)  # the turns of the loop in which it would go
        assert len(channels) == 1
    await until(lambda: len(channels) == 0)
    with channels.used("127.0.0.1:1") as channel:
        assert channel is not same
    await channels.close()
    assert len(channels) == 0
