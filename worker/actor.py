"""The Ray shell around a worker: named, detached, never restarted in place (a fresh one has a fresh name).

Its node's daemon is found through the environment that the node's raylet was started with.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence

import ray
from msgspec.structs import replace

from context_daemon.client import ContextClient
from context_daemon.observability import configure_logging, get_logger, serve_metrics
from context_daemon.records import DrainTarget, Lease, RequestKey, WorkerStatus
from context_daemon.store import StoreUnavailable
from worker.answer import AnswerBuilder
from worker.engine.config import EngineConfig
from worker.engine.engine import TorchEngine
from worker.runtime import WorkerRuntime
from worker.spec import NAMESPACE, WorkerSpec
from worker.status import RuntimeOptions, loading_status
from worker.text import Tokenizer

log = get_logger()


class InferenceWorker:
    """`load` first; then `admit`. Everything returns at once but `load` and `wait_dead`."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._node_id = _environment("TIDEOVER_NODE_ID")
        self._client = ContextClient(_environment("TIDEOVER_DAEMON_ADDRESS"))
        self._runtime: WorkerRuntime | None = None
        self._loading = threading.Event()
        self._load_lock = asyncio.Lock()
        configure_logging("worker", worker=spec.worker_id, node=self._node_id)
        host = _environment("TIDEOVER_DAEMON_ADDRESS").rsplit(":", 1)[0]
        self._metrics_address = f"{host}:{serve_metrics(host, 0)}"

    async def load(self) -> str:
        """Load the model and start to beat; again (by an orchestrator that adopts this worker) it only answers.

        Returns the numerics class; raises with the reason if the model cannot be loaded.
        """
        async with self._load_lock:
            if self._runtime is None:
                self._runtime = await self._load_once()
        return self._runtime.status().numerics_class

    async def _load_once(self) -> WorkerRuntime:
        self._loading.set()
        threading.Thread(target=self._beat_while_loading, name="loading", daemon=True).start()
        try:
            runtime = await asyncio.to_thread(self._make_runtime)
        finally:
            self._loading.clear()
        runtime.start()
        return runtime

    async def admit(self, leases: Sequence[Lease]) -> None:
        self._loaded().admit(leases)

    async def set_targets(self, targets: Mapping[RequestKey, DrainTarget]) -> None:
        self._loaded().set_targets(dict(targets))

    async def status(self) -> WorkerStatus:
        return self._loaded().status()

    async def wait_dead(self) -> None:
        """Never returns: the call fails the moment this process dies, which is how death is seen."""
        await asyncio.Event().wait()

    def _loaded(self) -> WorkerRuntime:
        if self._runtime is None:
            raise RuntimeError(f"{self._spec.worker_id} has not loaded its model yet; call load first")
        return self._runtime

    def _make_runtime(self) -> WorkerRuntime:
        spec = self._spec
        engine = TorchEngine.load(EngineConfig(model=spec.model_path, **spec.engine_args))
        tokenizer = Tokenizer.load(spec.model_path)
        answers = AnswerBuilder(tokenizer, spec.model, engine.layout, engine.plan.spec.eos_token_ids)
        return WorkerRuntime(self._options(), engine, self._client, answers, notify=_notify, die=_die)

    def _options(self) -> RuntimeOptions:
        spec = self._spec
        return RuntimeOptions(
            worker_id=spec.worker_id,
            node_id=self._node_id,
            model=spec.model,
            heartbeat_s=spec.heartbeat_s,
            max_commit_lag=spec.max_commit_lag,
            max_queued_kv_bytes=spec.max_queued_kv_bytes,
            metrics_address=self._metrics_address,
            pid=os.getpid(),
        )

    def _beat_while_loading(self) -> None:
        status = loading_status(self._options())
        while self._loading.is_set():
            try:
                self._client.heartbeat(status)
                status = replace(status, beat=status.beat + 1)
            except StoreUnavailable as error:
                log.warning("heartbeat_failed", error=str(error))
            threading.Event().wait(1.0)


def _environment(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise RuntimeError(f"{name} is not set: start this node's raylet with the address of its context daemon")
    return value


def _notify(lease: Lease) -> None:
    """Tell the next owner straight away; if the word is lost, the router says it again."""
    try:
        ray.get_actor(lease.worker_id, namespace=NAMESPACE).admit.remote([lease])
    except ValueError as error:
        log.warning("target_not_found", worker=lease.worker_id, request=str(lease.key), error=str(error))


def _die(reason: str) -> None:
    log.error("exiting", reason=reason)
    os._exit(1)  # at once: no cleanup of a broken engine is worth a request that waits for it
