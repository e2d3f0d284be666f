"""The launcher's line about a change of members: who, why, how long, and what is done again."""

from __future__ import annotations

import pytest

from reigen.cluster.membership.views.history import ChangeNote, StepOutcome
from reigen.launch.elastic.view_line import ChangeLines, ViewLine, describe_pause, describe_view

BEFORE = ((0, 0), (1, 0), (2, 0), (3, 0))


def line(*members: tuple[int, int], reasons: dict[tuple[int, int], str] | None = None) -> ViewLine:
    return describe_view(2, BEFORE, members, reasons or {}, None, "", 0.0)


def test_who_has_gone_and_why() -> None:
    vanished = {(2, 0): "host h2 has vanished", (3, 0): "host h2 has vanished", (1, 0): "killed by SIGKILL"}
    note = ChangeNote(2, seconds=0.25, outcome=StepOutcome.NOTHING)
    assert line((0, 0), reasons=vanished).text(note) == (
        "view 2: 1 rank goes on after 0.25 s; slot 1 has gone (killed by SIGKILL); "
        "slots 2, 3 have gone (host h2 has vanished); nothing is done again"
    )
    assert line((0, 0), (1, 0), (2, 0)).text(None) == "view 2: 3 ranks go on; slot 3 has gone"


def test_who_comes_and_which_ranks_move() -> None:
    assert line((0, 0), (2, 0), (3, 0), (1, 1)).text(None) == (
        "view 2: 4 ranks go on; slot 1 has gone; slot 1 joins as rank 3; ranks 2-3 are now 1-2"
    )


@pytest.mark.parametrize(
    ("is_hearsay", "is_known", "is_said"), [(False, True, True), (True, True, False), (True, False, True)]
)
def test_the_members_reason_is_said_unless_it_is_hearsay_about_what_is_known(
    is_hearsay: bool, is_known: bool, is_said: bool
) -> None:
    reasons = {(3, 0): "killed by SIGKILL"} if is_known else {}
    note = ChangeNote(2, "rank 3 did not come until the deadline", is_hearsay)
    text = line((0, 0), (1, 0), (2, 0), reasons=reasons).text(note)
    assert ("; rank 3 did not come until the deadline" in text) == is_said


def test_outcomes() -> None:
    notes = {outcome: ChangeNote(2, outcome=outcome, step=7, samples=(1, 112, 128)) for outcome in StepOutcome}
    said = {outcome: note.describe_outcome() for outcome, note in notes.items()}
    assert said == {
        StepOutcome.PENDING: "",
        StepOutcome.NOTHING: "nothing is done again",
        StepOutcome.COMMIT: "what was done since the last commit is done again",
        StepOutcome.UNDONE: "step 7 (samples 112-127 of epoch 1) is undone and run again",
        StepOutcome.COMPLETED: "step 7 (samples 112-127 of epoch 1) is completed with what the dead had computed",
        StepOutcome.RECEIVED: (
            "step 7 (samples 112-127 of epoch 1) had been applied by some, and the others get its result"
        ),
    }
    assert ChangeNote(2, outcome=StepOutcome.UNDONE, step=7).describe_outcome() == "step 7 is undone and run again"


def test_a_pause_is_said_with_its_length_if_that_is_known() -> None:
    assert describe_pause(2.13, 5 << 29, [3]) == "members wait about 2.1 s while slot 3 gets the state (2.5 GiB)"
    assert describe_pause(0, 1 << 30, [3, 4]) == "members wait while slots 3, 4 get the state (1.0 GiB)"


def test_a_view_in_which_no_step_was_run_is_explained_behind_the_next_change() -> None:
    """Its members have waited for one that never came; the note about its end is there before the view behind it."""
    lines, after = ChangeLines(), BEFORE[:3]
    lines.begin_view(1, None, BEFORE, None, 0.0)
    lines.explain(ChangeNote(2, "rank 0: a collective has waited for rank(s) 3", seconds=0.1))
    lines.begin_view(2, BEFORE, BEFORE, 7, 1.0)
    lines.note_gone([(3, 0)], "exit code 1")
    lines.explain(ChangeNote(3, outcome=StepOutcome.UNDONE, step=7))
    assert lines.take_line(5.0, must=True) == (
        "view 2: 4 ranks go on after 0.10 s; rank 0: a collective has waited for rank(s) 3"
    )
    lines.begin_view(3, BEFORE, after, None, 5.0)
    said = "view 3: 3 ranks go on; slot 3 has gone (exit code 1); step 7 is undone and run again"
    assert lines.take_line(5.0, must=False) == said


