"""MetricsLogger: which steps it logs, on which rank, and under which names."""

from __future__ import annotations

import re

import numpy as np
import pytest

import reigen
from reigen.errors import ArgumentError, NotInitializedError


def logged(steps: list[int | None]) -> list[int]:
    """The steps that a rank has logged."""
    seen: list[int] = []
    logger = reigen.MetricsLogger(lambda values, step: seen.append(step), every=3)
    for step in steps:
        logger(step)
    return seen


def test_every_third_step_is_logged_whether_counted_or_named() -> None:
    reigen.init()
    try:
        assert logged([None] * 7) == [3, 6]
        assert logged([10, 11, 12, 15, 16]) == [12, 15]
        assert logged([4, None, None]) == [6]
        assert logged([0, 1]) == [0]
        assert logged([1, 2, 4, 8, 9]) == [4, 8, 9]  # where not every step is named
    finally:
        reigen.shutdown()


def test_a_step_of_several_batches_is_logged_once_and_once_more_when_it_is_done_again() -> None:
    reigen.init()
    try:
        assert logged([step for step in range(2, 8) for _ in range(4)]) == [3, 6]
        assert logged([5, 6, 6, 4, 5, 6, 7]) == [6, 6]  # back to the state after step 3
    finally:
        reigen.shutdown()


def test_names_are_paths_that_mlflow_takes_and_values_are_those_of_metrics() -> None:
    reigen.init()
    try:
        reigen.allreduce(np.ones(3, np.float32))
        written: list[dict[str, float]] = []
        reigen.MetricsLogger(lambda values, step: written.append(values), every=1)()
        [values] = written
        own = reigen.metrics()
        assert len(values) == len(own)
        assert values["reigen/ranks"] == own["reigen_ranks"] == 1
        assert all(re.fullmatch(r"[\w./ :-]+", name) for name in values)  # what mlflow.log_metrics allows
        assert all(type(value) is float for value in values.values())
    finally:
        reigen.shutdown()


class Run:
    """The part of a run of W&B's that takes metrics: ``wandb.init()`` returns one."""

    def __init__(self) -> None:
        self.history: list[tuple[int, dict[str, float]]] = []

    def log(self, data: dict[str, float], step: int | None = None, commit: bool | None = None) -> None:
        """Steps only grow: W&B drops what comes for a step that has passed."""
        assert step is not None
        assert commit is None
        assert not self.history or step > self.history[-1][0]
        self.history.append((step, data))


def test_the_log_of_a_wandb_run_works_as_it_is() -> None:
    reigen.init()
    try:
        run = Run()
        logger = reigen.MetricsLogger(run.log, every=5)
        for step in range(1, 13):
            logger(step)
            logger(step)  # a second batch of the same step
        assert [step for step, _ in run.history] == [5, 10]
        assert all(data["reigen/ranks"] == 1.0 for _, data in run.history)
    finally:
        reigen.shutdown()


def test_mistakes() -> None:
    for every in (0, -1, 2.5, True):
        with pytest.raises(ArgumentError, match="every must be a positive whole number"):
            reigen.MetricsLogger(print, every=every)  # type: ignore[arg-type]
    with pytest.raises(NotInitializedError):
        reigen.MetricsLogger(print)()
