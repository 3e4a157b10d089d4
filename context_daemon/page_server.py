"""Gives this node's pages to other nodes' daemons, whether or not the engine that wrote them still lives."""

from __future__ import annotations

import asyncio
import secrets
import socket

import msgspec

from context_daemon import metrics
from context_daemon.arena import Arena
from context_daemon.bulk_threads import bulk_pool
from context_daemon.fault_points import Point, hit
from context_daemon.kv_slots import framed_size
from context_daemon.link_probe import PROBE_BYTES
from context_daemon.observability import get_logger
from context_daemon.page_records import Held, Shape
from context_daemon.page_stream import (
    LENGTH,
    MAX_REQUEST,
    End,
    PageHead,
    StreamRequest,
    pack_end,
    send_pages,
    send_probe,
)
from context_daemon.page_table import PageTable

log = get_logger()

_STALL_S = 2.0  # a reader that takes nothing for so long is let go
_ASKS_S = 5.0
_ASKING = 64  # connections beyond the streams that are served; more are closed at once
_PAUSE_S = 0.1  # when the machine has no descriptor left for a connection
_AT_ONCE = 4  # pages to one turn of a thread: what a slow reader can keep pinned


class PageServer:
    """Listens on a port of its own. `token` opens it; at most `max_streams` are served at once, others are told BUSY."""

    def __init__(self, table: PageTable, arena: Arena, max_streams: int) -> None:
        self._table, self._arena, self._max_streams = table, arena, max_streams
        self.token = secrets.token_hex(16)
        self.port = 0
        self._streams = 0
        self._listener: socket.socket | None = None
        self._threads = bulk_pool(max_streams, "pages-out")
        self._serving: set[asyncio.Task[None]] = set()

    def listen(self, host: str) -> int:
        """Raises OSError when the address cannot be used."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        both = host == "::" and socket.has_dualstack_ipv6()
        self._listener = socket.create_server((host, 0), family=family, backlog=64, dualstack_ipv6=both)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        return self.port

    async def run(self) -> None:
        """Accept until cancelled. Call after `listen`."""
        if self._listener is None:
            raise RuntimeError("the page server runs before it listens")
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # of that connection, or of too many: the daemon must live on
                log.warning("page_stream_not_accepted", error=repr(error))
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._serving) >= self._max_streams + _ASKING:
                metrics.PEER_STREAMS.labels("busy").inc()
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection))
            self._serving.add(task)
            task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("page_stream_failed", error=repr(task.exception()))

    async def close(self) -> None:
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.setblocking(False)
            try:
                async with asyncio.timeout(_ASKS_S):
                    request = await self._request(connection)
                await self._answer(connection, request)
            except (OSError, TimeoutError, msgspec.MsgspecError, ValueError) as error:
                metrics.PEER_STREAMS.labels("broken").inc()
                log.info("page_stream_ended_early", error=repr(error))

    async def _request(self, connection: socket.socket) -> StreamRequest:
        loop = asyncio.get_running_loop()
        (length,) = LENGTH.unpack(await _exactly(loop, connection, LENGTH.size))
        if length > MAX_REQUEST:
            raise ValueError(f"a request of {length} bytes")
        return msgspec.msgpack.decode(await _exactly(loop, connection, length), type=StreamRequest)

    async def _answer(self, connection: socket.socket, request: StreamRequest) -> None:
        connection.settimeout(_STALL_S)
        loop = asyncio.get_running_loop()
        if not secrets.compare_digest(request.token.encode(), self.token.encode()):
            await loop.run_in_executor(None, connection.sendall, pack_end(End.REFUSED))
            metrics.PEER_STREAMS.labels("refused").inc()
            return
        if self._streams >= self._max_streams:
            await loop.run_in_executor(None, connection.sendall, pack_end(End.BUSY))
            metrics.PEER_STREAMS.labels("busy").inc()
            return
        self._streams += 1
        try:
            await self._send(connection, request)
        finally:
            self._streams -= 1
        metrics.PEER_STREAMS.labels("served").inc()

    async def _send(self, connection: socket.socket, request: StreamRequest) -> None:
        """Looked up anew for each few pages: what is written meanwhile goes, too, and what is evicted ends the stream."""
        loop = asyncio.get_running_loop()
        if request.probe:
            await loop.run_in_executor(self._threads, send_probe, connection, min(request.probe, PROBE_BYTES))
            return
        number = request.first
        while pages := self._next(request, number):
            hit(Point.PEER_PAGES)
            for held in pages:
                self._table.pins.pin(held.block)
            try:
                await loop.run_in_executor(
                    self._threads, send_pages, connection, [self._bytes(h, request) for h in pages]
                )
            finally:
                for held in pages:
                    self._table.pins.unpin(held.block)
            number += len(pages)
            if pages[-1].slots < request.page_size:
                break
        await loop.run_in_executor(self._threads, connection.sendall, pack_end(End.DONE))

    def _next(self, request: StreamRequest, number: int) -> list[Held]:
        pages: list[Held] = []
        entry = self._table.get(request.key)
        if entry is None or entry.shape != Shape(request.layout, request.slot_bytes, request.page_size):
            return pages  # what the reader says of the layout is where it would be read
        for page in range(number, min(request.until, number + _AT_ONCE)):
            held = self._table.held_page(request.key, request.layout, page)
            if held is None or (pages and pages[-1].slots < request.page_size):
                break
            pages.append(held)
        return pages

    def _bytes(self, held: Held, request: StreamRequest) -> tuple[PageHead, memoryview]:
        size = held.slots * framed_size(request.slot_bytes)
        metrics.PEER_BYTES.labels("out").inc(size)
        return PageHead(held.number, held.epoch, held.slots), self._arena.view[held.block : held.block + size]


async def _exactly(loop: asyncio.AbstractEventLoop, connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = await loop.sock_recv(connection, count - len(data))
        if not more:
            raise ConnectionError("closed before its request was whole")
        data += more
    return data
