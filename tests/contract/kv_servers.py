"""Several real KV servers on free loopback ports."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from context_daemon.redis_server import ServerProcess, free_port


class KVServers:
    """A context manager that leaves no process behind. Distinct ports: all are drawn before one is used again."""

    def __init__(self, directory: Path, count: int = 3, maxmemory: int = 256 << 20) -> None:
        ports: set[int] = set()
        while len(ports) < count:
            ports.add(free_port())
        self._servers = {
            f"127.0.0.1:{port}": ServerProcess("kv", directory / str(port), port, maxmemory) for port in sorted(ports)
        }

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers.values()]

    def __getitem__(self, name: str) -> ServerProcess:
        """The server that a KVCluster calls `name`."""
        return self._servers[name]

    def __enter__(self) -> Self:
        try:
            for server in self._servers.values():
                server.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self._servers.values():
            server.kill()
