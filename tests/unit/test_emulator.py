"""The metadata emulator over real sockets: the documented behaviour of IMDSv2."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from worker.preemption.emulator import MachineIdentity, MetadataEmulator

TTL = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN = "X-aws-ec2-metadata-token"
META = "/latest/meta-data"


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def emulator(clock: Clock) -> MetadataEmulator:
    return MetadataEmulator(MachineIdentity(instance_id="i-0abc", availability_zone="eu-west-1b"), clock)


@pytest.fixture
async def http(emulator: MetadataEmulator) -> AsyncIterator[aiohttp.ClientSession]:
    runner = web.AppRunner(emulator.application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
        yield session
    await runner.cleanup()


async def token(http: aiohttp.ClientSession, ttl: str = "60") -> str:
    async with http.put("/latest/api/token", headers={TTL: ttl}) as response:
        assert response.status == 200
        assert response.headers[TTL] == ttl
        return await response.text()


async def get(http: aiohttp.ClientSession, path: str, value: str | None = None) -> tuple[int, str]:
    async with http.get(path, headers={TOKEN: value} if value else {}) as response:
        return response.status, await response.text()


@pytest.mark.parametrize("headers", [{}, {TTL: "0"}, {TTL: "21601"}, {TTL: "-1"}, {TTL: "soon"}])
async def test_a_token_needs_a_valid_ttl(http: aiohttp.ClientSession, headers: dict[str, str]) -> None:
    async with http.put("/latest/api/token", headers=headers) as response:
        assert response.status == 400


async def test_a_token_is_refused_to_what_came_through_a_proxy(http: aiohttp.ClientSession) -> None:
    async with http.put("/latest/api/token", headers={TTL: "60", "X-Forwarded-For": "10.0.0.9"}) as response:
        assert response.status == 403


async def test_every_get_without_a_good_token_is_401(http: aiohttp.ClientSession) -> None:
    for path in (f"{META}/instance-id", f"{META}/spot/instance-action", f"{META}/nowhere"):
        assert (await get(http, path))[0] == 401
        assert (await get(http, path, "made-up"))[0] == 401


async def test_a_token_expires(http: aiohttp.ClientSession, clock: Clock) -> None:
    value = await token(http, "60")
    clock.now += 59
    assert (await get(http, f"{META}/instance-id", value)) == (200, "i-0abc")
    clock.now += 1
    assert (await get(http, f"{META}/instance-id", value))[0] == 401


async def test_tokens_can_be_revoked(http: aiohttp.ClientSession, emulator: MetadataEmulator) -> None:
    value = await token(http)
    emulator.revoke_tokens()
    assert (await get(http, f"{META}/instance-id", value))[0] == 401


async def test_nothing_is_404_until_it_is_announced(
    http: aiohttp.ClientSession, emulator: MetadataEmulator, clock: Clock
) -> None:
    value = await token(http)
    paths = [
        f"{META}/spot/instance-action",
        f"{META}/spot/termination-time",
        f"{META}/events/recommendations/rebalance",
    ]
    assert [(await get(http, path, value))[0] for path in paths] == [404, 404, 404]
    emulator.announce("terminate", clock.now + 120)
    emulator.recommend_rebalance(clock.now)
    answers = [await get(http, path, value) for path in paths]
    assert answers[0] == (200, '{"action": "terminate", "time": "2027-01-15T08:02:00Z"}')
    assert answers[1] == (200, "2027-01-15T08:02:00Z")
    assert answers[2] == (200, '{"noticeTime": "2027-01-15T08:00:00Z"}')
    emulator.withdraw()
    assert (await get(http, paths[0], value))[0] == 404


async def test_only_a_termination_has_a_termination_time(
    http: aiohttp.ClientSession, emulator: MetadataEmulator, clock: Clock
) -> None:
    emulator.announce("stop", clock.now + 120)
    assert (await get(http, f"{META}/spot/termination-time", await token(http)))[0] == 404


async def test_the_machine_describes_itself(http: aiohttp.ClientSession, emulator: MetadataEmulator) -> None:
    value = await token(http)
    assert await get(http, f"{META}/placement/availability-zone", value) == (200, "eu-west-1b")
    assert await get(http, f"{META}/placement/region", value) == (200, "eu-west-1")
    assert await get(http, f"{META}/instance-life-cycle", value) == (200, "spot")
    assert await get(http, f"{META}/autoscaling/target-lifecycle-state", value) == (200, "InService")
    emulator.set_lifecycle_state("Terminated")
    assert await get(http, f"{META}/autoscaling/target-lifecycle-state", value) == (200, "Terminated")
    assert (await get(http, f"{META}/no/such/thing", value))[0] == 404


def test_an_unknown_action_is_refused(emulator: MetadataEmulator) -> None:
    with pytest.raises(ValueError, match="explode"):
        emulator.announce("explode", 1.0)
