"""History of views: what a change was, in words and numbers."""

from __future__ import annotations

import pytest

from reigen.cluster.membership.views.history import (
    ElasticHistory,
    StepOutcome,
    ViewChange,
    compare_views,
    describe_moves,
)
from reigen.cluster.membership.views.record import StepBase, View, ViewHost, ViewMember


def view(epoch: int, *slots: int, base: StepBase | None = None) -> View:
    members = tuple(ViewMember(slot, 0, 1) for slot in slots)
    return View.make(epoch, [ViewHost("h", 1, "", members)], base=base or StepBase(), sizes=(1, 8))


def test_a_death_moves_ranks_and_costs_a_step() -> None:
    before, after = view(1, 0, 1, 2, 3), view(2, 0, 2, 3, base=StepBase(step=7, stable_step=7))

    change = compare_views(
        before, after, reason="rank 1 is dead", seconds=0.12, is_planned=False, outcome=StepOutcome.COMMIT
    )

    assert change == ViewChange(2, 3, "rank 1 is dead", 0.12, (1,), 0, ((2, 1), (3, 2)), 7, outcome=StepOutcome.COMMIT)
    assert change.reruns
    assert change.describe() == (
        "view 2: 3 ranks go on after 0.12 s; rank 1 left; ranks 2-3 are now 1-2; "
        "what was done since the last commit is done again; rank 1 is dead"
    )


def test_a_planned_change_and_a_completed_step_run_nothing_again() -> None:
    joins = compare_views(view(1, 0), view(2, 0, 1), reason="processes come or leave", seconds=0.05, is_planned=True)
    assert not joins.reruns
    assert joins.num_joined == 1
    assert joins.describe() == "view 2: 2 ranks go on after 0.05 s; 1 joined; processes come or leave"

    base = StepBase(step=6, stable_step=6, completes=True, sum_sources=(0,))
    completed = compare_views(view(1, 0, 1), view(2, 0, base=base), reason="x", seconds=0.1, is_planned=False)
    assert completed.completes
    assert not completed.reruns
    assert "step 7 was completed by those who are left" in completed.describe()


def test_a_process_begins_with_a_view_and_no_change() -> None:
    first = compare_views(None, view(3, 0, 1), reason="", seconds=0.0, is_planned=False)
    second = ViewChange(4, 1, "rank 1 is dead", 0.25, lost=(1,))
    third = ViewChange(5, 2, "processes come or leave", 0.5, is_planned=True)

    found = ElasticHistory().add(first).add(second).add(third, most=2)

    assert found.changes == (second, third), "the oldest is forgotten, and counted"
    assert (found.num_changes, found.seconds_lost, found.num_reruns) == (2, 0.75, 1)


@pytest.mark.parametrize(
    ("outcome", "said", "reruns"),
    [
        (StepOutcome.UNDONE, "the step that was under way is undone and run again", True),
        (StepOutcome.COMPLETED, "the step that was under way is completed with what the dead had computed", False),
        (StepOutcome.RECEIVED, "the step that was under way had been applied by some, and the others", False),
        (StepOutcome.NOTHING, "nothing is done again", False),
    ],
)
def test_the_program_says_later_what_became_of_its_step(outcome: StepOutcome, said: str, reruns: bool) -> None:
    pending = ViewChange(4, 1, "rank 1 is dead", 0.25, lost=(1,))
    assert "is run again, unless" in pending.describe()
    history = ElasticHistory().add(ViewChange(3, 2, outcome=StepOutcome.NOTHING)).add(pending)
    assert history.num_reruns == 1

    assert history.explain(3, outcome) == history, "it is not the latest"
    explained = history.explain(4, outcome)
    assert explained.changes[-1].describe().endswith("; rank 1 is dead")
    assert said in explained.changes[-1].describe()
    assert "commit" not in explained.changes[-1].describe()
    assert (explained.num_changes, explained.num_reruns) == (1, int(reruns))
    assert explained.explain(4, StepOutcome.UNDONE) == explained, "it is said once"


def test_ranks_that_move_together_are_named_together() -> None:
    assert describe_moves(((2, 1),)) == "rank 2 is now 1"
    assert describe_moves(((2, 1), (3, 2), (4, 3), (6, 4))) == "ranks 2-4 are now 1-3, rank 6 is now 4"
