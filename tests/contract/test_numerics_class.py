"""Numerics classes on real workers and the real router: kept together where possible, marked where not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from context_daemon.records import RequestKey, SamplingParams
from context_daemon.redis_store import RedisStore
from orchestrator.events import EventLog
from orchestrator.routing.placement import PlacementPolicy
from orchestrator.routing.router import Router, RouterOptions
from tests.contract.router_rig import Gateway
from tests.contract.worker_rig import PROMPTS, Rig, spec
from tests.unit.tiny_model import write_tiny_model
from worker.engine.config import EngineConfig
from worker.engine.engine import TorchEngine
from worker.engine.protocol import EngineRequest, SlotSpan

COUNT = len(PROMPTS)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder: Path = tmp_path_factory.mktemp("classes")
    with Rig(folder, write_tiny_model(folder / "tiny")) as made:
        yield made


async def route(rig: Rig, gateway: Gateway, patience_s: float, until: Callable[[], bool]) -> None:
    """Run the real router over the real store until something holds."""
    store = RedisStore(rig.servers.durable.url)
    options = RouterOptions(placement=PlacementPolicy(class_patience_s=patience_s))
    router = Router(store, gateway, EventLog(time.time), options)
    end = time.monotonic() + 40
    while not await asyncio.to_thread(until):
        assert time.monotonic() < end, "the router did not get there"
        await router.tick(1)
        await asyncio.sleep(0.02)
    await router.tick(1)
    await store.close()


def test_engines_whose_threads_differ_are_of_different_classes(rig: Rig) -> None:
    one, two = rig.worker("threads-1", "n1", num_threads=1), rig.worker("threads-2", "n2", num_threads=2)
    assert one.engine.layout.numerics_class != two.engine.layout.numerics_class
    assert one.engine.layout.fingerprint != two.engine.layout.fingerprint, "KV of one counts as absent for the other"
    rig.retire(one)
    rig.retire(two)


def computed(rig: Rig, num_threads: int) -> tuple[str, bytes]:
    """An engine's class, and what it computes: the KV bytes of a prefill in chunks and of 60 decode steps."""
    config = EngineConfig(
        model=str(rig.model), num_threads=num_threads, max_num_batched_tokens=32, max_num_seqs=4, num_pages=64
    )
    engine = TorchEngine.load(config)
    key = RequestKey("bytes", 1)
    engine.add(EngineRequest(key, tuple(range(90)), SamplingParams(seed=1, max_tokens=60, temperature=0.0)))
    positions = 0
    while engine.has_work():
        positions = engine.step().kv_len.get(key, positions)
    out = bytearray(positions * engine.layout.slot_bytes)
    engine.export_slots([SlotSpan(key, 0, positions)], memoryview(out))
    return engine.layout.numerics_class, bytes(out)


def test_one_class_means_the_same_bytes(rig: Rig) -> None:
    """What differs must be named differently, and what is named the same must not differ."""
    runs = [computed(rig, threads) for threads in (1, 2, 1, 2)]
    for name, kv in runs:
        for other, other_kv in runs:
            assert name != other or kv == other_kv
    assert len({name for name, _ in runs}) == 2


async def test_a_request_waits_for_its_class_and_crosses_only_when_that_is_gone(rig: Rig) -> None:
    specs = [spec(line, prompt, rig.tokenizer, max_tokens=400) for line, prompt in enumerate(PROMPTS, 1)]
    # All are loaded before the job starts: it goes on while a model loads, and is short.
    first, same = rig.worker("first", "n1", num_threads=1), rig.worker("same", "n2", num_threads=1)
    other = rig.worker("other", "n2", num_threads=2)
    gateway = Gateway(first)
    await asyncio.to_thread(rig.submit, "cross", specs)
    await route(rig, gateway, 60.0, lambda: rig.tokens("cross") > 100)

    # Its own class is there: another class gets nothing, and the answers stay exact.
    gateway.workers |= {"same": same, "other": other}
    gateway.bury(rig, "first")
    before = await asyncio.to_thread(rig.tokens, "cross")
    await route(rig, gateway, 0.0, lambda: rig.tokens("cross") > before + 100)
    rows = await asyncio.to_thread(rig.interruptions, "cross")
    assert {row.target for row in rows} == {"same"} and all(row.restored_positions for row in rows)

    # Its class is gone: tokens are kept, the request goes on, and the line says so.
    gateway.bury(rig, "same")
    await route(rig, gateway, 0.5, lambda: len(rig._lines("cross")) == COUNT)
    lines = [json.loads(line) for line in await asyncio.to_thread(rig._lines, "cross")]
    rows = await asyncio.to_thread(rig.interruptions, "cross")
    crossed = {row.custom_id for row in rows if row.target == "other"}
    assert crossed
    for line in lines:
        body = line["response"]["body"]
        assert body["usage"]["completion_tokens"] == 400
        assert body["tideover"]["exact"] is (line["custom_id"] not in crossed)
    assert all(not row.restored_positions for row in rows if row.target == "other"), "KV of another class is absent"
