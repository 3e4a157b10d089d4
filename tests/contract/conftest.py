from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from daemon_rig import Daemon, Pages
from transfer_rig import Node, Pair, Proxy, attached

from context_daemon.client import ContextClient
from context_daemon.kv_writer import KVWriter
from context_daemon.memory_store import MemoryStore
from context_daemon.records import RequestKey
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


# -- two nodes ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def pair(servers: EmbeddedServers, pair_folder: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        urls = (servers.durable.url, servers.kv.url)
        source = Node("source", pair_folder, *urls, "--arena-bytes", "256MiB", advertise="127.0.0.2")
        stack.callback(source.kill)
        target = Node("target", pair_folder, *urls)
        stack.callback(target.kill)
        target.ready()
        proxy = Proxy("127.0.0.2", source.ready(), source.door(RequestKey("none", 1))[0])
        stack.callback(proxy.close)
        yield Pair(source, target, proxy)


@pytest.fixture
def there(pair: Pair) -> KVWriter:
    """A worker of the target's, who can use such pages."""
    pair.proxy.faults, pair.proxy.always = [], None
    return attached(pair.target.client())


@pytest.fixture
async def durable(servers: EmbeddedServers) -> AsyncIterator[RedisStore]:
    made = RedisStore(servers.durable.url)
    yield made
    await made.close()


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    """One of the test's own: the daemons are shared."""
    return "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
