"""How many Python calls one small collective takes: counted, since time depends on what else the machine does."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

from reigen import context
from reigen.engine.engine import Engine
from reigen.testing import RankPool
from reigen.types import DTYPES, ReduceOp

Pools = Callable[[int], RankPool]


class CallCounter:
    """Counts calls of Python functions, and how deep they are nested, in one thread."""

    def __init__(self) -> None:
        self.num_calls = self.depth = self.deepest = 0
        #: whether this thread did the work, and not the engine's
        self.drove = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Hear of an event: for `sys.setprofile`."""
        if event == "call":
            self.num_calls += 1
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
            self.drove |= frame.f_code is Engine._drive.__code__
        elif event == "return":
            self.depth -= 1


def count_calls(call: Callable[[], object]) -> tuple[int, int]:
    """The calls that one takes in the steady state, and how deep they are nested.

    The least of many: how often a rank looks for the others before it sleeps, and whether it does, is chance.
    """
    for _ in range(20):
        call()
    found = []
    for _ in range(1000):
        counter = CallCounter()
        sys.setprofile(counter)
        call()
        sys.setprofile(None)
        if counter.drove:
            found.append((counter.num_calls, counter.deepest))
    return min(found)


def small_allreduce() -> tuple[int, int]:
    job, x = context.current(), np.ones(1024, np.float32)
    return count_calls(lambda: job.allreduce(x, x, DTYPES["float32"], op=ReduceOp.SUM, name="x", blocking=True).wait())


def small_torch_allreduce() -> tuple[int, int]:
    torch, hvd = importlib.import_module("torch"), importlib.import_module("reigen.torch")
    return count_calls(functools.partial(hvd.allreduce_, torch.ones(1024), name="x", op=hvd.Sum))


@pytest.mark.parametrize(("allreduce", "most"), [(small_allreduce, (44, 43)), (small_torch_allreduce, (50, 49))])
def test_a_small_allreduce_takes_few_calls(
    rank_pool: Pools, allreduce: Callable[[], tuple[int, int]], most: tuple[int, int]
) -> None:
    counted = rank_pool(2).run(allreduce, init=True)
    for (num_calls, depth), limit in zip(counted, most, strict=True):
        assert num_calls <= limit, counted
        assert depth <= 10, counted
