"""Garbage is collected all the time while a job runs, is interrupted and restored: every answer is the same, and what a
restore could use is never missing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from context_daemon.operator_client import collect_pages, list_pages
from orchestrator.verify import compare
from tests.contract.worker_rig import PROMPTS, Rig, until
from tests.unit.tiny_model import write_tiny_model

COUNT = len(PROMPTS)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("collect")
    with Rig(folder, write_tiny_model(folder / "tiny")) as made:
        yield made


class Collecting:
    """Both daemons in turn, without a pause, until the end of the block."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.rounds = 0
        self.failures: list[BaseException] = []

    def __enter__(self) -> Collecting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for address in self._rig.addresses.values():
                    asyncio.run(collect_pages(address, 30.0, dry_run=False, stored=True))
                self.rounds += 1
        except Exception as error:  # noqa: BLE001 - told by the test
            self.failures.append(error)


def test_collecting_all_the_time_takes_nothing_that_is_needed(rig: Rig) -> None:
    specs = rig.specs()
    reference = rig.undisturbed("reference", specs, "n2")
    rig.submit("job", specs)
    with Collecting(rig) as collecting:
        worker = rig.worker("w0", "n1")
        rig.lease_all("job", worker)
        for turn in range(1, 4):
            rig.wait_tokens("job", 120 * turn)
            begun = collecting.rounds
            until(lambda begun=begun: collecting.rounds >= begun + 2, "two rounds while it runs")  # type: ignore[misc]
            rig.retire(worker)
            rig.requeue("job")
            worker = rig.worker(f"w{turn}", ("n1", "n2")[turn % 2])
            rig.lease_all("job", worker)
        assert compare(reference, rig.results("job", COUNT)).ok
    assert collecting.failures == [] and collecting.rounds >= 6 and worker.deaths == []
    rows = [row for row in rig.interruptions("job") if row.restored_positions is not None]
    assert len(rows) >= COUNT, "the requests were interrupted in their middle"
    for row in rows:
        assert row.restored_positions is not None and row.restored_positions >= row.watermark, row
    for address in rig.addresses.values():
        asyncio.run(collect_pages(address, 30.0, dry_run=False, stored=True))
        left = asyncio.run(list_pages(address, 30.0, stored=True))
        assert not left.arena and not left.stored, "all of it is over"
