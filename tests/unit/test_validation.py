from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from context_daemon.records import Endpoint, RequestKey, RequestSpec
from orchestrator.jobs.batchfile import Line, LineError
from orchestrator.jobs.schema import UNSUPPORTED
from orchestrator.jobs.validation import ModelLimits, Validator
from tests.unit.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from worker.result_lines import result_line

TOKENIZER = byte_tokenizer()
LIMITS = ModelLimits("m", max_model_len=100, vocab_size=VOCAB_SIZE)


def validator() -> Validator:
    return Validator(TOKENIZER, LIMITS, draw_seed=lambda: 4711)


def line(custom_id: str = "a", url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in url else {"prompt": "hi"}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **prompt, **body}}


def check(value: Any, number: int = 1, using: Validator | None = None) -> RequestSpec | LineError:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return (using or validator()).check(Line(number, data))


def refusal(value: Any, **more: Any) -> LineError:
    found = check(value, **more)
    assert isinstance(found, LineError), found
    return found


def accepted(value: Any) -> RequestSpec:
    found = check(value)
    assert isinstance(found, RequestSpec), found
    return found


def test_defaults() -> None:
    spec = accepted(line())
    room = LIMITS.max_model_len - len(spec.prompt_token_ids)
    assert (spec.line, spec.custom_id, spec.endpoint) == (1, "a", Endpoint.CHAT)
    assert (spec.params.seed, spec.params.max_tokens, spec.params.temperature, spec.params.top_p) == (4711, room, 1, 1)


def test_what_is_given_is_kept() -> None:
    spec = accepted(line(seed=7, max_completion_tokens=5, temperature=0, top_p=0.5, top_k=3, stop="x", ignore_eos=True))
    params = spec.params
    assert (params.seed, params.max_tokens, params.temperature, params.top_k) == (7, 5, 0, 3)
    assert (params.stop, params.ignore_eos) == (("x",), True)
    assert accepted(line(url="/v1/completions", prompt=[1, 2, 3])).prompt_token_ids == (1, 2, 3)


@pytest.mark.parametrize(
    "body",
    [{"presence_penalty": 0}, {"logprobs": False}, {"n": 1}, {"stream": False}, {"tools": None}, {"stop": None}],
)
def test_what_changes_nothing_is_accepted(body: dict[str, Any]) -> None:
    accepted(line(**body))


def test_null_is_as_if_it_were_not_there() -> None:
    assert accepted(line(**dict.fromkeys(sorted(UNSUPPORTED)))).params == accepted(line()).params


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 2.5}, "body.temperature"),
        ({"temperature": "hot"}, "body.temperature"),
        ({"temperature": True}, "body.temperature"),
        ({"top_p": 0}, "body.top_p"),
        ({"top_k": -2}, "body.top_k"),
        ({"seed": 2**70}, "body.seed"),
        ({"max_tokens": 0}, "body.max_tokens"),
        ({"stop": ["a"] * 5}, "body.stop"),
        ({"stop": ""}, "body.stop"),
        ({"stop_token_ids": [10**30]}, "body.stop_token_ids"),
        ({"n": 2}, "body.n"),
        ({"stream": True}, "body.stream"),
        ({"logprobs": True}, "body.logprobs"),
        ({"tools": [{}]}, "body.tools"),
        ({"response_format": {"type": "json_object"}}, "body.response_format"),
        ({"presence_penalty": 0.5}, "body.presence_penalty"),
        ({"no_such_thing": 1}, "body.no_such_thing"),
        ({"model": "other"}, "body.model"),
        ({"messages": []}, "body.messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "body.messages[0].role"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, "body.messages"),
    ],
)
def test_a_bad_parameter_is_named(body: dict[str, Any], param: str) -> None:
    found = refusal(line(**body), number=7)
    assert (found.line, found.param) == (7, param)
    assert found.message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{nope", "not JSON"),
        (b"[1]", "an array"),
        (b"null", "null"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_object_is_said(data: bytes, words: str) -> None:
    assert words in refusal(data).message


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_a_missing_field_is_named(name: str) -> None:
    value = line()
    del value[name]
    assert refusal(value).param == name


def test_a_duplicate_names_both_lines() -> None:
    using = validator()
    check(line("x"), 3, using)
    found = refusal(line("x"), number=9, using=using)
    assert found.line == 9 and "line 3" in found.message and "line 9" in found.message


def test_urls() -> None:
    using = validator()
    assert "/v1/embeddings" in refusal(line("b", url="/v1/embeddings"), using=using).message
    check(line("c"), 2, using)
    mixed = refusal(line("d", url="/v1/completions"), number=3, using=using)
    assert mixed.param == "url" and "line 2" in mixed.message


def test_a_prompt_needs_room_for_one_token() -> None:
    assert accepted(line(url="/v1/completions", prompt="x" * 99)).params.max_tokens == 1
    found = refusal(line(url="/v1/completions", prompt="x" * 100))
    assert (found.code, found.param) == ("context_length_exceeded", "body.prompt")
    assert "100 tokens" in found.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = ["messages", "prompt", "temperature", "top_p", "top_k", "seed", "max_tokens", "stop", "stop_token_ids", "n",
         "stream", "user", "metadata", "logprobs", "tools", "ignore_eos", "max_completion_tokens", "zz"]  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])  # a clean clone builds tables of Unicode first
