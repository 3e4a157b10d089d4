"""Fetching in order with a few requests under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from itertools import islice
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def read_ahead(
    fetch: Callable[[Item], Coroutine[Any, Any, Result]], items: Iterable[Item], ahead: int
) -> AsyncGenerator[Result]:
    """The results in the order of `items`. At most `ahead` of them are under way or waiting here, besides the one that the
    caller holds. Raises what a fetch raised, in its turn. Close it (`contextlib.aclosing`) to end early: what is
    under way is cancelled, and has ended when `aclose` returns."""
    source, waiting = iter(items), deque[asyncio.Task[Result]]()

    def start(count: int) -> None:
        waiting.extend(asyncio.create_task(fetch(item)) for item in islice(source, count))

    start(ahead)
    try:
        while waiting:
            result = await waiting.popleft()
            start(1)
            yield result
            del result  # it would stay in memory while the next one is awaited
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def gathered(source: AsyncGenerator[Item, None], most: int) -> AsyncGenerator[list[Item], None]:
    """What `source` has ready, in lists of at most `most`; it goes on by itself while a list is being used."""
    queue: asyncio.Queue[Item | None] = asyncio.Queue(maxsize=most)

    async def fill() -> None:
        try:
            async for item in source:
                await queue.put(item)
        finally:
            await queue.put(None)

    filling = asyncio.create_task(fill())
    try:
        while (first := await queue.get()) is not None:
            items, more = [first], True
            while more and len(items) < most and not queue.empty():
                item = queue.get_nowait()
                more = item is not None
                items += [item] if item is not None else []
            yield items
            if not more:
                break
        await filling  # its error is ours
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
