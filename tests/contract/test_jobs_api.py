"""JobsService and AdminService over real sockets, with the client that people use and the memory store behind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from context_daemon.memory_store import MemoryStore
from context_daemon.records import Finish, Notice, NoticeKind, TokenCommit, WorkerStatus
from context_daemon.redis_server import free_port
from context_daemon.store import LeaseRequest, StoreUnavailable
from orchestrator.api.fleet_view import UnknownWorker
from orchestrator.api.server import serve
from orchestrator.client import TideoverClient, TideoverError
from orchestrator.context_view import ContextView
from orchestrator.events import Event, EventLog
from orchestrator.fleet.cloud import FaultsUnsupported
from orchestrator.jobs.service import JobService
from orchestrator.jobs.validation import ModelLimits
from protos import jobs_pb2
from tests.unit.byte_tokenizer import VOCAB_SIZE, byte_tokenizer


class Fleet:
    """A FleetView with one worker, which can be noticed and not killed."""

    model, leader, term, event_cursor = "m", "here:1", 3, 0

    def __init__(self) -> None:
        self.log = EventLog(time.time)

    async def incarnation(self) -> int:
        return 1

    async def workers(self) -> Sequence[WorkerStatus]:
        return [
            WorkerStatus("w1", "n1", "m", "c", 1, 2, 0, 8, 5, 50, 16, 100, 12.5, (), False, "ready", "", 99)
        ]  # fmt: skip

    async def notices(self) -> Sequence[Notice]:
        return [Notice("n1", NoticeKind.TERMINATE, time.time() + 30, "aws-imds")]

    async def preempt(self, worker_id: str, deadline_s: float) -> str:
        if worker_id != "w1":
            raise UnknownWorker(f"no worker {worker_id!r}")
        self.log.add("fault", "ordered")
        return "n1"

    async def kill(self, worker_id: str) -> str:
        raise FaultsUnsupported("this cluster has no such cloud")

    def events_since(self, cursor: int) -> Sequence[Event]:
        return self.log.since(cursor)


@dataclass
class Api:
    store: MemoryStore
    client: TideoverClient
    fleet: Fleet
    folder: Path
    waiting: dict[str, str] = field(default_factory=dict)

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(method, *args, **kwargs)

    async def submit(self, lines: Sequence[dict[str, Any]] | bytes, request_id: str = "r1") -> jobs_pb2.Job:
        file = self.folder / "batch.jsonl"
        data = lines if isinstance(lines, bytes) else b"\n".join(json.dumps(line).encode() for line in lines)
        file.write_bytes(data)
        job: jobs_pb2.Job = await self.call(self.client.create_job, file, request_id=request_id)
        return job

    async def refused(self, lines: Sequence[dict[str, Any]] | bytes) -> TideoverError:
        with pytest.raises(TideoverError) as caught:
            await self.submit(lines)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert await self.store.list_jobs() == [], "nothing may be half accepted"
        return caught.value

    async def answer(self, job_id: str, count: int) -> None:
        """Be the worker: finish the next `count` requests with one token each."""
        ready = await self.store.ready_requests(job_id, count)
        leases = await self.store.lease(job_id, 1, [LeaseRequest(r.key, r.epoch, "w1", "c") for r in ready])
        for lease in leases:
            finish = Finish(True, b'{"line":%d}' % lease.key.line)
            await self.store.commit([TokenCommit(lease.key, lease.token, 0, (1,), finish=finish)])
        await self.store.finish_job(job_id, 1)


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


LINES = [line(f"c{i}") for i in range(1, 4)]


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    store, fleet, waiting = MemoryStore(), Fleet(), dict[str, str]()
    service = JobService(store, byte_tokenizer(), ModelLimits("m", 100, VOCAB_SIZE), waiting, time.time)
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    server = await serve(address, service, fleet, ContextView(store))
    with TideoverClient(address, timeout_s=10, patience_s=1) as client:
        yield Api(store, client, fleet, tmp_path, waiting)
    await server.stop(grace=None)


async def test_a_job_is_accepted_whole_and_its_results_are_streamed(api: Api) -> None:
    job = await api.submit(LINES)
    assert (job.state, job.total, job.model) == (jobs_pb2.JOB_STATE_IN_PROGRESS, 3, "m")
    following = asyncio.create_task(api.call(lambda: list(api.client.stream_results(job.job_id, follow=True))))
    await api.answer(job.job_id, 2)
    await api.answer(job.job_id, 1)
    assert [(item.index, item.line) for item in await following] == [(0, 1), (1, 2), (2, 3)]
    rest = await api.call(lambda: list(api.client.stream_results(job.job_id, start=2)))
    assert [item.payload for item in rest] == [b'{"line":3}']
    done = await api.call(api.client.get_job, job.job_id)
    assert (done.state, done.completed, done.output_tokens) == (jobs_pb2.JOB_STATE_COMPLETED, 3, 3)


async def test_repeating_a_request_id_makes_one_job(api: Api) -> None:
    first, again = await api.submit(LINES), await api.submit(LINES)
    assert first.job_id == again.job_id
    with pytest.raises(TideoverError) as caught:
        await api.submit(LINES[:2])
    assert caught.value.code is grpc.StatusCode.ALREADY_EXISTS
    assert len(await api.store.list_jobs()) == 1


async def test_the_same_call_twice_at_once_makes_one_job(api: Api) -> None:
    file = api.folder / "same.jsonl"
    file.write_bytes(b"\n".join(json.dumps(item).encode() for item in LINES))
    calls = [
        api.call(api.client.create_job, file, request_id="same") for _ in range(3)
    ]  # server and calls share a pool
    jobs = await asyncio.gather(*calls)
    assert len({job.job_id for job in jobs}) == 1
    assert len(await api.store.list_jobs()) == 1


@pytest.mark.parametrize(
    ("data", "number", "words"),
    [
        (b"", 0, "no requests"),
        (b"\n \n", 0, "no requests"),
        (json.dumps(LINES[0]).encode() + b"\n\xff\xfe\n", 2, "not UTF-8"),
        (b"\n" * 6 + b"{nope", 7, "not JSON"),
        (b"[1, 2]", 1, "must be a JSON object"),
    ],
)
async def test_a_bad_file_is_refused_with_its_line(api: Api, data: bytes, number: int, words: str) -> None:
    error = await api.refused(data)
    assert error.line_errors[0].line == number
    assert words in str(error) and words in error.line_errors[0].message


async def test_every_bad_line_is_named(api: Api) -> None:
    error = await api.refused([LINES[0], line("c1"), line("x", temperature=9), LINES[1], line("y", tools=[{}])])
    found = [(item.line, item.param) for item in error.line_errors]
    assert found == [(2, "custom_id"), (3, "body.temperature"), (5, "body.tools")]
    assert "line 3" in str(error)


async def test_thousands_of_bad_lines_still_make_a_readable_refusal(api: Api) -> None:
    """Metadata is bounded by gRPC: too much of it would turn the refusal into RESOURCE_EXHAUSTED."""
    error = await api.refused([line("é" * 500, temperature=9)] * 3000)
    assert 5 <= len(error.line_errors) <= 100
    assert "line 2" in str(error)
    with pytest.raises(TideoverError) as caught:
        await api.call(api.client.get_job, "é" * 50_000)
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_a_model_that_is_not_served_is_refused(api: Api) -> None:
    file = api.folder / "b.jsonl"
    file.write_text(json.dumps(LINES[0]))
    with pytest.raises(TideoverError, match="'other' is not served") as caught:
        await api.call(api.client.create_job, file, model="other")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_unknown_ids_are_not_found(api: Api) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: api.client.get_job("nope"),
        lambda: api.client.cancel_job("nope"),
        lambda: api.client.interruptions("nope"),
        lambda: list(api.client.watch_job("nope")),
        lambda: list(api.client.stream_results("nope")),
        lambda: api.client.preempt("nope", 5),
    ]
    for call in calls:
        with pytest.raises(TideoverError, match="'nope'") as caught:
            await api.call(call)
        assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_cancelling_keeps_finished_lines(api: Api) -> None:
    job = await api.submit(LINES)
    await api.answer(job.job_id, 1)
    assert (await api.call(api.client.cancel_job, job.job_id)).state == jobs_pb2.JOB_STATE_CANCELLING
    await api.store.cancel_requests(job.job_id, 1)
    await api.store.finish_job(job.job_id, 1)
    lines = await api.call(lambda: list(api.client.stream_results(job.job_id, follow=True)))
    assert sorted((item.line, item.ok) for item in lines) == [(1, True), (2, False), (3, False)]


async def test_jobs_are_listed_by_pages_newest_first(api: Api) -> None:
    made = [(await api.submit(LINES, request_id=f"r{i}")).job_id for i in range(5)]
    found, token = [], ""
    while True:
        page = await api.call(api.client.list_jobs, page_size=2, page_token=token)
        found += [job.job_id for job in page.jobs]
        token = page.next_page_token
        if not token:
            break
    assert found == made[::-1]
    for bad in ("!!", "bm9uZQ==", "\u20ac"):
        with pytest.raises(TideoverError, match="page_token") as caught:
            await api.call(api.client.list_jobs, page_token=bad)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_watching_shows_progress_events_and_the_end(api: Api) -> None:
    job = await api.submit(LINES)
    api.waiting[job.job_id] = "no worker is up yet"
    seen: list[jobs_pb2.WatchJobResponse] = []
    first = asyncio.Event()
    loop = asyncio.get_running_loop()

    def watch() -> None:
        for update in api.client.watch_job(job.job_id, interval_s=0.1):
            seen.append(update)
            loop.call_soon_threadsafe(first.set)

    watching = asyncio.create_task(api.call(watch))
    await first.wait()
    await api.call(api.client.preempt, "w1", 5.0)
    api.waiting.clear()
    await api.answer(job.job_id, 3)
    await watching
    assert seen[0].waiting_for == "no worker is up yet" and seen[0].workers[0].pages_total == 50
    assert [event.kind for update in seen for event in update.events] == ["fault"]
    assert seen[-1].job.state == jobs_pb2.JOB_STATE_COMPLETED and seen[-1].eta_s == 0


async def test_operators_calls(api: Api) -> None:
    (worker,) = await api.call(api.client.workers)
    assert worker.worker_id == "w1" and worker.notice.startswith("terminate in ")
    assert (await api.call(api.client.cluster)).term == 3
    with pytest.raises(TideoverError, match="no such cloud") as caught:
        await api.call(api.client.kill, "w1")
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(TideoverError, match="deadline_s"):
        await api.call(api.client.preempt, "w1", -1.0)


async def test_a_store_that_is_away_is_unavailable(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("the durable store does not answer")

    monkeypatch.setattr(api.store, "get_job", away)
    with pytest.raises(TideoverError, match="durable store does not answer") as caught:
        await api.call(api.client.get_job, "x")
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_health_is_served(api: Api) -> None:
    async with grpc.aio.insecure_channel(api.client.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service="tideover.jobs.v1.JobsService"))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
