"""From token ids to a result line: one Answer per running sequence, rebuilt from its tokens on resumption."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from context_daemon.lines import error_line
from context_daemon.records import Finish, KVLayout, RequestKey, RequestSpec
from worker.result_lines import result_line
from worker.text import Detokenizer, StopChecker, Tokenizer


@dataclass(frozen=True)
class AnswerBuilder:
    tokenizer: Tokenizer
    model: str
    layout: KVLayout
    eos_token_ids: tuple[int, ...]
    clock: Callable[[], float] = time.time

    def start(self, key: RequestKey, spec: RequestSpec, tokens: Sequence[int]) -> Answer:
        """An Answer that has seen `tokens`. Text is a function of the tokens alone, so a resumed one is equal."""
        answer = Answer(self, key, spec)
        for token_id in tokens:
            answer.push(token_id)
        return answer


class Answer:
    """Grows with each token of one sequence and is asked for its line at the end."""

    def __init__(self, builder: AnswerBuilder, key: RequestKey, spec: RequestSpec) -> None:
        self._builder = builder
        self._key = key
        self._spec = spec
        self._text = Detokenizer(builder.tokenizer)
        self._stop = StopChecker(spec.params.stop)
        eos = () if spec.params.ignore_eos else builder.eos_token_ids
        self._stop_tokens = frozenset((*spec.params.stop_token_ids, *eos))
        self._count = 0
        self._last = -1

    def push(self, token_id: int) -> bool:
        """Take a token in; True if a stop string is complete. A stop token counts, but is no part of the text."""
        self._count += 1
        self._last = token_id
        if token_id in self._stop_tokens:
            return False
        new = self._text.push(token_id)
        return self._stop.look(self._text.text, len(new))

    @property
    def finished(self) -> str | None:
        """The finish reason that the tokens alone show, if they do: their owner died before it could say so."""
        if self._stop.cut is not None or self._last in self._stop_tokens:
            return "stop"
        return "length" if self._count >= self._spec.params.max_tokens else None

    def payload(self, finish_reason: str, *, exact: bool) -> Finish:
        """The good line. Text ends before the stop string, if one was found."""
        rest = self._text.flush()  # what waited for the bytes of a character may hold a stop string, too
        if self._stop.look(self._text.text, len(rest)):
            finish_reason = "stop"
        layout = self._builder.layout
        line = result_line(
            self._key,
            self._spec,
            text=self._text.text[: self._stop.cut],
            completion_tokens=self._count,
            finish_reason=finish_reason,
            model=self._builder.model,
            created=int(self._builder.clock()),
            system_fingerprint=f"fp_{layout.fingerprint}",
            exact=exact,
        )
        return Finish(ok=True, payload=line)

    def error(self, code: str, message: str) -> Finish:
        """An error line in place of the answer."""
        return Finish(ok=False, payload=error_line(self._key, self._spec.custom_id, code, message))
