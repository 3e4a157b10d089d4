"""KV on its way into an engine: what arrives, what is damaged on the way, and what the other sequences wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from context_daemon.kv_slots import frame, framed_size, identity
from context_daemon.records import FencingToken, RequestKey, SamplingParams
from context_daemon.restore_stream import IncomingPage
from tests.unit.tiny_model import write_tiny_model
from worker.engine.config import EngineConfig
from worker.engine.engine import TorchEngine
from worker.engine.protocol import EngineRequest, ResumeState, SlotSpan
from worker.imports import Import, Imports

KEY, OTHER = RequestKey("job", 1), RequestKey("job", 2)
TOKEN = FencingToken(1, 2)
PROMPT = tuple(3 + (7 * at) % 200 for at in range(75))  # four pages and 11 slots
PARAMS = SamplingParams(seed=5, max_tokens=12, temperature=0.9, ignore_eos=True)
EPOCH = 1


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Before:
    """A sequence after its first token: that token, its KV as framed slots, and all that it says undisturbed."""

    token: int
    framed: bytes
    output: list[int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def load(folder: Path) -> TorchEngine:
    return TorchEngine.load(EngineConfig(model=str(folder), num_pages=64, max_num_seqs=4, max_num_batched_tokens=4))


@pytest.fixture(scope="module")
def before(folder: Path) -> Before:
    engine = load(folder)
    engine.add(EngineRequest(KEY, PROMPT, PARAMS))
    said: list[int] = []
    while not said:
        said += [token.token_id for token in engine.step().tokens]
    raw = bytearray(len(PROMPT) * engine.layout.slot_bytes)
    engine.export_slots([SlotSpan(KEY, 0, len(PROMPT))], memoryview(raw))
    framed = frame(whose(engine), 0, raw, engine.layout.slot_bytes)
    return Before(said[0], framed, said + decoded(engine))


def whose(engine: TorchEngine) -> int:
    return identity(KEY, EPOCH, engine.layout.fingerprint)


def decoded(engine: TorchEngine, key: RequestKey = KEY) -> list[int]:
    said = []
    while engine.has_work():
        said += [token.token_id for token in engine.step().tokens if token.key == key]
    return said


class Resumed:
    """An engine into which the sequence's KV from `start` on is to come."""

    def __init__(self, folder: Path, before: Before, start: int = 0) -> None:
        self.engine = load(folder)
        self.ended: list[Import] = []
        self.imports = Imports(self.engine, self.ended.append)
        self.item = Import(KEY, TOKEN, start, 0.0)
        self.imports.begin(self.item)
        self.rows = bytearray(before.framed)
        resume = ResumeState((before.token,), start, len(PROMPT))
        self.engine.add(EngineRequest(KEY, PROMPT, PARAMS), resume)
        self.said = [before.token]

    def pages(self) -> list[IncomingPage]:
        size, row = self.engine.layout.page_size, framed_size(self.engine.layout.slot_bytes)
        rows = memoryview(self.rows)
        return [
            IncomingPage(at, stop, rows[at * row : stop * row], "peer", whose(self.engine), row - 16)
            for at in range(self.item.start, len(PROMPT), size)
            for stop in [min(at + size, len(PROMPT))]
        ]

    def offer_all(self) -> list[bool]:
        taken = [self.item.offer(page) for page in self.pages()]
        self.item.end()
        return taken

    def spoil(self, position: int, bits: int = 1) -> None:
        at = position * framed_size(self.engine.layout.slot_bytes) + 5
        self.rows[at] ^= bits

    def take_all(self) -> list[int]:
        """Where each turn got to."""
        self.engine.step()  # gives it room
        reached = []
        while len(self.imports):
            self.imports.turn(0.0)
            reached.append(self.item.reached)
        return reached

    def finish(self) -> list[int]:
        """What it has said when it is over, the loop's turns between its steps."""
        while self.engine.has_work():
            self.imports.turn(0.0)
            self.said += [token.token_id for token in self.engine.step().tokens]
        return self.said


def test_all_of_it_comes_and_nothing_is_computed_again(folder: Path, before: Before) -> None:
    resumed = Resumed(folder, before)
    resumed.offer_all()
    resumed.take_all()
    resumed.said += [token.token_id for token in resumed.engine.step().tokens]
    assert resumed.engine.recomputed_tokens(KEY) == 0
    assert (resumed.item.count, resumed.item.sources) == (len(PROMPT), ("peer",))
    assert resumed.finish() == before.output
    assert [item.key for item in resumed.ended] == [KEY]


