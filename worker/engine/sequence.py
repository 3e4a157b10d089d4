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


@dataclass(eq=False, slots=True)
class Sequence:
    """`kv_len` counts positions `[0, kv_len)` whose KV is resident; always `kv_len <= len(token_ids) - 1` at rest."""

    key: RequestKey
    params: SamplingParams
    token_ids: list[int]  # prompt, then generated
    prompt_len: int
    arrival: int  # order of `add`: the greater, the younger
    resume: ResumeState | None
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
    def restorable(self) -> int:
        """Positions that an import fills when the sequence is admitted."""
        return self.resume.kv_len if self.resume is not None else 0

    def start(self) -> None:
        self.state = SequenceState.RUNNING
        self.kv_len = self.restorable
        self._covered = max(self._covered, self.kv_len)

    def release(self) -> list[int]:
        """Give up KV and wait again; the tokens stand."""
        pages, self.pages = self.pages, []
        self.kv_len = 0
        self.state = SequenceState.WAITING
        return pages

    def advance(self, computed: int) -> None:
        self.kv_len += computed
        if self.resume is not None:
            known = len(self.token_ids) - 1
            self.recomputed += max(0, min(self.kv_len, known) - self._covered)
            self._covered = max(self._covered, self.kv_len)

    def append(self, token_id: int) -> str | None:
        """Take a sampled token; the reason when it was the last one."""
        self.token_ids.append(token_id)
        self.resume = None  # its bytes served their purpose: from here on a preemption recomputes
        if token_id in self.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_len else None


def new_sequence(
    request: EngineRequest, resume: ResumeState | None, arrival: int, eos: tuple[int, ...], max_model_len: int
) -> Sequence:
    params = request.params
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos))
    prompt = list(request.prompt_token_ids)
    return Sequence(
        key=request.key,
        params=params,
        token_ids=prompt + list(resume.token_ids if resume is not None else ()),
        prompt_len=len(prompt),
        arrival=arrival,
        resume=resume,
        stop_ids=stop_ids,
        max_len=min(len(prompt) + params.max_tokens, max_model_len),
    )
