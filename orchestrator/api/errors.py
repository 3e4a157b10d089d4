"""From exceptions to gRPC status: the one place where codes are chosen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from context_daemon.observability import get_logger
from context_daemon.store import Conflict, StoreUnavailable
from orchestrator.api.fleet_view import UnknownWorker
from orchestrator.client import LINE_ERRORS_KEY
from orchestrator.fleet.cloud import FaultsUnsupported
from orchestrator.jobs.service import InvalidBatch, UnknownJob, UnknownModel
from protos import jobs_pb2

log = get_logger()

Context = grpc.aio.ServicerContext[Any, Any]

_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (InvalidBatch, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownJob, grpc.StatusCode.NOT_FOUND),
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
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error: {error!r}; the orchestrator's log has the details")
    raise RuntimeError("context.abort returned") from error


async def answered(context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
    """Await `call`; what it raises becomes the call's status."""
    try:
        return await call()
    except Exception as error:  # noqa: BLE001 - every failure must become a status
        await abort(context, error)


def _text(error: Exception) -> str:
    if isinstance(error, InvalidBatch):
        lines = [f"line {item.line}: {item.message}" if item.line else item.message for item in error.errors[:20]]
        return "\n".join([str(error), *lines]) if len(lines) > 1 else str(error)
    return str(error)


def _details(error: Exception) -> tuple[tuple[str, bytes], ...]:
    if not isinstance(error, InvalidBatch):
        return ()
    errors = [
        jobs_pb2.JobError(line=item.line, param=item.param, code=item.code, message=item.message[:500])
        for item in error.errors
    ]
    # Metadata is bounded by clients at 8 KiB; the first errors are the ones that are read.
    message = jobs_pb2.JobErrors()
    for item in errors:
        if message.ByteSize() + item.ByteSize() > 6000:
            break
        message.errors.append(item)
    return ((LINE_ERRORS_KEY, message.SerializeToString()),)