def test_who_has_completed_a_step_is_said_only_where_somebody_has_gone() -> None:
    lines = ChangeLines()
    lines.begin_view(1, None, BEFORE, None, 0.0)
    lines.begin_view(2, BEFORE, BEFORE, 7, 1.0)
    assert lines.take_line(1.0, must=True) == "view 2: 4 ranks go on"
    lines.begin_view(3, BEFORE, BEFORE[:3], 9, 2.0)
    assert lines.take_line(2.0, must=True).endswith("; step 9 was completed without those who died")


def test_warm_spares() -> None:
    """Three members and a spare: it joins, takes over, and another one comes."""
    lines, members = ChangeLines(), BEFORE[:3]
    lines.begin_view(1, None, members, None, 0.0)
    lines.begin_view(2, members, BEFORE, None, 1.0, [3])
    assert lines.take_line(1.0, must=True) == (
        "view 2: 3 ranks and 1 warm spare go on; slot 3 joins as rank 3, a warm spare"
    )
    after = (BEFORE[0], BEFORE[2], BEFORE[3])
    lines.note_gone([(1, 0)], "killed by SIGKILL")
    lines.note_death(2.0)
    lines.begin_view(3, BEFORE, after, None, 2.1)
    lines.explain(ChangeNote(3, outcome=StepOutcome.UNDONE, step=7))
    assert lines.take_line(2.1, must=False) == (
        "view 3: 3 ranks go on 0.1 s after that; slot 1 has gone (killed by SIGKILL); "
        "slot 3, a warm spare, takes over; ranks 2-3 are now 1-2; step 7 is undone and run again"
    )
    lines.begin_view(4, after, (*after, (1, 1), (4, 0)), None, 3.0, [3, 4])
    lines.begin_view(5, (*after, (1, 1), (4, 0)), ((3, 0), (1, 1), (4, 0)), None, 4.0)
    assert "slots 1, 4, warm spares, take over" in lines.take_line(4.0, must=True)


def test_a_spare_that_dies_is_no_loss_of_a_place() -> None:
    lines = ChangeLines()
    lines.begin_view(1, None, BEFORE, None, 0.0, [3])
    lines.begin_view(2, BEFORE, BEFORE[:3], None, 1.0)
    assert lines.take_line(1.0, must=True) == "view 2: 3 ranks go on; slot 3 has gone"


def test_a_view_with_too_few_members_says_that_steps_wait():
    lines = ChangeLines()
    lines.begin_view(1, None, ((0, 0), (1, 0)), None, 0.0, least=2)
    lines.note_gone([(1, 0)], "killed by SIGKILL")
    lines.note_death(1.0)
    lines.explain(ChangeNote(2, seconds=0.1))
    lines.begin_view(2, ((0, 0), (1, 0)), ((0, 0),), None, 1.1, least=2)
    said = "view 2: 1 rank is there, and 2 are needed: steps wait; slot 1 has gone (killed by SIGKILL)"
    assert lines.take_line(1.1, must=False) == said


def test_a_program_may_need_more_members_than_the_launcher_knows():
    lines = ChangeLines()
    lines.begin_view(1, None, BEFORE, None, 0.0, least=2)
    lines.note_gone([(3, 0)], "killed by SIGKILL")
    lines.explain(ChangeNote(2, seconds=0.1, least_size=4))
    lines.begin_view(2, BEFORE, BEFORE[:3], None, 1.1, least=2)
    said = "view 2: 3 ranks are there, and 4 are needed: steps wait; slot 3 has gone (killed by SIGKILL)"
    assert lines.take_line(1.1, must=False) == said
