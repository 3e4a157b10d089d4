"""One sequence in the engine: its tokens, its pages and how far its KV reaches. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from context_daemon.records import RequestKey, SamplingParams
from worker.engine.protocol import EngineRequest, ResumeState


class SequenceState(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()  # off the schedule, pages kept until abort


@dataclass(slots=True)
class Incoming:
    """Positions `[start, stop)` come from outside, in order; `[start, next)` are here. Those before `start` are computed."""

    start: int
    stop: int
    next: int
    ended: bool = False


@dataclass(eq=False, slots=True)
class Sequence:
    """`kv_len` counts positions `[0, kv_len)` whose KV is resident; always `kv_len <= len(token_ids) - 1` at rest."""

    key: RequestKey
    params: SamplingParams
    token_ids: list[int]  # prompt, then generated
    prompt_len: int
    arrival: int  # order of `add`: the greater, the younger
    resumed: bool
    incoming: Incoming | None
    stop_ids: frozenset[int]
    max_len: int  # ends by length when token_ids is this long
    state: SequenceState = SequenceState.WAITING
    pages: list[int] = field(default_factory=list)
    kv_len: int = 0
    recomputed: int = 0
    _covered: int = 0  # positions known to have been restored or computed once, for `recomputed`

    @property
    def generated_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def pending(self) -> int:
        """Tokens still to be fed before the next one can be sampled; 1 is a decode step."""
        return len(self.token_ids) - self.kv_len

    @property
    def computable(self) -> int:
        """Of the pending tokens, those that need not wait for an import."""
        return self.pending if self.incoming is None else self.incoming.start - self.kv_len

    @property
    def room(self) -> int:
        """Positions that must have pages from the start."""
        return self.incoming.stop if self.incoming is not None else 0

    def filled_pages(self, page_size: int) -> range:
        """Those that an import fills to the last slot; what does not come must be cleared."""
        return (
            range(-(-self.incoming.start // page_size), self.incoming.stop // page_size) if self.incoming else range(0)
        )

    def end_import(self, reached: int) -> None:
        if self.incoming is not None:
            self.incoming.next = max(self.incoming.start, min(reached, self.incoming.next))
            self.incoming.ended = True
            self._join()

    def _join(self) -> None:
        """What was computed has met what was imported."""
        incoming = self.incoming
        if incoming is not None and incoming.ended and self.kv_len == incoming.start:
            self.kv_len = incoming.next
            self._covered = max(self._covered, self.kv_len)
            self.incoming = None

    def release(self) -> list[int]:
        """Give up KV and wait again; the tokens stand. What was to be imported is computed, too."""
        pages, self.pages = self.pages, []
        self.kv_len, self.incoming = 0, None
        self.state = SequenceState.WAITING
        return pages

    def advance(self, computed: int) -> None:
        self.kv_len += computed
        if self.resumed:
            known = len(self.token_ids) - 1
            self.recomputed += max(0, min(self.kv_len, known) - self._covered)
            self._covered = max(self._covered, self.kv_len)
        self._join()

    def append(self, token_id: int) -> str | None:
        """Take a sampled token; the reason when it was the last one."""
        self.token_ids.append(token_id)
        self.resumed = False  # what is computed again from here on is not the interruption's doing
        if token_id in self.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_len else None


def new_sequence(
    request: EngineRequest, resume: ResumeState | None, arrival: int, eos: tuple[int, ...], max_model_len: int
) -> Sequence:
    params = request.params
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos))
    prompt = list(request.prompt_token_ids)
    fetch = (resume.fetch_from, resume.fetch_to) if resume is not None else (0, 0)
    return Sequence(
        key=request.key,
        params=params,
        token_ids=prompt + list(resume.token_ids if resume is not None else ()),
        prompt_len=len(prompt),
        arrival=arrival,
        resumed=resume is not None,
        incoming=Incoming(*fetch, next=fetch[0]) if fetch[0] < fetch[1] else None,
        stop_ids=stop_ids,
        max_len=min(len(prompt) + params.max_tokens, max_model_len),
    )
