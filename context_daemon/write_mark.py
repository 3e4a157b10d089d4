"""How a writer finds that the durable store lost what it had acknowledged. Pure.

The append-only file that a store comes back from is a prefix of what its server did. So each writer keeps a number of its
own in the store, which grows behind its writes and in the same pipeline, and remembers the highest that it was answered. On
each new connection it reads the number before anything else: less than remembered means that acknowledged writes are
gone. INCR may run twice when its reply is lost: the number only has to grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from context_daemon import keys

_KEPT_S = 24 * 3600.0  # a mark outlives its writer by that


class WriteMark:
    """One process's. `writer` names one life of it: who was started anew has nothing to remember."""

    def __init__(self, writer: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = keys.mark(writer)
        self.remembered = 0
        self.incarnation = 1  # the highest that this process met
        self._clock = clock
        self._kept_since = -_KEPT_S
        self._asked_at = 0.0

    def commands(self) -> list[Sequence[str | int]]:
        """To be sent right behind a write, on its connection. The first one's reply goes to `acknowledged`."""
        now, grow = self._clock(), ("INCR", self.key)
        if now - self._kept_since < _KEPT_S / 4:
            return [grow]
        self._kept_since = now
        return [grow, ("EXPIRE", self.key, int(_KEPT_S))]

    def acknowledged(self, number: int) -> None:
        self.remembered = max(self.remembered, number)

    def saw(self, incarnation: int) -> None:
        self.incarnation = max(self.incarnation, incarnation)

    def lost(self, found: int, acknowledged: int) -> bool:
        """Writes are gone: `found` was asked for when `acknowledged` was what we remembered. True until `start_over`."""
        # Of a writer that was silent for so long it may have expired, and what it wrote is on the disk.
        expired = found == 0 and self._clock() - self._kept_since > 0.9 * _KEPT_S
        return found < acknowledged and not expired

    def start_over(self, found: int) -> None:
        """What was lost is dealt with."""
        self.remembered, self._kept_since = found, -_KEPT_S
