"""Named places where a process can be made to die or to stall, for tests and chaos runs. Silent in production.

`TIDEOVER_FAULT=commit.stored:kill:5` kills this process (SIGKILL) when it comes to that place for the fifth time;
`TIDEOVER_FAULT=ship.started:stall=2.5:1` makes it wait there, once, with everything that its thread does.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from enum import StrEnum

ENVIRONMENT = "TIDEOVER_FAULT"


class Point(StrEnum):
    """A daemon's pipeline, in the order of a request's life, then a drain's. `received` is before a thing is done, `stored`
    after it is done and before anybody is told."""

    RESTORE_RECORD = "restore.record"  # the owner is checked, no page is sent
    RESTORE_PAGES = "restore.pages"  # the first pages are under way
    ARENA_ATTACHED = "arena.attached"
    SLOTS_RECEIVED = "slots.received"
    SLOTS_TAKEN = "slots.taken"
    COMMIT_RECEIVED = "commit.received"
    COMMIT_STORED = "commit.stored"
    SHIP_STARTED = "ship.started"
    SHIP_STORED = "ship.stored"
    HANDOVER_RECEIVED = "handover.received"
    HANDOVER_STORED = "handover.stored"
    PEER_PAGES = "peer.pages"  # pages are about to go to another node
    PREPARE_RECEIVED = "prepare.received"  # at the source, by its worker
    PREPARE_ANSWERED = "prepare.answered"  # at the source, by the target
    GUESTS_RECEIVED = "guests.received"  # at the target: it is to take pages
    GUESTS_PAGE = "guests.page"  # a page is here, and not in the page table
    GUESTS_TAKEN = "guests.taken"
    NOTICE_HEARD = "notice.heard"  # in a worker: its node ends, and nothing was done about it
    TARGETS_HEARD = "targets.heard"
    PRECOPY_TURN = "precopy.turn"  # in a draining worker: it is about to ask for a pre-copy
    CUT_STOPPED = "cut.stopped"  # in a draining worker: a request takes no further step
    CUT_SETTLED = "cut.settled"  # its commit and its open page are acknowledged
    CUT_PREPARED = "cut.prepared"  # all of its KV is at the target
    CUT_MOVED = "cut.moved"  # its lease is the target's, which has not been told
    SOURCE_STOPPED = "source.stopped"  # nothing is held any more


@dataclass(slots=True)
class Fault:
    point: Point
    stall_s: float | None  # None: die
    nth: int
    seen: int = 0


def parse(text: str) -> Fault:
    """Raises ValueError with what is known when the text is no fault."""
    name, _, rest = text.partition(":")
    action, _, nth = rest.partition(":")
    kind, _, seconds = action.partition("=")
    try:
        point, count = Point(name), int(nth or "1")
        stall = float(seconds) if kind == "stall" else None
    except ValueError as error:
        raise ValueError(f"{ENVIRONMENT}={text!r}: {error}; points: {', '.join(Point)}") from error
    if kind not in ("kill", "stall") or count < 1:
        raise ValueError(f"{ENVIRONMENT}={text!r}: write POINT:kill:NTH or POINT:stall=SECONDS:NTH")
    return Fault(point, stall, count)


_armed: Fault | None = parse(os.environ[ENVIRONMENT]) if os.environ.get(ENVIRONMENT) else None


def hit(point: Point) -> None:
    """The code has come to `point`."""
    if _armed is None or _armed.point is not point:
        return
    _armed.seen += 1
    if _armed.seen != _armed.nth:
        return
    if _armed.stall_s is None:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(_armed.stall_s)
