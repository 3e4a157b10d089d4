"""Jobs in Redis. See keys.py for the keyspace and lua/ for the transitions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from context_daemon import keys
from context_daemon.lines import cancelled_line
from context_daemon.records import Endpoint, Interruption, JobRecord, JobState, RequestKey, RequestSpec, ResultLine
from context_daemon.recovery_table import InterruptionRow, report
from context_daemon.redis_script import Arg, RedisScripts, pairs, text
from context_daemon.states import ACTIVE_JOB_STATES, TERMINAL_JOB_STATES
from context_daemon.store import Conflict

_CHUNK = 500


class RedisJobs(RedisScripts):
    """Job life. The indexes (request_id, jobs, active) are derived: each is written before what it points to, and
    readers skip what dangles, so that a crash between any two writes is harmless."""

    async def create_job(self, job: JobRecord) -> JobRecord:
        if not job.request_id:
            raise ValueError(f"job {job.job_id}: request_id is empty; the caller draws one if the client gave none")
        keys.meta(job.job_id)  # refuse a bad id before anything is written
        index = keys.request_id(job.request_id)
        claimed, owner, now, inc = await self._checked(
            [("SET", index, job.job_id, "NX"), ("GET", index), ("TIME",), ("GET", keys.INCARNATION)]
        )
        del claimed  # a claim whose job was never written is taken over by this repeat
        job_id, created_us = text(owner), int(now[0]) * 1_000_000 + int(now[1])
        await self._command("ZADD", keys.JOBS, "NX", created_us, job_id)
        fields = _static_fields(msgspec.structs.replace(job, job_id=job_id))
        there = _job(job_id, await self._script("create_job", keys.meta(job_id), [created_us, text(inc, "1"), *fields]))
        if there.input_digest != job.input_digest:
            raise Conflict(f"request_id {job.request_id!r} was used for job {job_id} with another payload")
        return there

    async def add_requests(self, job_id: str, specs: Sequence[RequestSpec]) -> None:
        for start in range(0, len(specs), _CHUNK):
            args: list[Arg] = []
            for spec in specs[start : start + _CHUNK]:
                rid = keys.rid(RequestKey(job_id, spec.line))
                sizes = (len(spec.prompt_token_ids), spec.params.max_tokens)
                args += [rid, spec.line, 0, spec.custom_id, msgspec.msgpack.encode(spec), *sizes]
            await self._script("add_requests", keys.meta(job_id), args)

    async def start_job(self, job_id: str, total: int) -> JobRecord:
        meta = keys.meta(job_id)
        created = await self._command("HGET", meta, "created_at")
        if created is not None:
            await self._command("ZADD", keys.ACTIVE, "NX", int(created), job_id)
        job = _job(job_id, await self._script("start_job", meta, [total]))
        if job.state in TERMINAL_JOB_STATES:
            await self._command("ZREM", keys.ACTIVE, job_id)
        return job

    async def fail_job(self, job_id: str, error: str) -> JobRecord:
        while True:
            left, flat = await self._script("fail_job", keys.meta(job_id), [error, _CHUNK])
            if not left:
                await self._command("ZREM", keys.ACTIVE, job_id)
                return _job(job_id, flat)

    async def get_job(self, job_id: str) -> JobRecord | None:
        return (await self._get_jobs([job_id]))[0]

    async def find_job(self, request_id: str) -> JobRecord | None:
        job_id = await self._command("GET", keys.request_id(request_id))
        return None if job_id is None else await self.get_job(text(job_id))

    async def list_jobs(self, *, offset: int = 0, limit: int = 100) -> list[JobRecord]:
        if limit <= 0:
            return []
        ids = await self._command("ZREVRANGE", keys.JOBS, offset, offset + limit - 1)
        return [job for job in await self._get_jobs([text(i) for i in ids]) if job is not None]

    async def active_jobs(self) -> list[JobRecord]:
        ids = [text(i) for i in await self._command("ZRANGE", keys.ACTIVE, 0, -1)]
        jobs = [job for job in await self._get_jobs(ids) if job is not None]
        over = [job.job_id for job in jobs if job.state in TERMINAL_JOB_STATES]
        if over:  # terminal is for ever: a crash between finish_job's two writes is cleaned up here
            await self._command("ZREM", keys.ACTIVE, *over)
        return [job for job in jobs if job.state in ACTIVE_JOB_STATES]

    async def cancel_job(self, job_id: str) -> JobRecord:
        return _job(job_id, await self._script("cancel_job", keys.meta(job_id)))

    async def cancel_requests(self, job_id: str, term: int, limit: int = 500) -> int:
        meta = keys.meta(job_id)
        args: list[Arg] = [term]
        for index in ("ready", "leased"):
            _, rows = await self._script("list_requests", meta, [index, limit - (len(args) - 1) // 2, "cid"])
            for rid, _tokens, (custom_id,) in rows:
                args += [text(rid), cancelled_line(keys.parse_rid(job_id, text(rid)), text(custom_id))]
        return int(await self._script("cancel_requests", meta, args))

    async def finish_job(self, job_id: str, term: int) -> JobRecord:
        job = _job(job_id, await self._script("finish_job", keys.meta(job_id), [term]))
        if job.state in TERMINAL_JOB_STATES:
            await self._command("ZREM", keys.ACTIVE, job_id)
        return job

    async def results(self, job_id: str, start: int, limit: int) -> list[ResultLine]:
        if limit <= 0:
            return []
        entries = await self._command("LRANGE", keys.results(job_id), start, start + limit - 1)
        return [_result(start + i, entry) for i, entry in enumerate(entries)]

    async def interruptions(self, job_id: str) -> list[Interruption]:
        rows = await self._command("HVALS", keys.interruptions(job_id))
        return report([msgspec.msgpack.decode(row, type=InterruptionRow) for row in rows])

    async def rebuild_indexes(self) -> int:
        """Write the derived indexes again from the jobs themselves. Returns how many jobs there are."""
        cursor, found = b"0", 0
        while True:
            cursor, names = await self._command("SCAN", cursor, "MATCH", keys.META_PATTERN, "COUNT", 500)
            ids = [keys.job_of_meta(text(name)) for name in names]
            for job in await self._get_jobs(ids):
                if job is not None:
                    await self._index(job)
                    found += 1
            if int(cursor) == 0:
                return found

    async def _index(self, job: JobRecord) -> None:
        score = round(job.created_at * 1e6)
        commands: list[Sequence[Arg]] = [
            ("SET", keys.request_id(job.request_id), job.job_id, "NX"),
            ("ZADD", keys.JOBS, "NX", score, job.job_id),
        ]
        if job.state in ACTIVE_JOB_STATES:
            commands.append(("ZADD", keys.ACTIVE, "NX", score, job.job_id))
        await self._checked(commands)

    async def _get_jobs(self, ids: Sequence[str]) -> list[JobRecord | None]:
        replies = await self._checked([("HGETALL", keys.meta(job_id)) for job_id in ids])
        return [_job(job_id, flat) if flat else None for job_id, flat in zip(ids, replies, strict=True)]


def _static_fields(job: JobRecord) -> list[Arg]:
    metadata = msgspec.json.encode(job.metadata)
    return ["request_id", job.request_id, "model", job.model, "endpoint", str(job.endpoint),
            "input_digest", job.input_digest, "metadata", metadata]  # fmt: skip


def _seconds(value: bytes | None) -> float:
    return int(value or 0) / 1e6


def _job(job_id: str, flat: Sequence[bytes] | dict[bytes, bytes]) -> JobRecord:
    m = pairs(flat)
    return JobRecord(
        job_id=job_id,
        request_id=m["request_id"].decode(),
        state=JobState(m["state"].decode()),
        model=m["model"].decode(),
        endpoint=Endpoint(m["endpoint"].decode()),
        created_at=_seconds(m["created_at"]),
        total=int(m["total"]),
        completed=int(m["completed"]),
        failed=int(m["failed"]),
        output_tokens=int(m["output_tokens"]),
        input_digest=m["input_digest"].decode(),
        error=m["error"].decode(),
        started_at=_seconds(m.get("started_at")),
        finished_at=_seconds(m.get("finished_at")),
        metadata=msgspec.json.decode(m["metadata"], type=dict[str, str]),
    )


def _result(index: int, entry: bytes) -> ResultLine:
    line, ok, payload = entry.split(b":", 2)
    return ResultLine(index=index, line=int(line), ok=ok == b"1", payload=payload)
