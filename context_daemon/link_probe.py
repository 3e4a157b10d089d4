"""How fast a link is, from a few megabytes over it, timed as they come. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from context_daemon.rates import MIN_SECONDS, LinkRate

PROBE_BYTES = 4 << 20  # long enough to be past a connection's slow start
PROBE_S = 0.03  # a slower link is known well enough after that

Mark = tuple[int, float]  # bytes so far, seconds since they were asked for


def rate_of(marks: Sequence[Mark]) -> LinkRate | None:
    """The first mark tells the set-up, the second half of the bytes the rate: TCP sends the first ones slowly. None when too
    little came to say."""
    if len(marks) < 2:
        return None
    total, ended = marks[-1]
    size, at = next(mark for mark in marks if mark[0] >= total / 2)
    if size == total:
        size, at = marks[-2]
    return LinkRate((total - size) / max(ended - at, MIN_SECONDS), marks[0][1])
