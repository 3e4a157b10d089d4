"""The router over the memory store: what it does with the dead, the silent, the cancelled, the guilty and the leaving."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from context_daemon.memory_store import MemoryStore
from context_daemon.records import (
    CommitStatus,
    DrainTarget,
    Endpoint,
    Finish,
    InterruptionCause,
    JobRecord,
    JobState,
    Lease,
    Notice,
    NoticeKind,
    RequestKey,
    RequestSpec,
    SamplingParams,
    TokenCommit,
    WorkerStatus,
)
from context_daemon.store import LeasedRequest, StaleLeader, StoreUnavailable
from orchestrator.events import EventLog
from orchestrator.routing.router import Router, RouterOptions

TERM = 1


@dataclass
class Gateway:
    """Records what workers are told."""

    admitted: list[tuple[str, Lease]] = field(default_factory=list)
    targets: list[tuple[str, dict[RequestKey, DrainTarget]]] = field(default_factory=list)
    buried: dict[str, InterruptionCause] = field(default_factory=dict)
    up: set[str] = field(default_factory=set)

    def admit(self, worker_id: str, leases: Sequence[Lease]) -> None:
        self.admitted += [(worker_id, lease) for lease in leases]

    def set_targets(self, worker_id: str, targets: Mapping[RequestKey, DrainTarget]) -> None:
        self.targets.append((worker_id, dict(targets)))

    def dead(self) -> Mapping[str, InterruptionCause]:
        return self.buried

    def reachable(self) -> set[str]:
        return self.up - set(self.buried)


class House:
    """A memory store, a router and workers that exist as their heartbeats only; one clock for all."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.store = MemoryStore(lambda: self.now)
        self.gateway = Gateway()
        self.events = EventLog(lambda: self.now)
        self.router = self.new_router()
        self.beats: dict[str, WorkerStatus] = {}

    def new_router(self) -> Router:
        return Router(
            self.store, self.gateway, self.events, RouterOptions(), wall=lambda: self.now, clock=lambda: self.now
        )

    async def submit(self, job_id: str, lines: int, max_tokens: int = 50) -> None:
        await self.store.create_job(
            JobRecord(job_id, job_id, JobState.VALIDATING, "m", Endpoint.COMPLETIONS.value, self.now)
        )
        params = SamplingParams(seed=1, max_tokens=max_tokens)
        specs = [RequestSpec(n, f"c{n}", Endpoint.COMPLETIONS, (1, 2, 3), params) for n in range(1, lines + 1)]
        await self.store.add_requests(job_id, specs)
        await self.store.start_job(job_id, lines)

    async def beat(self, worker_id: str, **changes: Any) -> None:
        """One turn of a worker's loop, told."""
        self.gateway.up.add(worker_id)
        fresh = WorkerStatus(
            worker_id, f"node-{worker_id}", "m", "cpu-a", 0, 0, 0, 4, 0, 100, 16, 512, 0.0, (), False, "ready", "l", 1
        )
        status = self.beats.get(worker_id, fresh)
        self.beats[worker_id] = replace(status, beat=status.beat + 1, **changes)
        await self.store.put_worker(self.beats[worker_id], 10.0)

    async def claim(self, worker_id: str, job_id: str = "job") -> None:
        """The worker beats and says that it holds what it was leased."""
        mine = [lease for lease in await self.leased(job_id) if lease.worker_id == worker_id]
        held = tuple((o.key.job_id, o.key.line, o.key.choice, o.token.epoch) for o in mine)
        await self.beat(worker_id, held=held)

    async def leased(self, job_id: str = "job") -> list[LeasedRequest]:
        return await self.store.leased_requests(job_id)

    async def owners(self) -> dict[int, str]:
        return {lease.key.line: lease.worker_id for lease in await self.leased()}

    async def tick(self, seconds: float = 0.05) -> None:
        self.now += seconds
        await self.router.tick(TERM)

    async def commit(self, lease: LeasedRequest, tokens: int, finish: Finish | None = None) -> CommitStatus:
        commit = TokenCommit(lease.key, lease.token, lease.tokens, tuple(range(tokens)), finish=finish)
        return (await self.store.commit([commit]))[0].status


@pytest.fixture
async def house() -> House:
    made = House()
    await made.beat("a")
    return made


