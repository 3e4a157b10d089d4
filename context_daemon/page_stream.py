"""Pages over a bare TCP connection: the framing that both ends of a peer transfer share.

gRPC for Python moves well under 1 GB/s and copies each message several times; here a page goes from one arena's memory into
the other's by `sendall` and `recv_into`. The connection opens with a request, which carries the token that the daemon's gRPC
answer gave: whoever may call the daemon may read its pages, nobody else.

A request for a probe is answered with that many zeros and an end, whatever pages there are.

    request = u32 length | msgpack StreamRequest
    page    = u64 page | u64 epoch | u32 slots | u32 bytes | framed slots
    end     = a page header without bytes; its `page` says why
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum

import msgspec

from context_daemon.link_probe import Mark
from context_daemon.records import RequestKey

HEADER = struct.Struct("<QQII")
LENGTH = struct.Struct("<I")
MAX_REQUEST = 4096
_CHUNK = 256 << 10  # of a probe, to one call


class End(IntEnum):
    DONE = 0
    BUSY = 1
    REFUSED = 2


class StreamRequest(msgspec.Struct, frozen=True):
    """Pages `[first, until)` of a request that the sender holds without a hole."""

    token: str
    key: RequestKey
    layout: str
    slot_bytes: int
    page_size: int
    first: int
    until: int
    probe: int = 0  # bytes that are to tell how fast the link is


class PageHead(msgspec.Struct, frozen=True):
    page: int
    epoch: int
    slots: int


def pack_request(request: StreamRequest) -> bytes:
    body = msgspec.msgpack.encode(request)
    return LENGTH.pack(len(body)) + body


def pack_end(end: End) -> bytes:
    return HEADER.pack(end, 0, 0, 0)


def send_pages(connection: socket.socket, pages: Sequence[tuple[PageHead, memoryview]]) -> None:
    """Blocking; returns when the kernel has taken all of it. Raises OSError, and TimeoutError when it took nothing for the
    connection's timeout: unlike with `sendall`, a page may take longer than that as long as it moves."""
    for head, view in pages:
        _drain(connection, memoryview(HEADER.pack(head.page, head.epoch, head.slots, len(view))))
        _drain(connection, view)


def send_probe(connection: socket.socket, size: int) -> None:
    """Blocking. Whoever has heard enough hangs up: that is no error."""
    zeros = memoryview(bytes(min(size, _CHUNK)))
    with suppress(ConnectionError):
        for start in range(0, size, _CHUNK):
            _drain(connection, zeros[: size - start])
        connection.sendall(pack_end(End.DONE))


def receive_probe(connection: socket.socket, size: int, until_s: float) -> list[Mark]:
    """Blocking: how far it was when, for at most about `until_s` once it began. Raises OSError when the connection breaks,
    ValueError when it was refused."""
    room, marks, started = memoryview(bytearray(_CHUNK)), list[Mark](), time.perf_counter()
    came = 0
    while came < size and (not marks or marks[-1][1] - marks[0][1] < until_s):
        count = connection.recv_into(room[: size - came])
        if count == 0:
            raise ConnectionError("the peer closed the connection in the middle of a probe")
        if not came and count <= HEADER.size and any(room[:count]):
            raise ValueError(f"no probe: {End(room[0]).name}")
        came += count
        marks.append((came, time.perf_counter() - started))
    return marks


def receive_pages(connection: socket.socket, room: Sequence[memoryview]) -> tuple[list[PageHead], End | None]:
    """Blocking: one page into each of `room`, or fewer when the sender has no more. Raises OSError when the connection
    breaks or stalls and ValueError for what is no page; those that came whole before are lost then, and asked for again."""
    heads: list[PageHead] = []
    header = memoryview(bytearray(HEADER.size))
    for view in room:
        _fill(connection, header)
        page, epoch, slots, size = HEADER.unpack(header)
        if size == 0:
            return heads, End(page)
        if size > len(view):
            raise ValueError(f"page {page} has {size} bytes, more than the {len(view)} of this layout")
        _fill(connection, view[:size])
        heads.append(PageHead(page, epoch, slots))
    return heads, None


def _drain(connection: socket.socket, view: memoryview) -> None:
    while view:
        view = view[connection.send(view) :]


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("the peer closed the connection in the middle of a page")
        view = view[count:]
