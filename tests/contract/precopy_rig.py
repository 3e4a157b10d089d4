"""Two daemons of which one copies pages to the other ahead of a cut-over, and what a test asks of them."""

from __future__ import annotations

import os

from transfer_rig import LAYOUT, Held, Node

from context_daemon.client import ContextClient
from context_daemon.page_records import Shape
from context_daemon.preparation import Preparation, Wanted
from context_daemon.records import FencingToken, InterruptionCause, Lease, TokenCommit
from context_daemon.redis_store import RedisStore

SIZE = LAYOUT.page_size
SHAPE = Shape(LAYOUT.fingerprint, LAYOUT.slot_bytes, SIZE)
ABSENT, GUESTS, REFUSED = "tideover_absent_pages_total", "tideover_guest_pages_total", "tideover_guest_refusals_total"


def wanted(held: Held, positions: int | None = None, token: FencingToken | None = None) -> Wanted:
    return Wanted(held.lease.key, token or held.lease.token, held.positions if positions is None else positions)


def prepare(
    client: ContextClient, target: Node | str, *some: Wanted, last: bool = False, shape: Shape = SHAPE
) -> list[int]:
    address = target if isinstance(target, str) else target.address
    return client.prepare(Preparation(address, shape, some, last), 10.0)


def grow(held: Held, client: ContextClient, slots: int) -> None:
    """The owner decodes on: so many slots more, and a token for each."""
    key, token, start = held.lease.key, held.lease.token, held.positions
    more, prompt = os.urandom(slots * LAYOUT.slot_bytes), len(held.blocks) * SIZE
    for at in range(slots):  # as it comes: a slot a step
        row = memoryview(more)[at * LAYOUT.slot_bytes : (at + 1) * LAYOUT.slot_bytes]
        written = held.writer.write(key, token.epoch, prompt, start + at, row)
        assert written is not None
        held.writer.announce([written])
    held.raw += more
    (result,) = client.commit([TokenCommit(key, token, 1, tuple(range(slots)))])
    assert result.length == 1 + slots


async def handed_over(store: RedisStore, held: Held, tokens: int) -> Lease:
    lease = await store.handover(held.lease.key, held.lease.token, tokens, None, "w2", InterruptionCause.NOTICE)
    assert lease is not None
    return lease
