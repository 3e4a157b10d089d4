"""Stop a cluster from outside, whatever state its supervisor is in, and make sure that nothing is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from orchestrator.fleet import statefile
from orchestrator.fleet.local import procscan, reaper

ORDERLY_S = 15.0  # an orderly stop takes three


def stop_cluster(state: statefile.ClusterState) -> list[str]:
    """SIGTERM, wait, then SIGKILL and a sweep. Returns what is left after all that, in words; empty when clean."""
    if statefile.supervisor_alive(state):
        os.kill(state.pid, signal.SIGTERM)
        if not _wait_gone(state, ORDERLY_S):
            os.kill(state.pid, signal.SIGKILL)
            _wait_gone(state, 2.0)
    # The reaper does the same at the same time; both may be needed, neither harms the other.
    reaper.sweep(state.name, state.cluster_id, Path(state.runtime_dir))
    return leftovers(state)


def _wait_gone(state: statefile.ClusterState, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while statefile.supervisor_alive(state):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def leftovers(state: statefile.ClusterState) -> list[str]:
    scope = procscan.Scope(state.cluster_id, state.runtime_dir)
    left = [f"process {process.pid}" for process in procscan.find(scope)]
    if Path(state.runtime_dir).exists():
        left.append(f"folder {state.runtime_dir}")
    left += [f"shared memory {path}" for path in reaper.shared_memory_of(state.cluster_id)]
    return left
