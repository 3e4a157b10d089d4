"""Recovery: what becomes of requests whose owner is gone, and of those that break engines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from context_daemon.lines import error_line
from context_daemon.records import InterruptionCause
from context_daemon.store import LeasedRequest, ReadyRequest


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    # Suspected once: it runs again alone. A fault while alone is its second attempt, and convicts.
    max_attempts: int = 2


def orphans(
    leased: Iterable[LeasedRequest], dead: Mapping[str, InterruptionCause], incarnation: int = 0
) -> dict[InterruptionCause, list[LeasedRequest]]:
    """Requests owned by workers known to be dead, or fenced since the store lost writes before `incarnation`, by cause."""
    found: dict[InterruptionCause, list[LeasedRequest]] = {}
    for lease in leased:
        fenced = InterruptionCause.STORE_LOSS if lease.token.incarnation < incarnation else None
        cause = dead.get(lease.worker_id, fenced)
        if cause is not None:
            found.setdefault(cause, []).append(lease)
    return found


def convicted(ready: Iterable[ReadyRequest], policy: RecoveryPolicy) -> list[ReadyRequest]:
    """Requests that broke an engine while alone on it: they get their error line and are not run again."""
    return [request for request in ready if request.attempts >= policy.max_attempts]


def conviction_payload(request: ReadyRequest, custom_id: str) -> bytes:
    """The error line of a convicted request."""
    message = (
        f"line {request.key.line}: the engine failed {request.attempts} times on this request, "
        "the last time while it ran alone"
    )
    return error_line(request.key, custom_id, "engine_fault", message)