async def test_a_dead_workers_requests_are_taken_back_and_placed_in_the_same_round(house: House) -> None:
    await house.submit("job", 3)
    await house.tick()
    await house.claim("a")
    assert await house.owners() == {1: "a", 2: "a", 3: "a"}
    await house.beat("b")
    house.gateway.buried["a"] = InterruptionCause.NODE_LOST
    await house.tick()
    assert await house.owners() == {1: "b", 2: "b", 3: "b"}
    assert [lease.token.epoch for lease in await house.leased()] == [3, 3, 3]
    rows = await house.store.interruptions("job")
    assert {row.cause for row in rows} == {InterruptionCause.NODE_LOST} and {row.target for row in rows} == {"b"}


async def test_a_lease_that_nobody_claims_is_told_again_until_it_runs_out(house: House) -> None:
    await house.submit("job", 1)
    await house.tick()
    for _ in range(4):
        await house.beat("a")  # alive, but it never heard
        await house.tick(0.8)
    assert [worker for worker, _ in house.gateway.admitted] == ["a"] * 4
    assert len({lease for _, lease in house.gateway.admitted}) == 1, "the same lease each time"
    await house.beat("a")
    await house.tick(3.0)
    (row,) = await house.store.interruptions("job")
    assert row.cause is InterruptionCause.LEASE_EXPIRED


async def test_a_claimed_lease_is_told_once(house: House) -> None:
    await house.submit("job", 1)
    for _ in range(20):
        await house.tick(1.0)
        await house.claim("a")
    assert len(house.gateway.admitted) == 1 and await house.store.interruptions("job") == []


async def test_a_cancelled_job_ends_with_counts_that_add_up(house: House) -> None:
    await house.submit("job", 6)
    await house.tick()
    leased = await house.leased()
    assert len(leased) == 4
    assert await house.commit(leased[0], 2, Finish(True, b'{"custom_id":"c1"}')) is CommitStatus.OK
    await house.commit(leased[1], 2)
    await house.store.cancel_job("job")
    await house.tick()
    job = await house.store.get_job("job")
    assert job is not None and job.state is JobState.CANCELLED
    assert (job.total, job.completed, job.failed) == (6, 1, 5)
    lines = await house.store.results("job", 0, 100)
    assert sorted(line.line for line in lines) == [1, 2, 3, 4, 5, 6]
    assert await house.commit(leased[2], 1) is CommitStatus.FENCED, "its owner drops it"
    assert house.router.waiting_for == {}


async def test_a_suspect_runs_alone_and_a_convict_gets_its_line(house: House) -> None:
    await house.submit("job", 2)
    await house.tick()
    (first, second) = await house.leased()
    await house.store.requeue("job", TERM, [(first.key, first.token)], InterruptionCause.ENGINE_FAULT)
    await house.tick()
    assert await house.owners() == {2: "a"}, "nothing runs beside a suspect"
    await house.commit(second, 1, Finish(True, b'{"custom_id":"c2"}'))
    await house.tick()
    (alone,) = await house.leased()
    assert alone.key.line == 1 and alone.attempts == 1
    await house.submit("other", 1)
    await house.tick()
    assert await house.leased("other") == []
    await house.store.requeue("job", TERM, [(alone.key, alone.token)], InterruptionCause.ENGINE_FAULT)
    await house.tick()
    await house.tick()
    job = await house.store.get_job("job")
    assert job is not None and (job.state, job.completed, job.failed) == (JobState.COMPLETED, 1, 1)
    (line,) = [line for line in await house.store.results("job", 0, 10) if not line.ok]
    error = json.loads(line.payload)
    assert error["custom_id"] == "c1" and error["error"]["code"] == "engine_fault"
    assert len(await house.leased("other")) == 1


async def draining(house: House, **changes: Any) -> None:
    await house.store.put_notice(Notice("node-a", NoticeKind.TERMINATE, house.now + 30, "test"))
    await house.beat("a", draining=True, state="draining", **changes)


async def test_a_draining_worker_learns_where_to_and_gets_nothing_new(house: House) -> None:
    await house.submit("job", 2)
    await house.tick()
    await house.claim("a")
    await house.beat("b", daemon="b:7001")
    await draining(house)
    await house.submit("other", 1)
    await house.tick()
    expected = dict.fromkeys([RequestKey("job", 1), RequestKey("job", 2)], DrainTarget("b", "b:7001"))
    assert house.gateway.targets == [("a", expected)]
    (other,) = await house.leased("other")
    assert other.worker_id == "b"


