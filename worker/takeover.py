"""Takes leased requests over: asks the daemon for each one's record and KV, and brings both to the step loop.

The sequence enters the engine as soon as its record is here; its pages follow while others, and what is before its pages,
are computed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from context_daemon.client import ContextClient, NotOwner
from context_daemon.kv_writer import KVWriter
from context_daemon.observability import get_logger
from context_daemon.records import FencingToken, KVLayout, Lease, RequestKey
from context_daemon.restore_stream import RestoreStream
from context_daemon.store import StoreUnavailable
from worker.answer import AnswerBuilder
from worker.held import Held
from worker.imports import Import
from worker.ledger import Ledger
from worker.loop import Admission, StepLoop

log = get_logger()

_AT_ONCE = 8
_PATIENCE_S = 2.0  # pages that the engine has no room for so long are copied, so that the daemon has its arena back


class Takeover:
    """`admit` returns at once; `close` ends it."""

    def __init__(
        self,
        worker_id: str,
        client: ContextClient,
        layout: KVLayout,
        writer: KVWriter,
        answers: AnswerBuilder,
        ledger: Ledger,
        loop: StepLoop,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._worker_id, self._client, self._layout, self._writer = worker_id, client, layout, writer
        self._answers, self._ledger, self._loop, self._on_crash = answers, ledger, loop, on_crash
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="admit")
        self._admitting: dict[RequestKey, Lease] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def close(self) -> None:
        self._stopping.set()
        self._threads.shutdown(cancel_futures=True)

    def admit(self, leases: Iterable[Lease]) -> None:
        """Take over leased requests. Idempotent: what is held or on its way is left alone."""
        for lease in leases:
            with self._lock:
                known = (self._ledger.get(lease.key), self._admitting.get(lease.key))
                if any(item is not None and item.token >= lease.token for item in known):
                    continue  # the same word again, or a late one of an older lease
                self._admitting[lease.key] = lease
            self._threads.submit(self._restore, lease)

    def on_their_way(self) -> dict[RequestKey, FencingToken]:
        """What is not in the ledger yet."""
        with self._lock:
            return {lease.key: lease.token for lease in self._admitting.values()}

    def _restore(self, lease: Lease) -> None:
        try:
            self._restore_once(lease)
        except NotOwner as error:
            log.info("lease_gone", request=str(lease.key), epoch=lease.token.epoch, reason=str(error))
        except StoreUnavailable as error:
            # The lease stays ours on record; the router sends it again when the store is back.
            log.warning("restore_postponed", request=str(lease.key), error=str(error))
        except Exception as error:  # noqa: BLE001 - a thread pool would swallow it
            self._on_crash(error)
        finally:
            self._no_more_on_its_way(lease)

    def _no_more_on_its_way(self, lease: Lease) -> None:
        with self._lock:
            if self._admitting.get(lease.key) == lease:
                del self._admitting[lease.key]

    def _restore_once(self, lease: Lease) -> None:
        started = time.monotonic()
        arena, prefill = self._writer if self._writer.attached else None, self._loop.prefill_cost()
        restoring = self._client.restoring(
            lease.key, lease.token, self._worker_id, self._layout, arena=arena, prefill=prefill
        )
        with restoring as stream:
            admission = self._admission(stream, started)
            self._bring_in(admission)
            self._no_more_on_its_way(lease)  # so long, so that no heartbeat leaves it out
            if admission.incoming is not None:
                self._fetch(stream, admission.incoming)

    def _bring_in(self, admission: Admission) -> None:
        done = threading.Event()

        def admit() -> None:
            self._loop.admit(admission)
            done.set()

        self._loop.post(admit)
        while not done.wait(0.5) and not self._stopping.is_set():
            pass

    def _fetch(self, stream: RestoreStream, incoming: Import) -> None:
        """Offer what comes, and hold it where it is until it was taken in."""
        try:
            for page in stream.pages():
                if not incoming.offer(page) or self._stopping.is_set():
                    break
                self._loop.wake()
        except StoreUnavailable as error:
            log.warning("restore_cut_short", request=str(incoming.key), error=str(error), effect="the rest is computed")
        incoming.end()
        self._loop.wake()
        until = time.monotonic() + _PATIENCE_S
        while not incoming.wait(0.2) and not self._stopping.is_set():
            if time.monotonic() >= until:
                incoming.keep_copies()
                return

    def _admission(self, stream: RestoreStream, started: float) -> Admission:
        record = stream.record
        tokens = list(record.tokens)
        held = Held(record.key, record.token, record.spec, tokens, acked=len(tokens), exact=record.exact)
        some = stream.fetch_from < stream.fetch_to
        return Admission(
            held=held,
            answer=self._answers.start(record.key, record.spec, tokens),
            incoming=Import(record.key, record.token, stream.fetch_from, started) if some else None,
            fetch_to=stream.fetch_to,
            watermark=record.watermark if record.layout == self._layout.fingerprint else 0,
            started=started,
            interrupted=record.token.epoch > 1,
        )
