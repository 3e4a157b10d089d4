from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from context_daemon.memory_store import MemoryStore
from context_daemon.redis_script import connect
from context_daemon.redis_server import EmbeddedServers
from context_daemon.redis_store import RedisStore
from context_daemon.store import ContextStore


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServers]:
    folder: Path = tmp_path_factory.mktemp("servers")
    with EmbeddedServers(folder) as embedded:
        yield embedded


@pytest.fixture(params=["redis", "memory"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[ContextStore]:
    made: ContextStore
    if request.param == "redis":
        url = request.getfixturevalue("servers").durable.url
        client = connect(url, 2.0)
        await client.flushall()
        await client.aclose()
        made = RedisStore(url)
    else:
        made = MemoryStore()
    yield made
    await made.close()
