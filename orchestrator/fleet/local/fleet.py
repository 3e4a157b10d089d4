"""Keeps the wanted number of machines running: starts them one after another, replaces those that are gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from context_daemon.observability import Counter
from orchestrator.fleet.backoff import Backoff
from orchestrator.fleet.local.node import LocalNode, NodeState
from orchestrator.fleet.local.process import ManagedProcess, ProcessFailed

_START = "start"
GONE = Counter("tideover_local_machines_gone", "Machines taken away or lost", ["why"])
Progress = Callable[[str], None]


class NodeFleet:
    """`make_node(index)` builds machine number `index`, counted over the cluster's life; no number is used twice.

    `can_start()` is false while there is nothing to join.
    """

    def __init__(
        self,
        wanted: int,
        replace: bool,
        make_node: Callable[[int, Callable[[LocalNode], None]], LocalNode],
        can_start: Callable[[], bool],
        say: Progress,
    ) -> None:
        self.wanted = wanted
        self.nodes: dict[str, LocalNode] = {}
        self._replace = replace
        self._make_node = make_node
        self._can_start = can_start
        self._say = say
        self._started = 0
        self._changed = asyncio.Event()
        self._backoff = Backoff(first_s=1.0, most_s=30.0)
        self._takings: set[asyncio.Task[None]] = set()
        self._failures = 0  # of starts, in a row
        self._last_error: ProcessFailed | None = None

    @property
    def processes(self) -> list[ManagedProcess]:
        return [process for node in self.nodes.values() for process in node.processes]

    def node(self, node_id: str) -> LocalNode:
        """Raises KeyError with the ids that exist."""
        if node_id not in self.nodes:
            raise KeyError(f"no machine {node_id!r}; there are: {', '.join(sorted(self.nodes)) or 'none'}")
        return self.nodes[node_id]

    async def keep(self) -> None:
        """Runs until cancelled. A machine that is still to be taken counts: its successor comes when it is gone."""
        while True:
            self._changed.clear()
            if len(self.nodes) >= self.wanted:
                await self._changed.wait()
            elif not self._can_start() or not self._backoff.ready(_START, time.monotonic()):
                await asyncio.sleep(0.2)
            else:
                await self._start_one()

    async def _start_one(self) -> None:
        index, self._started = self._started, self._started + 1
        began, node = time.monotonic(), None
        try:
            node = self._make_node(index, self._lost)
            self.nodes[node.node_id] = node
            await node.start()
        except (ProcessFailed, OSError) as error:
            await self._start_failed(node, error)
            return
        if node.state is not NodeState.GONE:
            self._backoff.succeeded(_START)
            self._failures = 0
            self._say(f"machine {node.node_id} at {node.address} is up ({time.monotonic() - began:.1f} s)")
            self._changed.set()

    async def _start_failed(self, node: LocalNode | None, error: Exception) -> None:
        if node is not None and node.state is NodeState.GONE:
            return  # taken while it started
        self._failures = self._backoff.failed(_START, time.monotonic())
        self._last_error = ProcessFailed(f"machine {node.node_id if node else ''} did not start: {error}")
        delay = self._backoff.delay(self._failures)
        self._say(f"{self._last_error}\nnext try in {delay:.0f} s (failure {self._failures} in a row)")
        if node is not None:
            self.nodes.pop(node.node_id, None)
            await node.take()

    async def wait_running(self, count: int, failures: int = 3) -> None:
        """Until `count` machines run. Raises ProcessFailed after that many failed starts in a row."""
        while sum(node.state in (NodeState.RUNNING, NodeState.NOTICED) for node in self.nodes.values()) < count:
            if self._last_error is not None and self._failures >= failures:
                raise self._last_error
            await asyncio.sleep(0.05)

    def take(self, node: LocalNode, why: str) -> None:
        """Take a machine away now; harmless when it is gone already."""
        if node.state is NodeState.GONE:
            return
        node.state = NodeState.GONE
        task = asyncio.create_task(self._take(node, why), name=f"take {node.node_id}")
        self._takings.add(task)
        task.add_done_callback(self._takings.discard)

    async def _take(self, node: LocalNode, why: str) -> None:
        try:
            killed = f"{await node.take()} processes killed"
        except Exception as error:  # noqa: BLE001 - a machine that cannot be wholly taken must not cost its successor
            killed = f"not everything of it ended: {error!r}"
        self.nodes.pop(node.node_id, None)
        GONE.labels(why).inc()
        self._say(f"machine {node.node_id} is gone ({why}; {killed})")
        if not self._replace:
            self.wanted = max(0, self.wanted - 1)
        self._changed.set()

    def _lost(self, node: LocalNode) -> None:
        self.take(node, "its raylet died")

    def add(self) -> None:
        self.wanted += 1
        self._changed.set()

    async def stop(self) -> None:
        for node in list(self.nodes.values()):
            self.take(node, "the cluster stops")
        await asyncio.gather(*self._takings)
