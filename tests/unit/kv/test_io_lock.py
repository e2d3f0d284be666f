"""Who works with the connections of a store: nobody waits for long, though the lock is not fair."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from reigen.kv.client.worker import IOLock

SECONDS = 10.0


@pytest.fixture
def lock() -> Iterator[IOLock]:
    made = IOLock()
    yield made
    made.close()
    made.close()


def test_who_holds_it_hears_the_bell_and_sees_who_waits(lock: IOLock) -> None:
    with lock:
        assert not lock.is_wanted
        assert not lock.try_acquire()
        assert not lock.is_wanted, "who only tries asks nobody to leave"
        other = threading.Thread(target=lock.__enter__)
        other.start()
        assert select.select([lock], [], [], SECONDS)[0]
        lock.clear()
        assert not select.select([lock], [], [], 0)[0]
        assert lock.is_wanted, "the bell was heard, and somebody waits all the same"
    other.join(SECONDS)
    assert not other.is_alive()
    assert not lock.is_wanted
    lock.__exit__()
    assert lock.num_releases == 2
    assert lock.try_acquire()
    lock.__exit__()