@pytest.mark.parametrize("position", [0, 17, 31, 32, 70, 74])
def test_a_slot_that_changes_after_it_was_offered_does_not_count_nor_what_follows(
    folder: Path, before: Before, position: int
) -> None:
    resumed = Resumed(folder, before)
    resumed.offer_all()
    resumed.spoil(position)
    resumed.take_all()
    assert resumed.item.reached == position
    assert resumed.finish() == before.output


def test_garbage_that_is_no_number_leaves_no_trace(folder: Path, before: Before) -> None:
    """NaN times a weight of zero is NaN: what was rejected must not lie where masked positions are read."""
    resumed = Resumed(folder, before)
    row = framed_size(resumed.engine.layout.slot_bytes)
    resumed.rows[33 * row :] = b"\xff" * (len(resumed.rows) - 33 * row)
    resumed.offer_all()
    assert resumed.finish() == before.output
    assert resumed.item.reached == 33


def test_a_page_after_a_bad_one_is_not_wanted(folder: Path, before: Before) -> None:
    resumed = Resumed(folder, before)
    resumed.spoil(3)
    first, second, *_ = resumed.pages()
    assert resumed.item.offer(first)
    resumed.engine.step()  # gives it room
    resumed.imports.turn(0.0)
    assert not resumed.item.offer(second)
    assert resumed.item.wait(0)


def test_the_head_is_computed_while_the_tail_comes(folder: Path, before: Before) -> None:
    resumed = Resumed(folder, before, start=48)
    head = resumed.engine.step()
    assert head.kv_len == {KEY: 4}
    resumed.offer_all()
    assert resumed.finish() == before.output
    assert resumed.item.count == len(PROMPT) - 48


def test_a_tail_that_never_comes_is_computed(folder: Path, before: Before) -> None:
    resumed = Resumed(folder, before, start=32)
    resumed.item.offer(resumed.pages()[0])
    resumed.item.end()
    assert resumed.finish() == before.output
    assert resumed.item.reached == 48


def test_copies_outlive_what_they_were_copied_from(folder: Path, before: Before) -> None:
    resumed = Resumed(folder, before)
    resumed.offer_all()
    resumed.item.keep_copies()
    resumed.rows[:] = bytes(len(resumed.rows))
    assert resumed.finish() == before.output
    assert resumed.item.count == len(PROMPT)


def test_a_turn_takes_a_page_however_little_time_there_is(folder: Path, before: Before) -> None:
    resumed = Resumed(folder, before)
    resumed.offer_all()
    assert resumed.take_all() == [16, 32, 48, 64, 75]


def test_who_waits_for_what_is_dropped_goes_on(folder: Path, before: Before) -> None:
    resumed = Resumed(folder, before)
    resumed.item.offer(resumed.pages()[0])
    waited: list[bool] = []
    waiting = threading.Thread(target=lambda: waited.append(resumed.item.wait(20)))
    waiting.start()
    resumed.engine.abort(KEY)
    resumed.imports.drop(KEY)
    waiting.join()
    assert waited == [True]
    assert not resumed.item.offer(resumed.pages()[1])
    resumed.imports.turn(0.0)
    assert resumed.ended == []


def test_others_decode_while_pages_wait_for_their_turn(folder: Path, before: Before) -> None:
    """Each step of the loop brings the other one's next token, whether a page was there or not."""
    resumed = Resumed(folder, before)
    alone = load(folder)
    request: dict[str, Any] = {"prompt_token_ids": PROMPT[:4], "params": PARAMS}
    alone.add(EngineRequest(OTHER, **request))
    expected = decoded(alone, OTHER)
    resumed.engine.add(EngineRequest(OTHER, **request))
    pages, said = resumed.pages(), []
    for turn in range(len(expected)):
        if turn % 2 and pages:
            resumed.item.offer(pages.pop(0))
        resumed.imports.turn(0.0)
        said += [token.token_id for token in resumed.engine.step().tokens if token.key == OTHER]
        assert len(said) == turn + 1
    assert said == expected
    for page in pages:
        resumed.item.offer(page)
    resumed.item.end()
    assert resumed.finish() == before.output
