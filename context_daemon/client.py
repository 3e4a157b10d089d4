"""What a worker holds of its node's context daemon: a synchronous client, safe to call from several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import grpc
import msgspec

from context_daemon import wire
from context_daemon.kv_writer import Announced, ArenaGone, Attachment, KVWriter, Owned, SlotRange
from context_daemon.page_records import Shape
from context_daemon.preparation import Preparation
from context_daemon.rates import PrefillCost
from context_daemon.records import (
    CommitResult,
    FencingToken,
    InterruptionCause,
    KVLayout,
    KVWatermark,
    Lease,
    Notice,
    RequestKey,
    TokenCommit,
    WorkerStatus,
)
from context_daemon.restore_stream import RestoreStream
from context_daemon.store import StoreUnavailable
from protos import context_pb2 as pb
from protos.context_pb2_grpc import ContextServiceStub

T = TypeVar("T")
_MAX_MESSAGE = 64 << 20
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    # Channels to one address would otherwise share a connection, and tokens would queue behind KV.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
)
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


EXPENSIVE = PrefillCost(fixed_s=0.0, token_s=3600.0)  # whoever does not say what computing costs wants pages


class NotOwner(Exception):
    """The request is not owned under this token by this worker: drop the sequence."""


class UnknownRequest(NotOwner):
    """The store knows no such request: nothing can be owned."""


class ContextClient:
    """Every call raises StoreUnavailable when the daemon or its store is away; the same call may then be repeated.

    `timeout_s` bounds the calls about tokens and leases, `kv_timeout_s` those that carry KV. A caller that sent more than
    one commit of a request must keep their order itself.
    """

    def __init__(self, address: str, *, timeout_s: float = 5.0, kv_timeout_s: float = 30.0) -> None:
        self.address = address
        self._timeout_s, self._kv_timeout_s = timeout_s, kv_timeout_s
        self._channels = tuple(grpc.insecure_channel(address, options=_OPTIONS) for _ in range(3))
        self._tokens, self._kv, self._control = (ContextServiceStub(channel) for channel in self._channels)

    def commit(self, commits: Sequence[TokenCommit]) -> list[CommitResult]:
        """Durable when it returns, for each result that is OK. Results in the order of `commits`."""
        request = pb.CommitRequest(commits=[wire.commit_to_pb(commit) for commit in commits])
        response = self._call(lambda: self._tokens.Commit(request, timeout=self._timeout_s))
        return [wire.result_from_pb(m) for m in response.results]

    def attach_arena(self, shape: Shape, want_blocks: int, writer: str = "") -> Attachment:
        """Raises ValueError when pages of this shape do not fit the arena."""
        request = pb.AttachArenaRequest(
            layout=shape.layout,
            slot_bytes=shape.slot_bytes,
            page_size=shape.page_size,
            pid=os.getpid(),
            want_blocks=want_blocks,
            writer=writer,
        )
        return wire.attachment_from_pb(self._call(lambda: self._kv.AttachArena(request, timeout=self._timeout_s)))

    def announce(
        self,
        attachment: Attachment,
        ranges: Sequence[SlotRange],
        asks: Iterable[Owned],
        want_blocks: int,
        grant: int = 0,
    ) -> Announced:
        """Raises ArenaGone when the daemon has another arena now."""
        request = pb.WriteSlotsRequest(
            arena_id=attachment.arena_id,
            attachment=attachment.number,
            ranges=[wire.range_to_pb(item) for item in ranges],
            asks=[wire.progress_to_pb(item) for item in asks],
            want_blocks=want_blocks,
            grant=grant,
        )
        try:
            answer = self._call(lambda: self._kv.WriteSlots(request, timeout=self._timeout_s))
        except NotOwner as error:
            raise ArenaGone(str(error)) from error
        return wire.announced_from_pb(answer)

    @contextmanager
    def restoring(
        self,
        key: RequestKey,
        token: FencingToken,
        worker_id: str,
        layout: KVLayout,
        arena: KVWriter | None = None,
        prefill: PrefillCost = EXPENSIVE,
        only: str = "",
    ) -> Iterator[RestoreStream]:
        """The record and what can be had of its KV. Pages of `arena` are read where they lie, and stay there until the end
        of the `with`; none come when `prefill` says that computing is sooner. `only` names the one source that may be used,
        for measurements. Raises NotOwner when the lease is not this worker's. Lost KV only makes it shorter."""
        request = pb.RestoreRequest(
            key=wire.key_to_pb(key),
            token=wire.token_to_pb(token),
            worker_id=worker_id,
            layout=layout.fingerprint,
            arena_id=arena.arena_id if arena else "",
            slot_bytes=layout.slot_bytes,
            page_size=layout.page_size,
            prefill=wire.prefill_to_pb(prefill),
            only=only,
        )
        call = self._kv.Restore(request, timeout=self._kv_timeout_s)
        try:
            yield RestoreStream(layout, arena, iter(call), self._call)
        finally:
            call.cancel()  # what is left of the stream is not wanted; after its end this does nothing

    def prepare(self, asked: Preparation, timeout_s: float) -> list[int]:
        """Copy pages ahead of a cut-over (see ContextService.Prepare). Returns how far each request is at the target, from
        the first position on without a hole; 0 when it is not owned under its token any more."""
        request = wire.preparation_to_pb(asked)
        return list(self._call(lambda: self._control.Prepare(request, timeout=timeout_s)).positions)

    def handover(
        self,
        key: RequestKey,
        token: FencingToken,
        length: int,
        watermark: KVWatermark | None = None,
        target: str = "",
        cause: InterruptionCause = InterruptionCause.NOTICE,
    ) -> Lease | None:
        """The cut-over (see ContextStore.handover). None: the source goes on."""
        request = pb.HandoverRequest(
            key=wire.key_to_pb(key),
            token=wire.token_to_pb(token),
            length=length,
            watermark=wire.watermark_to_pb(watermark),
            target=target,
            cause=str(cause),
        )
        return wire.lease_from_pb(key, self._call(lambda: self._tokens.Handover(request, timeout=self._timeout_s)))

    def heartbeat(self, status: WorkerStatus) -> list[Notice]:
        """This node's standing notices. Answered while the store is away, too."""
        request = pb.HeartbeatRequest(status=msgspec.msgpack.encode(status))
        response = self._call(lambda: self._control.Heartbeat(request, timeout=self._timeout_s))
        return [wire.notice_from_pb(m) for m in response.notices]

    def raise_notice(self, notice: Notice) -> bool:
        """True if it is new. Kept by the daemon when the store is away."""
        request = pb.RaiseNoticeRequest(notice=wire.notice_to_pb(notice))
        return bool(self._call(lambda: self._control.RaiseNotice(request, timeout=self._timeout_s)).is_new)

    def withdraw_notice(self, notice_id: str) -> None:
        request = pb.WithdrawNoticeRequest(notice_id=notice_id)
        self._call(lambda: self._control.WithdrawNotice(request, timeout=self._timeout_s))

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except grpc.RpcError as error:
            self._raise_named(error)

    def _raise_named(self, error: grpc.RpcError) -> NoReturn:
        code, details = _status(error)
        text = f"context daemon {self.address}: {details}"
        if code in _AWAY:
            raise StoreUnavailable(text) from error
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise NotOwner(text) from error
        if code is grpc.StatusCode.NOT_FOUND:
            raise UnknownRequest(text) from error
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
            raise ValueError(text) from error
        raise error


def _status(error: Any) -> tuple[grpc.StatusCode, str]:
    return error.code(), error.details() or error.code().name
