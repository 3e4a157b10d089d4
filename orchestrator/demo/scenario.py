"""The demo's scenes: start a cluster, run undisturbed, run disturbed, compare, take down."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from orchestrator.cli import live
from orchestrator.client import TideoverClient, TideoverError
from orchestrator.demo.director import Director, Faults
from orchestrator.demo.lasting import longer, next_factor
from orchestrator.demo.report import print_verdict, recovery_table
from orchestrator.fleet.statefile import read_cluster
from orchestrator.verify import Verdict, compare
from protos import jobs_pb2

_START_TIMEOUT_S = 120.0
_WORKERS = 2
_LASTS_S = 35.0  # of the undisturbed run: a replacement needs half of it to come up


class DemoFailed(Exception):
    """The demo could not be shown; the message says what happened."""


@dataclass(frozen=True, slots=True)
class DemoReport:
    verdict: Verdict
    faults: Faults
    interruptions: list[jobs_pb2.Interruption]
    seconds: dict[str, float]  # by scene

    def as_dict(self) -> dict[str, Any]:
        from orchestrator.cli.common import as_dict

        return {
            "verdict": asdict(self.verdict) | {"ok": self.verdict.ok},
            "faults": asdict(self.faults),
            "interruptions": [as_dict(row) for row in self.interruptions],
            "seconds": self.seconds,
        }


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def scene(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 1)


def run_demo(file: Path, output: Path, deadline_s: float, console: Console) -> DemoReport:
    """Run all scenes. Whatever happens, the cluster is taken down before this returns or raises."""
    clock = _Clock()
    with tempfile.TemporaryDirectory(prefix="tideover-demo-") as folder, _cluster(console, clock) as client:
        console.rule("the batch on an undisturbed cluster")
        file, reference, tokens = _undisturbed(client, file, Path(folder), clock, console)
        console.rule("the same batch, and two machines taken away")
        with clock.scene("disturbed"):
            disturbed, director, job_id = _run_disturbed(client, file, tokens, deadline_s, console)
        rows = client.interruptions(job_id)
    ordered = sorted(disturbed, key=lambda line: line.line)
    output.write_bytes(b"".join(line.payload + b"\n" for line in ordered))
    verdict = compare(_payloads(reference), _payloads(disturbed))
    console.rule("what happened")
    console.print(recovery_table(rows))
    console.print(f"answers: {output}", markup=False)
    print_verdict(console, verdict)
    console.print("  ".join(f"{name} {seconds:.0f} s" for name, seconds in clock.seconds.items()), style="dim")
    _insist_on_faults(director, rows)
    return DemoReport(verdict, director.faults, rows, clock.seconds)


def _payloads(lines: Sequence[jobs_pb2.StreamResultsResponse]) -> list[bytes]:
    return [line.payload for line in lines]


def _insist_on_faults(director: Director, rows: Sequence[jobs_pb2.Interruption]) -> None:
    """A demo that disturbed nothing has shown nothing."""
    if director.error is not None:
        raise DemoFailed(f"the faults could not be injected: {director.error}")
    if not director.faults.killed or not rows:
        raise DemoFailed(
            "the job was done before both machines could be taken away; give it a longer batch with --file"
        )


def _undisturbed(
    client: TideoverClient, file: Path, folder: Path, clock: _Clock, console: Console
) -> tuple[Path, list[jobs_pb2.StreamResultsResponse], int]:
    """The batch that both runs answer, its lines undisturbed, and their tokens. Made longer until it lasts long enough for a
    notice, a replacement and a loss to come one after another in its middle."""
    factor, batch = 1, file
    while True:
        with clock.scene("undisturbed"):
            lines, tokens = _run(client, batch, console)
        more = next_factor(factor, clock.seconds["undisturbed"], _LASTS_S)
        if more == factor:
            return batch, lines, tokens
        console.print(
            f"that took {clock.seconds['undisturbed']:.0f} s: answers are made {more} times as long, so that both machines "
            "can be taken away in the middle"
        )
        factor, batch = more, longer(file, more, folder)


def _run(client: TideoverClient, file: Path, console: Console) -> tuple[list[jobs_pb2.StreamResultsResponse], int]:
    try:
        job = client.create_job(file)
    except TideoverError as error:
        details = "; ".join(f"line {item.line}: {item.message}" for item in error.line_errors[:5])
        raise DemoFailed(f"{file}: {error} {details}") from error
    done = live.show(client.watch_job(job.job_id), console)
    return list(client.stream_results(job.job_id)), done.output_tokens


def _run_disturbed(
    client: TideoverClient, file: Path, expected_tokens: int, deadline_s: float, console: Console
) -> tuple[list[jobs_pb2.StreamResultsResponse], Director, str]:
    job = client.create_job(file)
    director = Director(
        client.address,
        job.job_id,
        expected_tokens,
        deadline_s=deadline_s,
        say=lambda text: console.print(f"          ⚡ {text}", style="bold yellow", markup=False),
    )
    director.start()
    live.show(client.watch_job(job.job_id), console)
    director.join(timeout=10)
    return list(client.stream_results(job.job_id)), director, job.job_id


@contextmanager
def _cluster(console: Console, clock: _Clock) -> Iterator[TideoverClient]:
    """A fresh cluster of `tideover up` under a name of its own, for the length of the block."""
    name = f"demo-{time.time_ns() % 10**9}"
    command = [sys.executable, "-m", "orchestrator.cli", "up", "--name", name, "--workers", str(_WORKERS)]
    with clock.scene("start"):
        supervisor = subprocess.Popen([*command, "--port", "0", "--fresh"], stdout=subprocess.DEVNULL)
        try:
            client = TideoverClient(_address(name, supervisor))
            _wait_for_workers(client, supervisor)
        except BaseException:
            _take_down(supervisor)
            raise
    try:
        yield client
    finally:
        console.print("taking the cluster down")
        client.close()
        with clock.scene("stop"):
            _take_down(supervisor)


def _address(name: str, supervisor: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < until and supervisor.poll() is None:
        state = read_cluster(name)
        if state is not None and state.status == "ready":
            return state.api_address
        time.sleep(0.1)
    raise DemoFailed(f"the cluster did not come up within {_START_TIMEOUT_S:.0f} s (exit code {supervisor.poll()})")


def _wait_for_workers(client: TideoverClient, supervisor: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < until and supervisor.poll() is None:
        if sum(worker.state == "ready" for worker in client.workers()) >= _WORKERS:
            return
        time.sleep(0.2)
    raise DemoFailed(
        f"fewer than {_WORKERS} workers were ready within {_START_TIMEOUT_S:.0f} s; see the cluster's logs"
    )


def _take_down(supervisor: subprocess.Popen[bytes]) -> None:
    if supervisor.poll() is None:
        psutil.Process(supervisor.pid).terminate()
    try:
        supervisor.wait(timeout=30)
    except subprocess.TimeoutExpired:
        supervisor.kill()  # its reaper sweeps what it leaves
        supervisor.wait()
