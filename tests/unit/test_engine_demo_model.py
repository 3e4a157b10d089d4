"""The real model: transformers' logits and tokens, and the promise of batch-invariant mode, on real weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_daemon.records import RequestKey, SamplingParams
from worker.demo_model import demo_model_path, demo_model_ready
from worker.engine.config import EngineConfig
from worker.engine.engine import TorchEngine
from worker.engine.protocol import EngineRequest, ResumeState

pytestmark = [pytest.mark.model, pytest.mark.slow]
NEW = 12
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "List five prime numbers and say what makes them prime. " * 8,
)


@pytest.fixture(scope="module")
def folder() -> Path:
    if not demo_model_ready():
        pytest.skip("the demo model is not in the cache: run `python -m worker.demo_model`")
    return demo_model_path()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TorchEngine]:
    before = torch.get_num_threads()
    yield TorchEngine.load(EngineConfig(model=str(folder), max_model_len=1024, num_pages=200, num_threads=1))
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[tuple[int, ...]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tuple(tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"]) for c in chats]


def answers(engine: TorchEngine, requests: Sequence[tuple[EngineRequest, ResumeState | None]]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {r.key.line: list(s.token_ids if s else ()) for r, s in requests}
    for request, resume in requests:
        engine.add(request, resume)
    while engine.has_work():
        for token in engine.step().tokens:
            tokens[token.key.line].append(token.token_id)
    for request, _ in requests:
        engine.abort(request.key)
    engine.check()
    return tokens


def test_greedy_answers_and_logits_are_those_of_transformers(
    folder: Path, engine: TorchEngine, texts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first_rows: dict[int, np.ndarray] = {}
    original = engine._runner.run

    def recording(chunks: Any) -> Any:
        result = original(chunks)
        for row, chunk in zip(result, (c for c in chunks if c.samples), strict=True):
            first_rows.setdefault(chunk.sequence.key.line, row.copy())
        return result

    monkeypatch.setattr(engine._runner, "run", recording)
    params = SamplingParams(seed=0, max_tokens=NEW, temperature=0)
    ours = answers(engine, [(EngineRequest(RequestKey("j", i), t, params), None) for i, t in enumerate(texts)])
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for line, text in enumerate(texts):
        ids = torch.tensor([text])
        theirs = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        assert ours[line] == theirs[0, len(text) :].tolist()
        with torch.inference_mode():
            expected = reference(ids, logits_to_keep=1).logits[0, -1].numpy()
        np.testing.assert_allclose(first_rows[line], expected, rtol=1e-4, atol=5e-4)


def test_alone_together_and_resumed_are_the_same_tokens(engine: TorchEngine, texts: list[tuple[int, ...]]) -> None:
    params = SamplingParams(seed=7, max_tokens=NEW, temperature=1.0, top_p=0.95)
    requests = [EngineRequest(RequestKey("j", i), t, params) for i, t in enumerate(texts)]
    together = answers(engine, [(r, None) for r in requests])
    for request in requests[:2]:
        assert answers(engine, [(request, None)])[request.key.line] == together[request.key.line]
    halves = [(r, ResumeState(tuple(together[r.key.line][: NEW // 2]))) for r in requests]
    assert answers(engine, halves) == together
