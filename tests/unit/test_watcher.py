"""The watcher against the real emulator over sockets: tokens, outages, withdrawals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from context_daemon.records import Notice, NoticeKind
from context_daemon.redis_server import free_port
from context_daemon.store import StoreUnavailable
from worker.preemption.aws import AwsSource, parse_action, parse_rebalance
from worker.preemption.emulator import MachineIdentity, MetadataEmulator
from worker.preemption.imds import ImdsClient
from worker.preemption.source import SourceUnavailable
from worker.preemption.watcher import Watcher

NODE = "n1-test"


class Metadata:
    """The emulator on a port of its own, to be stopped and started again. Counts what is asked."""

    def __init__(self) -> None:
        self.emulator = MetadataEmulator(MachineIdentity(instance_id=NODE), time.time)
        self.port = free_port()
        self.requests: list[tuple[str, str, int]] = []
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = self.emulator.application()
        app.on_response_prepare.append(self._count)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def _count(self, request: web.Request, response: web.StreamResponse) -> None:
        self.requests.append((request.method, request.path, response.status))

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()


class Daemon:
    """Keeps what it is told, and can be away."""

    def __init__(self) -> None:
        self.notices: dict[str, Notice] = {}
        self.away = False
        self.refused = 0

    def _here(self) -> None:
        if self.away:
            self.refused += 1
            raise StoreUnavailable("the daemon is away")

    def raise_notice(self, notice: Notice) -> bool:
        self._here()
        new = notice.id not in self.notices
        self.notices[notice.id] = notice
        return new

    def withdraw_notice(self, notice_id: str) -> None:
        self._here()
        self.notices.pop(notice_id, None)


@pytest.fixture
async def metadata() -> AsyncIterator[Metadata]:
    service = Metadata()
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
async def daemon(metadata: Metadata) -> AsyncIterator[Daemon]:
    sink = Daemon()
    source = AwsSource(ImdsClient(metadata.url, time.monotonic, timeout_s=0.3), NODE, time.time, asg_timeout_s=60.0)
    task = asyncio.create_task(Watcher(source, sink, poll_interval_s=0.05, outage_poll_s=0.1).run())
    yield sink
    assert not task.done(), "the watcher must not end by itself"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def test_a_notice_reaches_the_daemon_once(metadata: Metadata, daemon: Daemon) -> None:
    deadline = int(time.time()) + 30
    metadata.emulator.announce("terminate", deadline)
    await until(lambda: daemon.notices)
    assert list(daemon.notices.values()) == [Notice(NODE, NoticeKind.TERMINATE, float(deadline), "aws-imds")]
    await asyncio.sleep(0.3)
    assert len(daemon.notices) == 1


async def test_one_token_serves_many_polls(metadata: Metadata, daemon: Daemon) -> None:
    await until(lambda: len(metadata.requests) > 20)
    assert [method for method, _, _ in metadata.requests].count("PUT") == 1


async def test_a_401_brings_a_new_token_within_the_same_poll(metadata: Metadata, daemon: Daemon) -> None:
    await until(lambda: metadata.requests)
    metadata.emulator.revoke_tokens()
    metadata.emulator.announce("stop", time.time() + 30)
    await until(lambda: daemon.notices)
    assert [notice.kind for notice in daemon.notices.values()] == [NoticeKind.STOP]
    statuses = [status for _, _, status in metadata.requests]
    assert statuses.count(401) == 1
    after = metadata.requests[statuses.index(401) + 1]
    assert after == ("PUT", "/latest/api/token", 200)


async def test_a_withdrawn_notice_is_withdrawn(metadata: Metadata, daemon: Daemon) -> None:
    metadata.emulator.announce("terminate", time.time() + 30)
    await until(lambda: daemon.notices)
    metadata.emulator.withdraw()
    await until(lambda: not daemon.notices)


async def test_an_outage_of_the_service_withdraws_nothing_and_is_ridden_out(metadata: Metadata, daemon: Daemon) -> None:
    metadata.emulator.announce("terminate", time.time() + 30)
    await until(lambda: daemon.notices)
    await metadata.stop()
    await asyncio.sleep(0.5)
    assert len(daemon.notices) == 1
    metadata.emulator.recommend_rebalance(time.time())
    await metadata.start()
    await until(lambda: len(daemon.notices) == 2)


async def test_a_notice_waits_for_a_daemon_that_is_away(metadata: Metadata, daemon: Daemon) -> None:
    daemon.away = True
    metadata.emulator.announce("terminate", time.time() + 30)
    await until(lambda: daemon.refused >= 2)
    daemon.away = False
    await until(lambda: daemon.notices)


async def test_the_groups_decision_has_the_hooks_deadline_and_stays_one_notice(
    metadata: Metadata, daemon: Daemon
) -> None:
    metadata.emulator.set_lifecycle_state("Terminated")
    await until(lambda: daemon.notices)
    await asyncio.sleep(0.3)
    (only,) = daemon.notices.values()
    assert only.kind is NoticeKind.ASG_TERMINATE
    assert 55 < only.deadline - time.time() <= 60


async def test_proxies_are_bypassed(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with ImdsClient(metadata.url, time.monotonic) as client:
        assert await client.get("/latest/meta-data/instance-id") == NODE


async def test_a_silent_service_is_an_outage_with_a_hint() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with ImdsClient(f"http://127.0.0.1:{port}", time.monotonic, timeout_s=0.2) as client:
        with pytest.raises(SourceUnavailable, match="hop limit"):
            await client.get("/latest/meta-data/instance-id")
    server.close()


async def test_there_is_no_falling_back_to_version_1() -> None:
    """A service that answers GETs without a token, but gives none out, is not asked without one."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.method)
        return web.Response(status=403 if request.method == "PUT" else 200, text="i-0abc")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with ImdsClient(f"http://127.0.0.1:{runner.addresses[0][1]}", time.monotonic) as client:
        with pytest.raises(SourceUnavailable, match="403"):
            await client.get("/latest/meta-data/instance-id")
    await runner.cleanup()
    assert asked == ["PUT"]


@pytest.mark.parametrize("text", ["", "[]", '{"action": "terminate"}', '{"action": "terminate", "time": "soon"}'])
def test_an_answer_that_cannot_be_read_says_nothing_about_notices(text: str) -> None:
    with pytest.raises(SourceUnavailable):
        parse_action(text, NODE)


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("terminate", NoticeKind.TERMINATE),
        ("stop", NoticeKind.STOP),
        ("hibernate", NoticeKind.STOP),
        ("evaporate", NoticeKind.TERMINATE),
    ],
)
def test_actions(action: str, kind: NoticeKind) -> None:
    notice = parse_action(f'{{"action": "{action}", "time": "2027-01-15T08:02:00Z"}}', NODE)
    assert notice == Notice(NODE, kind, 1_800_000_120.0, "aws-imds")


def test_a_rebalance_hint() -> None:
    notice = parse_rebalance('{"noticeTime": "2027-01-15T08:02:00Z"}', NODE)
    assert notice == Notice(NODE, NoticeKind.REBALANCE, 1_800_000_120.0, "aws-imds")
