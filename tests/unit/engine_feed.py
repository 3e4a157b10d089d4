"""Brings KV into an engine as a step loop does: page by page, as far as there is room."""

from __future__ import annotations

import random
from dataclasses import dataclass

from context_daemon.records import RequestKey
from worker.engine.engine import TorchEngine
from worker.engine.protocol import EngineRequest, ResumeState


@dataclass
class _Left:
    key: RequestKey
    at: int
    stop: int
    data: memoryview


class Feed:
    """`rng` cuts what is imported at random."""

    def __init__(self, engine: TorchEngine, rng: random.Random | None = None) -> None:
        self._engine, self._rng = engine, rng
        self._left: list[_Left] = []

    def add(self, request: EngineRequest, tokens: tuple[int, ...], kv: bytearray, start: int = 0) -> None:
        """`kv` are raw slots from position `start` on."""
        stop = start + len(kv) // self._engine.layout.slot_bytes
        self._engine.add(request, ResumeState(tokens, start, stop))
        if start < stop:
            self._left.append(_Left(request.key, start, stop, memoryview(kv)))

    def turn(self) -> bool:
        """One piece of each; false when all is in."""
        for item in list(self._left):
            count = item.stop - item.at
            if self._rng is not None:
                count = self._rng.randint(1, count)
            size = count * self._engine.layout.slot_bytes
            if not self._engine.import_slots(item.key, item.at, item.at + count, item.data[:size]):
                continue
            item.at, item.data = item.at + count, item.data[size:]
            if item.at == item.stop:
                self._engine.end_import(item.key, item.stop)
                self._left.remove(item)
        return bool(self._left)

    def drain(self) -> None:
        while self.turn():
            self._engine.step()
