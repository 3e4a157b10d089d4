"""Workers without Ray on real parts: two nodes' daemons, two Redis servers, the torch engine on a tiny model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc

from context_daemon.client import EXPENSIVE, ContextClient
from context_daemon.fault_points import ENVIRONMENT
from context_daemon.records import (
    Endpoint,
    Interruption,
    InterruptionCause,
    JobRecord,
    JobState,
    Lease,
    RequestKey,
    RequestSpec,
    SamplingParams,
)
from context_daemon.redis_server import EmbeddedServers, free_port
from context_daemon.redis_store import RedisStore
from context_daemon.store import ContextStore, LeaseRequest
from worker.answer import AnswerBuilder
from worker.engine.config import EngineConfig
from worker.engine.engine import TorchEngine
from worker.engine.protocol import Engine, StepOutput
from worker.runtime import WorkerRuntime
from worker.status import RuntimeOptions
from worker.text import Tokenizer

T = TypeVar("T")
PROMPTS = ("The tide", "A harbour at dawn, and", "Salt", "Why do boats float? Because", "Rope and tar", "Gulls")


def spec(line: int, prompt: str, tokenizer: Tokenizer, **changes: Any) -> RequestSpec:
    fields: dict[str, Any] = {"seed": line, "max_tokens": 90, "temperature": 0.9, "top_p": 0.95, "ignore_eos": True}
    if line % 2:
        fields["temperature"] = 0.0
    params = SamplingParams(**(fields | changes))
    return RequestSpec(line, f"c{line}", Endpoint.COMPLETIONS, tokenizer.encode_prompt(prompt), params)


class PacedEngine(TorchEngine):
    """The real engine with a floor under its step time: a notice or an outage of seconds meets work on any machine."""

    STEP_S = 0.008

    def step(self) -> StepOutput:
        begin = time.monotonic()
        output = super().step()
        time.sleep(max(0.0, begin + self.STEP_S - time.monotonic()))
        return output


@dataclass
class Worker:
    """A WorkerRuntime and what it told the outside."""

    name: str
    runtime: WorkerRuntime
    engine: Engine
    client: ContextClient
    notified: list[Lease]
    deaths: list[str]

    def stop(self) -> None:
        self.runtime.stop()
        self.client.close()


def make_worker(
    model: str | Path,
    client: ContextClient,
    name: str,
    node: str,
    wrap: Callable[[TorchEngine], Engine] = lambda engine: engine,
    **engine: Any,
) -> Worker:
    """One that runs."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "num_threads": 1, "num_pages": 256} | engine
    torch_engine = PacedEngine.load(EngineConfig(model=str(model), **settings))
    used = wrap(torch_engine)
    eos = torch_engine.plan.spec.eos_token_ids
    answers = AnswerBuilder(Tokenizer.load(model), "tiny", torch_engine.layout, eos, clock=lambda: 1.0)
    notified: list[Lease] = []
    deaths: list[str] = []
    options = RuntimeOptions(name, node, "tiny", max_commit_lag=16)
    runtime = WorkerRuntime(options, used, client, answers, notify=notified.append, die=deaths.append)
    # A tiny model computes as fast as it fetches; here restores are to be seen, whatever the machine is doing.
    runtime._loop.prefill_cost = lambda: EXPENSIVE  # type: ignore[method-assign]
    runtime.start()
    return Worker(name, runtime, used, client, notified, deaths)


