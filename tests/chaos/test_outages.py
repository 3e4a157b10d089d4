"""What must survive the loss of the parts that are not workers: the orchestrator and either Redis."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.client import TideoverClient
from orchestrator.verify import compare
from protos import jobs_pb2
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.faults import run_job, wait_results

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

JOB = Path(__file__).parent / "faults.jsonl"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(2) as running:
        yield running


@pytest.fixture(scope="module")
def reference(cluster: Cluster) -> list[bytes]:
    return run_job(TideoverClient(cluster.address), JOB, "reference")[1]


def _start(client: TideoverClient, name: str, tokens: int) -> str:
    """Submit, and wait until `tokens` tokens are committed."""
    job_id = client.create_job(JOB, request_id=f"{name}-{time.time_ns()}").job_id
    while client.get_job(job_id).output_tokens < tokens:
        time.sleep(0.05)
    return str(job_id)


def _survived(client: TideoverClient, job_id: str, reference: list[bytes]) -> jobs_pb2.Job:
    verdict = compare(reference, wait_results(client, job_id))
    assert verdict.ok, verdict
    job = client.get_job(job_id)
    assert job.state == jobs_pb2.JOB_STATE_COMPLETED and job.completed + job.failed == job.total
    return job


def test_killed_orchestrator_is_replaced_and_adopts_the_workers(cluster: Cluster, reference: list[bytes]) -> None:
    client = TideoverClient(cluster.address)
    workers = {worker.worker_id: worker.pid for worker in client.workers()}
    job_id = _start(client, "orchestrator", 100)
    cluster.kill_process("orchestrator")
    _survived(client, job_id, reference)
    assert {worker.worker_id: worker.pid for worker in client.workers()} == workers
    assert client.interruptions(job_id) == [], "no healthy owner may lose its lease"


@pytest.mark.parametrize(("server", "outage_s"), [("redis-durable", 60.0), ("redis-kv", 20.0)])
def test_killed_redis_costs_time_only(cluster: Cluster, reference: list[bytes], server: str, outage_s: float) -> None:
    client = TideoverClient(cluster.address, patience_s=3 * outage_s)
    workers = {worker.worker_id: worker.pid for worker in client.workers()}
    job_id = _start(client, server, 100)
    cluster.kill_process(server, restart_after_s=outage_s)
    _survived(client, job_id, reference)
    assert {worker.worker_id: worker.pid for worker in client.workers()} == workers, "nothing may crash"
    assert client.interruptions(job_id) == [], "no healthy owner may lose its lease"


def test_frozen_worker_loses_its_leases_and_is_fenced_when_it_wakes(cluster: Cluster, reference: list[bytes]) -> None:
    client = TideoverClient(cluster.address)
    cluster.wait_workers(2)
    job_id = _start(client, "frozen", 100)
    frozen = max(client.workers(), key=lambda worker: worker.running)
    process = psutil.Process(frozen.pid)
    process.suspend()
    try:
        until = time.monotonic() + 60
        while not client.interruptions(job_id) and time.monotonic() < until:
            time.sleep(0.05)
        _survived(client, job_id, reference)
    finally:
        process.resume()
    rows = client.interruptions(job_id)
    assert rows and {row.cause for row in rows} == {"lease_expired"}
    # From the last commit on: one lease time, and up to a heartbeat and a round of the router.
    assert max(row.detect_ms for row in rows) < 7000
    assert {row.source for row in rows} == {frozen.worker_id}, "nothing may be given to a frozen worker"
    assert _drops_everything(client, frozen.worker_id), "the one that woke must drop what is not its own any more"


def _drops_everything(client: TideoverClient, worker_id: str, timeout_s: float = 20.0) -> bool:
    """Until the worker is listed (its heartbeat may have run out while it was frozen) and holds nothing."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if any(w.worker_id == worker_id and not w.running + w.waiting for w in client.workers()):
            return True
        time.sleep(0.1)
    return False
