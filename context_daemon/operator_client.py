"""What the orchestrator asks context daemons on an operator's behalf."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from context_daemon import wire
from context_daemon.records import RequestKey
from context_daemon.store import StoreUnavailable
from protos import context_pb2 as pb
from protos.context_pb2_grpc import ContextServiceStub

T = TypeVar("T")
_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 64 << 20)]


async def list_pages(
    address: str, timeout_s: float, job_id: str = "", key: RequestKey | None = None, stored: bool = False
) -> pb.ListPagesResponse:
    """Raises StoreUnavailable for a daemon that does not answer in time."""
    one = wire.key_to_pb(key) if key else None
    request = pb.ListPagesRequest(job_id=job_id, key=one, stored=stored)
    return await _asked(address, lambda stub: stub.ListPages(request, timeout=timeout_s))


async def collect_pages(address: str, timeout_s: float, dry_run: bool, stored: bool) -> pb.CollectPagesResponse:
    """Raises StoreUnavailable for a daemon, or a store behind it, that does not answer in time."""
    request = pb.CollectPagesRequest(dry_run=dry_run, stored=stored)
    return await _asked(address, lambda stub: stub.CollectPages(request, timeout=timeout_s))


async def _asked(address: str, call: Callable[[ContextServiceStub], Awaitable[T]]) -> T:
    try:
        async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
            return await call(ContextServiceStub(channel))
    except grpc.aio.AioRpcError as error:
        raise StoreUnavailable(f"context daemon {address}: {error.details() or error.code().name}") from error
