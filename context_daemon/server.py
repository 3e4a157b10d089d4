"""The gRPC ContextService: a thin shell around the durable store, the KV store and the notice board."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, NoReturn

import grpc
import msgspec

from context_daemon import metrics, wire
from context_daemon.fault_points import Point, hit
from context_daemon.guests import TURN_S, Guests
from context_daemon.kv_service import ArenaFull, KVService
from context_daemon.kv_writer import ArenaGone
from context_daemon.notice_clock import NoticeClock
from context_daemon.notices import NoticeBoard
from context_daemon.observability import get_logger
from context_daemon.operator_calls import Operator
from context_daemon.page_drop import PageDrop
from context_daemon.page_records import Shape
from context_daemon.read_ahead import gathered
from context_daemon.records import (
    CommitResult,
    CommitStatus,
    FencingToken,
    InterruptionCause,
    RequestRecord,
    RequestState,
    TokenCommit,
    WorkerStatus,
)
from context_daemon.restorer import Wish
from context_daemon.store import ContextStore, StoreUnavailable
from protos import context_pb2 as pb
from protos.context_pb2_grpc import ContextServiceServicer

Context = grpc.aio.ServicerContext[Any, Any]
_PAGES_A_MESSAGE = 16
_READERS_GRACE_S = 10.0  # a worker has copied the last page out of the arena within that
_PEERS_GRACE_S = 0.5  # beyond what a peer gives itself
_HEARTBEAT_WAIT_S = 0.25  # a heartbeat is answered by then, whether or not the store took it


class ContextServer(ContextServiceServicer):
    """`worker_ttl_s` is how long a heartbeat counts. Bind to one event loop; `close()` ends its background tasks."""

    def __init__(
        self,
        store: ContextStore,
        service: KVService,
        board: NoticeBoard,
        drop: PageDrop,
        operator: Operator,
        guests: Guests,
        *,
        node_id: str,
        address: str = "",
        worker_ttl_s: float = 10.0,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._service, self._board = store, service, board
        self._drop, self._operator, self._guests = drop, operator, guests
        self._worker_ttl_s = worker_ttl_s
        self._on_loss = on_loss  # an owner's word shows that the store lost writes
        self._address = address  # where other nodes reach this daemon
        self._log = get_logger(node=node_id)
        self._notice_clock = NoticeClock(time.monotonic)
        self._beats: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        start = time.perf_counter()
        commits = wire.commits_from_pb(request.commits, self._address)
        try:
            hit(Point.COMMIT_RECEIVED)
            results = await self._store.commit(commits)
            hit(Point.COMMIT_STORED)
            await self._fence_if_ahead([c.token for c, result in zip(commits, results, strict=True) if result.ahead])
        except StoreUnavailable as error:
            await self._away("durable", error, context)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        metrics.COMMIT_SECONDS.observe(time.perf_counter() - start)
        for commit, result in zip(commits, results, strict=True):
            self._account(commit, result)
        metrics.AHEAD.set(getattr(self._store, "ahead_commits", 0))
        return pb.CommitResponse(results=[wire.result_to_pb(result) for result in results])

    async def _fence_if_ahead(self, tokens: Sequence[FencingToken]) -> None:
        """Owners that the store never heard of: what it lost may be given to others under the same tokens."""
        if tokens:
            in_force = await self._store.bump_incarnation(max(token.incarnation for token in tokens))
            self._on_loss()
            self._log.error("owner_ahead_of_the_store", owners=len(tokens), incarnation=in_force)

    def _account(self, commit: TokenCommit, result: CommitResult) -> None:
        ended = self._service.committed(commit, result)
        metrics.COMMITS.labels(str(result.status)).inc()
        if result.status is CommitStatus.OK:
            metrics.COMMITTED_TOKENS.inc(len(commit.tokens))
            if commit.finish is not None:
                self._background(self._drop.over(commit.key, ended))
            return
        facts = {"job": commit.key.job_id, "request": str(commit.key), "epoch": commit.token.epoch}
        facts |= {"position": commit.position, "length": result.length}
        if result.status is CommitStatus.DIVERGED:
            metrics.DIVERGENCES.inc()
            self._log.error("commit_diverged", **facts)
        elif result.status is CommitStatus.FENCED:
            metrics.FENCED.inc()
            self._log.warning("commit_fenced", **facts)
        else:
            self._log.info("commit_gap", **facts)

    async def AttachArena(self, request: pb.AttachArenaRequest, context: Context) -> pb.AttachArenaResponse:
        if request.slot_bytes < 1 or request.page_size < 1 or not request.layout:
            text = f"a layout with slots of {request.slot_bytes} bytes and pages of {request.page_size} is none"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        shape = Shape(request.layout, request.slot_bytes, request.page_size)
        try:
            attached = self._service.attach(shape, request.pid, request.want_blocks, request.writer)
        except (ArenaFull, ValueError) as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        hit(Point.ARENA_ATTACHED)
        return wire.attachment_to_pb(attached)

    async def WriteSlots(self, request: pb.WriteSlotsRequest, context: Context) -> pb.WriteSlotsResponse:
        hit(Point.SLOTS_RECEIVED)
        try:
            answer = self._service.announce(
                request.arena_id,
                request.attachment,
                [wire.range_from_pb(m) for m in request.ranges],
                [(wire.key_from_pb(m.key), m.epoch) for m in request.asks],
                request.want_blocks,
                request.grant,
            )
        except ArenaGone as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        hit(Point.SLOTS_TAKEN)
        return wire.announced_to_pb(answer)

    async def Restore(self, request: pb.RestoreRequest, context: Context) -> AsyncIterator[pb.RestoreResponse]:
        record = await self._owned_record(request, context)
        yield pb.RestoreResponse(record=msgspec.msgpack.encode(record))
        hit(Point.RESTORE_RECORD)
        self._guests.claimed(record.key)
        await self._service.restoring(record)
        shape = Shape(request.layout, request.slot_bytes, request.page_size)
        wish = Wish(record, shape, wire.prefill_from_pb(request.prefill), request.only)
        chosen = await self._service.restorer.choose(wish)
        yield pb.RestoreResponse(planned=pb.RestorePlanned(fetch_from=chosen.fetch_from, fetch_to=chosen.fetch_to))
        metrics.RESTORES.labels("kv" if chosen.fetch_to else "record").inc()
        in_arena = request.arena_id == self._service.arena.arena_id
        async with self._service.borrowing() as borrowed:
            pieces = self._service.pages(wish, chosen, borrowed if in_arena else None)
            async with aclosing(pieces), aclosing(gathered(pieces, _PAGES_A_MESSAGE)) as groups:
                async for group in groups:
                    yield pb.RestoreResponse(pages=wire.pieces_to_pb(group))
                    hit(Point.RESTORE_PAGES)
            yield pb.RestoreResponse(pages=pb.RestoredPages())
            await _end_of(context, _READERS_GRACE_S)

    async def DescribePages(self, request: pb.DescribePagesRequest, context: Context) -> pb.DescribePagesResponse:
        table, pages = self._service.table, self._service.page_server
        positions = [table.prefix(wire.key_from_pb(key), request.layout) for key in request.keys]
        return pb.DescribePagesResponse(positions=positions, port=pages.port, token=pages.token)

    async def _owned_record(self, request: pb.RestoreRequest, context: Context) -> RequestRecord:
        key, token = wire.key_from_pb(request.key), wire.token_from_pb(request.token)
        try:
            record = await self._store.get_request(key)
            if record is not None and token > record.token:
                await self._fence_if_ahead([token])
        except StoreUnavailable as error:
            await self._away("durable", error, context)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if record is None:
            metrics.RESTORES.labels("unknown").inc()
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no request {key}")
        owned = record.state is RequestState.LEASED and record.token == token
        if not owned or record.worker_id != request.worker_id:
            metrics.RESTORES.labels("not_owner").inc()
            text = f"{request.worker_id} under epoch {token.epoch} does not own {key}: it is {record.state}"
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{text} under epoch {record.token.epoch} by {record.worker_id or 'nobody'}",
            )
        return record

    async def Prepare(self, request: pb.PrepareRequest, context: Context) -> pb.PrepareResponse:
        hit(Point.PREPARE_RECEIVED)
        started, pages = time.perf_counter(), self._service.page_server
        if request.target == self._address:  # the next owner is on this node
            table, keys = self._service.table, [wire.key_from_pb(one.key) for one in request.requests]
            return pb.PrepareResponse(positions=[table.prefix(key, request.layout) for key in keys])
        take = pb.TakePagesRequest(prepare=request, source=self._address, port=pages.port, token=pages.token)
        try:
            positions = await self._service.peers.give(take, TURN_S + _PEERS_GRACE_S)
        except StoreUnavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        hit(Point.PREPARE_ANSWERED)
        metrics.PREPARE_SECONDS.observe(time.perf_counter() - started)
        return pb.PrepareResponse(positions=positions)

    async def TakePages(self, request: pb.TakePagesRequest, context: Context) -> pb.TakePagesResponse:
        hit(Point.GUESTS_RECEIVED)
        if ":" not in request.source or not 0 < request.port < 1 << 16:
            text = f"pages cannot be read at {request.source!r}, port {request.port}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        self._service.peers.introduce(request.source, request.port, request.token)
        try:
            positions = await self._guests.take(wire.preparation_from_pb(request.prepare), request.source)
        except StoreUnavailable as error:
            await self._away("durable", error, context)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.TakePagesResponse(positions=positions)

    async def Handover(self, request: pb.HandoverRequest, context: Context) -> pb.HandoverResponse:
        mark = wire.watermark_from_pb(request.watermark) if request.HasField("watermark") else None
        key, token = wire.key_from_pb(request.key), wire.token_from_pb(request.token)
        try:
            cause = InterruptionCause(request.cause or InterruptionCause.NOTICE)
            hit(Point.HANDOVER_RECEIVED)
            lease = await self._store.handover(key, token, request.length, mark, request.target, cause)
            hit(Point.HANDOVER_STORED)
        except StoreUnavailable as error:
            await self._away("durable", error, context)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        facts = {"request": str(key), "epoch": token.epoch, "length": request.length, "target": request.target}
        metrics.HANDOVERS.labels("refused" if lease is None else "moved").inc()
        self._log.info("handover", job=key.job_id, moved=lease is not None, **facts)
        if lease is None:
            return pb.HandoverResponse(moved=False)
        self._service.table.disown(key, token.epoch)
        return pb.HandoverResponse(moved=True, token=wire.token_to_pb(lease.token), target=lease.worker_id)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        try:
            status = msgspec.msgpack.decode(request.status, type=WorkerStatus)
        except msgspec.MsgspecError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"status is not a WorkerStatus: {error}")
        beat = self._beats.get(status.worker_id)
        if beat is None or beat.done():  # one at a time: a store that is away must not pile them up
            beat = self._background(self._put_worker(status))
            self._beats[status.worker_id] = beat
            beat.add_done_callback(partial(self._beaten, status.worker_id))
        await asyncio.wait([beat], timeout=_HEARTBEAT_WAIT_S)
        standing = self._board.current()
        self._notice_clock.told(status.worker_id, standing)
        metrics.NOTICES.set(len(standing))
        return pb.HeartbeatResponse(notices=[wire.notice_to_pb(notice) for notice in standing])

    def _beaten(self, worker_id: str, beat: asyncio.Task[None]) -> None:
        """Workers come and go, and their ids are never used twice: nothing is kept of them."""
        if self._beats.get(worker_id) is beat:
            del self._beats[worker_id]

    async def _put_worker(self, status: WorkerStatus) -> None:
        try:
            here = msgspec.structs.replace(status, daemon=self._address)
            await self._store.put_worker(here, self._worker_ttl_s)
        except StoreUnavailable as error:
            metrics.STORE_ERRORS.labels("durable").inc()
            self._log.warning("heartbeat_not_stored", worker=status.worker_id, error=str(error))

    async def RaiseNotice(self, request: pb.RaiseNoticeRequest, context: Context) -> pb.RaiseNoticeResponse:
        try:
            notice = wire.notice_from_pb(request.notice)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"notice of {request.notice.node_id!r}: {error}")
        self._notice_clock.raised(notice)
        is_new = await self._board.raise_notice(notice)
        if is_new:
            self._log.warning("notice_raised", kind=str(notice.kind), deadline=notice.deadline, source=notice.source)
        return pb.RaiseNoticeResponse(is_new=is_new)

    async def WithdrawNotice(self, request: pb.WithdrawNoticeRequest, context: Context) -> pb.WithdrawNoticeResponse:
        await self._board.withdraw(request.notice_id)
        self._log.warning("notice_withdrawn", notice=request.notice_id)
        return pb.WithdrawNoticeResponse()

    async def ListPages(self, request: pb.ListPagesRequest, context: Context) -> pb.ListPagesResponse:
        try:
            return await self._operator.listed(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise

    async def CollectPages(self, request: pb.CollectPagesRequest, context: Context) -> pb.CollectPagesResponse:
        try:
            return await self._operator.collected(request)
        except StoreUnavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise

    async def _away(self, store: str, error: StoreUnavailable, context: Context) -> NoReturn:
        metrics.STORE_ERRORS.labels(store).inc()
        self._log.warning("store_away", store=store, error=str(error))
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise error  # abort raises; this only says so to the type checker

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.error("background_failed", error=repr(task.exception()))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _end_of(context: Context, timeout_s: float) -> None:
    """Until the caller ended the call, or so long."""
    ended = asyncio.Event()
    context.add_done_callback(lambda _: ended.set())  # type: ignore[arg-type]  # the stubs want more of it
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await ended.wait()
