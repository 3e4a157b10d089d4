"""The shape of a batch line: OpenAI's, as far as it is supported; what is not supported is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

UNSUPPORTED = {
    "logprobs", "top_logprobs", "tools", "tool_choice", "functions", "function_call", "response_format", "logit_bias",
    "presence_penalty", "frequency_penalty", "best_of", "echo", "suffix", "audio", "modalities", "parallel_tool_calls",
    "stream_options", "service_tier", "store", "reasoning_effort", "prediction", "min_p", "repetition_penalty",
    "guided_json", "guided_regex", "min_tokens",
}  # fmt: skip

# A value that changes nothing is accepted, since clients send it by default.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None,),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None,),
    "stream_options": (None,),
    "repetition_penalty": (None, 1, 1.0),
    "functions": (None, []),
    "parallel_tool_calls": (None, True, False),  # of no tools
    "modalities": (None, ["text"]),
    "store": (None, False),
    "min_p": (None, 0, 0.0),
    "min_tokens": (None, 0),
}

Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], msgspec.Meta(min_length=1)]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it: text parts joined, the newer name of the system role mapped to the old."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": "system" if self.role == "developer" else self.role, "content": text, **named}


class Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints share."""

    model: str
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=1_000_000)] | None = None
    seed: Seed | None = None
    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] | None = None
    stream: Literal[False] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None


class ChatBody(Sampling, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Count | None = None


class CompletionBody(Sampling, kw_only=True):
    prompt: str | list[Annotated[int, msgspec.Meta(ge=0)]]


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    method: str
    url: str
    body: dict[str, Any]
