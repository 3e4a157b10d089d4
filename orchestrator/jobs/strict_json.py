"""JSON that means one thing: what parsers disagree about is refused, in words for people. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

_TOO_DEEP = "not JSON that can be read: nested too deeply"
_PLACE = re.compile(r" - at `[^`]*`$")  # msgspec's place in untyped data: dots and brackets only
_BYTE = re.compile(r"\(byte (\d+)\)$")
_ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_NO_NUMBER = (b"NaN", b"Infinity", b"-Infinity", b"nan", b"inf")


class NotStrict(Exception):
    """The bytes are not JSON of one meaning; the message says why."""


def decode(data: bytes) -> Any:
    """UTF-8 JSON by RFC 8259: no NaN, no number out of range, no lone surrogate, and no name twice in an object.

    Raises NotStrict. msgspec sees to all but the last: of a repeated name it would keep the last value in silence.
    """
    try:
        value = msgspec.json.decode(data)
        json.loads(data, object_pairs_hook=_names_once)
    except RecursionError as error:
        raise NotStrict(_TOO_DEEP) from error
    except (ValueError, UnicodeError) as error:  # msgspec's DecodeError is a ValueError
        raise NotStrict(_why(str(error), data)) from error
    return value


def _names_once(pairs: Sequence[tuple[str, Any]]) -> None:
    """Only the names are looked at, so nothing is built."""
    if len({name for name, _ in pairs}) == len(pairs):
        return
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise NotStrict(f"{name!r} is given twice in one object: which one is meant is not said")
        seen.add(name)


def _why(message: str, data: bytes) -> str:
    message = f"not JSON: {_PLACE.sub('', message)}"
    if lone := _lone_surrogate(data):
        return f"not JSON: {lone} is half a surrogate pair, no character"
    at = _BYTE.search(message)
    if at is None:
        return message
    rest = data[int(at[1]) :]
    if rest.startswith(_NO_NUMBER) or data[max(0, int(at[1]) - 1) :].startswith(_NO_NUMBER):
        return f"{message}: NaN and Infinity are no JSON numbers"
    if b"" < rest[:1] < b" ":
        return f"{message}: a control character in a string must be escaped"
    return message


def _lone_surrogate(data: bytes) -> str:
    """The first escape that is half a pair, as it is written; "" if there is none."""
    high: re.Match[bytes] | None = None
    for escape in _ESCAPE.finditer(data):
        unit = int(escape[1], 16) if escape[1] else 0
        pairs = high is not None and high.end() == escape.start() and 0xDC00 <= unit < 0xE000
        if high is not None and not pairs:
            return high[0].decode()
        if 0xDC00 <= unit < 0xE000 and not pairs:
            return escape[0].decode()
        high = escape if 0xD800 <= unit < 0xDC00 else None
    return high[0].decode() if high else ""
