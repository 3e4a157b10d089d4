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
from orchestrator.context_view import ContextView
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
        return await serve(self.address, jobs, Fleet(), ContextView(self.store))

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
    assert result.exit_code == 2 and "tideover up" in result.stderr
    gone = CliRunner().invoke(main, ["status", "--json", "--address", f"127.0.0.1:{free_port('127.0.0.1')}"])
    assert (gone.exit_code, gone.stdout) == (2, "") and "tideover up" in gone.stderr
    nonsense = CliRunner().invoke(main, ["status", "--address", "here"])
    assert nonsense.exit_code == 2 and "host:port" in nonsense.stderr


def test_results_of_a_running_job_are_what_is_there(server: Server, file: Path, tmp_path: Path) -> None:
    job_id = submitted(server, file)
    nothing = tideover(server, "results", job_id)
    assert (nothing.exit_code, nothing.stdout) == (0, "") and "0 answers" in nothing.stderr
    server.run(server.answer(job_id, [2]))
    server.run(server.answer(job_id, [1], ok=False))
    part = tideover(server, "results", job_id, "-o", tmp_path / "part.jsonl")
    assert part.exit_code == 0, "a line that failed does not make a job that is not done fail"
    assert (tmp_path / "part.jsonl").read_bytes() == b'{"line":2}\n'
    server.run(server.answer(job_id, [3]))
    assert tideover(server, "results", job_id).exit_code == 1


def test_results_that_cannot_be_written_leave_nothing(server: Server, file: Path, tmp_path: Path) -> None:
    job_id = submitted(server, file)
    for target, words in ((tmp_path / "no" / "out.jsonl", "No such file"), (Path("/dev/full/x"), "Not a directory")):
        result = tideover(server, "results", job_id, "-o", target)
        assert result.exit_code == 2 and words in result.stderr
    folder = tmp_path / "taken"
    (folder / "out.jsonl").mkdir(parents=True)
    assert tideover(server, "results", job_id, "-o", folder / "out.jsonl").exit_code == 2
    assert [path.name for path in folder.iterdir()] == ["out.jsonl"]


# Each command that takes --json, as it is used; {job} is a job that is done. up, down, demo and bench start a cluster or
# engines of their own and are run by the end-to-end tests.
ELSEWHERE = {"up", "down", "demo"}
JSON_COMMANDS: list[tuple[list[str], set[str]]] = [
    (["version"], {"version"}),
    (["submit", "{file}"], {"job_id", "request_id", "state", "total", "completed", "failed", "metadata"}),
    (["submit", "{file}", "--request-id", "done", "--watch", "--metadata", "a=1"], {"job_id", "state", "completed"}),
    (["status"], {"jobs"}),
    (["status", "{job}"], {"job_id", "state", "interruptions"}),
    (["watch", "{job}"], {"job", "workers", "events", "tokens_per_s", "eta_s"}),
    (["results", "{job}"], {"job_id", "state", "total", "output", "errors", "lines"}),
    (["results", "{job}", "-o", "{out}"], {"job_id", "state", "total", "output", "errors"}),
    (["cancel", "{job}"], {"job_id", "state"}),
    (["workers"], {"workers"}),
    (["preempt", "w1", "--deadline", "5"], {"worker_id", "node_id"}),
    (["kill", "w1"], {"worker_id", "node_id"}),
]


def test_every_command_with_json_is_covered() -> None:
    takes = {name for name, command in main.commands.items() if any(p.name == "as_json" for p in command.params)}
    assert takes == {args[0] for args, _ in JSON_COMMANDS} | ELSEWHERE


@pytest.mark.parametrize(("args", "fields"), JSON_COMMANDS, ids=lambda value: " ".join(value))
def test_json_is_one_document_and_nothing_else(
    server: Server, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], fields: set[str]
) -> None:
    async def kill(self: Fleet, worker_id: str) -> str:
        return "n1"

    monkeypatch.setattr(Fleet, "kill", kill)
    job_id = str(json.loads(tideover(server, "submit", file, "--json", "--request-id", "done").stdout)["job_id"])
    server.run(server.answer(job_id, [3, 1, 2]))
    names = {"{job}": job_id, "{file}": str(file), "{out}": str(tmp_path / "out.jsonl")}
    result = tideover(server, *(names.get(arg, arg) for arg in args), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert fields <= found.keys()
    _no_number_in_quotes(found)


def _no_number_in_quotes(value: Any) -> None:
    """protobuf's own JSON writes 64-bit integers as strings."""
    if isinstance(value, dict):
        for name, item in value.items():
            assert name == "a" or not (isinstance(item, str) and item.isdecimal()), (name, item)
            _no_number_in_quotes(item)
    elif isinstance(value, list):
        for item in value:
            _no_number_in_quotes(item)


def test_results_in_a_document_are_ordered_and_whole(server: Server, file: Path) -> None:
    job_id = submitted(server, file)
    server.run(server.answer(job_id, [3, 1]))
    found = json.loads(tideover(server, "results", job_id, "--json").stdout)
    assert found["lines"] == [{"line": 1}, {"line": 3}]
    assert (found["state"], found["total"], found["output"], found["errors"]) == ("in_progress", 3, 2, 0)


def test_errors_with_json_leave_stdout_empty(server: Server) -> None:
    for args in (["status", "nope"], ["results", "nope"], ["watch", "nope"], ["cancel", "nope"], ["kill", "nope"]):
        result = tideover(server, *args, "--json")
        assert (result.exit_code, result.stdout) == (2, "") and "error: " in result.stderr, args


def test_progress_goes_to_stderr(server: Server, file: Path) -> None:
    tideover(server, "submit", file, "--request-id", "done")
    job_id = json.loads(tideover(server, "status", "--json").stdout)["jobs"][0]["job_id"]
    server.run(server.answer(job_id, [1, 2, 3]))
    result = tideover(server, "submit", file, "--request-id", "done", "--watch", "--json")
    assert json.loads(result.stdout)["completed"] == 3
    assert "3/3 done" in result.stderr and "w1 ready" in result.stderr


def test_version() -> None:
    assert json.loads(tideover(None, "version", "--json").stdout)["version"]
