"""A durable store that answers and takes no writes: nobody can show life, so nobody is judged by it. The real router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from append_only import configure
from daemon_rig import lease, start_job
from store_samples import worker_status

from context_daemon.records import InterruptionCause
from context_daemon.redis_server import EmbeddedServers
from context_daemon.redis_store import RedisStore
from context_daemon.store import StoreRefusesWrites
from orchestrator.events import EventLog
from orchestrator.routing.router import Router, RouterOptions
from tests.contract.router_rig import Gateway, ended

LEASE_S = 5.0


class House:
    """A leading router with a clock of its own, and a worker that is its heartbeats only."""

    def __init__(self, store: RedisStore) -> None:
        self.now, self.rounds, self.beats = 1000.0, 0, 0
        self.store, self.events = store, EventLog(lambda: self.now)
        options = RouterOptions(tick_s=0.001, lease_s=LEASE_S)
        self._router = Router(store, Gateway(), self.events, options, wall=lambda: self.now, clock=lambda: self.now)

    def _term(self) -> int:
        self.rounds += 1
        return 1

    async def route(self) -> None:
        await self._router.run(self._term)

    async def beat(self) -> None:
        self.beats += 1
        await self.store.put_worker(worker_status("w", "n", self.beats), 60.0)

    async def some_rounds(self) -> None:
        end = self.rounds + 5
        async with asyncio.timeout(30):
            while self.rounds < end:  # noqa: ASYNC110 - a count, not an event
                await asyncio.sleep(0.005)

    def kinds(self, of: str) -> list[str]:
        return [event.kind for event in self.events.since(0) if event.kind.startswith(of)]


@pytest.fixture
async def house(servers: EmbeddedServers) -> AsyncIterator[House]:
    store = RedisStore(servers.durable.url)
    made = House(store)
    routing = asyncio.create_task(made.route())
    yield made
    configure(servers.durable, "maxmemory", "0")
    await ended(routing)
    await store.close()


async def test_whoever_could_not_show_life_is_not_declared_dead(house: House, servers: EmbeddedServers) -> None:
    await start_job(house.store)
    await lease(house.store, 1, "w")
    await house.beat()
    await house.some_rounds()
    configure(servers.durable, "maxmemory", "1")
    with pytest.raises(StoreRefusesWrites, match="raise maxmemory"):
        await house.beat()
    house.now += 0.9 * LEASE_S
    await house.some_rounds()
    configure(servers.durable, "maxmemory", "0")
    await house.some_rounds()
    house.now += 0.5 * LEASE_S
    await house.some_rounds()
    assert await house.store.interruptions("job") == []
    assert house.kinds("store_") == ["store_away", "store_back"], "it answered all the while"
    (away,) = [event.text for event in house.events.since(0) if event.kind == "store_away"]
    assert "refuses writes" in away and "raise maxmemory" in away
    house.now += 1.1 * LEASE_S  # and then it really is silent
    await house.some_rounds()
    (row,) = await house.store.interruptions("job")
    assert row.cause is InterruptionCause.LEASE_EXPIRED
