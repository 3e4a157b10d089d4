"""The append-only file of a durable server: what a crash of its host would have left of it."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from context_daemon.redis_server import ServerProcess


def newest(server: ServerProcess) -> Path:
    """The part that is being appended to."""
    parts = list((server.directory / "appendonlydir").glob("*.incr.aof"))
    return max(parts, key=lambda part: part.stat().st_mtime_ns)


def size(server: ServerProcess) -> int:
    return newest(server).stat().st_size


def write_at_once(server: ServerProcess) -> None:
    """While an fsync is under way, `everysec` puts off writes that it has acknowledged, and a kill -9 loses them."""
    configure(server, "appendfsync", "no")


def configure(server: ServerProcess, *setting: str) -> None:
    with socket.create_connection((server.host, server.port), timeout=5) as connection:
        connection.sendall(f"CONFIG SET {' '.join(setting)}\r\n".encode())
        answer = connection.recv(256)
    if not answer.startswith(b"+OK"):
        raise OSError(f"CONFIG SET {setting}: {answer!r}")


def lose(server: ServerProcess, keep: int) -> None:
    """kill -9, cut the file to `keep` bytes (also in the middle of a command), start again."""
    server.kill()
    with newest(server).open("r+b") as part:
        part.truncate(keep)
    server.start()


def lose_all(server: ServerProcess) -> None:
    server.kill()
    shutil.rmtree(server.directory / "appendonlydir")
    server.start()
