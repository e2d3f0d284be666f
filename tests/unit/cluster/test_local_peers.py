"""Ranks of one host find each other, and learn what becomes of the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from reigen.cluster.local_peers import LocalPeers, RankStatus, map_local_peers, process_namespace_id
from reigen.cluster.membership.control_service import ExchangeValues
from reigen.cluster.membership.rendezvous import LocalRendezvous, StoreMessage
from reigen.errors import CollectiveError, DeadlineError, PeerLostError, SharedMemoryError
from reigen.net.shm_segment import PAGE_BYTES, ShmSegment
from reigen.resources.memory import AvailableMemory
from reigen.testing import RankError, run_threads
from tests.patience import patiently


@contextmanager
def met(size: int) -> Iterator[list[LocalPeers]]:
    found = run_threads(lambda rank, rendezvous: map_local_peers(rendezvous, rank, range(size), 0, 30.0)[0], size)
    try:
        yield found
    finally:
        for neighbours in found:
            neighbours.close()


def test_every_part_of_every_rank_is_mapped_by_all() -> None:
    def act(rank: int, rendezvous: LocalRendezvous) -> tuple[LocalPeers, list[list[int]]]:
        neighbours, [first, second] = map_local_peers(rendezvous, rank, range(3), 0, 30.0, [100, 2 * PAGE_BYTES])
        first.arrays[rank][0], second.arrays[rank][-1] = 10 + rank, 20 + rank
        rendezvous.put(f"written {rank}", b"")
        for other in range(3):
            rendezvous.get(f"written {other}", 30.0)
        assert [array.size for array in second.arrays] == [2 * PAGE_BYTES] * 3
        return neighbours, [[int(a[0]) for a in first.arrays], [int(a[-1]) for a in second.arrays]]

    for neighbours, seen in run_threads(act, 3):
        assert seen == [[10, 11, 12], [20, 21, 22]]
        neighbours.close()


def test_each_rank_asks_the_rendezvous_twice_however_many_there_are() -> None:
    class Counting(LocalRendezvous):
        def request(self, message: StoreMessage, timeout_seconds: float = 0.0) -> bytes | None:
            asked.append(type(message))
            return super().request(message, timeout_seconds)

    asked: list[type] = []
    rendezvous = Counting()
    for neighbours in run_threads(lambda rank, _: map_local_peers(rendezvous, rank, range(5), 0, 30.0)[0], 5):
        neighbours.close()
    assert asked == [ExchangeValues] * 10


def test_ranks_that_met_another_try_of_each_other_do_not_go_on() -> None:
    """Rank 1 gives up while rank 0 has its card already, and tries again."""

    def act(rank: int, rendezvous: LocalRendezvous) -> None:
        if rank == 1:
            with pytest.raises(DeadlineError):
                map_local_peers(rendezvous, 1, range(2), 0, 0.05)
            stale = ShmSegment.create("another try")
            stale.grow(PAGE_BYTES, "a test")
            rendezvous.put("0/card/1", card(os.getpid(), stale.fd, stale.inode))
            rendezvous.put("rank 0 may come", b"")
            rendezvous.get("0/mapped/0", 30.0)
            stale.close()
            with pytest.raises(PeerLostError):
                map_local_peers(rendezvous, 1, range(2), 0, 30.0)[0].close()
        else:
            rendezvous.get("rank 0 may come", 30.0)
            with pytest.raises(PeerLostError, match=r"rank\(s\) 1 gave up during init\(\) and tried again"):
                map_local_peers(rendezvous, 0, range(2), 0, 30.0)[0].close()

    run_threads(act, 2)


def test_growth_is_reserved_by_each_and_mapped_by_all() -> None:
    with met(2) as ranks:
        offset = ranks[0].reserved_bytes
        for neighbours in ranks:
            neighbours.reserve(5000, "a test")
        zero, one = (neighbours.map([offset, offset], 2 * PAGE_BYTES) for neighbours in ranks)
        zero.arrays[1][7] = 9
        assert one.arrays[1][7] == 9
        ranks[0].shrink(offset)
        assert ranks[0].reserved_bytes == offset


def test_as_long_as_all_are_well_there_is_no_failure() -> None:
    with met(3) as ranks:
        assert all(n.failure(range(3)) is None for n in ranks)
        assert ranks[0].status(1) is RankStatus.RUNNING
        assert ranks[0].dead() == ()


def test_who_left_is_a_failure_for_those_who_need_it() -> None:
    with met(3) as ranks:
        ranks[2].leave()
        assert ranks[0].failure([1]) is None
        error = ranks[0].failure([1, 2])
        assert isinstance(error, PeerLostError)
        assert error.ranks == (2,)
        assert "rank(s) 2 left the job" in str(error)


def test_who_gave_up_is_a_failure_for_all_and_tells_why() -> None:
    with met(3) as ranks:
        ranks[1].abort(DeadlineError("rank(s) 2 did not take their part in time", ranks=(2,)))
        ranks[1].abort(CollectiveError("a later reason"))
        ranks[1].leave()  # does not take it back
        error = ranks[0].failure([2])
        assert isinstance(error, DeadlineError)
        assert (str(error), error.ranks) == ("rank(s) 2 did not take their part in time (told by rank 1)", (2,))
        own = ranks[1].failure([0])  # ends its own waiting, on whatever thread
        assert isinstance(own, DeadlineError)
        assert str(own) == "rank(s) 2 did not take their part in time"


def test_a_long_reason_is_cut() -> None:
    with met(2) as ranks:
        ranks[1].abort(CollectiveError("\U0001f600" * 5000))
        error = ranks[0].failure([1])
        assert error is not None
        assert 800 < str(error).count("\U0001f600") < 1000


@pytest.mark.parametrize("at", [128, 148], ids=["no message", "no text"])
def test_an_unreadable_reason_is_still_a_failure(at: int) -> None:
    with met(2) as ranks:
        ranks[1].abort(CollectiveError("why"))
        ranks[1]._headers[1][at:] = 0xC1
        assert str(ranks[0].failure([1])) == "rank 1 gave up"


def test_who_does_not_come_is_named_alone() -> None:
    def attempt(seconds: float) -> None:
        def act(rank: int, rendezvous: LocalRendezvous) -> tuple[int, ...]:
            if rank == 1:
                return ()
            with pytest.raises(
                DeadlineError, match=rf"rank\(s\) 1 did not call init\(\) within {seconds:g} s"
            ) as caught:
                map_local_peers(rendezvous, rank, range(3), 0, seconds)
            return caught.value.ranks

        assert run_threads(act, 3) == [(1,), (), (1,)]

    patiently(attempt, 0.3)


def test_generations_do_not_see_each_other() -> None:
    rendezvous = LocalRendezvous()
    alone, _ = map_local_peers(rendezvous, 0, range(1), 0, 30.0)
    again, _ = map_local_peers(rendezvous, 0, range(1), 1, 30.0)
    for neighbours in (alone, again):
        neighbours.close()


def card(pid: int, fd: int, inode: int, host_id: str = "", problem: str = "") -> bytes:
    return msgspec.msgpack.encode((pid, fd, inode, host_id or process_namespace_id(), problem))


@pytest.mark.parametrize(
    ("pid", "fd", "inode", "host_id", "problem", "kind", "text"),
    [
        (1 << 22, 3, 1, "", "", PeerLostError, "died or gave up during init"),
        (os.getpid(), 99_999, 1, "", "", PeerLostError, "died or gave up during init"),
        (os.getpid(), 0, 1, "elsewhere", "", CollectiveError, "do not share one host"),
        (0, -1, 0, "", "not enough memory here", SharedMemoryError, r"not enough memory here \(told by rank 1\)"),
    ],
    ids=["no process", "no descriptor", "another host", "no memory"],
)
def test_a_card_that_leads_nowhere(
    pid: int, fd: int, inode: int, host_id: str, problem: str, kind: type[CollectiveError], text: str
) -> None:
    rendezvous = LocalRendezvous()
    rendezvous.put("0/card/1", card(pid, fd, inode, host_id, problem))
    with pytest.raises(kind, match=text) as caught:
        map_local_peers(rendezvous, 0, range(2), 0, 60.0)
    assert caught.value.ranks == (1,)


def test_a_descriptor_that_is_another_file_by_now_is_not_taken_for_a_segment() -> None:
    other = ShmSegment.create("another")
    rendezvous = LocalRendezvous()
    rendezvous.put("0/card/1", card(os.getpid(), other.fd, other.inode + 1))
    with pytest.raises(PeerLostError, match="rank 1"):
        map_local_peers(rendezvous, 0, range(2), 0, 60.0)
    other.close()


def test_one_without_memory_is_an_error_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reigen.resources.memory.available_memory", lambda: AvailableMemory(1 << 20))
    with pytest.raises(RankError) as caught:
        run_threads(lambda rank, rendezvous: map_local_peers(rendezvous, rank, range(2), 0, 60.0, [1 << 22]), 2)
    assert {type(error) for error in caught.value.errors.values()} == {SharedMemoryError}


def test_ranks_of_one_host_among_others_are_named_as_the_job_numbers_them() -> None:
    def act(index: int, rendezvous: LocalRendezvous) -> None:
        neighbours, _ = map_local_peers(rendezvous, (1, 4)[index], (1, 4), 0, 30.0)
        assert (neighbours.rank, neighbours.size, neighbours.ranks) == (index, 2, (1, 4))
        if index == 1:
            neighbours.abort(CollectiveError("no more"))
            neighbours.close()
            rendezvous.put("gave up", b"")
            return
        rendezvous.get("gave up", 30.0)
        error = neighbours.failure([1])
        neighbours.close()
        assert error is not None
        assert (str(error), error.ranks) == ("no more (told by rank 4)", (4,))

    run_threads(act, 2)
