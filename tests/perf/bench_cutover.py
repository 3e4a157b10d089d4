"""The gap that a streaming client sees while a request moves to another node under notice, with and without pre-copy.

    .venv/bin/python -m tests.perf.bench_cutover [--context 256,1024,4000] [--rounds 5] [--rate 1gbit] [--json]

Two workers with the demo model, two real daemons, two Redis servers, one request with so much KV. The gap is from the last
commit of the source that was acknowledged to the first of the target: clients see committed tokens only. `steps` is the gap
in steps of the source; a request that stays has one of 1. The KV is made up, so that no round waits for a prefill; all of it
is in the KV store when the notice comes. With `--rate` the daemons live in network namespaces of their own (root), and all
that reaches the target's, from its peer or from the store, goes at this rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import redis

from context_daemon.client import ContextClient
from context_daemon.kv_writer import KVWriter
from context_daemon.operator_client import collect_pages
from context_daemon.records import (
    CommitResult,
    DrainTarget,
    Endpoint,
    InterruptionCause,
    JobRecord,
    JobState,
    Lease,
    Notice,
    NoticeKind,
    RequestKey,
    RequestSpec,
    SamplingParams,
    TokenCommit,
)
from context_daemon.redis_server import EmbeddedServers, free_port
from context_daemon.redis_store import RedisStore
from context_daemon.store import LeaseRequest
from tests.contract.netns import TwoNamespaces
from worker.answer import AnswerBuilder
from worker.demo_model import ensure_demo_model
from worker.engine.config import EngineConfig
from worker.engine.engine import TorchEngine
from worker.runtime import WorkerRuntime
from worker.status import RuntimeOptions
from worker.text import Tokenizer

NEW_TOKENS, NOTICE_S, CHUNK = 130, 4.0, 256


def until(condition: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.005)


class Watched(ContextClient):
    """Notes when tokens were acknowledged."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.acks: list[float] = []

    def commit(self, commits: Sequence[TokenCommit]) -> list[CommitResult]:
        results = super().commit(commits)
        if any(commit.tokens for commit in commits):
            self.acks.append(time.monotonic())
        return results


