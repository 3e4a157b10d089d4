from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CommitStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_STATUS_UNSPECIFIED: _ClassVar[CommitStatus]
    COMMIT_STATUS_OK: _ClassVar[CommitStatus]
    COMMIT_STATUS_FENCED: _ClassVar[CommitStatus]
    COMMIT_STATUS_GAP: _ClassVar[CommitStatus]
    COMMIT_STATUS_DIVERGED: _ClassVar[CommitStatus]
COMMIT_STATUS_UNSPECIFIED: CommitStatus
COMMIT_STATUS_OK: CommitStatus
COMMIT_STATUS_FENCED: CommitStatus
COMMIT_STATUS_GAP: CommitStatus
COMMIT_STATUS_DIVERGED: CommitStatus

class RequestKey(_message.Message):
    __slots__ = ("job_id", "line", "choice")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    line: int
    choice: int
    def __init__(self, job_id: _Optional[str] = ..., line: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class FencingToken(_message.Message):
    __slots__ = ("incarnation", "epoch")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    epoch: int
    def __init__(self, incarnation: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class KVWatermark(_message.Message):
    __slots__ = ("positions", "first_page", "layout")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    positions: int
    first_page: int
    layout: str
    def __init__(self, positions: _Optional[int] = ..., first_page: _Optional[int] = ..., layout: _Optional[str] = ...) -> None: ...

class ResumeReport(_message.Message):
    __slots__ = ("recomputed_tokens", "restored_positions", "restore_ms", "recompute_ms", "restore_source")
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_MS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    recomputed_tokens: int
    restored_positions: int
    restore_ms: float
    recompute_ms: float
    restore_source: str
    def __init__(self, recomputed_tokens: _Optional[int] = ..., restored_positions: _Optional[int] = ..., restore_ms: _Optional[float] = ..., recompute_ms: _Optional[float] = ..., restore_source: _Optional[str] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("ok", "payload")
    OK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    payload: bytes
    def __init__(self, ok: _Optional[bool] = ..., payload: _Optional[bytes] = ...) -> None: ...

class TokenCommit(_message.Message):
    __slots__ = ("key", "token", "position", "tokens", "watermark", "finish", "resume")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    token: FencingToken
    position: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    watermark: KVWatermark
    finish: Finish
    resume: ResumeReport
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., token: _Optional[_Union[FencingToken, _Mapping]] = ..., position: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., watermark: _Optional[_Union[KVWatermark, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., resume: _Optional[_Union[ResumeReport, _Mapping]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("commits",)
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    commits: _containers.RepeatedCompositeFieldContainer[TokenCommit]
    def __init__(self, commits: _Optional[_Iterable[_Union[TokenCommit, _Mapping]]] = ...) -> None: ...

class CommitResult(_message.Message):
    __slots__ = ("key", "status", "length")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    status: CommitStatus
    length: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., status: _Optional[_Union[CommitStatus, str]] = ..., length: _Optional[int] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[CommitResult]
    def __init__(self, results: _Optional[_Iterable[_Union[CommitResult, _Mapping]]] = ...) -> None: ...

class AttachArenaRequest(_message.Message):
    __slots__ = ("layout", "slot_bytes", "page_size", "pid", "want_blocks", "writer")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WANT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    layout: str
    slot_bytes: int
    page_size: int
    pid: int
    want_blocks: int
    writer: str
    def __init__(self, layout: _Optional[str] = ..., slot_bytes: _Optional[int] = ..., page_size: _Optional[int] = ..., pid: _Optional[int] = ..., want_blocks: _Optional[int] = ..., writer: _Optional[str] = ...) -> None: ...

class AttachArenaResponse(_message.Message):
    __slots__ = ("arena_id", "path", "total_bytes", "attachment", "granted")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    arena_id: str
    path: str
    total_bytes: int
    attachment: int
    granted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, arena_id: _Optional[str] = ..., path: _Optional[str] = ..., total_bytes: _Optional[int] = ..., attachment: _Optional[int] = ..., granted: _Optional[_Iterable[int]] = ...) -> None: ...

class SlotRange(_message.Message):
    __slots__ = ("key", "epoch", "prompt_tokens", "start", "count", "blocks", "grant")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    epoch: int
    prompt_tokens: int
    start: int
    count: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    grant: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., epoch: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., grant: _Optional[int] = ...) -> None: ...

class WriteSlotsRequest(_message.Message):
    __slots__ = ("arena_id", "attachment", "ranges", "asks", "want_blocks", "grant")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    WANT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    arena_id: str
    attachment: int
    ranges: _containers.RepeatedCompositeFieldContainer[SlotRange]
    asks: _containers.RepeatedCompositeFieldContainer[KVProgress]
    want_blocks: int
    grant: int
    def __init__(self, arena_id: _Optional[str] = ..., attachment: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[SlotRange, _Mapping]]] = ..., asks: _Optional[_Iterable[_Union[KVProgress, _Mapping]]] = ..., want_blocks: _Optional[int] = ..., grant: _Optional[int] = ...) -> None: ...

class KVProgress(_message.Message):
    __slots__ = ("key", "epoch", "stored", "losses", "hole_start", "hole_stop")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    HOLE_START_FIELD_NUMBER: _ClassVar[int]
    HOLE_STOP_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    epoch: int
    stored: int
    losses: int
    hole_start: int
    hole_stop: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., epoch: _Optional[int] = ..., stored: _Optional[int] = ..., losses: _Optional[int] = ..., hole_start: _Optional[int] = ..., hole_stop: _Optional[int] = ...) -> None: ...

class WriteSlotsResponse(_message.Message):
    __slots__ = ("progress", "granted", "ships", "grant")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    SHIPS_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    progress: _containers.RepeatedCompositeFieldContainer[KVProgress]
    granted: _containers.RepeatedScalarFieldContainer[int]
    ships: bool
    grant: int
    def __init__(self, progress: _Optional[_Iterable[_Union[KVProgress, _Mapping]]] = ..., granted: _Optional[_Iterable[int]] = ..., ships: _Optional[bool] = ..., grant: _Optional[int] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("key", "token", "worker_id", "layout", "arena_id", "slot_bytes", "page_size", "prefill", "only")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    ONLY_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    token: FencingToken
    worker_id: str
    layout: str
    arena_id: str
    slot_bytes: int
    page_size: int
    prefill: PrefillCost
    only: str
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., token: _Optional[_Union[FencingToken, _Mapping]] = ..., worker_id: _Optional[str] = ..., layout: _Optional[str] = ..., arena_id: _Optional[str] = ..., slot_bytes: _Optional[int] = ..., page_size: _Optional[int] = ..., prefill: _Optional[_Union[PrefillCost, _Mapping]] = ..., only: _Optional[str] = ...) -> None: ...

class PrefillCost(_message.Message):
    __slots__ = ("fixed_s", "token_s", "attention_s", "slowdown")
    FIXED_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_S_FIELD_NUMBER: _ClassVar[int]
    SLOWDOWN_FIELD_NUMBER: _ClassVar[int]
    fixed_s: float
    token_s: float
    attention_s: float
    slowdown: float
    def __init__(self, fixed_s: _Optional[float] = ..., token_s: _Optional[float] = ..., attention_s: _Optional[float] = ..., slowdown: _Optional[float] = ...) -> None: ...

class RestoreResponse(_message.Message):
    __slots__ = ("record", "pages", "planned")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    record: bytes
    pages: RestoredPages
    planned: RestorePlanned
    def __init__(self, record: _Optional[bytes] = ..., pages: _Optional[_Union[RestoredPages, _Mapping]] = ..., planned: _Optional[_Union[RestorePlanned, _Mapping]] = ...) -> None: ...

class RestorePlanned(_message.Message):
    __slots__ = ("fetch_from", "fetch_to")
    FETCH_FROM_FIELD_NUMBER: _ClassVar[int]
    FETCH_TO_FIELD_NUMBER: _ClassVar[int]
    fetch_from: int
    fetch_to: int
    def __init__(self, fetch_from: _Optional[int] = ..., fetch_to: _Optional[int] = ...) -> None: ...

class RestoredPages(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedCompositeFieldContainer[RestoredPage]
    def __init__(self, pages: _Optional[_Iterable[_Union[RestoredPage, _Mapping]]] = ...) -> None: ...

class RestoredPage(_message.Message):
    __slots__ = ("page", "epoch", "slots", "block", "count", "source")
    PAGE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    page: int
    epoch: int
    slots: bytes
    block: int
    count: int
    source: str
    def __init__(self, page: _Optional[int] = ..., epoch: _Optional[int] = ..., slots: _Optional[bytes] = ..., block: _Optional[int] = ..., count: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class DescribePagesRequest(_message.Message):
    __slots__ = ("keys", "layout")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[RequestKey]
    layout: str
    def __init__(self, keys: _Optional[_Iterable[_Union[RequestKey, _Mapping]]] = ..., layout: _Optional[str] = ...) -> None: ...

class DescribePagesResponse(_message.Message):
    __slots__ = ("positions", "port", "token")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    port: int
    token: str
    def __init__(self, positions: _Optional[_Iterable[int]] = ..., port: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class PreparedRequest(_message.Message):
    __slots__ = ("key", "token", "positions")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    token: FencingToken
    positions: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., token: _Optional[_Union[FencingToken, _Mapping]] = ..., positions: _Optional[int] = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("target", "layout", "slot_bytes", "page_size", "requests", "last")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    target: str
    layout: str
    slot_bytes: int
    page_size: int
    requests: _containers.RepeatedCompositeFieldContainer[PreparedRequest]
    last: bool
    def __init__(self, target: _Optional[str] = ..., layout: _Optional[str] = ..., slot_bytes: _Optional[int] = ..., page_size: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[PreparedRequest, _Mapping]]] = ..., last: _Optional[bool] = ...) -> None: ...

class PrepareResponse(_message.Message):
    __slots__ = ("positions",)
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, positions: _Optional[_Iterable[int]] = ...) -> None: ...

class TakePagesRequest(_message.Message):
    __slots__ = ("prepare", "source", "port", "token")
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    prepare: PrepareRequest
    source: str
    port: int
    token: str
    def __init__(self, prepare: _Optional[_Union[PrepareRequest, _Mapping]] = ..., source: _Optional[str] = ..., port: _Optional[int] = ..., token: _Optional[str] = ...) -> None: ...

class TakePagesResponse(_message.Message):
    __slots__ = ("positions",)
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, positions: _Optional[_Iterable[int]] = ...) -> None: ...

