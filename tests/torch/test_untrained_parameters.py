"""Which parameters outside of the optimizer are copied for each step, and what undoing a step makes of them."""

from __future__ import annotations

import logging

import pytest
import torch

from reigen.torch.elastic import untrained_parameters
from reigen.torch.elastic.untrained_parameters import UntrainedParameters


def make() -> tuple[torch.nn.ParameterDict, UntrainedParameters]:
    names = ("frozen", "average", "hidden")
    found = torch.nn.ParameterDict({n: torch.nn.Parameter(torch.zeros(3), requires_grad=False) for n in names})
    return found, UntrainedParameters(found.items)


def begin(untrained: UntrainedParameters) -> None:
    """A step in which this rank has samples."""
    untrained.begin_step()
    untrained.note_samples()


def change(parameters: torch.nn.ParameterDict) -> None:
    with torch.no_grad():
        parameters["average"].add_(1)
    parameters["hidden"].data.add_(1)


def values(parameters: torch.nn.ParameterDict) -> list[float]:
    return [float(parameters[name][0]) for name in ("frozen", "average", "hidden")]


def test_the_first_step_is_undone_and_what_it_changed_is_copied_from_then_on():
    parameters, untrained = make()
    for _ in range(2):
        begin(untrained)
        change(parameters)
        untrained.undo_step()
        assert values(parameters) == [0, 0, 0]
        assert untrained.moving == ["average", "hidden"]
    assert [*untrained._copies] == ["average", "hidden"]


def test_what_no_step_changes_is_copied_once():
    parameters, untrained = make()
    for number in range(3):
        begin(untrained)
        assert len(untrained._copies) == (2 if number else 3)
        change(parameters)
    untrained.undo_step()
    assert values(parameters) == [0, 2, 2]


def test_a_parameter_that_gets_other_memory_is_seen():
    parameters, untrained = make()
    begin(untrained)
    begin(untrained)
    assert untrained.moving == []
    parameters["average"].data = torch.ones(3)
    begin(untrained)
    assert untrained.moving == ["average"]
    parameters["average"].data = torch.full((3,), 5.0)
    untrained.undo_step()
    assert values(parameters) == [0, 1, 0]


def test_steps_that_could_change_nothing_decide_nothing():
    parameters, untrained = make()
    untrained.begin_step()  # no samples
    untrained.begin_step()
    assert untrained.moving is None
    untrained.note_samples()
    untrained.undo_step()  # before anything was changed
    assert untrained.moving is None
    for number in range(2):
        begin(untrained)
        change(parameters)
        untrained.undo_step()
        assert values(parameters) == [0, 0, 0], number
    assert untrained.moving == ["average", "hidden"]


def test_another_rank_that_gets_the_parameters_copies_the_same_ones():
    parameters, untrained = make()
    begin(untrained)
    change(parameters)
    begin(untrained)
    others, follower = make()
    follower.follow(untrained.moving, {})
    begin(follower)
    assert [*follower._copies] == ["average", "hidden"]
    change(others)
    follower.undo_step()
    assert values(others) == [0, 0, 0]
    follower.follow(None, {})
    begin(follower)
    assert len(follower._copies) == 3


def test_large_ones_are_not_tried_and_what_is_lost_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(untrained_parameters, "_MAX_TRIED_BYTES", 35)
    caplog.set_level(logging.WARNING)
    parameters, untrained = make()
    begin(untrained)
    assert untrained._copies == {}
    change(parameters)
    untrained.undo_step()
    assert values(parameters)[1] == 1
    assert "average changed for the first time in a step that is undone" in caplog.text
    caplog.clear()
    begin(untrained)
    change(parameters)
    untrained.undo_step()
    assert values(parameters)[1] == 1
    assert not caplog.text


def test_parameters_that_were_made_in_inference_mode_have_no_version():
    with torch.inference_mode():
        tensor = torch.zeros(2)
    untrained = UntrainedParameters(lambda: [("frozen", tensor)])
    for _ in range(3):
        begin(untrained)
    assert untrained.moving == []
