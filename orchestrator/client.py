"""What a program holds of a Tideover cluster: the public gRPC API, typed and synchronous. The command line uses it too."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import grpc

from orchestrator.patience import Patience, connected
from protos import admin_pb2, admin_pb2_grpc, jobs_pb2, jobs_pb2_grpc

LINE_ERRORS_KEY = "tideover-job-errors-bin"  # trailing metadata: a serialized JobErrors
STORE_AWAY_KEY = "tideover-store-away"  # trailing metadata of an UNAVAILABLE that the server itself sent
OPEN_KEY = "tideover-open"  # initial metadata: the stream stands, though it may have nothing to say for long
_CHUNK_BYTES = 256 << 10
_MAX_MESSAGE = 64 << 20
_FIRST_CONTACT_S = 3.0
_LONG_S = 150.0  # stores are gone through name by name

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.enable_http_proxy", 0),
    # A channel waits up to two minutes between its own attempts by default, and calls fail at once meanwhile.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 5000),  # how long one attempt may take
    # A machine that vanished closes no connection: without pings a stream from it would be waited for without end.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # gRPC takes the longer of the two
    ("grpc.http2.max_pings_without_data", 0),
)


class TideoverError(Exception):
    """A call failed; `code` is gRPC's, `line_errors` says what is wrong with which line of a batch file."""

    def __init__(self, code: grpc.StatusCode, message: str, line_errors: tuple[jobs_pb2.JobError, ...] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.line_errors = line_errors


class NotReached(TideoverError):
    """No server was ever met at the address: most likely it is wrong, or nothing is up."""


class TideoverClient:
    """A connection to `host:port`. Safe to use from several threads. `timeout_s` bounds each try of a unary call.

    An orchestrator that goes away is waited for up to `patience_s`: calls are repeated (they are idempotent) and streams go
    on where they stood; `on_away` is told once per outage. One that was never reached is given 3 s. The faults, `preempt`
    and `kill`, are asked for once.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = 30.0,
        patience_s: float = 30.0,
        on_away: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._on_away = on_away
        self._reached = False
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._jobs = jobs_pb2_grpc.JobsServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def __enter__(self) -> TideoverClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    # -- jobs -------------------------------------------------------------------------------------------------------
    def create_job(
        self,
        file: Path,
        *,
        request_id: str = "",
        model: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> jobs_pb2.Job:
        """Submit a batch file. Repeating with the same `request_id` and content returns the job that exists.

        Raises OSError if the file cannot be read, TideoverError if it is refused.
        """
        header = jobs_pb2.CreateJobHeader(
            request_id=request_id or uuid.uuid4().hex, model=model, metadata=metadata or {}, file_name=file.name
        )
        job: jobs_pb2.Job = self._repeat(lambda: self._send(header, file)).job
        return job

    def _send(self, header: jobs_pb2.CreateJobHeader, file: Path) -> Any:
        """The whole file, from its start each time."""
        failures: list[OSError] = []
        with file.open("rb") as source:
            parts = _upload(header, source, failures)
            try:
                return self._jobs.CreateJob(parts, timeout=max(600.0, self._timeout_s))
            except grpc.RpcError:
                if failures:
                    raise failures[0] from None
                raise

    def get_job(self, job_id: str) -> jobs_pb2.Job:
        answer: jobs_pb2.Job = self._call(self._jobs.GetJob, jobs_pb2.GetJobRequest(job_id=job_id)).job
        return answer

    def list_jobs(self, page_size: int = 100, page_token: str = "") -> jobs_pb2.ListJobsResponse:
        request = jobs_pb2.ListJobsRequest(page_size=page_size, page_token=page_token)
        answer: jobs_pb2.ListJobsResponse = self._call(self._jobs.ListJobs, request)
        return answer

    def cancel_job(self, job_id: str) -> jobs_pb2.Job:
        answer: jobs_pb2.Job = self._call(self._jobs.CancelJob, jobs_pb2.CancelJobRequest(job_id=job_id)).job
        return answer

    def watch_job(self, job_id: str, interval_s: float = 0.5) -> Iterator[jobs_pb2.WatchJobResponse]:
        """Progress until the job is terminal. Opened again after an outage; events of the outage itself are not told."""
        request = jobs_pb2.WatchJobRequest(job_id=job_id, interval_s=interval_s)
        return self._stream(lambda: self._jobs.WatchJob(request))

    def stream_results(
        self, job_id: str, *, start: int = 0, follow: bool = False
    ) -> Iterator[jobs_pb2.StreamResultsResponse]:
        """Result and error lines in completion order from index `start`; with `follow` until the job is terminal.

        Each index once and in order, whatever happens to the connection.
        """
        index = start

        def from_here() -> Any:
            request = jobs_pb2.StreamResultsRequest(job_id=job_id, start=index, follow=follow)
            return self._jobs.StreamResults(request)

        for line in self._stream(from_here):
            index = line.index + 1
            yield line

    def interruptions(self, job_id: str) -> list[jobs_pb2.Interruption]:
        """The recovery table."""
        request = jobs_pb2.ListInterruptionsRequest(job_id=job_id)
        return list(self._call(self._jobs.ListInterruptions, request).interruptions)

    # -- the fleet --------------------------------------------------------------------------------------------------
    def workers(self) -> list[admin_pb2.Worker]:
        return list(self._call(self._admin.ListWorkers, admin_pb2.ListWorkersRequest()).workers)

    def cluster(self) -> admin_pb2.GetClusterResponse:
        answer: admin_pb2.GetClusterResponse = self._call(self._admin.GetCluster, admin_pb2.GetClusterRequest())
        return answer

    def preempt(self, worker_id: str, deadline_s: float) -> str:
        """Have the worker's machine given a termination notice; returns the machine's node id."""
        request = admin_pb2.PreemptWorkerRequest(worker_id=worker_id, deadline_s=deadline_s)
        return str(self._once(self._admin.PreemptWorker, request).node_id)

    def kill(self, worker_id: str) -> str:
        """SIGKILL every process of the worker's machine; returns the machine's node id."""
        return str(self._once(self._admin.KillWorker, admin_pb2.KillWorkerRequest(worker_id=worker_id)).node_id)

    def context(
        self, job_id: str = "", line: int = 0, choice: int = 0, limit: int = 0
    ) -> admin_pb2.ListContextResponse:
        """What is kept of requests, and where; with `line` of that one, page by page."""
        request = admin_pb2.ListContextRequest(job_id=job_id, line=line, choice=choice, limit=limit)
        answer: admin_pb2.ListContextResponse = self._call(self._admin.ListContext, request, _LONG_S)
        return answer

    def collect_context(self, dry_run: bool = False) -> admin_pb2.CollectContextResponse:
        """Take away what no request can use any more, or count it."""
        request = admin_pb2.CollectContextRequest(dry_run=dry_run)
        answer: admin_pb2.CollectContextResponse = self._call(self._admin.CollectContext, request, _LONG_S)
        return answer

    # -- calls ------------------------------------------------------------------------------------------------------
    def _patience(self) -> Patience:
        return Patience(self._patience_s, _FIRST_CONTACT_S, reached=self._reached)

    def _call(self, method: Any, request: Any, least_s: float = 0.0) -> Any:
        """A call that may be repeated: all but the faults, which are asked for once."""
        return self._repeat(lambda: method(request, timeout=max(least_s, self._timeout_s)))

    def _repeat(self, call: Callable[[], Any]) -> Any:
        patience = self._patience()
        while True:
            try:
                answer = call()
            except grpc.RpcError as error:
                self._bear(patience, error)
            else:
                self._reached = True
                return answer

    def _once(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            self._reached = self._reached or connected(error)
            raise self._explain(error) from error

    def _stream(self, open_stream: Callable[[], Any]) -> Iterator[Any]:
        """What `open_stream` gives, opened again after each outage; it must start behind what was already given."""
        patience = self._patience()
        while True:
            call = open_stream()
            try:
                if any(key == OPEN_KEY for key, _ in call.initial_metadata() or ()):
                    patience.heard()
                for item in call:
                    self._reached = True
                    patience.heard()
                    yield item
            except grpc.RpcError as error:
                self._bear(patience, error)
            else:
                return
            finally:
                call.cancel()  # a reader that stops early leaves no stream behind

    def _bear(self, patience: Patience, failure: grpc.RpcError) -> None:
        """Return when the call may be made again; raise what it failed with when that is final."""
        told = patience.away
        if connected(failure):
            self._reached = True
        if self._reached and not told and _code(failure) is grpc.StatusCode.UNAVAILABLE:
            self._on_away(f"{self._away(failure)}; waiting up to {self._patience_s:g} s")
        if not patience.wait(failure):
            raise self._explain(failure) from failure

    def _away(self, failure: grpc.RpcError) -> str:
        error: Any = failure  # every RpcError of a call is also a grpc.Call
        if _store_away(error):
            return f"the cluster at {self.address} is up, but {error.details()}"
        how = "the cluster at {} does not answer any more" if self._reached else "no cluster answers at {}"
        return f"{how.format(self.address)}: {error.details()}"

    def _explain(self, failure: grpc.RpcError) -> TideoverError:
        error: Any = failure
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            kind = TideoverError if self._reached else NotReached
            hint = "" if _store_away(error) else "; is it up (`tideover up`)?"
            return kind(error.code(), self._away(failure) + hint)
        details = jobs_pb2.JobErrors()
        for key, value in error.trailing_metadata() or ():
            if key == LINE_ERRORS_KEY:
                details.ParseFromString(value)
        return TideoverError(error.code(), error.details() or error.code().name, tuple(details.errors))


def _store_away(error: Any) -> bool:
    return any(key == STORE_AWAY_KEY for key, _ in error.trailing_metadata() or ())


def _code(failure: Any) -> grpc.StatusCode:
    code: grpc.StatusCode = failure.code()
    return code


def _upload(
    header: jobs_pb2.CreateJobHeader, source: BinaryIO, failures: list[OSError]
) -> Iterator[jobs_pb2.CreateJobRequest]:
    """gRPC reads this in a thread of its own: what fails there is kept for the caller, and ends the call."""
    yield jobs_pb2.CreateJobRequest(header=header)
    try:
        while chunk := source.read(_CHUNK_BYTES):
            yield jobs_pb2.CreateJobRequest(data=chunk)
    except OSError as error:
        failures.append(error)
        raise
