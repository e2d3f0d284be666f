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
from reigen.engine.tensor_queue import TensorQueue
from reigen.testing import RankPool
from reigen.types import DTYPES, ReduceOp

Pools = Callable[[int], RankPool]


class CallCounter:
    """Counts calls of Python functions, and how deep they are nested, in one thread."""

    def __init__(self) -> None:
        self.num_calls = self.depth = self.deepest = 0
        #: whether this thread did the work, and not the engine's; and whether it was done eagerly
        self.drove = self.was_eager = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Hear of an event: for `sys.setprofile`."""
        if event == "call":
            self.num_calls += 1
            self.depth += 1
            self.deepest = max(self.deepest, self.depth)
            self.drove |= frame.f_code is Engine._drive.__code__
            self.was_eager |= frame.f_code is TensorQueue.finish_alone.__code__
        elif event == "return":
            self.depth -= 1


def count_calls(call: Callable[[], object], *, eager: bool) -> tuple[int, int]:
    """The calls that one takes in the steady state, and how deep they are nested.

    The least of many: how often a rank looks for the others before it sleeps, and whether it does, is chance.
    """
    for _ in range(20):
        call()
    found, spin = [], context.current()._engine._spin
    for _ in range(1000):
        spin.looks = 1 << 18  # as on a core of its own
        counter = CallCounter()
        sys.setprofile(counter)
        call()
        sys.setprofile(None)
        if counter.was_eager if eager else counter.drove:
            found.append((counter.num_calls, counter.deepest))
    return min(found)


def small_allreduce(eager: bool) -> tuple[int, int]:
    job, x = context.current(), np.ones(1024, np.float32)
    call = functools.partial(job.allreduce, x, x, DTYPES["float32"], op=ReduceOp.SUM, name="x", blocking=True)
    return with_or_without_eager(lambda: call().wait(), eager)


def small_torch_allreduce(eager: bool) -> tuple[int, int]:
    torch, hvd = importlib.import_module("torch"), importlib.import_module("reigen.torch")
    return with_or_without_eager(functools.partial(hvd.allreduce_, torch.ones(1024), name="x", op=hvd.Sum), eager)


def with_or_without_eager(call: Callable[[], object], eager: bool) -> tuple[int, int]:
    engine = context.current()._engine
    kept = engine._eager
    if not eager:
        engine._eager = None
    try:
        return count_calls(call, eager=eager)
    finally:
        engine._eager = kept


@pytest.mark.parametrize(
    ("allreduce", "eager", "most", "deepest"),
    [
        (small_allreduce, True, (17, 16), 8),
        (small_torch_allreduce, True, (24, 23), 8),
        (small_allreduce, False, (49, 50), 10),
        (small_torch_allreduce, False, (56, 57), 10),
    ],
)
def test_a_small_allreduce_takes_few_calls(
    rank_pool: Pools, allreduce: Callable[[bool], tuple[int, int]], eager: bool, most: tuple[int, int], deepest: int
) -> None:
    counted = rank_pool(2).run(allreduce, eager, init=True)
    for (num_calls, depth), limit in zip(counted, most, strict=True):
        assert num_calls <= limit, counted
        assert depth <= deepest, counted
