"""From a line of a batch file to a RequestSpec, or to the reason why not. No I/O; the seed's randomness is passed in."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from context_daemon.records import Endpoint, RequestSpec, SamplingParams
from orchestrator.jobs.batchfile import Line, LineError
from orchestrator.jobs.schema import NEUTRAL, UNSUPPORTED, BatchLine, ChatBody, CompletionBody
from orchestrator.jobs.strict_json import NotStrict, decode
from worker.text import TextError, Tokenizer

MAX_STOP = 4
T = TypeVar("T")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`")
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


class _Refused(Exception):
    def __init__(self, code: str, message: str, param: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class ModelLimits:
    name: str  # as clients name it
    max_model_len: int
    vocab_size: int


class Validator:
    """Checks the lines of one file, in order: ids must be unique and endpoints equal across it."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, draw_seed: Callable[[], int]) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._draw_seed = draw_seed
        self._seen: dict[str, int] = {}
        self._endpoint: tuple[Endpoint, int] | None = None

    @property
    def endpoint(self) -> str:
        """Of the lines so far; "" before the first good one."""
        return self._endpoint[0].value if self._endpoint else ""

    def check(self, line: Line) -> RequestSpec | LineError:
        try:
            return self._check(line)
        except NotStrict as error:
            return LineError(line.number, "invalid_json", str(error))
        except _Refused as refused:
            return LineError(line.number, refused.code, str(refused), refused.param)

    def _check(self, line: Line) -> RequestSpec:
        envelope = self._envelope(line)
        self._unique(envelope.custom_id, line.number)
        if envelope.method != "POST":
            raise _Refused("invalid_method", f"method {envelope.method!r}: only POST is supported", "method")
        endpoint = self._same_endpoint(envelope.url, line.number)
        body = self._body(endpoint, envelope.body)
        if body.model != self._limits.name:
            text = f"model {body.model!r} is not served here: this cluster runs {self._limits.name!r}"
            raise _Refused("model_not_found", text, "body.model")
        prompt = self._prompt(body)
        params = self._params(body, len(prompt))
        return RequestSpec(line.number, envelope.custom_id, endpoint, prompt, params)

    def _envelope(self, line: Line) -> BatchLine:
        value = decode(line.data)
        if not isinstance(value, dict):
            raise _Refused("invalid_json", f"a line must be a JSON object, this is {_kind(value)}")
        return _convert(value, BatchLine, "")

    def _unique(self, custom_id: str, number: int) -> None:
        first = self._seen.setdefault(custom_id, number)
        if first != number:
            text = f"custom_id {custom_id!r} is used twice: on line {first} and on line {number}"
            raise _Refused("duplicate_custom_id", text, "custom_id")

    def _same_endpoint(self, url: str, number: int) -> Endpoint:
        try:
            endpoint = Endpoint(url)
        except ValueError as error:
            supported = " and ".join(Endpoint)
            raise _Refused("invalid_url", f"url {url!r} is not supported: use {supported}", "url") from error
        if self._endpoint is None:
            self._endpoint = (endpoint, number)
        first, first_line = self._endpoint
        if endpoint is not first:
            text = f"url {url!r} differs from {first.value!r} on line {first_line}: a job has one endpoint"
            raise _Refused("mismatched_url", text, "url")
        return endpoint

    def _body(self, endpoint: Endpoint, body: dict[str, Any]) -> ChatBody | CompletionBody:
        for name in sorted(UNSUPPORTED & body.keys()):
            if not any(value == body[name] and type(value) is type(body[name]) for value in NEUTRAL.get(name, (None,))):
                raise _Refused("unsupported_parameter", f"{name} is not supported", f"body.{name}")
        supported = {name: value for name, value in body.items() if name not in UNSUPPORTED}
        if endpoint is Endpoint.CHAT:
            _only_text_parts(body.get("messages"))
            return _convert(supported, ChatBody, "body")
        return _convert(supported, CompletionBody, "body")

    def _prompt(self, body: ChatBody | CompletionBody) -> tuple[int, ...]:
        where = "body.messages" if isinstance(body, ChatBody) else "body.prompt"
        try:
            tokens = self._encode(body)
        except TextError as error:
            raise _Refused("invalid_prompt", str(error), where) from error
        except (UnicodeError, TypeError) as error:
            raise _Refused("invalid_prompt", f"the text cannot be tokenised: {error}", where) from error
        if not tokens:
            raise _Refused("invalid_prompt", "the prompt is empty: it needs at least one token", where)
        if max(tokens) >= self._limits.vocab_size:
            text = f"token id {max(tokens)} is outside the vocabulary of {self._limits.vocab_size}"
            raise _Refused("invalid_prompt", text, where)
        room = self._limits.max_model_len - 1
        if len(tokens) > room:
            text = f"the prompt has {len(tokens)} tokens, the model allows {room} and one for the answer"
            raise _Refused("context_length_exceeded", text, where)
        return tokens

    def _encode(self, body: ChatBody | CompletionBody) -> tuple[int, ...]:
        if isinstance(body, ChatBody):
            return self._tokenizer.encode_chat([message.plain() for message in body.messages])
        if isinstance(body.prompt, str):
            return self._tokenizer.encode_prompt(body.prompt)
        return tuple(body.prompt)

    def _params(self, body: ChatBody | CompletionBody, prompt_tokens: int) -> SamplingParams:
        room = self._limits.max_model_len - prompt_tokens
        wanted = body.max_tokens
        if isinstance(body, ChatBody):
            wanted = body.max_completion_tokens or wanted
        return SamplingParams(
            seed=self._draw_seed() if body.seed is None else body.seed,
            max_tokens=min(room, wanted) if wanted is not None else room,
            temperature=1.0 if body.temperature is None else body.temperature + 0.0,  # -0.0 is 0.0
            top_k=max(0, body.top_k or 0),
            top_p=1.0 if body.top_p is None else body.top_p,
            stop=_stop(body.stop),
            stop_token_ids=self._stop_token_ids(body.stop_token_ids or []),
            ignore_eos=bool(body.ignore_eos),
        )

    def _stop_token_ids(self, token_ids: list[int]) -> tuple[int, ...]:
        if token_ids and max(token_ids) >= self._limits.vocab_size:
            text = f"token id {max(token_ids)} is outside the vocabulary of {self._limits.vocab_size}"
            raise _Refused("invalid_value", text, "body.stop_token_ids")
        return tuple(token_ids)


