"""Good result lines, in the shape of OpenAI's batch output. Pure: same inputs, same bytes."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from context_daemon.lines import line_id
from context_daemon.records import Endpoint, RequestKey, RequestSpec


def _identity(prefix: str, key: RequestKey) -> str:
    return f"{prefix}{hashlib.sha256(str(key).encode()).hexdigest()[:24]}"


def result_line(
    key: RequestKey,
    spec: RequestSpec,
    *,
    text: str,
    completion_tokens: int,
    finish_reason: str,
    model: str,
    created: int,
    system_fingerprint: str,
    exact: bool,
) -> bytes:
    """A good line. `exact` is False if the request crossed numerics classes on its way."""
    prompt_tokens = len(spec.prompt_token_ids)
    chat = spec.endpoint is Endpoint.CHAT
    choice: dict[str, Any] = {"index": key.choice}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    choice |= {"logprobs": None, "finish_reason": finish_reason}
    body = {
        "id": _identity("chatcmpl-" if chat else "cmpl-", key),
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
        "system_fingerprint": system_fingerprint,
        "tideover": {"exact": exact},
    }
    response = {"status_code": 200, "request_id": _identity("req_", key), "body": body}
    return msgspec.json.encode({"id": line_id(key), "custom_id": spec.custom_id, "response": response, "error": None})
