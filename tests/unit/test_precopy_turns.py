"""Which pages a draining worker has copied ahead, when, and what it takes from the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from context_daemon.page_records import Shape
from context_daemon.preparation import Preparation
from context_daemon.records import Endpoint, FencingToken, RequestKey, RequestSpec, SamplingParams
from context_daemon.store import StoreUnavailable
from worker.held import Held, KVRange
from worker.ledger import Ledger
from worker.precopy import PreCopy, _Progress

PAGE = 16
SHAPE = Shape("lay", 8, PAGE)
PROMPT = tuple(range(20))


class Daemon:
    """Answers as it is told, by target; everything that was asked, unless told otherwise."""

    def __init__(self) -> None:
        self.asked: list[Preparation] = []
        self.answers: dict[str, Callable[[Preparation], list[int]]] = {}

    def prepare(self, asked: Preparation, timeout_s: float) -> list[int]:
        self.asked.append(asked)
        all_of_it = lambda item: [one.positions for one in item.wanted]  # noqa: E731
        return self.answers.get(asked.target, all_of_it)(asked)

    def of(self, target: str) -> list[list[int]]:
        return [[one.positions for one in asked.wanted] for asked in self.asked if asked.target == target]


def held(line: int, tokens: int = 1, epoch: int = 1) -> Held:
    """With so many tokens, all committed, and KV of all but the last in the arena."""
    spec = RequestSpec(line, f"c{line}", Endpoint.CHAT, PROMPT, SamplingParams(seed=1, max_tokens=100))
    return Held(RequestKey("job", line), FencingToken(1, epoch), spec, [7] * tokens, acked=tokens)


def grown(ledger: Ledger, item: Held, positions: int) -> None:
    """The arena has so much of it, and the tokens to that are committed."""
    for _ in range(positions + 1 - item.total):
        ledger.append(item.key, 7)
    item.acked = len(item.tokens)
    ledger.computed({item.key: positions})
    ledger.kv_written([KVRange(item.key, item.token.epoch, 0, positions)])


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "condition never held"
        time.sleep(0.01)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger("lay", PAGE)


@pytest.fixture
def crashes() -> list[BaseException]:
    return []


@pytest.fixture
def precopy(daemon: Daemon, ledger: Ledger, crashes: list[BaseException]) -> Iterator[PreCopy]:
    made = PreCopy(daemon, ledger, SHAPE, crashes.append)  # type: ignore[arg-type]
    made.start()
    yield made
    made.close()


def added(ledger: Ledger, line: int, positions: int) -> Held:
    item = held(line)
    ledger.add(item, 0)
    grown(ledger, item, positions)
    return item


def test_full_pages_go_as_they_are_sealed_and_no_others(daemon: Daemon, ledger: Ledger, precopy: PreCopy) -> None:
    one, two, stays = added(ledger, 1, 40), added(ledger, 2, 15), added(ledger, 3, 64)
    precopy.want({one.key: "b", two.key: "b"})
    until(lambda: daemon.asked)
    assert daemon.of("b")[0] == [32], "the second has no full page so far"
    grown(ledger, one, 48)
    grown(ledger, two, 30)
    until(lambda: [48, 16] in daemon.of("b"))
    assert all(stays.key not in {w.key for w in asked.wanted} for asked in daemon.asked)
    assert not any(asked.last for asked in daemon.asked)


def test_kv_of_tokens_that_are_not_committed_stays(daemon: Daemon, ledger: Ledger, precopy: PreCopy) -> None:
    one = added(ledger, 1, 40)
    for _ in range(30):
        ledger.append(one.key, 7)  # ahead of the store
    ledger.computed({one.key: 70})
    ledger.kv_written([KVRange(one.key, 1, 40, 70)])
    precopy.want({one.key: "b"})
    until(lambda: daemon.asked)
    assert daemon.of("b")[0] == [32], "41 tokens are committed"


def test_a_target_is_asked_again_to_keep_what_it_has(daemon: Daemon, ledger: Ledger, precopy: PreCopy) -> None:
    one = added(ledger, 1, 40)
    precopy.want({one.key: "b"})
    began = time.monotonic()
    until(lambda: len(daemon.asked) == 3)
    assert time.monotonic() - began > 1.8, "once a second, while nothing is new"


def test_a_target_that_is_away_is_left_alone_for_a_while_and_holds_nobody_up(
    daemon: Daemon, ledger: Ledger, precopy: PreCopy, crashes: list[BaseException]
) -> None:
    def away(_: Preparation) -> list[int]:
        raise StoreUnavailable("no answer")

    def slow(asked: Preparation) -> list[int]:
        time.sleep(2.0)
        return [one.positions for one in asked.wanted]

    daemon.answers = {"away": away, "slow": slow}
    some = {name: added(ledger, line, 40) for line, name in enumerate(("away", "slow", "good"), 1)}
    precopy.want({item.key: name for name, item in some.items()})
    for positions in range(48, 48 + 8 * PAGE, PAGE):
        grown(ledger, some["good"], positions)
        until(lambda positions=positions: [positions] in daemon.of("good"))  # type: ignore[misc]
    assert len(daemon.of("away")) <= 3 and len(daemon.of("slow")) <= 2
    assert crashes == []


def test_another_target_is_asked_for_all_of_it(daemon: Daemon, ledger: Ledger, precopy: PreCopy) -> None:
    one = added(ledger, 1, 40)
    precopy.want({one.key: "b"})
    until(lambda: daemon.of("b"))
    precopy.want({one.key: "c"})
    until(lambda: daemon.of("c"))
    assert daemon.of("c")[0] == [32]
    precopy.want({})
    time.sleep(0.3)
    before = len(daemon.asked)
    time.sleep(1.5)
    assert len(daemon.asked) == before, "the notice was withdrawn"


def test_what_ended_or_stopped_is_not_asked_for(daemon: Daemon, ledger: Ledger, precopy: PreCopy) -> None:
    ended, stopped, runs = (added(ledger, line, 40) for line in (1, 2, 3))
    ledger.drop(ended.key, ended.token)
    ledger.freeze(stopped.key)
    precopy.want({item.key: "b" for item in (ended, stopped, runs)})
    until(lambda: daemon.asked)
    assert {one.key for asked in daemon.asked for one in asked.wanted} == {runs.key}


def test_the_rest_follows_at_the_cut_over(daemon: Daemon, ledger: Ledger, precopy: PreCopy) -> None:
    one = added(ledger, 1, 40)
    assert precopy.finish(one, "b", time.monotonic() + 10)
    (asked,) = daemon.asked
    assert asked.last and [w.positions for w in asked.wanted] == [40], "T-1, the open page too"
    waits = held(9)
    assert precopy.finish(waits, "b", time.monotonic() + 10) and len(daemon.asked) == 1, "it has no KV"


def test_the_rest_may_take_several_turns_but_not_for_ever(daemon: Daemon, ledger: Ledger, precopy: PreCopy) -> None:
    one, answers = added(ledger, 1, 40), iter([[16], [32], [40]])
    daemon.answers["b"] = lambda _: next(answers)
    assert precopy.finish(one, "b", time.monotonic() + 10)
    daemon.answers["full"] = lambda _: [32]
    assert not precopy.finish(one, "full", time.monotonic() + 10)
    assert len(daemon.of("full")) == 2, "it has no more room"
    daemon.answers["gone"] = lambda _: (_ for _ in ()).throw(StoreUnavailable("gone"))
    assert not precopy.finish(one, "gone", time.monotonic() + 10)
    assert not precopy.finish(one, "b", time.monotonic() - 1), "too late"


def test_a_broken_answer_is_not_swallowed(
    daemon: Daemon, ledger: Ledger, precopy: PreCopy, crashes: list[BaseException]
) -> None:
    daemon.answers["b"] = lambda _: []
    precopy.want({added(ledger, 1, 40).key: "b"})
    until(lambda: crashes)
    assert isinstance(crashes[0], ValueError)


def test_when_it_is_due() -> None:
    progress = _Progress("b", 1, goal=32, began=0.0, asked=32, reached=32, at=10.0)
    assert not progress.due(32, 10.5) and progress.due(48, 10.5) and progress.due(32, 11.0)
    progress.reached, progress.moved = 16, True
    assert progress.due(32, 10.1), "the turn was over before all had come"
    progress.moved = False
    assert not progress.due(32, 10.1), "no room there: later"
