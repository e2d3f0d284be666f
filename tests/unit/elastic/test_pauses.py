"""Which pauses of a job's members are announced, and how long they are said to be."""

from __future__ import annotations

from contextlib import suppress

from reigen.elastic.pauses import LEAST_ANNOUNCED_BYTES, LEAST_MEASURED_BYTES, BroadcastPauses
from reigen.errors import PeerLostError

GB = 10**9


class Pauses:
    """With a clock that stands still, but in broadcasts."""

    def __init__(self) -> None:
        self.now = 100.0
        self.announced: list[tuple[float, int, tuple[int, ...]]] = []
        self._pauses = BroadcastPauses(announce=lambda *what: self.announced.append(what), clock=lambda: self.now)

    def broadcast(
        self,
        num_bytes: int,
        seconds: float,
        *,
        is_source: bool = True,
        receivers: tuple[int, ...] = (3,),
        fails: bool = False,
    ) -> list[tuple[float, int, tuple[int, ...]]]:
        """Return what is announced before the broadcast."""
        before = len(self.announced)
        with suppress(PeerLostError), self._pauses.measured(num_bytes, frozenset(receivers), is_source=is_source):
            announced = self.announced[before:]
            self.now += seconds
            if fails:
                raise PeerLostError("rank 3 has died")
        return announced


def test_the_latest_broadcast_says_how_long_the_next_one_will_be() -> None:
    pauses = Pauses()
    assert pauses.broadcast(GB, 0.5) == [], "nothing is known, and it is not much"
    assert pauses.broadcast(3 * GB, 6.0, receivers=(4, 2)) == [(1.5, 3 * GB, (2, 4))]
    assert pauses.broadcast(GB, 2.0) == [(2.0, GB, (3,))]


def test_short_pauses_are_not_announced() -> None:
    pauses = Pauses()
    pauses.broadcast(GB, 0.5)
    assert pauses.broadcast(GB, 0.5) == []
    pauses.broadcast(1000, 1.0)
    assert pauses.broadcast(LEAST_MEASURED_BYTES - 1, 1.0) == [], "a few bytes have met a busy machine"


def test_long_broadcasts_of_which_nothing_is_known_are_announced_without_a_time() -> None:
    assert Pauses().broadcast(LEAST_ANNOUNCED_BYTES, 1.0) == [(0.0, LEAST_ANNOUNCED_BYTES, (3,))]


def test_the_source_alone_announces_and_all_measure() -> None:
    pauses = Pauses()
    assert pauses.broadcast(GB, 2.0, is_source=False) == []
    assert pauses.broadcast(GB, 2.0) == [(2.0, GB, (3,))], "it has received before"
    assert pauses.broadcast(GB, 2.0, receivers=()) == [], "nobody gets anything"


def test_what_fails_is_no_measure() -> None:
    pauses = Pauses()
    pauses.broadcast(GB, 2.0)
    pauses.broadcast(GB, 0.001, fails=True)
    assert pauses.broadcast(GB, 2.0) == [(2.0, GB, (3,))]
    assert Pauses().broadcast(0, 1.0) == []
