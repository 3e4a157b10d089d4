"""From token ids to a result line: one Answer per running sequence, rebuilt from its tokens on resumption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from context_daemon.records import Finish, KVLayout, RequestKey, RequestSpec
from worker.text import StopChecker, Tokenizer, error_line, result_line


@dataclass(frozen=True)
class AnswerBuilder:
    tokenizer: Tokenizer
    model: str
    layout: KVLayout
    eos_token_ids: tuple[int, ...]

    def start(self, key: RequestKey, spec: RequestSpec, tokens: Sequence[int]) -> Answer:
        """An Answer that has seen `tokens`. Text is a function of the tokens alone, so a resumed one is equal."""
        answer = Answer(self, key, spec)
        for token_id in tokens:
            answer.push(token_id)
        return answer
