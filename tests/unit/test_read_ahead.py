from __future__ import annotations

import asyncio
import weakref
from contextlib import aclosing

import pytest

from context_daemon.read_ahead import read_ahead


class Thing:
    def __init__(self, number: int) -> None:
        self.number = number


class Source:
    """Fetches things, later ones sooner; counts those under way and those that anyone still holds."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.under_way, self.most, self.started = 0, 0, 0
        self.alive: weakref.WeakSet[Thing] = weakref.WeakSet()
        self._fails_at = fails_at

    async def fetch(self, number: int) -> Thing:
        self.started += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            for _ in range(5 - number % 4):
                await asyncio.sleep(0)
            if number == self._fails_at:
                raise OSError(f"no thing {number}")
            thing = Thing(number)
            self.alive.add(thing)
            return thing
        finally:
            self.under_way -= 1


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("ahead", [1, 2, 4])
async def test_in_order_and_no_more_in_memory_than_was_said(ahead: int) -> None:
    source, seen = Source(), []
    async with aclosing(read_ahead(source.fetch, range(20), ahead)) as things:
        async for thing in things:
            seen.append(thing.number)
            await settle()  # a slow reader: whatever may be fetched is there now
            assert source.started <= len(seen) + ahead
            assert len(source.alive) <= ahead + 1
            del thing
            assert len(source.alive) <= ahead + 1  # the generator itself still holds the one it handed out
    assert seen == list(range(20)) and source.most == ahead


async def test_what_was_handed_out_is_let_go_before_the_next_is_awaited() -> None:
    source, gate = Source(), asyncio.Event()

    async def fetch(number: int) -> Thing:
        if number == 1:
            await gate.wait()
        return await source.fetch(number)

    things = read_ahead(fetch, range(3), 1)
    first = await anext(things)
    del first
    waiting = asyncio.ensure_future(anext(things))
    await settle()
    assert len(source.alive) == 0
    gate.set()
    assert (await waiting).number == 1
    await things.aclose()


async def test_an_error_comes_in_its_turn_and_ends_the_rest() -> None:
    source, seen = Source(fails_at=5), []
    with pytest.raises(OSError, match="no thing 5"):
        async for thing in read_ahead(source.fetch, range(20), 3):
            seen += [thing.number]
    assert seen == [0, 1, 2, 3, 4] and source.under_way == 0 and source.started <= 8


class Endless:
    """Its first thing comes at once, the others never."""

    def __init__(self) -> None:
        self.under_way = 0

    async def fetch(self, number: int) -> None:
        self.under_way += 1
        try:
            if number:
                await asyncio.Event().wait()
        finally:
            self.under_way -= 1


async def test_closing_early_ends_what_is_under_way() -> None:
    source = Endless()
    async with aclosing(read_ahead(source.fetch, range(20), 4)) as things:
        async for _ in things:
            break
        await settle()
        assert source.under_way == 4
    assert source.under_way == 0


async def test_cancelling_the_reader_ends_what_is_under_way() -> None:
    source = Endless()
    reader = asyncio.ensure_future(anext(read_ahead(source.fetch, range(1, 9), 3)))
    await settle()
    assert source.under_way == 3
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert source.under_way == 0


async def test_nothing_to_read_ends_at_once() -> None:
    assert [thing async for thing in read_ahead(Source().fetch, [], 3)] == []
