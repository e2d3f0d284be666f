"""transformers' Trainer with the code of docs/huggingface.md: the weights of one process that has the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reigen.testing import RankPool
from tests.integrations.huggingface_training import Task, train

Pools = Callable[[int], RankPool]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize(("model", "passes"), [("gpt2", 1), ("gpt2", 3), ("bert", 1)])
def test_two_ranks_train_as_one_process_does(integration_pools: Pools, tmp_path: Path, model: str, passes: int) -> None:
    # BERT's loss is a mean: the Trainer would multiply it by the number of processes, as it does with DDP.
    options: dict[str, Any] = {"gradient_accumulation_steps": passes, "average_tokens_across_devices": model == "gpt2"}
    first, second = integration_pools(2).run(train, Task(model, str(tmp_path / "two"), 4, options=options), timeout=300)
    [alone] = integration_pools(1).run(train, Task(model, str(tmp_path / "one"), 8, options=options), timeout=300)
    assert first["weights"] == second["weights"]
    assert first["steps"] == second["steps"] == alone["steps"] == (16 if passes == 1 else 6)
    assert first["norms"] == second["norms"] == pytest.approx(alone["norms"], rel=1e-2)
    assert first["parameters"] == pytest.approx(alone["parameters"], rel=1e-2, abs=1e-3)
    assert first["eval_loss"] == second["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-2)
    assert alone["losses"][-1] < 0.9 * alone["losses"][0]
    assert first["losses"][-1] < 0.9 * first["losses"][0]


def test_training_goes_on_from_a_checkpoint_with_the_same_bits(integration_pools: Pools, tmp_path: Path) -> None:
    two = integration_pools(2)
    through = two.run(train, Task("gpt2", str(tmp_path / "through")), timeout=300)
    saved: dict[str, Any] = {"save_strategy": "epoch", "num_train_epochs": 1}
    two.run(train, Task("gpt2", str(tmp_path / "parts"), options=saved), timeout=300)
    assert [each.name for each in (tmp_path / "parts").iterdir()] == ["checkpoint-8"]
    resumed = two.run(train, Task("gpt2", str(tmp_path / "parts"), resume=True), timeout=300)
    assert {each["weights"] for each in resumed} == {each["weights"] for each in through}