async def test_a_target_is_kept_while_it_takes_the_request(house: House) -> None:
    await house.submit("job", 1)
    await house.tick()
    await house.claim("a")
    await house.beat("b")
    await draining(house)
    await house.tick()
    await house.beat("c", max_num_seqs=64)  # has more room; the pages are on their way to b
    await house.tick(1.0)
    assert [told[RequestKey("job", 1)].worker_id for _, told in house.gateway.targets] == ["b", "b"]
    await house.beat("b", state="draining")
    await house.tick(1.0)
    assert house.gateway.targets[-1][1] == {RequestKey("job", 1): DrainTarget("c")}


async def test_targets_are_told_again_at_intervals_and_at_the_next_notice(house: House) -> None:
    await house.submit("job", 1)
    await house.tick()
    await house.claim("a")
    await house.beat("b")
    await draining(house)
    for _ in range(4):
        await house.tick(0.25)
    assert len(house.gateway.targets) == 2, "a call may be lost; one is not made every round"
    notice = (await house.store.notices())[0]
    await house.store.withdraw_notice(notice.id)
    await house.beat("a", draining=False, state="ready")
    await house.tick(0.05)
    await draining(house)
    await house.tick(0.05)
    assert len(house.gateway.targets) == 3


async def test_a_drain_is_no_way_out_of_the_numerics_class(house: House) -> None:
    await house.submit("job", 1)
    await house.tick()
    await house.claim("a")
    await house.commit((await house.leased())[0], 3)
    for _ in range(40):  # it has run for longer than any patience with its class
        await house.claim("a")
        await house.tick(2.0)
    await house.beat("b", numerics_class="cpu-b")
    await draining(house)
    await house.tick()
    assert house.gateway.targets == [("a", {})]


async def test_a_suspect_is_not_handed_over_to_run_beside_others(house: House) -> None:
    await house.submit("job", 1)
    await house.tick()
    (lease,) = await house.leased()
    await house.store.requeue("job", TERM, [(lease.key, lease.token)], InterruptionCause.ENGINE_FAULT)
    await house.tick()
    await house.claim("a")
    assert (await house.leased())[0].attempts == 1
    await house.beat("b")
    await house.submit("other", 1)
    await house.tick()
    assert [other.worker_id for other in await house.leased("other")] == ["b"]
    await draining(house)
    await house.tick()
    assert house.gateway.targets == [("a", {})]


async def test_a_worker_whose_loop_stands_still_gets_nothing_new(house: House) -> None:
    await house.tick()
    await house.submit("job", 1)
    await house.tick(2.1)
    assert await house.owners() == {}
    await house.beat("a")
    await house.tick()
    assert await house.owners() == {1: "a"}


class Away:
    """The house's store, which can be cut off without being restarted."""

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.away = store, False

    def __getattr__(self, name: str) -> Any:
        if self.away:
            raise StoreUnavailable("cut off")
        return getattr(self.store, name)


async def test_an_outage_without_a_restart_costs_nobody_its_lease(house: House) -> None:
    await house.submit("job", 2)
    store: Any = Away(house.store)
    options = RouterOptions(tick_s=0.001)
    router = Router(store, house.gateway, house.events, options, wall=lambda: house.now, clock=lambda: house.now)
    running = asyncio.create_task(router.run(lambda: TERM))
    await asyncio.sleep(0.03)
    await house.claim("a")
    await asyncio.sleep(0.03)
    store.away = True
    await asyncio.sleep(0.03)
    house.now += 30.0  # every heartbeat that was there has gone
    store.away = False
    await asyncio.sleep(0.03)
    await house.claim("a")
    house.now += 3.0
    await asyncio.sleep(0.03)
    assert await house.store.interruptions("job") == []
    assert await house.owners() == {1: "a", 2: "a"}
    house.now += 6.0  # and then it really is silent
    await asyncio.sleep(0.03)
    rows = await house.store.interruptions("job")
    assert {row.cause for row in rows} == {InterruptionCause.LEASE_EXPIRED}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_new_router_adopts_what_runs_and_the_old_one_changes_nothing(house: House) -> None:
    await house.submit("job", 2)
    await house.tick()
    old, house.router = house.router, house.new_router()
    await house.claim("a")
    await house.router.tick(TERM + 1)
    for _ in range(10):
        await house.claim("a")
        house.now += 1.0
        await house.router.tick(TERM + 1)
    assert await house.store.interruptions("job") == [] and len(house.gateway.admitted) == 2
    house.gateway.buried["a"] = InterruptionCause.WORKER_DIED
    with pytest.raises(StaleLeader):
        await old.tick(TERM)
    assert await house.owners() == {1: "a", 2: "a"}
