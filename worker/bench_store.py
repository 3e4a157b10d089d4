"""`tideover bench store`: what one context daemon and one durable server take in, and KV by the number of KV servers.

No engine: requests are committed as fast as answers come, `batch` of them to a message as a worker's step would; KV slots of
the demo model's size are announced and waited for until the KV servers have them.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import psutil

from context_daemon.client import ContextClient
from context_daemon.kv_writer import KVWriter
from context_daemon.records import (
    Endpoint,
    JobRecord,
    JobState,
    KVLayout,
    Lease,
    RequestSpec,
    SamplingParams,
    TokenCommit,
)
from context_daemon.redis_server import EmbeddedServers, ServerProcess, free_port
from context_daemon.redis_store import RedisStore
from context_daemon.store import LeaseRequest

LAYOUT = KVLayout("bench", "bench", "float32", num_layers=30, num_kv_heads=3, head_dim=64)  # SmolLM2-135M
_PROMPT = 16


class StoreBench:
    """A daemon over a durable server and `servers` KV servers, for the length of a `with`."""

    def __init__(self, servers: int) -> None:
        self._servers = servers
        self._stack = ExitStack()

    def __enter__(self) -> StoreBench:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tideover-bench-")))
        embedded = self._stack.enter_context(EmbeddedServers(folder))
        self._durable_url = embedded.durable.url
        self._durable = psutil.Process(embedded.durable.pid)
        urls = [embedded.kv.url]
        for index in range(1, self._servers):
            (folder / f"kv-{index}").mkdir()
            extra = ServerProcess("kv", folder / f"kv-{index}", free_port())
            extra.start()
            self._stack.callback(extra.stop)
            urls.append(extra.url)
        address = f"127.0.0.1:{free_port('127.0.0.1')}"
        command = [sys.executable, "-m", "context_daemon", "--node-id", "bench", "--listen", address]
        command += ["--durable-url", self._durable_url, *(part for url in urls for part in ("--kv-url", url))]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)
        self._daemon = psutil.Process(process.pid)
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(30)
        self._client = ContextClient(address)
        self._stack.callback(self._client.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def commits(self, batch: int, seconds: float) -> dict[str, Any]:
        """One token of each of `batch` requests to a message, one message after another."""
        leases = asyncio.run(self._leases(batch, 1 << 20))
        before, began, position = self._cpu(), time.monotonic(), 0
        while time.monotonic() - began < seconds:
            self._client.commit([TokenCommit(lease.key, lease.token, position, (7,)) for lease in leases])
            position += 1
        elapsed = time.monotonic() - began
        daemon, durable = (after - start for after, start in zip(self._cpu(), before, strict=True))
        return {
            "what": "commit",
            "batch": batch,
            "kv_servers": self._servers,
            "messages_s": round(position / elapsed, 1),
            "commits_s": round(position * batch / elapsed),
            "mb_s": None,
            "daemon_cpu_us": round(1e6 * daemon / (position * batch), 1),
            "durable_cpu_us": round(1e6 * durable / (position * batch), 1),
        }

    def kv(self, batch: int, seconds: float) -> dict[str, Any]:
        """One page of each of `batch` requests to an announcement, until the KV servers have all of them."""
        leases = asyncio.run(self._leases(batch, 1 << 20))
        writer = KVWriter(self._client, LAYOUT, 2 * batch)
        writer.attach()
        size, raw = LAYOUT.page_size, bytes(LAYOUT.page_size * LAYOUT.slot_bytes)
        asks = [(lease.key, lease.token.epoch) for lease in leases]
        before, began, pages, sent = self._cpu(), time.monotonic(), 0, 0
        while time.monotonic() - began < seconds:
            ranges = [writer.write(lease.key, lease.token.epoch, _PROMPT, pages * size, raw) for lease in leases]
            answer = writer.announce([item for item in ranges if item is not None], asks)
            pages += 1
            sent += sum(item is not None for item in ranges)
            while min(progress.stored for progress in answer.progress.values()) < pages * size:
                answer = writer.announce([], asks)
        elapsed = time.monotonic() - began
        daemon = self._cpu()[0] - before[0]
        total = sent * len(raw)
        return {
            "what": "kv",
            "batch": batch,
            "kv_servers": self._servers,
            "messages_s": round(pages / elapsed, 1),
            "commits_s": None,
            "mb_s": round(total / elapsed / 1e6),
            "daemon_cpu_us": round(1e6 * daemon / (total / 1e6), 1),  # for a MB
            "durable_cpu_us": None,
        }

    def _cpu(self) -> tuple[float, float]:
        daemon, durable = self._daemon.cpu_times(), self._durable.cpu_times()
        return daemon.user + daemon.system, durable.user + durable.system

    async def _leases(self, count: int, max_tokens: int) -> list[Lease]:
        store = RedisStore(self._durable_url)
        job_id = f"bench-{time.time_ns()}"
        job = JobRecord(job_id, job_id, JobState.VALIDATING, "bench", Endpoint.COMPLETIONS.value, time.time())
        params = SamplingParams(seed=1, max_tokens=max_tokens)
        prompt = tuple(range(_PROMPT))
        specs = [RequestSpec(n, f"c{n}", Endpoint.COMPLETIONS, prompt, params) for n in range(1, count + 1)]
        await store.create_job(job)
        await store.add_requests(job_id, specs)
        await store.start_job(job_id, count)
        wanted = [LeaseRequest(r.key, r.epoch, "bench", "bench") for r in await store.ready_requests(job_id, count)]
        leases = await store.lease(job_id, 1, wanted)
        await store.close()
        return leases


def run_store_bench(batches: Sequence[int], servers: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Commits for each batch size; KV at the largest of them for each number of KV servers."""
    rows = []
    with StoreBench(1) as bench:
        rows += [bench.commits(batch, seconds) for batch in batches]
    for count in servers:
        with StoreBench(count) as bench:
            rows.append(bench.kv(max(batches), seconds))
    return rows
