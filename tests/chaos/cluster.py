"""A local cluster with its orchestrator and workers, for the length of a test."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.client import TideoverClient, TideoverError
from orchestrator.fleet.local import procscan
from tests.e2e.local_cluster import RunningCluster


@dataclass(frozen=True, slots=True)
class Cluster:
    running: RunningCluster

    @property
    def address(self) -> str:
        return self.running.state.api_address

    def wait_workers(self, count: int, timeout_s: float = 120.0) -> None:
        until = time.monotonic() + timeout_s
        seen: list[str] = []
        with TideoverClient(self.address) as client:
            while time.monotonic() < until:
                try:
                    seen = [worker.state for worker in client.workers()]
                except TideoverError as error:
                    seen = [str(error)]
                if seen.count("ready") >= count:
                    return
                time.sleep(0.2)
        raise TimeoutError(f"fewer than {count} workers ready after {timeout_s:.0f} s: {seen}\n{self._why()}")

    def _why(self) -> str:
        """The machines as the cloud sees them, and the orchestrator's last words."""
        log = Path(self.running.state.log_dir) / "orchestrator.log"
        last = log.read_text(errors="replace").splitlines()[-20:]
        return "\n".join([str(self.running.nodes()), *(line[:400] for line in last)])

    def kill_process(self, name: str, *, restart_after_s: float = 0.0) -> None:
        body = {"signal": 9, "restart_after_s": restart_after_s}
        self.running.call("POST", f"/v1/processes/{name}/kill", body)


@contextmanager
def running_cluster(workers: int, *flags: str) -> Iterator[Cluster]:
    """Up with the demo model, ready, and down again; fails if a process is left behind. Logs are shown on failure."""
    name = f"test-{os.getpid()}-{time.time_ns() % 10**6}"
    with tempfile.TemporaryDirectory(prefix="tideover-test-") as state_home:
        running = RunningCluster(name, Path(state_home), "--workers", str(workers), *flags)
        try:
            cluster = Cluster(running)
            cluster.wait_workers(workers)
            yield cluster
        except BaseException:
            _print_log_tails(Path(state_home) / "tideover" / name / "logs")
            raise
        finally:
            scope = running.scope
            done = running.down()
        assert done.returncode == 0, done.stderr
        assert procscan.find(scope) == [], "processes are left behind"


def _print_log_tails(folder: Path) -> None:
    for file in sorted(folder.iterdir()):
        if file.is_file():
            print(f"--- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-15:]))
