from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from daemon_rig import Daemon, Pages

from context_daemon.client import ContextClient
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


@pytest.fixture
def own_servers(tmp_path: Path) -> Iterator[EmbeddedServers]:
    with EmbeddedServers(tmp_path) as embedded:
        yield embedded


@pytest.fixture
def daemon(own_servers: EmbeddedServers) -> Iterator[Daemon]:
    running = Daemon(own_servers)
    try:
        yield running.start()
    finally:
        if running.process is not None and running.process.poll() is None:
            running.end(signal.SIGKILL)


@pytest.fixture
def client(daemon: Daemon) -> Iterator[ContextClient]:
    made = ContextClient(f"127.0.0.1:{daemon.port}")
    yield made
    made.close()


@pytest.fixture
def pages(client: ContextClient) -> Pages:
    return Pages(client)


@pytest.fixture
def elsewhere(own_servers: EmbeddedServers) -> Iterator[ContextClient]:
    """Another node's daemon over the same stores: nothing but the KV store gives it pages."""
    running = Daemon(own_servers, "node-2").start()
    made = ContextClient(f"127.0.0.1:{running.port}")
    yield made
    made.close()
    running.end(signal.SIGKILL)
