"""A worker process of test_nothing_orphaned.py: it holds an attachment, writes real pages and commits made-up tokens, until
it is told to end or is killed in the middle."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection

from context_daemon.client import ContextClient, NotOwner
from context_daemon.kv_writer import KVWriter, Owned, Progress, SlotRange
from context_daemon.records import (
    CommitStatus,
    Finish,
    KVLayout,
    KVWatermark,
    Lease,
    TokenCommit,
    WorkerStatus,
)
from context_daemon.store import StoreUnavailable

LAYOUT = KVLayout("fp", "cpu-1", "float32", num_layers=2, num_kv_heads=1, head_dim=4, page_size=4)
PROMPT = 10


def serve(address: str, name: str, seed: int, pipe: Connection) -> None:
    """Answers each batch of leases with those it left unfinished, or with None when a store or the daemon was away."""
    worker = Worker(address, name, random.Random(seed))
    while (leases := pipe.recv()) is not None:
        try:
            pipe.send(worker.run(leases))
        except StoreUnavailable:
            worker.writer.detach()
            pipe.send(None)
    worker.client.close()


class Worker:
    def __init__(self, address: str, name: str, draw: random.Random) -> None:
        self.client = ContextClient(address)
        self.writer = KVWriter(self.client, LAYOUT, spare_blocks=64)
        self._name, self._draw, self._beat = name, draw, 0

    def run(self, leases: list[Lease]) -> list[Lease]:
        """As a worker does: restore, write, announce, commit, write on, and end, hand back or leave."""
        self._heartbeat()
        if not self.writer.attached:
            self.writer.attach()
        for lease in leases:
            if lease.token.epoch > 1 and self._draw.random() < 0.1:
                self._restore(lease)
        progress = self._write(leases, 0, self._draw.randint(1, PROMPT))
        first = [TokenCommit(one.key, one.token, 0, (5, 6), self._mark(one, progress)) for one in leases]
        mine = self._owned(leases, first)
        self._write(mine, PROMPT, PROMPT + 1)
        return self._end(mine)

    def _heartbeat(self) -> None:
        self._beat += 1
        facts = (self._beat, 0, 0, 8, 0, 9, 4, 99, 0.0, (), False, "ready", "", 1)
        self.client.heartbeat(WorkerStatus(self._name, "node-1", "m", "cpu-1", *facts))

    def _restore(self, lease: Lease) -> None:
        try:
            with self.client.restoring(lease.key, lease.token, self._name, LAYOUT, arena=self.writer) as stream:
                for page in stream.pages():
                    page.good()
        except NotOwner:
            return  # fenced meanwhile: its commit will say so

    def _write(self, leases: list[Lease], start: int, stop: int) -> dict[Owned, Progress]:
        raw = bytes((stop - start) * LAYOUT.slot_bytes)
        ranges: list[SlotRange] = []
        for one in leases:
            written = self.writer.write(one.key, one.token.epoch, PROMPT, start, raw)
            if written is None:  # no block is free: others come with an answer
                self.writer.announce(ranges)
                ranges, written = [], self.writer.write(one.key, one.token.epoch, PROMPT, start, raw)
            ranges += [written] if written is not None else []
        return self.writer.announce(ranges, [(one.key, one.token.epoch) for one in leases]).progress

    def _mark(self, lease: Lease, progress: dict[Owned, Progress]) -> KVWatermark | None:
        stored = progress[lease.key, lease.token.epoch].stored
        return KVWatermark(stored, 0, LAYOUT.fingerprint) if stored and self._draw.random() < 0.7 else None

    def _owned(self, leases: list[Lease], commits: list[TokenCommit]) -> list[Lease]:
        results = self.client.commit(commits)
        assert {result.status for result in results} <= {CommitStatus.OK, CommitStatus.FENCED}
        return [one for one, result in zip(leases, results, strict=True) if result.status is CommitStatus.OK]

    def _end(self, leases: list[Lease]) -> list[Lease]:
        left = [one for one in leases if self._draw.random() < 0.1]
        back = [one for one in leases if one not in left and self._draw.random() < 0.1]
        ends = [one for one in leases if one not in left and one not in back]
        self._owned(ends, [TokenCommit(one.key, one.token, 2, (7,), finish=Finish(True, b"{}")) for one in ends])
        for one in back:
            self.client.handover(one.key, one.token, 2)
        late = self._draw.sample(ends, min(3, len(ends)))
        self._write(late, 0, 5)  # a word that comes after the end
        for one in leases:
            self.writer.forget(one.key, one.token.epoch)
        return left
