"""The demo's promises: both machines are taken away, the answers are the same, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from orchestrator.fleet import statefile
from orchestrator.fleet.local import procscan

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def _ready_cluster(state_home: Path, demo: subprocess.Popen[bytes]) -> procscan.Scope:
    """The scope of the demo's cluster, once it is up."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert demo.poll() is None, f"the demo ended early with {demo.returncode}"
        for path in state_home.glob("tideover/*/cluster.json"):
            state = statefile.decode(path)
            if state.status == "ready":
                return procscan.Scope(state.cluster_id, state.runtime_dir)
        time.sleep(0.1)
    raise TimeoutError("the demo's cluster did not come up")


def test_ctrl_c_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    shared_memory = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-m", "orchestrator.cli", "demo", "-o", str(tmp_path / "output.jsonl")]
    with (tmp_path / "log").open("wb") as log:
        demo = subprocess.Popen(
            command,
            env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
            stderr=log,
            start_new_session=True,  # a terminal's Ctrl-C goes to the whole process group
        )
        scope = _ready_cluster(tmp_path, demo)
        time.sleep(5)
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(timeout=30) == 130
    assert [p for p in procscan.find(scope) if p.status() != psutil.STATUS_ZOMBIE] == []
    assert not Path(scope.runtime_dir).exists(), "sockets and Ray's files lie there"
    assert set(Path("/dev/shm").iterdir()) <= shared_memory
    assert not (tmp_path / "output.jsonl").exists()


@pytest.mark.timeout(600)
def test_the_whole_story_with_both_machines_taken_away(tmp_path: Path) -> None:
    batch = Path(__file__).parent.parent / "chaos" / "faults.jsonl"
    command = [sys.executable, "-m", "orchestrator.cli", "demo", "--json", "--file", str(batch)]
    command += ["-o", str(tmp_path / "output.jsonl")]
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    report = json.loads(done.stdout)
    lines = batch.read_text().count("\n")
    assert report["verdict"]["ok"] and report["verdict"]["equal"] == lines
    assert report["faults"]["noticed"] and report["faults"]["killed"]
    assert "notice" in {row["cause"] for row in report["interruptions"]}
    assert len((tmp_path / "output.jsonl").read_text().splitlines()) == lines
