"""A local cluster of real processes for a test, through the command line that users have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from orchestrator.client import TideoverClient, TideoverError

TIDEOVER = [sys.executable, "-m", "orchestrator.cli"]


@dataclass(frozen=True, slots=True)
class Cluster:
    name: str
    state: dict[str, Any]  # cluster.json

    @property
    def address(self) -> str:
        return str(self.state["api_address"])

    def wait_workers(self, count: int, timeout_s: float = 120.0) -> None:
        client = TideoverClient(self.address)
        until = time.monotonic() + timeout_s
        seen: list[str] = []
        while time.monotonic() < until:
            try:
                seen = [worker.state for worker in client.workers()]
            except TideoverError as error:
                seen = [str(error)]
            if seen.count("ready") >= count:
                return
            time.sleep(0.2)
        raise TimeoutError(f"fewer than {count} workers ready after {timeout_s:.0f} s: {seen}")

    def processes(self) -> dict[str, dict[str, Any]]:
        return {entry["name"]: entry for entry in self._control("GET", "/v1/processes")}

    def kill_process(self, name: str, *, restart_after_s: float = 0.0) -> None:
        body = {"signal": 9, "restart_after_s": restart_after_s}
        self._control("POST", f"/v1/processes/{name}/kill", body)

    def _control(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            self.state["control_url"] + path,
            method=method,
            data=json.dumps(body).encode() if body is not None else None,
            headers={"Authorization": f"Bearer {self.state['control_token']}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)


@contextmanager
def running_cluster(workers: int, *flags: str) -> Iterator[Cluster]:
    """Up, ready, and down again; fails if anything of it is left behind."""
    name = f"test-{os.getpid()}-{time.time_ns() % 10**6}"
    with tempfile.TemporaryDirectory(prefix="tideover-test-") as state_home:
        env = os.environ | {"XDG_STATE_HOME": state_home}
        up = [*TIDEOVER, "up", "--detach", "--name", name, "--workers", str(workers), "--port", "0", *flags]
        subprocess.run(up, env=env, check=True, timeout=180, stdout=subprocess.DEVNULL)
        try:
            with open(f"{state_home}/tideover/{name}/cluster.json") as file:
                cluster = Cluster(name, json.load(file))
            cluster.wait_workers(workers)
            yield cluster
        except BaseException:
            _print_log_tails(f"{state_home}/tideover/{name}/logs")
            raise
        finally:
            subprocess.run([*TIDEOVER, "down", "--name", name], env=env, check=True, timeout=60)
        left = _processes_of(cluster.state["cluster_id"])
        assert not left, f"left behind: {left}"


def _processes_of(cluster_id: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TIDEOVER_CLUSTER") == cluster_id:
                found.append(f"{process.pid} {process.cmdline()[:4]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _print_log_tails(folder: str) -> None:
    for entry in sorted(os.scandir(folder), key=lambda item: item.name):
        if entry.is_file():
            with open(entry.path, errors="replace") as file:
                print(f"--- {entry.name}\n" + "".join(file.readlines()[-15:]))
