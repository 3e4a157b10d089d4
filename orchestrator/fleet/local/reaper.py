"""Outlives the supervisor and cleans up behind it: `python -m orchestrator.fleet.local.reaper NAME ID RUNTIME_DIR`.

Its standard input is a pipe that only the supervisor holds open. When that closes, whether by an orderly end or by
`kill -9`, everything of the cluster is swept: processes, the runtime folder with its sockets, shared memory and
the state file.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

from orchestrator.fleet import statefile
from orchestrator.fleet.local import procscan

RUNTIME_PREFIX = "tide-"


def sweep(name: str, cluster_id: str, runtime_dir: Path) -> int:
    """Leave nothing of this start of the cluster; safe to repeat. Returns how many processes had to be killed."""
    killed = procscan.kill_all(procscan.Scope(cluster_id, str(runtime_dir)))
    if runtime_dir.name.startswith(RUNTIME_PREFIX):
        shutil.rmtree(runtime_dir, ignore_errors=True)
    for entry in shared_memory_of(cluster_id):
        entry.unlink(missing_ok=True)
    statefile.remove_cluster(name, cluster_id)
    return killed


def shared_memory_of(cluster_id: str) -> list[Path]:
    """Arenas and the like that name the cluster: `/dev/shm/*<cluster id>*`."""
    return list(Path("/dev/shm").glob(f"*{cluster_id}*"))


def main() -> None:
    name, cluster_id, runtime_dir = sys.argv[1:4]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends by itself, after the supervisor, never before
    sys.stdin.buffer.read()
    sweep(name, cluster_id, Path(runtime_dir))


if __name__ == "__main__":
    main()
