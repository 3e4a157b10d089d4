"""How fast a KVCluster reads back the pages of one request, and of six at once, from one server and from three.

    .venv/bin/python -m tests.perf.bench_kv_cluster

The servers are on this host; `distance` is slept before each GET. Medians of five. Each page is also put into the message
in which the daemon would send it on.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from context_daemon.kv_cluster import KVCluster
from context_daemon.records import RequestKey
from context_daemon.redis_kv import RedisKV
from context_daemon.redis_server import ServerProcess, free_port
from context_daemon.store import SlotWrite
from protos import context_pb2 as pb

PAGE, TOTAL, REQUESTS, RUNS = 16, 96 << 20, 6, 5


class DistantKV(RedisKV):
    distance_s = 0.0

    async def read_page(self, key: RequestKey, epoch: int, layout: str, page: int) -> bytes | None:
        if DistantKV.distance_s:
            await asyncio.sleep(DistantKV.distance_s)
        return await super().read_page(key, epoch, layout, page)


def cluster_of(urls: list[str], reads: int) -> KVCluster:
    cluster = KVCluster(urls, timeout_s=10, reads_at_once=reads)
    for name, node in cluster._nodes.items():
        node._kv = DistantKV(f"redis://{name}", timeout_s=10)
    return cluster


def spread_keys(cluster: KVCluster) -> list[RequestKey]:
    """Requests that lie evenly on the servers, so that chance does not blur the figures."""
    lines = itertools.count(1)
    places = itertools.islice(itertools.cycle(cluster.servers), REQUESTS)
    return [
        next(key for line in lines if cluster.server_of(key := RequestKey("bench", line)) == place) for place in places
    ]


async def restore(cluster: KVCluster, key: RequestKey, pages: int) -> int:
    size = 0
    async for page, framed in cluster.read_pages(key, dict.fromkeys(range(pages), 1), "bench", range(pages)):
        message = pb.RestoreResponse(page=pb.RestoredPage(page=page, epoch=1, slots=framed))
        size += len(message.SerializeToString())
    return size


async def rate(cluster: KVCluster, keys: list[RequestKey], pages: int) -> float:
    started = time.perf_counter()
    sizes = await asyncio.gather(*(restore(cluster, key, pages) for key in keys))
    return sum(sizes) / (time.perf_counter() - started) / 1e6


async def measure(urls: list[str], slot_kib: int) -> None:
    slot_bytes = slot_kib << 10
    pages = TOTAL // REQUESTS // (PAGE * slot_bytes)
    writer = cluster_of(urls, 1)
    keys, data = spread_keys(writer), os.urandom(pages * PAGE * (slot_bytes + 8))
    await writer.write_each([SlotWrite(k, 1, "bench", 0, pages * PAGE, slot_bytes, PAGE, data) for k in keys])
    await writer.close()
    for distance_ms, reads in itertools.product((0.0, 0.5, 2.0), (1, 2, 4, 8)):
        DistantKV.distance_s = distance_ms / 1e3
        cluster = cluster_of(urls, reads)
        await rate(cluster, keys, 2)  # connections are made
        one = statistics.median([await rate(cluster, keys[:1], pages) for _ in range(RUNS)])
        six = statistics.median([await rate(cluster, keys, pages) for _ in range(RUNS)])
        await cluster.close()
        head = f"slot {slot_kib:3} KiB, {len(urls)} server(s), {distance_ms} ms away, {reads} reads at once"
        print(f"{head}: one request {one:5.0f} MB/s, six {six:5.0f} MB/s", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = [ServerProcess("kv", Path(folder) / str(n), free_port(), 512 << 20) for n in range(3)]
        for server in servers:
            stack.callback(server.kill)
            server.start()
        for slot_kib, count in itertools.product((46, 128), (1, 3)):
            asyncio.run(measure([server.url for server in servers[:count]], slot_kib))


if __name__ == "__main__":
    main()
