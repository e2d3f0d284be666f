"""Who completes the step in which members were cut off."""

from __future__ import annotations

from reigen.elastic.catch_up import CatchUpPlan, HeldState, SumsAtHand, plan_catch_up


def waiting(number: int, rank: int, *, can_finish: bool = True, are_whole: bool = False, epoch: int = 1) -> HeldState:
    return HeldState(number, is_member=True, sums=SumsAtHand(epoch, rank, can_finish, are_whole))


def test_a_step_of_whose_sums_nothing_is_lost_is_completed_by_all() -> None:
    held = [waiting(3, 0), waiting(3, 2, are_whole=True), waiting(3, 5)]
    assert plan_catch_up(held) == CatchUpPlan(0, completing=frozenset({0, 1, 2}), finishing=(0, 2, 5))


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
