"""A context daemon as a process of its own, and what a worker and a router do with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
from store_samples import job_record, spec

from context_daemon.client import ContextClient
from context_daemon.kv_slots import bare
from context_daemon.kv_writer import Announced, KVWriter
from context_daemon.records import FencingToken, KVLayout, KVWatermark, Lease, RequestKey, RequestRecord
from context_daemon.redis_server import EmbeddedServers, free_port
from context_daemon.redis_store import RedisStore
from context_daemon.store import LeaseRequest, StoreUnavailable

LAYOUT = KVLayout("fp", "cpu-1", "float32", num_layers=2, num_kv_heads=1, head_dim=4, page_size=4)
PROMPT = 10


class Daemon:
    """`kv_urls` are those of the servers in place of the embedded one."""

    def __init__(
        self, servers: EmbeddedServers, node_id: str = "node-1", *flags: str, kv_urls: Sequence[str] = ()
    ) -> None:
        named = [part for url in kv_urls or [servers.kv.url] for part in ("--kv-url", url)]
        self.port = free_port()
        self._command = [sys.executable, "-m", "context_daemon", "--node-id", node_id,
                         "--listen", f"127.0.0.1:{self.port}", "--durable-url", servers.durable.url,
                         *named, "--metrics-port", "0", *flags]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Daemon:
        self.process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            grpc.channel_ready_future(channel).result(30)
        return self

    def end(self, signum: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(signum)
        return self.process.wait(10)


async def start_job(store: RedisStore, lines: int = 3) -> None:
    await store.create_job(job_record("job"))
    await store.add_requests("job", [spec(line, PROMPT) for line in range(1, lines + 1)])
    await store.start_job("job", lines)


async def lease(store: RedisStore, line: int, worker: str, epoch: int = 0) -> Lease:
    (granted,) = await store.lease("job", 1, [LeaseRequest(RequestKey("job", line), epoch, worker, "cpu-1")])
    return granted


def slot(position: int) -> bytes:
    return bytes((position * 7 + i) % 256 for i in range(LAYOUT.slot_bytes))


def raw_slots(start: int, stop: int) -> bytes:
    return b"".join(slot(p) for p in range(start, stop))


class Pages:
    """A worker's writes: into the arena, announced, and waited for until they are in the KV store."""

    def __init__(self, client: ContextClient, layout: KVLayout = LAYOUT) -> None:
        self.writer = KVWriter(client, layout, spare_blocks=64)
        self.writer.attach()

    def put(self, lease: Lease, start: int, stop: int, raw: bytes | None = None) -> Announced:
        written = self.writer.write(lease.key, lease.token.epoch, PROMPT, start, raw or raw_slots(start, stop))
        assert written is not None
        return self.writer.announce([written])

    def stored(self, lease: Lease, positions: int) -> Announced:
        owned = (lease.key, lease.token.epoch)
        until(lambda: self.writer.announce([], [owned]).progress[owned].stored >= positions)
        return self.writer.announce([], [owned])


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition never held"
        time.sleep(0.05)


def available(call: Callable[[], Any], seconds: float = 15.0) -> Any:
    """The answer once the store is back, by repeating the same call as its contract allows."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except StoreUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def mark(positions: int, first_page: int = 0) -> KVWatermark:
    return KVWatermark(positions, first_page, LAYOUT.fingerprint)


class Restored(NamedTuple):
    """`kv` holds the raw slots up to `positions`, as far as they are right."""

    record: RequestRecord
    kv: memoryview
    positions: int
    sources: tuple[str, ...]


def restore(
    client: ContextClient, key: RequestKey, token: FencingToken, worker_id: str, layout: KVLayout, **wish: Any
) -> Restored:
    """All of a restore at once; `wish` as for `ContextClient.restoring`."""
    kv, sources = bytearray(), []
    with client.restoring(key, token, worker_id, layout, **wish) as stream:
        for page in stream.pages():
            good = page.good()
            kv += bare(page.rows, good, layout.slot_bytes).tobytes()
            sources += [page.source] if good else []
            if good < page.stop - page.start:
                break
        positions = stream.fetch_from + len(kv) // layout.slot_bytes
        return Restored(stream.record, memoryview(kv), positions, tuple(dict.fromkeys(sources)))
