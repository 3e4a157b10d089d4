"""`tideover bench resume`: how soon an interrupted request goes on, by each way its KV can come back.

One engine computes a context once. Its pages lie in the arena of daemon A and in the KV store; then each way brings them
back, through A itself (arena) or through daemon B (peer, store), until the engine has sampled the next token. `ms` is all of
it, `fetch_ms` the way of the pages alone; `floor_ms` is their bytes at the raw bandwidth of the medium, measured in the same
run: a copy in memory for the arena, loopback TCP for a peer, single GETs of the bare Redis client for the store; or the
bandwidth that the links to B were slowed down to.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from context_daemon.client import ContextClient
from context_daemon.kv_writer import KVWriter
from context_daemon.raw_redis import get_bandwidth
from context_daemon.records import (
    Endpoint,
    JobRecord,
    JobState,
    KVWatermark,
    Lease,
    RequestKey,
    RequestSpec,
    SamplingParams,
    TokenCommit,
)
from context_daemon.redis_server import EmbeddedServers, free_port
from context_daemon.redis_store import RedisStore
from context_daemon.restore_stream import RestoreStream
from context_daemon.store import LeaseRequest
from protos import context_pb2 as pb
from protos.context_pb2_grpc import ContextServiceStub
from worker.bench_beside import Beside
from worker.bench_links import SlowLink
from worker.bench_media import loopback_bandwidth, memcpy_bandwidth
from worker.engine.config import EngineConfig
from worker.engine.engine import TorchEngine
from worker.engine.protocol import EngineRequest, ResumeState, SlotSpan
from worker.imports import Import, Imports, turn_s
from worker.prefill_probe import learn, probe

PATHS = ("arena", "peer", "store", "recompute", "planner")
_WORKER = "bench"
_LINKED = "127.0.0.2"  # where the relays listen: at the same ports as what they stand for
_TURN_S = 0.02


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A request with all but its last token's KV in daemon A's arena and in the store."""

    lease: Lease
    spec: RequestSpec
    token: int


