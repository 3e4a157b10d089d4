"""Where a local cluster's files lie, and the one file that says how to reach it.

`<state dir>/<cluster name>/` holds `cluster.json` (while the cluster runs), `logs/` and `durable/` (the append-only
file, kept over down and up). The state dir is `$XDG_STATE_HOME/tideover`, else `~/.local/state/tideover`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import psutil

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `cluster.json`. The file is readable by its owner only: it holds the control token."""

    name: str
    cluster_id: str  # unique per start; every process of the cluster carries it in TIDEOVER_CLUSTER
    status: str  # "starting" or "ready"
    pid: int  # the supervisor's
    pid_started: float  # its creation time: tells it from a later process with the same pid
    api_address: str  # host:port of the public gRPC API
    control_url: str
    control_token: str  # also Ray's: RAY_AUTH_MODE=token RAY_AUTH_TOKEN=…
    durable_url: str
    ray_address: str
    runtime_dir: str
    log_dir: str
    model: str
    started_at: float
    kv_urls: tuple[str, ...] = ()  # last, with a default: a cluster of an older version can still be stopped


def state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "tideover"


def cluster_dir(name: str) -> Path:
    """The folder of cluster `name`; raises ValueError for a name that is no plain folder name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"cluster name {name!r}: use up to 40 lower-case letters, digits and dashes, not a dash first")
    return state_dir() / name


def state_path(name: str) -> Path:
    return cluster_dir(name) / "cluster.json"


def read_cluster(name: str) -> ClusterState | None:
    """What `cluster.json` says, or None when there is none. Raises ValueError when it cannot be read as one."""
    try:
        return decode(state_path(name))
    except (FileNotFoundError, NotADirectoryError):
        return None


def decode(path: Path) -> ClusterState:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ClusterState)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{path} is not a cluster state file ({error}); remove it if that cluster does not run"
        ) from error


def write_cluster(state: ClusterState) -> None:
    """Replace the file in one step, so that a reader never sees half of it."""
    path = state_path(state.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
    part.replace(path)


def remove_cluster(name: str, cluster_id: str) -> None:
    """Remove the file, but only that of this very start: a newer cluster's stays."""
    state = read_cluster(name)
    if state is not None and state.cluster_id == cluster_id:
        state_path(name).unlink(missing_ok=True)


def supervisor_alive(state: ClusterState) -> bool:
    try:
        process = psutil.Process(state.pid)
        return abs(process.create_time() - state.pid_started) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