def _only_text_parts(messages: Any) -> None:
    """Name the kind of part that is not text, before its own fields are taken for unknown ones. Other shapes come later."""
    for at, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for index, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                where = f"body.messages[{at}].content[{index}]"
                raise _Refused(
                    "unsupported_content", f"{where}: {kind!r} is not supported, only 'text' is", f"{where}.type"
                )


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(texts) > MAX_STOP:
        raise _Refused("invalid_value", f"stop has {len(texts)} strings, at most {MAX_STOP} are allowed", "body.stop")
    if "" in texts:
        raise _Refused("invalid_value", "stop has an empty string: it would stop everything", "body.stop")
    return texts


def _convert(value: Any, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), where) from error


def _named(message: str, where: str) -> _Refused:
    """msgspec's message, with the field it is about as a parameter name."""
    found = _PATH.search(message)
    path = found["path"] if found else ""
    text = _PATH.sub("", message)
    if unknown := _UNKNOWN_FIELD.search(text):
        param = ".".join(part for part in (where, path, unknown["field"]) if part)
        return _Refused("unsupported_parameter", f"{unknown['field']} is not a known parameter", param)
    if missing := _MISSING_FIELD.search(text):
        param = ".".join(part for part in (where, path, missing["field"]) if part)
        return _Refused("missing_required_parameter", f"{missing['field']} is missing", param)
    param = ".".join(part for part in (where, path) if part)
    return _Refused("invalid_value", f"{param or 'line'}: {text[:1].lower()}{text[1:]}", param)


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