class ResumeBench:
    """An engine, two daemons and two Redis servers for the length of a `with`. With `slowed`, B reaches A and the KV server
    over `peer_link` and `store_link`."""

    def __init__(self, model: Path, longest: int, threads: int, *, slowed: bool = False, beside: int = 0) -> None:
        self._slowed, self._count = slowed, beside
        self._config = EngineConfig(
            model=str(model), max_num_seqs=2 + beside, max_model_len=longest + 8, num_threads=threads
        )
        self._stack = ExitStack()

    def __enter__(self) -> ResumeBench:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tideover-bench-")))
        self.servers = self._stack.enter_context(EmbeddedServers(folder))
        self.engine = TorchEngine.load(self._config)
        self.layout = self.engine.layout
        self.prefill = probe(self.engine)
        kv_url, address = self.servers.kv.url, f"127.0.0.1:{free_port('127.0.0.1')}"
        if self._slowed:
            self.here = self._daemon("a", address, kv_url, f"{_LINKED}:{address.rpartition(':')[2]}")
            kv_url = self._slow_down(address)
        else:
            self.here = self._daemon("a", address, kv_url)
        self.there = self._daemon("b", f"127.0.0.1:{free_port('127.0.0.1')}", kv_url)
        self.writers = {client.address: KVWriter(client, self.layout, 64) for client in (self.here, self.there)}
        for writer in self.writers.values():
            writer.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _slow_down(self, address: str) -> str:
        """Put relays before daemon A's two ports and the KV server; the URL of the latter's."""
        host, port = address.split(":")
        with grpc.insecure_channel(address) as channel:
            pages = ContextServiceStub(channel).DescribePages(pb.DescribePagesRequest(), timeout=10).port
        self._link((_LINKED, int(port)), (host, int(port)))
        self.peer_link = self._link((_LINKED, pages), (host, pages))
        self.store_link = self._link((_LINKED, 0), (self.servers.kv.host, self.servers.kv.port))
        return f"redis://{_LINKED}:{self.store_link.near[1]}/0"

    def _link(self, near: tuple[str, int], far: tuple[str, int]) -> SlowLink:
        link = SlowLink(near, far)
        self._stack.callback(link.close)
        return link

    def _daemon(self, node_id: str, address: str, kv_url: str, advertise: str = "") -> ContextClient:
        command = [sys.executable, "-m", "context_daemon", "--node-id", node_id, "--listen", address]
        command += ["--advertise", advertise or address, "--durable-url", self.servers.durable.url, "--kv-url", kv_url]
        daemon = subprocess.Popen([*command, "--arena-bytes", str(2 << 30)], stderr=subprocess.DEVNULL)
        self._stack.callback(daemon.wait)
        self._stack.callback(daemon.terminate)
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(30)
        client = ContextClient(address)
        self._stack.callback(client.close)
        return client

    def interrupted(self, context: int) -> Interrupted:
        """Compute `context` positions, commit one token after them, and wait until all of the KV is in the store."""
        spec = RequestSpec(
            1, "c1", Endpoint.COMPLETIONS, tuple(100 + (7 * at) % 150 for at in range(context)),
            SamplingParams(seed=1, max_tokens=4, temperature=0.0, ignore_eos=True),
        )  # fmt: skip
        lease = asyncio.run(self._lease(spec))
        self.engine.add(EngineRequest(lease.key, spec.prompt_token_ids, spec.params))
        tokens = self._next_token()
        self._write(lease, context)
        self.engine.abort(lease.key)
        mark = KVWatermark(context, 0, self.layout.fingerprint)
        self.here.commit([TokenCommit(lease.key, lease.token, 0, (tokens,), mark)])
        return Interrupted(lease, spec, tokens)

    def _next_token(self) -> int:
        while not (output := self.engine.step()).tokens:
            pass
        return output.tokens[0].token_id

    def _write(self, lease: Lease, context: int) -> None:
        writer, owned, chunk = self.writers[self.here.address], (lease.key, lease.token.epoch), 256
        for start in range(0, context, chunk):
            stop = min(context, start + chunk)
            raw = bytearray((stop - start) * self.layout.slot_bytes)
            self.engine.export_slots([SlotSpan(lease.key, start, stop)], memoryview(raw))
            while (slots := writer.write(lease.key, lease.token.epoch, context, start, raw)) is None:
                writer.announce([])
            writer.announce([slots])
        while writer.announce([], [owned]).progress[owned].stored < context:
            time.sleep(0.01)

    async def _lease(self, spec: RequestSpec) -> Lease:
        store = RedisStore(self.servers.durable.url)
        job_id = f"bench-{time.time_ns()}"
        job = JobRecord(job_id, job_id, JobState.VALIDATING, "bench", Endpoint.COMPLETIONS.value, time.time())
        await store.create_job(job)
        await store.add_requests(job_id, [spec])
        await store.start_job(job_id, 1)
        (ready,) = await store.ready_requests(job_id, 1)
        (lease,) = await store.lease(
            job_id, 1, [LeaseRequest(ready.key, ready.epoch, _WORKER, self.layout.numerics_class)]
        )
        await store.close()
        return lease

    def beside(self) -> Beside:
        """The sequences that decode on while others come back, for a `with`."""
        return Beside(self.engine, self._count)

    def resume(self, item: Interrupted, path: str, beside: Beside | None = None) -> dict[str, Any]:
        """From the word that the request is ours to its next token."""
        others = beside or Beside(self.engine, 0)
        others.settle()
        started = time.monotonic()
        key, token = item.lease.key, item.lease.token
        incoming = Import(key, token, 0, started)
        request = EngineRequest(key, item.spec.prompt_token_ids, item.spec.params)
        if path == "recompute":
            self.engine.add(request, ResumeState((item.token,)))
            fetched, sampled = self._decode(key, Imports(self.engine, lambda _: None), threading.Event(), others)
        else:
            fetched, sampled = self._fetched(item, path, request, incoming, others)
        ended = time.monotonic()
        others.came_back()
        recomputed = self.engine.recomputed_tokens(key)
        self.engine.abort(key)
        return {
            "ms": 1e3 * (ended - started),
            "fetch_ms": 1e3 * (fetched - started),
            "bytes": incoming.count * self.layout.slot_bytes,
            "recomputed_tokens": recomputed,
            "source": "+".join(incoming.sources),
            "sampled": sampled,
        }

    def _fetched(
        self, item: Interrupted, path: str, request: EngineRequest, incoming: Import, others: Beside
    ) -> tuple[float, int]:
        """Until the next token: when the last page was in, and the token."""
        daemon = self.here if path == "arena" else self.there
        wish: dict[str, Any] = {"prefill": self.prefill.cost()} if path == "planner" else {"only": path}
        with daemon.restoring(
            item.lease.key, item.lease.token, _WORKER, self.layout, arena=self.writers[daemon.address], **wish
        ) as stream:
            incoming.start = incoming.reached = stream.fetch_from
            self.engine.add(request, ResumeState((item.token,), stream.fetch_from, stream.fetch_to))
            imports, more = Imports(self.engine, lambda _: None), threading.Event()
            imports.begin(incoming)
            fetching = threading.Thread(target=_offer, args=(stream, incoming, more))
            fetching.start()
            try:
                return self._decode(item.lease.key, imports, more, others)
            finally:
                fetching.join()

    def _decode(self, key: RequestKey, imports: Imports, more: threading.Event, others: Beside) -> tuple[float, int]:
        """What a step loop does until the next token: when the last page was in, and the token."""
        at = time.monotonic()
        while True:
            more.clear()
            if len(imports):
                imports.turn(turn_s(others.step_s) or _TURN_S)
                at = time.monotonic()
            stepped = time.monotonic()
            output = self.engine.step()
            learn(self.prefill, output, time.monotonic() - stepped)
            others.saw(output)
            for token in output.tokens:
                if token.key == key:
                    return at, token.token_id
            if not output.kv_len:
                more.wait(_TURN_S)

    def floors(self) -> dict[str, float]:
        """Bytes/s of the bare media."""
        page = self.layout.slot_bytes * self.layout.page_size
        store = get_bandwidth(self.servers.kv.url, page)
        return {"arena": memcpy_bandwidth(), "peer": loopback_bandwidth(page), "store": store}


