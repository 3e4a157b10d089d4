from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Worker(_message.Message):
    __slots__ = ("worker_id", "node_id", "model", "state", "running", "waiting", "max_num_seqs", "tokens_per_s", "pages_used", "pages_total", "numerics_class", "notice", "pid", "metrics_address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    node_id: str
    model: str
    state: str
    running: int
    waiting: int
    max_num_seqs: int
    tokens_per_s: float
    pages_used: int
    pages_total: int
    numerics_class: str
    notice: str
    pid: int
    metrics_address: str
    def __init__(self, worker_id: _Optional[str] = ..., node_id: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., pages_used: _Optional[int] = ..., pages_total: _Optional[int] = ..., numerics_class: _Optional[str] = ..., notice: _Optional[str] = ..., pid: _Optional[int] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class PreemptWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "deadline_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    deadline_s: float
    def __init__(self, worker_id: _Optional[str] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class PreemptWorkerResponse(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class KillWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class KillWorkerResponse(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterResponse(_message.Message):
    __slots__ = ("version", "model", "leader", "term", "incarnation")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    leader: str
    term: int
    incarnation: int
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., leader: _Optional[str] = ..., term: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class ListContextRequest(_message.Message):
    __slots__ = ("job_id", "line", "choice", "limit")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    line: int
    choice: int
    limit: int
    def __init__(self, job_id: _Optional[str] = ..., line: _Optional[int] = ..., choice: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class ListContextResponse(_message.Message):
    __slots__ = ("items", "left_off", "nodes", "kv_error")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OFF_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    KV_ERROR_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ContextItem]
    left_off: int
    nodes: _containers.RepeatedCompositeFieldContainer[ContextNode]
    kv_error: str
    def __init__(self, items: _Optional[_Iterable[_Union[ContextItem, _Mapping]]] = ..., left_off: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[ContextNode, _Mapping]]] = ..., kv_error: _Optional[str] = ...) -> None: ...

class ContextNode(_message.Message):
    __slots__ = ("node_id", "address", "arena_bytes", "arena_used_bytes", "bytes_per_s", "money_per_hour", "error")
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
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MONEY_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    arena_bytes: int
    arena_used_bytes: int
    bytes_per_s: _containers.ScalarMap[str, float]
    money_per_hour: _containers.ScalarMap[str, float]
    error: str
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ..., arena_bytes: _Optional[int] = ..., arena_used_bytes: _Optional[int] = ..., bytes_per_s: _Optional[_Mapping[str, float]] = ..., money_per_hour: _Optional[_Mapping[str, float]] = ..., error: _Optional[str] = ...) -> None: ...

class ContextItem(_message.Message):
    __slots__ = ("job_id", "line", "choice", "state", "incarnation", "epoch", "worker_id", "prompt_tokens", "tokens", "watermark", "layout", "segments", "kv_at", "places")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    KV_AT_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    line: int
    choice: int
    state: str
    incarnation: int
    epoch: int
    worker_id: str
    prompt_tokens: int
    tokens: int
    watermark: int
    layout: str
    segments: _containers.RepeatedCompositeFieldContainer[ContextSegment]
    kv_at: str
    places: _containers.RepeatedCompositeFieldContainer[ContextPlace]
    def __init__(self, job_id: _Optional[str] = ..., line: _Optional[int] = ..., choice: _Optional[int] = ..., state: _Optional[str] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., watermark: _Optional[int] = ..., layout: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[ContextSegment, _Mapping]]] = ..., kv_at: _Optional[str] = ..., places: _Optional[_Iterable[_Union[ContextPlace, _Mapping]]] = ...) -> None: ...

class ContextSegment(_message.Message):
    __slots__ = ("epoch", "first_page")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    first_page: int
    def __init__(self, epoch: _Optional[int] = ..., first_page: _Optional[int] = ...) -> None: ...

class ContextPlace(_message.Message):
    __slots__ = ("node_id", "layout", "pages", "bytes", "restorable", "owner_epoch", "held")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    RESTORABLE_FIELD_NUMBER: _ClassVar[int]
    OWNER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    layout: str
    pages: int
    bytes: int
    restorable: int
    owner_epoch: int
    held: _containers.RepeatedCompositeFieldContainer[ContextPage]
    def __init__(self, node_id: _Optional[str] = ..., layout: _Optional[str] = ..., pages: _Optional[int] = ..., bytes: _Optional[int] = ..., restorable: _Optional[int] = ..., owner_epoch: _Optional[int] = ..., held: _Optional[_Iterable[_Union[ContextPage, _Mapping]]] = ...) -> None: ...

class ContextPage(_message.Message):
    __slots__ = ("page", "epoch", "bytes")
    PAGE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    page: int
    epoch: int
    bytes: int
    def __init__(self, page: _Optional[int] = ..., epoch: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class CollectContextRequest(_message.Message):
    __slots__ = ("dry_run",)
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    def __init__(self, dry_run: _Optional[bool] = ...) -> None: ...

class CollectContextResponse(_message.Message):
    __slots__ = ("stored_pages", "stored_bytes", "arena_requests", "arena_bytes", "dead_blocks", "nodes")
    class StoredPagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STORED_PAGES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEAD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    stored_pages: _containers.ScalarMap[str, int]
    stored_bytes: int
    arena_requests: int
    arena_bytes: int
    dead_blocks: int
    nodes: _containers.RepeatedCompositeFieldContainer[ContextNode]
    def __init__(self, stored_pages: _Optional[_Mapping[str, int]] = ..., stored_bytes: _Optional[int] = ..., arena_requests: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., dead_blocks: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[ContextNode, _Mapping]]] = ...) -> None: ...
