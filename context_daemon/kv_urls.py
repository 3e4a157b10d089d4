"""The addresses of a KV cluster's servers, checked before anything connects. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import SplitResult, parse_qsl, urlsplit

_DEFAULT_PORT = 6379
_CREDENTIALS = re.compile(r"//.*@")


def server_names(urls: Sequence[str]) -> dict[str, str]:
    """`host:port` (or `unix:/path`) -> URL. A name leaves out user, password and database number, so that changing them
    moves no page; it is as spelled: give every daemon the same spelling, not here `localhost` and there an address.

    Raises ValueError, without the password, for an address that is no server's and for a server that is named twice: two
    databases of one server would share its memory and its fate.
    """
    names: dict[str, str] = {}
    for url in urls:
        name = _server_name(url)
        if name in names:
            raise ValueError(f"KV server {name} is named twice: {_shown(names[name])} and {_shown(url)}")
        names[name] = url
    if not names:
        raise ValueError("a KV cluster needs the URL of at least one server")
    return names


def _server_name(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = _DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:  # its text may quote a password that was not percent-encoded
        raise ValueError(
            f"KV server URL {_shown(url)}: the host is malformed, or the port no number up to 65535 "
            "(in a password, / ? # and @ are written %2F %3F %23 and %40)"
        ) from None
    fault = _fault(parts, port)
    if fault:
        raise ValueError(f"KV server URL {_shown(url)}: {fault}")
    return f"unix:{parts.path}" if parts.scheme == "unix" else f"{parts.hostname}:{port}"


def _fault(parts: SplitResult, port: int) -> str:
    if parts.scheme not in ("redis", "rediss", "unix"):
        return "it must start with redis://, rediss:// or unix://"
    options = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if not name.startswith("ssl_")]
    if options:
        return f"the option {options[0]} is not known here; only those of TLS (ssl_...) are"
    if parts.scheme == "unix":
        return "" if parts.path else "the path of the socket is missing"
    if not parts.hostname or port == 0:
        return "the host is missing" if not parts.hostname else "port 0 is no server's"
    return "" if re.fullmatch(r"/?\d*", parts.path) else f"database {parts.path[1:]!r} is not a number"


def _shown(url: str) -> str:
    """Without what may be secret: user, password and options."""
    return repr(_CREDENTIALS.sub("//", url).partition("?")[0])
