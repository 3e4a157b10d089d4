"""The local cloud's control endpoint: what a cloud's console can do to a machine, and faults for tests.

HTTP on loopback, with the bearer token of the state file:

    GET    /v1/nodes                                                    the machines
    POST   /v1/nodes                                                    one more machine
    POST   /v1/nodes/{id}/notice  {"deadline_s": 8, "kind": "terminate"}  its end through the metadata service
    DELETE /v1/nodes/{id}/notice                                        takes that back
    POST   /v1/nodes/{id}/kill                                          SIGKILL to every process, at once
    GET    /v1/processes                                                supervised processes
    POST   /v1/processes/{name}/kill  {"signal": 9, "restart_after_s": 60}
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from orchestrator.fleet.local.fleet import NodeFleet
from orchestrator.fleet.local.node import LocalNode
from orchestrator.fleet.local.process import ManagedProcess, signal_number
from orchestrator.fleet.statefile import ClusterState

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_T = TypeVar("_T")


class ControlledCluster(Protocol):
    @property
    def state(self) -> ClusterState: ...
    @property
    def fleet(self) -> NodeFleet: ...
    @property
    def processes(self) -> dict[str, ManagedProcess]: ...


class NoticeBody(msgspec.Struct, forbid_unknown_fields=True):
    deadline_s: float = 120.0  # what AWS gives
    kind: str = "terminate"  # terminate, stop, hibernate, rebalance or asg_terminate


class KillBody(msgspec.Struct, forbid_unknown_fields=True):
    signal: int | str = 9
    restart_after_s: float | None = None


def control_application(cluster: ControlledCluster) -> web.Application:
    handlers = _Handlers(cluster)
    app = web.Application(middlewares=[handlers.guard])
    app.router.add_get("/v1/nodes", handlers.list_nodes)
    app.router.add_post("/v1/nodes", handlers.add_node)
    app.router.add_post("/v1/nodes/{id}/notice", handlers.notice)
    app.router.add_delete("/v1/nodes/{id}/notice", handlers.withdraw)
    app.router.add_post("/v1/nodes/{id}/kill", handlers.kill_node)
    app.router.add_get("/v1/processes", handlers.list_processes)
    app.router.add_post("/v1/processes/{name}/kill", handlers.kill_process)
    return app


class _Handlers:
    def __init__(self, cluster: ControlledCluster) -> None:
        self._cluster = cluster

    @web.middleware
    async def guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Token first; then a wrong name is a 404 and a wrong body a 400, with the reason as text."""
        expected = f"Bearer {self._cluster.state.control_token}"
        if not secrets.compare_digest(request.headers.get("Authorization", "").encode(), expected.encode()):
            return web.Response(
                status=401, text="the control endpoint needs the bearer token of the cluster's state file"
            )
        try:
            return await handler(request)
        except KeyError as error:
            return web.Response(status=404, text=str(error.args[0]))
        except (ValueError, msgspec.DecodeError) as error:
            return web.Response(status=400, text=str(error))

    async def list_nodes(self, request: web.Request) -> web.Response:
        return web.json_response([_describe_node(node) for node in self._cluster.fleet.nodes.values()])

    async def add_node(self, request: web.Request) -> web.Response:
        self._cluster.fleet.add()
        return web.json_response({"wanted": self._cluster.fleet.wanted}, status=202)

    async def notice(self, request: web.Request) -> web.Response:
        node = self._cluster.fleet.node(request.match_info["id"])
        body = await _body(request, NoticeBody)
        if body.deadline_s < 0:
            raise ValueError(f"deadline_s {body.deadline_s}: seconds from now, at least 0")
        if body.kind == "rebalance":
            node.metadata.recommend_rebalance(time.time())
        elif body.kind == "asg_terminate":
            node.metadata.set_lifecycle_state("Terminated")
        else:
            node.give_notice(body.kind, body.deadline_s, self._take)
        return web.json_response(_describe_node(node), status=202)

    def _take(self, node: LocalNode) -> None:
        self._cluster.fleet.take(node, "its notice ran out")

    async def withdraw(self, request: web.Request) -> web.Response:
        node = self._cluster.fleet.node(request.match_info["id"])
        node.withdraw_notice()
        return web.json_response(_describe_node(node))

    async def kill_node(self, request: web.Request) -> web.Response:
        node = self._cluster.fleet.node(request.match_info["id"])
        self._cluster.fleet.take(node, "killed without notice")
        return web.json_response(_describe_node(node), status=202)

    async def list_processes(self, request: web.Request) -> web.Response:
        return web.json_response([_describe_process(process) for process in self._cluster.processes.values()])

    async def kill_process(self, request: web.Request) -> web.Response:
        processes = self._cluster.processes
        name = request.match_info["name"]
        if name not in processes:
            raise KeyError(f"no process {name!r}; there are: {', '.join(sorted(processes))}")
        body = await _body(request, KillBody)
        pid = processes[name].kill(_signal(body.signal), body.restart_after_s)
        if pid is None:
            return web.Response(status=409, text=f"process {name} is not running now")
        return web.json_response({"name": name, "pid": pid}, status=202)


def _signal(value: int | str) -> int:
    try:
        return signal_number(value)
    except (KeyError, ValueError) as error:
        raise ValueError(f"signal {value!r} is not known here") from error


async def _body(request: web.Request, kind: type[_T]) -> _T:
    return msgspec.json.decode(await request.read() or b"{}", type=kind)


def _describe_node(node: LocalNode) -> dict[str, Any]:
    return {
        "node_id": node.node_id,
        "address": node.address,
        "state": node.state.value,
        "deadline": node.deadline,
        "metadata_url": node.metadata_url,
        "daemon_address": node.daemon_address,
    }


def _describe_process(process: ManagedProcess) -> dict[str, Any]:
    return {"name": process.spec.name, "pid": process.pid, "restarts": process.restarts, "log": str(process.spec.log)}
