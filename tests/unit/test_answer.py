"""A result line is a function of the tokens: whoever resumes a sequence anywhere writes the same one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from context_daemon.records import Endpoint, KVLayout, RequestKey, RequestSpec, SamplingParams
from tests.unit.byte_tokenizer import END, byte_tokenizer
from worker.answer import Answer, AnswerBuilder
from worker.text import Tokenizer

KEY = RequestKey("job", 1)
LAYOUT = KVLayout("fp", "cpu-1", "float32", num_layers=1, num_kv_heads=1, head_dim=4)


def builder(tokenizer: Tokenizer | None = None) -> AnswerBuilder:
    return AnswerBuilder(tokenizer or byte_tokenizer(), "m", LAYOUT, (END,), clock=lambda: 1.0)


def spec(**changes: Any) -> RequestSpec:
    params = SamplingParams(**({"seed": 1, "max_tokens": 50} | changes))
    return RequestSpec(1, "c1", Endpoint.COMPLETIONS, (1, 2), params)


def ids(text: str) -> list[int]:
    return list(byte_tokenizer().encode_prompt(text))


def choice(payload: bytes) -> tuple[str, str]:
    (only,) = json.loads(payload)["response"]["body"]["choices"]
    return only["text"], only["finish_reason"]


def run(answer: Answer, tokens: list[int]) -> tuple[int, bytes]:
    """Push until a stop string is complete; how many tokens that took, and the line."""
    for count, token in enumerate(tokens, 1):
        if answer.push(token):
            return count, answer.payload("stop", exact=True).payload
    return len(tokens), answer.payload("length", exact=True).payload


@pytest.mark.parametrize("stop", [("lo w",), ("zzz", "wor"), ("é",), ("d!",), ("absent",)])
def test_resumed_anywhere_it_gives_the_same_line(stop: tuple[str, ...]) -> None:
    asked, tokens = spec(stop=stop), ids("hello wörld, é and more world!")
    count, line = run(builder().start(KEY, asked, []), tokens)
    for cut in range(count):  # also in the middle of the stop string and of a character
        resumed = builder().start(KEY, asked, tokens[:cut])
        assert resumed.finished is None
        assert run(resumed, tokens[cut:]) == (count - cut, line)


def test_a_stop_string_over_several_tokens_ends_the_text_before_it() -> None:
    count, line = run(builder().start(KEY, spec(stop=("lo w",)), []), ids("hello world"))
    assert count == len("hello w") and choice(line) == ("hel", "stop")


def test_an_owner_that_died_before_the_end_was_said_is_seen_through() -> None:
    asked = spec(stop=("lo",), max_tokens=9, stop_token_ids=(7,))
    finished = {
        "stop string": builder().start(KEY, asked, ids("hello")).finished,
        "stop token": builder().start(KEY, asked, [*ids("he"), 7]).finished,
        "end of sequence": builder().start(KEY, asked, [*ids("he"), END]).finished,
        "ignored": builder().start(KEY, spec(ignore_eos=True), [*ids("he"), END]).finished,
        "length": builder().start(KEY, asked, ids("abcdefghi")).finished,
        "stop at the last token": builder().start(KEY, asked, ids("abcdefglo")).finished,
        "open": builder().start(KEY, asked, ids("abc")).finished,
        "nothing yet": builder().start(KEY, asked, []).finished,
    }
    assert finished == {
        "stop string": "stop",
        "stop token": "stop",
        "end of sequence": "stop",
        "ignored": None,
        "length": "length",
        "stop at the last token": "stop",
        "open": None,
        "nothing yet": None,
    }


def test_one_token_is_enough() -> None:
    answer = builder().start(KEY, spec(max_tokens=1, stop=("h",)), [])
    assert answer.push(ids("h")[0])
    line = answer.payload("stop", exact=False).payload
    assert choice(line) == ("", "stop")
    body = json.loads(line)["response"]["body"]
    assert body["usage"]["completion_tokens"] == 1 and body["tideover"] == {"exact": False}


def merging_tokenizer() -> Tokenizer:
    """One of its tokens is `ab` and the first byte of a two-byte character."""
    first_byte = "Ã"  # how byte-level vocabularies write 0xC3
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate([*alphabet, "ab", "ab" + first_byte])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", first_byte)]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner, {})


def test_a_stop_string_held_back_with_half_a_character_is_found_at_the_end() -> None:
    tokenizer = merging_tokenizer()
    tokens = list(tokenizer.encode_prompt("xabé"))[:2]  # the answer ends by length within the character
    assert tokenizer.decode(tokens).startswith("xab") and len(tokens) == 2
    answer = builder(tokenizer).start(KEY, spec(stop=("ab",), max_tokens=2, ignore_eos=True), [])
    assert [answer.push(token) for token in tokens] == [False, False]
    assert choice(answer.payload("length", exact=True).payload) == ("x", "stop")


def test_half_a_character_at_the_end_is_shown_as_what_it_is() -> None:
    answer = builder().start(KEY, spec(), ids("né")[:2])
    assert choice(answer.payload("length", exact=True).payload) == ("n\ufffd", "length")


def test_an_error_line_carries_the_custom_id_and_the_reason() -> None:
    finish = builder().start(KEY, spec(), []).error("invalid_request_error", "too long")
    line = json.loads(finish.payload)
    assert not finish.ok and line["custom_id"] == "c1" and line["response"] is None
    assert line["error"] == {"code": "invalid_request_error", "message": "too long"}


@pytest.mark.parametrize("by", ["stop_token_ids", "eos"])
def test_a_stop_token_that_is_ordinary_text_is_counted_and_not_shown(by: str) -> None:
    """As vLLM has it. The same token is shown where it does not stop: with ignore_eos the end of sequence is text."""
    letter = ids("!")[0]
    eos = (letter,) if by == "eos" else (END,)
    made = AnswerBuilder(byte_tokenizer(), "m", LAYOUT, eos, clock=lambda: 1.0)
    asked = spec(stop_token_ids=(letter,) if by == "stop_token_ids" else (), stop=("!",))
    answer = made.start(KEY, asked, ids("hey!"))
    assert answer.finished == "stop"
    line = answer.payload("stop", exact=True).payload
    assert choice(line) == ("hey", "stop")
    assert json.loads(line)["response"]["body"]["usage"]["completion_tokens"] == 4
    shown = made.start(KEY, spec(ignore_eos=True), ids("hey!")).payload("length", exact=True).payload
    assert choice(shown) == ("hey!", "length")


def test_a_stop_token_after_half_a_character_ends_it() -> None:
    letter = ids("!")[0]
    answer = builder().start(KEY, spec(stop_token_ids=(letter,)), [*ids("né")[:2], letter])
    assert choice(answer.payload("stop", exact=True).payload) == ("n\ufffd", "stop")
