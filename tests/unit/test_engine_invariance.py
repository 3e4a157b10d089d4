"""Batch-invariant mode's promise: a position's logits are the same bits, whatever the circumstances."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from context_daemon.records import RequestKey, SamplingParams
from tests.unit.engine_feed import Feed
from tests.unit.tiny_model import tiny_config, write_tiny_model
from worker.engine import linear, runner
from worker.engine.config import EngineConfig
from worker.engine.engine import TorchEngine
from worker.engine.protocol import EngineRequest, ResumeState, SlotSpan
from worker.engine.scheduler import Chunk

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "demo heads": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    "odd widths, no grouping": {
        "hidden_size": 60,
        "intermediate_size": 91,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "tie_word_embeddings": False,
    },
}


CASES = [("tiny", 1), ("tiny", 2), ("tiny", 3), ("demo heads", 2), ("odd widths, no grouping", 3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_tiny_model(root / str(i), tiny_config(**SHAPES[name])) for i, name in enumerate(SHAPES)}


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}, {case[1]} threads")
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Path]:
    """A model, with torch set to a thread count: one that does not divide the rows evenly is among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param[1])
    yield folders[request.param[0]]
    torch.set_num_threads(before)


@dataclass
class Recorder:
    """An engine whose every sampled row of logits is kept by (line, position)."""

    engine: TorchEngine
    logits: dict[tuple[int, int], bytes] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    preemptions: int = 0
    step_rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        run = self.engine._runner.run

        def recording(chunks: list[Chunk]) -> Any:
            result = run(chunks)
            for row, chunk in zip(result, (c for c in chunks if c.samples), strict=True):
                self.logits[(chunk.sequence.key.line, chunk.sequence.generated_len)] = row.tobytes()
            self.step_rows.append(sum(c.length for c in chunks))
            return result

        self.engine._runner.run = recording  # type: ignore[method-assign]

    def step(self) -> None:
        output = self.engine.step()
        for token in output.tokens:
            self.tokens.setdefault(token.key.line, []).append(token.token_id)
            if token.finish_reason:
                self.engine.abort(token.key)
        self.preemptions += len(output.preempted)
        self.engine.check()

    def drain(self) -> None:
        while self.engine.has_work():
            self.step()


def make(folder: Path, **flags: Any) -> Recorder:
    config = {"num_pages": 256, "max_num_seqs": 40, "max_num_batched_tokens": 512} | flags
    return Recorder(TorchEngine.load(EngineConfig(model=str(folder), **config)))


def make_request(line: int, rng: random.Random, max_tokens: int = 12) -> EngineRequest:
    prompt = tuple(rng.randrange(256) for _ in range(rng.choice((1, 2, 15, 16, 17, 60, 127, 128, 129, 200, 300))))
    params = SamplingParams(
        seed=rng.randrange(2**32),
        max_tokens=max_tokens,
        temperature=rng.choice((0.0, 1.0)),
        top_p=rng.choice((1.0, 0.9)),
        ignore_eos=True,
    )
    return EngineRequest(RequestKey("job", line), prompt, params)


def alone(folder: Path, requests: list[EngineRequest]) -> Recorder:
    """The truth: each request by itself, prefilled at one stroke."""
    reference = make(folder)
    for request in requests:
        reference.engine.add(request)
        reference.drain()
    return reference


def same(got: Recorder, expected: Recorder) -> None:
    assert got.tokens == expected.tokens
    for place, row in got.logits.items():
        assert np.array_equal(np.frombuffer(row, np.int32), np.frombuffer(expected.logits[place], np.int32)), place


