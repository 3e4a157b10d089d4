"""`tideover bench commit`: what committing every decode step costs, on a real engine, daemon and Redis.

Segments alternate in one process, so that a noisy machine disturbs both alike: "off" steps the bare engine, "on" runs the
whole worker (step loop, token commits, KV writes, heartbeats) over the same prompts and the same number of steps.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from context_daemon.client import ContextClient
from context_daemon.records import (
    CommitResult,
    Endpoint,
    JobRecord,
    JobState,
    Lease,
    RequestKey,
    RequestSpec,
    SamplingParams,
    TokenCommit,
)
from context_daemon.redis_server import EmbeddedServers, free_port
from context_daemon.redis_store import RedisStore
from context_daemon.store import LeaseRequest
from worker.answer import Answer, AnswerBuilder
from worker.engine.config import EngineConfig
from worker.engine.engine import TorchEngine
from worker.engine.protocol import EngineRequest
from worker.runtime import WorkerRuntime
from worker.status import RuntimeOptions
from worker.text import Tokenizer

PROMPT_TOKENS = 32


@dataclass(slots=True)
class Timeline:
    """When each generated token was sampled, and when its commit was acknowledged."""

    sampled: dict[RequestKey, list[float]] = field(default_factory=dict)
    lags_ms: list[float] = field(default_factory=list)

    def decode_rate(self) -> float:
        """Tokens/s between the moment all sequences decode and the moment the first one is done."""
        start = max(times[0] for times in self.sampled.values())
        end = min(times[-1] for times in self.sampled.values())
        tokens = sum(1 for times in self.sampled.values() for at in times if start < at <= end)
        return tokens / (end - start)

    def done(self, sequences: int, tokens: int) -> bool:
        return len(self.sampled) == sequences and all(len(times) >= tokens for times in self.sampled.values())


class _TimedAnswers(AnswerBuilder):
    timeline: Timeline

    def start(self, key: RequestKey, spec: RequestSpec, tokens: Sequence[int]) -> Answer:
        answer = super().start(key, spec, tokens)
        times = self.timeline.sampled.setdefault(key, [])
        push = answer.push

        def timed(token_id: int) -> bool:
            times.append(time.perf_counter())
            return push(token_id)

        answer.push = timed  # type: ignore[method-assign]
        return answer


class _TimedClient(ContextClient):
    timeline: Timeline

    def commit(self, commits: Sequence[TokenCommit]) -> list[CommitResult]:
        results = super().commit(list(commits))
        now = time.perf_counter()
        for commit in commits:
            for position in range(commit.position, commit.position + len(commit.tokens)):
                self.timeline.lags_ms.append(1e3 * (now - self.timeline.sampled[commit.key][position]))
        return results


class CommitBench:
    """An engine, a daemon and two Redis servers for the length of a `with`."""

    def __init__(self, model: Path, max_batch: int, steps: int, threads: int) -> None:
        self._steps = steps
        self._config = EngineConfig(
            model=str(model), max_num_seqs=max_batch, max_model_len=PROMPT_TOKENS + steps + 16, num_threads=threads
        )
        self._model = model
        self._stack = ExitStack()

    def __enter__(self) -> CommitBench:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tideover-bench-")))
        servers = self._stack.enter_context(EmbeddedServers(folder))
        self._durable_url = servers.durable.url
        self._address = f"127.0.0.1:{free_port('127.0.0.1')}"
        command = [sys.executable, "-m", "context_daemon", "--node-id", "bench", "--listen", self._address]
        command += ["--durable-url", servers.durable.url, "--kv-url", servers.kv.url]
        daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self._daemon = psutil.Process(daemon.pid)
        self._stack.callback(daemon.wait)
        self._stack.callback(daemon.terminate)
        self._engine = TorchEngine.load(self._config)
        self._tokenizer = Tokenizer.load(self._model)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def off(self, batch: int) -> float:
        """Decode tokens/s of the bare engine."""
        timeline = Timeline()
        for request in self._requests(batch, "off"):
            self._engine.add(request)
        while not timeline.done(batch, self._steps):
            for token in self._engine.step().tokens:
                timeline.sampled.setdefault(token.key, []).append(time.perf_counter())
        for key in timeline.sampled:
            self._engine.abort(key)
        return timeline.decode_rate()

    def on(self, batch: int) -> Timeline:
        """The same through a whole worker, every step committed."""
        leases = asyncio.run(self._leases(batch))
        timeline = Timeline()
        client = _TimedClient(self._address)
        client.timeline = timeline
        answers = _TimedAnswers(self._tokenizer, "bench", self._engine.layout, self._engine.plan.spec.eos_token_ids)
        object.__setattr__(answers, "timeline", timeline)
        died: list[str] = []
        runtime = WorkerRuntime(
            RuntimeOptions("bench", "bench", "bench", pid=os.getpid()),
            self._engine,
            client,
            answers,
            notify=lambda lease: None,
            die=died.append,
        )
        runtime.start()
        try:
            runtime.admit(leases)
            while not timeline.done(batch, self._steps) or runtime.status().held:
                if died:
                    raise RuntimeError(f"the worker died: {died[0]}")
                time.sleep(0.02)
        finally:
            runtime.stop()
            client.close()
        return timeline

    def cpu(self) -> tuple[float, float]:
        """CPU seconds so far: of this process (engine and worker), of the daemon."""
        times = self._daemon.cpu_times()
        return time.process_time(), times.user + times.system

    def bytes_per_step(self, batch: int) -> int:
        """KV slots and token ids that one decode step commits."""
        return batch * (self._engine.layout.slot_bytes + 4)

    def _requests(self, batch: int, job_id: str) -> list[EngineRequest]:
        return [
            EngineRequest(RequestKey(job_id, line), spec.prompt_token_ids, spec.params)
            for line, spec in enumerate(self._specs(batch), start=1)
        ]

    def _specs(self, batch: int) -> list[RequestSpec]:
        params = SamplingParams(seed=1, max_tokens=self._steps, temperature=0.0, ignore_eos=True)
        prompts = [tuple(100 + (7 * line + 13 * at) % 1000 for at in range(PROMPT_TOKENS)) for line in range(batch)]
        return [
            RequestSpec(line, f"c{line}", Endpoint.COMPLETIONS, prompt, params)
            for line, prompt in enumerate(prompts, start=1)
        ]

    async def _leases(self, batch: int) -> list[Lease]:
        store = RedisStore(self._durable_url)
        job_id = f"bench-{time.time_ns()}"
        job = JobRecord(job_id, job_id, JobState.VALIDATING, "bench", Endpoint.COMPLETIONS.value, time.time())
        await store.create_job(job)
        await store.add_requests(job_id, self._specs(batch))
        await store.start_job(job_id, batch)
        numerics = self._engine.layout.numerics_class
        wanted = [LeaseRequest(r.key, r.epoch, "bench", numerics) for r in await store.ready_requests(job_id, batch)]
        leases = await store.lease(job_id, 1, wanted)
        await store.close()
        return leases


@dataclass(slots=True)
class _Side:
    """The segments of one kind: decode rates, and the CPU seconds of this process and of the daemon in them."""

    rates: list[float] = field(default_factory=list)
    worker_cpu: float = 0.0
    daemon_cpu: float = 0.0

    def run(self, bench: CommitBench, segment: Callable[[], float]) -> None:
        worker, daemon = bench.cpu()
        self.rates.append(segment())
        worker_after, daemon_after = bench.cpu()
        self.worker_cpu += worker_after - worker
        self.daemon_cpu += daemon_after - daemon


def run_commit_bench(
    model: Path, batches: Sequence[int], segments: int, steps: int, threads: int
) -> list[dict[str, Any]]:
    """One row a batch size, from `segments` pairs of segments of `steps` decode steps each."""
    rows = []
    with CommitBench(model, max(batches), steps, threads) as bench:
        for batch in batches:
            bench.off(batch)  # warms both paths: the first steps of a shape are slow
            bench.on(batch)
            off, on = _Side(), _Side()
            lags: list[float] = []

            def committed(batch: int = batch, lags: list[float] = lags) -> float:
                timeline = bench.on(batch)
                lags += timeline.lags_ms
                return timeline.decode_rate()

            for _ in range(segments):
                off.run(bench, partial(bench.off, batch))
                on.run(bench, committed)
            spare = len(os.sched_getaffinity(0)) - threads
            row = _row(batch, bench.bytes_per_step(batch), steps, off, on, sorted(lags))
            rows.append(row | {"spare_cores": max(0, spare)})
    return rows


def _row(batch: int, bytes_per_step: int, steps: int, off: _Side, on: _Side, lags: Sequence[float]) -> dict[str, Any]:
    ratios = sorted(b / a for a, b in zip(off.rates, on.rates, strict=True))
    low, high = median_interval(len(ratios))
    all_steps = steps * len(ratios)
    return {
        "batch": batch,
        "off_tok_s": round(statistics.median(off.rates), 2),
        "on_tok_s": round(statistics.median(on.rates), 2),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_low": round(ratios[low], 4),
        "ratio_high": round(ratios[high], 4),
        "bytes_per_step": bytes_per_step,
        "worker_cpu_ms": round(1e3 * on.worker_cpu / all_steps, 2),  # engine and committers, a step
        "worker_cpu_ms_more": round(1e3 * (on.worker_cpu - off.worker_cpu) / all_steps, 2),
        "daemon_cpu_ms": round(1e3 * on.daemon_cpu / all_steps, 2),
        "lag_p50_ms": round(lags[len(lags) // 2], 2),
        "lag_p99_ms": round(lags[int(len(lags) * 0.99)], 2),
    }


def median_interval(count: int) -> tuple[int, int]:
    """Which of `count` sorted values bound the median with 95 % confidence, whatever their distribution: the binomial's
    normal approximation. With fewer than six values, the least and the greatest."""
    half = 0.98 * count**0.5
    return max(0, math.floor(count / 2 - half)), min(count - 1, math.ceil(count / 2 + half) - 1)
