"""What the ledger keeps of one owned sequence, and what it hands out: plain records."""

from __future__ import annotations

from dataclasses import dataclass, field

from context_daemon.records import FencingToken, Finish, RequestKey, RequestSpec, ResumeReport


@dataclass(slots=True)
class Held:
    """One owned sequence. Positions count prompt and generated tokens, `tokens` the generated ones only."""

    key: RequestKey
    token: FencingToken
    spec: RequestSpec
    tokens: list[int]
    acked: int  # generated tokens the store holds
    kv_len: int = 0  # positions with KV in the engine
    kv_queued: int = 0  # positions written to the arena, under way to the daemon's knowledge
    kv_arena: int = 0  # positions the daemon knows in the arena
    kv_stored: int = 0  # positions the KV store has under this epoch
    kv_losses: int = 0  # times that the KV store was heard to have lost it
    hole: tuple[int, int] = (0, 0)  # positions that the arena lost unshipped, to be written again
    filling: bool = False  # they are under way to the daemon's knowledge
    first_page: int = 0  # this epoch's pages start here
    watermark_sent: int = 0
    finish: Finish | None = None
    resume: ResumeReport | None = None
    exact: bool = True
    frozen: bool = False  # being handed over: produces nothing more

    @property
    def owned(self) -> tuple[RequestKey, int]:
        return self.key, self.token.epoch

    @property
    def uncommitted(self) -> int:
        return len(self.tokens) - self.acked

    @property
    def total(self) -> int:
        return len(self.spec.prompt_token_ids) + len(self.tokens)

    def flushed(self, ships: bool) -> bool:
        """All that the engine produced is acknowledged, as far as KV is shipped at all; the hand-over may carry it."""
        reached = self.kv_stored if ships else self.kv_arena
        return self.uncommitted == 0 and reached >= self.exportable

    @property
    def exportable(self) -> int:
        """Positions that the engine has KV of and a next owner can use."""
        return min(self.kv_len, self.total - 1)

    def sealed(self, page_size: int) -> int:
        """Positions in full pages that the daemon has, and whose tokens are committed."""
        return min(self.kv_arena, self.total - self.uncommitted) // page_size * page_size


@dataclass(frozen=True, slots=True)
class KVRange:
    """Slots `[start, stop)` of a sequence, due to be exported and written."""

    key: RequestKey
    epoch: int
    start: int
    stop: int


@dataclass(slots=True)
class Outcome:
    """What the loop must do after a commit was answered."""

    fenced: list[RequestKey] = field(default_factory=list)
    diverged: list[tuple[RequestKey, int]] = field(default_factory=list)  # and the store's length
    finished: list[RequestKey] = field(default_factory=list)
    dropped: list[Held] = field(default_factory=list)  # the fenced and the diverged, to be forgotten by the loop
    acked_tokens: int = 0
