"""Requests in Redis: leases, token logs, watermarks, cut-overs. See keys.py and lua/."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from context_daemon import keys as keyspace
from context_daemon.records import (
    CommitResult,
    CommitStatus,
    FencingToken,
    InterruptionCause,
    KVSegment,
    KVWatermark,
    Lease,
    RequestKey,
    RequestRecord,
    RequestSpec,
    RequestState,
    TokenCommit,
)
from context_daemon.redis_script import Arg, RedisScripts, ScriptCall, pairs, text
from context_daemon.store import LeasedRequest, LeaseRequest, ReadyRequest

_STATUS = (CommitStatus.OK, CommitStatus.FENCED, CommitStatus.GAP, CommitStatus.DIVERGED, CommitStatus.FENCED)
_AHEAD = 4  # the script's name for an owner that the store has lost
_READY = ("epoch", "prompt_tokens", "max_tokens", "nclass", "attempts", "interruptions", "ready_since", "avoid")
_LEASED = ("inc", "epoch", "worker", "prompt_tokens", "max_tokens", "lclass", "leased_at", "attempts")


class RedisRequests(RedisScripts):
    #: Commits by owners whose token is higher than the store's: each proves that the store lost data.
    ahead_commits: int = 0

    async def ready_requests(self, job_id: str, limit: int) -> list[ReadyRequest]:
        started, rows = await self._script("list_requests", keyspace.meta(job_id), ["ready", max(limit, 0), *_READY])
        return [_ready(keyspace.parse_rid(job_id, text(rid)), int(n), values, started) for rid, n, values in rows]

    async def leased_requests(self, job_id: str) -> list[LeasedRequest]:
        _, rows = await self._script("list_requests", keyspace.meta(job_id), ["leased", -1, *_LEASED])
        return [_leased(keyspace.parse_rid(job_id, text(rid)), int(n), values) for rid, n, values in rows]

    async def lease(self, job_id: str, term: int, requests: Sequence[LeaseRequest]) -> list[Lease]:
        if not requests:
            return []
        args: list[Arg] = [term, text(await self._command("GET", keyspace.INCARNATION), "1")]
        for r in requests:
            owner = (r.worker_id, r.numerics_class, int(r.exact))
            args += [keyspace.rid(_of_job(job_id, r.key)), r.key.line, r.epoch, *owner]
        granted = await self._script("lease", keyspace.meta(job_id), args)
        leases = [
            Lease(requests[int(i)].key, FencingToken(int(inc), int(epoch)), requests[int(i)].worker_id)
            for i, inc, epoch in granted
        ]
        for lease in leases:
            self._saw(lease.token.incarnation)
        return leases

    async def requeue(
        self,
        job_id: str,
        term: int,
        keys: Sequence[tuple[RequestKey, FencingToken]],
        cause: InterruptionCause,
    ) -> int:
        args: list[Arg] = [term, str(cause), int(cause.blames_request)]
        for key, token in keys:
            args += [keyspace.rid(_of_job(job_id, key)), token.incarnation, token.epoch]
        return int(await self._script("requeue", keyspace.meta(job_id), args))

    async def fail_request(self, key: RequestKey, term: int, epoch: int, payload: bytes) -> bool:
        args: list[Arg] = [term, keyspace.rid(key), epoch, payload]
        return bool(await self._script("fail_request", keyspace.meta(key.job_id), args))

    async def get_request(self, key: RequestKey) -> RequestRecord | None:
        flat, log = await self._script("get_request", keyspace.meta(key.job_id), [keyspace.rid(key)])
        return _record(key, pairs(flat), log) if flat else None

    async def commit(self, commits: Sequence[TokenCommit]) -> list[CommitResult]:
        by_job: dict[str, list[int]] = {}
        for index, commit in enumerate(commits):
            by_job.setdefault(commit.key.job_id, []).append(index)
        calls = [
            ScriptCall("commit", keyspace.meta(job_id), [arg for i in indexes for arg in _commit_args(commits[i])])
            for job_id, indexes in by_job.items()
        ]
        results: dict[int, CommitResult] = {}
        for indexes, replies in zip(by_job.values(), await self._scripts(calls), strict=True):
            for index, (code, length) in zip(indexes, replies, strict=True):
                self.ahead_commits += code == _AHEAD
                results[index] = CommitResult(commits[index].key, _STATUS[code], int(length), ahead=code == _AHEAD)
                if _STATUS[code] is CommitStatus.OK:
                    self._saw(commits[index].token.incarnation)
        return [results[index] for index in range(len(commits))]

    async def handover(
        self,
        key: RequestKey,
        token: FencingToken,
        length: int,
        watermark: KVWatermark | None,
        target: str,
        cause: InterruptionCause,
    ) -> Lease | None:
        args: list[Arg] = [keyspace.rid(key), token.incarnation, token.epoch, length, *_watermark_args(watermark)]
        args += [target, str(cause), int(cause.blames_request)]
        if not await self._script("handover", keyspace.meta(key.job_id), args):
            return None
        return Lease(key, FencingToken(token.incarnation, token.epoch + 1), target)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def unpack_tokens(log: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(log) // 4}i", log)


def _of_job(job_id: str, key: RequestKey) -> RequestKey:
    if key.job_id != job_id:
        raise ValueError(f"request {key} is not of job {job_id}: one call holds one job's requests")
    return key


def _watermark_args(mark: KVWatermark | None) -> list[Arg]:
    return ["", "", ""] if mark is None else [mark.positions, mark.first_page, mark.layout]


def _commit_args(commit: TokenCommit) -> list[Arg]:
    if commit.position < 0:
        raise ValueError(f"commit of {commit.key}: position {commit.position} is negative")
    finish, resume = commit.finish, commit.resume
    return [
        keyspace.rid(commit.key),
        commit.token.incarnation,
        commit.token.epoch,
        commit.position,
        pack_tokens(commit.tokens),
        *_watermark_args(commit.watermark),
        "" if finish is None else int(finish.ok),
        b"" if finish is None else finish.payload,
        b"" if resume is None else msgspec.msgpack.encode(resume),
        commit.kv_at,
    ]


def _ready(key: RequestKey, tokens: int, values: Sequence[Any], started: bytes) -> ReadyRequest:
    r = dict(zip(_READY, values, strict=True))
    return ReadyRequest(
        key=key,
        epoch=int(r["epoch"]),
        prompt_tokens=int(r["prompt_tokens"]),
        tokens=tokens,
        max_tokens=int(r["max_tokens"]),
        numerics_class=text(r["nclass"]),
        attempts=int(r["attempts"] or 0),
        interruptions=int(r["interruptions"] or 0),
        ready_since=int(r["ready_since"] or started) / 1e6,
        avoid_worker=text(r["avoid"]),
    )


def _leased(key: RequestKey, tokens: int, values: Sequence[Any]) -> LeasedRequest:
    r = dict(zip(_LEASED, values, strict=True))
    return LeasedRequest(
        key=key,
        token=FencingToken(int(r["inc"]), int(r["epoch"])),
        worker_id=text(r["worker"]),
        tokens=tokens,
        prompt_tokens=int(r["prompt_tokens"]),
        max_tokens=int(r["max_tokens"]),
        numerics_class=text(r["lclass"]),
        leased_at=int(r["leased_at"]) / 1e6,
        attempts=int(r["attempts"] or 0),
    )


def parse_segments(value: str) -> tuple[KVSegment, ...]:
    pieces = (piece.split(":") for piece in value.split(",") if piece)
    return tuple(KVSegment(int(epoch), int(page)) for epoch, page in pieces)


def _record(key: RequestKey, r: dict[str, bytes], log: bytes) -> RequestRecord:
    return RequestRecord(
        key=key,
        spec=msgspec.msgpack.decode(r["spec"], type=RequestSpec),
        state=RequestState(r["state"].decode()),
        token=FencingToken(int(r["inc"]), int(r["epoch"])),
        worker_id=text(r.get("worker")),
        tokens=unpack_tokens(log),
        watermark=int(r.get("wm", 0)),
        layout=text(r.get("layout")),
        segments=parse_segments(text(r.get("segs"))),
        numerics_class=text(r.get("nclass")),
        exact=r.get("exact") != b"0",
        attempts=int(r.get("attempts", 0)),
        interruptions=int(r.get("interruptions", 0)),
        kv_at=text(r.get("kv_at")),
    )
