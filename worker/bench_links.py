"""Links as slow as a benchmark wants them: TCP relays in front of a daemon's ports and of a KV server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_PIECE = 1 << 16
_BUFFER = 1 << 17  # what the far side sends ahead while the relay waits

Address = tuple[str, int]


class SlowLink:
    """Relays connections at `near` to `far`. What comes back passes at `bytes_per_s`, over all connections together;
    questions pass as they are. Settable at any moment; 0 is no limit."""

    def __init__(self, near: Address, far: Address, bytes_per_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self._far = far
        self._free_at = 0.0  # monotonic: when the link has carried all that it was given
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(near)
        self.near: Address = self._listener.getsockname()[:2]
        _in_background(self._accept)

    def close(self) -> None:
        with self._lock:
            ends = [self._listener, *self._open]
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                reader, _ = self._listener.accept()
                _in_background(lambda reader=reader: self._relay(reader))  # type: ignore[misc]

    def _relay(self, reader: socket.socket) -> None:
        sender = socket.socket()
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        try:
            sender.connect(self._far)
        except OSError:  # what it stands for is gone: so is the connection
            reader.close()
            return
        for end in (reader, sender):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open |= {reader, sender}
        _in_background(lambda: self._pump(reader, sender, paced=False))
        self._pump(sender, reader, paced=True)

    def _pump(self, source: socket.socket, target: socket.socket, *, paced: bool) -> None:
        with suppress(OSError):  # either end may go at any moment
            while data := source.recv(_PIECE):
                if paced:
                    self._pace(len(data))
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pace(self, size: int) -> None:
        with self._lock:
            if not self.bytes_per_s:
                return
            self._free_at = max(self._free_at, time.monotonic()) + size / self.bytes_per_s
            free_at = self._free_at
        time.sleep(max(0.0, free_at - time.monotonic()))


def _in_background(target: Callable[[], None]) -> None:
    threading.Thread(target=target, daemon=True).start()
