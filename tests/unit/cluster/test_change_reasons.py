"""Reason of a change of views, for the user, by the event with which it begins on a member."""

from __future__ import annotations

import pytest

from reigen.cluster.membership.elastic.driver import (
    PLANNED_REASON,
    belongs_to_stop,
    explain_change,
    first_outcome,
    make_note,
)
from reigen.cluster.membership.views.events import (
    ChangeRequested,
    Evidence,
    MemberEvent,
    Received,
    StepApplied,
    TimerFired,
    Verdict,
    ViewTimer,
)
from reigen.cluster.membership.views.history import ChangeNote, ChangeReason, StepOutcome
from reigen.cluster.membership.views.messages import AskMember, RevokeView, StepReached
from reigen.cluster.membership.views.record import MemberId
from tests.unit.cluster.views_search import make_view

VIEW = make_view(2, ranks_each=2)
ME, OTHER, DEAD = VIEW.members[0], VIEW.members[2], VIEW.members[3]


@pytest.mark.parametrize(
    ("event", "is_of_stop", "reason"),
    [
        (StepApplied(6), True, ChangeReason(PLANNED_REASON)),
        (Received(OTHER, StepReached(1, 6, OTHER)), True, ChangeReason(PLANNED_REASON)),
        (Received(OTHER, RevokeView(1)), True, ChangeReason("rank 2 asked for it", is_hearsay=True)),
        (Received(OTHER, AskMember(2, OTHER)), True, ChangeReason("rank 2 asked for it", is_hearsay=True)),
        (
            Received(OTHER, RevokeView(1, (DEAD,))),
            False,
            ChangeReason("rank(s) 3 are lost (told by rank 2)", is_hearsay=True),
        ),
        (Evidence(DEAD, Verdict.DEAD, "gone"), False, ChangeReason("rank 3 is dead: gone", is_of_death=True)),
        (ChangeRequested(1, "it cannot wait"), False, ChangeReason("rank 0: it cannot wait")),
        (ChangeRequested(1, ""), False, ChangeReason("rank 0: a collective failed")),
        (
            TimerFired(ViewTimer.STUCK),
            False,
            ChangeReason("not all have come to the step at which they were to stop"),
        ),
    ],
)
def test_who_has_stopped_hears_why_the_change_begins(
    event: MemberEvent, is_of_stop: bool, reason: ChangeReason
) -> None:
    assert isinstance(ME, MemberId)
    assert belongs_to_stop(event) == is_of_stop
    assert explain_change(VIEW, ME, event) == reason


def test_members_that_wait_change_because_newcomers_do_not_reach_a_host() -> None:
    reason = explain_change(VIEW, ME, TimerFired(ViewTimer.STUCK), is_waiting=True)
    assert reason == ChangeReason("processes that come do not reach a host: who is stopped there is left out")


def test_the_launcher_is_told_what_is_done_again_whatever_the_reason() -> None:
    """A stop that was planned, and broken, costs what a death costs; a death behind it costs nothing."""
    planned, death = ChangeReason(PLANNED_REASON), ChangeReason("rank 3 is dead", is_of_death=True)
    for reason in (planned, death):
        for is_planned, tells, outcome in (
            (True, True, StepOutcome.NOTHING),
            (True, False, StepOutcome.NOTHING),
            (False, True, StepOutcome.PENDING),
            (False, False, StepOutcome.COMMIT),
        ):
            found = first_outcome(is_planned=is_planned, tells_outcomes=tells)
            assert make_note(2, reason, 0.5, found) == ChangeNote(2, "", False, 0.5, outcome)
    hearsay = ChangeReason("rank 2 asked for it", is_hearsay=True)
    assert make_note(2, hearsay, 0.5, StepOutcome.COMMIT).reason == "rank 2 asked for it"
