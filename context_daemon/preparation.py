"""What a pre-copy is asked for in: records between a draining worker, its daemon and the next owner's."""

from __future__ import annotations

import msgspec

from context_daemon.page_records import Shape
from context_daemon.records import FencingToken, RequestKey


class Wanted(msgspec.Struct, frozen=True):
    """A request under its owner's token; its KV of positions `[0, positions)` is to be at the target."""

    key: RequestKey
    token: FencingToken
    positions: int


class Preparation(msgspec.Struct, frozen=True):
    """`target` is the address of the next owners' context daemon. With `last` their cut-over follows at once."""

    target: str
    shape: Shape
    wanted: tuple[Wanted, ...]
    last: bool = False
