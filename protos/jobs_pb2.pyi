from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_VALIDATING: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_IN_PROGRESS: _ClassVar[JobState]
    JOB_STATE_FINALIZING: _ClassVar[JobState]
    JOB_STATE_COMPLETED: _ClassVar[JobState]
    JOB_STATE_CANCELLING: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_VALIDATING: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_IN_PROGRESS: JobState
JOB_STATE_FINALIZING: JobState
JOB_STATE_COMPLETED: JobState
JOB_STATE_CANCELLING: JobState
JOB_STATE_CANCELLED: JobState

class CreateJobRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: CreateJobHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[CreateJobHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class CreateJobHeader(_message.Message):
    __slots__ = ("request_id", "model", "metadata", "file_name")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    metadata: _containers.ScalarMap[str, str]
    file_name: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., file_name: _Optional[str] = ...) -> None: ...

class CreateJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class JobError(_message.Message):
    __slots__ = ("line", "param", "code", "message")
    LINE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    line: int
    param: str
    code: str
    message: str
    def __init__(self, line: _Optional[int] = ..., param: _Optional[str] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class JobErrors(_message.Message):
    __slots__ = ("errors",)
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    errors: _containers.RepeatedCompositeFieldContainer[JobError]
    def __init__(self, errors: _Optional[_Iterable[_Union[JobError, _Mapping]]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("job_id", "request_id", "state", "model", "endpoint", "created_at", "started_at", "finished_at", "total", "completed", "failed", "output_tokens", "error", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    request_id: str
    state: JobState
    model: str
    endpoint: str
    created_at: float
    started_at: float
    finished_at: float
    total: int
    completed: int
    failed: int
    output_tokens: int
    error: str
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, job_id: _Optional[str] = ..., request_id: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., model: _Optional[str] = ..., endpoint: _Optional[str] = ..., created_at: _Optional[float] = ..., started_at: _Optional[float] = ..., finished_at: _Optional[float] = ..., total: _Optional[int] = ..., completed: _Optional[int] = ..., failed: _Optional[int] = ..., output_tokens: _Optional[int] = ..., error: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class GetJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs", "next_page_token")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    next_page_token: str
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class CancelJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class WatchJobRequest(_message.Message):
    __slots__ = ("job_id", "interval_s")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    interval_s: float
    def __init__(self, job_id: _Optional[str] = ..., interval_s: _Optional[float] = ...) -> None: ...

class WatchJobResponse(_message.Message):
    __slots__ = ("job", "workers", "events", "tokens_per_s", "elapsed_s", "eta_s", "waiting_for")
    JOB_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    job: Job
    workers: _containers.RepeatedCompositeFieldContainer[WorkerProgress]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    tokens_per_s: float
    elapsed_s: float
    eta_s: float
    waiting_for: str
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerProgress, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., tokens_per_s: _Optional[float] = ..., elapsed_s: _Optional[float] = ..., eta_s: _Optional[float] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class WorkerProgress(_message.Message):
    __slots__ = ("worker_id", "node_id", "state", "running", "waiting", "tokens_per_s", "pages_used", "pages_total")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    node_id: str
    state: str
    running: int
    waiting: int
    tokens_per_s: float
    pages_used: int
    pages_total: int
    def __init__(self, worker_id: _Optional[str] = ..., node_id: _Optional[str] = ..., state: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., pages_used: _Optional[int] = ..., pages_total: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("time", "kind", "text")
    TIME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    time: float
    kind: str
    text: str
    def __init__(self, time: _Optional[float] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class StreamResultsRequest(_message.Message):
    __slots__ = ("job_id", "start", "follow")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    start: int
    follow: bool
    def __init__(self, job_id: _Optional[str] = ..., start: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class StreamResultsResponse(_message.Message):
    __slots__ = ("index", "line", "ok", "payload")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    index: int
    line: int
    ok: bool
    payload: bytes
    def __init__(self, index: _Optional[int] = ..., line: _Optional[int] = ..., ok: _Optional[bool] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ListInterruptionsRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class ListInterruptionsResponse(_message.Message):
    __slots__ = ("interruptions",)
    INTERRUPTIONS_FIELD_NUMBER: _ClassVar[int]
    interruptions: _containers.RepeatedCompositeFieldContainer[Interruption]
    def __init__(self, interruptions: _Optional[_Iterable[_Union[Interruption, _Mapping]]] = ...) -> None: ...

class Interruption(_message.Message):
    __slots__ = ("line", "custom_id", "epoch", "cause", "source", "target", "tokens", "watermark", "prompt_tokens", "detect_ms", "queue_ms", "restore_ms", "recompute_ms", "gap_ms", "recomputed_tokens", "restored_positions", "restore_source")
    LINE_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DETECT_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_MS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    GAP_MS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    line: int
    custom_id: str
    epoch: int
    cause: str
    source: str
    target: str
    tokens: int
    watermark: int
    prompt_tokens: int
    detect_ms: float
    queue_ms: float
    restore_ms: float
    recompute_ms: float
    gap_ms: float
    recomputed_tokens: int
    restored_positions: int
    restore_source: str
    def __init__(self, line: _Optional[int] = ..., custom_id: _Optional[str] = ..., epoch: _Optional[int] = ..., cause: _Optional[str] = ..., source: _Optional[str] = ..., target: _Optional[str] = ..., tokens: _Optional[int] = ..., watermark: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., detect_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., restore_ms: _Optional[float] = ..., recompute_ms: _Optional[float] = ..., gap_ms: _Optional[float] = ..., recomputed_tokens: _Optional[int] = ..., restored_positions: _Optional[int] = ..., restore_source: _Optional[str] = ...) -> None: ...
