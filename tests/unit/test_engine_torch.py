"""TorchEngine against transformers on the same weights, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedConfig, Qwen2Config

from context_daemon.records import RequestKey, SamplingParams
from tests.unit.engine_feed import Feed
from tests.unit.tiny_model import EOS_ID, VOCAB_SIZE, tiny_config, write_tiny_model
from worker.engine.config import EngineConfig
from worker.engine.engine import TorchEngine
from worker.engine.model_folder import inspect_model_folder
from worker.engine.protocol import EngineFault, EngineRequest, RequestError, ResumeState, SlotSpan

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
VARIANTS: dict[str, PreTrainedConfig] = {
    "llama, tied": tiny_config(),
    "llama, untied": tiny_config(tie_word_embeddings=False),
    "llama, biases": tiny_config(attention_bias=True, mlp_bias=True),
    "llama, head_dim apart": tiny_config(head_dim=32),
    "rope linear": tiny_config(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    "rope llama3": tiny_config(rope_parameters=LLAMA3),
    "rope yarn": tiny_config(rope_parameters=YARN),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE, use_sliding_window=False),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def load(folder: Path, **flags: Any) -> TorchEngine:
    return TorchEngine.load(EngineConfig(model=str(folder), **({"num_pages": 128, "max_num_seqs": 8} | flags)))


def prompts(lengths: tuple[int, ...] = (1, 7, 40, 150, 300)) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(3)
    return [tuple(map(int, rng.integers(0, 256, n))) for n in lengths]


def greedy(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=max_tokens, temperature=0, **({"ignore_eos": True} | changes))


def run(engine: TorchEngine) -> tuple[dict[int, list[int]], dict[int, str]]:
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    while engine.has_work():
        for token in engine.step().tokens:
            assert token.position == len(tokens.setdefault(token.key.line, []))
            tokens[token.key.line].append(token.token_id)
            if token.finish_reason:
                reasons[token.key.line] = token.finish_reason
    engine.check()
    return tokens, reasons


def record_logits(engine: TorchEngine) -> list[np.ndarray]:
    rows: list[np.ndarray] = []
    original = engine._runner.run

    def recording(chunks: Any) -> Any:
        result = original(chunks)
        rows.extend(result)
        return result

    engine._runner.run = recording  # type: ignore[method-assign]
    return rows


def agree_with_transformers(folder: Path, engine: TorchEngine, texts: list[tuple[int, ...]], new: int) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for line, text in enumerate(texts):
        engine.add(EngineRequest(RequestKey("j", line), text, greedy(new)))
    tokens, _ = run(engine)
    for line, text in enumerate(texts):
        ids = torch.tensor([text])
        mask = torch.ones_like(ids)  # or else it takes token 0 of a prompt for padding
        answer = reference.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tokens[line] == answer[0, len(text) :].tolist()
        engine.abort(RequestKey("j", line))
    rows = record_logits(engine)
    for line, text in enumerate(texts):
        engine.add(EngineRequest(RequestKey("k", line), text, greedy(1)))
        run(engine)
        engine.abort(RequestKey("k", line))
        with torch.inference_mode():
            expected = reference(torch.tensor([text])).logits[0, -1].numpy()
        np.testing.assert_allclose(rows[line], expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_and_greedy_tokens_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, VARIANTS[variant])
    agree_with_transformers(folder, load(folder, max_num_batched_tokens=90), prompts(), new=16)


def test_sharded_weights_are_read(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    agree_with_transformers(folder, load(folder), prompts((5, 33)), new=8)


def test_batch_variant_mode_agrees_too(folder: Path) -> None:
    agree_with_transformers(folder, load(folder, batch_invariant=False), prompts(), new=16)


def test_bfloat16_runs_outside_of_batch_invariant_mode(folder: Path) -> None:
    engine = load(folder, batch_invariant=False, dtype="bfloat16")
    engine.add(EngineRequest(RequestKey("j", 0), prompts()[2], greedy(5)))
    assert len(run(engine)[0][0]) == 5
    out = bytearray(44 * engine.layout.slot_bytes)
    engine.export_slots([SlotSpan(RequestKey("j", 0), 0, 44)], memoryview(out))
    assert any(out)


def test_why_a_sequence_ends(folder: Path) -> None:
    engine = load(folder, max_model_len=64)
    free = EngineRequest(RequestKey("j", 0), prompts()[1], greedy(30))
    engine.add(free)
    answer = run(engine)[0][0]
    stop = next(t for t in answer if answer.index(t) > 3)
    first = answer.index(stop)
    engine.add(EngineRequest(RequestKey("j", 1), free.prompt_token_ids, greedy(30, stop_token_ids=(stop,))))
    engine.add(EngineRequest(RequestKey("j", 2), free.prompt_token_ids, greedy(1000)))
    tokens, reasons = run(engine)
    assert tokens[1] == answer[: first + 1]
    assert len(tokens[2]) == 64 - len(free.prompt_token_ids)
    assert reasons == {1: "stop", 2: "length"}


def test_eos_comes_from_the_generation_config_and_can_be_ignored(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    assert inspect_model_folder(folder).eos_token_ids == (EOS_ID,)
    probe = load(folder)
    probe.add(EngineRequest(RequestKey("j", 0), prompts()[2], greedy(9)))
    answer = run(probe)[0][0]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [answer[4], EOS_ID]}))
    engine = load(folder)
    engine.add(EngineRequest(RequestKey("j", 1), prompts()[2], greedy(9, ignore_eos=False)))
    engine.add(EngineRequest(RequestKey("j", 2), prompts()[2], greedy(9)))
    tokens, reasons = run(engine)
    assert tokens == {1: answer[: answer.index(answer[4]) + 1], 2: answer}
    assert reasons == {1: "stop", 2: "length"}


def test_a_resumed_sequence_with_all_its_kv_feeds_one_token(folder: Path) -> None:
    request = EngineRequest(RequestKey("j", 0), prompts()[3], greedy(12))
    source, target = load(folder), load(folder)
    source.add(request)
    tokens: list[int] = []
    while len(tokens) < 6:
        tokens += [t.token_id for t in source.step().tokens]
    known = len(request.prompt_token_ids) + 6
    kv = bytearray((known - 1) * source.layout.slot_bytes)
    source.export_slots([SlotSpan(request.key, 0, known - 1)], memoryview(kv))
    feed = Feed(target)
    feed.add(request, tuple(tokens), kv)
    feed.drain()
    output = target.step()
    assert (output.prefill_tokens, output.decode_tokens) == (0, 1)
    assert output.tokens[0].position == 6
    assert output.kv_len == {request.key: known}
    assert target.recomputed_tokens(request.key) == 0
    assert source.layout == target.layout


def test_export_speaks_the_canonical_layout(folder: Path) -> None:
    """Layer 0's value rows are the v projection of the normed embeddings: `[token][layer][k|v][head][dim]`."""
    engine = load(folder)
    text = prompts()[2]
    engine.add(EngineRequest(RequestKey("j", 0), text, greedy(2)))
    engine.step()
    layout = engine.layout
    out = bytearray(len(text) * layout.slot_bytes)
    engine.export_slots([SlotSpan(RequestKey("j", 0), 0, len(text))], memoryview(out))
    slots = np.frombuffer(out, np.float32).reshape(len(text), layout.num_layers, 2, layout.num_kv_heads, -1)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        cache = reference(torch.tensor([text]), use_cache=True).past_key_values
    for layer in range(layout.num_layers):
        for which, tensor in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
            np.testing.assert_allclose(slots[:, layer, which], tensor[0].transpose(0, 1).numpy(), atol=1e-4)
    part = bytearray(3 * layout.slot_bytes)
    engine.export_slots([SlotSpan(RequestKey("j", 0), 15, 18)], memoryview(part))  # across a page border
    assert part == out[15 * layout.slot_bytes : 18 * layout.slot_bytes]


