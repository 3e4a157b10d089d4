"""From exceptions to gRPC status: the one place where codes are chosen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc

from context_daemon.observability import get_logger
from context_daemon.store import Conflict, StoreUnavailable
from orchestrator.api.fleet_view import UnknownWorker
from orchestrator.client import LINE_ERRORS_KEY, STORE_AWAY_KEY
from orchestrator.context_view import UnknownRequest
from orchestrator.fleet.cloud import FaultsUnsupported
from orchestrator.jobs.service import InvalidBatch, UnknownJob, UnknownModel
from protos import jobs_pb2

log = get_logger()

# Clients refuse trailers beyond 8 KiB with RESOURCE_EXHAUSTED, which would hide the refusal itself. Binary metadata grows
# by a third on the wire; the first errors are the ones that are read.
_TEXT_BYTES = 2000
_LINE_BYTES = 600
_DETAIL_BYTES = 4000

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (InvalidBatch, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownJob, grpc.StatusCode.NOT_FOUND),
    (UnknownRequest, grpc.StatusCode.NOT_FOUND),
    (UnknownModel, grpc.StatusCode.NOT_FOUND),
    (UnknownWorker, grpc.StatusCode.NOT_FOUND),
    (Conflict, grpc.StatusCode.ALREADY_EXISTS),
    (FaultsUnsupported, grpc.StatusCode.FAILED_PRECONDITION),
    (StoreUnavailable, grpc.StatusCode.UNAVAILABLE),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
)


async def abort(context: Context, error: Exception) -> NoReturn:
    """End the call with the code that fits; an error that fits none is INTERNAL, and logged."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            await context.abort(code, _text(error), _details(error))
    log.error("internal_error", error=repr(error), exc_info=error)
    await context.abort(
        grpc.StatusCode.INTERNAL, _shortened(f"internal error, see the orchestrator's log: {error!r}", _TEXT_BYTES)
    )
    raise RuntimeError("context.abort returned") from error


async def answered(context: Context, call: Callable[[], Awaitable[T]]) -> T:
    """Await `call`; what it raises becomes the call's status."""
    try:
        return await call()
    except Exception as error:  # noqa: BLE001 - every failure must become a status
        await abort(context, error)


def _text(error: Exception) -> str:
    """The status text, short enough for a trailer: what does not fit is told by the details, or by fewer errors at once."""
    lines = [str(error)]
    if isinstance(error, InvalidBatch) and len(error.errors) > 1:
        lines += [f"line {item.line}: {item.message}" if item.line else item.message for item in error.errors[:20]]
    text, room = "", _TEXT_BYTES
    for line in lines:
        part = _shortened(line, min(room, _LINE_BYTES))
        room -= _wire_bytes(part) + 3
        if room < 0:
            break
        text += part + "\n"
    return text.removesuffix("\n")


def _shortened(text: str, most: int) -> str:
    if _wire_bytes(text) <= most:
        return text
    while text and _wire_bytes(text) > most - 9:  # an ellipsis is three bytes, nine when escaped
        text = text[: len(text) * 9 // 10]
    return text + "…"


def _wire_bytes(text: str) -> int:
    """gRPC sends a status text percent-encoded: three bytes for each byte that is not printable ASCII."""
    return sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in text.encode())


def _details(error: Exception) -> tuple[tuple[str, str | bytes], ...]:
    if isinstance(error, StoreUnavailable):
        return ((STORE_AWAY_KEY, "1"),)
    if not isinstance(error, InvalidBatch):
        return ()
    message = jobs_pb2.JobErrors()
    for item in error.errors:
        one = jobs_pb2.JobError(line=item.line, param=item.param[:200], code=item.code, message=item.message[:200])
        if message.ByteSize() + one.ByteSize() + 4 > _DETAIL_BYTES:
            break
        message.errors.append(one)
    return ((LINE_ERRORS_KEY, message.SerializeToString()),)
