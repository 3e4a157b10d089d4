from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import permutations

import pytest

from context_daemon.hash_ring import HashRing, _position

NODES = [f"10.0.0.{n}:6379" for n in range(1, 9)]
NAMES = [f"job-{n % 7}/{n}.0" for n in range(20_000)]


def places(ring: HashRing) -> list[str]:
    return [ring.node(name) for name in NAMES]


def test_placement_is_what_it_was_in_every_version_before() -> None:
    """Written down once: daemons of two versions in one cluster must agree."""
    ring = HashRing(NODES[:3])
    assert "".join(ring.node(f"job/{line}.0")[7] for line in range(1, 33)) == "22212222313112122232313121113112"


def test_another_process_with_another_hash_seed_and_order_places_alike() -> None:
    code = (
        "from context_daemon.hash_ring import HashRing\n"
        f"ring = HashRing({NODES[::-1]})\n"
        "print(*(ring.node(f'job-{n % 7}/{n}.0') for n in range(500)), hash('job'))"
    )
    seen = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-c", code]
        answer = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True)
        *found, builtin_hash = answer.stdout.decode().split()
        seen.add(builtin_hash)
        assert found == places(HashRing(NODES))[:500]
    assert len(seen) == 2, "the seeds were to differ"


def test_the_order_of_the_nodes_does_not_matter() -> None:
    rings = [HashRing(order) for order in permutations(NODES[:4])]
    assert len({tuple(ring.node(name) for name in NAMES[:200]) for ring in rings}) == 1


def test_a_name_belongs_to_the_next_point_round_the_ring() -> None:
    ring = HashRing(NODES[:3], points=2)
    points = [(_position(f"{node}#{n}"), node) for node in NODES[:3] for n in range(2)]
    wrapped = 0
    for name in NAMES[:2000]:
        at = _position(name)
        assert ring.node(name) == min(((p - at) % 2**64, node) for p, node in points)[1]
        wrapped += at > max(p for p, _ in points)
    assert wrapped, "some names must lie behind the last point"


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_every_node_has_about_its_share(count: int) -> None:
    shares = Counter(places(HashRing(NODES[:count])))
    assert len(shares) == count
    assert all(0.8 < share * count / len(NAMES) < 1.2 for share in shares.values()), shares


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_new_node_takes_its_share_and_nothing_else_moves(count: int) -> None:
    """Read backwards: a node that is lost gives up its own names only."""
    new = NODES[count]
    moved = [
        after
        for before, after in zip(places(HashRing(NODES[:count])), places(HashRing(NODES[: count + 1])), strict=True)
        if before != after
    ]
    assert set(moved) == {new}
    assert 0.8 < len(moved) * (count + 1) / len(NAMES) < 1.2


@pytest.mark.parametrize(("nodes", "points"), [([], 8), (["a", "b", "a"], 8), (["a"], 0)])
def test_no_nodes_a_node_twice_or_no_points_is_an_error(nodes: list[str], points: int) -> None:
    with pytest.raises(ValueError, match="different nodes"):
        HashRing(nodes, points)
