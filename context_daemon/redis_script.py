"""The connection to a Redis-compatible server and its scripts: time-outs, script loading and error names."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from context_daemon.cancellation import heard
from context_daemon.store import StaleLeader, StoreRefusesWrites, StoreUnavailable, UnknownJob
from context_daemon.write_mark import WriteMark

Arg = str | bytes | int | float
# What these do is said again by whoever did it, or is how a loss is answered: they leave no mark.
_UNMARKED = {"live_values", "list_requests", "get_request", "put_expiring", "bump_incarnation", "fence_job"}
_LUA = Path(__file__).parent / "lua"


@cache
def script_text(name: str) -> str:
    return (_LUA / "common.lua").read_text() + (_LUA / f"{name}.lua").read_text()


@cache
def script_sha(name: str) -> str:
    return hashlib.sha1(script_text(name).encode(), usedforsecurity=False).hexdigest()


class ScriptCall:
    """One script run: its only key is the first of its slot."""

    __slots__ = ("args", "key", "name")

    def __init__(self, name: str, key: str, args: Sequence[Arg] = ()) -> None:
        self.name, self.key, self.args = name, key, args

    def by_hash(self) -> tuple[Arg, ...]:
        return ("EVALSHA", script_sha(self.name), 1, self.key, *self.args)

    def by_text(self) -> tuple[Arg, ...]:
        return ("EVAL", script_text(self.name), 1, self.key, *self.args)


def connect(url: str, timeout_s: float, greet: Callable[[Any], Awaitable[None]] | None = None) -> Redis:
    """A client that raises within `timeout_s` and never repeats a command behind our back. `greet` is awaited with each new
    connection before anything else is said over it."""
    return Redis.from_url(
        url,
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[],
        decode_responses=False,
        redis_connect_func=greet,
    )


def raise_named(error: Exception, address: str) -> NoReturn:
    """Raise what the contract calls it: away, refusing writes, stale leader, unknown job, or a wrong state."""
    text = str(error)
    code = text.split(" ", 1)[0]
    if isinstance(error, OutOfMemoryError | ReadOnlyError) or code in ("MISCONF", "OOM", "READONLY", "NOREPLICAS"):
        raise StoreRefusesWrites(f"durable store {address} refuses writes: {text}. {_remedy(text)}") from error
    if isinstance(error, RedisConnectionError | RedisTimeoutError | OSError):
        raise StoreUnavailable(f"store {address} does not answer: {text or type(error).__name__}") from error
    if code == "STALELEADER":
        raise StaleLeader(text.removeprefix(code).strip()) from error
    if code == "NOJOB":
        raise UnknownJob(text.removeprefix(code).strip()) from error
    if code == "BADSTATE":
        raise ValueError(text.removeprefix(code).strip()) from error
    raise error


def _remedy(text: str) -> str:
    if "No space left" in text:
        return "The disk under its append-only file is full: free space there, it then goes on by itself."
    if "AOF" in text or text.startswith("MISCONF"):
        return "Its append-only file cannot be written: look at the server's log and the disk under its folder."
    if "OOM" in text or "maxmemory" in text:
        return "Its memory limit is reached: raise maxmemory or delete finished jobs."
    return "Point --durable-url at a primary that takes writes."


class RedisScripts:
    """Runs commands and scripts; StoreUnavailable when the server is away, whatever the reason."""

    def __init__(
        self, url: str, *, timeout_s: float = 1.0, writer: str = "", on_loss: Callable[[], None] = lambda: None
    ) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._mark = WriteMark(writer) if writer else None
        self._on_loss = on_loss
        self._greeting = asyncio.Lock()
        self._redis = connect(url, timeout_s, self._greet if writer else None)
        kwargs = self._redis.connection_pool.connection_kwargs
        self.address = f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}"

    async def _greet(self, connection: Any) -> None:
        """Each new connection may be to another server than before. Nothing is said to one that lost what we had been
        acknowledged until its owners are fenced: if that fails, the connection is none."""
        try:
            await connection.on_connect()
            if self._mark is not None:
                await self._compare(connection, self._mark)
        except BaseException:
            await connection.disconnect()
            raise

    async def _compare(self, connection: Any, mark: WriteMark) -> None:
        async with self._greeting:
            acknowledged = mark.remembered
            await connection.send_command("GET", mark.key)
            found = int(await connection.read_response() or 0)
            if mark.lost(found, acknowledged):
                await self._went_back(found, mark)
                mark.start_over(found)
                self._on_loss()

    async def _went_back(self, found: int, mark: WriteMark) -> None:
        """What is done about a loss."""

    def _saw(self, incarnation: int) -> None:
        if self._mark is not None:
            self._mark.saw(incarnation)

    async def _command(self, *args: Arg) -> Any:
        try:
            with heard():
                return await self._redis.execute_command(*args)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise_named(error, self.address)

    async def _pipeline(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """One round trip; replies in order, errors among them as values."""
        if not commands:
            return []
        try:
            with heard():
                async with self._redis.pipeline(transaction=False) as pipe:
                    for command in commands:
                        pipe.execute_command(*command)
                    return list(await pipe.execute(raise_on_error=False))
        except (RedisError, OSError) as error:
            raise_named(error, self.address)

    async def _checked(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        replies = await self._pipeline(commands)
        for reply in replies:
            if isinstance(reply, Exception):
                raise_named(reply, self.address)
        return replies

    async def _script(self, name: str, key: str, args: Sequence[Arg] = ()) -> Any:
        return (await self._scripts([ScriptCall(name, key, args)]))[0]

    async def _scripts(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Pipelined. A restarted server knows no hashes: those calls did not run and are sent with their text."""
        replies = await self._marked([call.by_hash() for call in calls], calls)
        for index, reply in enumerate(replies):
            if isinstance(reply, NoScriptError):
                (reply,) = await self._marked([calls[index].by_text()], [calls[index]])
                replies[index] = reply
            if isinstance(reply, Exception):
                raise_named(reply, self.address)
        return replies

    async def _marked(self, commands: Sequence[Sequence[Arg]], calls: Sequence[ScriptCall]) -> list[Any]:
        """With our mark behind them, if they write anything. Replies to `commands` only."""
        if self._mark is None or all(call.name in _UNMARKED for call in calls):
            return await self._pipeline(commands)
        replies = await self._pipeline([*commands, *self._mark.commands()])
        number = replies[len(commands)]
        if isinstance(number, Exception):
            raise_named(number, self.address)
        self._mark.acknowledged(number)
        return replies[: len(commands)]

    async def server_id(self) -> str:
        for line in (await self._raw_info()).splitlines():
            name, _, value = line.partition(":")
            if name == "run_id":
                return value.strip()
        raise StoreUnavailable(f"store {self.address} answers INFO without a run_id: is it a Redis-compatible server?")

    async def _raw_info(self) -> str:
        info = await self._command("INFO", "server")
        if isinstance(info, dict):  # redis-py parses INFO by the command's name
            return "\n".join(f"{name}:{value}" for name, value in info.items())
        return bytes(info).decode()

    async def ping(self) -> None:
        await self._command("PING")

    async def close(self) -> None:
        with suppress(RedisError, OSError):  # closing a connection to a server that is gone already
            await self._redis.aclose()


def text(value: Any, default: str = "") -> str:
    return default if value is None else bytes(value).decode()


def pairs(flat: Sequence[bytes] | dict[bytes, bytes]) -> dict[str, bytes]:
    """A hash as the server lists it: field, value, field, value."""
    if isinstance(flat, dict):
        return {name.decode(): value for name, value in flat.items()}
    return {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
