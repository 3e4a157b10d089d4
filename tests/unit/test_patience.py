from __future__ import annotations

from typing import Any

import grpc
import pytest

from orchestrator.patience import Patience


class Failure:
    def __init__(
        self,
        code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
        details: str = "failed to connect to all addresses; last error: ...",
    ) -> None:
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def patience(time: Time, *, reached: bool) -> Patience:
    return Patience(30.0, 2.0, reached=reached, clock=lambda: time.now, sleep=time.sleep)


@pytest.mark.parametrize(("reached", "limit"), [(False, 2.0), (True, 30.0)])
def test_waits_as_long_as_it_should_and_no_longer(reached: bool, limit: float) -> None:
    time = Time()
    waiting = patience(time, reached=reached)
    while waiting.wait(Failure()):
        assert time.now < limit + 1.0
    assert limit <= time.now < limit + 1.0


def test_a_sign_of_life_starts_the_patience_anew() -> None:
    time = Time()
    waiting = patience(time, reached=False)
    waiting.heard()
    time.now = 100.0
    assert waiting.wait(Failure())
    time.now = 125.0
    assert waiting.wait(Failure())


@pytest.mark.parametrize("code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT])
def test_other_failures_are_final(code: Any) -> None:
    assert not patience(Time(), reached=True).wait(Failure(code))


def test_a_call_that_was_cut_off_has_met_a_server() -> None:
    time = Time()
    waiting = patience(time, reached=False)
    assert waiting.wait(Failure(details="Socket closed"))
    while waiting.wait(Failure()):
        pass
    assert time.now >= 30.0
