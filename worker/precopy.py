"""Copies sealed pages of sequences that will leave to the nodes where they will go on, while they still decode here.

A thread asks the node's daemon to prepare each target as pages are sealed; what the target has is known by its answers only.
The open page follows at the cut-over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from context_daemon.client import ContextClient
from context_daemon.fault_points import Point, hit
from context_daemon.guests import TURN_S
from context_daemon.observability import get_logger
from context_daemon.page_records import Shape
from context_daemon.phases import Phase, observe
from context_daemon.preparation import Preparation, Wanted
from context_daemon.records import RequestKey
from context_daemon.store import StoreUnavailable
from worker.held import Held
from worker.ledger import Ledger

log = get_logger()

_TURN_S = 0.1
_RENEW_S = 1.0  # what is there would else be let go (guests.LEASE_S)
_PAUSE_S = 1.0  # after a target that did not answer
_TARGETS = 8  # asked at once; a slow one holds up nobody else
_ANSWER_S = TURN_S + 1.0
_AGAIN_S = 0.02  # what the target's page streams had no turn for


@dataclass(slots=True)
class _Progress:
    """How far one sequence is at one target."""

    daemon: str
    epoch: int
    goal: int  # what was sealed when it began
    began: float
    asked: int = 0
    reached: int = 0
    at: float = 0.0  # of the last answer
    moved: bool = False  # by it
    timed: bool = False

    def due(self, sealed: int, now: float) -> bool:
        return sealed > self.asked or (self.moved and self.reached < sealed) or now - self.at >= _RENEW_S


class PreCopy:
    """`want` says what shall go where, as often as that changes; `finish` does the rest of one that stopped."""

    def __init__(
        self, client: ContextClient, ledger: Ledger, shape: Shape, on_crash: Callable[[BaseException], None]
    ) -> None:
        self._client, self._ledger, self._shape, self._on_crash = client, ledger, shape, on_crash
        self._wanted: Mapping[RequestKey, str] = {}
        self._progress: dict[RequestKey, _Progress] = {}
        self._paused: dict[str, float] = {}  # until then, targets that did not answer
        self._under_way: dict[str, Future[None]] = {}
        self._pool = ThreadPoolExecutor(_TARGETS, thread_name_prefix="pre-copy")
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pre-copy", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._pool.shutdown(cancel_futures=True)

    def want(self, wanted: Mapping[RequestKey, str]) -> None:
        """From now on these sequences are copied, each to the daemon at its address, and no others."""
        begins = not self._wanted and wanted
        self._wanted = wanted
        if begins:
            self._wake.set()

    # -- while they decode ------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._wake.wait(_TURN_S if self._wanted else None)
                self._wake.clear()
                self._turn()
        except Exception as error:  # noqa: BLE001 - a thread that dies unheard would leave every cut-over to the store
            self._on_crash(error)

    def _turn(self) -> None:
        wanted = self._wanted
        self._progress = {key: known for key, known in self._progress.items() if key in wanted}
        by_daemon: dict[str, list[Held]] = {}
        for key, daemon in wanted.items():
            held = self._ledger.get(key)
            if held is not None and not held.frozen:
                by_daemon.setdefault(daemon, []).append(held)
        now = time.monotonic()
        for daemon, some in by_daemon.items():
            free = daemon not in self._under_way or self._under_way[daemon].done()
            due = [held for held in some if self._is_due(held, daemon, now)] if free else []
            if due and self._paused.get(daemon, 0.0) <= now:
                self._under_way[daemon] = self._pool.submit(self._copy, daemon, due)

    def _is_due(self, held: Held, daemon: str, now: float) -> bool:
        sealed, known = held.sealed(self._shape.page_size), self._progress.get(held.key)
        if known is None or known.daemon != daemon or known.epoch != held.token.epoch:
            if sealed:
                self._progress[held.key] = _Progress(daemon, held.token.epoch, sealed, now)
            return sealed > 0
        return known.due(sealed, now)

    def _copy(self, daemon: str, some: list[Held]) -> None:
        try:
            hit(Point.PRECOPY_TURN)
            wanted = tuple(Wanted(one.key, one.token, one.sealed(self._shape.page_size)) for one in some)
            answers = self._client.prepare(Preparation(daemon, self._shape, wanted), _ANSWER_S)
            for one, reached in zip(wanted, answers, strict=True):
                self._note(daemon, one, reached)
        except StoreUnavailable as error:
            self._paused[daemon] = time.monotonic() + _PAUSE_S
            log.warning("target_not_prepared", target=daemon, error=str(error), effect="the cut-over may use the store")
        except Exception as error:  # noqa: BLE001 - a thread pool would swallow it
            self._on_crash(error)

    def _note(self, daemon: str, one: Wanted, reached: int) -> None:
        known = self._progress.get(one.key)
        if known is None or known.daemon != daemon or known.epoch != one.token.epoch:
            return
        known.at, known.moved = time.monotonic(), reached > known.reached
        known.asked, known.reached = one.positions, reached
        if reached >= known.goal and not known.timed:
            known.timed = True
            observe(Phase.PRE_COPY, known.at - known.began)

    # -- the cut-over -----------------------------------------------------------------------------------------------
    def finish(self, held: Held, daemon: str, until: float) -> bool:
        """Have all of a stopped sequence's KV at the target, its open page too. True once the target said so."""
        wanted = Wanted(held.key, held.token, held.exportable)
        if wanted.positions == 0:  # it waited in the engine: there is nothing to copy
            return True
        asked, reached = Preparation(daemon, self._shape, (wanted,), last=True), -1
        while not self._stopping.is_set() and (left := until - time.monotonic()) > 0:
            try:
                (now,) = self._client.prepare(asked, left)
            except StoreUnavailable as error:
                log.warning("target_not_prepared", target=daemon, request=str(held.key), error=str(error))
                return False
            if now >= wanted.positions:
                return True
            if now <= reached:
                return False  # it has no room, or the source lacks a page
            reached = now
            self._stopping.wait(_AGAIN_S)
        return False
