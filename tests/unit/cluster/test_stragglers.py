"""Who makes all steps of an elastic job slower: times of steps in, stragglers out."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest

from reigen.cluster.membership.stragglers import (
    DEFAULT_STRAGGLER_RULE,
    StepTime,
    Straggler,
    StragglerDetector,
    StragglerRule,
    _median_of_others,
)
from reigen.cluster.membership.views.record import MemberId
from reigen.errors import ConfigError

MEMBERS = tuple(MemberId(slot, 0) for slot in range(4))
RULE = StragglerRule(3.0, 5)


def step_times(works: Sequence[float], moving_seconds: float = 0.0) -> list[StepTime]:
    """Of one step in which members work so long: it is as long as that of the slowest one."""
    seconds = max(works) + moving_seconds
    return [StepTime(seconds, work) for work in works]


def run(
    detector: StragglerDetector, steps: Sequence[Sequence[float]], first_step: int = 1, moving_seconds: float = 0.0
) -> list[Straggler]:
    """What is found when all members tell their times of each step."""
    found = []
    for step, works in enumerate(steps, first_step):
        for member, time in zip(MEMBERS, step_times(works, moving_seconds), strict=False):
            found += detector.add(member, step, [time])
    return found


def test_who_is_late_in_enough_steps_in_a_row_is_a_straggler() -> None:
    detector = StragglerDetector(RULE, MEMBERS)
    slow = [0.1, 0.1, 0.4, 0.1]
    assert run(detector, [slow] * 4) == []
    (found,) = run(detector, [slow], first_step=5)
    assert (found.member, found.step, found.num_steps) == (MEMBERS[2], 5, 5)
    assert (found.work_seconds, found.median_seconds) == (pytest.approx(0.4), pytest.approx(0.1))
    # said again after as many steps more
    assert [each.step for each in run(detector, [slow] * 12, first_step=6)] == [10, 15]


def test_one_step_in_time_ends_the_row() -> None:
    detector = StragglerDetector(RULE, MEMBERS)
    slow, even = [0.1, 0.1, 0.4, 0.1], [0.1, 0.1, 0.12, 0.1]
    assert run(detector, [*[slow] * 4, even, *[slow] * 4]) == []


@pytest.mark.parametrize(
    ("works", "moving_seconds", "is_late"),
    [
        ([0.1, 0.1, 0.1, 0.29], 0.0, False),
        ([0.1, 0.1, 0.1, 0.31], 0.0, True),
        # what the step takes besides counts: three milliseconds in place of one delay nobody who moves data for 100
        ([0.001, 0.001, 0.001, 0.004], 0.1, False),
        ([0.1, 0.1, 0.1, 0.41], 0.1, False),
        ([0.1, 0.1, 0.1, 0.51], 0.1, True),
        # the others' median is that of most of them
        ([0.1, 0.3, 0.3, 0.9], 0.0, True),
        ([0.1, 0.3, 0.3, 0.8], 0.0, False),
        # ranks that have nothing to do in a step
        ([0.0, 0.0, 0.0, 0.1], 0.0, True),
        ([0.0, 0.0, 0.0, 0.0], 0.0, False),
    ],
)
def test_a_late_member_makes_the_step_longer_by_the_factor(
    works: list[float], moving_seconds: float, is_late: bool
) -> None:
    found = run(StragglerDetector(RULE, MEMBERS), [works] * RULE.num_steps, moving_seconds=moving_seconds)
    assert [each.member for each in found] == [MEMBERS[3]] * is_late


def test_the_median_is_that_of_all_others() -> None:
    chance = random.Random(5)
    for _ in range(300):
        works = [chance.choice((0.1, 0.2, chance.random())) for _ in range(chance.randint(2, 9))]
        for rank, work in enumerate(works):
            truth = statistics.median(works[:rank] + works[rank + 1 :])
            assert _median_of_others(sorted(works), work) == pytest.approx(truth)


def test_of_two_the_other_one_is_the_median_and_one_alone_is_never_late() -> None:
    detector = StragglerDetector(RULE, MEMBERS[:2])
    assert [each.member for each in run(detector, [[0.5, 0.1]] * 5)] == [MEMBERS[0]]
    assert run(StragglerDetector(RULE, MEMBERS[:1]), [[0.5]] * 50) == []


def test_members_tell_their_times_when_they_like() -> None:
    """The words of each come in order, those of several in any."""
    steps = [[0.1, 0.1, 0.5, 0.1]] * 23
    truth = run(StragglerDetector(RULE, MEMBERS), steps)
    for seed in range(20):
        chance = random.Random(seed)
        detector = StragglerDetector(RULE, MEMBERS)
        told, found = dict.fromkeys(range(4), 0), []
        while unfinished := [rank for rank, num in told.items() if num < len(steps)]:
            rank = chance.choice(unfinished)
            until = min(len(steps), told[rank] + chance.randint(1, 9))
            times = [step_times(works)[rank] for works in steps[told[rank] : until]]
            found += detector.add(MEMBERS[rank], told[rank] + 1, times)
            told[rank] = until
        assert [(each.member, each.step) for each in found] == [(each.member, each.step) for each in truth]


def test_words_that_were_lost_neither_count_nor_end_a_row() -> None:
    detector = StragglerDetector(RULE, MEMBERS)
    slow = [0.1, 0.1, 0.4, 0.1]
    assert run(detector, [slow] * 3) == []
    for member in MEMBERS[:3]:  # that of the fourth is lost
        assert detector.add(member, 4, [StepTime(0.4, 0.4)]) == []
    assert [each.step for each in run(detector, [slow] * 2, first_step=5)] == [6]


def test_strangers_are_not_listened_to_and_what_waits_is_bounded() -> None:
    detector = StragglerDetector(RULE, MEMBERS)
    assert detector.add(MemberId(2, 1), 1, [StepTime(9.0, 9.0)] * 10) == []
    for step in range(1, 20_000, 1000):
        assert detector.add(MEMBERS[0], step, [StepTime(0.1, 0.1)] * 1000) == []
    assert len(detector._open) <= 4096
    assert run(detector, [[0.1, 0.1, 0.4, 0.1]] * 5, first_step=30_000) != []


@pytest.mark.parametrize(
    ("text", "rule"),
    [("3/50", DEFAULT_STRAGGLER_RULE), ("2.5", StragglerRule(2.5, 50)), ("10/1", StragglerRule(10, 1))],
)
def test_rules_as_users_write_them(text: str, rule: StragglerRule) -> None:
    assert StragglerRule.parse(text, "--eject-stragglers") == rule
    assert StragglerRule.parse(str(rule), "") == rule


@pytest.mark.parametrize(
    "text", ["", "/", "x", "3/", "3/x", "3/0", "3/-1", "1", "0.5/10", "nan", "inf/5", "3/5/7", "3/1.5"]
)
def test_other_rules_are_refused_and_the_message_says_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^--eject-stragglers {text}: it must be FACTOR or FACTOR/STEPS, as in 3/50"):
        StragglerRule.parse(text, "--eject-stragglers")
