"""What an inference worker is started with: plain data that crosses from the orchestrator to the actor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NAMESPACE = "tideover"  # of all named actors


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    worker_id: str  # also the actor's name
    model: str  # as clients name it
    model_path: str
    engine_args: dict[str, Any] = field(default_factory=dict)  # EngineConfig's fields
    heartbeat_s: float = 0.25
    max_commit_lag: int = 64
    max_queued_kv_bytes: int = 256 << 20
