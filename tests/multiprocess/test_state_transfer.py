"""State that newcomers read from the memory of a member."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
from collections.abc import Callable

import numpy as np
import pytest

import reigen
from reigen.elastic import state_transfer
from reigen.elastic.state_transfer import begin_overlapped_transfer, read_from_source
from reigen.errors import PeerLostError
from reigen.testing import RankError, RankPool, run_ranks

SIZES = [3, 0, 5 << 20, 64, 1, (1 << 20) + 7]


def make_arrays(receivers: frozenset[int]) -> list[np.ndarray]:
    if reigen.rank() in receivers:
        return [np.full(size, 255, np.uint8) for size in SIZES]
    numbers = np.random.default_rng(1)
    return [numbers.integers(0, 255, size, np.uint8) for size in SIZES]


def digest(arrays: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def transfer(source: int, receivers: frozenset[int], layouts: dict[int, str]) -> tuple[bool, str]:
    arrays = make_arrays(receivers)
    has_read = read_from_source(arrays, layouts.get(reigen.rank(), "alike"), source, receivers)
    return has_read, digest(arrays)


@pytest.mark.parametrize(("source", "receivers"), [(1, {3}), (3, {0}), (0, {1, 2, 3}), (2, set())])
def test_receivers_have_what_the_source_holds(
    rank_pool: Callable[[int], RankPool], source: int, receivers: set[int]
) -> None:
    found = rank_pool(4).run(transfer, source, frozenset(receivers), {}, init=True)
    assert {has_read for has_read, _ in found} == {True}
    assert len({digest for _, digest in found}) == 1


@pytest.mark.parametrize("layouts", [{0: "other"}, {2: "other"}, {0: "", 1: "", 2: ""}])
def test_nothing_is_read_from_memory_of_another_layout(
    rank_pool: Callable[[int], RankPool], layouts: dict[int, str]
) -> None:
    found = rank_pool(3).run(transfer, 0, frozenset({2}), layouts, init=True)
    assert [has_read for has_read, _ in found] == [False] * 3
    assert found[2][1] != found[0][1]


def transfer_where_memory_may_not_be_read(who: int) -> bool:
    """The kernel says no to one rank, or to reading although it let the rank ask."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "not permitted")

    reading = state_transfer.read_process_memory
    if reigen.rank() == who:
        state_transfer.read_process_memory = refuse
    try:
        return transfer(0, frozenset({1, 2}), {})[0]
    finally:
        state_transfer.read_process_memory = reading


def test_all_know_if_one_may_not_read(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(3).run(transfer_where_memory_may_not_be_read, 1, init=True) == [False] * 3
    assert rank_pool(3).run(transfer_where_memory_may_not_be_read, 0, init=True) == [True] * 3


def transfer_beside(far: frozenset[int], holders: frozenset[int], *, may_overlap: bool) -> tuple[bool, str, list[int]]:
    """Rank 3 cannot read memory of ranks that are far away. Returns what `transfer` does, and whom it has read."""
    pids, read = reigen.allgather_object(os.getpid()), []
    readable, reading = state_transfer._is_readable, state_transfer.read_process_memory

    def is_readable(found: state_transfer._StateAddress) -> bool:
        return pids.index(found.pid) not in far and readable(found)

    def note_and_read(pid: int, *ranges: object) -> None:
        read.append(pids.index(pid))
        reading(pid, *ranges)

    state_transfer._is_readable, state_transfer.read_process_memory = is_readable, note_and_read
    receivers = frozenset(range(4)) - holders
    try:
        if may_overlap:
            told, found = overlap(receivers)
            return bool(told), found, read
        return *transfer(1, receivers, {}), read
    finally:
        state_transfer._is_readable, state_transfer.read_process_memory = readable, reading


@pytest.mark.parametrize("may_overlap", [False, True])
def test_who_cannot_read_the_source_reads_a_member_of_its_host(
    rank_pool: Callable[[int], RankPool], may_overlap: bool
) -> None:
    beside = functools.partial(transfer_beside, may_overlap=may_overlap)
    found = rank_pool(4).run(beside, frozenset({0, 1}), frozenset({0, 1, 2}), init=True)
    assert len({digest for _, digest, _ in found}) == 1
    assert set(found[3][2]) == {2}, "not the source, which is rank 1"
    found = rank_pool(4).run(beside, frozenset(), frozenset({0, 1, 2}), init=True)
    assert set(found[3][2]) == {1}, "the source, where that can be read"


def test_nobody_reads_from_another_newcomer(rank_pool: Callable[[int], RankPool]) -> None:
    beside = functools.partial(transfer_beside, may_overlap=False)
    found = rank_pool(4).run(beside, frozenset({0, 1}), frozenset({0, 1}), init=True)
    assert [has_read for has_read, _, _ in found] == [False] * 4


def overlap(
    receivers: frozenset[int], changes_at: str = "", layouts: dict[int, str] | None = None
) -> tuple[bytes, str]:
    """Digest that a rank tells, empty if nothing is begun, and what it has; the source changes it at some moment."""
    arrays, version = make_arrays(receivers), [0]
    layout = (layouts or {}).get(reigen.rank(), "alike")
    overlapped = begin_overlapped_transfer(arrays, layout, 1, receivers, lambda: arrays, lambda: version[0])
    if overlapped is None:
        return b"", digest(arrays)
    if reigen.rank() in receivers:
        overlapped.read()
    reigen.barrier()
    if changes_at == "before" and reigen.rank() == 1:
        arrays[0][:] += 1
        version[0] += 1
    return overlapped.digest(), digest(arrays)


def test_receivers_read_while_others_go_on(rank_pool: Callable[[int], RankPool]) -> None:
    found = rank_pool(4).run(overlap, frozenset({0, 3}), init=True)
    told = [digest for digest, _ in found]
    assert told[2] == b"", "it is neither source nor receiver"
    assert told[0] == told[1] == told[3] != b""
    assert len({digest for _, digest in found}) == 1


def test_a_source_that_has_changed_says_so(rank_pool: Callable[[int], RankPool]) -> None:
    found = rank_pool(3).run(overlap, frozenset({0}), "before", init=True)
    assert found[1][0] not in (b"", found[0][0])


@pytest.mark.parametrize("layouts", [{0: "other"}, {0: "", 1: "", 2: ""}])
def test_nothing_is_begun_where_one_may_not_read(rank_pool: Callable[[int], RankPool], layouts: dict[int, str]) -> None:
    found = rank_pool(3).run(overlap, frozenset({0, 2}), "", layouts, init=True)
    assert [told for told, _ in found] == [b""] * 3


def transfer_while_one_dies(dies: int) -> None:
    """Rank 2 reads; a rank has told where its arrays are, or is about to read, and is dead."""
    readable = state_transfer._is_readable

    def is_readable(source: state_transfer._StateAddress) -> bool:
        if dies == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return readable(source)

    def die_or_answer(value: object, name: str) -> list[object]:
        found = exchange(value, name)
        if name == "elastic.addresses" and reigen.rank() == dies != 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    exchange = state_transfer.allgather_object
    state_transfer._is_readable, state_transfer.allgather_object = is_readable, die_or_answer
    with pytest.raises(PeerLostError):
        transfer(0, frozenset({2}), {})


@pytest.mark.parametrize("dies", [0, 1, 2])
def test_who_is_left_learns_of_a_death(dies: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(transfer_while_one_dies, 3, dies, init=True)
    assert [(each.rank, each.kind) for each in caught.value.failures] == [(dies, "died")], str(caught.value)
