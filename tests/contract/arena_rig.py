"""A daemon over servers of its own, its metrics, and its clients."""

from __future__ import annotations

import re
import signal
import urllib.request
from pathlib import Path

import redis
from daemon_rig import Daemon

from context_daemon.client import ContextClient
from context_daemon.redis_server import EmbeddedServers, free_port


class Node:
    """A daemon over servers of its own, its metrics, and its clients."""

    def __init__(self, folder: Path) -> None:
        self.servers = EmbeddedServers(folder).start()
        self._metrics = free_port()
        self._clients: list[ContextClient] = []
        self._daemons: list[Daemon] = []

    def start(self, *flags: str) -> ContextClient:
        self.daemon = Daemon(self.servers, "node-1", "--metrics-port", str(self._metrics), *flags).start()
        self._daemons.append(self.daemon)
        return self.client()

    def client(self) -> ContextClient:
        self._clients.append(ContextClient(f"127.0.0.1:{self.daemon.port}"))
        return self._clients[-1]

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics", timeout=10) as answer:
            found = re.search(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def stored_bytes(self) -> int:
        """What of pages is in the KV server."""
        with redis.Redis.from_url(self.servers.kv.url) as server:
            return sum(server.strlen(name) for name in server.keys("kv:*:job:*"))

    def descriptors(self) -> int:
        assert self.daemon.process is not None
        return len(list(Path(f"/proc/{self.daemon.process.pid}/fd").iterdir()))

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        for daemon in self._daemons:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.end(signal.SIGKILL)
        self.servers.stop()
