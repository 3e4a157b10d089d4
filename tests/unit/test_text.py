from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.byte_tokenizer import END, byte_tokenizer
from worker.text import Detokenizer, StopChecker, TextError, Tokenizer

TOKENIZER = byte_tokenizer()


def push_all(ids: list[int] | tuple[int, ...]) -> tuple[Detokenizer, list[str]]:
    detokenizer = Detokenizer(TOKENIZER)
    return detokenizer, [detokenizer.push(token_id) for token_id in ids]


def test_half_a_character_is_never_shown() -> None:
    _, parts = push_all(TOKENIZER.encode_prompt("a🌊b"))
    assert parts == ["a", "", "", "", "🌊", "b"]


def test_the_end_shows_what_is_unfinished() -> None:
    detokenizer, _ = push_all(TOKENIZER.encode_prompt("a🌊")[:-1])
    assert detokenizer.text == "a"
    assert detokenizer.flush() != "" and detokenizer.text.startswith("a\ufffd")
    assert detokenizer.flush() == ""


@given(st.text(max_size=60))
def test_increments_make_the_text(text: str) -> None:
    detokenizer, parts = push_all(TOKENIZER.encode_prompt(text))
    assert "".join(parts) + detokenizer.flush() == text == detokenizer.text


@given(st.lists(st.integers(0, 258), max_size=60), st.data())
def test_text_is_a_function_of_the_tokens_alone(ids: list[int], data: st.DataObject) -> None:
    """Any token ids, invalid bytes and special tokens included: what is shown stays, and a replay shows the same."""
    detokenizer, _ = push_all(ids)
    cut = data.draw(st.integers(0, len(ids)))
    half, _ = push_all(ids[:cut])
    assert detokenizer.text.startswith(half.text)
    for token_id in ids[cut:]:
        half.push(token_id)
    detokenizer.flush(), half.flush()
    assert half.text == detokenizer.text == TOKENIZER.decode(ids)


def stopped(text: str, stop: list[str]) -> tuple[str, int]:
    """The answer, and after how many tokens it stopped."""
    detokenizer, checker = Detokenizer(TOKENIZER), StopChecker(stop)
    count = 0
    for token_id in TOKENIZER.encode_prompt(text):
        count += 1
        new = detokenizer.push(token_id)
        if checker.look(detokenizer.text, len(new)):
            break
    return detokenizer.text[: checker.cut], count


def test_a_stop_string_over_several_tokens_cuts_before_it() -> None:
    assert stopped("hello END world", ["END"]) == ("hello ", 9)
    assert stopped("hello", ["END"]) == ("hello", 5)
    assert stopped("über 🌊 alles", ["🌊"])[0] == "über "


def test_the_first_completed_stop_string_wins() -> None:
    assert stopped("abcdef", ["cde", "bc"])[0] == "a"
    assert stopped("aab", ["ab"])[0] == "a"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stopped_answer_holds_no_stop_string(text: str, stop: list[str]) -> None:
    answer, _ = stopped(text, stop)
    assert not any(word in answer for word in stop)
    assert text.startswith(answer) and (answer == text or any(text.find(word) >= 0 for word in stop))


def test_chat_is_rendered_by_the_template() -> None:
    ids = TOKENIZER.encode_chat([{"role": "user", "content": "hi"}])
    assert ids[:1] == (256,) and END in ids
    assert TOKENIZER.decode(ids) == "user\nhiassistant\n"


@pytest.mark.parametrize(
    ("template", "words"),
    [(None, "no chat template"), ("{{ raise_exception('roles must alternate') }}", "roles must alternate")],
)
def test_a_template_that_cannot_is_said(template: str | None, words: str) -> None:
    with pytest.raises(TextError, match=words):
        byte_tokenizer(template).encode_chat([{"role": "user", "content": "hi"}])


def test_a_template_is_sandboxed() -> None:
    with pytest.raises(TextError, match="refuses"):
        byte_tokenizer("{{ messages.__class__.__mro__[1].__subclasses__() }}").encode_chat([])


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.model
def test_the_demo_model_renders_as_transformers_does() -> None:
    from transformers import AutoTokenizer

    from worker.demo_model import ensure_demo_model

    folder = ensure_demo_model(lambda what, part: None)
    messages = [{"role": "user", "content": "Grüße 🌊, what is 12+34?"}, {"role": "assistant", "content": "46"}]
    theirs = AutoTokenizer.from_pretrained(folder)
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    ours = Tokenizer.load(folder)
    assert list(ours.encode_chat(messages)) == wanted
    assert ours.decode(wanted) == theirs.decode(wanted, skip_special_tokens=True)
