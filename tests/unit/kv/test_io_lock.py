"""Who works with the connections of a store: nobody waits for long, though the lock is not fair."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from reigen.kv.client.io_lock import IOLock

SECONDS = 10.0


@pytest.fixture
def turnstile() -> Iterator[IOLock]:
    made = IOLock()
    yield made
    made.close()
    made.close()


def test_who_holds_it_hears_the_bell_and_sees_who_waits(turnstile: IOLock) -> None:
    with turnstile:
        assert not turnstile.is_wanted
        assert not turnstile.try_acquire()
        assert not turnstile.is_wanted, "who only tries asks nobody to leave"
        other = threading.Thread(target=turnstile.__enter__)
        other.start()
        assert select.select([turnstile], [], [], SECONDS)[0]
        turnstile.heed()
        assert not select.select([turnstile], [], [], 0)[0]
        assert turnstile.is_wanted, "the bell was heard, and somebody waits all the same"
    other.join(SECONDS)
    assert not other.is_alive()
    assert not turnstile.is_wanted
    turnstile.__exit__()
    assert turnstile.num_releases == 2
    assert turnstile.try_acquire()
    turnstile.__exit__()
