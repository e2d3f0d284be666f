"""Copies of servers in the memory of others: which server is the backup, and when a copy can be taken up."""

from __future__ import annotations

import random

import pytest

from reigen.kv.server.replicas import CopyItem, CopyProgress, choose_backup

W, V, FACTS = (0, (7, 0)), (0, (8, 0)), (0, None)


@pytest.mark.parametrize(
    ("hosts", "backups"),
    [
        ("aa", [1, 0]),
        ("aaa", [1, 2, 0]),
        ("aabb", [2, 2, 0, 0]),
        ("abab", [1, 2, 3, 0]),
        ("aab", [2, 2, 0]),
    ],
)
def test_the_backup_is_the_next_server_on_another_host_if_there_is_one(hosts: str, backups: list[int]) -> None:
    assert [choose_backup(server, hosts) for server in range(len(hosts))] == backups


def test_the_first_copy_is_complete_from_the_beginning() -> None:
    progress = CopyProgress()
    assert progress.connect(5)
    assert progress.becomes_complete()
    assert progress.is_stale(W)
    progress.add(W)
    assert not progress.is_stale(W)
    assert not progress.becomes_complete(), "that is said once"
    assert not progress.connect(5), "another connection changes nothing"


def test_a_backup_that_is_another_process_has_to_get_everything() -> None:
    progress = CopyProgress()
    progress.connect(5)
    progress.becomes_complete()
    progress.add(W)
    progress.add(FACTS)
    progress.expect(6, [W, FACTS])
    assert progress.is_stale(W)
    assert progress.connect(6)
    progress.add(FACTS)
    assert not progress.becomes_complete()
    progress.add(V)
    progress.add(W)
    assert progress.becomes_complete()


def test_what_was_copied_before_it_is_known_how_much_there_is_counts() -> None:
    progress = CopyProgress()
    progress.connect(5)
    progress.add(W)
    assert progress.connect(6)
    progress.add(W)
    assert progress.is_stale(W), "it is copied once more: nobody knows yet what else is missing"
    assert not progress.becomes_complete()
    progress.expect(6, [W])
    assert not progress.is_stale(W)
    assert progress.becomes_complete()


def test_a_shard_that_is_gone_is_not_waited_for() -> None:
    progress = CopyProgress()
    progress.connect(5)
    progress.expect(6, [W, V])
    progress.connect(6)
    progress.add(W)
    progress.drop(V)
    assert progress.becomes_complete()


def test_a_server_that_was_restored_goes_on_with_the_copy() -> None:
    progress = CopyProgress()
    progress.adopt(5, [W])
    assert not progress.connect(5)
    assert not progress.is_stale(W)
    assert not progress.becomes_complete(), "it is"


def test_a_complete_copy_has_everything_whatever_happens() -> None:
    """Random schedules beside a model: a process of the backup that was told that its copy is complete has all."""
    for seed in range(300):
        rng, progress, items = random.Random(seed), CopyProgress(), set[CopyItem]()
        processes: dict[int, set[CopyItem]] = {1: set()}
        newest, complete, connected = 1, set[int](), 0
        for _ in range(60):
            action = rng.random()
            if action < 0.1:  # another process of the backup; news of it come later
                newest += 1
                processes[newest] = set()
            elif action < 0.3:
                if progress.connect(newest):
                    processes[newest].clear()
                connected = newest
            elif action < 0.4 and newest > 1:
                progress.expect(newest, items)
            elif action < 0.5 and items:
                gone = rng.choice(sorted(items, key=str))
                items.discard(gone)
                progress.drop(gone)
            elif connected == newest:  # a new item is acknowledged when it has been copied; others are copied again
                item = (0, (rng.randrange(6), 0))
                processes[connected].add(item)
                progress.add(item)
                items.add(item)
                if progress.becomes_complete():
                    complete.add(connected)
            if newest in complete:
                assert items <= processes[newest], seed
