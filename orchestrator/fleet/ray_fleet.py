"""The workers of a Ray cluster: one named, detached actor on every node that offers a `tideover_worker`.

The orchestrator may die and come back: it finds the actors by name and adopts them. A worker is watched by a call that
never returns; Ray fails that call the moment the process or its node is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from context_daemon.observability import Counter, get_logger
from context_daemon.records import DrainTarget, InterruptionCause, Lease, RequestKey
from orchestrator.events import EventLog
from orchestrator.fleet.backoff import Backoff
from worker.actor import InferenceWorker
from worker.spec import NAMESPACE, WorkerSpec

log = get_logger()

RESOURCE = "tideover_worker"
NODE_LABEL = "tideover-node"
_POLL_S = 0.5
_DEATHS = Counter("tideover_worker_deaths", "Workers found dead", ["cause"])


@dataclass(frozen=True, slots=True)
class FleetOptions:
    ray_address: str  # host:port of the head
    model: str
    model_path: str
    engine_args: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Worker:
    node_id: str
    handle: Any
    loaded: bool = False
    watcher: asyncio.Task[None] | None = None


class RayFleet:
    """A WorkerGateway over Ray; `run` keeps one worker on each live node."""

    def __init__(self, options: FleetOptions, events: EventLog) -> None:
        self._options = options
        self._events = events
        self._workers: dict[str, _Worker] = {}
        self._dead: dict[str, InterruptionCause] = {}
        self._backoff = Backoff(first_s=1.0, most_s=30.0)

    def connect(self) -> None:
        """Join the cluster as a driver. Blocking, once, before the event loop has other work."""
        host = self._options.ray_address.rsplit(":", 1)[0]
        ray.init(
            address=self._options.ray_address,
            namespace=NAMESPACE,
            _node_ip_address=host,
            log_to_driver=False,
            configure_logging=False,
        )

    async def run(self) -> None:
        await self._adopt()
        while True:
            await self._keep_one_per_node()
            await asyncio.sleep(_POLL_S)

    # -- WorkerGateway ----------------------------------------------------------------------------------------------
    def admit(self, worker_id: str, leases: Sequence[Lease]) -> None:
        if worker_id in self._workers:
            self._workers[worker_id].handle.admit.remote(list(leases))

    def set_targets(self, worker_id: str, targets: Mapping[RequestKey, DrainTarget]) -> None:
        if worker_id in self._workers:
            self._workers[worker_id].handle.set_targets.remote(dict(targets))

    def dead(self) -> Mapping[str, InterruptionCause]:
        return self._dead

    def reachable(self) -> set[str]:
        return {worker_id for worker_id, worker in self._workers.items() if worker.loaded}

    # -- keeping workers --------------------------------------------------------------------------------------------
    async def _adopt(self) -> None:
        """Take over the workers that a former orchestrator left running."""
        named = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        for entry in named:
            worker_id = entry["name"]
            if entry["namespace"] != NAMESPACE or "." not in worker_id:
                continue
            try:
                handle = ray.get_actor(worker_id, namespace=NAMESPACE)
            except ValueError:
                continue  # it died between the two calls
            self._watch(worker_id, _Worker(worker_id.rsplit(".", 1)[0], handle), adopted=True)

    async def _keep_one_per_node(self) -> None:
        nodes = await asyncio.to_thread(ray.nodes)
        live = {n["Labels"][NODE_LABEL]: n["NodeID"] for n in nodes if n["Alive"] and NODE_LABEL in n.get("Labels", {})}
        covered = {worker.node_id for worker in self._workers.values()}
        for node_id in live.keys() - covered:
            if self._backoff.ready(node_id, time.monotonic()):
                self._create(node_id, live[node_id])

    def _create(self, node_id: str, ray_node_id: str) -> None:
        worker_id = f"{node_id}.{int(time.time() * 1000) % 10**8:x}"
        spec = WorkerSpec(worker_id, self._options.model, self._options.model_path, self._options.engine_args)
        actor = ray.remote(InferenceWorker).options(
            name=worker_id,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            num_cpus=0,
            resources={RESOURCE: 1},
            scheduling_strategy=NodeAffinitySchedulingStrategy(ray_node_id, soft=False),
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(self._options.engine_args.get("num_threads") or 1)}},
        )
        self._events.add("worker_starting", f"{worker_id} on {node_id}: loading {self._options.model}")
        self._watch(worker_id, _Worker(node_id, actor.remote(spec)), adopted=False)

    def _watch(self, worker_id: str, worker: _Worker, *, adopted: bool) -> None:
        self._workers[worker_id] = worker
        worker.watcher = asyncio.create_task(self._live(worker_id, worker, adopted), name=f"watch-{worker_id}")

    async def _live(self, worker_id: str, worker: _Worker, adopted: bool) -> None:
        """The life of one worker as the fleet sees it: loaded (or adopted), then watched until it is dead."""
        try:
            await worker.handle.load.remote()
            worker.loaded = True
            self._backoff.succeeded(worker.node_id)
            self._events.add("worker_ready", f"{worker_id} " + ("adopted" if adopted else "ready"))
            await self._until_dead(worker)
        except ray.exceptions.RayActorError as error:
            self._buried(worker_id, worker, error)
        except ray.exceptions.RayTaskError as error:
            self._failed_to_load(worker_id, worker, error)

    async def _until_dead(self, worker: _Worker) -> None:
        while True:
            try:
                await worker.handle.wait_dead.remote()
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(0.5)  # cut off, perhaps not dead: the leases decide meanwhile

    def _buried(self, worker_id: str, worker: _Worker, error: Exception) -> None:
        node_gone = "node has died" in str(error)
        cause = InterruptionCause.NODE_LOST if node_gone else InterruptionCause.WORKER_DIED
        _DEATHS.labels(cause.value).inc()
        self._dead[worker_id] = cause
        self._workers.pop(worker_id, None)
        if not node_gone:
            self._backoff.failed(worker.node_id, time.monotonic())
        self._events.add(cause.value, f"{worker_id} is gone")
        log.info("worker_dead", worker=worker_id, error=str(error))

    def _failed_to_load(self, worker_id: str, worker: _Worker, error: Exception) -> None:
        self._workers.pop(worker_id, None)
        self._backoff.failed(worker.node_id, time.monotonic())
        reason = str(error).strip().splitlines()[-1]
        self._events.add("worker_failed", f"{worker_id} could not load {self._options.model}: {reason}")
        ray.kill(worker.handle)
