"""Which sums the survivors of a host may finish with a dead rank's gradients: those of buckets that all have mapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import reigen.torch as hvd
from reigen import context
from reigen.errors import CollectiveError
from reigen.testing import RankPool


def asks_to_complete(sparse: bool, options: dict[str, Any]) -> bool:
    """The other rank gives up in the third step; whether this one could go on without it, from the memory of both."""
    context.current().keeps_journals = True
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=sparse), torch.nn.Linear(4, 256))
    if options.get("compression") == "fp16":
        options = {"compression": hvd.Compression.fp16}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    asked: list[CollectiveError] = []

    def complete(error: CollectiveError) -> bool:
        asked.append(error)
        return False

    optimizer.complete_sums_by(complete)
    try:
        for step in range(3):
            if step == 2 and hvd.rank() == 1:
                context.current().give_up(ValueError("on purpose"))
                return False
            optimizer.zero_grad()
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
    except CollectiveError:
        assert step == 2
    return bool(asked)


@pytest.mark.parametrize(
    ("sparse", "options", "may"),
    [
        (False, {}, True),
        (False, {"compression": "fp16"}, True),
        (False, {"compression": {"type": "topk", "ratio": 0.5}}, False),
        (False, {"compression": {"type": "1bit"}}, False),
        (True, {}, False),
    ],
)
def test_steps_that_can_be_completed(
    rank_pool: Callable[[int], RankPool], sparse: bool, options: dict[str, Any], may: bool
) -> None:
    assert rank_pool(2).run(asks_to_complete, sparse, options, init=True) == [may, False]
