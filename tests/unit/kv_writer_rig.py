"""A context daemon's arena behind the calls that a worker has, and what a worker writes into it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence

from flaky_kv import FlakyKV

from context_daemon.arena import MIN_BYTES
from context_daemon.commit_mode import KVCommit, ShipBudget
from context_daemon.kv_service import KVService
from context_daemon.kv_slots import Absent, bare, identity, verify
from context_daemon.kv_writer import Announced, Attachment, KVWriter, Owned, SlotRange
from context_daemon.page_records import Shape
from context_daemon.records import (
    CommitResult,
    CommitStatus,
    FencingToken,
    Finish,
    KVLayout,
    RequestKey,
    TokenCommit,
)
from context_daemon.store import StoreUnavailable

LAYOUT = KVLayout("fp", "cpu-1", "float32", num_layers=2, num_kv_heads=4, head_dim=16, page_size=4)
SIZE, SLOT, PROMPT = LAYOUT.page_size, LAYOUT.slot_bytes, 6
KEY = RequestKey("job", 1)
PAGES_LOOKED_AT = 1000  # more than any test writes


class Daemon:
    """KVService behind the calls that a worker has, from any thread. Answers may be lost, and the daemon replaced."""

    def __init__(self, arena_bytes: int = MIN_BYTES) -> None:
        self._arena_bytes, self._lock = arena_bytes, threading.Lock()
        self._services: list[KVService] = []
        self.lose = 0
        self.restart()

    def restart(self) -> None:
        budget = ShipBudget(KVCommit.ARENA)
        with self._lock:
            self.service = KVService(
                FlakyKV(), here="", arena_bytes=self._arena_bytes, budget=budget, noticed=lambda: False
            )  # type: ignore[arg-type]
            self._services.append(self.service)

    async def close(self) -> None:
        for service in self._services:
            await service.close()

    def attach_arena(self, shape: Shape, want_blocks: int, writer: str) -> Attachment:
        with self._lock:
            attachment = self.service.attach(shape, os.getpid(), want_blocks, writer)
        self._answer()
        return attachment

    def announce(
        self,
        attachment: Attachment,
        ranges: Sequence[SlotRange],
        asks: Iterable[Owned],
        want_blocks: int,
        grant: int,
    ) -> Announced:
        with self._lock:
            answer = self.service.announce(attachment.arena_id, attachment.number, ranges, asks, want_blocks, grant)
        self._answer()
        return answer

    def _answer(self) -> None:
        if self.lose:
            self.lose -= 1
            raise StoreUnavailable("the answer was lost")

    def commit(self, key: RequestKey, tokens: int, finish: bool = False) -> None:
        end = Finish(True, b"") if finish else None
        commit = TokenCommit(key, FencingToken(1, 1), 0, tuple(range(tokens)), finish=end)
        with self._lock:
            self.service.committed(commit, CommitResult(key, CommitStatus.OK, tokens))

    def good(self, key: RequestKey, epoch: int = 1) -> dict[int, tuple[int, bytes]]:
        """The pages that count: slots that verify, and their raw bytes."""
        found = {}
        for number in range(PAGES_LOOKED_AT):
            held = self.service.table.held_page(key, LAYOUT.fingerprint, number)
            if held is None:
                continue
            size = held.slots * (SLOT + 16)
            page = memoryview(bytes(self.service.arena.view[held.block : held.block + size]))
            checked = verify(page, identity(key, epoch, LAYOUT.fingerprint), number * SIZE, SLOT, SIZE)
            assert checked.slots == held.slots and checked.reason in (Absent.NONE, Absent.SHORT)
            found[number] = (held.slots, bytes(bare(page, held.slots, SLOT)))
        return found

    @property
    def blocks(self) -> list[int]:
        return [page.block for entry in self.service.table.entries() for _, page in entry.all()]

    @property
    def used(self) -> int:
        return self.service._slabs.used_bytes


def attached(daemon: Daemon, spare: int = 8) -> KVWriter:
    writer = KVWriter(daemon, LAYOUT, spare)
    writer.attach()
    return writer


def raw(line: int, start: int, stop: int) -> bytes:
    return b"".join(bytes([(7 * line + position) % 251 + 1]) * SLOT for position in range(start, stop))


def put(writer: KVWriter, start: int, stop: int, line: int = 1) -> SlotRange:
    written = writer.write(RequestKey("job", line), 1, PROMPT, start, raw(line, start, stop))
    assert written is not None
    return written
