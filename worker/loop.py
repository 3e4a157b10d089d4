"""The step loop: the one thread that touches the engine.

Each turn: take orders in, decide the drain, step, hand the new tokens to the ledger and export the new KV slots. It never
waits for a network round trip; it waits for commits only when the store is further behind than the bound.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from context_daemon.observability import get_logger
from context_daemon.phases import Phase, observe
from context_daemon.rates import PrefillCost
from context_daemon.records import FencingToken, Finish, RequestKey, ResumeReport
from worker.answer import Answer
from worker.commit import KVCommitter, WrittenKV
from worker.engine.protocol import Engine, EngineRequest, NewToken, RequestError, ResumeState, SlotSpan, StepOutput
from worker.held import Held
from worker.imports import Import, Imports, turn_s
from worker.ledger import Ledger
from worker.metrics import (
    BACK_PRESSURE,
    GENERATION_TOKENS,
    KV_USAGE,
    PREEMPTIONS,
    PROMPT_TOKENS,
    RECOMPUTED,
    RUNNING,
    STEP_SECONDS,
    WAITING,
)
from worker.prefill_probe import learn, probe

log = get_logger()

_IDLE_S = 0.02
_RATE_WINDOW_S = 3.0


@dataclass(slots=True)
class Admission:
    """A sequence with all that its start or resumption needs, ready to enter the engine."""

    held: Held
    answer: Answer
    incoming: Import | None  # its KV up to `fetch_to`
    fetch_to: int
    watermark: int  # positions that the KV store has under older epochs
    started: float  # monotonic
    interrupted: bool


@dataclass(slots=True)
class _Running:
    held: Held
    answer: Answer
    restored_at: float  # all that is to be computed from then on; monotonic
    restore_ms: float
    report_due: bool
    watermark: int
    restored: int = 0
    sources: tuple[str, ...] = ()


class StepLoop:
    """Runs an engine in a thread of its own. Everything else talks to it through `post`."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        kv: KVCommitter,
        *,
        max_commit_lag: int,
        on_turn: Callable[[], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._kv = kv
        self._slot_bytes = engine.layout.slot_bytes
        self._max_commit_lag = max_commit_lag
        self._on_turn = on_turn
        self._on_crash = on_crash
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[RequestKey, _Running] = {}
        self._imports = Imports(engine, self._imported)
        self._starved = False  # the last step had nothing to compute
        self._samples: deque[tuple[float, int]] = deque()
        self._scratch = bytearray()  # what a step's gather fills; grown, never shrunk
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self.beat = 0  # grows with each turn: the heartbeat's proof of life
        self.step_s = 0.1  # exponentially averaged
        self.prefill = probe(engine)

    def start(self) -> None:
        self._thread.start()

    def halt(self) -> None:
        """Take no further step; returns at once, also in the loop's own thread."""
        self._stopping.set()

    def stop(self) -> None:
        self.halt()
        self._thread.join(timeout=10)

    def post(self, order: Callable[[], None]) -> None:
        """Have `order` run in the loop's thread before its next step."""
        self._orders.put(order)

    def wake(self) -> None:
        """Something is there for a loop that waits."""
        self.post(_nothing)

    def tokens_per_s(self) -> float:
        now = time.monotonic()
        recent = [count for at, count in list(self._samples) if now - at < _RATE_WINDOW_S]
        return sum(recent) / _RATE_WINDOW_S

    def prefill_cost(self) -> PrefillCost:
        """What a prefill costs now. Decoding sequences share each iteration with it."""
        decoding = self.step_s if self._engine.capacity.running else 0.0
        alone = self.prefill.cost().seconds(0, self._engine.capacity.max_num_batched_tokens)
        return self.prefill.cost(slowdown=1.0 + decoding / alone)

    # -- orders (called in the loop's thread) -----------------------------------------------------------------------
    def admit(self, admission: Admission) -> None:
        """Take a sequence in, in place of what is left of an earlier lease of it; a late word of an old lease is nothing."""
        held = admission.held
        current = self._ledger.get(held.key)
        if current is not None and current.token >= held.token:
            return
        self._let_go(held.key)
        self._ledger.add(held, min(admission.fetch_to, admission.watermark))
        over = self._is_over(admission)
        incoming = admission.incoming
        if incoming is not None:
            self._imports.begin(incoming)
        if over is not None:
            self._end(held.key, admission.answer.payload(over, exact=held.exact))
            return
        now = time.monotonic()
        self._running[held.key] = _Running(
            held, admission.answer, now, 1e3 * (now - admission.started), admission.interrupted, admission.watermark
        )
        request = EngineRequest(held.key, held.spec.prompt_token_ids, held.spec.params)
        fetch = (incoming.start, admission.fetch_to) if incoming else (0, 0)
        resumed = admission.interrupted or held.tokens or incoming is not None
        try:
            self._engine.add(request, ResumeState(tuple(held.tokens), *fetch) if resumed else None)
        except RequestError as error:
            self._end(held.key, admission.answer.error("invalid_request_error", str(error)))

    def _is_over(self, admission: Admission) -> str | None:
        """Why a sequence has all its tokens already, if it has: their owner died before it could say so."""
        held = admission.held
        full = bool(held.tokens) and held.total >= self._engine.capacity.max_model_len
        return admission.answer.finished or ("length" if full else None)

    def drop(self, key: RequestKey, token: FencingToken) -> None:
        """Forget a sequence that is not ours any more under `token`; it may be ours again under a later one."""
        running = self._running.get(key)
        if running is not None and running.held.token == token:
            self._let_go(key)
        self._ledger.drop(key, token)

    def _let_go(self, key: RequestKey) -> None:
        self._engine.abort(key)
        self._imports.drop(key)
        running = self._running.pop(key, None)
        if running is not None:
            self._kv.writer.forget(key, running.held.token.epoch)

    def freeze(self, key: RequestKey) -> Held | None:
        """Stop a sequence after the step just done, its last slots exported; the ledger flushes what is on its way."""
        held = self._ledger.freeze(key)
        if held is None:
            return None
        self._export(max(self._kv.room(), held.total), only=key)
        self._let_go(key)
        return held

    # -- the loop ---------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except Exception as error:  # noqa: BLE001 - the engine is dead: its process must go with it
            self._on_crash(error)

    def _turn(self) -> None:
        self.beat += 1
        self._take_orders()
        self._on_turn()
        self._take_imports()
        if not self._engine.has_work() or self._held_back():
            return
        started = time.monotonic()
        output = self._engine.step()
        elapsed = time.monotonic() - started
        self._starved = not output.kv_len
        for key in output.preempted:
            self._imports.drop(key)
        if self._starved:
            return
        self.step_s += 0.2 * (elapsed - self.step_s)
        STEP_SECONDS.observe(elapsed)
        learn(self.prefill, output, elapsed)
        self._account(output)
        for token in output.tokens:
            self._take_token(token)
        self._ledger.computed(output.kv_len | dict.fromkeys(output.preempted, 0))
        self._export(self._kv.room())

    def _take_orders(self) -> None:
        try:
            busy = self._engine.has_work() and not self._starved
            order = self._orders.get(timeout=0 if busy else _IDLE_S)
            while True:
                order()
                order = self._orders.get_nowait()
        except queue.Empty:
            return

    def _take_imports(self) -> None:
        if len(self._imports):
            others = self._engine.capacity.running > len(self._imports)
            self._imports.turn(turn_s(self.step_s) if others else _IDLE_S)

    def _imported(self, item: Import) -> None:
        running = self._running.get(item.key)
        if running is None or running.held.token != item.token:
            return
        running.restored, running.sources = item.count, item.sources
        running.restored_at = time.monotonic()
        running.restore_ms = 1e3 * (running.restored_at - item.started)
        self._ledger.restored(item.key, item.token, min(item.reached, running.watermark))

    def _held_back(self) -> bool:
        started = time.monotonic()
        if self._ledger.wait_below_lag(self._max_commit_lag, timeout=_IDLE_S):
            return False
        BACK_PRESSURE.inc(time.monotonic() - started)
        return True

    def _take_token(self, token: NewToken) -> None:
        running = self._running.get(token.key)
        if running is None:
            return
        if running.report_due:
            self._report_resume(token.key, running)
        stopped = running.answer.push(token.token_id)
        reason = "stop" if stopped else token.finish_reason
        finish = running.answer.payload(reason, exact=running.held.exact) if reason is not None else None
        self._ledger.append(token.key, token.token_id, finish)
        if finish is not None:
            self._let_go(token.key)

    def _report_resume(self, key: RequestKey, running: _Running) -> None:
        running.report_due = False
        recomputed = self._engine.recomputed_tokens(key)
        RECOMPUTED.inc(recomputed)
        source = "+".join(running.sources) if running.restored else "recompute"
        recompute_ms = 1e3 * (time.monotonic() - running.restored_at)
        observe(Phase.RESTORE, running.restore_ms / 1e3)
        observe(Phase.FIRST_TOKEN, recompute_ms / 1e3)
        report = ResumeReport(recomputed, running.restored, running.restore_ms, recompute_ms, source)
        self._ledger.report_resume(key, report)

    def _end(self, key: RequestKey, finish: Finish) -> None:
        self._ledger.finish(key, finish)
        self._let_go(key)

    def _export(self, max_slots: int, only: RequestKey | None = None) -> None:
        """One gather over all that is due, then one write into the arena."""
        due = self._ledger.take_kv(max_slots, only)
        if not due:
            return
        size = sum(item.stop - item.start for item in due) * self._slot_bytes
        if len(self._scratch) < size:
            self._scratch = bytearray(size)
        gathered = memoryview(self._scratch)[:size]
        self._engine.export_slots([SlotSpan(item.key, item.start, item.stop) for item in due], gathered)
        written, refused, at = [], [], 0
        for item in due:
            until = at + (item.stop - item.start) * self._slot_bytes
            prompt = len(self._running[item.key].held.spec.prompt_token_ids)
            slots = self._kv.writer.write(item.key, item.epoch, prompt, item.start, gathered[at:until])
            at = until
            if slots is None:
                refused.append(item)
            else:
                written.append(WrittenKV(item, slots))
        if refused:
            self._ledger.kv_refused(refused)
        if written:
            self._kv.put(written)

    def _account(self, output: StepOutput) -> None:
        now = time.monotonic()
        self._samples.append((now, len(output.tokens)))
        while self._samples and now - self._samples[0][0] > 2 * _RATE_WINDOW_S:
            self._samples.popleft()
        capacity = self._engine.capacity
        RUNNING.set(capacity.running)
        WAITING.set(capacity.waiting)
        KV_USAGE.set(capacity.pages_used / max(1, capacity.pages_total))
        PREEMPTIONS.inc(len(output.preempted))
        PROMPT_TOKENS.inc(output.prefill_tokens)
        GENERATION_TOKENS.inc(len(output.tokens))


def _nothing() -> None:
    """An order that only wakes."""
