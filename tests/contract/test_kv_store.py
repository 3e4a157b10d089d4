"""What KVStore promises, of its three implementations: in memory, over one server, over a cluster of three."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from kv_servers import KVServers

from context_daemon.kv_cluster import KVCluster
from context_daemon.kv_pages import page_key, parse_page_key
from context_daemon.kv_slots import frame, framed_size, identity
from context_daemon.memory_kv import MemoryKV
from context_daemon.records import RequestKey
from context_daemon.redis_kv import RedisKV
from context_daemon.redis_script import connect
from context_daemon.store import KVStore, SlotWrite, StoredPage

LAYOUT, SLOT, PAGE = "lay", 24, 4
KEYS = [RequestKey("job", line) for line in range(1, 13)]
Lose = Callable[[], Awaitable[None]]


def raw(start: int, stop: int, mark: int = 0) -> bytes:
    return b"".join(bytes([(p + mark) % 251 + 1]) * SLOT for p in range(start, stop))


def slots(key: RequestKey, start: int, stop: int, *, epoch: int = 1, layout: str = LAYOUT, mark: int = 0) -> SlotWrite:
    data = frame(identity(key, epoch, layout), start, raw(start, stop, mark), SLOT)
    return SlotWrite(key, epoch, layout, start, stop - start, SLOT, PAGE, data)


@pytest.fixture(scope="module")
def kv_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVServers]:
    with KVServers(tmp_path_factory.mktemp("kv")) as servers:
        yield servers


async def flush(urls: list[str]) -> None:
    for url in urls:
        client = connect(url, 2.0)
        await client.flushall()
        await client.aclose()


@pytest.fixture(params=["memory", "redis", "cluster"])
async def kv_and_loss(request: pytest.FixtureRequest, kv_servers: KVServers) -> AsyncIterator[tuple[KVStore, Lose]]:
    """A store, and how it loses what KEYS[0] wrote."""
    await flush(kv_servers.urls)
    made: KVStore
    if request.param == "memory":
        made = memory = MemoryKV()

        async def lose() -> None:
            memory.lose_everything()

    else:
        cluster = KVCluster(kv_servers.urls)
        made = cluster if request.param == "cluster" else RedisKV(kv_servers[cluster.server_of(KEYS[0])].url)

        async def lose() -> None:
            await flush([kv_servers[cluster.server_of(KEYS[0])].url])

    yield made, lose
    await made.close()


@pytest.fixture
def kv(kv_and_loss: tuple[KVStore, Lose]) -> KVStore:
    return kv_and_loss[0]


async def test_what_was_written_is_read_page_by_page(kv: KVStore) -> None:
    await kv.write_slots([slots(key, 0, 11) for key in KEYS])
    for key in KEYS:
        whole = frame(identity(key, 1, LAYOUT), 0, raw(0, 11), SLOT)
        step = PAGE * framed_size(SLOT)
        pages = [await kv.read_page(key, 1, LAYOUT, page) for page in range(4)]
        assert pages == [whole[:step], whole[step : 2 * step], whole[2 * step :], None]


async def test_request_choice_epoch_and_layout_keep_pages_apart(kv: KVStore) -> None:
    writes = [
        slots(RequestKey(job, line, choice), 0, 4, epoch=epoch, layout=layout, mark=number)
        for number, (job, line, choice, epoch, layout) in enumerate(
            [("job", 1, 0, 1, LAYOUT), ("job", 1, 1, 1, LAYOUT), ("job", 11, 0, 1, LAYOUT), ("job2", 1, 0, 1, LAYOUT),
             ("job", 1, 0, 2, LAYOUT), ("job", 1, 0, 1, "other")]
        )
    ]  # fmt: skip
    await kv.write_slots(writes)
    assert [await kv.read_page(w.key, w.epoch, w.layout, 0) for w in writes] == [w.data for w in writes]
    assert len({w.data for w in writes}) == len(writes)


async def test_a_repeat_is_harmless_and_a_later_part_fills_the_page(kv: KVStore) -> None:
    key = KEYS[3]
    for write in (slots(key, 2, 3), slots(key, 0, 2), slots(key, 0, 2), slots(key, 3, 4)):
        await kv.write_slots([write])
    assert await kv.read_page(key, 1, LAYOUT, 0) == frame(identity(key, 1, LAYOUT), 0, raw(0, 4), SLOT)


async def test_any_mix_of_writes_gives_what_memory_gives(kv: KVStore) -> None:
    draw, memory = random.Random(7), MemoryKV()
    for _ in range(60):
        starts = [(draw.choice(KEYS), draw.randrange(0, 18), draw.randrange(1, 9)) for _ in range(draw.randrange(1, 6))]
        writes = [slots(key, start, start + count, epoch=draw.choice((1, 2))) for key, start, count in starts]
        await kv.write_slots(writes)
        await memory.write_slots(writes)
    for key in KEYS:
        for epoch in (1, 2):
            for page in range(8):
                expected = await memory.read_page(key, epoch, LAYOUT, page)
                assert await kv.read_page(key, epoch, LAYOUT, page) == expected


async def test_the_generation_stays_until_something_is_lost(kv_and_loss: tuple[KVStore, Lose]) -> None:
    kv, lose = kv_and_loss
    generation = await kv.write_slots([slots(KEYS[0], 0, 5)])
    assert generation
    for key in KEYS:
        assert await kv.write_slots([slots(key, 0, 1), slots(KEYS[0], 5, 6)]) == generation
    assert await kv.write_slots([slots(KEYS[1], 0, 8)]) == await kv.write_slots([]) == generation
    await lose()
    after = await kv.write_slots([slots(KEYS[0], 6, 7)])
    assert after != generation
    assert await kv.read_page(KEYS[0], 1, LAYOUT, 0) is None
    assert await kv.write_slots([slots(KEYS[0], 7, 8)]) == after


async def test_deleting_drops_the_named_pages_of_one_request_only(kv: KVStore) -> None:
    kept = [slots(key, 0, 8, epoch=epoch) for key in KEYS[1:] for epoch in (1, 2)]
    kept += [slots(KEYS[0], 0, 8, epoch=3), slots(KEYS[0], 0, 8, layout="other")]
    await kv.write_slots([*kept, *(slots(KEYS[0], 0, 10, epoch=epoch) for epoch in (1, 2))])
    await kv.delete_request(KEYS[0], [1, 2, 9], LAYOUT, 2)
    found = [await kv.read_page(KEYS[0], epoch, LAYOUT, page) for epoch in (1, 2) for page in range(3)]
    assert [page is None for page in found] == [True, True, False, True, True, False]
    for write in kept:
        assert await kv.read_page(write.key, write.epoch, write.layout, 1) == write.data[len(write.data) // 2 :]
    await kv.delete_request(KEYS[0], [1, 2], LAYOUT, 2)  # again: nothing there
    await kv.delete_request(KEYS[0], [], LAYOUT, 0)


async def test_a_malformed_write_is_refused(kv: KVStore) -> None:
    good = slots(KEYS[0], 0, 3)
    bad = SlotWrite(KEYS[1], 1, LAYOUT, 0, 4, SLOT, PAGE, good.data)
    with pytest.raises(ValueError, match="framed slots"):
        await kv.write_slots([good, bad])


async def test_what_lies_there_is_listed_and_taken_away_by_name(kv: KVStore) -> None:
    writes = [slots(key, 0, 6, epoch=epoch) for key in KEYS for epoch in (1, 2)]
    other = slots(RequestKey("job2", 3, 1), 0, 3, epoch=7, layout="other")
    await kv.write_slots([*writes, other])
    step = framed_size(SLOT)

    async def listed(job_id: str = "") -> set[StoredPage]:
        return {page async for batch in kv.list_pages(job_id) for page in batch}

    of_job = {StoredPage(w.key, LAYOUT, w.epoch, n, count * step) for w in writes for n, count in ((0, 4), (1, 2))}
    alone = StoredPage(other.key, "other", 7, 0, 3 * step)
    assert await listed() == of_job | {alone} and await listed("job") == of_job and await listed("job2") == {alone}
    assert await listed("nothing") == set()
    gone = [page for page in of_job if page.epoch == 1]
    assert await kv.delete_pages([*gone, StoredPage(KEYS[0], LAYOUT, 9, 0)]) == len(gone)
    assert await listed() == (of_job | {alone}) - set(gone)
    with pytest.raises(ValueError, match="job id"):
        await listed("a*")


@pytest.mark.parametrize(
    "name",
    ["kv:generation", "kv:l:job:1.0:2", "kv:l:job:1.x:2:3", "kv:l:a{b:1.0:2:3", "to:{job}:meta", "kv:l:job:1.0:2:"],
)
def test_other_names_are_no_pages(name: str) -> None:
    assert parse_page_key(name) is None


def test_a_pages_name_says_which_it_is() -> None:
    page = StoredPage(RequestKey("a.b-c", 12, 3), "0f", 4, 5, 6)
    assert parse_page_key(page_key("0f", page.key, 4, 5), 6) == page
