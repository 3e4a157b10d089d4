"""Random histories, run on both stores at once: they answer the same, and what must hold holds after every step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from store_samples import job_record, spec

from context_daemon.memory_store import MemoryStore
from context_daemon.records import (
    CommitStatus,
    FencingToken,
    Finish,
    InterruptionCause,
    JobState,
    KVWatermark,
    RequestKey,
    RequestState,
    TokenCommit,
)
from context_daemon.redis_script import connect
from context_daemon.redis_server import EmbeddedServers
from context_daemon.redis_store import RedisStore
from context_daemon.states import TERMINAL_REQUEST_STATES, job_may, request_may
from context_daemon.store import ContextStore, LeaseRequest, StaleLeader

LINES = 3
WORKERS = ("w1", "w2")
CLASSES = ("a", "b")
lines = st.integers(1, LINES)
workers = st.sampled_from(WORKERS)
causes = st.sampled_from([c for c in InterruptionCause if c is not InterruptionCause.CANCELLED])
_INSTANTS = {
    "created_at", "started_at", "finished_at", "ready_since", "leased_at", "detect_ms", "queue_ms", "gap_ms",
}  # fmt: skip

_REPEATED = {"lease", "requeue", "handover", "fail_request", "cancel_job", "cancel_requests", "finish_job"}


def still(value: Any) -> Any:
    """The value without instants (whether there is one stays)."""
    if isinstance(value, list | tuple):
        return type(value)(still(item) for item in value)
    if isinstance(value, msgspec.Struct):
        kept = msgspec.structs.asdict(value)
        return {name: item is not None if name in _INSTANTS else item for name, item in kept.items()}
    return value


class StoreMachine(RuleBasedStateMachine):
    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stores: list[ContextStore] = [MemoryStore(), RedisStore(self.url)]
        self.tokens: dict[int, list[FencingToken]] = {line: [FencingToken(1, 0)] for line in range(1, LINES + 1)}
        self.written_by: dict[tuple[int, int], tuple[FencingToken, int]] = {}  # (line, position) -> (owner, token id)
        self.states: dict[int, RequestState] = {}
        self.job_state = JobState.IN_PROGRESS
        self.term = 1
        self.last_call: tuple[str, tuple[Any, ...]] | None = None

    def run(self, name: str, *args: Any) -> Any:
        """The same call on both: same answer, or the same refusal."""
        answers = []
        for store in self.stores:
            try:
                answers.append(still(self.loop.run_until_complete(getattr(store, name)(*args))))
            except (ValueError, StaleLeader) as error:
                answers.append((type(error), str(error)))
        assert answers[0] == answers[1], (name, args)
        if name in _REPEATED:
            self.last_call = (name, args)
        return answers[0]

    @initialize()
    def start(self) -> None:
        self.loop.run_until_complete(self._wipe())
        self.run("create_job", job_record("job"))
        self.run("add_requests", "job", [spec(line) for line in range(1, LINES + 1)])
        self.run("start_job", "job", LINES)

    async def _wipe(self) -> None:
        client = connect(self.url, 2.0)
        await client.flushall()
        await client.aclose()

    def record(self, line: int) -> dict[str, Any]:
        found: dict[str, Any] = self.run("get_request", RequestKey("job", line))
        return found

    def token(self, line: int, back: int) -> FencingToken:
        """The newest token known of a request, or an older one."""
        known = self.tokens[line]
        return known[max(0, len(known) - 1 - back)]

    @rule(line=lines, worker=workers, cls=st.sampled_from(CLASSES), exact=st.booleans(), off=st.integers(-1, 1))
    def lease(self, line: int, worker: str, cls: str, exact: bool, off: int) -> None:
        epoch = self.record(line)["token"].epoch + (off if off < 0 else 0)  # mostly right, sometimes stale
        granted = self.run(
            "lease", "job", self.term, [LeaseRequest(RequestKey("job", line), epoch, worker, cls, exact)]
        )
        for one in granted:
            if one["token"] not in self.tokens[line]:
                self.tokens[line].append(one["token"])

    @rule(
        line=lines, back=st.sampled_from([0, 0, 0, 1, 2]), shift=st.sampled_from([0, 0, 0, -1, -2, 1]),
        count=st.integers(0, 3), wrong=st.sampled_from([False] * 5 + [True]),
        mark=st.none() | st.tuples(st.integers(0, 40), st.integers(0, 3), st.sampled_from(["l1", "l2"])),
        finish=st.sampled_from([None] * 5 + [True, False]),
    )  # fmt: skip
    def commit(
        self,
        line: int,
        back: int,
        shift: int,
        count: int,
        wrong: bool,
        mark: tuple[int, int, str] | None,
        finish: bool | None,
    ) -> None:
        before = self.record(line)
        token, position = self.token(line, back), max(0, len(before["tokens"]) + shift)
        tokens = tuple(1000 + p + (7 if wrong else 0) for p in range(position, position + count))
        commit = TokenCommit(
            RequestKey("job", line), token, position, tokens,
            watermark=None if mark is None else KVWatermark(*mark),
            finish=None if finish is None else Finish(finish, b'{"line":%d,"at":%d}' % (line, position + count)),
        )  # fmt: skip
        ((status, length),) = [(r.status, r.length) for r in self._commit(commit)]
        after = self.record(line)
        assert length == len(after["tokens"])
        if status is not CommitStatus.OK:
            assert after == before, "a refused commit wrote something"
        else:
            assert token == before["token"]
        assert self._commit(commit)[0].length == length  # the reply was lost: nothing moves
        assert self.record(line) == after
        for at in range(len(before["tokens"]), len(after["tokens"])):
            assert (line, at) not in self.written_by, "a position was written under two epochs"
            self.written_by[(line, at)] = (token, after["tokens"][at])

    def _commit(self, commit: TokenCommit) -> list[Any]:
        answers = [self.loop.run_until_complete(store.commit([commit])) for store in self.stores]
        assert answers[0] == answers[1], commit
        return answers[0]

    @rule(line=lines, back=st.integers(0, 1), cause=causes)
    def requeue(self, line: int, back: int, cause: InterruptionCause) -> None:
        before, token = self.record(line), self.token(line, back)
        self.run("requeue", "job", self.term, [(RequestKey("job", line), token)], cause)
        after = self.record(line)
        moved = before["state"] is RequestState.LEASED and before["token"] == token
        assert (after != before) == moved
        blamed = int(moved and cause.blames_request)
        assert after["attempts"] == before["attempts"] + blamed

    @rule(line=lines, back=st.integers(0, 1), shift=st.sampled_from([0, 0, 1, -1]), taker=st.sampled_from(["", *WORKERS]),
          mark=st.none() | st.tuples(st.integers(0, 40), st.integers(0, 3), st.just("l1")))  # fmt: skip
    def handover(self, line: int, back: int, shift: int, taker: str, mark: tuple[int, int, str] | None) -> None:
        before, token, key = self.record(line), self.token(line, back), RequestKey("job", line)
        length = max(0, len(before["tokens"]) + shift)
        args = (key, token, length, None if mark is None else KVWatermark(*mark), taker, InterruptionCause.NOTICE)
        moved = self.run("handover", *args)
        after = self.record(line)
        if moved is None:
            assert after == before
        elif taker and moved["token"] not in self.tokens[line]:
            self.tokens[line].append(moved["token"])
        assert self.run("handover", *args) == moved
        assert self.record(line) == after

    @rule(line=lines, off=st.integers(-1, 0))
    def fail_request(self, line: int, off: int) -> None:
        epoch = self.record(line)["token"].epoch + off
        self.run("fail_request", RequestKey("job", line), self.term, epoch, b'{"convicted":%d}' % line)

    @rule()
    def repeat_the_last_call(self) -> None:
        """A client that lost the reply sends the very same again."""
        if self.last_call is not None:
            self.run(self.last_call[0], *self.last_call[1])

    @rule(dice=st.integers(0, 5))
    def cancel(self, dice: int) -> None:
        if dice == 0:  # seldom: it ends the story
            self.run("cancel_job", "job")

    @rule(limit=st.integers(1, LINES))
    def cancel_requests(self, limit: int) -> None:
        self.run("cancel_requests", "job", self.term, limit)

    @rule()
    def finish_job(self) -> None:
        self.run("finish_job", "job", self.term)

    @rule()
    def new_leader(self) -> None:
        self.term += 1
        self.run("requeue", "job", self.term, [], InterruptionCause.NODE_LOST)
        answer = self.run("finish_job", "job", self.term - 1)
        assert answer[0] is StaleLeader

    @rule()
    def bump(self) -> None:
        self.run("bump_incarnation", self.run("incarnation"))

    @invariant()
    def counts_add_up(self) -> None:
        job = self.run("get_job", "job")
        if job is None:
            return
        results = self.run("results", "job", 0, 100)
        assert job["completed"] + job["failed"] == len(results) <= job["total"]
        assert len({r["line"] for r in results}) == len(results), "a line was written twice"
        assert job["completed"] == sum(r["ok"] for r in results)
        assert self.job_state is job["state"] or job_may(self.job_state, job["state"])
        self.job_state = job["state"]

    @invariant()
    def requests_are_whole(self) -> None:
        if self.run("get_job", "job") is None:
            return
        ready = self.run("ready_requests", "job", 100)
        leased = self.run("leased_requests", "job")
        self.run("interruptions", "job")
        held = {r["key"].line: RequestState.READY for r in ready} | {r["key"].line: RequestState.LEASED for r in leased}
        assert len(held) == len(ready) + len(leased)
        tokens = 0
        for line in range(1, LINES + 1):
            record = self.record(line)
            known = len(record["spec"].prompt_token_ids) + len(record["tokens"])
            assert 0 <= record["watermark"] <= known - 1
            pages = [s.first_page for s in record["segments"]]
            assert pages == sorted(set(pages))
            state = record["state"]
            was = self.states.get(line, RequestState.READY)
            assert state is was or request_may(was, state) or (was, state) == (RequestState.READY, RequestState.LEASED)
            self.states[line] = state
            assert (state in TERMINAL_REQUEST_STATES) == (line not in held)
            if line in held:
                assert held[line] is state
            for at, token_id in enumerate(record["tokens"]):
                assert self.written_by[(line, at)][1] == token_id, "a committed token changed"
            tokens += len(record["tokens"])
        assert self.run("get_job", "job")["output_tokens"] == tokens

    def teardown(self) -> None:
        for store in self.stores:
            self.loop.run_until_complete(store.close())
        self.loop.close()


@pytest.fixture(scope="module")
def machine(servers: EmbeddedServers) -> Iterator[type[StoreMachine]]:
    StoreMachine.url = servers.durable.url
    yield StoreMachine


def test_random_histories(machine: type[StoreMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            phases=[
                phase for phase in Phase if phase is not Phase.explain
            ],  # it takes minutes for what is seen at once
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
