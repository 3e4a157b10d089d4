"""KVStore over several servers, by consistent hashing: all pages of a request lie on one of them.

Why a request is not spread over the servers. A restore uses pages up to the first that is absent. When one of n servers
is lost, whole requests lose 1/n of all prefixes; pages spread one by one (or in groups) would cut nearly every prefix
after about n pages (groups), that is, lose nearly everything. And little would be gained: one daemon reads hardly faster
from three servers than from one, because its own core is the limit (over loopback 0.7-1.2 GB/s from one, 0.7-1.5 from
three), while a drain reads many requests at once, which lie on all servers anyway. It also leaves each write one server
and one generation. The price: a request's KV must fit into one server (16 GiB for 128 Ki tokens of an 8B model), and few
requests load the servers unevenly.

Placement is by (job, line, choice) and the servers' names alone, so that every epoch's pages lie together and all daemons
that are given the same servers agree, whatever the order. With a server more or less, about 1/n of the requests have a
new place; what they had written is absent there, and goes from the old place with its TTL.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress

from context_daemon.hash_ring import HashRing
from context_daemon.kv_node import KVNode, KVWriteResult
from context_daemon.kv_urls import server_names
from context_daemon.rates import LinkRate
from context_daemon.read_ahead import read_ahead
from context_daemon.records import RequestKey
from context_daemon.redis_kv import RedisKV
from context_daemon.store import KVStore, SlotWrite, StoredPage, StoreUnavailable


class KVCluster:
    """Callers that know of several servers use `write_each`; `write_slots` is for those that know KVStore only.

    `reads_at_once` bounds the pages under way from one server, all restores together, each by a GET on a connection of
    its own. Measured for one request, pages of 0.75 to 2 MiB, in GB/s with 1, 2 and 4 (tests/perf/bench_kv_cluster.py):
    0.3-0.7, 0.7-1.0 and 0.7-1.4 half a millisecond away; 0.2-0.5, 0.3-0.7 and 0.5-0.9 two milliseconds away; on the same
    host they are alike, and 8 is no better.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float = 2.0,
        ttl_s: int = 6 * 3600,
        reads_at_once: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError for a wrong or repeated URL. Connects to nothing yet."""
        if reads_at_once < 1:
            raise ValueError(f"a KV cluster reads at least one page at once, not {reads_at_once}")
        self._ahead = reads_at_once
        self._nodes = {
            name: KVNode(RedisKV(url, timeout_s=timeout_s, ttl_s=ttl_s), reads_at_once, clock)
            for name, url in server_names(urls).items()
        }
        self._ring = HashRing(self._nodes)
        self._generations = dict.fromkeys(self._ring.nodes, "")

    @property
    def servers(self) -> tuple[str, ...]:
        return self._ring.nodes

    def server_of(self, key: RequestKey) -> str:
        return self._ring.node(f"{key.job_id}/{key.line}.{key.choice}")

    async def write_each(self, writes: Sequence[SlotWrite]) -> list[KVWriteResult]:
        """Write to all servers at once; a server that is away fails its own writes only. Results in the order of `writes`.

        What the caller must do. Keep the last generation of each request (from `generation` before a restore, then from its
        writes). Another one with a write: the write counts, but that request's earlier pages, of all epochs, may be gone:
        its watermark is not to be raised by this write, and what is resident is written again from position 0. An error:
        the write does not count and may be repeated; nothing else is known. Requests whose generation stayed are whole:
        they are on another server. Raises ValueError when a write is malformed; others of the call may have been made.
        """
        places = [self.server_of(write.key) for write in writes]
        groups: dict[str, list[SlotWrite]] = {place: [] for place in places}
        for place, write in zip(places, writes, strict=True):
            groups[place].append(write)
        answers = await asyncio.gather(*(self._nodes[p].write(g) for p, g in groups.items()), return_exceptions=True)
        results: dict[str, KVWriteResult] = {}
        for place, answer in zip(groups, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            results[place] = answer
        return [results[place] for place in places]

    async def write_slots(self, writes: Sequence[SlotWrite]) -> str:
        """As KVStore says, the cluster being one server: raises StoreUnavailable when any write failed (others were made),
        and the generation changes when any server's does. A server that is away and has no part in `writes` counts as
        unchanged until it is back."""
        results = await self.write_each(writes)
        errors = sorted({result.error for result in results if result.error})
        if errors:
            raise StoreUnavailable("; ".join(errors))
        written = {self.server_of(write.key): result.generation for write, result in zip(writes, results, strict=True)}
        self._generations |= written
        await asyncio.gather(*(self._learn_generation(name) for name in self._ring.nodes if name not in written))
        together = "".join(f"{name}={self._generations[name]};" for name in self._ring.nodes)
        return hashlib.blake2b(together.encode(), digest_size=8).hexdigest()

    async def _learn_generation(self, name: str) -> None:
        try:
            self._generations[name] = await self._nodes[name].generation()
        except StoreUnavailable:
            return  # what was known stands: nothing of this call depends on it

    async def generation(self, key: RequestKey) -> str:
        """Of the server with this request's pages. Asked before a restore, it tells whether what was restored is still there
        when the first write is made."""
        return await self._nodes[self.server_of(key)].generation()

    async def read_page(self, key: RequestKey, epoch: int, layout: str, page: int) -> bytes | None:
        return await self._nodes[self.server_of(key)].read(key, epoch, layout, page)

    async def read_pages(
        self, key: RequestKey, epochs: Mapping[int, int], layout: str, pages: Iterable[int]
    ) -> AsyncGenerator[tuple[int, bytes]]:
        """`(page, framed slots)` in the order of `pages`, each from under `epochs[page]`, up to the first that is absent or
        has no epoch: what comes after a hole is of no use. At most `reads_at_once` pages are in memory besides the one
        that the caller holds. Raises StoreUnavailable in its turn when the server is away. To stop early, wrap it in
        `contextlib.aclosing`."""
        node = self._nodes[self.server_of(key)]

        async def fetch(page: int) -> tuple[int, bytes | None]:
            return page, await node.read(key, epochs[page], layout, page) if page in epochs else None

        async with aclosing(read_ahead(fetch, pages, self._ahead)) as found:
            async for page, framed in found:
                if framed is None:
                    return
                yield page, framed

    async def probe(self) -> LinkRate | None:
        """How fast pages come from the first server that answers; None when none does."""
        for node in self._nodes.values():
            with suppress(StoreUnavailable):
                return await node.probe(self._ahead)
        return None

    async def delete_request(self, key: RequestKey, epochs: Sequence[int], layout: str, pages: int) -> None:
        await self._nodes[self.server_of(key)].delete(key, epochs, layout, pages)

    async def list_pages(self, job_id: str = "") -> AsyncGenerator[list[StoredPage], None]:
        away: list[str] = []
        for node in self._nodes.values():
            try:
                async with aclosing(node.list_pages(job_id)) as found:
                    async for pages in found:
                        yield pages
            except StoreUnavailable as error:
                away.append(str(error))
        if away:
            raise StoreUnavailable("; ".join(away))

    async def delete_pages(self, pages: Sequence[StoredPage]) -> int:
        """On every server: where a server was added or taken away since, a page may lie where nobody looks for it."""
        return sum(await asyncio.gather(*(node.delete_pages(pages) for node in self._nodes.values())))

    async def close(self) -> None:
        await asyncio.gather(*(node.close() for node in self._nodes.values()))


def _conforms(store: KVCluster) -> KVStore:
    return store
