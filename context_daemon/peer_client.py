"""Fetches pages from other nodes' daemons. A peer that is away, slow or wrong is an early end, never an error."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress

import grpc

from context_daemon import metrics, wire
from context_daemon.bulk_threads import bulk_pool
from context_daemon.kv_metrics import ABSENT_PAGES
from context_daemon.kv_slots import identity, verify
from context_daemon.landing import Keep, Landing, Spot
from context_daemon.link_probe import PROBE_BYTES, PROBE_S, Mark, rate_of
from context_daemon.observability import get_logger
from context_daemon.page_records import Shape
from context_daemon.page_stream import (
    End,
    PageHead,
    StreamRequest,
    pack_request,
    receive_pages,
    receive_probe,
)
from context_daemon.peer_channels import PeerChannels
from context_daemon.pieces import Piece
from context_daemon.rates import LinkRate
from context_daemon.records import RequestKey
from context_daemon.store import StoreUnavailable
from protos import context_pb2 as pb
from protos.context_pb2_grpc import ContextServiceStub

log = get_logger()

_CONNECT_S = 1.0
_STALL_S = 2.0
_AT_ONCE = 4  # pages to one turn of a thread, and at most that many in flight in memory
_TRIES = 3  # of one fetch; each goes on where the last one broke
_PAUSE_S = 0.1
_STREAMS = 16
_NOBODY = RequestKey("probe", 1)
_IDLE_S = 10.0  # a channel to a peer that was not asked for so long is closed


class PeerClient:
    """A gRPC channel to each peer that was asked lately; page streams are connections of their own. For one event loop."""

    def __init__(self, landing: Landing) -> None:
        self._landing = landing
        self._channels = PeerChannels(_IDLE_S)
        self._doors: dict[str, tuple[str, int, str]] = {}  # address -> host, port, token of its page streams
        self._threads = bulk_pool(_STREAMS, "pages-in")

    async def describe(
        self, address: str, keys: Sequence[RequestKey], layout: str, timeout_s: float
    ) -> Mapping[RequestKey, int]:
        """Positions that the peer holds of each request; nothing when it does not answer in time."""
        request = pb.DescribePagesRequest(keys=[wire.key_to_pb(key) for key in keys], layout=layout)
        try:
            with self._channels.used(address) as channel:
                stub = ContextServiceStub(channel)
                answer = await stub.DescribePages(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            metrics.PEER_FAILURES.labels("away").inc()
            log.info("peer_away", peer=address, error=error.code().name)
            return {}
        if len(answer.positions) != len(keys) or not 0 < answer.port < 1 << 16:
            metrics.PEER_FAILURES.labels("wrong").inc()
            log.warning("peer_answers_wrongly", peer=address, positions=len(answer.positions), port=answer.port)
            return {}
        self.introduce(address, answer.port, answer.token)
        return dict(zip(keys, answer.positions, strict=True))

    def introduce(self, address: str, port: int, token: str) -> None:
        """What `describe` would have said of where a peer's pages can be read."""
        self._doors[address] = (address.rsplit(":", 1)[0].strip("[]"), port, token)

    async def give(self, request: pb.TakePagesRequest, timeout_s: float) -> list[int]:
        """Have a peer take pages from here (see TakePages). Raises StoreUnavailable when it does not answer."""
        address = request.prepare.target
        try:
            with self._channels.used(address) as channel:
                answer = await ContextServiceStub(channel).TakePages(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            metrics.PEER_FAILURES.labels("away").inc()
            raise StoreUnavailable(f"context daemon {address}: {error.code().name}: {error.details()}") from error
        if len(answer.positions) != len(request.prepare.requests):
            metrics.PEER_FAILURES.labels("wrong").inc()
            raise StoreUnavailable(
                f"context daemon {address} answers for {len(answer.positions)} requests, not for all"
            )
        return list(answer.positions)

    async def fetch(
        self, address: str, key: RequestKey, shape: Shape, first_page: int, until_page: int, keep: Keep
    ) -> AsyncGenerator[Piece, None]:
        """Verified pages in order, up to the first that is absent or does not match. Call `describe` or `introduce` before.
        A connection that breaks is made anew from the next page on, a few times; one that stalls is not: whoever has waited
        so long goes elsewhere. Blocks are freed by what `keep` is given, and all others by when this ended or was closed."""
        number = first_page
        for turn in range(_TRIES):
            if turn:
                await asyncio.sleep(_PAUSE_S)
            before = number
            try:
                async with aclosing(self._stream(address, key, shape, number, until_page, keep)) as pieces:
                    async for piece in pieces:
                        number = piece.number + 1
                        yield piece
                        if piece.slots < shape.page_size:
                            return
                return
            except (OSError, ValueError) as error:
                stalled = isinstance(error, TimeoutError)
                metrics.PEER_FAILURES.labels("stalled" if stalled else "broken").inc()
                log.info("peer_stream_broken", peer=address, page=number, came=number - before, error=repr(error))
                if stalled:
                    return

    async def probe(self, address: str) -> LinkRate | None:
        """How fast its pages would come; None when it does not say. Call `describe` or `introduce` before."""
        host, port, token = self._doors[address]
        request = StreamRequest(token, _NOBODY, "", 0, 0, 0, 0, probe=PROBE_BYTES)
        loop = asyncio.get_running_loop()
        try:
            return rate_of(await loop.run_in_executor(self._threads, _probe, host, port, request))
        except (OSError, ValueError) as error:
            log.info("peer_not_probed", peer=address, error=repr(error))
            return None

    async def _stream(
        self, address: str, key: RequestKey, shape: Shape, first: int, until: int, keep: Keep
    ) -> AsyncGenerator[Piece, None]:
        host, port, token = self._doors[address]
        request = StreamRequest(token, key, shape.layout, shape.slot_bytes, shape.page_size, first, until)
        loop = asyncio.get_running_loop()
        connection = await loop.run_in_executor(self._threads, _open, host, port, request)
        intake = _Intake(self._landing, self._threads, connection, shape)
        try:
            while (came := await intake.next(until - first)) is not None:
                piece = self._landed(key, shape, first, *came, keep)
                if piece is None:
                    return
                yield piece
                first += 1
            self._ended(address, intake.end)
        finally:
            await intake.close()

    def _landed(
        self, key: RequestKey, shape: Shape, expected: int, head: PageHead, spot: Spot, keep: Keep
    ) -> Piece | None:
        """The page as far as its slots are what was sealed; None when not even its first is."""
        view = spot.view[: head.slots * shape.row_bytes]
        whose = identity(key, head.epoch, shape.layout)
        good = verify(view, whose, expected * shape.page_size, shape.slot_bytes, shape.page_size)
        metrics.PEER_BYTES.labels("in").inc(len(view))
        view.release()
        if head.page != expected:
            ABSENT_PAGES.labels("order").inc()
        elif good.slots < head.slots:
            ABSENT_PAGES.labels(str(good.reason)).inc()
        if head.page != expected or good.slots == 0:
            self._landing.give(spot)
            return None
        return self._landing.landed(spot, shape, head, good.slots, "peer", keep)

    def _ended(self, address: str, end: End | None) -> None:
        if end not in (None, End.DONE):
            metrics.PEER_FAILURES.labels(end.name.lower()).inc()
            log.info("peer_refused", peer=address, why=end.name)

    async def close(self) -> None:
        await self._channels.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _open(host: str, port: int, request: StreamRequest) -> socket.socket:
    try:
        connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    except TimeoutError as error:  # its first packet may be lost: that is no stall
        raise ConnectionError(f"no connection to {host}:{port} within {_CONNECT_S} s") from error
    connection.settimeout(_STALL_S)
    try:
        connection.sendall(pack_request(request))
    except OSError:
        connection.close()
        raise
    return connection


def _probe(host: str, port: int, request: StreamRequest) -> list[Mark]:
    started = time.perf_counter()
    with _open(host, port, request) as connection:
        opened = time.perf_counter() - started
        return [(size, opened + at) for size, at in receive_probe(connection, request.probe, PROBE_S)]


class _Intake:
    """A few pages are received in a thread while those before are checked and handed on."""

    def __init__(self, landing: Landing, threads: ThreadPoolExecutor, connection: socket.socket, shape: Shape) -> None:
        self._landing, self._threads, self._connection, self._shape = landing, threads, connection, shape
        self._spots: list[Spot] = []  # of the turn under way
        self._turn: asyncio.Future[tuple[list[PageHead], End | None]] | None = None
        self._ready: deque[tuple[PageHead, Spot]] = deque()
        self.end: End | None = None

    async def next(self, missing: int) -> tuple[PageHead, Spot] | None:
        """The next page, `missing` counted with it; None at the end. From then on it is the caller's."""
        if not self._ready and missing and self.end is None:
            await self._receive(missing)
        return self._ready.popleft() if self._ready else None

    async def _receive(self, missing: int) -> None:
        turn = self._turn or self._start(missing)
        heads, self.end = await asyncio.shield(turn)
        self._ready.extend(zip(heads, self._spots, strict=False))
        for spot in self._spots[len(heads) :]:
            self._landing.give(spot)
        self._spots, self._turn = [], None
        if self.end is None and missing > len(heads):
            self._start(missing - len(heads))

    def _start(self, missing: int) -> asyncio.Future[tuple[list[PageHead], End | None]]:
        self._spots = self._landing.take(self._shape, min(_AT_ONCE, missing))
        views = [spot.view for spot in self._spots]
        loop = asyncio.get_running_loop()
        self._turn = loop.run_in_executor(self._threads, receive_pages, self._connection, views)
        return self._turn

    async def close(self) -> None:
        """Ends the thread's turn, too: nobody writes into the spots any more when they are given back."""
        turn = self._turn
        if turn is None or turn.done():
            self._give_all()
            return
        turn.add_done_callback(lambda _: self._give_all())  # also when the wait for it is cancelled
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        await asyncio.wait([turn])

    def _give_all(self) -> None:
        if self._turn is not None and not self._turn.cancelled():
            self._turn.exception()  # heard of
        self._connection.close()
        for spot in [*self._spots, *(spot for _, spot in self._ready)]:
            self._landing.give(spot)
