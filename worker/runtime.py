"""A worker without Ray: admission, the step loop, the committers, heartbeats and the drain, wired together.

The actor is a thin shell around this class; tests and benchmarks run it directly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from msgspec.structs import replace

from context_daemon.client import ContextClient
from context_daemon.kv_writer import KVWriter
from context_daemon.observability import get_logger
from context_daemon.records import (
    DrainTarget,
    InterruptionCause,
    Lease,
    RequestKey,
    WorkerStatus,
)
from context_daemon.store import StoreUnavailable
from worker.answer import AnswerBuilder
from worker.commit import KVCommitter, TokenCommitter
from worker.engine.protocol import Engine, EngineFault
from worker.handover import Handovers
from worker.held import Outcome
from worker.ledger import Ledger
from worker.loop import StepLoop
from worker.precopy import PreCopy
from worker.status import RuntimeOptions, engine_status, loading_status
from worker.takeover import Takeover

log = get_logger()

_KV_RANGE_BYTES = 16 << 20  # one gather's part
_SPARE_BLOCKS = 64  # free blocks of the arena at hand, so that no step waits for one
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
        self._die = die
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
            on_turn=self._before_step,
            on_crash=self._crashed,
        )
        self._takeover = Takeover(
            options.worker_id, client, layout, writer, answers, self._ledger, self._loop, self._crashed
        )
        self._precopy = PreCopy(client, self._ledger, writer.shape, self._crashed)
        self._handovers = Handovers(
            client,
            self._ledger,
            self._loop,
            self._tokens,
            self._kv,
            self._precopy,
            notify=notify,
            on_crash=self._crashed,
            clock=clock,
        )
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
        for part in (self._tokens, self._kv, self._loop, self._precopy, self._heart):
            part.start()

    def stop(self) -> None:
        """Stop without handing anything over: leases run out as after a crash."""
        self._stopping.set()
        self._handovers.abandon()
        for part in (self._loop, self._tokens, self._kv):
            part.stop()
        self._takeover.close()
        self._handovers.close()
        self._precopy.close()
        self._heart.join(timeout=10)

    def admit(self, leases: Iterable[Lease]) -> None:
        """Take over leased requests. Idempotent: what is held or on its way is left alone."""
        self._takeover.admit(leases)

    def set_targets(self, targets: Mapping[RequestKey, DrainTarget]) -> None:
        """Where the router wants this node's sequences to go; without a word they go back to the queue."""
        self._handovers.set_targets(targets)

    def _before_step(self) -> None:
        self._handovers.turn()

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
        draining = self._handovers.notice is not None
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
                self._handovers.hear(self._client.heartbeat(self.status()))
                heard = True
            except StoreUnavailable as error:
                if heard:
                    log.warning("heartbeat_unheard", error=str(error))
                heard = False
            except Exception as error:  # noqa: BLE001 - without a heart the worker would be declared dead, silently
                self._crashed(error)

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
            self._handovers.abandon()
            self._die(repr(error))

    def _hand_back(self, suspects: set[RequestKey]) -> None:
        """Suspects first: nobody else can say that they are. The rest is found by the router, too, when this worker is
        dead."""
        until = time.monotonic() + _LAST_WORDS_S
        for held in sorted(self._ledger.all(), key=lambda item: item.key not in suspects):
            blamed = held.key in suspects
            cause = InterruptionCause.ENGINE_FAULT if blamed else InterruptionCause.WORKER_DIED
            if time.monotonic() > until or self._handovers.move(held, "", cause, until) is None:
                log.warning("not_handed_back", request=str(held.key), blamed=blamed)
