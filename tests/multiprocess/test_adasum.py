"""op=Adasum through the engine, between real processes: alone, fused, grouped, with a rank that has joined."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from reigen import context
from reigen.errors import UnsupportedError, UnsupportedTypeError
from reigen.testing import RankPool
from reigen.testing.reference import expected_adasum
from reigen.types import DTYPES, ReduceOp

Pools = Callable[[int], RankPool]
FLOAT, DOUBLE = DTYPES["float32"], DTYPES["float64"]
SHAPES = [(3, 4), (), (1,), (0, 5), (1000, 300), (7,), (33, 33)]


def mine(rank: int, index: int, dtype: str = "float32") -> np.ndarray:
    generator = np.random.default_rng([rank, index])
    common = np.random.default_rng([99, index]).standard_normal(SHAPES[index])
    return np.asarray(common + generator.standard_normal(SHAPES[index]), dtype)


def truth(ranks: range | list[int], index: int) -> np.ndarray:
    size = context.current().size
    vectors = [mine(r, index).astype(np.float64).ravel() * (r in ranks) for r in range(size)]
    return expected_adasum(vectors).reshape(SHAPES[index])


def near(result: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


def combine() -> list[bytes]:
    job = context.current()
    everybody = range(job.size)
    indices = range(len(SHAPES))
    options = {"op": ReduceOp.ADASUM}
    outputs = [np.empty_like(mine(job.rank, i)) for i in indices]
    order = np.random.default_rng(job.rank).permutation(len(SHAPES))  # names, not order, decide
    handles = [job.allreduce(mine(job.rank, i), outputs[i], FLOAT, name=f"t{i}", **options) for i in order]
    for handle in handles:
        handle.wait()
    for i in indices:
        near(outputs[i], truth(everybody, i))
        alone = mine(job.rank, i)
        job.allreduce(alone, alone, FLOAT, name="alone", blocking=True, **options).wait()
        assert alone.tobytes() == outputs[i].tobytes(), "other bits alone than in company"
    group = [mine(job.rank, i, "float64" if i % 2 else "float32") for i in indices]
    dtypes = [DOUBLE if i % 2 else FLOAT for i in indices]
    job.grouped_allreduce(group, group, dtypes, name="group", prescale=2.0, postscale=0.5, **options).wait()
    for i in indices:
        near(group[i], outputs[i])
    if job.rank == 1:
        job.join(blocking=True).wait()
    else:
        left = [mine(job.rank, i) for i in indices]
        job.grouped_allreduce(left, left, [FLOAT] * len(left), name="without rank 1", **options).wait()
        job.join(blocking=True).wait()
        for i in indices:
            near(left[i], truth([r for r in everybody if r != 1], i))
    return [array.tobytes() for array in outputs]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_is_the_same_everywhere_and_what_it_should_be(rank_pool: Pools, size: int) -> None:
    results = rank_pool(size).run(combine, init=True)
    assert results == [results[0]] * size


def refuse() -> None:
    job = context.current()
    x = np.ones(3, np.float32)
    with pytest.raises(UnsupportedError, match="not 3"):
        job.allreduce(x, x, FLOAT, op=ReduceOp.ADASUM)
    with pytest.raises(UnsupportedTypeError, match="int32"):
        job.allreduce(x.astype(np.int32), x.astype(np.int32), DTYPES["int32"], op=ReduceOp.ADASUM)
    pair = job.add_process_set([0, 1])
    if job.rank < 2:
        with pytest.raises(UnsupportedError, match="all ranks"):
            job.allreduce(x, x, FLOAT, op=ReduceOp.ADASUM, process_set=pair)
    job.barrier(blocking=True).wait()


def test_refusals_leave_the_job_working(rank_pool: Pools) -> None:
    rank_pool(3).run(refuse, init=True)