class Bench:
    """Use as a context manager. Node 0 is where requests begin, node 1 where they go."""

    def __init__(self, model: Path, longest: int, rate: str) -> None:
        self._model, self._longest, self._rate = model, longest, rate
        self._stack, self._jobs = ExitStack(), 0
        self.notified: list[Lease] = []

    def __enter__(self) -> Bench:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tideover-bench-")))
        network = self._stack.enter_context(TwoNamespaces()) if self._rate else None
        self.servers = self._stack.enter_context(EmbeddedServers(folder, host="0.0.0.0" if network else "127.0.0.1"))
        home = network.home if network else "127.0.0.1"
        if network:
            for server in (self.servers.durable, self.servers.kv):
                with redis.Redis(port=server.port) as raw:
                    raw.config_set("protected-mode", "no")
                    raw.config_set("bind", f"127.0.0.1 {home}")
            self._slow(network)
        spaces = (network.a, network.b) if network else (None, None)
        self.inner = []
        self.clients = [self._daemon(f"n{index}", home, space) for index, space in enumerate(spaces)]
        self.runtimes = [self._worker(index) for index in range(2)]
        self.ghost = KVWriter(self.clients[0], self.layout, 64)
        self.ghost.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _slow(self, network: TwoNamespaces) -> None:
        shape = f"root tbf rate {self._rate} burst 1mb latency 50ms"
        for place in (f"-n {network.a.name} qdisc add dev {network.a.device}", f"qdisc add dev {network.b.name}o"):
            subprocess.run(f"tc {place} {shape}".split(), check=True, capture_output=True)

    def _daemon(self, node: str, home: str, space: Any) -> Watched:
        port = free_port()
        outer, inner = (space.outer, space.inner) if space else ("127.0.0.1", "127.0.0.1")
        urls = [f"redis://{home}:{server.port}/0" for server in (self.servers.durable, self.servers.kv)]
        command = [*(space.within() if space else ()), sys.executable, "-m", "context_daemon", "--node-id", node]
        command += ["--listen", f"{'0.0.0.0' if space else outer}:{port}", "--advertise", f"{inner}:{port}"]
        command += ["--durable-url", urls[0], "--kv-url", urls[1], "--arena-bytes", "3GiB", "--metrics-port", "0"]
        daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self._stack.callback(daemon.wait)
        self._stack.callback(daemon.terminate)
        with grpc.insecure_channel(f"{outer}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
            grpc.channel_ready_future(channel).result(30)
        self.inner.append(f"{inner}:{port}")
        client = Watched(f"{outer}:{port}")
        self._stack.callback(client.close)
        return client

    def _worker(self, index: int) -> WorkerRuntime:
        length = self._longest + NEW_TOKENS + 2
        engine = TorchEngine.load(
            EngineConfig(model=str(self._model), max_num_seqs=2, max_model_len=length, num_threads=1)
        )
        self.layout = engine.layout
        answers = AnswerBuilder(Tokenizer.load(self._model), "m", engine.layout, engine.plan.spec.eos_token_ids)
        options = RuntimeOptions(f"w{index}", f"n{index}", "m")
        runtime = WorkerRuntime(
            options, engine, self.clients[index], answers, notify=self._notified, die=lambda reason: print(reason)
        )
        runtime.start()
        self._stack.callback(runtime.stop)
        return runtime

    def _notified(self, lease: Lease) -> None:
        self.notified.append(lease)
        self.runtimes[1].admit([lease])

    def _store(self, use: Callable[[RedisStore], Awaitable[Any]]) -> Any:
        async def once() -> Any:
            store = RedisStore(self.servers.durable.url)
            try:
                return await use(store)
            finally:
                await store.close()

        return asyncio.run(once())

    def _begin(self, context: int) -> RequestKey:
        """A request on node 0 that has `context` positions of KV there, as if it had computed them."""
        self._jobs += 1
        key = RequestKey(f"cut-{self._jobs}", 1)
        prompt = tuple(100 + (7 * at) % 1000 for at in range(context))
        params = SamplingParams(seed=1, max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        spec = RequestSpec(1, "c1", Endpoint.COMPLETIONS, prompt, params)
        lease = self._store(lambda store: self._leased(store, key, spec))
        draw = np.random.default_rng(0)
        raw = (0.1 * draw.standard_normal(CHUNK * self.layout.slot_bytes // 4, dtype=np.float32)).tobytes()
        for start in range(0, context, CHUNK):
            part = memoryview(raw)[: min(CHUNK, context - start) * self.layout.slot_bytes]
            while (slots := self.ghost.write(key, lease.token.epoch, context, start, part)) is None:
                self.ghost.announce([])
            self.ghost.announce([slots])
        self.clients[0].commit([TokenCommit(key, lease.token, 0, (100,))])
        self.runtimes[0].admit([self._store(lambda store: self._moved(store, lease))])
        return key

    async def _leased(self, store: RedisStore, key: RequestKey, spec: RequestSpec) -> Lease:
        now, endpoint = time.time(), Endpoint.COMPLETIONS.value
        await store.create_job(JobRecord(key.job_id, key.job_id, JobState.VALIDATING, "m", endpoint, now))
        await store.add_requests(key.job_id, [spec])
        await store.start_job(key.job_id, 1)
        (lease,) = await store.lease(key.job_id, 1, [LeaseRequest(key, 0, "ghost", self.layout.numerics_class)])
        return lease

    async def _moved(self, store: RedisStore, lease: Lease) -> Lease:
        key = lease.key
        await store.requeue(key.job_id, 1, [(key, lease.token)], InterruptionCause.WORKER_DIED)
        ask = LeaseRequest(key, lease.token.epoch + 1, "w0", self.layout.numerics_class)
        (again,) = await store.lease(key.job_id, 1, [ask])
        return again

    def move(self, context: int, ahead: bool) -> dict[str, Any]:
        """One request from node 0 to node 1, in the middle of its decoding."""
        for client in self.clients:
            client.acks.clear()
        self.notified.clear()
        key = self._begin(context)
        held = self.runtimes[0]._ledger
        until(lambda: len(self.clients[0].acks) > 12, "the source to decode")
        until(lambda: all(one.kv_stored >= one.kv_arena - 32 for one in held.all()), "its KV to be in the store")
        notice = Notice("n0", NoticeKind.TERMINATE, time.time() + NOTICE_S, "bench")
        self.clients[0].raise_notice(notice)
        until(lambda: self.runtimes[0].status().draining, "the notice to be heard")
        self.runtimes[0].set_targets({key: DrainTarget("w1", self.inner[1] if ahead else "")})
        until(lambda: len(self.clients[1].acks) > 3, "the target to decode")
        self.clients[0].withdraw_notice(notice.id)
        until(lambda: not any(runtime.status().held for runtime in self.runtimes), "the end")
        (_, row) = self._store(lambda store: store.interruptions(key.job_id))
        for client in self.clients:
            asyncio.run(collect_pages(client.address, 30.0, dry_run=False, stored=False))
        until(lambda: not self.runtimes[0].status().draining, "the withdrawal to be heard")
        acks = self.clients[0].acks
        step_ms = 1e3 * statistics.median(b - a for a, b in pairwise(acks[2:]))
        gap_ms = 1e3 * (self.clients[1].acks[0] - acks[-1])
        return {"gap_ms": gap_ms, "step_ms": step_ms, "source": row.restore_source, "again": row.recomputed_tokens}


def rows(bench: Bench, contexts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """The ways take turns."""
    found = []
    for context in contexts:
        runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for turn in range(rounds + 1):
            for ahead in (True, False):
                run = bench.move(context, ahead)
                if turn:  # the first warms arenas up and teaches the planner
                    runs[ahead].append(run)
        found += [row(context, ahead, some) for ahead, some in runs.items()]
    return found


def row(context: int, ahead: bool, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    gaps = sorted(run["gap_ms"] for run in runs)
    step_ms = statistics.median(run["step_ms"] for run in runs)
    return {
        "context": context,
        "pre_copy": ahead,
        "gap_ms": round(statistics.median(gaps), 1),
        "gap_ms_range": [round(gaps[0], 1), round(gaps[-1], 1)],
        "step_ms": round(step_ms, 1),
        "steps": round(statistics.median(gaps) / step_ms, 2),
        "sources": sorted({run["source"] for run in runs}),
        "recomputed_tokens": max(run["again"] for run in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", default="256,1024,4000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default="", help="as in 1gbit")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    contexts = [int(part) for part in args.context.split(",")]
    with Bench(ensure_demo_model(lambda *_: None), max(contexts), args.rate) as bench:
        measured = rows(bench, contexts, args.rounds)
    print(json.dumps({"rows": measured}) if args.json else "\n".join(map(str, measured)))


if __name__ == "__main__":
    main()
