"""Fault points over a real job on real processes: three of them in every test run, twenty by `make test-faults`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.client import TideoverClient
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.faults import Reference, check, draw, run_with_fault, undisturbed

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(3000)]

SEEDS = range(1, int(os.environ.get("TIDEOVER_FAULT_POINTS", "3")) + 1)
JOB = Path(__file__).parent / "faults.jsonl"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(workers=2) as running:
        yield running


@pytest.fixture(scope="module")
def reference(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return undisturbed(TideoverClient(cluster.address), JOB, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_survive_a_fault_to_the_byte(cluster: Cluster, reference: Reference, seed: int) -> None:
    cluster.wait_workers(2)
    outcome = run_with_fault(TideoverClient(cluster.address), draw(seed), reference)
    print(outcome)
    assert check(outcome) == []