class HandoverRequest(_message.Message):
    __slots__ = ("key", "token", "length", "watermark", "target", "cause")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    token: FencingToken
    length: int
    watermark: KVWatermark
    target: str
    cause: str
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., token: _Optional[_Union[FencingToken, _Mapping]] = ..., length: _Optional[int] = ..., watermark: _Optional[_Union[KVWatermark, _Mapping]] = ..., target: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...

class HandoverResponse(_message.Message):
    __slots__ = ("moved", "token", "target")
    MOVED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    moved: bool
    token: FencingToken
    target: str
    def __init__(self, moved: _Optional[bool] = ..., token: _Optional[_Union[FencingToken, _Mapping]] = ..., target: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: bytes
    def __init__(self, status: _Optional[bytes] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("notices",)
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    notices: _containers.RepeatedCompositeFieldContainer[NoticeMessage]
    def __init__(self, notices: _Optional[_Iterable[_Union[NoticeMessage, _Mapping]]] = ...) -> None: ...

class NoticeMessage(_message.Message):
    __slots__ = ("id", "node_id", "kind", "deadline", "source")
    ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    id: str
    node_id: str
    kind: str
    deadline: float
    source: str
    def __init__(self, id: _Optional[str] = ..., node_id: _Optional[str] = ..., kind: _Optional[str] = ..., deadline: _Optional[float] = ..., source: _Optional[str] = ...) -> None: ...

class RaiseNoticeRequest(_message.Message):
    __slots__ = ("notice",)
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    notice: NoticeMessage
    def __init__(self, notice: _Optional[_Union[NoticeMessage, _Mapping]] = ...) -> None: ...

class RaiseNoticeResponse(_message.Message):
    __slots__ = ("is_new",)
    IS_NEW_FIELD_NUMBER: _ClassVar[int]
    is_new: bool
    def __init__(self, is_new: _Optional[bool] = ...) -> None: ...

class WithdrawNoticeRequest(_message.Message):
    __slots__ = ("notice_id",)
    NOTICE_ID_FIELD_NUMBER: _ClassVar[int]
    notice_id: str
    def __init__(self, notice_id: _Optional[str] = ...) -> None: ...

class WithdrawNoticeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPagesRequest(_message.Message):
    __slots__ = ("job_id", "key", "stored")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    key: RequestKey
    stored: bool
    def __init__(self, job_id: _Optional[str] = ..., key: _Optional[_Union[RequestKey, _Mapping]] = ..., stored: _Optional[bool] = ...) -> None: ...

class ListPagesResponse(_message.Message):
    __slots__ = ("node_id", "arena_bytes", "arena_used_bytes", "arena", "stored", "stored_error", "bytes_per_s", "money_per_hour", "page_sizes")
    class BytesPerSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class MoneyPerHourEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class PageSizesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    STORED_ERROR_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MONEY_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    arena_bytes: int
    arena_used_bytes: int
    arena: _containers.RepeatedCompositeFieldContainer[ArenaHolding]
    stored: _containers.RepeatedCompositeFieldContainer[StoreHolding]
    stored_error: str
    bytes_per_s: _containers.ScalarMap[str, float]
    money_per_hour: _containers.ScalarMap[str, float]
    page_sizes: _containers.ScalarMap[str, int]
    def __init__(self, node_id: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., arena_used_bytes: _Optional[int] = ..., arena: _Optional[_Iterable[_Union[ArenaHolding, _Mapping]]] = ..., stored: _Optional[_Iterable[_Union[StoreHolding, _Mapping]]] = ..., stored_error: _Optional[str] = ..., bytes_per_s: _Optional[_Mapping[str, float]] = ..., money_per_hour: _Optional[_Mapping[str, float]] = ..., page_sizes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ArenaHolding(_message.Message):
    __slots__ = ("key", "layout", "owner_epoch", "positions", "pages", "bytes", "held")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    OWNER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    layout: str
    owner_epoch: int
    positions: int
    pages: int
    bytes: int
    held: _containers.RepeatedCompositeFieldContainer[PageHolding]
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., layout: _Optional[str] = ..., owner_epoch: _Optional[int] = ..., positions: _Optional[int] = ..., pages: _Optional[int] = ..., bytes: _Optional[int] = ..., held: _Optional[_Iterable[_Union[PageHolding, _Mapping]]] = ...) -> None: ...

class StoreHolding(_message.Message):
    __slots__ = ("key", "layout", "epoch", "bytes", "held", "numbers")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    layout: str
    epoch: int
    bytes: int
    held: _containers.RepeatedCompositeFieldContainer[PageHolding]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., layout: _Optional[str] = ..., epoch: _Optional[int] = ..., bytes: _Optional[int] = ..., held: _Optional[_Iterable[_Union[PageHolding, _Mapping]]] = ..., numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class PageHolding(_message.Message):
    __slots__ = ("page", "epoch", "bytes")
    PAGE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    page: int
    epoch: int
    bytes: int
    def __init__(self, page: _Optional[int] = ..., epoch: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class CollectPagesRequest(_message.Message):
    __slots__ = ("dry_run", "stored")
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    stored: bool
    def __init__(self, dry_run: _Optional[bool] = ..., stored: _Optional[bool] = ...) -> None: ...

class CollectPagesResponse(_message.Message):
    __slots__ = ("node_id", "stored_pages", "stored_bytes", "arena_requests", "arena_bytes", "dead_blocks")
    class StoredPagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STORED_PAGES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEAD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    stored_pages: _containers.ScalarMap[str, int]
    stored_bytes: int
    arena_requests: int
    arena_bytes: int
    dead_blocks: int
    def __init__(self, node_id: _Optional[str] = ..., stored_pages: _Optional[_Mapping[str, int]] = ..., stored_bytes: _Optional[int] = ..., arena_requests: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., dead_blocks: _Optional[int] = ...) -> None: ...
