"""Who completes the step in which members were cut off."""

from __future__ import annotations

import itertools

import pytest

from reigen.elastic.catch_up import (
    ArrivedState,
    CatchUpPlan,
    HeldState,
    SumsAtHand,
    UpdateAtHand,
    confirm_newcomers,
    is_step_redone,
    plan_catch_up,
    plan_updates,
)


def waiting(number: int, rank: int, *, can_finish: bool = True, are_whole: bool = False, epoch: int = 1) -> HeldState:
    return HeldState(number, is_member=True, sums=SumsAtHand(epoch, rank, can_finish, are_whole))


def test_a_step_of_whose_sums_nothing_is_lost_is_completed_by_all() -> None:
    held = [waiting(3, 0), waiting(3, 2, are_whole=True), waiting(3, 5)]
    assert plan_catch_up(held) == CatchUpPlan(0, completing=frozenset({0, 1, 2}), finishing=(0, 2, 5))


def test_nobody_finishes_sums_that_all_have() -> None:
    held = [waiting(3, 0, are_whole=True), waiting(3, 2, are_whole=True)]
    assert plan_catch_up(held) == CatchUpPlan(0, completing=frozenset({0, 1}))


def arrived(number: int, rank: int, digest: bytes, *, is_member: bool = False) -> HeldState:
    state = ArrivedState(number, digest) if digest else None
    return HeldState(number, is_member, sums=SumsAtHand(2, rank, True, True), arrived=state)


def test_newcomers_that_hold_what_their_source_does_complete_the_step() -> None:
    source, other = arrived(3, 0, b"a", is_member=True), arrived(3, 1, b"", is_member=True)
    held = confirm_newcomers([source, other, arrived(3, 3, b"a")])
    assert plan_catch_up(held) == CatchUpPlan(0, completing=frozenset({0, 1, 2}))


def test_newcomers_of_whose_state_nothing_is_known_get_it_again() -> None:
    source, other = arrived(3, 0, b"a", is_member=True), arrived(3, 1, b"", is_member=True)
    again = CatchUpPlan(0, receivers=frozenset({2}))
    assert plan_catch_up(confirm_newcomers([source, other, arrived(3, 3, b"b")])) == again
    assert plan_catch_up(confirm_newcomers([source, other, arrived(3, 3, b"")])) == again
    assert plan_catch_up(confirm_newcomers([source, other, arrived(2, 3, b"a")])) == again
    assert plan_catch_up(confirm_newcomers([other, other, arrived(3, 3, b"a")])) == again, "the source has died"


#: How far a process had come when others died: it had exchanged no digests, had all of them, or had applied the step.
WAITED, COMPARED, APPLIED = range(3)


def survivor(rank: int, how_far: int, own: bytes, *, is_newcomer: bool) -> HeldState:
    """Of a step 3 in which rank 2 has read the state of rank 0."""
    if how_far == WAITED:
        return arrived(3, rank, own, is_member=not is_newcomer)
    confirmed = arrived(3, rank, b"a", is_member=True)
    return confirmed if how_far == COMPARED else HeldState(4, is_member=True, arrived=confirmed.arrived)


def surviving_groups() -> list[list[tuple[int, int]]]:
    """Return the ways in which some of source 0, member 1 and newcomer 2 may be left: rank, and how far it was."""
    return [
        [(rank, how_far) for rank, how_far in enumerate(each) if how_far is not None]
        for each in itertools.product([None, WAITED, COMPARED, APPLIED], repeat=3)
        if any(how_far is not None for how_far in each[:2])
    ]


@pytest.mark.parametrize("group", surviving_groups(), ids=str)
def test_no_step_is_undone_if_one_is_left_that_can_answer_for_the_state_of_newcomers(group: list[tuple[int, int]]):
    digests = {0: b"a", 1: b"", 2: b"a"}
    held = [survivor(rank, how_far, digests[rank], is_newcomer=rank == 2) for rank, how_far in group]
    plan = plan_catch_up(confirm_newcomers(held))
    late = frozenset(at for at, (_, how_far) in enumerate(group) if how_far != APPLIED)
    is_known = any(rank == 0 or how_far != WAITED for rank, how_far in group)
    if is_known or not any(rank == 2 for rank, _ in group):
        assert not plan.receivers
        assert plan.completing == late
    else:
        assert plan == CatchUpPlan(0, receivers=frozenset({1}))


def test_a_wrong_state_is_sent_again_though_others_have_compared_theirs():
    held = [survivor(0, COMPARED, b"a", is_newcomer=False), survivor(2, WAITED, b"unread", is_newcomer=True)]
    assert plan_catch_up(confirm_newcomers(held)).receivers == {1}
    held[0] = survivor(0, APPLIED, b"a", is_newcomer=False)
    assert plan_catch_up(confirm_newcomers(held)).receivers == {1}
    held[1] = HeldState(2, is_member=False, arrived=ArrivedState(3, b"a"))
    assert plan_catch_up(confirm_newcomers(held)).receivers == {1}, "that is not what it holds now"


