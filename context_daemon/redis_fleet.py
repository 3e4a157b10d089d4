"""The fleet in Redis: heartbeats, notices, the leader's lease, the incarnation."""

from __future__ import annotations

import msgspec

from context_daemon import keys
from context_daemon.observability import Counter, get_logger
from context_daemon.records import Notice, WorkerStatus
from context_daemon.redis_script import Arg, RedisScripts, ScriptCall, text
from context_daemon.write_mark import WriteMark

log = get_logger()
LOSSES = Counter(
    "tideover_store_losses_total", "Times that the durable store came back without what this process had written"
)
_EFFECT = "every owner is fenced; requests go on from what the store still knows, jobs it does not know are gone"

NOTICE_KEPT_S = 3600.0  # past its deadline, or past the moment it was put


class RedisFleet(RedisScripts):
    async def put_worker(self, status: WorkerStatus, ttl_s: float) -> None:
        args: list[Arg] = [status.worker_id, msgspec.msgpack.encode(status), ttl_s, 0]
        await self._script("put_expiring", keys.WORKERS, args)

    async def workers(self) -> list[WorkerStatus]:
        values = await self._script("live_values", keys.WORKERS)
        found = [msgspec.msgpack.decode(value, type=WorkerStatus) for value in values]
        return sorted(found, key=lambda status: status.worker_id)

    async def remove_worker(self, worker_id: str) -> None:
        await self._command("HDEL", keys.WORKERS, worker_id)

    async def put_notice(self, notice: Notice) -> bool:
        expiry_us = round((notice.deadline + NOTICE_KEPT_S) * 1e6)
        args: list[Arg] = [notice.id, msgspec.msgpack.encode(notice), NOTICE_KEPT_S, expiry_us]
        return bool(await self._script("put_expiring", keys.NOTICES, args))

    async def withdraw_notice(self, notice_id: str) -> None:
        await self._command("HDEL", keys.NOTICES, notice_id)

    async def notices(self) -> list[Notice]:
        values = await self._script("live_values", keys.NOTICES)
        found = [msgspec.msgpack.decode(value, type=Notice) for value in values]
        return sorted(found, key=lambda notice: (notice.deadline, notice.id))

    async def acquire_leadership(self, holder: str, ttl_s: float) -> int | None:
        term = int(await self._script("acquire_leadership", keys.LEADER, [holder, round(ttl_s * 1e6)]))
        return term or None

    async def incarnation(self) -> int:
        incarnation = int(text(await self._command("GET", keys.INCARNATION), "1"))
        self._saw(incarnation)
        return incarnation

    async def bump_incarnation(self, seen: int) -> int:
        """The global number first, then every active job's copy, which is what fences.

        A crash in between leaves jobs that the repeat of this call fences: it always goes over all of them.
        """
        in_force = int(await self._script("bump_incarnation", keys.INCARNATION, [seen]))
        jobs = [text(job_id) for job_id in await self._command("ZRANGE", keys.ACTIVE, 0, -1)]
        await self._scripts([ScriptCall("fence_job", keys.meta(job_id), [in_force]) for job_id in jobs])
        self._saw(in_force)
        return in_force

    async def noted_server(self) -> str:
        return text(await self._command("HGET", keys.LEADER, "server"))

    async def note_server(self, server_id: str) -> None:
        await self._command("HSET", keys.LEADER, "server", server_id)

    async def _went_back(self, found: int, mark: WriteMark) -> None:
        """Fence every owner, over a connection that asks nothing itself."""
        plain = RedisFleet(self._url, timeout_s=self._timeout_s)
        try:
            in_force = await plain.bump_incarnation(mark.incarnation)
        finally:
            await plain.close()
        mark.saw(in_force)
        LOSSES.inc()
        log.error("durable_store_lost_writes", store=self.address, acknowledged=mark.remembered, found=found,
                  incarnation=in_force, effect=_EFFECT)  # fmt: skip
