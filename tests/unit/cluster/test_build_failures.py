"""When a process gives up building views."""

from __future__ import annotations

import pytest

from reigen.cluster.membership.elastic.build_failures import (
    MAX_MEMBERS_FAILURES,
    MAX_NEWCOMERS_FAILURES,
    MAX_OTHERS_FAILURES,
    BuildFailures,
)
from reigen.errors import AuthenticationError, CollectiveError, PeerLostError, SharedMemoryError

_OWN_SHORTAGE = SharedMemoryError("not enough shared memory")
_OTHERS_SHORTAGE = SharedMemoryError("not enough shared memory (told by rank 2)", ranks=(2,))


def num_until_it_gives_up(
    error: Exception, rank: int = 0, *, is_wanted: bool = True, is_member: bool = False
) -> int | None:
    failures = BuildFailures()
    if is_member:
        failures.clear()
    tries = range(1, 100)
    return next((number for number in tries if failures.add(error, rank, is_wanted=is_wanted)), None)


@pytest.mark.parametrize("error", [OSError("Too many open files"), ValueError("?")])
def test_what_no_other_view_can_mend_ends_it_at_once(error: Exception) -> None:
    assert num_until_it_gives_up(error) == 1
    assert num_until_it_gives_up(error, is_wanted=False) is None


@pytest.mark.parametrize(
    "error", [_OWN_SHORTAGE, CollectiveError("?"), AuthenticationError("?"), PeerLostError("?", ranks=(0, 1))]
)
def test_its_own_failures_end_it_soon(error: Exception) -> None:
    assert num_until_it_gives_up(error) == MAX_NEWCOMERS_FAILURES
    assert num_until_it_gives_up(error, is_member=True) == MAX_MEMBERS_FAILURES


@pytest.mark.parametrize("is_wanted", [True, False])
def test_where_the_host_has_too_little_memory_for_one_more_the_newcomer_gives_up_first(is_wanted: bool) -> None:
    newcomer, member = BuildFailures(), BuildFailures()
    member.clear()
    for _ in range(MAX_NEWCOMERS_FAILURES - 1):
        assert not newcomer.add(_OWN_SHORTAGE, 2, is_wanted=is_wanted)
        assert not member.add(_OWN_SHORTAGE, 0, is_wanted=True)
    assert newcomer.add(_OWN_SHORTAGE, 2, is_wanted=is_wanted)
    assert not member.add(_OWN_SHORTAGE, 0, is_wanted=True)


@pytest.mark.parametrize("error", [_OTHERS_SHORTAGE, PeerLostError("?", ranks=(1, 2))])
def test_whoever_is_at_fault_gives_up_before_the_others(error: CollectiveError) -> None:
    assert num_until_it_gives_up(error) == MAX_OTHERS_FAILURES
    assert num_until_it_gives_up(error, rank=2, is_member=True) == MAX_MEMBERS_FAILURES
    assert MAX_NEWCOMERS_FAILURES < MAX_MEMBERS_FAILURES < MAX_OTHERS_FAILURES


def test_a_process_without_memory_gives_up_though_the_others_give_each_view_up_before_it_fails() -> None:
    """Else these would count failures, and it would not."""
    assert num_until_it_gives_up(_OWN_SHORTAGE, is_wanted=False) == MAX_NEWCOMERS_FAILURES
    assert num_until_it_gives_up(PeerLostError("?", ranks=(1,)), is_wanted=False) is None


def test_failures_are_counted_in_a_row() -> None:
    failures = BuildFailures()
    for _ in range(2 * MAX_MEMBERS_FAILURES):
        for _ in range(MAX_NEWCOMERS_FAILURES - 1):
            assert not failures.add(_OWN_SHORTAGE, 0, is_wanted=True)
        failures.clear()
