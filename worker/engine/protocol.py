"""The Engine protocol: the seam between what computes and what keeps.

Kept to what a second engine (vLLM through its KV connector) could give too. One thread calls an engine, between
iterations; nothing in it waits for a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from context_daemon.records import KVLayout, RequestKey, SamplingParams


class RequestError(Exception):
    """This request can never run here, whatever is retried; the message says why."""


class EngineFault(Exception):
    """The engine is broken and must be replaced. `suspects` are the requests that were in the failing step."""

    def __init__(self, message: str, suspects: tuple[RequestKey, ...] = ()) -> None:
        super().__init__(message)
        self.suspects = suspects


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A sequence to run. Prompt and sampling only; text never reaches the engine."""

    key: RequestKey
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class ResumeState:
    """Where an interrupted sequence stood.

    `token_ids` are the generated and committed tokens. The KV of positions `[fetch_from, fetch_to)` will come through
    `import_slots`, with `fetch_to <= len(prompt) + len(token_ids) - 1`; what is before and behind is computed, that before
    while the import goes on.
    """

    token_ids: tuple[int, ...] = ()
    fetch_from: int = 0
    fetch_to: int = 0


@dataclass(frozen=True, slots=True)
class NewToken:
    """One sampled token. `position` counts the sequence's generated tokens from 0.

    `finish_reason` is "stop" (a stop token, which is included) or "length"; a finished sequence has left the engine's
    schedule but keeps its pages until `abort`, so that its last slots can still be exported.
    """

    key: RequestKey
    position: int
    token_id: int
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one iteration did.

    `kv_len` maps each sequence that ran to how many positions have KV after the step (prefill chunks included).
    `preempted` lists sequences whose pages were taken back: their KV must be computed again, their tokens stand.
    """

    tokens: tuple[NewToken, ...] = ()
    kv_len: dict[RequestKey, int] = field(default_factory=dict)
    preempted: tuple[RequestKey, ...] = ()
    prefill_tokens: int = 0
    decode_tokens: int = 0


class SlotSpan(NamedTuple):
    """Positions `[start, stop)` of a sequence."""

    key: RequestKey
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Capacity:
    running: int
    waiting: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pages_used: int
    pages_total: int
    max_model_len: int


class Engine(Protocol):
    @property
    def layout(self) -> KVLayout:
        """What the bytes of `export_slots` mean; its `numerics_class` says with whom they may be shared."""

    @property
    def capacity(self) -> Capacity: ...

    def add(self, request: EngineRequest, resume: ResumeState | None = None) -> None:
        """Queue a sequence; it joins at the next iteration with room. Raises RequestError if it can never fit."""

    def step(self) -> StepOutput:
        """Run one iteration over what is scheduled; an empty output when there is nothing to do. Raises EngineFault."""

    def has_work(self) -> bool: ...

    def export_slots(self, ranges: Sequence[SlotSpan], out: memoryview) -> None:
        """Copy the slots of all `ranges`, one after another, into `out` (their count times `slot_bytes`), in one gather.

        Raises KeyError for an unknown sequence and ValueError for positions that are not resident.
        """

    def import_slots(self, key: RequestKey, start: int, stop: int, source: memoryview) -> bool:
        """Copy the slots of positions `[start, stop)` in, which follow on those that came before, from equally long rows
        that each begin with a slot. Between iterations; they count when `end_import` says so. False while the sequence has
        no pages yet: call again after an iteration. Raises KeyError for an unknown sequence and ValueError for positions
        that it does not wait for (any, once its pages were taken back)."""

    def end_import(self, key: RequestKey, reached: int) -> None:
        """No more comes: of what was imported, positions before `reached` count, the rest is computed. Harmless for a
        sequence that waits for nothing."""

    def abort(self, key: RequestKey) -> None:
        """Forget a sequence, running or finished, and free its pages. Unknown keys are ignored."""

    def recomputed_tokens(self, key: RequestKey) -> int:
        """Positions this engine computed again for a resumed sequence, up to its first new token."""
