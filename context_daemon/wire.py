"""Records to protobuf messages and back. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from context_daemon.kv_writer import Announced, Attachment, Owned, Progress, SlotRange
from context_daemon.page_records import Shape
from context_daemon.pieces import Piece
from context_daemon.preparation import Preparation, Wanted
from context_daemon.rates import PrefillCost
from context_daemon.records import (
    CommitResult,
    CommitStatus,
    FencingToken,
    Finish,
    KVWatermark,
    Lease,
    Notice,
    NoticeKind,
    RequestKey,
    ResumeReport,
    TokenCommit,
)
from protos import context_pb2 as pb

_STATUS_TO_PB = {
    CommitStatus.OK: pb.COMMIT_STATUS_OK,
    CommitStatus.FENCED: pb.COMMIT_STATUS_FENCED,
    CommitStatus.GAP: pb.COMMIT_STATUS_GAP,
    CommitStatus.DIVERGED: pb.COMMIT_STATUS_DIVERGED,
}
_STATUS_FROM_PB = {value: status for status, value in _STATUS_TO_PB.items()}


def key_to_pb(key: RequestKey) -> pb.RequestKey:
    return pb.RequestKey(job_id=key.job_id, line=key.line, choice=key.choice)


def key_from_pb(m: pb.RequestKey) -> RequestKey:
    return RequestKey(m.job_id, m.line, m.choice)


def token_to_pb(token: FencingToken) -> pb.FencingToken:
    return pb.FencingToken(incarnation=token.incarnation, epoch=token.epoch)


def token_from_pb(m: pb.FencingToken) -> FencingToken:
    return FencingToken(m.incarnation, m.epoch)


def watermark_to_pb(mark: KVWatermark | None) -> pb.KVWatermark | None:
    if mark is None:
        return None
    return pb.KVWatermark(positions=mark.positions, first_page=mark.first_page, layout=mark.layout)


def watermark_from_pb(m: pb.KVWatermark) -> KVWatermark:
    return KVWatermark(m.positions, m.first_page, m.layout)


def _resume_to_pb(r: ResumeReport | None) -> pb.ResumeReport | None:
    if r is None:
        return None
    return pb.ResumeReport(
        recomputed_tokens=r.recomputed_tokens,
        restored_positions=r.restored_positions,
        restore_ms=r.restore_ms,
        recompute_ms=r.recompute_ms,
        restore_source=r.restore_source,
    )


def _resume_from_pb(m: pb.ResumeReport) -> ResumeReport:
    return ResumeReport(m.recomputed_tokens, m.restored_positions, m.restore_ms, m.recompute_ms, m.restore_source)


def commit_to_pb(c: TokenCommit) -> pb.TokenCommit:
    return pb.TokenCommit(
        key=key_to_pb(c.key),
        token=token_to_pb(c.token),
        position=c.position,
        tokens=c.tokens,
        watermark=watermark_to_pb(c.watermark),
        finish=None if c.finish is None else pb.Finish(ok=c.finish.ok, payload=c.finish.payload),
        resume=_resume_to_pb(c.resume),
    )


def commit_from_pb(m: pb.TokenCommit, kv_at: str = "") -> TokenCommit:
    return TokenCommit(
        key=key_from_pb(m.key),
        token=token_from_pb(m.token),
        position=m.position,
        tokens=tuple(m.tokens),
        watermark=watermark_from_pb(m.watermark) if m.HasField("watermark") else None,
        finish=Finish(m.finish.ok, m.finish.payload) if m.HasField("finish") else None,
        resume=_resume_from_pb(m.resume) if m.HasField("resume") else None,
        kv_at=kv_at,
    )


def result_to_pb(r: CommitResult) -> pb.CommitResult:
    return pb.CommitResult(key=key_to_pb(r.key), status=_STATUS_TO_PB[r.status], length=r.length)


def result_from_pb(m: pb.CommitResult) -> CommitResult:
    return CommitResult(key_from_pb(m.key), _STATUS_FROM_PB[m.status], m.length)


def attachment_to_pb(a: Attachment) -> pb.AttachArenaResponse:
    return pb.AttachArenaResponse(
        arena_id=a.arena_id, path=a.path, total_bytes=a.total_bytes, attachment=a.number, granted=a.granted
    )


def attachment_from_pb(m: pb.AttachArenaResponse) -> Attachment:
    return Attachment(m.arena_id, m.path, m.total_bytes, m.attachment, tuple(m.granted))


def range_to_pb(r: SlotRange) -> pb.SlotRange:
    return pb.SlotRange(
        key=key_to_pb(r.key), epoch=r.epoch, prompt_tokens=r.prompt_tokens, start=r.start, count=r.stop - r.start,
        blocks=r.blocks, grant=r.grant,
    )  # fmt: skip


def range_from_pb(m: pb.SlotRange) -> SlotRange:
    stop, blocks = m.start + m.count, tuple(m.blocks)
    return SlotRange(key_from_pb(m.key), m.epoch, m.prompt_tokens, m.start, stop, blocks, grant=m.grant)


def progress_to_pb(owned: Owned, progress: Progress | None = None) -> pb.KVProgress:
    told = progress or Progress(0, 0)
    return pb.KVProgress(
        key=key_to_pb(owned[0]),
        epoch=owned[1],
        stored=told.stored,
        losses=told.losses,
        hole_start=told.hole_start,
        hole_stop=told.hole_stop,
    )


def announced_to_pb(a: Announced) -> pb.WriteSlotsResponse:
    return pb.WriteSlotsResponse(
        progress=[progress_to_pb(owned, progress) for owned, progress in a.progress.items()],
        granted=a.granted,
        ships=a.ships,
        grant=a.grant,
    )


def announced_from_pb(m: pb.WriteSlotsResponse) -> Announced:
    progress = {
        (key_from_pb(item.key), item.epoch): Progress(item.stored, item.losses, item.hole_start, item.hole_stop)
        for item in m.progress
    }
    return Announced(progress, tuple(m.granted), m.ships, m.grant)


def prefill_to_pb(p: PrefillCost) -> pb.PrefillCost:
    return pb.PrefillCost(fixed_s=p.fixed_s, token_s=p.token_s, attention_s=p.attention_s, slowdown=p.slowdown)


def prefill_from_pb(m: pb.PrefillCost) -> PrefillCost:
    return PrefillCost(m.fixed_s, m.token_s, m.attention_s, m.slowdown or 1.0)


def preparation_to_pb(p: Preparation) -> pb.PrepareRequest:
    return pb.PrepareRequest(
        target=p.target,
        layout=p.shape.layout,
        slot_bytes=p.shape.slot_bytes,
        page_size=p.shape.page_size,
        requests=[
            pb.PreparedRequest(key=key_to_pb(w.key), token=token_to_pb(w.token), positions=w.positions)
            for w in p.wanted
        ],
        last=p.last,
    )


def preparation_from_pb(m: pb.PrepareRequest) -> Preparation:
    wanted = tuple(Wanted(key_from_pb(w.key), token_from_pb(w.token), w.positions) for w in m.requests)
    return Preparation(m.target, Shape(m.layout, m.slot_bytes, m.page_size), wanted, m.last)


def pieces_to_pb(pieces: Iterable[Piece]) -> pb.RestoredPages:
    return pb.RestoredPages(pages=[piece_to_pb(piece) for piece in pieces])


def piece_to_pb(p: Piece) -> pb.RestoredPage:
    return pb.RestoredPage(page=p.number, epoch=p.epoch, slots=p.data, block=p.block, count=p.slots, source=p.source)


def lease_from_pb(key: RequestKey, m: pb.HandoverResponse) -> Lease | None:
    return Lease(key, token_from_pb(m.token), m.target) if m.moved else None


def notice_to_pb(n: Notice) -> pb.NoticeMessage:
    return pb.NoticeMessage(id=n.id, node_id=n.node_id, kind=str(n.kind), deadline=n.deadline, source=n.source)


def notice_from_pb(m: pb.NoticeMessage) -> Notice:
    """Raises ValueError for a kind that does not exist."""
    return Notice(m.node_id, NoticeKind(m.kind), m.deadline, m.source)


def commits_from_pb(messages: Iterable[pb.TokenCommit], kv_at: str = "") -> list[TokenCommit]:
    return [commit_from_pb(m, kv_at) for m in messages]
