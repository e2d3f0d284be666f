"""Frameworks beside their own ways to train: models alike, and what figures are held against."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import frameworks
from benchmarks.harness import layers, models
from benchmarks.harness.figures import Summary, summarize
from benchmarks.harness.schedule import Mode
from benchmarks.harness.work import Case, WrongResultError
from benchmarks.programs.sums import GRADIENT_SHAPES

_TENSORFLOW = next(section for section in frameworks.SECTIONS if section.name == "tensorflow")


def _took(*rounds: float) -> Summary:
    return summarize([[seconds] for seconds in rounds])


@pytest.mark.parametrize("name", frameworks.MODELS)
def test_models_are_those_of_pytorch(name: str) -> None:
    """The numbers of elements and the ranges of the weights, the batch, the loss and the learning rate."""
    recipe, design = models.RECIPES[name], layers.DESIGNS[name]
    torch.manual_seed(1)
    theirs = [parameter.detach().numpy() for parameter in recipe.make().parameters()]
    ours = layers.first_weights(design)
    assert [array.size for array in ours] == [array.size for array in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert float(mine.std()) == pytest.approx(float(other.std()), rel=0.5 if mine.size < 1000 else 0.1)
    assert prod(design.batch) == prod(recipe.batch)
    assert (design.num_classes, design.learning_rate) == (recipe.num_classes, recipe.learning_rate)


def test_ranks_have_the_same_weights_and_different_data() -> None:
    design = layers.DESIGNS["cnn"]
    for first, second in zip(layers.first_weights(design), layers.first_weights(design), strict=True):
        np.testing.assert_array_equal(first, second)
    assert not np.array_equal(layers.batch_of(design, 0)[0], layers.batch_of(design, 1)[0])


def test_weights_are_saved_unless_they_are_not_those_of_training(tmp_path: Path) -> None:
    case, first = Case("mlp/reigen", save=str(tmp_path / "w")), [np.zeros((2, 2), np.float32)]
    layers.save_weights(case, 1, first, [np.ones((2, 2), np.float32)])
    with np.load(tmp_path / "w.1.npz") as found:
        assert (found["initial"].tolist(), found["weights"].tolist()) == ([0.0] * 4, [1.0] * 4)
    with pytest.raises(WrongResultError, match="have not changed"):
        layers.save_weights(case, 1, first, first)
    with pytest.raises(WrongResultError, match="not finite"):
        layers.save_weights(case, 1, first, [np.full((2, 2), np.nan, np.float32)])


def test_there_are_60_gradients_of_25_million_elements() -> None:
    assert len(GRADIENT_SHAPES) == 60
    assert sum(map(prod, GRADIENT_SHAPES)) == pytest.approx(25e6, rel=0.01)


def test_the_duration_of_a_step_is_a_part_of_that_of_the_operation() -> None:
    mode = Mode("fit", None, Case("mlp"), num_steps=10)  # type: ignore[arg-type]
    assert mode.durations([[(0.0, 5.0), (6.0, 8.0)], [(1.0, 6.0), (6.0, 7.0)]]) == pytest.approx([0.5, 0.2])


def test_a_group_is_held_against_numpys_time_and_a_small_sum_against_its_microseconds() -> None:
    modes = {
        frameworks.NUMPY: _took(0.010, 0.020),
        frameworks.TENSORFLOW_GRAPH: _took(0.012, 0.024),
        frameworks.JAX_EAGER: _took(0.010005, 0.020005),
    }
    (group,) = frameworks.sum_verdicts(frameworks.GROUP, modes)
    assert (group.value, group.budget, group.is_met) == (pytest.approx(1.2), 1.3, True)
    graph, eager = frameworks.sum_verdicts(frameworks.SMALL, modes)
    assert (graph.value, graph.budget, graph.is_met) == (pytest.approx(3000.0), 60.0, False)
    assert (eager.value, eager.budget, eager.is_met) == (pytest.approx(5.0), 30.0, True)
    del modes[frameworks.NUMPY]
    assert frameworks.sum_verdicts(frameworks.SMALL, modes) == []


def test_an_overhead_is_that_beside_one_rank_with_the_same_framework() -> None:
    summaries = {
        frameworks.TENSORFLOW_ALONE: _took(0.100, 0.100),
        frameworks.TAPE: _took(0.110, 0.110),
        frameworks.STRATEGY: _took(0.140, 0.140),
        frameworks.TORCH_ALONE: _took(0.050, 0.050),
        frameworks.TORCH: _took(0.058, 0.058),
    }
    found = frameworks.overheads(_TENSORFLOW, summaries)
    assert list(found) == [frameworks.TAPE, frameworks.STRATEGY, frameworks.TORCH]
    peer, torch = frameworks.step_verdicts("mlp", _TENSORFLOW, found)
    assert (peer.value, peer.budget, peer.is_met) == (pytest.approx(0.25), 0.5, True)
    assert (torch.value, torch.budget, torch.is_met) == (pytest.approx(1.25), 1.2, False)
    del summaries[frameworks.TORCH_ALONE], summaries[frameworks.STRATEGY]
    assert frameworks.step_verdicts("mlp", _TENSORFLOW, frameworks.overheads(_TENSORFLOW, summaries)) == []


def test_workers_of_a_strategy_know_each_other_and_themselves() -> None:
    first, second = map(json.loads, frameworks.strategy_configs([1234, 1235]))
    assert first["cluster"] == second["cluster"] == {"worker": ["127.0.0.1:1234", "127.0.0.1:1235"]}
    assert [config["task"]["index"] for config in (first, second)] == [0, 1]


def test_what_is_not_installed_is_known() -> None:
    assert frameworks.missing(("numpy", "a_framework_of_no_one")) == ["a_framework_of_no_one"]
