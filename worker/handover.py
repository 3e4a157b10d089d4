"""The drain of a node under notice: who stops when, and each sequence's cut-over to its next owner.

The planner decides in the step loop, before each step; hand-overs run beside it, so that who can still finish decodes on.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from context_daemon.client import ContextClient
from context_daemon.fault_points import Point, hit
from context_daemon.observability import get_logger
from context_daemon.phases import Phase, observe
from context_daemon.records import DrainTarget, InterruptionCause, Lease, Notice, NoticeKind, RequestKey
from context_daemon.store import StoreUnavailable
from worker import drain
from worker.commit import KVCommitter, TokenCommitter
from worker.held import Held
from worker.ledger import Ledger
from worker.loop import StepLoop
from worker.metrics import HANDED_OVER
from worker.precopy import PreCopy

log = get_logger()

_AT_ONCE = 16
_RETRY_S = 0.1
_NOWHERE = DrainTarget()


class Handovers:
    """`hear` is told what stands, `turn` is called in the loop's thread before each step; `close` ends it.

    `notify(lease)` tells the next owner of a handed-over request.
    """

    def __init__(
        self,
        client: ContextClient,
        ledger: Ledger,
        loop: StepLoop,
        tokens: TokenCommitter,
        kv: KVCommitter,
        precopy: PreCopy,
        *,
        notify: Callable[[Lease], None],
        on_crash: Callable[[BaseException], None],
        clock: Callable[[], float],
    ) -> None:
        self._client, self._ledger, self._loop = client, ledger, loop
        self._tokens, self._kv, self._precopy = tokens, kv, precopy
        self._notify, self._on_crash, self._clock = notify, on_crash, clock
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="handover")
        self._targets: dict[RequestKey, DrainTarget] = {}
        self._stopping = threading.Event()
        self._heard_at = 0.0  # of the notice; monotonic
        self._untimed: set[Phase] = set()  # of the node's phases, under this notice
        self.notice: Notice | None = None  # by which this node ends

    def close(self) -> None:
        self.abandon()
        self._threads.shutdown(cancel_futures=True)

    def abandon(self) -> None:
        """What is not moved yet is not moved any more; returns at once."""
        self._stopping.set()

    def hear(self, notices: list[Notice]) -> None:
        terminal = [notice for notice in notices if notice.kind is not NoticeKind.REBALANCE]
        notice = min(terminal, key=lambda item: item.deadline, default=None)
        if notice != self.notice:
            event = "notice_seen" if notice else "notice_withdrawn"
            log.warning(event, kind=notice.kind if notice else "", deadline=notice.deadline if notice else 0)
            if notice is None:
                self._targets = {}  # by the next notice they may be gone themselves
            elif self.notice is None:
                hit(Point.NOTICE_HEARD)
                self._heard_at, self._untimed = time.monotonic(), {Phase.PLAN, Phase.SOURCE_STOPPED}
        self.notice = notice

    def set_targets(self, targets: Mapping[RequestKey, DrainTarget]) -> None:
        """Where the router wants this node's sequences to go; without a word they go back to the queue."""
        self._targets = dict(targets)
        if self.notice is not None:
            hit(Point.TARGETS_HEARD)
            self._timed(Phase.PLAN)

    def _timed(self, phase: Phase) -> None:
        if phase in self._untimed:
            self._untimed.discard(phase)
            observe(phase, time.monotonic() - self._heard_at)

    def _pace(self) -> drain.DrainPace:
        flush_s = self._tokens.latency_s + self._kv.latency_s + 0.05
        return drain.DrainPace(step_s=self._loop.step_s, flush_s=flush_s)

    def turn(self) -> None:
        """In the loop's thread, before each step."""
        notice = self.notice
        if notice is None:
            self._precopy.want({})
            return
        everything = self._ledger.all()
        if not everything:
            hit(Point.SOURCE_STOPPED)
            self._timed(Phase.SOURCE_STOPPED)
        held = [item for item in everything if not item.frozen and item.finish is None]
        sequences = [drain.DrainSequence(item.key, item.spec.params.max_tokens - len(item.tokens)) for item in held]
        decisions = drain.plan(self._clock(), notice.deadline, self._pace(), sequences)
        self._precopy.want(self._leaving(decisions))
        for key, action in decisions.items():
            if action is drain.Action.HAND_OVER:
                self._cut_over(key, notice)

    def _leaving(self, decisions: Mapping[RequestKey, drain.Action]) -> dict[RequestKey, str]:
        """Those that decode on and will go to a worker, with its daemon's address."""
        leaving = (key for key, action in decisions.items() if action is drain.Action.DECODE_ON)
        targets = {key: self._targets.get(key, _NOWHERE) for key in leaving}
        return {key: target.daemon for key, target in targets.items() if target.daemon}

    def _cut_over(self, key: RequestKey, notice: Notice) -> None:
        frozen = self._loop.freeze(key)
        if frozen is not None:
            self._threads.submit(self._hand_over, frozen, notice, time.monotonic())

    def _hand_over(self, held: Held, notice: Notice, stopped: float) -> None:
        try:
            hit(Point.CUT_STOPPED)
            target = self._targets.get(held.key, _NOWHERE)
            # Half of what is left is for the flush; a KV store that does not answer must not cost us the cut-over.
            patience = max(0.2, (notice.deadline - self._clock()) / 2)
            carried = self._carry(held, target, time.monotonic(), patience)
            lease = self.move(held, target.worker_id, InterruptionCause.NOTICE, math.inf)
            hit(Point.CUT_MOVED)
            self._say(held, lease, carried, time.monotonic() - stopped)
            if lease is not None and lease.worker_id:
                self._tell(lease)
        except Exception as error:  # noqa: BLE001 - a thread pool would swallow it
            self._on_crash(error)

    def _say(self, held: Held, lease: Lease | None, carried: str, seconds: float) -> None:
        HANDED_OVER.labels("worker" if lease and lease.worker_id else "queue").inc()
        observe(Phase.CUT_OVER, seconds)
        log.info(
            "handed_over",
            request=str(held.key),
            epoch=held.token.epoch,
            to=lease.worker_id if lease else "nobody: not the owner any more",
            tokens=len(held.tokens),
            kv=carried,
            ms=round(1e3 * seconds, 1),
        )

    def _carry(self, held: Held, target: DrainTarget, began: float, patience: float) -> str:
        """Have a stopped sequence's KV where its next owner finds it. Says where that is: with the target, in the store, or
        in neither as far as was heard in time."""
        settled = self._flush(held, began + patience, stored=False)
        hit(Point.CUT_SETTLED)
        if settled and target.daemon and self._precopy.finish(held, target.daemon, began + patience / 2):
            hit(Point.CUT_PREPARED)
            return "target"
        return "store" if self._flush(held, began + patience, stored=True) else "behind"

    def _tell(self, lease: Lease) -> None:
        """The lease has moved whether or not its new owner hears of it now: the router says it again."""
        try:
            self._notify(lease)
        except Exception as error:  # noqa: BLE001 - the next owner's trouble must not end what is still held here
            log.warning("target_not_told", worker=lease.worker_id, request=str(lease.key), error=repr(error))

    def _flush(self, held: Held, until: float, stored: bool) -> bool:
        """Wait until all of a frozen sequence is acknowledged, by the KV store too if `stored`; in short waits, so that
        `close` is heard."""
        while self._ledger.holds(held) and not self._stopping.is_set():
            left = until - time.monotonic()
            if self._ledger.wait_flushed(held.key, max(0.0, min(left, 2 * _RETRY_S)), stored):
                return True
            if left <= 0:
                break
        return False

    def move(self, held: Held, target: str, cause: InterruptionCause, until: float) -> Lease | None:
        """One script moves the lease; it is idempotent, and retried until `until` while the sequence is ours.

        A refusal with a commit still on its way proves nothing: the store may have its tokens already. With none on its
        way it says that somebody else is the owner now.
        """
        while self._ledger.holds(held) and not self._stopping.is_set():
            length, settled = held.acked, held.uncommitted == 0
            try:
                watermark = self._ledger.watermark(held)
                lease = self._client.handover(held.key, held.token, length, watermark, target, cause)
                if lease is not None or (settled and held.acked == length):
                    self._ledger.drop(held.key, held.token)
                    return lease
            except StoreUnavailable as error:
                log.warning("handover_postponed", request=str(held.key), error=str(error))
            if time.monotonic() > until:
                break
            self._stopping.wait(_RETRY_S)
        return None