def test_neighbours_chunking_and_preemption_do_not_change_a_bit(folder: Path) -> None:
    rng = random.Random(0)
    requests = [make_request(line, rng, max_tokens=40) for line in range(8)]
    expected = alone(folder, requests)
    budget = rng.choice((11, 37, 150))
    crowd = make(folder, num_pages=rng.randint(23, 27), max_num_seqs=rng.randint(5, 9), max_num_batched_tokens=budget)
    pending = list(requests)
    rng.shuffle(pending)
    while pending or crowd.engine.has_work():
        if pending and rng.random() < 0.7:
            crowd.engine.add(pending.pop())
        crowd.step()
    assert len(set(crowd.step_rows)) > 3
    assert crowd.preemptions > 0
    assert len(crowd.logits) == len(expected.logits)
    same(crowd, expected)


def test_restored_partly_restored_and_prefilled_again_are_the_same_bits(folder: Path) -> None:
    rng = random.Random(1)
    requests = [make_request(line, rng, max_tokens=40) for line in range(6)]
    expected = alone(folder, requests)
    first, second = make(folder, max_num_batched_tokens=50), make(folder, max_num_batched_tokens=rng.choice((40, 77)))
    for request in requests:
        first.engine.add(request)
    for _ in range(rng.randint(18, 30)):
        first.step()
    feed = Feed(second.engine, rng)
    for request in requests:
        done = tuple(first.tokens.get(request.key.line, ()))
        if len(done) == request.params.max_tokens:
            continue
        resident = first.engine._sequences[request.key].kv_len
        start, stop = sorted((rng.choice((0, resident // 3)), rng.choice((0, resident // 2, resident))))
        kv = bytearray((stop - start) * first.engine.layout.slot_bytes)
        first.engine.export_slots([SlotSpan(request.key, start, stop)], memoryview(kv))
        feed.add(request, done, kv, start)
        second.tokens[request.key.line] = list(done)
    while feed.turn() or second.engine.has_work():
        second.step()
    first.tokens |= second.tokens
    assert len(second.logits) > 6
    same(second, Recorder(expected.engine, expected.logits, second.tokens))
    assert first.tokens == expected.tokens


def test_exported_kv_is_the_same_bytes_by_decode_and_by_prefill(folder: Path) -> None:
    request = make_request(0, random.Random(5), max_tokens=20)
    decoded, prefilled = make(folder), make(folder)
    decoded.engine.add(request)
    while len(decoded.tokens.get(0, [])) < 19:
        decoded.step()
    known = tuple(decoded.tokens[0])
    positions = len(request.prompt_token_ids) + len(known) - 1
    size = positions * decoded.engine.layout.slot_bytes
    prefilled.engine.add(request, ResumeState(known[:-1]))
    prefilled.engine.step()
    one, other = bytearray(size), bytearray(size)
    decoded.engine.export_slots([SlotSpan(request.key, 0, positions)], memoryview(one))
    prefilled.engine.export_slots([SlotSpan(request.key, 0, positions)], memoryview(other))
    assert one == other


def test_it_holds_without_packed_weights_and_shared_blocks_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another machine falls back to is another class: its bits need not be those of the fast way."""
    fast = make(folder).engine.layout.numerics_class
    monkeypatch.setattr(linear, "_has_onednn", lambda: False)
    monkeypatch.setattr(runner, "shares_blocks", lambda *_: False)
    rng = random.Random(2)
    requests = [make_request(line, rng) for line in range(6)]
    expected = alone(folder, requests)
    assert expected.engine.layout.numerics_class != fast
    crowd = make(folder, max_num_batched_tokens=rng.choice((50, 77)))
    for request in requests:
        crowd.engine.add(request)
    crowd.drain()
    same(crowd, expected)


def test_variant_mode_is_another_numerics_class_and_really_varies(folder: Path) -> None:
    """Shows that the tests above can fail: without fixed tiles the same comparison finds other bits."""
    invariant, variant = make(folder), make(folder, batch_invariant=False)
    assert invariant.engine.layout.numerics_class != variant.engine.layout.numerics_class
    rng = random.Random(1)
    requests = [make_request(line, rng) for line in range(10)]
    lonely = make(folder, batch_invariant=False)
    for request in requests:
        lonely.engine.add(request)
        lonely.drain()
        variant.engine.add(request)
    variant.drain()
    assert variant.logits != lonely.logits
