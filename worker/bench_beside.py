"""Sequences that decode while another comes back: how long they wait between two of their tokens."""

from __future__ import annotations

import statistics
import time
from typing import Any

from context_daemon.records import RequestKey, SamplingParams
from worker.engine.protocol import Engine, EngineRequest, StepOutput

_PROMPT = tuple(range(100, 116))
_STEPS = 20  # that tell what is normal


class Beside:
    """`count` sequences in an engine, for the length of a `with`. All of them get a token in every step that has any."""

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine = engine
        self._keys = [RequestKey("beside", line) for line in range(1, count + 1)]
        self._last = 0.0
        self._gaps: list[float] = []
        self.normal: list[float] = []
        self.restoring: list[float] = []
        self.joined: list[float] = []

    def __enter__(self) -> Beside:
        endless = SamplingParams(
            seed=1, max_tokens=self._engine.capacity.max_model_len - len(_PROMPT), temperature=0.0, ignore_eos=True
        )
        for key in self._keys:
            self._engine.add(EngineRequest(key, _PROMPT, endless))
        return self

    def __exit__(self, *_: object) -> None:
        for key in self._keys:
            self._engine.abort(key)

    @property
    def step_s(self) -> float:
        """Between two tokens, as it was of late; 0 when there is nobody."""
        return statistics.median(self.normal[-_STEPS:]) if self.normal else 0.0

    def settle(self) -> None:
        """Some steps with nobody else there."""
        if self._keys:
            self._last = time.monotonic()
            self.normal += self._steps(_STEPS + 2)[2:]

    def _steps(self, count: int) -> list[float]:
        for _ in range(count):
            self.saw(self._engine.step())
        gaps, self._gaps = self._gaps, []
        return gaps

    def saw(self, output: StepOutput) -> None:
        if any(token.key in self._keys for token in output.tokens):
            now = time.monotonic()
            self._gaps.append(now - self._last)
            self._last = now

    def came_back(self) -> None:
        """What was seen since `settle` was seen beside a restore; the last of it is a step of the one that came back, too,
        as the next ones are."""
        if self._keys:
            self.restoring += self._gaps[:-1]
            self.joined += [self._gaps[-1], *self._steps(2)]
            self._gaps = []

    def figures(self) -> dict[str, Any]:
        """Milliseconds from token to token: usual and longest alone, longest while another comes, usual with it."""
        if not self._keys:
            return {}
        found = {
            "itl_ms": statistics.median(self.normal),
            "itl_max_ms": max(self.normal),
            "itl_restoring_max_ms": max(self.restoring, default=0.0),
            "itl_joined_ms": statistics.median(self.joined),
        }
        return {name: round(1e3 * seconds, 1) for name, seconds in found.items()}
