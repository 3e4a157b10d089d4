"""One machine of the local cloud: a raylet, a context daemon, a notice watcher and a metadata service of its own."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from aiohttp import web
from msgspec.structs import replace

from orchestrator.fleet.local import commands, procscan
from orchestrator.fleet.local.options import DAEMON_PORT, METADATA_PORT, ClusterOptions, Subnet
from orchestrator.fleet.local.process import ManagedProcess, ProcessSpec
from worker.preemption.emulator import MachineIdentity, MetadataEmulator


class NodeState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    NOTICED = "noticed"  # will be taken at the deadline
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all machines of a cluster share."""

    subnet: Subnet
    options: ClusterOptions
    base_env: dict[str, str]
    durable_url: str
    kv_urls: tuple[str, ...]
    log_dir: Path
    scope: procscan.Scope  # of the cluster
    on_died: Callable[[ManagedProcess, int], None]  # a process that will be started again


class LocalNode:
    """`start` once, then `take` once. `on_lost(node)` is called when its raylet died without our doing."""

    def __init__(self, node_id: str, address: str, around: Surroundings, on_lost: Callable[[LocalNode], None]) -> None:
        options = around.options
        self.node_id = node_id
        self.address = address
        self.state = NodeState.STARTING
        self.deadline: float | None = None
        self.daemon_address = f"{address}:{DAEMON_PORT}"
        self.metadata = MetadataEmulator(MachineIdentity(instance_id=node_id, local_ipv4=address), time.time)
        self._around = around
        self._scope = replace(around.scope, node_id=node_id)
        self._scope.folder.mkdir(parents=True)
        self._env = commands.node_environment(around.base_env, node_id, self.daemon_address, options.threads_per_worker)
        self._on_lost = on_lost
        self._runner: web.AppRunner | None = None
        self._end: asyncio.TimerHandle | None = None
        ray_argv = commands.ray_node(around.subnet, options, address, node_id)
        self.raylet = self._process("ray", ray_argv, self._raylet_ended, restart=False)
        daemon_argv = commands.daemon(options, node_id, self.daemon_address, around.durable_url, around.kv_urls)
        self.daemon = self._process("daemon", daemon_argv, around.on_died)
        watcher_argv = commands.watcher(node_id, self.metadata_url, self.daemon_address, options.poll_interval_s)
        self.watcher = self._process("watcher", watcher_argv, around.on_died)

    @property
    def metadata_url(self) -> str:
        return f"http://{self.address}:{METADATA_PORT}"

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        return (self.raylet, self.daemon, self.watcher)

    def _process(
        self, role: str, argv: tuple[str, ...], on_exit: Callable[[ManagedProcess, int], None], restart: bool = True
    ) -> ManagedProcess:
        name = f"{role}-{self.node_id}"
        log = self._around.log_dir / f"{name}.log"
        cwd = self._scope.folder
        spec = ProcessSpec(name=name, argv=argv, env=self._env, log=log, cwd=cwd, restart=restart)
        return ManagedProcess(spec, on_exit)

    async def start(self, timeout_s: float = 60.0) -> None:
        """Bring the machine up; returns when Ray has it and its daemon answers. Raises ProcessFailed."""
        await self._serve_metadata()
        await self.daemon.start()
        await self.raylet.start()
        await self.raylet.wait_ready(lambda: log_says(self.raylet.spec.log, commands.STARTED), timeout_s)
        await self.daemon.wait_ready(lambda: answers(self.daemon_address), timeout_s)
        await self.watcher.start()  # refuses if the machine was taken meanwhile
        if self.state is NodeState.STARTING:
            self.state = NodeState.RUNNING

    async def _serve_metadata(self) -> None:
        self._runner = web.AppRunner(self.metadata.application(), shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.address, METADATA_PORT, reuse_address=True).start()

    def give_notice(self, action: str, deadline_s: float, take: Callable[[LocalNode], None]) -> float:
        """Announce the end through the metadata service; `take(self)` runs at the announced second, not before.

        AWS announces whole seconds, so the deadline is rounded up to one. Returns it, in seconds since the epoch.
        """
        now = time.time()
        self.deadline = math.ceil(now + deadline_s)
        self.metadata.announce(action, self.deadline)
        self.state = NodeState.NOTICED
        self._cancel_end()
        self._end = asyncio.get_running_loop().call_later(self.deadline - now, take, self)
        return self.deadline

    def withdraw_notice(self) -> None:
        self._cancel_end()
        self.metadata.withdraw()
        self.deadline = None
        if self.state is NodeState.NOTICED:
            self.state = NodeState.RUNNING

    async def take(self) -> int:
        """Take the machine away, as a cloud does: SIGKILL to every process, no more metadata. Returns how many."""
        self.state = NodeState.GONE
        self._cancel_end()
        for process in self.processes:
            process.abandon()
        killed = await asyncio.to_thread(procscan.kill_all, self._scope)
        await asyncio.gather(*(process.stop(0) for process in self.processes))
        if self._runner is not None:
            await self._runner.cleanup()
        return killed

    def _cancel_end(self) -> None:
        if self._end is not None:
            self._end.cancel()

    def _raylet_ended(self, process: ManagedProcess, code: int) -> None:
        if self.state is not NodeState.GONE:
            self._on_lost(self)


def answers(address: str) -> bool:
    """Does somebody accept connections there?"""
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=0.2):
            return True
    except OSError:
        return False


def log_says(log: Path, marker: str) -> bool:
    return log.exists() and marker in log.read_text(errors="replace")
