"""What became of the durable store since the last look: restarted, come back without acknowledged writes, without jobs, or
full: it answers, and takes no writes."""

from __future__ import annotations

from collections.abc import Callable, Collection

from context_daemon.store import ContextStore
from orchestrator.events import EventLog

_WRITE_EVERY_S = 1.0
_LOST = (
    "the durable store came back without writes that it had acknowledged (incarnation {}): every owner is fenced, requests "
    "go on from what it still knows"
)
_DOUBT = (
    "the durable store was restarted while nobody led who could tell what it lost (incarnation {}): every owner is fenced, "
    "requests go on from what it knows"
)
_JOB_LOST = (
    "{} was running and is not in the durable store any more, which lost it: submit it again. If this was the whole store, "
    "look at its append-only file and the disk under it"
)


class StoreWatch:
    """`clock` is any monotonic one, in seconds."""

    def __init__(self, store: ContextStore, events: EventLog, clock: Callable[[], float]) -> None:
        self._store = store
        self._events = events
        self._clock = clock
        self._wrote_at = -_WRITE_EVERY_S
        self._server_id = ""
        self._jobs: set[str] = set()
        self.incarnation = 0  # leases under an older one are no more

    async def look(self) -> bool:
        """True when workers could not show life meanwhile: every lease gets a full lease time. Raises StoreRefusesWrites for
        a store that can be read only: their heartbeats are refused as well, which no reader sees."""
        server_id = await self._store.server_id()
        anew = server_id != self._server_id
        if anew:
            await self._meet(server_id)
        await self._write()
        incarnation = await self._store.incarnation()
        if incarnation != self.incarnation:
            # Whoever raised it may have died before every job was fenced: this raises nothing, and goes over all of them.
            await self._store.bump_incarnation(incarnation - 1)
            if self.incarnation:
                self._events.add("store_lost_writes", _LOST.format(incarnation))
            self.incarnation, anew = incarnation, True
        return anew

    def doubt(self) -> None:
        """It was away or refused something: the next look writes, and each one until that is taken."""
        self._wrote_at = -_WRITE_EVERY_S

    async def _write(self) -> None:
        now = self._clock()
        if now - self._wrote_at >= _WRITE_EVERY_S:
            await self._store.note_server(self._server_id)
            self._wrote_at = now

    async def _meet(self, server_id: str) -> None:
        if self._server_id:
            self._events.add("store_restarted", "the durable store was restarted; every lease gets a full lease time")
        else:
            noted = await self._store.noted_server()
            if noted not in ("", server_id):
                self.incarnation = await self._store.bump_incarnation(await self._store.incarnation())
                self._events.add("store_restarted", _DOUBT.format(self.incarnation))
        self._server_id = server_id
        self.doubt()

    async def miss(self, active: Collection[str]) -> None:
        """Say so when a job that was active is not there at all: jobs end, but do not go."""
        for job_id in sorted(self._jobs.difference(active)):
            if await self._store.get_job(job_id) is None:
                self._events.add("job_lost", _JOB_LOST.format(job_id))
        self._jobs = set(active)
