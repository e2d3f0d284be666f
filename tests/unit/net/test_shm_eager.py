"""Eager slots: who sees what, when a slot may be written again, and counters that wrap."""

from __future__ import annotations

import time

import numpy as np
import pytest

from reigen.net.doorbells import WaitingThread
from reigen.net.shm_eager import _ANSWERED, _SUBMITTED, EagerSlots, max_eager_bytes
from reigen.testing import run_threads
from tests.unit.net.test_shm_ring import star


def ends(size: int) -> list[EagerSlots]:
    return [transport.eager for transport in star(size)]


def test_the_hub_answers_when_all_have_submitted_the_same() -> None:
    hub, one, two = ends(3)
    assert not one.submit(7, 3)
    assert not hub.answer(7, 3)
    assert not two.submit(7, 3)
    assert not hub.answer(6, 3)
    assert not one.take_answer()
    assert hub.answer(7, 0)
    assert one.take_answer()
    assert two.take_answer()
    assert not two.take_answer()
    assert hub.count == one.count == two.count == 1
    assert not hub.answer(7, 3), "what was answered is not there any more"
    assert hub.take() == []


def test_what_was_submitted_is_taken_once() -> None:
    hub, one, two = ends(3)
    two.submit(5, 0)
    assert hub.pending
    assert two.is_unread
    assert hub.take() == [(2, (5,))]
    assert not hub.pending
    assert not two.is_unread
    assert hub.take() == []
    one.submit(5, 0)
    assert not hub.answer(5, 0), "rank 2 has not submitted it again"


@pytest.mark.parametrize("sender", [0, 1])
def test_a_message_ends_the_looking(sender: int) -> None:
    hub, one = star(2)
    (one, hub)[sender == 0].send(b"something else")
    if sender:
        assert not hub.eager.answer(1, 1 << 62)
    else:
        assert not one.eager.submit(1, 1 << 62)


def test_an_answer_is_pending_until_it_is_taken() -> None:
    hub, one = ends(2)
    one.submit(1, 0)
    assert one.is_unread
    assert hub.answer(1, 0)
    assert one.pending
    assert not hub.pending
    assert one.take_answer()
    assert not one.pending
    assert not one.is_unread


def test_who_is_parked_is_not_rung() -> None:
    hub, one = star(2)
    for parked, act in ((hub, one.eager.submit), (one, hub.eager.answer)):
        parked.set_wake_target(WaitingThread.PARKED)
        before = parked.token()
        act(1, 0)
        assert parked.token() == before


@pytest.mark.parametrize("who", [WaitingThread.NONE, WaitingThread.CALLER, WaitingThread.ENGINE])
def test_who_may_sleep_or_works_is_rung(who: WaitingThread) -> None:
    hub, one = star(2)
    for reader, act in ((hub, one.eager.submit), (one, hub.eager.answer)):
        reader.set_wake_target(who)
        before = reader.token()
        act(1, 0)
        assert reader.token() != before


def test_who_sleeps_rings_the_hub_though_it_is_parked() -> None:
    hub, one = star(2)
    hub.set_wake_target(WaitingThread.PARKED)
    one.eager.submit(1, 0)
    before = hub.token()
    one.sleep(one.token() + 1, WaitingThread.CALLER, 0.0)
    assert hub.token() != before
    assert hub.receive() == [(1, (1,))]


def test_counters_wrap() -> None:
    hub, one = ends(2)
    start = 0xFFFFFFFE
    hub._own[_ANSWERED] = one._own[_SUBMITTED] = start
    hub.count = one.count = one._num_submitted = hub._taken[1] = start
    for _ in range(4):
        one.submit(3, 0)
        assert hub.answer(3, 0)
        assert one.take_answer()
    assert hub.count == one.count == one._num_submitted == 2


def test_no_rank_reads_what_another_has_written_too_early() -> None:
    """Ranks race through answers; each slot holds the number of the answer for which it was written, to its end."""
    transports = star(3)
    num = 100

    def run(rank: int, _: object) -> None:
        eager = transports[rank].eager
        for k in range(num):
            eager.slots[eager.count & 1][rank].view(np.int64)[:] = k
            if rank:
                if not eager.submit(k, 0):
                    while not eager.take_answer():
                        time.sleep(0)
            else:
                while not eager.answer(k, 10):
                    time.sleep(0)
            for slot in eager.slots[(eager.count - 1) & 1]:
                found = slot.view(np.int64)
                assert found.size == max_eager_bytes(3) // 8
                assert found[0] == found[-1] == k

    run_threads(run, 3)


def test_submissions_come_before_messages_of_the_same_moment() -> None:
    hub, one = star(2)
    assert not one.eager.submit(9, 0)
    one.send(b"behind it")
    assert hub.pending()
    assert hub.receive() == [(1, (9,)), (1, b"behind it")]
    assert not hub.pending()
