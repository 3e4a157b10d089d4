from __future__ import annotations

from context_daemon.kv_losses import KVLosses
from context_daemon.records import RequestKey

A, B, C = (RequestKey("job", line) for line in (1, 2, 3))


def test_a_new_generation_is_the_loss_of_all_that_were_seen_under_the_old_one() -> None:
    losses = KVLosses()
    assert [losses.heard(key, name) for key, name in ((A, "one"), (B, "one"), (C, "two"))] == [[], [], []]
    assert [losses.count(key, 1) for key in (A, B, C)] == [0, 0, 0]
    assert sorted(losses.heard(B, "three")) == [A, B]
    assert losses.heard(A, "three") == []
    assert [losses.count(key, 1) for key in (A, B, C)] == [1, 1, 0]


def test_each_owner_counts_from_its_own_beginning() -> None:
    losses = KVLosses()
    losses.heard(A, "one")
    losses.count(A, 1)
    losses.heard(A, "two")
    assert losses.restoring(A, 2, "two") == []
    assert (losses.count(A, 2), losses.count(A, 1)) == (0, 0), "the former owner is told nothing"
    losses.heard(A, "three")
    assert losses.count(A, 2) == 1
    assert losses.restoring(A, 2, "three") == [] and losses.count(A, 2) == 1, "the same owner asks again"


def test_a_restore_that_finds_another_generation_tells_of_the_loss_and_counts_none_for_itself() -> None:
    losses = KVLosses()
    losses.heard(A, "one")
    losses.heard(B, "one")
    assert losses.count(B, 1) == 0
    assert sorted(losses.restoring(A, 2, "two")) == [A, B]
    assert (losses.count(A, 2), losses.count(B, 1)) == (0, 1)


def test_a_server_that_was_away_at_the_restore_and_is_not_known_is_taken_for_empty() -> None:
    losses = KVLosses()
    assert losses.restoring(A, 2, None) == []
    assert losses.heard(A, "one") == [A] and losses.count(A, 2) == 1
    losses.heard(B, "one")
    assert losses.restoring(B, 2, None) == []
    assert losses.heard(B, "one") == [] and losses.count(B, 2) == 0, "the same life as before"


def test_one_sample_of_each_generation_and_only_so_many_requests() -> None:
    losses = KVLosses(remembered=2)
    for key, generation in ((A, "one"), (B, "two"), (C, "two")):
        losses.heard(key, generation)
    assert losses.samples() == [B], "the oldest is forgotten"
    losses.forget(B)
    assert losses.samples() == [C]
    losses.forget(C)
    losses.forget(C)
    assert losses.samples() == []
