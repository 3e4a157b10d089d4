"""Drive a local cluster from tests through its command line and its control endpoint, as a user and a cloud do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.fleet import statefile
from orchestrator.fleet.local import procscan

T = TypeVar("T")
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def tideover(*arguments: str, state_home: Path, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run the command line with a state folder of its own."""
    return subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", *arguments],
        env=os.environ | {"XDG_STATE_HOME": str(state_home)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class RunningCluster:
    """A cluster of `tideover up --detach`."""

    def __init__(self, name: str, state_home: Path, *options: str) -> None:
        self.name, self.state_home = name, state_home
        done = tideover("up", "--detach", "--json", "--port", "0", "--name", name, *options, state_home=state_home)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        self.facts: dict[str, Any] = json.loads(done.stdout)
        self.progress = done.stderr

    @property
    def state(self) -> statefile.ClusterState:
        path = self.state_home / "tideover" / self.name / "cluster.json"
        return statefile.decode(path)

    @property
    def scope(self) -> procscan.Scope:
        return procscan.Scope(self.facts["cluster_id"], self.facts["runtime_dir"])

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, token: str | None = None) -> Any:
        """The control endpoint's answer; urllib.error.HTTPError for a refusal."""
        state = self.state
        request = urllib.request.Request(
            state.control_url + path,
            data=json.dumps(body).encode() if body is not None else None,
            headers={"Authorization": f"Bearer {token or state.control_token}"},
            method=method,
        )
        with _OPENER.open(request, timeout=10) as response:
            return json.loads(response.read())

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["node_id"]: node for node in self.call("GET", "/v1/nodes")}

    def running(self) -> set[str]:
        return {node_id for node_id, node in self.nodes().items() if node["state"] == "running"}

    def processes(self) -> dict[str, dict[str, Any]]:
        return {process["name"]: process for process in self.call("GET", "/v1/processes")}

    def down(self) -> subprocess.CompletedProcess[str]:
        return tideover("down", "--json", "--name", self.name, state_home=self.state_home)


def until(what: str, condition: Callable[[], T], timeout_s: float = 30.0) -> T:
    """Poll until the condition holds; answers what it gave."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
    return value