class Rig:
    """Use as a context manager. Jobs are driven through the store as the router would."""

    def __init__(self, folder: Path, model: Path, *daemon_flags: str) -> None:
        self.model = model
        self._daemon_flags = daemon_flags
        self.tokenizer = Tokenizer.load(model)
        self.servers = EmbeddedServers(folder)
        self.addresses = {node: f"127.0.0.1:{free_port()}" for node in ("n1", "n2")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._workers: list[Worker] = []

    def __enter__(self) -> Rig:
        self.servers.start()
        for node in self.addresses:
            self.start_daemon(node)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()
        for daemon in self._daemons.values():
            daemon.terminate()
            daemon.wait(10)
        self.servers.stop()

    def start_daemon(self, node: str, fault: str = "") -> None:
        """`fault` is one of context_daemon/fault_points.py."""
        command = [sys.executable, "-m", "context_daemon", "--node-id", node, "--listen", self.addresses[node]]
        command += ["--durable-url", self.servers.durable.url, "--kv-url", self.servers.kv.url, "--metrics-port", "0"]
        command += self._daemon_flags
        self._daemons[node] = subprocess.Popen(
            command, stderr=subprocess.DEVNULL, env=os.environ | {ENVIRONMENT: fault}
        )
        with grpc.insecure_channel(self.addresses[node]) as channel:
            grpc.channel_ready_future(channel).result(30)

    def daemon_ended(self, node: str) -> bool:
        return self._daemons[node].poll() is not None

    def kill_daemon(self, node: str) -> None:
        self._daemons[node].kill()
        self._daemons[node].wait()

    def worker(
        self, name: str, node: str, wrap: Callable[[TorchEngine], Engine] = lambda engine: engine, **engine: Any
    ) -> Worker:
        made = make_worker(self.model, ContextClient(self.addresses[node]), name, node, wrap, **engine)
        self._workers.append(made)
        return made

    def retire(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.stop()

    # -- the store, as the router sees it ---------------------------------------------------------------------------
    def store(self, use: Callable[[ContextStore], Any]) -> Any:
        async def once() -> Any:
            store = RedisStore(self.servers.durable.url)
            try:
                return await use(store)
            finally:
                await store.close()

        return asyncio.run(once())

    def submit(self, job_id: str, specs: Sequence[RequestSpec]) -> None:
        async def create(store: ContextStore) -> None:
            endpoint = Endpoint.COMPLETIONS.value
            await store.create_job(JobRecord(job_id, job_id, JobState.VALIDATING, "tiny", endpoint, time.time()))
            await store.add_requests(job_id, specs)
            await store.start_job(job_id, len(specs))

        self.store(create)

    def specs(self, **changes: Any) -> list[RequestSpec]:
        """One request for each of PROMPTS."""
        return [spec(line, prompt, self.tokenizer, **changes) for line, prompt in enumerate(PROMPTS, 1)]

    def undisturbed(self, job_id: str, specs: Sequence[RequestSpec], node: str = "n1") -> list[bytes]:
        """The lines of a job that one worker answers from its start to its end."""
        worker = self.worker(job_id, node)
        self.submit(job_id, specs)
        self.lease_all(job_id, worker)
        lines = self.results(job_id, len(specs))
        self.retire(worker)
        return lines

    def lease_all(self, job_id: str, worker: Worker) -> list[Lease]:
        """Everything READY goes to `worker`, and the worker is told."""

        async def lease(store: ContextStore) -> list[Lease]:
            numerics = worker.engine.layout.numerics_class
            ready = await store.ready_requests(job_id, 100)
            return await store.lease(job_id, 1, [LeaseRequest(r.key, r.epoch, worker.name, numerics) for r in ready])

        leases: list[Lease] = self.store(lease)
        worker.runtime.admit(leases)
        return leases

    def requeue(self, job_id: str, cause: InterruptionCause = InterruptionCause.WORKER_DIED) -> int:
        async def requeue(store: ContextStore) -> int:
            leased = await store.leased_requests(job_id)
            return await store.requeue(job_id, 1, [(item.key, item.token) for item in leased], cause)

        return int(self.store(requeue))

    def tokens(self, job_id: str) -> int:
        return int(self.store(lambda store: store.get_job(job_id)).output_tokens)

    def wait_tokens(self, job_id: str, count: int) -> None:
        until(lambda: self.tokens(job_id) >= count, f"{count} tokens of {job_id}")

    def results(self, job_id: str, count: int) -> list[bytes]:
        """The job's lines, once there are `count`."""
        lines = until(
            lambda: self._lines(job_id) if len(self._lines(job_id)) >= count else None, f"{count} lines of {job_id}"
        )
        return lines

    def _lines(self, job_id: str) -> list[bytes]:
        return [line.payload for line in self.store(lambda store: store.results(job_id, 0, 100))]

    def interruptions(self, job_id: str) -> list[Interruption]:
        rows: list[Interruption] = self.store(lambda store: store.interruptions(job_id))
        return rows


def until(condition: Callable[[], T], what: str, timeout_s: float = 40.0) -> T:
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.02)
    return value


@dataclass
class Gate:
    """Blocks a worker's step loop until opened: a process that is frozen and wakes later."""

    shut: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def close(self, worker: Worker) -> None:
        worker.runtime._loop.post(self._hold)
        self.shut.wait(10)

    def _hold(self) -> None:
        self.shut.set()
        self.opened.wait(60)


def keys(job_id: str, count: int) -> list[RequestKey]:
    return [RequestKey(job_id, line) for line in range(1, count + 1)]
