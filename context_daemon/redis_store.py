"""ContextStore over a Redis-compatible server (7.0 command set), kept durable by its append-only file."""

from __future__ import annotations

from context_daemon.redis_fleet import RedisFleet
from context_daemon.redis_jobs import RedisJobs
from context_daemon.redis_requests import RedisRequests
from context_daemon.store import ContextStore


class RedisStore(RedisJobs, RedisRequests, RedisFleet):
    """`RedisStore(url, timeout_s=1.0)`. Bind it to one event loop. A server that is away raises StoreUnavailable within
    `timeout_s`; nothing is retried here, because only the caller knows whether it still wants it.

    `writer` names one life of a process that writes for others: it then finds out what the server lost (write_mark.py), has
    every owner fenced, and calls `on_loss`."""


def _conforms(store: RedisStore) -> ContextStore:
    return store
