"""How long a client rides out an orchestrator that is away: it is restarted, or a standby takes over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0


# What gRPC says when no connection came about. Should its words change, a wrong address is said later and nothing breaks.
_NO_CONNECTION = ("failed to connect", "connections to all backends failing", "resol", "lookup")


def connected(failure: Any) -> bool:
    """Was there a server at the other end of the call that failed?"""
    if failure.code() is not grpc.StatusCode.UNAVAILABLE:
        return True
    details = (failure.details() or "").lower()
    return not any(words in details for words in _NO_CONNECTION)


class Patience:
    """Of one call. `heard` after each sign of life; `wait` after each failure, which sleeps, or says that it is enough.

    A server that was never reached is given `first_s`, so that a wrong address is said soon; one that was, `patience_s`.
    `reached` also grows by a failure that shows a server: a first call may be cut off half-way.
    """

    def __init__(
        self,
        patience_s: float,
        first_s: float,
        *,
        reached: bool,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._patience_s = patience_s
        self._first_s = first_s
        self.reached = reached
        self._clock = clock
        self._sleep = sleep
        self._away_since: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    @property
    def away(self) -> bool:
        """Between a failure and the next sign of life."""
        return self._away_since is not None

    def heard(self) -> None:
        self.reached = True
        self._away_since = None
        self._pause_s = _FIRST_PAUSE_S

    def wait(self, failure: Any) -> bool:
        """True after a pause if the same call may be made again; False if its failure is final."""
        self.reached = self.reached or connected(failure)
        if failure.code() is not grpc.StatusCode.UNAVAILABLE:
            return False
        now = self._clock()
        self._away_since = now if self._away_since is None else self._away_since
        if now - self._away_since >= (self._patience_s if self.reached else self._first_s):
            return False
        self._sleep(self._pause_s)
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        return True
