"""Raw bandwidths of the media that KV comes by: what a restore is held against."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable


def memcpy_bandwidth(size: int = 128 << 20) -> float:
    """Bytes/s of a copy in memory; the best of three, as below."""
    source, target = bytearray(size), bytearray(size)

    def once() -> float:
        started = time.perf_counter()
        target[:] = source
        return size / (time.perf_counter() - started)

    return _best(once)


def loopback_bandwidth(block: int, size: int = 256 << 20) -> float:
    """Bytes/s from one thread to another over TCP, in blocks of a page."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            with socket.create_connection(server.getsockname()) as sender:
                data = bytes(block)
                for _ in range(size // block):
                    sender.sendall(data)

        def once() -> float:
            thread = threading.Thread(target=send)
            thread.start()
            receiver, _ = server.accept()
            buffer, left = memoryview(bytearray(block)), size // block * block
            started = time.perf_counter()
            with receiver:
                while left:
                    left -= receiver.recv_into(buffer[: min(block, left)])
            seconds = time.perf_counter() - started
            thread.join()
            return size / seconds

        return _best(once)


def _best(measure: Callable[[], float], times: int = 3) -> float:
    return max(measure() for _ in range(times))
