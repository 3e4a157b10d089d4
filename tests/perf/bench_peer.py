"""How fast pages come out of another daemon's arena over loopback, beside a bare socket that moves the same bytes.

    .venv/bin/python -m tests.perf.bench_peer

The source is a process of its own. `raw` is `sendall` from its arena and `recv_into` ours: nothing looked up, nothing
checked. `fetch` is PeerClient.fetch, every slot verified, in turns with it: medians of the runs, and of the ratios of pairs.
`untouched` is the first fetch, into memory that the kernel clears as it is first written. Blocks are kept until the end of a
fetch, as by a restore.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import socket
import statistics
import threading
import time
from contextlib import aclosing
from multiprocessing.connection import Connection
from typing import Any

import grpc

from context_daemon import wire
from context_daemon.arena import Arena, slab_bytes
from context_daemon.kv_slots import identity, seal
from context_daemon.landing import Landing
from context_daemon.page_records import Shape
from context_daemon.page_server import PageServer
from context_daemon.page_table import PageTable
from context_daemon.peer_client import PeerClient
from context_daemon.records import RequestKey
from context_daemon.slabs import Slabs
from protos import context_pb2 as pb
from protos.context_pb2_grpc import ContextServiceServicer, add_ContextServiceServicer_to_server

KEY, PAGE, TOTAL, ROOM, RUNS = RequestKey("bench", 1), 16, 192 << 20, 256 << 20, 7
SLOTS_KIB = (46, 128)


def pages_of(shape: Shape) -> int:
    return TOTAL // shape.block_bytes


class Source(ContextServiceServicer):
    """What of a daemon gives pages, and a port that sends the same bytes bare."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.arena = shape, Arena(ROOM)
        slabs = Slabs(ROOM, slab_bytes(ROOM))
        self.table = PageTable(slabs.give, time.monotonic)
        self.blocks = slabs.take(shape.block_bytes, pages_of(shape))
        for number, block in enumerate(self.blocks):
            page = self.arena.view[block : block + shape.block_bytes]
            page[:] = os.urandom(shape.block_bytes)
            seal(page, identity(KEY, 1, shape.layout), number * PAGE, shape.slot_bytes)
        positions = len(self.blocks) * PAGE
        self.table.announce(KEY, shape, 1, positions, 0, self.blocks, positions)
        self.pages = PageServer(self.table, self.arena, 8)
        self.bare = socket.create_server(("127.0.0.1", 0))

    async def DescribePages(self, request: pb.DescribePagesRequest, context: Any) -> pb.DescribePagesResponse:
        positions = [self.table.prefix(wire.key_from_pb(key), request.layout) for key in request.keys]
        return pb.DescribePagesResponse(positions=positions, port=self.pages.port, token=self.pages.token)

    def send_bare(self) -> None:
        while True:
            connection, _ = self.bare.accept()
            with connection:
                for block in self.blocks:
                    connection.sendall(self.arena.view[block : block + self.shape.block_bytes])

    async def run(self, ready: Connection) -> None:
        server = grpc.aio.server()
        add_ContextServiceServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self.pages.listen("127.0.0.1")
        threading.Thread(target=self.send_bare, daemon=True).start()
        ready.send((f"127.0.0.1:{port}", self.bare.getsockname()))
        await self.pages.run()


def source(shape: Shape, ready: Connection) -> None:
    asyncio.run(Source(shape).run(ready))


def raw(bare: tuple[str, int], arena: Arena, shape: Shape) -> float:
    started = time.perf_counter()
    with socket.create_connection(bare) as connection:
        for at in range(0, pages_of(shape) * shape.block_bytes, shape.block_bytes):
            view = arena.view[at : at + shape.block_bytes]
            while view:
                view = view[connection.recv_into(view) :]
    return pages_of(shape) * shape.block_bytes / (time.perf_counter() - started) / 1e6


async def fetched(client: PeerClient, address: str, shape: Shape) -> float:
    blocks: list[Any] = []
    started, size = time.perf_counter(), 0
    await client.describe(address, [KEY], shape.layout, 5.0)
    async with aclosing(client.fetch(address, KEY, shape, 0, pages_of(shape), blocks.append)) as pieces:
        async for piece in pieces:
            size += piece.slots * shape.row_bytes
    seconds = time.perf_counter() - started
    for free in blocks:
        free()
    assert size == pages_of(shape) * shape.block_bytes, "not all of it came"
    return size / seconds / 1e6


async def measure(shape: Shape, address: str, bare: tuple[str, int]) -> None:
    arena = Arena(ROOM)
    client = PeerClient(Landing(arena, Slabs(ROOM, slab_bytes(ROOM))))
    untouched = await fetched(client, address, shape)
    pairs = [(raw(bare, arena, shape), await fetched(client, address, shape)) for _ in range(RUNS)]
    raws, ours = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    share = statistics.median(our / bare_rate for bare_rate, our in pairs)
    await client.close()
    print(
        f"{shape.slot_bytes >> 10:4} KiB a slot, {pages_of(shape):4} pages: raw {raws:5.0f} MB/s, fetch {ours:5.0f} MB/s"
        f" ({share:.0%}), untouched {untouched:5.0f} MB/s",
        flush=True,
    )


def main() -> None:
    spawn = mp.get_context("spawn")
    for slot_kib in SLOTS_KIB:
        shape = Shape("bench", slot_kib << 10, PAGE)
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=source, args=(shape, theirs), daemon=True)
        process.start()
        try:
            address, bare = ours.recv()
            asyncio.run(measure(shape, address, bare))
        finally:
            process.kill()
            process.join()


if __name__ == "__main__":
    main()
