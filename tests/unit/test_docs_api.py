"""What docs/api.md shows is run: its lines pass the validator, its program runs against a real server."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from context_daemon.records import RequestSpec
from orchestrator.jobs import schema, validation
from orchestrator.jobs.batchfile import Line, LineSplitter
from orchestrator.jobs.validation import ModelLimits, Validator
from tests.contract.test_client_restarts import Api
from tests.unit.byte_tokenizer import VOCAB_SIZE, byte_tokenizer

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None, f"docs/api.md has no {language} block"
    return found[1]


def test_every_line_shown_is_accepted() -> None:
    checker = Validator(byte_tokenizer(), ModelLimits("MODEL", 400, VOCAB_SIZE), lambda: 1)
    splitter = LineSplitter()
    lines = [*splitter.feed(block("jsonl").encode()), *splitter.end()]
    results = [checker.check(line) for line in lines if isinstance(line, Line)]
    assert len(results) == 3 and all(isinstance(result, RequestSpec) for result in results), results


def test_every_parameter_and_code_is_documented() -> None:
    fields = {*schema.ChatBody.__struct_fields__, *schema.CompletionBody.__struct_fields__}
    assert [name for name in fields if f"`{name}`" not in TEXT and f'"{name}"' not in TEXT] == []
    code = Path(validation.__file__).read_text()
    assert [name for name in re.findall(r'_Refused\(\s*"(\w+)"', code) if f"`{name}`" not in TEXT] == []


async def test_the_program_shown_runs(tmp_path: Path) -> None:
    api = Api()
    await api.start()
    (tmp_path / "batch.jsonl").write_text(block("jsonl").replace("MODEL", "m").splitlines()[0])
    program = f"ADDRESS = {api.address!r}\n" + block("python")
    run = asyncio.create_task(
        asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
    )
    while not (jobs := await api.store.active_jobs()):
        assert not run.done(), run.result().stderr
        await asyncio.sleep(0.05)
    await api.finish(jobs[0].job_id, 1)
    done = await run
    assert done.returncode == 0 and done.stdout.startswith("0 1 "), done
    await api.stop()
