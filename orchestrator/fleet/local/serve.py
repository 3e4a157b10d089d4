"""The supervisor as a process: until SIGTERM, SIGINT or SIGHUP, in the foreground or detached from a terminal.

`python -m orchestrator.fleet.local.serve OPTIONS_JSON` is the detached one. It writes what happens to stdout while somebody
waits for it to be ready, then one JSON line (`{"ready": …}` or `{"failed": …}`), and from then on only to its log.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from context_daemon.observability import serve_metrics
from orchestrator.fleet import statefile
from orchestrator.fleet.local.checks import PreflightError
from orchestrator.fleet.local.options import METRICS_PORT, ClusterOptions
from orchestrator.fleet.local.process import ProcessFailed
from orchestrator.fleet.local.supervisor import LocalCluster
from orchestrator.fleet.statefile import ClusterState

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STARTUP_ERRORS = (PreflightError, ProcessFailed, OSError)


async def serve(options: ClusterOptions, say: Callable[[str], None], ready: Callable[[ClusterState], None]) -> None:
    """Start the cluster, call `ready`, run until a stop signal, stop it. Raises STARTUP_ERRORS, everything stopped."""
    me, asked = asyncio.current_task(), asyncio.Event()

    def stop() -> None:
        if me is not None and not asked.is_set():  # once: a second Ctrl-C does not break the orderly stop
            asked.set()
            say("stopping")
            me.cancel()

    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop)
    cluster = LocalCluster(options, say)
    try:
        await cluster.start()
        serve_metrics(cluster.host, METRICS_PORT)  # here and not in the cluster: it lasts as long as the process
        ready(cluster.state)
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if not asked.is_set():
            raise
    finally:
        await cluster.stop()
        if asked.is_set():
            _deaf()


def _deaf() -> None:
    """All is stopped and this process is on its way out: one more Ctrl-C must not turn its success into a death."""
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def start_detached(options: ClusterOptions, say: Callable[[str], None]) -> ClusterState:
    """Start a supervisor that outlives this process; returns when its cluster is ready.

    Raises ProcessFailed with its reason. Whatever interrupts the waiting stops the cluster too.
    """
    log = statefile.cluster_dir(options.name) / "supervisor.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "orchestrator.fleet.local.serve", msgspec.json.encode(options).decode()]
    with log.open("wb") as file:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, start_new_session=True, text=True
        )
    try:
        return _await_ready(child, say, log)
    except BaseException:
        child.terminate()
        child.wait()
        raise


def _await_ready(child: subprocess.Popen[str], say: Callable[[str], None], log: Path) -> ClusterState:
    if child.stdout is None:
        raise ValueError("the supervisor was started without a pipe")
    for line in child.stdout:
        if not line.startswith("{"):
            say(line.rstrip("\n"))
            continue
        report = msgspec.json.decode(line)
        if "ready" in report:
            return msgspec.convert(report["ready"], ClusterState)
        raise ProcessFailed(report["failed"])
    raise ProcessFailed(
        f"the supervisor ended with {child.wait()}; log: {log}\n{log.read_text(errors='replace')[-2000:]}"
    )


class _Reporter:
    """Lines to the log (stderr), and to the one who waits (stdout) until `close`, or until that one is gone."""

    def __init__(self) -> None:
        self._waiting = True

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        self._tell(line)

    def report(self, **content: Any) -> None:
        self._tell(msgspec.json.encode(content).decode())
        self._close()

    def _tell(self, line: str) -> None:
        if self._waiting:
            try:
                print(line, flush=True)
            except BrokenPipeError:
                self._close()

    def _close(self) -> None:
        if self._waiting:
            self._waiting = False
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the reader sees the end; late prints go to the log


def main() -> None:
    options = msgspec.json.decode(sys.argv[1], type=ClusterOptions)
    reporter = _Reporter()
    try:
        asyncio.run(serve(options, reporter.say, lambda state: reporter.report(ready=msgspec.to_builtins(state))))
    except STARTUP_ERRORS as error:
        reporter.report(failed=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
