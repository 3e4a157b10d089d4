"""The part of the AWS instance metadata service (IMDSv2) that tells a spot VM of its end, as a server of our own.

Paths, status codes and shapes are those of the AWS documentation ("Use IMDSv2", "Spot Instance interruption notices",
"Rebalance recommendations"): a token by PUT with its TTL, every GET refused with 401 without a valid one, 404 until
there is something to say. A v1 call (GET without a token) is refused, as on an instance with `HttpTokens: required`.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import msgspec
from aiohttp import web

TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
MAX_TTL_S = 21600
ACTIONS = ("terminate", "stop", "hibernate")

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class MachineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    instance_id: str
    instance_type: str = "local.large"
    availability_zone: str = "local-1a"
    local_ipv4: str = "127.0.0.1"

    @property
    def region(self) -> str:
        return self.availability_zone[:-1]


class MetadataEmulator:
    """One machine's metadata service. `clock` gives seconds since the epoch; tokens live by it.

    The state is set by plain calls; requests only read it.
    """

    def __init__(self, identity: MachineIdentity, clock: Callable[[], float]) -> None:
        self._identity = identity
        self._clock = clock
        self._tokens: dict[str, float] = {}
        self._action: dict[str, str] | None = None
        self._rebalance: dict[str, str] | None = None
        self._lifecycle_state = "InService"

    def announce(self, action: str, at: float) -> None:
        """Say that the machine will be terminated, stopped or hibernated at `at`, a whole second, as AWS says it."""
        if action not in ACTIONS:
            raise ValueError(f"spot action {action!r}: AWS knows {', '.join(ACTIONS)}")
        self._action = {"action": action, "time": timestamp(at)}

    def withdraw(self) -> None:
        self._action = None

    def recommend_rebalance(self, at: float) -> None:
        self._rebalance = {"noticeTime": timestamp(at)}

    def set_lifecycle_state(self, state: str) -> None:
        """The Auto Scaling group's target for this machine: InService, Terminated, Standby, …"""
        self._lifecycle_state = state

    def revoke_tokens(self) -> None:
        """Forget every token given out, as a restart of the service does: the next GET with one is a 401."""
        self._tokens.clear()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._authorize])
        app.router.add_put("/latest/api/token", self._put_token)
        app.router.add_get("/latest/meta-data/spot/instance-action", self._get_action)
        app.router.add_get("/latest/meta-data/spot/termination-time", self._get_termination_time)
        app.router.add_get("/latest/meta-data/events/recommendations/rebalance", self._get_rebalance)
        app.router.add_get("/latest/meta-data/autoscaling/target-lifecycle-state", self._get_lifecycle_state)
        for path, value in self._facts().items():
            app.router.add_get(path, _constant(value))
        return app

    def _facts(self) -> dict[str, str]:
        machine = self._identity
        return {
            "/latest/meta-data/instance-id": machine.instance_id,
            "/latest/meta-data/instance-type": machine.instance_type,
            "/latest/meta-data/instance-life-cycle": "spot",
            "/latest/meta-data/local-ipv4": machine.local_ipv4,
            "/latest/meta-data/placement/availability-zone": machine.availability_zone,
            "/latest/meta-data/placement/region": machine.region,
        }

    @web.middleware
    async def _authorize(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path == "/latest/api/token":
            return await handler(request)
        expires = self._tokens.get(request.headers.get(TOKEN_HEADER, ""))
        if expires is None or expires <= self._clock():
            return web.Response(status=401, text="Unauthorized")
        return await handler(request)

    async def _put_token(self, request: web.Request) -> web.Response:
        ttl = request.headers.get(TTL_HEADER, "")
        if not ttl.isdigit() or not 1 <= int(ttl) <= MAX_TTL_S:
            return web.Response(status=400, text="Bad Request")
        if "X-Forwarded-For" in request.headers:  # AWS refuses tokens to what came through a proxy
            return web.Response(status=403, text="Forbidden")
        now = self._clock()
        self._tokens = {token: expires for token, expires in self._tokens.items() if expires > now}
        token = secrets.token_urlsafe(40)
        self._tokens[token] = now + int(ttl)
        return web.Response(text=token, headers={TTL_HEADER: ttl})

    async def _get_action(self, request: web.Request) -> web.Response:
        return _json_or_404(self._action)

    async def _get_termination_time(self, request: web.Request) -> web.Response:
        if self._action is None or self._action["action"] != "terminate":
            return web.Response(status=404, text="Not Found")
        return web.Response(text=self._action["time"])

    async def _get_rebalance(self, request: web.Request) -> web.Response:
        return _json_or_404(self._rebalance)

    async def _get_lifecycle_state(self, request: web.Request) -> web.Response:
        return web.Response(text=self._lifecycle_state)


def timestamp(at: float) -> str:
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _json_or_404(content: dict[str, str] | None) -> web.Response:
    if content is None:
        return web.Response(status=404, text="Not Found")
    return web.json_response(content)


def _constant(value: str) -> _Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(text=value)

    return handler
