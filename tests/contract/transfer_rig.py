"""Daemons whose logs and metrics are within reach, a proxy that spoils connections, and pages to be moved between them."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import msgspec
import psutil
from daemon_rig import restore
from store_samples import job_record, spec

from context_daemon import wire
from context_daemon.client import ContextClient
from context_daemon.kv_slots import TRAILER_BYTES
from context_daemon.kv_writer import KVWriter
from context_daemon.page_stream import LENGTH, StreamRequest, pack_request
from context_daemon.records import InterruptionCause, KVLayout, KVWatermark, Lease, RequestKey, TokenCommit
from context_daemon.redis_server import free_port
from context_daemon.redis_store import RedisStore
from context_daemon.store import LeaseRequest
from protos import context_pb2 as pb
from protos.context_pb2_grpc import ContextServiceStub

LAYOUT = KVLayout("fp", "cpu-1", "float32", num_layers=8, num_kv_heads=4, head_dim=64, page_size=4)  # pages of 64 KiB
ROW, PAGE = LAYOUT.slot_bytes + TRAILER_BYTES, LAYOUT.page_size * (LAYOUT.slot_bytes + TRAILER_BYTES)


class Node:
    """A daemon. `host` is where this process reaches it, `listen` where it listens, `command` what it runs under."""

    def __init__(
        self,
        name: str,
        folder: Path,
        durable_url: str,
        kv_url: str,
        *flags: str,
        host: str = "127.0.0.1",
        listen: str = "",
        advertise: str = "",
        command: Sequence[str] = (),
        fault: str = "",
    ) -> None:
        self.port, self.metrics_port, self.host = free_port(), free_port(), host
        self.address = f"{host}:{self.port}"
        self.log = folder / f"{name}.log"
        line = [*command, sys.executable, "-m", "context_daemon", "--node-id", name,
                "--listen", f"{listen or host}:{self.port}", "--advertise", f"{advertise or host}:{self.port}",
                "--durable-url", durable_url, "--kv-url", kv_url, "--arena-bytes", "64MiB",
                "--metrics-port", str(self.metrics_port), "--metrics-host", listen or host, *flags]  # fmt: skip
        environment = dict(os.environ) | ({"TIDEOVER_FAULT": fault} if fault else {})
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(line, stderr=log, env=environment)
        self.clients: list[ContextClient] = []

    def ready(self) -> Node:
        with grpc.insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            grpc.channel_ready_future(channel).result(30)
        return self

    def client(self) -> ContextClient:
        self.clients.append(ContextClient(self.address))
        return self.clients[-1]

    def kill(self) -> None:
        for client in self.clients:
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def metric(self, name: str, **labels: str) -> float:
        """0 for what was never counted."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        text = opener.open(f"http://{self.host}:{self.metrics_port}/metrics", timeout=10).read().decode()
        inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
        wanted = f"{name}{{{inside}}} " if inside else f"{name} "
        return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(wanted)), 0.0)

    @property
    def used(self) -> float:
        return self.metric("tideover_arena_used_bytes")

    def anonymous_bytes(self) -> int:
        """Its own memory: what it has seen of the arena is shared."""
        memory = psutil.Process(self.process.pid).memory_info()
        return memory.rss - memory.shared

    def door(self, key: RequestKey, layout: KVLayout = LAYOUT) -> tuple[int, str, int]:
        """Port and token of its page streams, and positions held."""
        with grpc.insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            request = pb.DescribePagesRequest(keys=[wire.key_to_pb(key)], layout=layout.fingerprint)
            answer = ContextServiceStub(channel).DescribePages(request, timeout=10)
        return answer.port, answer.token, answer.positions[0]

    def stream(self, key: RequestKey, shape: KVLayout = LAYOUT, token: str = "", **changes: Any) -> socket.socket:
        """A reader of its own that has asked for a request's pages."""
        port, right, positions = self.door(key, shape)
        fields = {
            "token": token or right, "key": key, "layout": shape.fingerprint, "slot_bytes": shape.slot_bytes,
            "page_size": shape.page_size, "first": 0, "until": -(-positions // shape.page_size),
        }  # fmt: skip
        return self.say(pack_request(StreamRequest(**fields | changes)), port)

    def say(self, data: bytes, port: int) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.settimeout(20)
        connection.connect((self.host, port))
        connection.sendall(data)
        return connection


@dataclass
class Held:
    """A request with pages in a node's arena and one committed token: all of `raw` can be restored."""

    lease: Lease
    raw: bytes
    writer: KVWriter
    layout: KVLayout
    blocks: list[int] = field(default_factory=list)
    marked: int | None = None  # positions that the watermark tells of, in place of all

    @property
    def positions(self) -> int:
        return len(self.raw) // self.layout.slot_bytes

    def stored(self) -> bool:
        owned = (self.lease.key, self.lease.token.epoch)
        return self.writer.announce([], [owned]).progress[owned].stored >= self.positions


async def leased(store: RedisStore, job: str, pages: int, layout: KVLayout = LAYOUT) -> Lease:
    await store.create_job(job_record(job))
    await store.add_requests(job, [spec(1, pages * layout.page_size)])
    await store.start_job(job, 1)
    (lease,) = await store.lease(job, 1, [LeaseRequest(RequestKey(job, 1), 0, "w1", "cpu-1")])
    return lease


async def hold(
    store: RedisStore, client: ContextClient, job: str, pages: int, layout: KVLayout = LAYOUT, marked: int | None = None
) -> Held:
    """A worker's life up to its first token: leased, written page by page, committed."""
    lease = await leased(store, job, pages, layout)
    return work(client, lease, os.urandom(pages * layout.page_size * layout.slot_bytes), layout, marked)


def work(client: ContextClient, lease: Lease, raw: bytes, layout: KVLayout = LAYOUT, marked: int | None = None) -> Held:
    held = Held(lease, raw, KVWriter(client, layout, spare_blocks=64), layout, marked=marked)
    held.writer.attach()
    write(held, client)
    return held


def work_and_die(address: str, lease: Lease, raw: bytes) -> None:
    """A worker in a process of its own, killed where it stands once it has committed."""
    work(ContextClient(address), lease, raw)
    os.kill(os.getpid(), signal.SIGKILL)


def write(held: Held, client: ContextClient) -> None:
    size, row, key, epoch = held.layout.page_size, held.layout.slot_bytes, held.lease.key, held.lease.token.epoch
    at_once = 8 * size
    for start in range(0, held.positions, at_once):
        part = memoryview(held.raw)[start * row : (start + at_once) * row]
        written = held.writer.write(key, epoch, held.positions, start, part)
        assert written is not None
        held.blocks += written.blocks
        held.writer.announce([written])
    commit(held, client)


def commit(held: Held, client: ContextClient) -> None:
    mark = KVWatermark(held.positions if held.marked is None else held.marked, 0, held.layout.fingerprint)
    (result,) = client.commit([TokenCommit(held.lease.key, held.lease.token, 0, (7,), mark)])
    assert result.length == 1


async def moved(store: RedisStore, held: Held) -> Lease:
    """Its worker is gone; another one owns it."""
    key, epoch = held.lease.key, held.lease.token.epoch
    await store.requeue(key.job_id, 1, [(key, held.lease.token)], InterruptionCause.WORKER_DIED)
    (lease,) = await store.lease(key.job_id, 1, [LeaseRequest(key, epoch + 1, "w2", "cpu-1")])
    return lease


class Proxy:
    """Stands for a node's address: everything for its service passes, and probes; each page stream is spoilt by the next of
    `faults`, (bytes, "cut" | "hang"), and passes when there is none left."""

    def __init__(self, host: str, node: Node, page_port: int) -> None:
        self.faults: list[tuple[int, str]] = []
        self.always: tuple[int, str] | None = None
        self.carried: list[int] = []  # bytes of each page stream
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listeners = [socket.create_server((host, port)) for port in (node.port, page_port)]
        for listener, paged in zip(self._listeners, (False, True), strict=True):
            self._start(self._accept, listener, node.host, paged)

    def _start(self, target: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket, host: str, paged: bool) -> None:
        with suppress(OSError):
            while True:
                reader, _ = listener.accept()
                sender = socket.create_connection((host, listener.getsockname()[1]), timeout=10)
                sender.settimeout(None)
                self._open |= {reader, sender}
                self._start(self._relay, reader, sender, paged)

    def _relay(self, reader: socket.socket, sender: socket.socket, paged: bool) -> None:
        paged = paged and not _probes(reader)
        fault = (self.faults.pop(0) if self.faults else self.always) if paged else None
        self.carried += [0] if paged else []
        self._start(self._pump, reader, sender, None, -1)
        self._pump(sender, reader, fault, len(self.carried) - 1 if paged else -1)

    def _pump(self, source: socket.socket, target: socket.socket, fault: tuple[int, str] | None, stream: int) -> None:
        left = fault[0] if fault else 1 << 62
        with suppress(OSError):
            while left and (data := source.recv(min(left, 1 << 16))):
                target.sendall(data)
                left -= len(data)
                if stream >= 0:
                    self.carried[stream] += len(data)
            if fault and not left and fault[1] == "hang":
                return  # both stay open, and silent
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in (*self._listeners, *self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(10)


def _probes(reader: socket.socket) -> bool:
    """Its request is left to be read; what is none is a matter of the node's."""
    with suppress(OSError, msgspec.MsgspecError):
        (length,) = LENGTH.unpack(reader.recv(LENGTH.size, socket.MSG_PEEK | socket.MSG_WAITALL))
        body = reader.recv(LENGTH.size + length, socket.MSG_PEEK | socket.MSG_WAITALL)[LENGTH.size :]
        return msgspec.msgpack.decode(body, type=StreamRequest).probe > 0
    return False


def reset(connection: socket.socket) -> None:
    """Closed the hard way."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def restored(
    client: ContextClient, lease: Lease, held: Held, arena: KVWriter | None = None, only: str = ""
) -> tuple[int, tuple[str, ...]]:
    """Positions and sources, once all bytes were found to be the right ones."""
    _, raw, positions, sources = restore(client, lease.key, lease.token, "w2", held.layout, arena=arena, only=only)
    assert bytes(raw) == held.raw[: positions * held.layout.slot_bytes], "never a wrong byte"
    return positions, sources


def attached(client: ContextClient, layout: KVLayout = LAYOUT) -> KVWriter:
    writer = KVWriter(client, layout, spare_blocks=4)
    writer.attach()
    return writer


class Pair(NamedTuple):
    source: Node
    target: Node
    proxy: Proxy  # by which the target reaches the source
