"""Error lines that the platform itself writes, in the shape of OpenAI's batch error file. Pure."""

from __future__ import annotations

import msgspec

from context_daemon.records import RequestKey

CANCELLED_CODE = "batch_cancelled"
CANCELLED_MESSAGE = "This request could not be executed because the batch was cancelled."


def line_id(key: RequestKey) -> str:
    """The `id` of a result line: the same however often the request was interrupted."""
    return f"batch_req_{key.job_id}_{key.line}"


def error_line(key: RequestKey, custom_id: str, code: str, message: str) -> bytes:
    return msgspec.json.encode(
        {"id": line_id(key), "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}
    )


def cancelled_line(key: RequestKey, custom_id: str) -> bytes:
    return error_line(key, custom_id, CANCELLED_CODE, CANCELLED_MESSAGE)
