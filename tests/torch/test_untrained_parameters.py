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


def change(parameters: torch.nn.ParameterDict) -> None:
    with torch.no_grad():
        parameters["average"].add_(1)
    parameters["hidden"].data.add_(1)


def values(parameters: torch.nn.ParameterDict) -> list[float]:
    return [float(parameters[name][0]) for name in ("frozen", "average", "hidden")]


def test_the_first_step_is_undone_and_what_it_changed_is_copied_from_then_on():
    parameters, untrained = make()
    for _ in range(2):
        untrained.begin_step()
        change(parameters)
        untrained.undo_step()
        assert values(parameters) == [0, 0, 0]
        assert untrained.moving == ["average", "hidden"]
    assert [*untrained._copies] == ["average", "hidden"]


def test_what_no_step_changes_is_copied_once():
    parameters, untrained = make()
    for number in range(3):
        untrained.begin_step()
        assert len(untrained._copies) == (2 if number else 3)
        change(parameters)
    untrained.undo_step()
    assert values(parameters) == [0, 2, 2]


def test_a_parameter_that_gets_other_memory_is_seen():
    parameters, untrained = make()
    untrained.begin_step()
    untrained.begin_step()
    assert untrained.moving == []
    parameters["average"].data = torch.ones(3)
    untrained.begin_step()
    assert untrained.moving == ["average"]
    parameters["average"].data = torch.full((3,), 5.0)
    untrained.undo_step()
    assert values(parameters) == [0, 1, 0]


def test_another_rank_that_gets_the_parameters_copies_the_same_ones():
    parameters, untrained = make()
    untrained.begin_step()
    change(parameters)
    untrained.begin_step()
    others, follower = make()
    follower.follow(untrained.moving)
    follower.begin_step()
    assert [*follower._copies] == ["average", "hidden"]
    change(others)
    follower.undo_step()
    assert values(others) == [0, 0, 0]
    follower.follow(None)
    follower.begin_step()
    assert len(follower._copies) == 3


def test_large_ones_are_not_tried_and_what_is_lost_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(untrained_parameters, "_MAX_TRIED_BYTES", 35)
    caplog.set_level(logging.WARNING)
    parameters, untrained = make()
    untrained.begin_step()
    assert untrained._copies == {}
    change(parameters)
    untrained.undo_step()
    assert values(parameters)[1] == 1
    assert "average changed for the first time in a step that is undone" in caplog.text
    caplog.clear()
    untrained.begin_step()
    change(parameters)
    untrained.undo_step()
    assert values(parameters)[1] == 1
    assert not caplog.text


def test_parameters_that_were_made_in_inference_mode_have_no_version():
    with torch.inference_mode():
        tensor = torch.zeros(2)
    untrained = UntrainedParameters(lambda: [("frozen", tensor)])
    for _ in range(3):
        untrained.begin_step()
    assert untrained.moving == []
