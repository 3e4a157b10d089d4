"""The client over an orchestrator that goes away and comes back on its port: nothing repeated, nothing skipped."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import grpc
import pytest

from context_daemon.memory_store import MemoryStore
from context_daemon.records import Finish, TokenCommit
from context_daemon.redis_server import free_port
from context_daemon.store import LeaseRequest
from orchestrator.api.server import serve
from orchestrator.client import TideoverClient, TideoverError
from orchestrator.jobs.service import JobService
from orchestrator.jobs.validation import ModelLimits
from tests.contract.test_jobs_api import LINES, Fleet
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
        self._server = await serve(self.address, service, Fleet())

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


async def test_results_go_on_where_they_stood(tmp_path: Path) -> None:
    api = Api()
    await api.start()
    client = TideoverClient(api.address)
    job = await asyncio.to_thread(client.create_job, _file(tmp_path), request_id="r")
    await api.finish(job.job_id, 1)
    seen: list[int] = []
    reader = threading.Thread(
        target=lambda: seen.extend(line.index for line in client.stream_results(job.job_id, follow=True))
    )
    reader.start()
    await asyncio.sleep(0.5)
    await api.stop()
    await api.finish(job.job_id, 2)  # while the API is away
    await asyncio.sleep(0.5)
    await api.start()
    await asyncio.to_thread(reader.join, 20)
    assert seen == [0, 1, 2]
    await api.stop()


async def test_a_create_that_was_cut_off_is_sent_again_and_makes_one_job(tmp_path: Path) -> None:
    api = Api()
    await api.start()
    client = TideoverClient(api.address)
    assert await asyncio.to_thread(client.list_jobs) is not None
    await api.stop()
    create = asyncio.create_task(asyncio.to_thread(client.create_job, _file(tmp_path), request_id="r"))
    await asyncio.sleep(0.5)
    await api.start()
    job = await create
    assert [item.job_id for item in await api.store.list_jobs()] == [job.job_id]
    await api.stop()


async def test_patience_ends(tmp_path: Path) -> None:
    api = Api()
    await api.start()
    client = TideoverClient(api.address, patience_s=0.5)
    await asyncio.to_thread(client.list_jobs)
    await api.stop()
    with pytest.raises(TideoverError, match="tideover up"):
        await asyncio.to_thread(client.list_jobs)
