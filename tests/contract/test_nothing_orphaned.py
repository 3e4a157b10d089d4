"""10,000 short requests over a real daemon and real servers, through crashes of workers and daemon, fences, hand-backs and
cancels: nothing is left of them but the jobs' own records.

`TIDEOVER_ORPHANS_SEED` repeats a run (as far as the machine's timing does), `TIDEOVER_ORPHANS_REQUESTS` its length.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import re
import secrets
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import redis
from daemon_rig import PROMPT, Daemon, until
from store_samples import job_record, spec

from context_daemon.operator_client import collect_pages, list_pages
from context_daemon.records import InterruptionCause, JobState, Lease
from context_daemon.redis_server import EmbeddedServers
from context_daemon.redis_store import RedisStore
from context_daemon.store import LeaseRequest
from tests.contract import orphan_worker

REQUESTS = int(os.environ.get("TIDEOVER_ORPHANS_REQUESTS", "10000"))
SEED = int(os.environ.get("TIDEOVER_ORPHANS_SEED", "0")) or secrets.randbelow(1 << 31)
JOBS, BATCH, WORKERS = 10, 100, 2
_POOLED = 32  # connections to the stores stay open: as many as calls were ever under way at once
SPAWN = multiprocessing.get_context("forkserver")  # a fork of a process that has nothing open yet takes milliseconds


@dataclass(slots=True)
class Process:
    """A worker that is alive, and its end of the pipe."""

    name: str
    process: multiprocessing.process.BaseProcess
    pipe: Connection

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass(frozen=True)
class Census:
    """What the daemon holds of the machine."""

    descriptors: int
    threads: int
    arenas: int

    @staticmethod
    def of(pid: int) -> Census:
        links: list[str] = []
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed at this moment
                links.append(str(path.readlink()))
        arenas = sum("tideover-arena" in link for link in links)
        return Census(len(links), psutil.Process(pid).num_threads(), arenas)


class Storm:
    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.draw, self.counts, self.names = draw, Counter[str](), 0
        self.servers = EmbeddedServers(folder).start()
        self.daemon = Daemon(self.servers, "node-1", "--arena-bytes", "4MiB", "--worker-ttl", "1").start()
        self.store = RedisStore(self.servers.durable.url)
        self.workers = [self.spawn() for _ in range(WORKERS)]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.daemon.port}"

    @property
    def pid(self) -> int:
        assert self.daemon.process is not None
        return self.daemon.process.pid

    def spawn(self) -> Process:
        self.names += 1
        name = f"w{self.names}"
        ours, theirs = SPAWN.Pipe()
        arguments = (self.address, name, self.draw.randrange(1 << 31), theirs)
        process = SPAWN.Process(target=orphan_worker.serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return Process(name, process, ours)

    # -- a job ------------------------------------------------------------------------------------------------------
    async def run(self, job_id: str, lines: int) -> None:
        await self.store.create_job(job_record(job_id))
        await self.store.add_requests(job_id, [spec(line, PROMPT) for line in range(1, lines + 1)])
        await self.store.start_job(job_id, lines)
        cancel_at = lines // 2 if self.draw.random() < 0.3 else -1
        await asyncio.gather(*(self._work(job_id, slot, cancel_at) for slot in range(WORKERS)))
        job = await self.store.finish_job(job_id, 1)
        assert job.completed + job.failed == job.total == lines
        assert job.state in (JobState.COMPLETED, JobState.CANCELLED)

    async def _work(self, job_id: str, slot: int, cancel_at: int) -> None:
        """One worker after another in this place, until the job has nothing for it."""
        while True:
            job = await self.store.get_job(job_id)
            assert job is not None
            if 0 <= cancel_at <= job.completed and job.state is JobState.IN_PROGRESS:
                await self._cancel(job_id)
            worker, leases = self.workers[slot], await self._leased(job_id, self.workers[slot].name)
            if leases:
                await self._batch(job_id, slot, worker, leases)
            elif job.completed + job.failed == job.total:
                return
            else:
                await asyncio.sleep(0.01)

    async def _leased(self, job_id: str, worker: str) -> list[Lease]:
        ready = await self.store.ready_requests(job_id, BATCH)
        return await self.store.lease(job_id, 1, [LeaseRequest(r.key, r.epoch, worker, "cpu-1") for r in ready])

    async def _cancel(self, job_id: str) -> None:
        await self.store.cancel_job(job_id)
        while await self.store.cancel_requests(job_id, 1):
            pass
        self.counts["cancelled jobs"] += 1

    async def _batch(self, job_id: str, slot: int, worker: Process, leases: list[Lease]) -> None:
        answer = asyncio.create_task(self._told(worker, leases))
        left, killed = None, self.draw.random() < 0.2
        if killed:
            await asyncio.sleep(self.draw.uniform(0.0, 0.3))
            worker.process.kill()
            self.counts["workers killed"] += 1
        elif self.draw.random() < 0.1:
            await asyncio.sleep(self.draw.uniform(0.0, 0.1))
            await self._requeue(job_id, self.draw.sample(leases, len(leases) // 4))
            self.counts["fenced"] += len(leases) // 4
        elif self.draw.random() < 0.04:
            await asyncio.sleep(self.draw.uniform(0.0, 0.3))
            await asyncio.to_thread(self.restart_daemon)
        try:
            left = await answer
        except (EOFError, OSError):
            killed = True
        if killed:
            worker.kill()
            self.workers[slot] = self.spawn()
        await self._requeue(job_id, leases if left is None else left)

    @staticmethod
    async def _told(worker: Process, leases: list[Lease]) -> list[Lease] | None:
        worker.pipe.send(leases)
        answer: list[Lease] | None = await asyncio.to_thread(worker.pipe.recv)
        return answer

    async def _requeue(self, job_id: str, leases: list[Lease]) -> None:
        keys = [(one.key, one.token) for one in leases]
        await self.store.requeue(job_id, 1, keys, InterruptionCause.WORKER_DIED)

    def restart_daemon(self) -> None:
        self.daemon.end(signal.SIGKILL)
        self.daemon.start()
        self.counts["daemons killed"] += 1

    # -- the end ----------------------------------------------------------------------------------------------------
    def end_workers(self) -> None:
        """One in order, the others not."""
        self.workers[0].pipe.send(None)
        self.workers[0].process.join()
        for worker in self.workers[1:]:
            worker.kill()
        self.workers.clear()

    async def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        if self.daemon.process is not None and self.daemon.process.poll() is None:
            self.daemon.end(signal.SIGTERM)
        await self.store.close()
        self.servers.stop()


@pytest.fixture
async def storm(tmp_path: Path) -> AsyncIterator[Storm]:
    SPAWN.set_forkserver_preload(["tests.contract.orphan_worker"])
    made = Storm(tmp_path / "servers", random.Random(SEED))
    yield made
    await made.close()


def names(url: str) -> Counter[str]:
    """How many keys there are of each kind."""
    with redis.Redis.from_url(url) as server:
        found = [name.decode() for name in server.scan_iter(count=5000)]
    return Counter(re.sub(r"\{[^}]*\}:([a-z]+).*", r"\1", re.sub(r"(reqid|mark):.*", r"\1", name)) for name in found)


def expires(url: str, pattern: str) -> bool:
    with redis.Redis.from_url(url) as server:
        return all(server.ttl(name) > 0 for name in server.scan_iter(pattern, count=5000))


def left_in_shared_memory() -> list[Path]:
    return list(Path("/dev/shm").glob("*tideover*"))


async def test_nothing_is_left_of_ten_thousand_requests(storm: Storm, tmp_path: Path) -> None:
    print(f"TIDEOVER_ORPHANS_SEED={SEED}")
    files = sorted(path.name for path in (tmp_path / "servers").rglob("*"))
    await storm.run("warm", 200)
    await collect_pages(storm.address, 30.0, dry_run=False, stored=True)
    before = Census.of(storm.pid)
    for number in range(JOBS):
        await storm.run(f"job-{number}", REQUESTS // JOBS)
    storm.end_workers()
    print(dict(storm.counts))
    collected = await collect_pages(storm.address, 60.0, dry_run=False, stored=True)
    print(dict(collected.stored_pages), collected.arena_requests, collected.dead_blocks)
    held = await list_pages(storm.address, 30.0, stored=True)
    assert not held.arena and not held.stored and held.arena_used_bytes == 0
    assert names(storm.servers.kv.url) == {"kv:generation": 1}
    assert Census.of(storm.pid).arenas == before.arenas == 2, "the one arena and its mapping"
    print(before, Census.of(storm.pid))
    await asyncio.to_thread(until, lambda: Census.of(storm.pid).descriptors <= before.descriptors + _POOLED)
    await asyncio.to_thread(until, lambda: Census.of(storm.pid).threads <= before.threads + 4)
    assert left_in_shared_memory() == [] and sorted(path.name for path in (tmp_path / "servers").rglob("*")) == files
    await only_the_jobs_are_left(storm)


async def only_the_jobs_are_left(storm: Storm) -> None:
    await asyncio.sleep(1.1)  # a heartbeat counts for one second here
    assert await storm.store.workers() == [] and await storm.store.active_jobs() == []
    jobs, lines = JOBS + 1, REQUESTS // JOBS * JOBS + 200
    found = names(storm.servers.durable.url)
    assert found.pop("to:intr") <= jobs and lines // 2 < found.pop("to:t") <= lines
    assert found.pop("to:mark") >= 1 and expires(storm.servers.durable.url, "to:mark:*"), (
        "one for each life of a daemon"
    )
    assert found == {"to:meta": jobs, "to:results": jobs, "to:r": lines, "to:reqid": jobs, "to:jobs": 1}
