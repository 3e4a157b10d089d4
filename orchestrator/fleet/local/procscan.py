"""Find and kill every process of a cluster, or of one machine of it.

Ray's workers and agents have process groups and parents of their own, so no group holds a machine's processes. Two things
are inherited by all of them: the environment (TIDEOVER_CLUSTER, unique to one start of one cluster, and TIDEOVER_NODE_ID)
and the working directory, a folder of the machine under the cluster's private runtime folder. Both are looked at, because
Ray's workers rename themselves (setproctitle), which wipes the environment that /proc shows; and whoever has such a
process as parent belongs to it too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import psutil

CLUSTER_ENV = "TIDEOVER_CLUSTER"
NODE_ENV = "TIDEOVER_NODE_ID"


class Scope(msgspec.Struct, frozen=True):
    """Marks of a cluster's processes, or with `node_id` of one machine's."""

    cluster_id: str
    runtime_dir: str
    node_id: str | None = None

    @property
    def folder(self) -> Path:
        """Working directory of every process in scope."""
        return Path(self.runtime_dir) / (self.node_id or "")

    def marks(self, environment: dict[str, str], cwd: str) -> bool:
        """Does a process with this environment and working directory belong here? Pure."""
        if environment.get(CLUSTER_ENV) == self.cluster_id:
            return self.node_id is None or environment.get(NODE_ENV) == self.node_id
        # The folder may be removed already: /proc then adds " (deleted)" to the path.
        return f"{cwd.removesuffix(' (deleted)')}/".startswith(f"{self.folder}/")


def find(scope: Scope) -> list[psutil.Process]:
    """Living processes in scope and their descendants, this process never among them."""
    if not scope.cluster_id or not Path(scope.runtime_dir).is_absolute():
        raise ValueError(f"{scope} would match processes that are not ours")
    found: dict[int, psutil.Process] = {}
    parents: dict[int, tuple[int, psutil.Process]] = {}
    for process in psutil.process_iter():
        seen = _look(process)
        if seen is None or process.pid == os.getpid():
            continue
        parents[process.pid] = (seen[0], process)
        if scope.marks(seen[1], seen[2]):
            found[process.pid] = process
    return list(_with_descendants(found, parents).values())


def _look(process: psutil.Process) -> tuple[int, dict[str, str], str] | None:
    """Parent, environment, working directory; None for what is gone, a zombie, or another user's: not ours either way."""
    try:
        with process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            return process.ppid(), process.environ(), process.cwd()
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return None


def _with_descendants(
    found: dict[int, psutil.Process], parents: dict[int, tuple[int, psutil.Process]]
) -> dict[int, psutil.Process]:
    grown = dict(found)
    while more := {pid: p for pid, (parent, p) in parents.items() if parent in grown and pid not in grown}:
        grown |= more
    return grown


def kill_all(scope: Scope, timeout_s: float = 5.0) -> int:
    """SIGKILL them all, again until none is left (a dying raylet may still fork). Returns how many were killed.

    Raises TimeoutError if some outlive `timeout_s`: those hang in the kernel.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while left := find(scope):
        if time.monotonic() > deadline:
            names = ", ".join(str(process.pid) for process in left)
            raise TimeoutError(f"processes {names} of cluster {scope.cluster_id} do not die after SIGKILL")
        for process in left:
            _kill(process)
            killed.add(process.pid)
        time.sleep(0.02)  # no waiting by pid: that would take the exit status from whoever is the parent
    return len(killed)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()  # psutil checks the creation time: a reused pid is not hit
    except psutil.NoSuchProcess:
        return
