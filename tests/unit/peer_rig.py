"""A peer on loopback that does as it is told, and a landing that counts what is out."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import msgspec

from context_daemon.arena import Arena, slab_bytes
from context_daemon.kv_slots import frame, identity
from context_daemon.landing import Keep, Landing, Spot
from context_daemon.page_records import Shape
from context_daemon.page_stream import HEADER, LENGTH, End, PageHead, StreamRequest, pack_end
from context_daemon.pieces import Piece
from context_daemon.records import RequestKey
from context_daemon.slabs import Slabs
from protos import context_pb2 as pb
from protos.context_pb2_grpc import ContextServiceServicer, add_ContextServiceServicer_to_server

KEY, SHAPE, PAGES = RequestKey("job", 1), Shape("lay", 64, 4), 10
Script = Callable[[socket.socket, StreamRequest], None]


def raw(page: int, slots: int = 4) -> bytes:
    return b"".join(bytes([page * 4 + slot]) * 64 for slot in range(slots))


def page(number: int, *, claims: int | None = None, epoch: int = 1, sealed: int = 1, slots: int = 4) -> bytes:
    """As it goes over the wire, or with something wrong in it."""
    body = frame(identity(KEY, sealed, "lay"), number * 4, raw(number, slots), 64)
    return HEADER.pack(number, epoch, slots if claims is None else claims, len(body)) + body


def sends(*parts: bytes, end: bytes = b"") -> Script:
    return lambda connection, _: connection.sendall(b"".join(parts) + end)


def as_asked(connection: socket.socket, request: StreamRequest) -> None:
    connection.sendall(b"".join(page(number) for number in range(request.first, request.until)) + pack_end(End.DONE))


class Peer(ContextServiceServicer):
    """Each stream is answered by the next of `scripts`, the last one for ever."""

    def __init__(self) -> None:
        self.scripts: list[Script] = [as_asked]
        self.asked: list[StreamRequest] = []
        self.positions: list[int] | None = None
        self.over = threading.Event()  # for scripts that wait
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.door = self._listener.getsockname()[1]
        self._grpc = grpc.server(ThreadPoolExecutor(1))
        add_ContextServiceServicer_to_server(self, self._grpc)
        self.address = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._grpc.start()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def DescribePages(self, request: pb.DescribePagesRequest, context: Any) -> pb.DescribePagesResponse:
        positions = [PAGES * 4] * len(request.keys) if self.positions is None else self.positions
        return pb.DescribePagesResponse(positions=positions, port=self.door, token="token")

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
                self._threads.append(threading.Thread(target=self._serve, args=(connection, script)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket, script: Script) -> None:
        with connection, suppress(OSError):
            (length,) = LENGTH.unpack(connection.recv(LENGTH.size, socket.MSG_WAITALL))
            request = msgspec.msgpack.decode(connection.recv(length, socket.MSG_WAITALL), type=StreamRequest)
            self.asked.append(request)
            script(connection, request)

    def hangs(self, *parts: bytes) -> Script:
        def script(connection: socket.socket, request: StreamRequest) -> None:
            connection.sendall(b"".join(parts))
            self.over.wait(30)

        return script

    def close(self) -> None:
        self.over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
        self._grpc.stop(None).wait(10)


class CountingLanding(Landing):
    """Knows which spots are out, and that nobody receives into one that comes back."""

    def __init__(self, room: bool = True) -> None:
        self.arena = Arena(1 << 20)
        self.slabs = Slabs(1 << 20, slab_bytes(1 << 20))
        super().__init__(self.arena, self.slabs)
        if not room:
            self.slabs.take(1 << 16, 1 << 20)
        self.before = self.slabs.used_bytes
        self.out: dict[int, Spot] = {}
        self.ends: list[Callable[[], None]] = []
        self.taken = 0
        self.receiving: set[int] = set()  # addresses, as it were: ids of the views that threads write into

    def take(self, shape: Shape, count: int) -> list[Spot]:
        spots = super().take(shape, count)
        self.taken += len(spots)
        self.out |= {id(spot): spot for spot in spots}
        return spots

    def give(self, spot: Spot) -> None:
        assert self.out.pop(id(spot)) is spot, "given back twice"
        assert id(spot.view) not in self.receiving, "given back while a thread writes into it"
        super().give(spot)

    def landed(self, spot: Spot, shape: Shape, head: PageHead, slots: int, source: str, keep: Keep) -> Piece:
        assert self.out.pop(id(spot)) is spot, "landed twice"
        return super().landed(spot, shape, head, slots, source, keep)

    def bytes_of(self, piece: Piece) -> bytes:
        size = piece.slots * SHAPE.row_bytes
        framed = piece.data or bytes(self.arena.view[piece.block : piece.block + size])
        assert len(framed) == size
        return b"".join(framed[at : at + 64] for at in range(0, size, SHAPE.row_bytes))

    def settled(self) -> bool:
        """After the reader's end: nothing is out, nothing was lost."""
        for end in self.ends:
            end()
        self.ends.clear()
        return not self.out and self.slabs.used_bytes == self.before