def test_export_refuses_what_is_not_there(folder: Path) -> None:
    engine = load(folder)
    with pytest.raises(KeyError):
        engine.export_slots([SlotSpan(RequestKey("j", 9), 0, 1)], memoryview(bytearray(10)))
    engine.add(EngineRequest(RequestKey("j", 0), prompts()[1], greedy(2)))
    engine.step()
    with pytest.raises(ValueError, match=r"not resident, KV covers \[0, 7\)"):
        engine.export_slots([SlotSpan(RequestKey("j", 0), 6, 8)], memoryview(bytearray(2 * engine.layout.slot_bytes)))
    with pytest.raises(ValueError, match="the buffer has 5"):
        engine.export_slots([SlotSpan(RequestKey("j", 0), 0, 1)], memoryview(bytearray(5)))


REFUSALS: list[tuple[tuple[int, ...], dict[str, Any], str]] = [
    ((), {}, "empty"),
    ((1, 999), {}, "outside the vocabulary"),
    ((1,) * 200, {}, "exceeds max_model_len 200"),
    ((1,) * 100, {"max_tokens": 90}, "need 12 KV pages, the engine has 10"),
    ((1,), {"max_tokens": 0}, "max_tokens is 0"),
    ((1,), {"temperature": -1.0}, "temperature is -1"),
    ((1,), {"temperature": float("nan")}, "temperature is nan"),
    ((1,), {"top_p": 0.0}, "top_p is 0"),
    ((1,), {"top_k": -2}, "top_k is -2"),
]


