"""Warm spares: who of a view's members takes no samples, and what follows for those who are late."""

from __future__ import annotations

import pytest

from reigen.cluster.environ import MAX_SIZE_VARIABLE, WARM_SPARES_VARIABLE
from reigen.cluster.membership.place import ElasticPlace
from reigen.cluster.membership.stragglers import StepTime, StragglerDetector, StragglerRule
from reigen.cluster.membership.views.history import compare_views
from reigen.cluster.membership.views.messages import HeldSums, MemberReport, StepProgress
from reigen.cluster.membership.views.planning import plan_view
from reigen.cluster.membership.views.record import MemberId, SamplePosition, StepBase, View, ViewHost, ViewMember
from reigen.errors import ConfigError


def make_view(*hosts: list[int], max_size: int = 4, num_spares: int = 1) -> View:
    """Make a view of hosts, each given by the epochs in which its members joined; slots are numbers of the ranks."""
    made, slot = [], 0
    for number, ages in enumerate(hosts):
        members = tuple(ViewMember(slot + place, 0, joined) for place, joined in enumerate(ages))
        slot += len(ages)
        made.append(ViewHost(f"h{number}", 1, "", members))
    base = StepBase(step=5, stable_step=5)
    return View.make(3, made, base=base, sizes=(1, max_size), num_spares=num_spares)


def without(view: View, *ranks: int) -> View:
    """Plan the view that follows when these have died."""
    here = SamplePosition(0, 5)
    progress = StepProgress(5, here, here, HeldSums(view.epoch))
    reports = {
        member: MemberReport(view.epoch + 1, member, progress)
        for member, rank in view.ranks.items()
        if rank not in ranks
    }
    following, reason = plan_view(view, reports)
    assert following is not None, reason
    following.validate()
    return following


def test_the_youngest_takes_no_samples() -> None:
    assert make_view([1, 1, 1, 3]).spares == {3}
    assert make_view([1, 1, 3], [1]).spares == {2}, "wherever it has come"


def test_of_the_same_age_it_is_the_highest_rank() -> None:
    assert make_view([1, 1], [1, 1]).spares == {3}


def test_there_are_spares_only_beyond_the_others() -> None:
    assert make_view([1, 1, 1]).spares == frozenset()
    assert make_view([1, 1, 1, 1], max_size=4, num_spares=0).spares == frozenset()
    assert make_view([1, 1, 2, 3, 3], max_size=5, num_spares=2).spares == {3, 4}


def test_the_oldest_spare_takes_the_place_of_the_dead() -> None:
    view = make_view([1, 1, 2, 3], [1], max_size=5, num_spares=2)
    assert view.spares == {2, 3}
    following = without(view, 4)
    assert [following.members[rank] for rank in following.spares] == [MemberId(3, 0)]
    assert following.num_spares == 2, "also the next views have it"


def test_a_spare_that_becomes_rank_0_takes_samples_before_older_ones() -> None:
    view = make_view([1, 3], [1, 2], max_size=4, num_spares=2)
    assert view.spares == {1, 3}
    following = without(view, 0)
    assert following.members[0] == MemberId(1, 0)
    assert following.spares == {2}


def test_the_death_of_a_spare_changes_nobody_elses_place() -> None:
    following = without(make_view([1, 1, 1, 3]), 3)
    assert (following.size, following.spares) == (3, frozenset())


def test_somebody_takes_samples() -> None:
    with pytest.raises(AssertionError, match="somebody takes samples"):
        make_view([1], max_size=1, num_spares=1).validate()


def test_a_place_says_how_many_of_the_greatest_number_are_spares() -> None:
    environ = {
        "REIGEN_ELASTIC": "1",
        "REIGEN_SLOT": "0",
        "REIGEN_INCARNATION": "0",
        "REIGEN_MIN_SIZE": "1",
        MAX_SIZE_VARIABLE: "4",
        "REIGEN_VOTER_FD": "3",
        "REIGEN_ELASTIC_TIMEOUT": "60",
    }
    place = ElasticPlace.find(environ)
    assert place is not None
    assert place.num_spares == 0
    place = ElasticPlace.find({**environ, WARM_SPARES_VARIABLE: "1"})
    assert place is not None
    assert (place.max_size, place.num_spares) == (4, 1)
    with pytest.raises(ConfigError, match="REIGEN_WARM_SPARES is 'many', not a number"):
        ElasticPlace.find({**environ, WARM_SPARES_VARIABLE: "many"})


def test_changes_say_who_only_follows() -> None:
    view = make_view([1, 1, 1, 3])
    change = compare_views(make_view([1, 1, 1]), view, reason="", seconds=0.0, is_planned=True)
    assert change.describe() == "view 3: 3 ranks and 1 warm spare go on; 1 joined"
    assert (change.size, change.num_spares) == (4, 1)


RULE = StragglerRule(3.0, 2)


def judge(works: list[float], num_spares: int, seconds: float = 1.0) -> list[int]:
    """Return the ranks that are late in two steps in which they work for so long; the last ones are spares."""
    members = [MemberId(rank, 0) for rank in range(len(works))]
    detector = StragglerDetector(RULE, members, members[len(works) - num_spares :])
    found = []
    for member, work in zip(members, works, strict=True):
        found += detector.add(member, 0, [StepTime(seconds, work)] * 2)
    return [each.member.slot for each in found]


def test_nobody_is_late_beside_spares_that_have_nothing_to_do() -> None:
    assert judge([0.9, 0.01], 1) == []
    assert judge([0.9, 0.9, 0.01, 0.01], 2) == []
    assert judge([0.9, 0.9, 0.01, 0.01], 0) == [0, 1], "as it would be"


def test_a_spare_that_works_longer_than_those_with_samples_is_late() -> None:
    assert judge([0.1, 0.1, 0.9], 1) == [2]
    assert judge([0.1, 0.9], 1) == [1]


def test_who_takes_samples_is_late_beside_others_that_do() -> None:
    assert judge([0.1, 0.9, 0.1, 0.01], 1) == [1]
