"""A store call that is cancelled ends its caller, whatever became of the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

from context_daemon.redis_kv import RedisKV
from context_daemon.redis_server import EmbeddedServers


@pytest.fixture
async def kv(servers: EmbeddedServers) -> AsyncIterator[RedisKV]:
    made = RedisKV(servers.kv.url)
    await made.ping()
    yield made
    await made.close()


async def deaf(write: Awaitable[Any], timeout: float) -> Any:
    """As `asyncio.wait_for` of Python 3.11 when the write ends at the moment of the cancellation."""
    result = await write
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        return result
    raise AssertionError("it was cancelled")


@pytest.mark.parametrize("call", ["ping", "generation"])  # a command, and a pipeline
async def test_a_cancellation_that_the_client_lost_is_heard(
    kv: RedisKV, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(asyncio, "wait_for", deaf)
    with pytest.raises(asyncio.CancelledError):
        await getattr(kv, call)()
    monkeypatch.undo()
    assert await kv.generation() == await kv.generation(), "whoever cleans up after it may go on using the store"


async def test_it_is_heard_of_a_server_that_has_gone(
    own_servers: EmbeddedServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call fails, too: a caller that waits for the store to come back must end all the same."""
    kv = RedisKV(own_servers.kv.url)
    await kv.ping()
    own_servers.kv.kill()
    monkeypatch.setattr(asyncio, "wait_for", deaf)
    with pytest.raises(asyncio.CancelledError):
        await kv.ping()
    await kv.close()
