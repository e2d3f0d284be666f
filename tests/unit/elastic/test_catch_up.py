"""Who gives its state to whom in a new view."""

from __future__ import annotations

from dataclasses import replace

from reigen.cluster.membership.views.history import StepOutcome
from reigen.elastic.catch_up import (
    CatchUpPlan,
    HeldState,
    SumsAtHand,
    UpdateAtHand,
    are_alike,
    find_lost_state,
    find_outcome,
    may_overlap_transfer,
    plan_catch_up,
    plan_local_state,
)
from reigen.elastic.description import digest_description


def member(number: int, *, is_whole: bool = True) -> HeldState:
    return HeldState(number, is_member=True, is_whole=is_whole)


def other(number: int = 0) -> HeldState:
    return HeldState(number, is_member=False)


def test_equals_do_nothing() -> None:
    assert plan_catch_up([member(5), member(5)]) == CatchUpPlan(0)


def test_at_the_beginning_rank_0_gives_to_all() -> None:
    assert plan_catch_up([other(), other(), other()]) == CatchUpPlan(0, frozenset({1, 2}))


def test_at_the_beginning_the_latest_checkpoint_counts() -> None:
    assert plan_catch_up([other(), other(80), other(80)]) == CatchUpPlan(1, frozenset({0, 2}))


def test_half_updated_weights_are_nobodys_state() -> None:
    lost = replace(other(5), has_lost=True)
    assert find_lost_state([other(), other(3)]) == "", "at the beginning there are checkpoints"
    assert find_lost_state([lost, member(4)]) == ""
    assert "the weights of rank(s) 0, 2 were being updated" in find_lost_state([lost, other(), lost])


def test_who_is_behind_gets_everything_from_the_furthest() -> None:
    assert plan_catch_up([member(4), member(5), member(4), member(5)]) == CatchUpPlan(1, frozenset({0, 2}))


def test_who_comes_gets_everything_however_far_it_says_it_is() -> None:
    assert plan_catch_up([member(5), other(9)]) == CatchUpPlan(0, frozenset({1}))


def test_who_has_come_to_the_end_of_the_step_gives_the_rest() -> None:
    cut = member(5, is_whole=False)
    assert plan_catch_up([cut, member(5), member(4)]) == CatchUpPlan(1, frozenset({2}), frozenset({0}))
    assert plan_catch_up([cut, cut]) == CatchUpPlan(0), "nobody has more"
    assert plan_catch_up([cut, member(4)]) == CatchUpPlan(0, frozenset({1})), "an applied step is not undone"


def outcome(*held: HeldState) -> tuple[StepOutcome, int]:
    return find_outcome(held, plan_catch_up(held))


def test_outcome_for_the_step_that_was_under_way() -> None:
    in_step = HeldState(5, is_member=True, is_in_step=True)
    waiting = [HeldState(5, is_member=True, sums=SumsAtHand(1, rank, True, False), is_in_step=True) for rank in (0, 1)]
    assert outcome(member(5), in_step) == (StepOutcome.UNDONE, 5)
    assert outcome(member(6), in_step) == (StepOutcome.RECEIVED, 5), "step 5 is applied by one"
    assert outcome(*waiting) == (StepOutcome.COMPLETED, 5)
    assert outcome(member(5), member(5)) == (StepOutcome.NOTHING, 5), "behind the last step, or between two"
    assert outcome(member(5), HeldState(0, is_member=False, is_in_step=True)) == (StepOutcome.NOTHING, 5)


def described(each: HeldState, description: dict[str, list[str]]) -> HeldState:
    return replace(each, description=digest_description(description))


def test_newcomers_like_their_source_are_known_by_digests() -> None:
    one, another = {"model": ["a", "b"], "data": ["c"]}, {"model": ["a"], "data": ["b", "c"]}

    def alike(*held: HeldState) -> bool:
        return are_alike(held, plan_catch_up(held))

    assert alike(described(member(5), one), described(other(), one), described(other(), one))
    assert alike(described(member(5), one), member(5), described(other(), dict(reversed(one.items()))))
    assert not alike(described(member(5), one), described(other(), one), described(other(), another))
    assert not alike(described(member(5), one), other()), "it has not told"
    assert not alike(member(5), other()), "nobody has told"


def may_overlap(*held: HeldState) -> bool:
    return may_overlap_transfer(held, plan_catch_up(held))


def test_members_go_on_while_newcomers_get_the_state() -> None:
    assert may_overlap(member(5), member(5), other())
    assert may_overlap(member(5), other())


def test_all_wait_where_more_get_the_state_than_have_it() -> None:
    assert not may_overlap(member(5), other(), other())


def test_all_wait_at_the_beginning_and_for_members() -> None:
    assert not may_overlap(other(), other(), other(), other(80))
    assert not may_overlap(member(5), member(5), member(5), member(4))
    assert not may_overlap(member(5), member(5)), "for nobody"


def test_all_wait_where_a_step_is_completed_first() -> None:
    begun = HeldState(5, is_member=True, update=UpdateAtHand(1, 0, 0))
    assert not may_overlap(begun, begun, other())


# -- warm spares -------------------------------------------------------------------------------------------------------


def spare(number: int) -> HeldState:
    return HeldState(number, is_member=True, was_spare=True)


def test_a_spare_needs_no_state() -> None:
    assert plan_catch_up([member(5), spare(5)]) == CatchUpPlan(0)


def test_of_equals_who_has_taken_samples_gives_the_state() -> None:
    assert plan_catch_up([spare(5), member(5), other()]) == CatchUpPlan(1, frozenset({0, 2}) - {0})
    assert plan_catch_up([spare(5), member(4)]) == CatchUpPlan(0, frozenset({1})), "it may be further"


def test_a_spare_that_takes_samples_gets_what_forward_passes_change() -> None:
    held = [member(5), member(5), spare(5)]
    plan = plan_catch_up(held)
    assert plan_local_state(held, plan, [0, 1, 2]) == (0, frozenset({2}))
    assert plan_local_state(held, plan, [0, 1]) == (0, frozenset()), "it stays a spare"


def test_a_spare_on_the_first_host_follows_another_one() -> None:
    held = [spare(5), member(5)]
    assert plan_local_state(held, plan_catch_up(held), [0, 1]) == (1, frozenset({0}))


def test_where_only_spares_are_left_nobody_has_followed() -> None:
    held = [spare(5), spare(5)]
    source, receivers = plan_local_state(held, plan_catch_up(held), [0, 1])
    assert source is None
    assert receivers == {0, 1}


def test_a_spare_that_gets_the_state_gets_this_with_it() -> None:
    held = [member(5), spare(4), other()]
    plan = plan_catch_up(held)
    assert plan.receivers == {1, 2}
    assert plan_local_state(held, plan, [0, 1, 2]) == (0, frozenset())


def test_a_member_that_gets_a_spares_weights_keeps_its_own_statistics_and_gives_them_to_newcomers() -> None:
    held = [member(4), spare(5), other()]
    plan = plan_catch_up(held)
    assert (plan.source, plan.receivers) == (1, {0, 2})
    assert plan_local_state(held, plan, [0, 1, 2]) == (0, frozenset({1, 2}))
