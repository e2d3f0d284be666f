"""A few members of an elastic job in every state that they can come to with a death or wrong evidence at any moment.
REIGEN_SEARCH=large visits more of them, for minutes.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from reigen.cluster.membership.views import planning
from reigen.cluster.membership.views.record import StepBase, View
from tests.unit.cluster.views_exploration import Exploration, Violated
from tests.unit.cluster.views_search import make_view

_IS_LARGE = os.environ.get("REIGEN_SEARCH") == "large"
large = pytest.mark.skipif(not _IS_LARGE, reason="takes minutes: REIGEN_SEARCH=large")


@pytest.mark.parametrize(
    ("num_hosts", "ranks_each", "witness", "faults", "most_states"),
    [
        (1, 2, False, {"kills": 1, "steps": 2}, 0),
        (2, 1, False, {"kills": 1, "steps": 1}, 0),
        (2, 1, False, {"kills": 0, "suspicions": 1, "steps": 0}, 3_000),
        pytest.param(2, 1, False, {"kills": 0, "suspicions": 1}, 300_000, marks=large),
        pytest.param(2, 1, True, {"kills": 1}, 300_000, marks=large),
        pytest.param(1, 3, False, {"kills": 1, "steps": 1}, 300_000, marks=large),
    ],
)
def test_members_that_live_come_together(
    num_hosts: int, ranks_each: int, witness: bool, faults: dict[str, int], most_states: int
) -> None:
    view = make_view(num_hosts, witness=witness, ranks_each=ranks_each)
    exploration = Exploration(view, most_states=most_states, **faults).run()

    assert exploration.num_ends
    assert exploration.is_complete or most_states


def test_a_step_that_was_applied_by_some_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_base = planning._plan_base

    def undo(view: View, holders: Any) -> tuple[StepBase, str]:
        base, reason = plan_base(view, holders)
        return msgspec.structs.replace(base, step=base.stable_step, behind=()), reason

    monkeypatch.setattr(planning, "_plan_base", undo)
    exploration = Exploration(make_view(1, ranks_each=2), kills=0, suspicions=1, steps=1, most_states=50_000)
    with pytest.raises(Violated, match="4: "):
        exploration.run()
