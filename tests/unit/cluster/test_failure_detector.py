"""Who died is told at once; who left in good order only when what it said before has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from reigen.cluster.local_peers import LocalPeers
from reigen.cluster.membership.abort_message import left_error
from reigen.cluster.membership.client import MembershipClient
from reigen.cluster.membership.failure_detector import FailureDetector
from reigen.errors import CollectiveError, PeerLostError

DIED = PeerLostError("rank(s) 3 died", ranks=[3])


class Source:
    """Stands in for what is asked: knows one error, and notes what it is told."""

    def __init__(self, ranks: Sequence[int], error: CollectiveError | None = None) -> None:
        self.ranks, self.error = ranks, error
        self.told: list[CollectiveError] = []

    def failure(self, needed: Sequence[int]) -> CollectiveError | None:
        return self.error

    def abort(self, error: CollectiveError) -> None:
        self.told.append(error)


def lookout(service: Source, here: Source | None = None, lost: dict[int, str] | None = None) -> FailureDetector:
    return FailureDetector(cast(MembershipClient, cast(Any, service)), cast(LocalPeers | None, here), lost or {})


def left(*ranks: int) -> PeerLostError:
    return left_error(", ".join(map(str, ranks)), ranks)


def test_a_death_elsewhere_is_told_here():
    here = Source([0, 1])
    assert lookout(Source([], DIED), here).failure([0, 1, 2, 3]) is DIED
    assert here.told == [DIED]


def test_ranks_that_left_are_no_failure_while_they_are_connected():
    here = Source([0, 1])
    watch = lookout(Source([], left(2)), here)
    assert watch.failure([0, 1, 2, 3]) is None
    assert watch.exit_error([0, 1, 2, 3]).ranks == (2,)
    assert here.told == []


def test_ranks_that_left_are_a_failure_once_their_connection_has_ended():
    assert lookout(Source([], left(2)), lost={2: "closed"}).failure([2, 3]).ranks == (2,)


def test_neighbours_that_left_are_no_failure_either():
    """They may have heard of the last collective before this rank."""
    assert lookout(Source([]), Source([0, 1], left(1))).failure([0, 1, 2]) is None


@pytest.mark.parametrize("here", [None, left(1)])
def test_who_left_does_not_hide_who_died(here):
    assert lookout(Source([], DIED), Source([0, 1], here)).failure([0, 1, 2, 3]) is DIED