def test_a_step_comes_again_where_nobody_applies_it() -> None:
    received = CatchUpPlan(0, receivers=frozenset({1}))
    assert is_step_redone(received, 0, 5, 5)
    assert not is_step_redone(received, 1, 5, 6), "others have applied it"
    assert is_step_redone(received, 1, 5, 5), "a newcomer that was to get the state during this step"


@pytest.mark.parametrize("base_number", [5, 6], ids=["nobody had known", "known when the view was decided"])
def test_who_waits_for_those_who_complete_the_step_does_not_run_it_again(base_number: int) -> None:
    held = [updating(5, 0), HeldState(5, is_member=True, is_in_step=True)]
    plan = plan_catch_up(held)
    assert plan.waiting == {1}
    assert not is_step_redone(plan, 1, 5, base_number)


def test_it_is_undone_if_one_does_not_wait_or_gradients_are_missing_or_somebody_is_new() -> None:
    others = (
        HeldState(3, is_member=True),
        waiting(3, 2, can_finish=False),
        waiting(3, 2, epoch=2),
    )
    for other in others:
        assert plan_catch_up([waiting(3, 0), other]) == CatchUpPlan(0)
    newcomer = HeldState(0, is_member=False)
    assert plan_catch_up([waiting(3, 0), newcomer]) == CatchUpPlan(0, receivers=frozenset({1}))


def test_who_has_all_sums_of_a_step_that_others_have_applied_applies_them() -> None:
    held = [waiting(3, 0, are_whole=True), HeldState(4, is_member=True), waiting(3, 2, are_whole=True)]
    assert plan_catch_up(held) == CatchUpPlan(1, completing=frozenset({0, 2}))
    held[1] = HeldState(4, is_member=True, is_whole=False)
    assert plan_catch_up(held) == CatchUpPlan(1, completing=frozenset({0, 2}))


def test_all_get_the_state_if_one_of_them_cannot() -> None:
    held = [waiting(3, 0, are_whole=True), HeldState(4, is_member=True), waiting(3, 2)]
    assert plan_catch_up(held) == CatchUpPlan(1, receivers=frozenset({0, 2}))
    held[2] = HeldState(4, is_member=False)
    assert plan_catch_up(held) == CatchUpPlan(1, receivers=frozenset({0, 2}))
    held[2] = waiting(2, 2, are_whole=True)  # cannot be: it would be two steps behind
    assert plan_catch_up(held) == CatchUpPlan(1, receivers=frozenset({0, 2}))


def updating(number: int, owner: int | None, *, host: int = 0, epoch: int = 1) -> HeldState:
    return HeldState(number, is_member=True, update=UpdateAtHand(epoch, host, owner))


def test_an_update_that_was_begun_is_finished_by_all_who_can() -> None:
    held = [updating(3, 0), updating(3, 2), updating(3, 3)]
    assert plan_catch_up(held) == CatchUpPlan(0, completing=frozenset({0, 1, 2}))
    assert plan_updates(held, 1) == ([0, 2, 3], 1)


def test_newcomers_wait_for_the_end_of_a_step_whose_update_was_begun() -> None:
    held = [updating(3, 0), HeldState(0, is_member=False), updating(3, 2)]
    assert plan_catch_up(held) == CatchUpPlan(0, completing=frozenset({0, 2}), waiting=frozenset({1}))
    assert plan_updates(held, 2) == ([0, 2], 1)
    assert plan_updates(held, 1) is None


def test_who_is_on_a_host_where_no_update_was_begun_waits_too() -> None:
    held = [HeldState(3, is_member=True), updating(3, 2, host=1)]
    assert plan_catch_up(held) == CatchUpPlan(1, completing=frozenset({1}), waiting=frozenset({0}))


def test_each_host_finishes_its_own_weights() -> None:
    held = [updating(3, 0), updating(3, None), updating(3, 1, host=1), updating(3, 3, host=1)]
    assert plan_catch_up(held) == CatchUpPlan(0, completing=frozenset(range(4)))
    assert plan_updates(held, 1) == ([0, None], 1)
    assert plan_updates(held, 2) == ([1, 3], 0)


def test_who_has_an_update_at_hand_that_others_have_applied_goes_on_behind_it() -> None:
    held = [updating(3, 0), HeldState(4, is_member=True)]
    assert plan_catch_up(held) == CatchUpPlan(1, completing=frozenset({0}))
    held.append(HeldState(0, is_member=False))
    assert plan_catch_up(held) == CatchUpPlan(1, receivers=frozenset({0, 2}))
    assert plan_updates(held, 0) == ([0], 0), "it is finished all the same"
