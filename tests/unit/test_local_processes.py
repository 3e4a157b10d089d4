"""Supervised processes and the finding of a machine's processes, on real small ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.fleet.local import procscan, tether
from orchestrator.fleet.local.fleet import NodeFleet
from orchestrator.fleet.local.node import NodeState
from orchestrator.fleet.local.process import ManagedProcess, ProcessFailed, ProcessSpec, signal_number

SLEEP = (sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)")
FAIL = (sys.executable, "-c", "import sys; sys.exit('no disk')")


def spec(tmp_path: Path, argv: tuple[str, ...], restart: bool = True) -> ProcessSpec:
    return ProcessSpec(
        name="part", argv=argv, env=dict(os.environ), log=tmp_path / "part.log", cwd=tmp_path, restart=restart
    )


async def until_pid(process: ManagedProcess, other_than: int | None = None) -> int:
    deadline = time.monotonic() + 5
    while process.pid is None or process.pid == other_than:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return process.pid


async def test_a_process_that_dies_is_started_again_and_reported(tmp_path: Path) -> None:
    deaths: list[int] = []
    process = ManagedProcess(spec(tmp_path, SLEEP), lambda _, code: deaths.append(code))
    await process.start()
    first = await until_pid(process)
    process.kill(9)
    second = await until_pid(process, first)
    assert (deaths, process.restarts) == ([-9], 1)
    await process.stop()
    assert not psutil.pid_exists(second)
    assert deaths == [-9], "a stop that was asked for is no death"


async def test_the_restart_waits_as_long_as_asked(tmp_path: Path) -> None:
    process = ManagedProcess(spec(tmp_path, SLEEP))
    await process.start()
    killed = time.monotonic()
    first = process.kill(9, restart_after_s=0.8)
    await until_pid(process, first)
    assert time.monotonic() - killed >= 0.8
    await process.stop()


async def test_a_stop_meets_a_death_at_any_moment(tmp_path: Path) -> None:
    """Between the death and our hearing of it, signals to the process fail; a stop must not."""
    for step in range(60):
        process = ManagedProcess(spec(tmp_path, SLEEP))
        await process.start()
        process.abandon()
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + step * 1e-4
        while time.monotonic() < end:  # busy: the loop hears of nothing meanwhile
            pass
        process.kill(signal.SIGTERM)
        await process.stop(0)
        assert process.pid is None


async def test_a_machine_that_cannot_be_wholly_taken_has_a_successor() -> None:
    class Stubborn:
        def __init__(self, node_id: str) -> None:
            self.node_id, self.address, self.state = node_id, "", NodeState.RUNNING

        async def start(self) -> None: ...

        async def take(self) -> int:
            raise PermissionError("a process of it cannot be signalled")

    said: list[str] = []
    fleet = NodeFleet(1, True, lambda index, lost: Stubborn(f"n{index}"), lambda: True, said.append)  # type: ignore[arg-type,return-value]
    keeper = asyncio.create_task(fleet.keep())
    await asyncio.wait_for(fleet.wait_running(1), 5)
    fleet.take(fleet.node("n0"), "test")
    await asyncio.sleep(0)
    await asyncio.wait_for(fleet.wait_running(1), 5)
    assert list(fleet.nodes) == ["n1"]
    assert any("not everything of it ended: PermissionError" in line for line in said)
    keeper.cancel()


async def test_a_process_that_never_gets_ready_fails_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = ManagedProcess(spec(tmp_path, FAIL, restart=False))
    await process.start()
    with pytest.raises(ProcessFailed, match=r"part ended before it was ready.*\n.*no disk"):
        await process.wait_ready(lambda: False, 5)
    await process.stop()


async def test_one_that_keeps_dying_is_given_up_while_starting(tmp_path: Path) -> None:
    process = ManagedProcess(spec(tmp_path, FAIL))
    await process.start()
    with pytest.raises(ProcessFailed, match=r"died .* times"):
        await process.wait_ready(lambda: False, 20)
    await process.stop()


async def test_what_was_stopped_does_not_start(tmp_path: Path) -> None:
    process = ManagedProcess(spec(tmp_path, SLEEP))
    process.abandon()
    with pytest.raises(ProcessFailed, match="stopped"):
        await process.start()


def test_a_tethered_process_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-I', '-S', {tether.__file__!r}, str(os.getpid()), 'sleep', '60'])\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 3
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_tether_refuses_a_parent_that_is_gone_already() -> None:
    done = subprocess.run([sys.executable, tether.__file__, "1", "true"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "parent" in done.stderr


@pytest.mark.parametrize("value", [9, "9", "KILL", "SIGKILL"])
def test_signal_names(value: int | str) -> None:
    assert signal_number(value) == signal.SIGKILL


# -- finding processes ------------------------------------------------------------------------------------------------
SCOPE = procscan.Scope("c0ffee", "/tmp/tide-x")


@pytest.mark.parametrize(
    ("environment", "cwd", "whole", "node"),
    [
        ({"TIDEOVER_CLUSTER": "c0ffee", "TIDEOVER_NODE_ID": "n1"}, "/", True, True),
        ({"TIDEOVER_CLUSTER": "c0ffee", "TIDEOVER_NODE_ID": "n2"}, "/tmp/tide-x/n1", True, False),
        ({"TIDEOVER_CLUSTER": "c0ffee"}, "/", True, False),
        ({"TIDEOVER_CLUSTER": "other", "TIDEOVER_NODE_ID": "n1"}, "/", False, False),
        ({}, "/tmp/tide-x/n1", True, True),  # a Ray worker that renamed itself
        ({}, "/tmp/tide-x/n1/deeper (deleted)", True, True),
        ({}, "/tmp/tide-x/n11", True, False),
        ({}, "/tmp/tide-xy/n1", False, False),
        ({}, "/", False, False),
    ],
)
def test_marks(environment: dict[str, str], cwd: str, whole: bool, node: bool) -> None:
    assert SCOPE.marks(environment, cwd) is whole
    assert procscan.Scope("c0ffee", "/tmp/tide-x", "n1").marks(environment, cwd) is node


@pytest.fixture
def two_machines(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A shell with a child that has nothing of the environment, on each of two machines."""
    started = {}
    for node in ("n1", "n2"):
        (tmp_path / node).mkdir()
        env = os.environ | {"TIDEOVER_CLUSTER": f"test{os.getpid()}", "TIDEOVER_NODE_ID": node}
        command = ["sh", "-c", "cd / && env -i sleep 60 & echo $!; wait"]
        started[node] = subprocess.Popen(command, env=env, cwd=tmp_path / node, stdout=subprocess.PIPE, text=True)
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def test_all_of_one_machine_are_killed_and_none_of_another(
    tmp_path: Path, two_machines: dict[str, subprocess.Popen[str]]
) -> None:
    children = {}
    for node, process in two_machines.items():
        assert process.stdout is not None
        children[node] = int(process.stdout.readline())
    one = procscan.Scope(f"test{os.getpid()}", str(tmp_path), "n1")
    assert {p.pid for p in procscan.find(one)} == {two_machines["n1"].pid, children["n1"]}
    assert procscan.kill_all(one) == 2
    assert procscan.find(one) == []
    other = procscan.Scope(one.cluster_id, str(tmp_path), "n2")
    assert {p.pid for p in procscan.find(other)} == {two_machines["n2"].pid, children["n2"]}
    procscan.kill_all(procscan.Scope(one.cluster_id, str(tmp_path)))
    assert two_machines["n2"].wait(5) == -9


@pytest.mark.parametrize("scope", [procscan.Scope("", "/tmp/x"), procscan.Scope("id", ""), procscan.Scope("id", "x")])
def test_a_scope_that_would_match_strangers_is_refused(scope: procscan.Scope) -> None:
    with pytest.raises(ValueError, match="not ours"):
        procscan.find(scope)