@given(
    st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3),
    st.dictionaries(st.sampled_from(["custom_id", "method", "url", "body", "zz"]), JSON, max_size=1),
)
def test_any_json_is_accepted_or_refused_with_a_message(url: str, body: dict[str, Any], top: dict[str, Any]) -> None:
    found = check(line(url=url, **body) | top)
    if isinstance(found, LineError):
        assert found.message and found.code and found.line == 1
    else:
        assert 0 < len(found.prompt_token_ids) < LIMITS.max_model_len
        assert 1 <= found.params.max_tokens <= LIMITS.max_model_len - len(found.prompt_token_ids)


@given(st.binary(max_size=80))
def test_any_bytes_are_refused_with_a_message(data: bytes) -> None:
    assert refusal(data).message


def test_text_parts_and_the_developer_role_are_what_they_say() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    whole = accepted(line(messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]))
    split = accepted(line(messages=[{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]))
    assert split.prompt_token_ids == whole.prompt_token_ids


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "image_url"),
        ({"image_url": {"url": "x"}, "type": "image_url"}, "image_url"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio"),
        ({"type": "file"}, "file"),
    ],
)
def test_other_parts_are_refused_by_name(part: dict[str, Any], named: str) -> None:
    found = refusal(line(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]))
    assert (found.code, found.param) == ("unsupported_content", "body.messages[0].content[1].type")
    assert repr(named) in found.message


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (None, "body.messages[0].content"),
        ([], "body.messages[0].content"),
        ([{"type": "text"}], "body.messages[0].content[0].text"),
        (["a"], "body.messages[0].content[0]"),
        ([{"type": 3, "text": "a"}], "body.messages[0].content[0].type"),
        ([{"type": "text", "text": "a", "cache": 1}], "body.messages[0].content[0].cache"),
    ],
)
def test_broken_content_is_named(content: Any, param: str) -> None:
    assert refusal(line(messages=[{"role": "user", "content": content}])).param == param


def test_a_name_reaches_the_template() -> None:
    template = "{% for message in messages %}{{ message.name or '-' }}:{{ message.content }}{% endfor %}"
    using = Validator(byte_tokenizer(template), LIMITS, draw_seed=lambda: 1)
    messages = [{"role": "user", "name": "ann", "content": "hi"}, {"role": "user", "content": "ho"}]
    spec = check(line(messages=messages), using=using)
    assert isinstance(spec, RequestSpec) and TOKENIZER.decode(spec.prompt_token_ids) == "ann:hi-:ho"


def raw(body: str = '"model":"m","prompt":"hi"', custom_id: str = "a", more: str = "") -> bytes:
    """A line by hand: json.dumps cannot write what is wrong with these."""
    return f'{{"custom_id":"{custom_id}","method":"POST","url":"/v1/completions"{more},"body":{{{body}}}}}'.encode()


