"""What docs/api.md shows is run: lines through the validator, programs and commands against a real server."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from context_daemon import lines
from context_daemon.records import Endpoint, JobState, RequestKey, RequestSpec, RequestState, SamplingParams
from orchestrator.cli import main
from orchestrator.jobs import batchfile, schema, service, validation
from orchestrator.jobs.batchfile import Line, LineSplitter
from orchestrator.jobs.validation import ModelLimits, Validator
from protos import admin_pb2, jobs_pb2
from tests.contract.test_client_restarts import Api
from tests.unit.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tests.unit.test_cli import Server, tideover
from worker.result_lines import result_line

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "api.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    found = [text for name, text in BLOCKS if name == language]
    assert found, f"docs/api.md has no {language} block"
    return found


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {name for name, _ in BLOCKS} == {"python", "jsonl", "json", "console"}
    assert TEXT.count("```") == 2 * len(BLOCKS)


@pytest.mark.parametrize("block", blocks("jsonl"))
def test_every_line_shown_is_accepted(block: str) -> None:
    checker = Validator(byte_tokenizer(), ModelLimits("MODEL", 400, VOCAB_SIZE), lambda: 1)
    splitter = LineSplitter()
    shown = [*splitter.feed(block.encode()), *splitter.end()]
    results = [checker.check(line) for line in shown if isinstance(line, Line)]
    assert len(results) == block.count("\n") and all(isinstance(result, RequestSpec) for result in results), results


def test_every_parameter_and_code_is_documented() -> None:
    fields = {*schema.ChatBody.__struct_fields__, *schema.CompletionBody.__struct_fields__, *schema.UNSUPPORTED}
    assert sorted(name for name in fields if f"`{name}`" not in TEXT) == []
    sources = "".join(Path(str(module.__file__)).read_text() for module in (validation, batchfile, service))
    codes = set(re.findall(r'(?:_Refused|LineError)\(\s*(?:[\w.]+(?: \+ 1)?, )?"(\w+)"', sources))
    assert {"empty_file", "line_too_long", "invalid_json", "unsupported_content"} <= codes
    assert sorted(code for code in codes if f"`{code}`" not in TEXT) == []


def test_every_call_state_and_command_is_documented() -> None:
    services = [*jobs_pb2.DESCRIPTOR.services_by_name.values(), *admin_pb2.DESCRIPTOR.services_by_name.values()]
    calls = {method.name for one in services for method in one.methods}
    assert sorted(name for name in calls if f"\n| {name} | " not in TEXT) == []
    states = [state.value for kind in (JobState, RequestState) for state in kind]
    assert [state for state in states if f"`{state}`" not in TEXT] == []
    shown = {shlex.split(line)[1] for block in blocks("console") for line in block.splitlines()}
    assert shown == main.commands.keys() - {"up", "down", "demo", "bench", "kill"}


def test_limits_are_as_written() -> None:
    assert f"{batchfile.MAX_LINE_BYTES >> 20} MiB" in TEXT and f"up to {validation.MAX_STOP} |" in TEXT
    assert f"| {service.MAX_ERRORS}, and" in TEXT


def shape(value: Any) -> Any:
    """Names in their order, and kinds of values."""
    if isinstance(value, dict):
        return [(name, shape(item)) for name, item in value.items()]
    return [shape(item) for item in value] if isinstance(value, list) else type(value).__name__


def test_result_lines_have_the_shapes_shown() -> None:
    chat, completion, error = [json.loads(block) for block in blocks("json")]
    for shown, endpoint in ((chat, Endpoint.CHAT), (completion, Endpoint.COMPLETIONS)):
        spec = RequestSpec(1, "a", endpoint, (1, 2), SamplingParams(1, 5))
        made = result_line(
            RequestKey("batch_1", 1), spec, text="x", completion_tokens=1, finish_reason="stop", model="m", created=1,
            system_fingerprint="fp_1", exact=True,
        )  # fmt: skip
        assert shape(shown) == shape(json.loads(made))
    assert chat["id"] == lines.line_id(RequestKey("batch_1", 1))
    assert error == json.loads(lines.cancelled_line(RequestKey("batch_1", 2), "b"))


async def test_the_programs_shown_run(tmp_path: Path) -> None:
    api = Api()
    await api.start()
    (tmp_path / "batch.jsonl").write_text(blocks("jsonl")[0].replace("MODEL", "m").splitlines()[0])
    program = "\n".join([f"ADDRESS = {api.address!r}", *blocks("python")])
    (tmp_path / "program.py").write_text(f"import sys\nsys.path[:0] = [{str(ROOT)!r}]\n{program}")
    run = asyncio.create_task(
        asyncio.to_thread(
            subprocess.run, [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
    )
    while not (jobs := await api.store.active_jobs()):
        assert not run.done(), run.result().stderr
        await asyncio.sleep(0.05)
    await api.finish(jobs[0].job_id, 1)
    done = await run
    assert done.returncode == 0, done
    assert done.stdout.startswith("0 1 ") and "1 1 " in done.stdout
    assert "StatusCode.INVALID_ARGUMENT [(1, 'method', 'missing_required_parameter'" in done.stdout
    await api.stop()


@pytest.fixture
def server() -> Iterator[Server]:
    with capture_logs():
        running = Server()
        yield running
        running.close()


def test_the_commands_shown_run(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batch.jsonl").write_text(blocks("jsonl")[0].replace("MODEL", "m").splitlines()[0])
    job_id = "JOB"
    for line in "".join(blocks("console")).splitlines():
        result = tideover(server, *shlex.split(line.replace("JOB", job_id))[1:])
        assert result.exit_code == 0, (line, result.output)
        printed = [json.loads(row) for row in result.stdout.splitlines()]
        assert printed and (len(printed) == 1 or " watch " in line)
        if job_id == "JOB":  # the first line submits it
            job_id = str(printed[0]["job_id"])
            server.run(server.answer(job_id, [1]))
    assert (tmp_path / "answers.jsonl").exists()
