"""A worker without Ray: admission, the step loop, the committers, heartbeats and the drain, wired together.

The actor is a thin shell around this class; tests and benchmarks run it directly.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from msgspec.structs import replace

from context_daemon.client import ContextClient
from context_daemon.kv_writer import KVWriter
from context_daemon.observability import get_logger
from context_daemon.records import (
    InterruptionCause,
    Lease,
    Notice,
    NoticeKind,
    RequestKey,
    WorkerStatus,
)
from context_daemon.store import StoreUnavailable
from worker import drain
from worker.answer import AnswerBuilder
from worker.commit import KVCommitter, TokenCommitter
from worker.engine.protocol import Engine, EngineFault
from worker.held import Held, Outcome
from worker.ledger import Ledger
from worker.loop import StepLoop
from worker.metrics import HANDED_OVER
from worker.status import RuntimeOptions, engine_status, loading_status
from worker.takeover import Takeover

log = get_logger()

_KV_RANGE_BYTES = 16 << 20  # one gather's part
_SPARE_BLOCKS = 64  # free blocks of the arena at hand, so that no step waits for one
_RETRY_S = 0.1
_SETTLE_S = 2.0  # a dying worker waits so long for commits on their way
_LAST_WORDS_S = 5.0  # and tries so long to hand back what it holds


class WorkerRuntime:
    """Owns an engine and what it holds.

    `notify(lease)` tells the next owner of a handed-over request; `die(reason)` ends the process (a live worker around a
    dead engine is worse than none).
    """

    def __init__(
        self,
        options: RuntimeOptions,
        engine: Engine,
        client: ContextClient,
        answers: AnswerBuilder,
        *,
        notify: Callable[[Lease], None],
        die: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._engine = engine
        self._client = client
        self._notify = notify
        self._die = die
        self._clock = clock
        layout = engine.layout
        self._ledger = Ledger(layout.fingerprint, layout.page_size, max(1, _KV_RANGE_BYTES // layout.slot_bytes))
        max_slots = max(64, options.max_queued_kv_bytes // layout.slot_bytes)
        writer = KVWriter(client, layout, max(_SPARE_BLOCKS, 2 * engine.capacity.max_num_seqs))
        self._kv = KVCommitter(self._ledger, writer, max_slots, self._crashed)
        self._tokens = TokenCommitter(self._ledger, client, self._on_outcome, self._crashed)
        self._loop = StepLoop(
            engine,
            self._ledger,
            self._kv,
            max_commit_lag=options.max_commit_lag,
            on_turn=self._drain_turn,
            on_crash=self._crashed,
        )
        self._takeover = Takeover(
            options.worker_id, client, layout, writer, answers, self._ledger, self._loop, self._crashed
        )
        self._handovers = ThreadPoolExecutor(16, thread_name_prefix="handover")
        self._notice: Notice | None = None
        self._targets: dict[RequestKey, str] = {}
        self._stopping = threading.Event()
        self._dying = threading.Lock()  # taken once, never given back
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        try:
            self._kv.writer.attach()
        except StoreUnavailable as error:
            log.warning(
                "arena_not_attached", error=str(error), effect="KV waits in the engine until the daemon answers"
            )
        for part in (self._tokens, self._kv, self._loop, self._heart):
            part.start()

    def stop(self) -> None:
        """Stop without handing anything over: leases run out as after a crash."""
        self._stopping.set()
        for part in (self._loop, self._tokens, self._kv):
            part.stop()
        self._takeover.close()
        self._handovers.shutdown(cancel_futures=True)
        self._heart.join(timeout=10)

    def admit(self, leases: Iterable[Lease]) -> None:
        """Take over leased requests. Idempotent: what is held or on its way is left alone."""
        self._takeover.admit(leases)

    # -- after a commit ---------------------------------------------------------------------------------------------
    def _on_outcome(self, outcome: Outcome) -> None:
        for key in outcome.fenced:
            log.info("fenced", request=str(key), effect="another owner has it; dropped here")
        for key, length in outcome.diverged:
            log.error("diverged", request=str(key), length=length, effect="the store keeps its tokens; dropped here")
        for held in outcome.dropped:
            self._loop.post(partial(self._loop.drop, held.key, held.token))

    # -- heartbeat --------------------------------------------------------------------------------------------------
    def status(self) -> WorkerStatus:
        admitting = self._takeover.on_their_way()
        held = {item.key: item.token for item in self._ledger.all()} | admitting
        draining = self._terminating() is not None
        return replace(
            engine_status(loading_status(self._options), self._engine),
            state="ready" if not draining else ("draining" if held else "drained"),
            draining=draining,
            beat=self._loop.beat,
            waiting=self._engine.capacity.waiting + len(admitting),
            tokens_per_s=round(self._loop.tokens_per_s(), 2),
            held=tuple((k.job_id, k.line, k.choice, t.epoch) for k, t in held.items()),
        )

    def _beat(self) -> None:
        heard = True
        while not self._stopping.wait(self._options.heartbeat_s):
            try:
                self._hear(self._client.heartbeat(self.status()))
                heard = True
            except StoreUnavailable as error:
                if heard:
                    log.warning("heartbeat_unheard", error=str(error))
                heard = False
            except Exception as error:  # noqa: BLE001 - without a heart the worker would be declared dead, silently
                self._crashed(error)

    def _hear(self, notices: list[Notice]) -> None:
        terminal = [notice for notice in notices if notice.kind is not NoticeKind.REBALANCE]
        notice = min(terminal, key=lambda item: item.deadline, default=None)
        if notice != self._notice:
            event = "notice_seen" if notice else "notice_withdrawn"
            log.warning(event, kind=notice.kind if notice else "", deadline=notice.deadline if notice else 0)
            if notice is None:
                self._targets = {}  # by the next notice they may be gone themselves
        self._notice = notice

    def _terminating(self) -> Notice | None:
        return self._notice

    # -- drain ------------------------------------------------------------------------------------------------------
    def set_targets(self, targets: dict[RequestKey, str]) -> None:
        """Where the router wants this node's sequences to go; without a word they go back to the queue."""
        self._targets = dict(targets)

    def _pace(self) -> drain.DrainPace:
        flush_s = self._tokens.latency_s + self._kv.latency_s + 0.05
        return drain.DrainPace(step_s=self._loop.step_s, flush_s=flush_s)

    def _drain_turn(self) -> None:
        """In the loop's thread, before each step."""
        notice = self._terminating()
        if notice is None:
            return
        held = [item for item in self._ledger.all() if not item.frozen and item.finish is None]
        sequences = [drain.DrainSequence(item.key, item.spec.params.max_tokens - len(item.tokens)) for item in held]
        decisions = drain.plan(self._clock(), notice.deadline, self._pace(), sequences)
        for key, action in decisions.items():
            if action is drain.Action.HAND_OVER:
                frozen = self._loop.freeze(key)
                if frozen is not None:
                    self._handovers.submit(self._hand_over, frozen, notice)

    def _hand_over(self, held: Held, notice: Notice) -> None:
        try:
            # Half of what is left is for the flush; a KV store that does not answer must not cost us the cut-over.
            patience = max(0.2, (notice.deadline - self._clock()) / 2)
            flushed = self._flush(held, time.monotonic() + patience)
            lease = self._move(held, self._targets.get(held.key, ""), InterruptionCause.NOTICE, math.inf)
            HANDED_OVER.labels("worker" if lease and lease.worker_id else "queue").inc()
            log.info(
                "handed_over",
                request=str(held.key),
                epoch=held.token.epoch,
                to=lease.worker_id if lease else "nobody: not the owner any more",
                tokens=len(held.tokens),
                flushed=flushed,
            )
            if lease is not None and lease.worker_id:
                self._tell(lease)
        except Exception as error:  # noqa: BLE001 - a thread pool would swallow it
            self._crashed(error)

    def _tell(self, lease: Lease) -> None:
        """The lease has moved whether or not its new owner hears of it now: the router says it again."""
        try:
            self._notify(lease)
        except Exception as error:  # noqa: BLE001 - the next owner's trouble must not end what is still held here
            log.warning("target_not_told", worker=lease.worker_id, request=str(lease.key), error=repr(error))

    def _flush(self, held: Held, until: float) -> bool:
        """Wait until all of a frozen sequence is acknowledged; in short waits, so that `stop` is heard."""
        while self._ledger.holds(held) and not self._stopping.is_set():
            left = until - time.monotonic()
            if self._ledger.wait_flushed(held.key, max(0.0, min(left, 2 * _RETRY_S))):
                return True
            if left <= 0:
                break
        return False

    def _move(self, held: Held, target: str, cause: InterruptionCause, until: float) -> Lease | None:
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

    # -- the end ----------------------------------------------------------------------------------------------------
    def _crashed(self, error: BaseException) -> None:
        """Hand back what is held, then die; whoever comes second with another error leaves it at that."""
        if not self._dying.acquire(blocking=False):
            return
        suspects = set(error.suspects) if isinstance(error, EngineFault) else set()
        log.error("worker_fatal", error=repr(error), suspects=[str(key) for key in suspects], exc_info=error)
        try:
            self._loop.halt()
            self._ledger.wait_settled(_SETTLE_S)
            self._hand_back(suspects)
        except Exception as failure:  # noqa: BLE001 - whatever else breaks now, the process must go
            log.error("not_handed_back", error=repr(failure))
        finally:
            self._stopping.set()
            self._die(repr(error))

    def _hand_back(self, suspects: set[RequestKey]) -> None:
        """Suspects first: nobody else can say that they are. The rest is found by the router, too, when this worker is
        dead."""
        until = time.monotonic() + _LAST_WORDS_S
        for held in sorted(self._ledger.all(), key=lambda item: item.key not in suspects):
            blamed = held.key in suspects
            cause = InterruptionCause.ENGINE_FAULT if blamed else InterruptionCause.WORKER_DIED
            if time.monotonic() > until or self._move(held, "", cause, until) is None:
                log.warning("not_handed_back", request=str(held.key), blamed=blamed)