HI = '"model":"m","prompt":"hi"'


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (raw(f'{HI},"temperature":NaN'), "NaN and Infinity are no JSON numbers"),
        (raw(f'{HI},"temperature":Infinity'), "NaN and Infinity are no JSON numbers"),
        (raw(f'{HI},"temperature":-Infinity'), "NaN and Infinity are no JSON numbers"),
        (raw(f'{HI},"temperature":1e400'), "out of range"),
        (raw(f'{HI},"seed":{"9" * 5000}'), "out of range"),
        (raw(f'{HI},"temperature":1{"0" * 400}'), "body.temperature: number out of range"),
        (raw(f'{HI},"max_tokens":0'), "body.max_tokens: expected `int` >= 1"),
        (raw(f'{HI},"max_tokens":-0'), "body.max_tokens: expected `int` >= 1"),
        (raw(f'{HI},"max_tokens":5.0'), "body.max_tokens: expected `int"),
        (raw(f'{HI},"seed":{2**63}'), "body.seed"),
        (raw('"model":"m","prompt":"a\\ud800"'), "\\ud800 is half a surrogate pair"),
        (raw('"model":"m","prompt":"\\ud800\\ud800"'), "\\ud800 is half a surrogate pair"),
        (raw('"model":"m","prompt":"\\ud83c\\udf0a\\udf0a"'), "\\udf0a is half a surrogate pair"),
        (raw(custom_id="\\udfff"), "\\udfff is half a surrogate pair"),
        (raw('"model":"m","prompt":"a\0b"'), "control character"),
        (raw('"model":"m","prompt":"a\tb"'), "control character"),
        (raw(f'{HI},"metadata":' + "[" * 100_000 + "]" * 100_000), "nested too deeply"),
        (raw(f'{HI},"metadata":' + '{"a":' * 100_000 + "1" + "}" * 100_000), "nested too deeply"),
        (raw(f'{HI},"metadata":' + "[" * 100_000), "nested too deeply"),
        (raw(more=',"custom_id":"b"'), "'custom_id' is given twice"),
        (raw(f'{HI},"seed":1,"seed":1'), "'seed' is given twice"),
        (raw(f'{HI},"seed":1,"\\u0073eed":2'), "'seed' is given twice"),
        (raw(f'{HI},"metadata":{{"k":"1","k":"2"}}'), "'k' is given twice"),
        (raw() + b" x", "trailing characters"),
        ("\ufeff".encode() + raw(), "not JSON"),
    ],
)
def test_hostile_lines_are_refused_in_words(data: bytes, words: str) -> None:
    found = refusal(data, number=5)
    assert words in found.message and found.line == 5 and len(found.message) < 300
    assert "control character" in words or "control character" not in found.message


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("a\\u0000b", "a\0b"),
        ("\\ud83c\\udf0a", "🌊"),
        ("\\\\ud800", "\\ud800"),
        ("\u2028\u0085", "\u2028\u0085"),
        ("\\/\\b\\f", "/\b\f"),
    ],
)
def test_unusual_text_round_trips(written: str, text: str) -> None:
    spec = accepted(raw(f'"model":"m","prompt":"{written}"', custom_id=written))
    assert spec.custom_id == text and TOKENIZER.decode(spec.prompt_token_ids) == text
    line_out = result_line(
        RequestKey("j", 1), spec, text=text, completion_tokens=1, finish_reason="stop", model="m", created=1,
        system_fingerprint="fp", exact=True,
    )  # fmt: skip
    found = json.loads(line_out)
    assert (found["custom_id"], found["response"]["body"]["choices"][0]["text"]) == (text, text)
    assert b"\n" not in line_out


def test_numbers_at_the_edges_are_what_they_are() -> None:
    assert accepted(raw(f'{HI},"seed":-0')).params.seed == 0
    assert accepted(raw(f'{HI},"seed":{-(2**63)}')).params.seed == -(2**63)
    cold = accepted(raw(f'{HI},"temperature":-0.0')).params.temperature
    assert cold == 0.0 and str(cold) == "0.0"
    assert accepted(raw(f'{HI},"max_tokens":{10**30}')).params.max_tokens == LIMITS.max_model_len - 2


@given(st.lists(st.sampled_from(["\\ud800", "\\udc00", "\\u0041", "\\\\", "\\n", "a", "u", "d800"]), max_size=8))
def test_half_pairs_are_told_from_text(parts: list[str]) -> None:
    written = "".join(parts)
    text = json.loads(f'"{written}"')
    whole = not any(0xD800 <= ord(letter) < 0xE000 for letter in text)
    found = check(raw(f'"model":"m","prompt":"x{written}"'))
    assert isinstance(found, RequestSpec) == whole
    assert isinstance(found, RequestSpec) or "half a surrogate pair" in found.message
