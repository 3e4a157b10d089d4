"""gRPC channels to other nodes' daemons, closed when nobody asks there any more.

A channel whose peer is gone dials it every second for as long as it is open, and spot nodes go for good. gRPC's own
`grpc.client_idle_timeout_ms` does not do: it closes a channel's first connection and no later one (grpcio 1.85).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

_OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 1000)]


@dataclass(slots=True)
class _Open:
    channel: grpc.aio.Channel
    users: int = 0
    end: asyncio.TimerHandle | None = None


class PeerChannels:
    """One channel to each address, open from its first use until `idle_s` after its last. For one event loop."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._open: dict[str, _Open] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def used(self, address: str) -> Iterator[grpc.aio.Channel]:
        """Stays open for as long as the block runs."""
        if address not in self._open:
            self._open[address] = _Open(grpc.aio.insecure_channel(address, options=_OPTIONS))
        one = self._open[address]
        if one.end is not None:
            one.end.cancel()
        one.users += 1
        try:
            yield one.channel
        finally:
            one.users -= 1
            if one.users == 0:
                one.end = asyncio.get_running_loop().call_later(self._idle_s, self._end, address)

    def _end(self, address: str) -> None:
        one = self._open.pop(address, None)
        if one is not None:
            task = asyncio.create_task(one.channel.close(None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Calls under way are cancelled. Nothing may be used again."""
        for address, one in list(self._open.items()):
            if one.end is not None:
                one.end.cancel()
            self._end(address)
        await asyncio.gather(*self._closing)
