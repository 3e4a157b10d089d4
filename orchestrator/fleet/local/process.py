"""One supervised process: started tethered to us, logged to a file, started again with back-off when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from orchestrator.fleet.local import tether

BACKOFF_FIRST_S = 0.2
BACKOFF_LAST_S = 5.0
STEADY_AFTER_S = 10.0  # alive that long: the next death starts the back-off anew


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    log: Path
    cwd: Path
    restart: bool = True


class ProcessFailed(Exception):
    """A process ended, or did not become ready; the message carries the end of its log."""


class ManagedProcess:
    """Runs a spec until `stop`. `on_exit(process, returncode)` is called at each death that nobody asked for."""

    def __init__(self, spec: ProcessSpec, on_exit: Callable[[ManagedProcess, int], None] | None = None) -> None:
        self.spec = spec
        self.restarts = 0
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = False
        self._restart_after_s: float | None = None

    @property
    def pid(self) -> int | None:
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process else None

    async def start(self) -> None:
        if self._stopping:
            raise ProcessFailed(f"{self.spec.name} was stopped before it was started")
        self._process = await self._spawn()
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.spec.name}")

    async def _spawn(self) -> asyncio.subprocess.Process:
        argv = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *self.spec.argv]
        with self.spec.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *argv,
                env=self.spec.env,
                cwd=self.spec.cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for the supervisor, which then stops in order
            )

    async def _keep(self) -> None:
        backoff = BACKOFF_FIRST_S
        while self._process is not None:
            started = time.monotonic()
            code = await self._process.wait()
            if self._stopping:
                return
            if self._on_exit is not None:
                self._on_exit(self, code)
            if not self.spec.restart:
                return
            steady = time.monotonic() - started > STEADY_AFTER_S
            backoff = BACKOFF_FIRST_S if steady else min(2 * backoff, BACKOFF_LAST_S)
            delay, self._restart_after_s = (
                (self._restart_after_s, None) if self._restart_after_s is not None else (backoff, None)
            )
            await asyncio.sleep(delay)
            if self._stopping:
                return
            self.restarts += 1
            try:
                self._process = await self._spawn()
            except OSError as error:  # no memory or no descriptors for now: counts as one more death
                with self.spec.log.open("a") as log:
                    log.write(f"cannot start {self.spec.name}: {error}\n")

    def kill(self, number: int, restart_after_s: float | None = None) -> int | None:
        """Send a signal; the restart that follows a death waits `restart_after_s`. None when it is down already."""
        pid = self.pid
        if pid is None:
            return None
        self._restart_after_s = restart_after_s
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # dead, and its exit not heard of yet
            return None
        return pid

    def abandon(self) -> None:
        """Expect the death that somebody else brings: no report, no restart."""
        self._stopping = True

    async def stop(self, grace_s: float = 3.0) -> None:
        """SIGTERM, then SIGKILL after `grace_s`. Safe to repeat."""
        self._stopping = True
        if self.pid is not None and self._process is not None:
            await _end(self._process, grace_s)
        if self._keeper is not None:
            self._keeper.cancel()  # it may sleep before a restart
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def wait_ready(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll `ready()` until true. Raises ProcessFailed when the process is gone for good, or not ready in time."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.spec.restart and self.pid is None:
                raise ProcessFailed(self._failure("ended before it was ready"))
            if self.spec.restart and self.restarts >= 3 and self.pid is None:
                raise ProcessFailed(self._failure(f"died {self.restarts + 1} times before it was ready"))
            if time.monotonic() > deadline:
                raise ProcessFailed(self._failure(f"not ready after {timeout_s:.0f} s"))
            await asyncio.sleep(0.05)

    def _failure(self, what: str) -> str:
        return f"{self.spec.name} {what}; log: {self.spec.log}\n{tail(self.spec.log)}"


async def _end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    with suppress(ProcessLookupError):  # it may end by itself, or by another's hand, between any two of our lines
        process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def tail(path: Path, lines: int = 12) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def signal_number(value: int | str) -> int:
    """9, "9", "KILL" or "SIGKILL"."""
    if isinstance(value, int) or value.isdigit():
        return int(signal.Signals(int(value)))
    return int(signal.Signals[value if value.startswith("SIG") else f"SIG{value}"])
