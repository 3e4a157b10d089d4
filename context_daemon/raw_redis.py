"""What the bare Redis client reaches, for the floor beside a benchmark's figure."""

from __future__ import annotations

import time

import redis


def get_bandwidth(url: str, value_bytes: int, total_bytes: int = 128 << 20) -> float:
    """Bytes/s of single GETs of values of this size, one after another: the best of three passes."""
    client = redis.Redis.from_url(url)
    count = max(1, total_bytes // value_bytes)
    names = [f"bench:raw:{index}" for index in range(min(count, 32))]
    try:
        for name in names:
            client.set(name, bytes(value_bytes))
        return max(_pass(client, names, count) * value_bytes for _ in range(3))
    finally:
        client.delete(*names)
        client.close()


def _pass(client: redis.Redis, names: list[str], count: int) -> float:
    started = time.perf_counter()
    for index in range(count):
        client.get(names[index % len(names)])
    return count / (time.perf_counter() - started)
