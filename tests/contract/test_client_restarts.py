"""The client over an orchestrator that goes away and comes back on its port: nothing repeated, nothing skipped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from context_daemon.memory_store import MemoryStore
from context_daemon.records import Finish, TokenCommit
from context_daemon.redis_server import free_port
from context_daemon.store import LeaseRequest, StoreUnavailable
from orchestrator import client as client_module
from orchestrator.api.server import serve
from orchestrator.client import NotReached, TideoverClient, TideoverError
from orchestrator.context_view import ContextView
from orchestrator.jobs.service import JobService
from orchestrator.jobs.validation import ModelLimits
from protos import jobs_pb2
from tests.contract.test_jobs_api import LINES, Fleet, line
from tests.unit.byte_tokenizer import VOCAB_SIZE, byte_tokenizer


class Api:
    """A server that can be stopped and started again over the same store."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.address = f"127.0.0.1:{free_port('127.0.0.1')}"
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        limits = ModelLimits("m", 100, VOCAB_SIZE)
        service = JobService(self.store, byte_tokenizer(), limits, {}, time.time)
        self._server = await serve(self.address, service, Fleet(), ContextView(self.store))

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(grace=None)

    async def finish(self, job_id: str, count: int) -> None:
        ready = await self.store.ready_requests(job_id, count)
        leases = await self.store.lease(job_id, 1, [LeaseRequest(r.key, r.epoch, "w1", "c") for r in ready])
        for lease in leases:
            finish = Finish(True, b'{"line":%d}' % lease.key.line)
            await self.store.commit([TokenCommit(lease.key, lease.token, 0, (1,), finish=finish)])
        await self.store.finish_job(job_id, 1)


def _file(folder: Path) -> Path:
    file = folder / "batch.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in LINES))
    return file


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    running = Api()
    await running.start()
    yield running
    await running.stop()


async def _line_count(seen: list[Any], count: int) -> None:
    """`seen` grows in another thread."""
    for _ in range(1000):
        if len(seen) >= count:
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"{len(seen)} came, {count} were to")


