"""A KV cluster of three real servers: placement, the loss of one, one that hangs, and streaming a request's pages."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from kv_servers import KVServers

from context_daemon.kv_cluster import KVCluster
from context_daemon.kv_node import PAUSE_S, KVWriteResult
from context_daemon.kv_slots import frame, framed_size, identity
from context_daemon.records import RequestKey
from context_daemon.redis_script import connect
from context_daemon.store import SlotWrite, StoreUnavailable

LAYOUT, SLOT, PAGE = "lay", 1000, 4
STEP = PAGE * framed_size(SLOT)
KEYS = [RequestKey("job", line) for line in range(1, 25)]


def slots(key: RequestKey, start: int, stop: int, epoch: int = 1) -> SlotWrite:
    raw = b"".join(bytes([p % 251 + 1]) * SLOT for p in range(start, stop))
    data = frame(identity(key, epoch, LAYOUT), start, raw, SLOT)
    return SlotWrite(key, epoch, LAYOUT, start, stop - start, SLOT, PAGE, data)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[KVServers]:
    with KVServers(tmp_path) as started:
        yield started


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def cluster(servers: KVServers, clock: Clock) -> AsyncIterator[KVCluster]:
    made = KVCluster(servers.urls, timeout_s=0.5, reads_at_once=2, clock=clock)
    assert len({made.server_of(key) for key in KEYS}) == 3
    yield made
    await made.close()


def spy(cluster: KVCluster, name: str, before: Callable[[str], None]) -> None:
    """`before` sees the name of each command that goes to one server outside of a pipeline."""
    kv = cluster._nodes[name]._kv
    send = kv._command

    async def command(*args: Any) -> Any:
        before(args[0])
        return await send(*args)

    kv._command = command  # type: ignore[method-assign]


def split(cluster: KVCluster) -> tuple[str, list[RequestKey], list[RequestKey]]:
    """A server, the requests that lie on it, and the others."""
    name = cluster.server_of(KEYS[0])
    return name, [k for k in KEYS if cluster.server_of(k) == name], [k for k in KEYS if cluster.server_of(k) != name]


async def names_on(url: str) -> set[str]:
    client = connect(url, 2.0)
    found = {name.decode() for name in await client.keys("kv:lay:*")}
    await client.aclose()
    return found


async def pages(cluster: KVCluster, key: RequestKey, count: int, epochs: dict[int, int] | None = None) -> list[int]:
    epochs = dict.fromkeys(range(count), 1) if epochs is None else epochs
    seen = []
    async for page, framed in cluster.read_pages(key, epochs, LAYOUT, range(count)):
        assert framed == slots(key, page * PAGE, (page + 1) * PAGE, epochs[page]).data
        seen.append(page)
    return seen


# -- placement ----------------------------------------------------------------------------------------------------------


async def test_all_pages_of_a_request_lie_on_its_server(cluster: KVCluster, servers: KVServers) -> None:
    await cluster.write_each([slots(key, 0, 12, epoch) for key in KEYS for epoch in (1, 2)])
    for name in cluster.servers:
        own = [key for key in KEYS if cluster.server_of(key) == name]
        expected = {f"kv:lay:job:{k.line}.0:{epoch}:{page}" for k in own for epoch in (1, 2) for page in range(3)}
        assert await names_on(servers[name].url) == expected


async def test_placement_is_what_it_was_in_every_version_before() -> None:
    """Written down once: daemons of two versions in one cluster must agree."""
    cluster = KVCluster([f"redis://10.0.0.{n}" for n in (1, 2, 3)])
    lines = "".join(cluster.server_of(RequestKey("job", line))[7] for line in range(1, 25))
    choices = "".join(cluster.server_of(RequestKey("job", 1, choice))[7] for choice in range(1, 9))
    assert (lines, choices) == ("222122223131121222323131", "21211122")
    await cluster.close()


async def test_another_process_with_other_credentials_and_order_places_alike(cluster: KVCluster) -> None:
    urls = [f"redis://user:pass@{name}/2" for name in reversed(cluster.servers)]
    code = (
        "import json, sys\n"
        "from context_daemon.kv_cluster import KVCluster\n"
        "from context_daemon.records import RequestKey\n"
        "cluster = KVCluster(json.loads(sys.argv[1]))\n"
        "print(json.dumps([cluster.server_of(RequestKey('job', line)) for line in range(1, 25)]))\n"
    )
    done = subprocess.run(  # noqa: ASYNC221 - nothing else runs here
        [sys.executable, "-c", code, json.dumps(urls)],
        env={**os.environ, "PYTHONHASHSEED": "5"}, capture_output=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [cluster.server_of(key) for key in KEYS]


async def test_a_server_more_leaves_most_requests_where_they_are(cluster: KVCluster) -> None:
    more = KVCluster([*(f"redis://{name}" for name in cluster.servers), "redis://127.0.0.1:1"])
    moved = [key for key in KEYS if more.server_of(key) != cluster.server_of(key)]
    assert len(moved) < len(KEYS) // 2 and {more.server_of(key) for key in moved} <= {"127.0.0.1:1"}
    await more.close()


def test_wrong_and_repeated_addresses_are_refused() -> None:
    for urls, says in (
        (["redis://kv-1", "redis://:hunter2@kv-1:6379/1"], "kv-1:6379 is named twice"),
        (["http://kv-1"], "redis://"),
        ([], "at least one"),
    ):
        with pytest.raises(ValueError, match=says) as refused:
            KVCluster(urls)
        assert "hunter2" not in str(refused.value)
    with pytest.raises(ValueError, match="at least one page"):
        KVCluster(["redis://kv-1"], reads_at_once=0)


# -- the loss of one server ---------------------------------------------------------------------------------------------


async def test_results_are_in_the_order_of_the_writes(cluster: KVCluster) -> None:
    writes = [slots(key, 0, 2) for key in KEYS]
    results = await cluster.write_each(writes)
    again = await cluster.write_each(writes[::-1])
    assert again[::-1] == results and all(result.generation and not result.error for result in results)
    expected = {key: await cluster.generation(key) for key in KEYS}
    assert results == [KVWriteResult(generation=expected[key]) for key in KEYS]
    assert len(set(expected.values())) == 3
    assert await cluster.write_each([]) == []


async def test_a_server_killed_amid_a_write_takes_nothing_but_its_own_requests(
    cluster: KVCluster, servers: KVServers
) -> None:
    """The story a worker lives through: it writes, a server dies, comes back empty, and says so by its generation."""
    victim, lost, kept = split(cluster)
    writes = [slots(key, 0, 20) for key in KEYS]
    generations = {w.key: r.generation for w, r in zip(writes, await cluster.write_each(writes), strict=True)}

    sets = 0

    def kill_at_third_page(name: str) -> None:
        nonlocal sets
        sets += name == "SET"
        if name == "SET" and sets == 3:
            servers[victim].kill()

    spy(cluster, victim, kill_at_third_page)
    second = [slots(key, 20, 41) for key in KEYS]
    for write, result in zip(second, await cluster.write_each(second), strict=True):
        if write.key in lost:
            assert result.generation == "" and victim in result.error
        else:
            assert result == KVWriteResult(generation=generations[write.key])
    for key in lost:
        with pytest.raises(StoreUnavailable, match=victim):
            await cluster.read_page(key, 1, LAYOUT, 0)
    for key in kept:
        assert await pages(cluster, key, 10) == list(range(10))

    servers[victim].start()
    third = [slots(key, 41, 42) for key in KEYS]
    changed = {w.key for w, r in zip(third, await cluster.write_each(third), strict=True) if not r.error
               and r.generation != generations[w.key]}  # fmt: skip
    assert changed == set(lost)
    for key in lost:
        assert await cluster.read_page(key, 1, LAYOUT, 0) is None and await pages(cluster, key, 10) == []
    await cluster.write_each([slots(key, 0, 42) for key in lost])
    for key in KEYS:
        assert await pages(cluster, key, 10) == list(range(10))


async def test_a_generation_asked_for_before_a_restore_tells_of_a_loss_before_the_first_write(
    cluster: KVCluster, servers: KVServers
) -> None:
    victim, lost, kept = split(cluster)
    await cluster.write_each([slots(key, 0, 8) for key in KEYS])
    before = {key: await cluster.generation(key) for key in KEYS}
    servers[victim].kill()
    servers[victim].start()
    writes = [slots(key, 8, 9) for key in KEYS]
    results = await cluster.write_each(writes)
    assert {w.key for w, r in zip(writes, results, strict=True) if r.generation != before[w.key]} == set(lost) != set()
    assert kept


async def test_as_one_store_it_fails_as_a_whole_and_yet_writes_what_it_can(
    cluster: KVCluster, servers: KVServers
) -> None:
    victim, lost, kept = split(cluster)
    generation = await cluster.write_slots([slots(key, 0, 4) for key in KEYS])
    servers[victim].kill()
    with pytest.raises(StoreUnavailable, match=victim):
        await cluster.write_slots([slots(key, 4, 8) for key in KEYS])
    assert [await pages(cluster, key, 2) for key in kept] == [[0, 1]] * len(kept)
    assert await cluster.write_slots([slots(kept[0], 8, 9)]) == generation, "it has no part in this write"
    servers[victim].start()
    after = await cluster.write_slots([slots(kept[0], 9, 10)])
    assert after != generation
    assert await cluster.write_slots([slots(lost[0], 0, 4)]) == after


async def test_a_request_on_a_lost_server_cannot_be_deleted_others_can(cluster: KVCluster, servers: KVServers) -> None:
    victim, lost, kept = split(cluster)
    await cluster.write_each([slots(key, 0, 8) for key in KEYS])
    servers[victim].kill()
    with pytest.raises(StoreUnavailable, match=victim):
        await cluster.delete_request(lost[0], [1], LAYOUT, 2)
    await cluster.delete_request(kept[0], [1], LAYOUT, 2)
    assert await cluster.read_page(kept[0], 1, LAYOUT, 0) is None
    assert await cluster.read_page(kept[1], 1, LAYOUT, 0) is not None


async def test_nobody_waits_twice_for_a_server_that_hangs(cluster: KVCluster, servers: KVServers, clock: Clock) -> None:
    victim, lost, kept = split(cluster)
    await cluster.write_each([slots(key, 0, 8) for key in KEYS])
    servers[victim].pause()
    try:
        first = await cluster.write_each([slots(lost[0], 8, 12), slots(kept[0], 8, 12)])
        assert victim in first[0].error and first[1].generation
        asked: list[str] = []
        spy(cluster, victim, asked.append)
        second = await cluster.write_each([slots(lost[0], 8, 12), slots(kept[0], 8, 12)])
        assert "not asked" in second[0].error and second[1] == first[1]
        with pytest.raises(StoreUnavailable, match="not asked"):
            await cluster.read_page(lost[1], 1, LAYOUT, 0)
        assert asked == []
    finally:
        servers[victim].resume()
    clock.now += PAUSE_S
    assert await cluster.read_page(lost[1], 1, LAYOUT, 0) is not None
    assert asked == ["GET"]
    assert not (await cluster.write_each([slots(lost[0], 8, 12)]))[0].error


async def test_a_server_that_refuses_connections_is_tried_every_time(cluster: KVCluster, servers: KVServers) -> None:
    victim, lost, _ = split(cluster)
    servers[victim].kill()
    assert (await cluster.write_each([slots(lost[0], 0, 4)]))[0].error
    servers[victim].start()
    assert not (await cluster.write_each([slots(lost[0], 0, 4)]))[0].error  # the clock did not move


# -- streaming ----------------------------------------------------------------------------------------------------------


async def test_pages_come_in_order_each_from_its_epoch_up_to_the_first_hole(cluster: KVCluster) -> None:
    key = KEYS[5]
    await cluster.write_each([slots(key, 0, 12, 1), slots(key, 12, 24, 3), slots(key, 28, 32, 3)])
    epochs = {page: 1 if page < 3 else 3 for page in range(8)}
    assert await pages(cluster, key, 8, epochs) == [0, 1, 2, 3, 4, 5]
    assert await pages(cluster, key, 8, {0: 1, 1: 1, 3: 3}) == [0, 1]
    assert await pages(cluster, key, 8, dict.fromkeys(range(8), 3)) == []
    assert await pages(cluster, key, 0) == []


async def test_a_slow_reader_and_many_readers_keep_to_the_bound(cluster: KVCluster) -> None:
    _, own, _ = split(cluster)
    await cluster.write_each([slots(key, 0, 10 * PAGE) for key in own])
    node = cluster._nodes[cluster.server_of(own[0])]
    read, under_way, most, started = node._kv.read_page, 0, 0, 0

    async def counted(*args: Any) -> bytes | None:
        nonlocal under_way, most, started
        started, under_way = started + 1, under_way + 1
        most = max(most, under_way)
        try:
            return await read(*args)
        finally:
            under_way -= 1

    node._kv.read_page = counted  # type: ignore[method-assign]
    seen = 0
    async with aclosing(cluster.read_pages(own[0], dict.fromkeys(range(10), 1), LAYOUT, range(10))) as stream:
        async for _ in stream:
            seen += 1
            await asyncio.sleep(0.01)
            assert started <= seen + 2, "two pages ahead of the one in the reader's hands"
    assert (seen, most) == (10, 2)
    found = await asyncio.gather(*(pages(cluster, key, 10) for key in own[:4]))
    assert found == [list(range(10))] * 4 and most == 2 and under_way == 0


async def test_a_stream_left_early_leaves_no_reply_behind_for_the_next(cluster: KVCluster) -> None:
    """A connection whose reply was not taken would answer the next question with it."""
    key = KEYS[2]
    await cluster.write_each([slots(key, 0, 400)])
    for _ in range(20):
        async with aclosing(cluster.read_pages(key, dict.fromkeys(range(100), 1), LAYOUT, range(100))) as stream:
            async for page, _framed in stream:
                if page == 1:
                    break
        assert await cluster.read_page(key, 1, LAYOUT, 50) == slots(key, 200, 204).data
    assert await pages(cluster, key, 100) == list(range(100))


async def test_a_server_killed_amid_a_stream_ends_it_after_what_came(cluster: KVCluster, servers: KVServers) -> None:
    key = KEYS[0]
    await cluster.write_each([slots(key, 0, 80)])
    seen: list[int] = []
    with pytest.raises(StoreUnavailable, match=cluster.server_of(key)):
        async for page, framed in cluster.read_pages(key, dict.fromkeys(range(20), 1), LAYOUT, range(20)):
            assert framed == slots(key, page * PAGE, page * PAGE + PAGE).data
            seen.append(page)
            if page == 4:
                servers[cluster.server_of(key)].kill()
    assert seen == list(range(len(seen))) and 5 <= len(seen) < 20


async def test_one_server_is_a_cluster_too(servers: KVServers) -> None:
    single = KVCluster(servers.urls[:1])
    await single.write_each([slots(key, 0, 8) for key in KEYS])
    assert [await pages(single, key, 2) for key in KEYS] == [[0, 1]] * len(KEYS)
    assert len({result.generation for result in await single.write_each([slots(key, 8, 9) for key in KEYS])}) == 1
    await single.close()
