"""What happened lately, for people who watch: a bounded list in memory. Facts live in the store, not here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from context_daemon.observability import get_logger

log = get_logger()


@dataclass(frozen=True, slots=True)
class Event:
    cursor: int
    time: float  # seconds since the epoch
    kind: str
    text: str


class EventLog:
    def __init__(self, clock: Callable[[], float], keep: int = 1000) -> None:
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=keep)
        self._next = 1

    def add(self, kind: str, text: str) -> None:
        self._events.append(Event(self._next, self._clock(), kind, text))
        self._next += 1
        log.info("event", kind=kind, text=text)

    @property
    def cursor(self) -> int:
        """Of the newest event."""
        return self._next - 1

    def since(self, cursor: int) -> list[Event]:
        """Events after `cursor`, oldest first; older ones than are kept are gone."""
        return [event for event in self._events if event.cursor > cursor]
