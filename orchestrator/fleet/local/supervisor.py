"""LocalCluster: the local cloud. Starts, supervises and stops everything of one cluster on loopback."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType

import psutil
from aiohttp import web
from msgspec.structs import replace

from context_daemon import redis_server
from context_daemon.observability import Counter
from orchestrator.fleet import statefile
from orchestrator.fleet.local import checks, commands, procscan, reaper
from orchestrator.fleet.local.control import control_application
from orchestrator.fleet.local.fleet import NodeFleet
from orchestrator.fleet.local.node import LocalNode, Surroundings, answers, log_says
from orchestrator.fleet.local.options import DURABLE_PORT, ClusterOptions, claim_subnet
from orchestrator.fleet.local.process import ManagedProcess, ProcessFailed, ProcessSpec

RESTARTS = Counter("tideover_local_process_deaths", "Supervised processes found dead, by role", ["process"])

# The longest path that Ray puts under its temporary folder is 62 characters; a Unix socket's may have 107.
_LONGEST_RUNTIME_DIR = 107 - 64


class LocalCluster:
    """`start` (or `async with`) returns when the API answers and all machines are up; `stop` leaves nothing behind.

    `say` gets one line for each thing that happens. Raises checks.PreflightError before anything is started, and
    ProcessFailed, everything stopped again, when a part does not come up.
    """

    def __init__(self, options: ClusterOptions, say: Callable[[str], None] = lambda line: None) -> None:
        self.options = options
        self.cluster_id = secrets.token_hex(6)
        self._say = say
        self._began = time.monotonic()
        self._claim: socket.socket | None = None
        self._runner: web.AppRunner | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._reaper: asyncio.subprocess.Process | None = None
        self._processes: dict[str, ManagedProcess] = {}
        self._stopped = False
        self._state: statefile.ClusterState | None = None
        self._fleet = NodeFleet(options.workers, options.replace, self._make_node, self._head_ready, self._event)

    # -- what others read -------------------------------------------------------------------------------------------
    @property
    def state(self) -> statefile.ClusterState:
        if self._state is None:
            raise RuntimeError(f"cluster {self.options.name!r} was not started")
        return self._state

    @property
    def host(self) -> str:
        """The supervisor's own loopback address."""
        return self._subnet.supervisor

    @property
    def fleet(self) -> NodeFleet:
        return self._fleet

    @property
    def processes(self) -> dict[str, ManagedProcess]:
        """All supervised processes by name: redis-durable, redis-kv (redis-kv-2, …), head, orchestrator, and daemon-,
        watcher-, ray-NODE."""
        return self._processes | {process.spec.name: process for process in self._fleet.processes}

    # -- life -------------------------------------------------------------------------------------------------------
    async def __aenter__(self) -> LocalCluster:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        checks.preflight(self.options)
        if self.options.orchestrator:
            self.options = checks.settle(self.options)
        try:
            await self._prepare()
            await self._start_parts()
        except BaseException:
            await self.stop()
            raise

    async def _prepare(self) -> None:
        """The claim on a subnet, folders, the state file, and the reaper: before the first process."""
        options = self.options
        self._subnet, self._claim = claim_subnet(options.name, options.kv_ports.values())
        folder = statefile.cluster_dir(options.name)
        if options.fresh and (folder / "durable").exists():
            shutil.rmtree(folder / "durable")
        shutil.rmtree(folder / "logs", ignore_errors=True)
        self._log_dir = folder / "logs"
        self._log_dir.mkdir(parents=True)
        runtime_dir = _runtime_dir()
        self._scope = procscan.Scope(self.cluster_id, str(runtime_dir))
        token = secrets.token_hex(32)
        self._base_env = commands.base_environment(os.environ, self.cluster_id, token)
        self._state = statefile.ClusterState(
            name=options.name,
            cluster_id=self.cluster_id,
            status="starting",
            pid=os.getpid(),
            pid_started=psutil.Process().create_time(),
            api_address=f"127.0.0.1:{options.port or redis_server.free_port()}",
            control_url=f"http://{self._subnet.supervisor}:{self._claim.getsockname()[1]}",
            control_token=token,
            durable_url=f"redis://{self._subnet.supervisor}:{DURABLE_PORT}/0",
            kv_urls=tuple(f"redis://{self._subnet.supervisor}:{port}/0" for port in options.kv_ports.values()),
            ray_address=f"{self._subnet.head}:{self._subnet.gcs_port}",
            runtime_dir=str(runtime_dir),
            log_dir=str(self._log_dir),
            model=options.model,
            started_at=time.time(),
        )
        await self._start_reaper()
        statefile.write_cluster(self._state)

    async def _start_reaper(self) -> None:
        self._reaper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "orchestrator.fleet.local.reaper"),
            *(self.options.name, self.cluster_id, self.state.runtime_dir),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )

    async def _start_parts(self) -> None:
        """Stores and control first, then the head; then the orchestrator and the machines at the same time."""
        await self._serve_control()
        await _all(self._start_stores(), self._start_head())
        self._keeper = asyncio.create_task(self._fleet.keep(), name="keep machines")
        parts = [self._fleet.wait_running(self.options.workers)]
        if self.options.orchestrator:
            parts.append(self._start_orchestrator())
        await _all(*parts)
        self._state = replace(self.state, status="ready")
        statefile.write_cluster(self._state)
        self._event(f"cluster {self.options.name!r} is ready: API at {self._state.api_address}")

    async def _serve_control(self) -> None:
        if self._claim is None:
            raise RuntimeError("control endpoint before its subnet was claimed")
        self._runner = web.AppRunner(control_application(self), shutdown_timeout=0.2)
        await self._runner.setup()
        await web.SockSite(self._runner, self._claim).start()

    async def _start_stores(self) -> None:
        folder = statefile.cluster_dir(self.options.name) / "durable"
        scratch = Path(self.state.runtime_dir)
        kv = (
            self._start_store(name, "kv", port, scratch / name.removeprefix("redis-"), self.options.kv_store_memory)
            for name, port in self.options.kv_ports.items()
        )
        await _all(self._start_store("redis-durable", "durable", DURABLE_PORT, folder, 0), *kv)

    def _start_store(
        self, name: str, kind: redis_server.Kind, port: int, folder: Path, memory: int
    ) -> Coroutine[None, None, None]:
        folder.mkdir(parents=True, exist_ok=True)
        host = self._subnet.supervisor
        argv = redis_server.server_command(kind, port, folder, memory, host)
        return self._start_process(name, tuple(argv), lambda: redis_server.answers_ping(host, port))

    async def _start_head(self) -> None:
        argv = commands.ray_head(self._subnet, self.options, Path(self.state.runtime_dir))
        env = commands.head_environment(self._base_env)
        await self._start_process("head", argv, self._head_ready, env, self._head_died)

    def _head_ready(self) -> bool:
        return log_says(self._log_dir / "head.log", commands.STARTED)

    async def _start_orchestrator(self) -> None:
        state = self.state
        argv = commands.orchestrator(
            self.options, state.api_address, state.durable_url, state.ray_address, state.control_url
        )
        env = self._base_env | {commands.CLOUD_TOKEN_ENV: state.control_token}
        await self._start_process("orchestrator", argv, lambda: answers(state.api_address), env)

    async def _start_process(
        self,
        name: str,
        argv: tuple[str, ...],
        ready: Callable[[], bool],
        env: dict[str, str] | None = None,
        on_exit: Callable[[ManagedProcess, int], None] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        began = time.monotonic()
        cwd = Path(self.state.runtime_dir) / name  # also how its processes are found: see procscan
        cwd.mkdir(exist_ok=True)
        log = self._log_dir / f"{name}.log"
        spec = ProcessSpec(name=name, argv=argv, env=env or self._base_env, log=log, cwd=cwd)
        process = self._processes[name] = ManagedProcess(spec, on_exit or self._died)
        await process.start()
        await process.wait_ready(ready, timeout_s)
        self._event(f"{name} is up ({time.monotonic() - began:.1f} s)")

    def _make_node(self, index: int, on_lost: Callable[[LocalNode], None]) -> LocalNode:
        state = self.state
        around = Surroundings(
            subnet=self._subnet,
            options=self.options,
            base_env=self._base_env,
            durable_url=state.durable_url,
            kv_urls=state.kv_urls,
            log_dir=self._log_dir,
            scope=self._scope,
            on_died=self._died,
        )
        # Ids are unique over restarts too: the durable store may still speak of a former n1.
        node_id = f"n{index + 1}-{self.cluster_id[:4]}"
        address = self._subnet.node(index)
        self._event(f"starting machine {node_id} at {address}")
        return LocalNode(node_id, address, around, on_lost)

    def _died(self, process: ManagedProcess, code: int) -> None:
        RESTARTS.labels(process.spec.name.split("-n")[0]).inc()
        self._event(f"{process.spec.name} ended with {code}; it is started again (log: {process.spec.log})")

    def _head_died(self, process: ManagedProcess, code: int) -> None:
        """Machines belong to one life of the head: they go with it, and the orchestrator joins the next one."""
        process.spec.log.write_text("")  # its marker of readiness was the former life's
        self._died(process, code)
        procscan.kill_all(replace(self._scope, node_id=commands.HEAD_ID))  # what is left of it holds the port
        for node in list(self._fleet.nodes.values()):
            self._fleet.take(node, "the Ray head died")
        if "orchestrator" in self._processes:
            self._processes["orchestrator"].kill(9)

    def _event(self, line: str) -> None:
        self._say(f"[{time.monotonic() - self._began:6.1f} s] {line}")

    async def stop(self) -> None:
        """Orderly, in a few seconds: orchestrator, machines, head, stores; then whatever is left is swept."""
        if self._stopped:
            return
        self._stopped = True
        try:
            await self._stop_parts()
        finally:
            await self._sweep()
        self._event(f"cluster {self.options.name!r} is stopped")

    async def _stop_parts(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._stop_process("orchestrator", 3.0)
        await self._fleet.stop()
        await self._stop_process("head", 0.0)
        kv = (self._stop_process(name, 1.0) for name in self.options.kv_ports)
        await asyncio.gather(self._stop_process("redis-durable", 4.0), *kv)

    async def _sweep(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._claim is not None:
            self._claim.close()
        if self._state is not None:
            await asyncio.to_thread(reaper.sweep, self.options.name, self.cluster_id, Path(self._state.runtime_dir))
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            await self._reaper.wait()

    async def _stop_process(self, name: str, grace_s: float) -> None:
        if name in self._processes:
            await self._processes[name].stop(grace_s)


async def _all(*parts: Coroutine[None, None, None]) -> None:
    """Wait for all; the first failure cancels the others and is raised as it is."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _runtime_dir() -> Path:
    """A short private folder: Ray puts sockets under it, and their paths are limited to 107 characters."""
    for base in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if len(base) + len("/tide-12345678") <= _LONGEST_RUNTIME_DIR and os.access(base, os.W_OK):
            return Path(tempfile.mkdtemp(prefix=reaper.RUNTIME_PREFIX, dir=base))
    raise checks.PreflightError(
        f"no writable temporary folder with a path of at most {_LONGEST_RUNTIME_DIR - 14} characters; set TMPDIR to one"
    )


__all__ = ["LocalCluster", "ProcessFailed"]
