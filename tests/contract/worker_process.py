"""A worker in a process of its own, which a named fault can kill where it stands. Driven over a pipe as by a router."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from context_daemon.fault_points import ENVIRONMENT
from context_daemon.records import DrainTarget, Lease, RequestKey


class WorkerProcess:
    """`fault` is one of context_daemon/fault_points.py."""

    def __init__(self, model: str, daemon: str, name: str, node: str, fault: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(model, daemon, name, node, theirs), daemon=True)
        before = os.environ.get(ENVIRONMENT, "")
        os.environ[ENVIRONMENT] = fault
        try:
            self._process.start()
        finally:
            os.environ[ENVIRONMENT] = before
        theirs.close()
        self._pipe.recv()  # it is up

    def admit(self, leases: Sequence[Lease]) -> None:
        self._pipe.send(("admit", list(leases)))

    def set_targets(self, targets: Mapping[RequestKey, DrainTarget]) -> None:
        self._pipe.send(("set_targets", dict(targets)))

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._pipe.close()


def _serve(model: str, daemon: str, name: str, node: str, pipe: Connection) -> None:
    from context_daemon.client import ContextClient
    from tests.contract.worker_rig import make_worker

    worker = make_worker(model, ContextClient(daemon), name, node)
    pipe.send(name)
    calls: dict[str, Any] = {"admit": worker.runtime.admit, "set_targets": worker.runtime.set_targets}
    while True:
        call, argument = pipe.recv()
        calls[call](argument)
