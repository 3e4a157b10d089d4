"""Requests, shapes and blocks that the tests of the page table share."""

from __future__ import annotations

from context_daemon.page_records import Held, Shape
from context_daemon.page_table import PageTable
from context_daemon.records import RequestKey

SIZE, PROMPT, BLOCKS = 4, 6, 60
SHAPE, OTHER = Shape("lay", 24, SIZE), Shape("other", 40, SIZE)
KEYS = [RequestKey("job", 1), RequestKey("job", 2)]


def all_held(table: PageTable, key: RequestKey, layout: str) -> dict[int, Held]:
    entry = table.get(key)
    found = {number: table.held_page(key, layout, number) for number in (entry.pages if entry else ())}
    return {number: held for number, held in found.items() if held is not None}
