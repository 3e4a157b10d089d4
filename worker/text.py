"""Text on both ends of a sequence: chat template and tokens in, incremental text and stop strings out.

Everything is a function of token ids alone, so a resumed sequence, which replays its ids, has the text it had.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.exceptions import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

_UNFINISHED = "\ufffd"  # what a decoder gives for bytes that are no character yet


class TextError(Exception):
    """The text cannot be made into tokens; the message says why, in the user's terms."""


class Tokenizer:
    """A Hugging Face folder's tokenizer and chat template."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        template = settings.get("chat_template")
        try:
            self._template = environment.from_string(template) if template else None
        except TemplateSyntaxError as error:
            raise TextError(f"the chat template of tokenizer_config.json does not parse: {error}") from error

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Raises TextError if the folder has no usable tokenizer."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TextError(f"{path} cannot be read as a tokenizer: {error}") from error
        settings_path = folder / "tokenizer_config.json"
        settings = json.loads(settings_path.read_text(encoding="utf-8")) if settings_path.exists() else {}
        template_path = folder / "chat_template.jinja"
        if template_path.exists():
            settings["chat_template"] = template_path.read_text(encoding="utf-8")
        return cls(tokenizer, settings)

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """A plain prompt, with the special tokens that the model expects before it."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Chat messages through the model's template, up to where the assistant speaks. Raises TextError."""
        if self._template is None:
            raise TextError("this model has no chat template: use /v1/completions")
        special = {name: _token_text(self._settings.get(name)) for name in ("bos_token", "eos_token")}
        try:
            text = self._template.render(messages=list(messages), add_generation_prompt=True, **special)
        except (TemplateError, TypeError) as error:
            raise TextError(f"the model's chat template refuses these messages: {error}") from error
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _token_text(value: Any) -> str:
    """Older folders store a special token as an object."""
    return str(value["content"]) if isinstance(value, dict) else str(value or "")


class Detokenizer:
    """Text that grows token by token and never shows half a character.

    Only a window is decoded again for each token: what lies before the last whole character does not change any more.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._prefix = 0  # the window starts here, so that the decoder sees a token's neighbour
        self._read = 0  # tokens before this are in `text`
        self.text = ""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is new and final."""
        self._ids.append(token_id)
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        window = self._tokenizer.decode(self._ids[self._prefix :])
        if len(window) <= len(before) or window.endswith(_UNFINISHED):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        new = window[len(before) :]
        self.text += new
        return new

    def flush(self) -> str:
        """The rest, when no more tokens come: unfinished bytes become replacement characters."""
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        rest = self._tokenizer.decode(self._ids[self._prefix :])[len(before) :]
        self._prefix = self._read = len(self._ids)
        self.text += rest
        return rest


class StopChecker:
    """Finds the first stop string in growing text, also across token borders."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max((len(text) for text in self._stop), default=0)
        self.cut: int | None = None  # where the answer ends, before the stop string

    def look(self, text: str, new: int) -> bool:
        """Has a stop string appeared, when the last `new` characters of `text` are new? The first one in the text counts."""
        if self.cut is None and self._stop and new:
            start = max(0, len(text) - new - self._longest + 1)
            found = [at for stop in self._stop if (at := text.find(stop, start)) >= 0]
            self.cut = min(found, default=None)
        return self.cut is not None