async def test_no_line_is_repeated_or_skipped_through_many_restarts(api: Api, tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("\n".join(json.dumps(line(f"c{i}")) for i in range(1, 61)))
    with TideoverClient(api.address) as client:
        job = await asyncio.to_thread(client.create_job, file, request_id="r")
        seen: list[jobs_pb2.StreamResultsResponse] = []
        follow = asyncio.to_thread(lambda: seen.extend(client.stream_results(job.job_id, follow=True)))
        reading = asyncio.create_task(follow)
        for done in (7, 20, 33):  # lines come while the API is up, while it goes, and while it is away
            await api.finish(job.job_id, done - len(await api.store.results(job.job_id, 0, 100)))
            await _line_count(seen, done - 1)
            await asyncio.gather(api.stop(), api.finish(job.job_id, 3))
            await api.finish(job.job_id, 2)
            await api.start()
        await api.finish(job.job_id, 60)
        await asyncio.wait_for(reading, 20)
    assert [item.index for item in seen] == list(range(60))
    assert sorted(item.line for item in seen) == list(range(1, 61))
    assert [(item.line, item.payload) for item in seen] == [
        (item.line, item.payload) for item in await api.store.results(job.job_id, 0, 100)
    ]


async def test_each_outage_of_a_quiet_stream_has_the_whole_patience(api: Api, tmp_path: Path) -> None:
    """A stream that stands again ends an outage, also when it has nothing to say."""
    told: list[str] = []
    with TideoverClient(api.address, patience_s=2.5, on_away=told.append) as client:
        job = await asyncio.to_thread(client.create_job, _file(tmp_path), request_id="r")
        reading = asyncio.create_task(
            asyncio.to_thread(lambda: [item.index for item in client.stream_results(job.job_id, follow=True)])
        )
        await asyncio.sleep(0.5)
        for _ in range(3):
            await api.stop()
            await asyncio.sleep(1.2)
            await api.start()
            await asyncio.sleep(1.5)
        await api.finish(job.job_id, 3)
        assert await asyncio.wait_for(reading, 20) == [0, 1, 2]
    assert len(told) == 3 and "does not answer any more" in told[0] and "2.5 s" in told[0]


async def test_watching_goes_on(api: Api, tmp_path: Path) -> None:
    with TideoverClient(api.address) as client:
        job = await asyncio.to_thread(client.create_job, _file(tmp_path), request_id="r")
        seen: list[jobs_pb2.WatchJobResponse] = []
        watching = asyncio.create_task(asyncio.to_thread(lambda: seen.extend(client.watch_job(job.job_id, 0.1))))
        await _line_count(seen, 1)
        await api.stop()
        await api.finish(job.job_id, 3)
        await api.start()
        await asyncio.wait_for(watching, 20)
    assert seen[-1].job.state == jobs_pb2.JOB_STATE_COMPLETED


@pytest.mark.parametrize("outage_s", [0.5, 4.5])
async def test_a_create_that_was_cut_off_is_sent_again_and_makes_one_job(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outage_s: float
) -> None:
    """Also as a client's first call, and after the channel's own pauses between attempts have grown."""
    arrived = asyncio.Event()
    whole = api.store.start_job

    async def never(*_: object) -> None:
        arrived.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(api.store, "start_job", never)
    with TideoverClient(api.address) as client:
        create = asyncio.create_task(asyncio.to_thread(client.create_job, _file(tmp_path), request_id="r"))
        await asyncio.wait_for(arrived.wait(), 10)
        await api.stop()
        monkeypatch.setattr(api.store, "start_job", whole)
        await asyncio.sleep(outage_s)
        await api.start()
        back = time.monotonic()
        job = await asyncio.wait_for(create, 20)
        assert time.monotonic() - back < 3.0
    assert [(item.job_id, item.total) for item in await api.store.list_jobs()] == [(job.job_id, 3)]
    assert [item.key.line for item in await api.store.ready_requests(job.job_id, 10)] == [1, 2, 3]


async def test_reads_are_repeated_and_faults_are_not(api: Api) -> None:
    with TideoverClient(api.address) as client:
        await asyncio.to_thread(client.list_jobs)
        await api.stop()
        reads: list[Callable[[], Any]] = [client.list_jobs, client.workers, client.cluster]
        running = [asyncio.create_task(asyncio.to_thread(read)) for read in reads]
        with pytest.raises(TideoverError):
            await asyncio.to_thread(client.preempt, "w1", 5.0)
        await api.start()
        await asyncio.wait_for(asyncio.gather(*running), 20)


async def test_patience_ends(api: Api) -> None:
    with TideoverClient(api.address, patience_s=0.5) as client:
        await asyncio.to_thread(client.list_jobs)
        await api.stop()
        with pytest.raises(TideoverError, match=r"does not answer any more.*tideover up") as caught:
            await asyncio.to_thread(client.list_jobs)
    assert not isinstance(caught.value, NotReached)


@pytest.mark.parametrize("address", ["127.0.0.1", "no-such-host.invalid:1"])
def test_where_nothing_ever_answered_it_is_said_soon(address: str) -> None:
    address = address if ":" in address else f"{address}:{free_port(address)}"
    began = time.monotonic()
    with TideoverClient(address) as client, pytest.raises(NotReached, match=r"no cluster answers.*tideover up"):
        client.list_jobs()
    assert time.monotonic() - began < 8


async def test_a_store_that_is_away_is_waited_for_and_named(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with TideoverClient(api.address, on_away=told.append) as client:
        whole, calls = api.store.list_jobs, 0

        async def away(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls < 4:
                raise StoreUnavailable("the durable store does not answer")
            return await whole(*args, **kwargs)

        monkeypatch.setattr(api.store, "list_jobs", away)
        assert list((await asyncio.to_thread(client.list_jobs)).jobs) == []
    assert len(told) == 1 and "is up, but the durable store does not answer" in told[0]


async def test_a_file_that_cannot_be_read_is_the_callers(api: Api, tmp_path: Path) -> None:
    with TideoverClient(api.address) as client:
        with pytest.raises(IsADirectoryError):
            await asyncio.to_thread(client.create_job, tmp_path)
        unreadable = Path("/proc/self/mem")  # opens, and fails at the first read
        with pytest.raises(OSError, match="Input/output"):
            await asyncio.to_thread(client.create_job, unreadable)
    assert await api.store.list_jobs() == []


async def test_a_frozen_machine_is_noticed_in_a_quiet_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes no connection; pings tell. The server bears pings more often than gRPC's default allows."""
    quick = {"grpc.keepalive_time_ms": 300, "grpc.http2.ping_timeout_ms": 300}
    monkeypatch.setattr(client_module, "_OPTIONS", tuple((dict(client_module._OPTIONS) | quick).items()))
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, address)
    told: list[str] = []
    try:
        with TideoverClient(address, on_away=told.append) as client:
            until = time.monotonic() + 20
            while (job := await asyncio.to_thread(_created, client, _file(tmp_path))) is None:
                assert time.monotonic() < until, "the server did not start"
            reading = threading.Thread(target=_read_until_closed, args=(client, job.job_id), daemon=True)
            reading.start()
            await asyncio.sleep(3)  # ten pings
            assert told == []
            process.send_signal(signal.SIGSTOP)
            await _line_count(told, 1)
    finally:
        process.kill()
        await process.wait()
    await asyncio.to_thread(reading.join, 10)
    assert not reading.is_alive()


SERVER = """
import asyncio, sys
from tests.contract.test_client_restarts import Api
async def main():
    api = Api()
    api.address = sys.argv[1]
    await api.start()
    await asyncio.Event().wait()
asyncio.run(main())
"""


def _created(client: TideoverClient, file: Path) -> jobs_pb2.Job | None:
    try:
        return client.create_job(file, request_id="r")
    except NotReached:
        return None


def _read_until_closed(client: TideoverClient, job_id: str) -> None:
    with contextlib.suppress(TideoverError, ValueError, grpc.RpcError):
        list(client.stream_results(job_id, follow=True))
