"""The command line against a real server on loopback, each command as a user runs it (click's runner, same process)."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from structlog.testing import capture_logs

from context_daemon.memory_store import MemoryStore
from context_daemon.records import Finish, TokenCommit
from context_daemon.redis_server import free_port
from context_daemon.store import LeaseRequest
from orchestrator.api.server import serve
from orchestrator.cli import main
from orchestrator.jobs.service import JobService
from orchestrator.jobs.validation import ModelLimits
from tests.contract.test_jobs_api import LINES, Fleet
from tests.unit.byte_tokenizer import VOCAB_SIZE, byte_tokenizer


class Server:
    """The API in a thread with an event loop of its own, so that the commands may block."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port('127.0.0.1')}"
        self.store = MemoryStore()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self.run(self._serve())

    async def _serve(self) -> Any:
        jobs = JobService(self.store, byte_tokenizer(), ModelLimits("m", 100, VOCAB_SIZE), {}, time.time)
        return await serve(self.address, jobs, Fleet())

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(20)

    async def answer(self, job_id: str, lines: list[int], ok: bool = True) -> None:
        """Be the worker: finish these lines, in this order."""
        ready = {item.key.line: item for item in await self.store.ready_requests(job_id, 100)}
        for line in lines:
            wanted = LeaseRequest(ready[line].key, ready[line].epoch, "w1", "c")
            (lease,) = await self.store.lease(job_id, 1, [wanted])
            finish = Finish(ok, b'{"line":%d}' % line)
            await self.store.commit([TokenCommit(lease.key, lease.token, 0, (1,), finish=finish)])
        await self.store.finish_job(job_id, 1)

    def close(self) -> None:
        self.run(self._server.stop(grace=None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with capture_logs():  # commands and server share a process here: only the commands may write to stdout
        running = Server()
        yield running
        running.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in LINES))
    return path


def tideover(server: Server | None, *args: object) -> Result:
    env = {"TIDEOVER_ADDRESS": server.address} if server else {}
    return CliRunner().invoke(main, [str(arg) for arg in args], env=env)


def submitted(server: Server, file: Path) -> str:
    result = tideover(server, "submit", file, "--json")
    assert result.exit_code == 0, result.output
    return str(json.loads(result.stdout)["job_id"])


def test_submit_answer_and_fetch_in_the_order_of_the_file(server: Server, file: Path, tmp_path: Path) -> None:
    job_id = submitted(server, file)
    server.run(server.answer(job_id, [3, 1, 2]))
    out = tmp_path / "out.jsonl"
    result = tideover(server, "results", job_id, "-o", out, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["output"] == 3
    assert out.read_bytes() == b'{"line":1}\n{"line":2}\n{"line":3}\n'
    assert tideover(server, "results", job_id).stdout_bytes == out.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch.jsonl", "out.jsonl"]


def test_failed_lines_go_beside_the_output_and_the_exit_code_says_so(
    server: Server, file: Path, tmp_path: Path
) -> None:
    job_id = submitted(server, file)
    server.run(server.answer(job_id, [1, 2]))
    server.run(server.answer(job_id, [3], ok=False))
    result = tideover(server, "results", job_id, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 1
    assert (tmp_path / "out.jsonl.errors.jsonl").read_bytes() == b'{"line":3}\n'


def test_status_json_is_pure(server: Server, file: Path) -> None:
    job_id = submitted(server, file)
    one = json.loads(tideover(server, "status", job_id, "--json").stdout)
    assert (one["job_id"], one["state"], one["total"]) == (job_id, "in_progress", 3)
    assert [job["job_id"] for job in json.loads(tideover(server, "status", "--json").stdout)["jobs"]] == [job_id]
    assert job_id in tideover(server, "status").stdout


def test_watch_ends_with_the_job(server: Server, file: Path) -> None:
    job_id = submitted(server, file)
    server.run(server.answer(job_id, [1, 2, 3]))
    result = tideover(server, "watch", job_id, "--json")
    updates = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 0 and updates[-1]["job"]["state"] == "completed"


def test_cancel(server: Server, file: Path) -> None:
    job_id = submitted(server, file)
    assert json.loads(tideover(server, "cancel", job_id, "--json").stdout)["state"] == "cancelling"


def test_a_bad_file_lists_its_lines_and_is_usage(server: Server, file: Path) -> None:
    file.write_text(file.read_text() + "\n{nope")
    result = tideover(server, "submit", file, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "line 4" in result.stderr and "not JSON" in result.stderr


@pytest.mark.parametrize("content", [None, b""])
def test_a_missing_or_empty_file_is_usage(server: Server, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "none.jsonl"
    if content is not None:
        path.write_bytes(content)
    result = tideover(server, "submit", path)
    assert result.exit_code == 2
    assert ("no requests" if content is not None else "does not exist") in result.stderr


def test_unknown_names_are_usage(server: Server) -> None:
    for args in (["status", "nope"], ["results", "nope"], ["cancel", "nope"], ["preempt", "nope", "--deadline", "5"]):
        result = tideover(server, *args)
        assert result.exit_code == 2 and "nope" in result.stderr, args


def test_workers_and_faults(server: Server) -> None:
    (worker,) = json.loads(tideover(server, "workers", "--json").stdout)["workers"]
    assert (worker["worker_id"], worker["pages_total"]) == ("w1", 50)
    assert json.loads(tideover(server, "preempt", "w1", "--deadline", "5", "--json").stdout)["node_id"] == "n1"
    refused = tideover(server, "kill", "w1")
    assert refused.exit_code == 2 and "no such cloud" in refused.stderr


def test_no_cluster_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("TIDEOVER_ADDRESS", raising=False)
    result = tideover(None, "status")
    assert result.exit_code != 0 and "tideover up" in result.stderr
    gone = CliRunner().invoke(main, ["status", "--address", f"127.0.0.1:{free_port('127.0.0.1')}"])
    assert gone.exit_code == 1 and "tideover up" in gone.stderr


def test_version() -> None:
    assert json.loads(tideover(None, "version", "--json").stdout)["version"]
