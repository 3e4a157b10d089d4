"""What a worker holds of its node's context daemon: a synchronous client, safe to call from several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
import msgspec

from context_daemon import wire
from context_daemon.kv_metrics import ABSENT_PAGES
from context_daemon.kv_slots import framed_size, unframe
from context_daemon.records import (
    CommitResult,
    FencingToken,
    InterruptionCause,
    KVLayout,
    KVWatermark,
    Lease,
    Notice,
    RequestKey,
    RequestRecord,
    TokenCommit,
    WorkerStatus,
)
from context_daemon.store import SlotWrite, StoreUnavailable
from protos import context_pb2 as pb
from protos.context_pb2_grpc import ContextServiceStub

T = TypeVar("T")
_MAX_MESSAGE = 64 << 20
_KV_MESSAGE = 1 << 20  # one WriteSlots message holds about so much: the daemon is not kept from tokens for longer
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

    def write_slots(self, writes: Sequence[SlotWrite]) -> str:
        """The KV server's generation: when it differs from the last one, everything written before may be gone."""
        generation = ""
        for batch in _batches(writes):
            request = pb.WriteSlotsRequest(writes=[wire.slots_to_pb(write) for write in batch])
            answer = self._write(request)
            if generation and answer != generation:
                raise StoreUnavailable("the KV store was restarted during a write: write again from position 0")
            generation = answer
        return generation

    def _write(self, request: pb.WriteSlotsRequest) -> str:
        return str(self._call(lambda: self._kv.WriteSlots(request, timeout=self._kv_timeout_s)).generation)

    def restore(
        self, key: RequestKey, token: FencingToken, worker_id: str, layout: KVLayout, want_kv: bool = True
    ) -> tuple[RequestRecord, bytearray, int]:
        """The record, the raw KV slots of positions `[0, n)` (verified, `n * slot_bytes` bytes) and `n`, at most the
        record's watermark. Raises NotOwner when the lease is not this worker's. Lost KV only makes `n` smaller."""
        request = pb.RestoreRequest(
            key=wire.key_to_pb(key),
            token=wire.token_to_pb(token),
            worker_id=worker_id,
            layout=layout.fingerprint,
            want_kv=want_kv,
        )
        call = self._kv.Restore(request, timeout=self._kv_timeout_s)
        try:
            return self._receive(key, layout, iter(call))
        except grpc.RpcError as error:
            self._raise_named(error)
        finally:
            call.cancel()  # the rest of the stream is not wanted; after its end this does nothing

    def _receive(
        self, key: RequestKey, layout: KVLayout, stream: Iterator[pb.RestoreResponse]
    ) -> tuple[RequestRecord, bytearray, int]:
        record = msgspec.msgpack.decode(next(stream).record, type=RequestRecord)
        raw, slot_bytes, positions = bytearray(), layout.slot_bytes, 0
        while positions < record.watermark:
            part = next(stream, None)
            if part is None:
                break
            page = part.page
            good = unframe(key, page.epoch, layout.fingerprint, page.page, page.slots, slot_bytes, layout.page_size)
            raw += good.raw
            positions += good.slots
            if good.slots < layout.page_size:
                if positions < record.watermark:
                    ABSENT_PAGES.labels(str(good.reason)).inc()
                break
        positions = min(positions, record.watermark)
        del raw[positions * slot_bytes :]
        return record, raw, positions

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
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            raise ValueError(text) from error
        raise error


def _status(error: Any) -> tuple[grpc.StatusCode, str]:
    return error.code(), error.details() or error.code().name


def _batches(writes: Sequence[SlotWrite]) -> Iterator[list[SlotWrite]]:
    """Messages of about `_KV_MESSAGE`; a larger write is cut at page borders, so that whole pages stay whole."""
    batch: list[SlotWrite] = []
    size = 0
    for write in (piece for whole in writes for piece in _cut(whole)):
        if batch and size + len(write.data) > _KV_MESSAGE:
            yield batch
            batch, size = [], 0
        batch.append(write)
        size += len(write.data)
    if batch:
        yield batch


def _cut(write: SlotWrite) -> Iterator[SlotWrite]:
    if len(write.data) <= _KV_MESSAGE:
        yield write
        return
    step, stop = framed_size(write.slot_bytes), write.start + write.count
    pages = max(1, _KV_MESSAGE // (step * write.page_size))
    start = write.start
    while start < stop:
        until = min(stop, (start // write.page_size + pages) * write.page_size)
        data = write.data[(start - write.start) * step : (until - write.start) * step]
        yield msgspec.structs.replace(write, start=start, count=until - start, data=data)
        start = until