def _offer(stream: RestoreStream, incoming: Import, more: threading.Event) -> None:
    for page in stream.pages():
        incoming.offer(page)
        more.set()
    incoming.end()
    more.set()


def run_resume_bench(
    model: Path,
    contexts: Sequence[int],
    rounds: int,
    threads: int,
    paths: Sequence[str] = PATHS,
    link_bytes_per_s: float = 0.0,
    beside: int = 0,
) -> list[dict[str, Any]]:
    """One row for each context and way: medians of `rounds`, the ways taking turns. `link_bytes_per_s` slows both links
    to the second daemon down; `beside` sequences decode on meanwhile, and what they wait is in the row."""
    rows = []
    with ResumeBench(model, max(contexts), threads, slowed=link_bytes_per_s > 0, beside=beside) as bench:
        floors = bench.floors()
        if link_bytes_per_s > 0:
            bench.peer_link.bytes_per_s = bench.store_link.bytes_per_s = link_bytes_per_s
            floors |= {"peer": link_bytes_per_s, "store": link_bytes_per_s}
        for context in contexts:
            item = bench.interrupted(context)
            runs: dict[str, list[dict[str, Any]]] = {path: [] for path in paths}
            others = {path: bench.beside() for path in paths}
            for turn in range(rounds):
                for path in paths:
                    if path != "recompute" or turn == 0 or context <= 1024:  # long ones take seconds: once
                        with others[path] as those:
                            runs[path].append(bench.resume(item, path, those))
            rows += [_row(context, path, runs[path], floors) | others[path].figures() for path in paths]
    return rows


def _row(context: int, path: str, runs: Sequence[dict[str, Any]], floors: dict[str, float]) -> dict[str, Any]:
    last = runs[-1]
    source = last["source"] or "recompute"
    floor = floors.get(source)
    return {
        "context": context,
        "path": path,
        "source": source,
        "ms": round(statistics.median(run["ms"] for run in runs), 1),
        "fetch_ms": round(statistics.median(run["fetch_ms"] for run in runs), 1),
        "floor_ms": round(1e3 * last["bytes"] / floor, 1) if floor else None,
        "bytes": last["bytes"],
        "recomputed_tokens": last["recomputed_tokens"],
    }
