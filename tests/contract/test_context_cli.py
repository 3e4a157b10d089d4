"""`tideover context ls | show | gc` over the real API, two real daemons and real Redis servers."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result
from daemon_rig import LAYOUT, PROMPT, Daemon, Pages, lease, mark, restore, start_job, until

from context_daemon.client import ContextClient
from context_daemon.kv_slots import framed_size
from context_daemon.records import Finish, InterruptionCause, Lease, RequestKey, TokenCommit, WorkerStatus
from context_daemon.redis_server import EmbeddedServers, free_port
from context_daemon.redis_store import RedisStore
from orchestrator.api.server import serve
from orchestrator.cli import main
from orchestrator.context_view import ContextView
from orchestrator.jobs.service import JobService
from orchestrator.jobs.validation import ModelLimits
from tests.contract.test_jobs_api import Fleet
from tests.unit.byte_tokenizer import VOCAB_SIZE, byte_tokenizer

ROW = framed_size(LAYOUT.slot_bytes)
ATTACHED = """
import sys
sys.path.insert(0, "tests/contract")
from daemon_rig import Pages
from context_daemon.client import ContextClient
pages = Pages(ContextClient(sys.argv[1]))
print("attached", flush=True)
sys.stdin.read()
"""


class Cluster:
    """Servers, two daemons with a client and a heartbeat each, and the API in a thread of its own.

    Daemons are asked in the order of their addresses, and one of them goes through the KV servers: `first` is that one.
    """

    def __init__(self, folder: Path, first: str = "n1") -> None:
        self.servers = EmbeddedServers(folder).start()
        self.daemons = [daemon.start() for daemon in self._ordered(first)]
        self.clients = [ContextClient(f"127.0.0.1:{daemon.port}") for daemon in self.daemons]
        self.address = f"127.0.0.1:{free_port()}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.store, self._server = self.run(self._serve())
        self.beat()

    def _ordered(self, first: str) -> list[Daemon]:
        while True:  # until the ports fall so
            made = [Daemon(self.servers, f"n{n}", "--kv-price-per-gb", "0.02") for n in (1, 2)]
            addresses = [f"127.0.0.1:{daemon.port}" for daemon in made]
            if addresses[0] != addresses[1] and (min(addresses) == addresses[0]) == (first == "n1"):
                return made

    async def _serve(self) -> tuple[RedisStore, Any]:
        store = RedisStore(self.servers.durable.url)
        jobs = JobService(store, byte_tokenizer(), ModelLimits("m", 100, VOCAB_SIZE), {}, time.time)
        return store, await serve(self.address, jobs, Fleet(), ContextView(store))

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(20)

    def beat(self) -> None:
        for number, client in enumerate(self.clients, 1):
            status = WorkerStatus(
                f"w{number}", f"n{number}", "m", "cpu-1", 1, 0, 0, 8, 0, 9, 4, 99, 0.0, (), False, "ready", "", 1
            )
            client.heartbeat(status)
        until(lambda: len(self.run(self.store.workers())) == len(self.clients))

    def tideover(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["context", *arguments, "--address", self.address])

    def json(self, *arguments: str) -> Any:
        self.beat()
        done = self.tideover(*arguments, "--json")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def stored(self) -> set[tuple[int, int]]:
        """(line, epoch) of which the KV server has pages."""
        with redis.Redis.from_url(self.servers.kv.url) as server:
            names = [name.decode().split(":") for name in server.keys("kv:*:job:*")]
        return {(int(parts[3].split(".")[0]), int(parts[4])) for parts in names}

    def stop(self) -> None:
        for client in self.clients:
            client.close()
        for daemon in self.daemons:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.end(signal.SIGKILL)
        self.run(self._server.stop(None))
        self.run(self.store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.servers.stop()


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(tmp_path, getattr(request, "param", "n1"))
    yield made
    made.stop()


either_first = pytest.mark.parametrize("cluster", ["n1", "n2"], indirect=True)


def committed(cluster: Cluster, owner: Lease, pages: Pages, node: int = 0) -> None:
    """Eleven positions of KV in the arena and the store, the first eight named by a watermark, and two tokens."""
    pages.put(owner, 0, 11)
    pages.stored(owner, 11)
    cluster.clients[node].commit([TokenCommit(owner.key, owner.token, 0, (5, 6), mark(8))])


def places(item: Mapping[str, Any]) -> dict[str, Any]:
    return {place["node_id"] or "store": place for place in item["places"]}


@either_first
def test_what_is_kept_of_a_request_and_where(cluster: Cluster) -> None:
    cluster.run(start_job(cluster.store))
    owner, pages = cluster.run(lease(cluster.store, 1, "w1")), Pages(cluster.clients[0])
    committed(cluster, owner, pages)
    found = cluster.json("ls")
    (item,) = found["items"]
    assert (item["request"], item["state"], item["epoch"], item["tokens"], item["watermark"]) == (
        "job/1",
        "leased",
        1,
        2,
        8,
    )
    here = places(item)
    assert here.keys() == {"store", "n1"}
    assert (here["store"]["restorable"], here["store"]["pages"], here["store"]["bytes"]) == (8, 3, 11 * ROW)
    assert (here["n1"]["restorable"], here["n1"]["pages"], here["n1"]["owner_epoch"]) == (11, 3, 1)
    assert [node["node_id"] for node in found["nodes"]] == ["n1", "n2"] and found["kv_error"] == ""
    assert found["nodes"][0]["money_per_hour"]["store"] > 0 == found["nodes"][1]["money_per_hour"]["store"]
    (one,) = cluster.json("show", "job/1")["items"]
    assert [(p["page"], p["epoch"], p["bytes"]) for p in places(one)["store"]["held"]] == [
        (0, 1, 4 * ROW), (1, 1, 4 * ROW), (2, 1, 3 * ROW)]  # fmt: skip
    assert one["segments"] == [{"epoch": 1, "first_page": 0}]
    text = cluster.tideover("show", "job/1").output
    assert "a restore wants 11 positions and finds" in text and "n1: 11 of layout" in text and "KV store: 8 of" in text
    listed = cluster.tideover("ls", "job").output
    assert "job/1" in listed and "8 in" in listed and "n1: 11 in" in listed


@either_first
def test_a_hole_in_the_store_ends_what_a_restore_finds(cluster: Cluster) -> None:
    cluster.run(start_job(cluster.store))
    owner, pages = cluster.run(lease(cluster.store, 1, "w1")), Pages(cluster.clients[0])
    committed(cluster, owner, pages)
    with redis.Redis.from_url(cluster.servers.kv.url) as server:
        server.delete(f"kv:{LAYOUT.fingerprint}:job:1.0:1:1")
    (item,) = cluster.json("ls", "job")["items"]
    assert places(item)["store"]["restorable"] == 4


@either_first
def test_garbage_goes_and_what_is_needed_stays(cluster: Cluster) -> None:
    cluster.run(start_job(cluster.store, 5))
    owners = [cluster.run(lease(cluster.store, line, "w1")) for line in (1, 2, 3)]
    pages = Pages(cluster.clients[0])
    for owner in owners:
        committed(cluster, owner, pages)
    lost = cluster.run(lease(cluster.store, 4, "w1"))
    pages.put(lost, 0, 8)
    pages.stored(lost, 8)  # no watermark ever tells of it
    store = cluster.store
    cluster.run(store.requeue("job", 1, [(o.key, o.token) for o in (owners[1], lost)], InterruptionCause.WORKER_DIED))
    end = TokenCommit(owners[2].key, owners[2].token, 2, (7,), finish=Finish(True, b"{}"))
    cluster.run(store.commit([end]))  # its daemon does not hear of it
    with redis.Redis.from_url(cluster.servers.kv.url) as server:
        server.set(f"kv:{LAYOUT.fingerprint}:nobody:1.0:1:0", b"x" * ROW)
        server.set(f"kv:{LAYOUT.fingerprint}:job:1.0:2:0", b"x" * ROW)  # of an owner that takes over at this moment
    gone = {"over": 3, "unnamed": 2, "unknown": 1}
    would = cluster.json("gc", "--dry-run")
    assert would["stored_pages"] == gone and would["dry_run"] and would["arena_requests"] == 1
    assert cluster.stored() == {(1, 1), (1, 2), (2, 1), (3, 1), (4, 1)}, "a dry run leaves all as it is"
    done = cluster.json("gc")
    assert done["stored_pages"] == gone and done["stored_bytes"] == would["stored_bytes"] == (11 + 8 + 1) * ROW
    assert cluster.stored() == {(1, 1), (1, 2), (2, 1)}
    assert {item["request"] for item in cluster.json("ls")["items"]} == {"job/1", "job/2", "job/4"}
    assert cluster.json("gc")["stored_pages"] == {}
    second = cluster.run(lease(store, 2, "w2", epoch=2))
    restored = restore(cluster.clients[1], second.key, second.token, "w2", LAYOUT)
    assert restored.positions == 11 and restored.record.tokens == (5, 6)


def test_a_dead_workers_blocks_come_back(cluster: Cluster) -> None:
    address = f"127.0.0.1:{cluster.daemons[0].port}"
    command = [sys.executable, "-c", ATTACHED, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "attached\n"
        assert cluster.json("gc")["dead_blocks"] == 0
        worker.kill()
    assert cluster.json("gc", "--dry-run")["dead_blocks"] == 64 == cluster.json("gc")["dead_blocks"]
    assert cluster.json("ls")["nodes"][0]["arena_used_bytes"] == 0


def test_what_is_away_is_named(cluster: Cluster) -> None:
    cluster.run(start_job(cluster.store))
    owner, pages = cluster.run(lease(cluster.store, 1, "w1")), Pages(cluster.clients[0])
    committed(cluster, owner, pages)
    cluster.servers.kv.kill()
    found = cluster.json("ls")
    assert "does not answer" in found["kv_error"] and places(found["items"][0]).keys() == {"n1"}
    collected = cluster.tideover("gc")
    assert collected.exit_code == 1 and "not collected" in collected.stderr
    cluster.daemons[1].end(signal.SIGKILL)
    (node,) = [node for node in json.loads(cluster.tideover("ls", "--json").stdout)["nodes"] if node["error"]]
    assert str(cluster.daemons[1].port) in node["error"]
    assert "arena not asked" in cluster.tideover("ls").stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ls", "nothing"], "no job 'nothing'"),
        (["ls", "a{b"], "job id 'a{b'"),
        (["show", "nothing/1"], "no job 'nothing'"),
        (["show", "job/99"], "no request job/99"),
        (["show", "job/1.7"], "no request job/1.7"),
        (["show", "job"], "JOB/LINE"),
        (["show", "job/0"], "JOB/LINE"),
        (["show", "job/1.x"], "JOB/LINE"),
        (["ls", "--limit", "0"], "0"),
    ],
)
def test_what_is_asked_wrongly_is_said(asked: Callable[..., Result], arguments: list[str], says: str) -> None:
    refused = asked(*arguments)
    assert refused.exit_code == 2 and says in refused.stderr


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Result]]:
    made = Cluster(tmp_path_factory.mktemp("asked"))
    made.run(start_job(made.store))
    yield made.tideover
    made.stop()


def test_no_cluster_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("TIDEOVER_ADDRESS", raising=False)
    refused = CliRunner().invoke(main, ["context", "ls"])
    assert refused.exit_code == 2 and "no cluster is up here" in refused.stderr


def test_more_than_the_limit_is_not_dropped_in_silence(cluster: Cluster) -> None:
    cluster.run(start_job(cluster.store, 4))
    for line in (1, 2, 3):
        cluster.run(lease(cluster.store, line, "w1"))
    found = cluster.json("ls", "--limit", "2")
    assert [item["line"] for item in found["items"]] == [1, 2] and found["left_off"] == 1
    assert "1 more requests" in cluster.tideover("ls", "--limit", "2").stderr
    assert found["items"][0]["prompt_tokens"] == PROMPT and RequestKey("job", 1).choice == found["items"][0]["choice"]