@pytest.mark.parametrize(("text", "changes", "reason"), REFUSALS)
def test_what_can_never_run_is_refused_with_its_reason(
    folder: Path, text: tuple[int, ...], changes: dict[str, Any], reason: str
) -> None:
    engine = load(folder, max_model_len=200, num_pages=10)
    params = SamplingParams(**({"seed": 0, "max_tokens": 5} | changes))
    with pytest.raises(RequestError, match=reason):
        engine.add(EngineRequest(RequestKey("j", 0), text, params))
    assert not engine.has_work()


def test_a_contradictory_resume_state_is_refused(folder: Path) -> None:
    engine = load(folder)
    request = EngineRequest(RequestKey("j", 0), (1, 2, 3), greedy(4))
    with pytest.raises(ValueError, match=r"\[0, 4\) to be imported are not within \[0, T-1 = 3\)"):
        engine.add(request, ResumeState((5,), 0, 4))
    with pytest.raises(ValueError, match=r"\[2, 1\) to be imported are not within"):
        engine.add(request, ResumeState((5,), 2, 1))
    with pytest.raises(ValueError, match="has all its tokens already"):
        engine.add(request, ResumeState((5, 6, 7, 8)))


def test_a_broken_step_names_its_suspects(folder: Path) -> None:
    engine = load(folder)
    engine.add(EngineRequest(RequestKey("j", 4), prompts()[1], greedy(4)))
    engine._runner.decoder.head._weight = None  # type: ignore[assignment]
    with pytest.raises(EngineFault, match="a step over 1 sequences failed") as caught:
        engine.step()
    assert caught.value.suspects == (RequestKey("j", 4),)


def test_classes_and_fingerprints_tell_engines_apart(folder: Path, tmp_path: Path) -> None:
    one = load(folder).layout
    assert one == load(folder).layout
    other = load(write_tiny_model(tmp_path, seed=1)).layout
    assert other.model_fingerprint != one.model_fingerprint
    assert other.numerics_class == one.numerics_class
    try:
        assert load(folder, num_threads=2).layout.numerics_class != one.numerics_class
    finally:
        torch.set_num_threads(1)
