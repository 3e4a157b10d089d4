"""A worker whose pages were pushed out of a small arena before the KV store had them: it writes them again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from context_daemon.records import RequestKey, RequestSpec
from context_daemon.store import ContextStore
from orchestrator.verify import compare
from tests.contract.worker_rig import PROMPTS, PacedEngine, Rig, keys, spec, until
from tests.unit.tiny_model import write_tiny_model

COUNT, STALLED = 12, 300  # requests, and how far they get on average while the KV server hangs
ENGINE = {"max_num_seqs": COUNT, "num_pages": 512}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path, write_tiny_model(tmp_path / "tiny"), "--arena-bytes", "1MiB") as made:
        yield made


@pytest.fixture
def specs(rig: Rig) -> list[RequestSpec]:
    """Half as much KV again as the arena holds, by the time the server is back."""
    return [spec(line, PROMPTS[line % len(PROMPTS)], rig.tokenizer, max_tokens=480) for line in range(1, COUNT + 1)]


def watermarks(rig: Rig, job_id: str) -> list[int]:
    async def read(store: ContextStore) -> list[int]:
        records = [await store.get_request(key) for key in keys(job_id, COUNT)]
        return [record.watermark for record in records if record is not None]

    found: list[int] = rig.store(read)
    return found


def test_holes_are_filled_by_a_running_worker_and_then_its_machine_may_go(
    rig: Rig, specs: list[RequestSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = rig.worker("reference", "n2", **ENGINE)
    rig.submit("reference", specs)
    rig.lease_all("reference", reference)
    lines = rig.results("reference", COUNT)
    rig.retire(reference)

    worker, holes = rig.worker("a", "n1", **ENGINE), set[RequestKey]()
    ledger = worker.runtime._ledger
    listen = ledger.kv_holes

    def note(told: Mapping[tuple[RequestKey, int], tuple[int, int]]) -> None:
        holes.update(key for (key, _), (start, stop) in told.items() if start < stop)
        listen(told)

    monkeypatch.setattr(ledger, "kv_holes", note)
    rig.submit("job", specs)
    rig.lease_all("job", worker)
    rig.wait_tokens("job", COUNT * 20)
    rig.servers.kv.pause()
    rig.wait_tokens("job", COUNT * STALLED)
    rig.servers.kv.resume()
    monkeypatch.setattr(PacedEngine, "STEP_S", 0.08)  # time to catch up before the end
    until(lambda: min(watermarks(rig, "job")) >= STALLED - 20, "the store to have it all")
    assert holes, "something was pushed out unshipped"
    assert len(ledger.all()) == COUNT, "all are still at it"

    worker.runtime._loop.halt()
    rig.kill_daemon("n1")
    rig.retire(worker)
    monkeypatch.setattr(PacedEngine, "STEP_S", 0.0)
    rig.requeue("job")
    rig.lease_all("job", rig.worker("b", "n2", **ENGINE))
    assert compare(lines, rig.results("job", COUNT)).ok
    rows = rig.interruptions("job")
    assert len(rows) == COUNT and all(row.restored_positions >= STALLED - 20 for row in rows)
    assert all(row.recomputed_tokens == row.prompt_tokens + row.tokens - 1 - row.restored_positions for row in rows)
