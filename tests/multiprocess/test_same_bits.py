"""Results have the same bits whatever travels together, in whatever order and by whichever way through the backend.

The truth is NumPy's: contributions added one after the other, in rank order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reigen import context
from reigen.testing import RankPool
from reigen.types import DTYPES, DType, ReduceOp

pytestmark = pytest.mark.slow
Pools = Callable[[int], RankPool]
Array = NDArray[Any]

_TYPES = ("float32", "float32", "float64", "float16", "bfloat16")
#: read from each other's memory, staged in many chunks, at the border of one; the rest are small
_LARGE = {0: ("float32", 2_300_000), 1: ("float64", 300_000), 2: ("bfloat16", 16_385), 3: ("float16", 0)}
_NUM_TENSORS = 24


def widened(stored: Array, dtype: DType) -> Array:
    """In the type in which sums are computed."""
    if dtype.name == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32) if dtype.name == "float16" else stored


def narrowed(values: Array, dtype: DType) -> Array:
    """Rounded once, to nearest even."""
    if dtype.name == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(dtype.storage)


def reference(inputs: list[Array], dtype: DType, op: ReduceOp) -> Array:
    """What all ranks must get, bit for bit."""
    first, *rest = (widened(x, dtype) for x in inputs)
    total = first.copy()
    for x in rest:
        total = total + x if op is not ReduceOp.PRODUCT else total * x
    return narrowed(total / total.dtype.type(len(inputs)) if op is ReduceOp.AVERAGE else total, dtype)


def contribution(seed: int, step: int, index: int, rank: int, dtype: DType, count: int) -> Array:
    """Magnitudes differ so much that another order of the sum would be another sum."""
    rng = np.random.default_rng([seed, step, index, rank])
    values = rng.standard_normal(count, np.float32) * np.exp2(rng.integers(-8, 8, count)).astype(np.float32)
    return narrowed(values, dtype) if dtype.itemsize == 2 else values.astype(dtype.storage)


@dataclass
class Tensors:
    """What is reduced in every step: some alone, some in registered memory, some in one of two groups."""

    job: context.Context
    seed: int
    kinds: list[tuple[str, int]]
    ops: list[ReduceOp]
    #: by tensor: 0 alone, 1 in registered memory, 2 and 3 in that group
    places: list[int]
    regions: dict[int, context.MemoryRegion] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtypes = [DTYPES[name] for name, _ in self.kinds]
        for index, (_, count) in enumerate(self.kinds):
            if self.places[index] == 1:
                nbytes = max(1, count * self.dtypes[index].itemsize)
                self.regions[index] = self.job.allocate(nbytes, name=f"region{index}")
            elif self.places[index] > 1:
                self.ops[index] = ReduceOp.SUM

    def inputs(self, step: int) -> list[list[Array]]:
        """Of every tensor and rank."""
        return [
            [contribution(self.seed, step, index, rank, self.dtypes[index], count) for rank in range(self.job.size)]
            for index, (_, count) in enumerate(self.kinds)
        ]

    def own(self, inputs: list[list[Array]]) -> list[Array]:
        """This rank's, where they are to be reduced."""
        arrays = [of_ranks[self.job.rank].copy() for of_ranks in inputs]
        for index, region in self.regions.items():
            there = region.array[: arrays[index].nbytes].view(self.dtypes[index].storage)
            there[:] = arrays[index]
            arrays[index] = there
        return arrays

    def calls(self, arrays: list[Array]) -> list[Callable[[], context.Handle]]:
        """What is to be called in any order."""
        calls = [partial(self._reduce, arrays, i) for i, place in enumerate(self.places) if place < 2]
        return calls + [partial(self._reduce_group, arrays, g) for g in (2, 3) if g in self.places]

    def _reduce(self, arrays: list[Array], i: int) -> context.Handle:
        options: dict[str, Any] = {"op": self.ops[i], "name": f"t{i}", "region": self.regions.get(i)}
        return self.job.allreduce(arrays[i], arrays[i], self.dtypes[i], **options)

    def _reduce_group(self, arrays: list[Array], group: int) -> context.Handle:
        members = [i for i, place in enumerate(self.places) if place == group]
        mine, dtypes = [arrays[i] for i in members], [self.dtypes[i] for i in members]
        return self.job.grouped_allreduce(mine, mine, dtypes, op=ReduceOp.SUM, name=f"group{group}")


def reduced_in_any_order(seed: int, steps: int, with_large: bool) -> int:
    """In each step every rank submits, and waits, in an order of its own; how many results were compared."""
    job = context.current()
    common, own = np.random.default_rng(seed), np.random.default_rng([seed, job.rank])
    kinds = [(str(common.choice(_TYPES)), int(2 ** common.uniform(0, 13))) for _ in range(_NUM_TENSORS)]
    if with_large:
        kinds = [_LARGE.get(index, kind) for index, kind in enumerate(kinds)]
    ops = [ReduceOp(int(common.choice([ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.PRODUCT]))) for _ in kinds]
    tensors = Tensors(job, seed, kinds, ops, [int(place) for place in common.integers(0, 4, len(kinds))])
    compared = 0
    for step in range(steps):
        inputs = tensors.inputs(step)
        arrays = tensors.own(inputs)
        calls = tensors.calls(arrays)
        handles = [calls[place]() for place in own.permutation(len(calls))]
        for place in own.permutation(len(handles)):
            handles[place].wait()
        for index, result in enumerate(arrays):
            expected = reference(inputs[index], tensors.dtypes[index], ops[index])
            where = (step, kinds[index], ops[index], tensors.places[index])
            assert result.tobytes() == expected.tobytes(), where
            compared += 1
    return compared


@pytest.mark.parametrize(
    ("size", "threshold", "capacity", "alone"),
    [(2, "0", "0", "1"), (3, "1000", "2", "0"), (3, "default", "1024", "1"), (2, "1000000000000", "1024", "0")],
)
def test_the_bits_are_those_of_rank_order(
    size: int, threshold: str, capacity: str, alone: str, rank_pool: Pools
) -> None:
    env = {"HOROVOD_CACHE_CAPACITY": capacity, "HOROVOD_DISABLE_GROUP_FUSION": alone}
    if threshold != "default":
        env["HOROVOD_FUSION_THRESHOLD"] = threshold
    compared = rank_pool(size).run(reduced_in_any_order, size, 3, threshold != "0", init=True, env=env)
    assert compared == [3 * _NUM_TENSORS] * size


@pytest.mark.parametrize("size", [2, 3])
def test_the_bits_are_the_same_for_all_knobs(size: int, rank_pool: Pools) -> None:
    """Each combination with one number of ranks, each threshold and capacity with both."""
    thresholds, capacities, alone = ("0", "300", "40000", "134217728"), ("0", "2", "1024"), ("0", "1")
    for seed, knobs in enumerate(itertools.product(thresholds, capacities, alone)):
        names = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CACHE_CAPACITY", "HOROVOD_DISABLE_GROUP_FUSION")
        env = dict(zip(names, knobs, strict=True))
        places = (thresholds.index(knobs[0]), capacities.index(knobs[1]), alone.index(knobs[2]))
        if sum(places) % 2 == size % 2:
            rank_pool(size).run(reduced_in_any_order, 100 * size + seed, 3, seed % 3 == 0, init=True, env=env)


def averaged_gradients(seed: int, groups: int | None) -> int:
    """DistributedOptimizer: gradients arrive in an order of each rank's own; what ``step()`` finds is the average."""
    import torch

    import reigen.torch as hvd

    common, own = np.random.default_rng(seed), np.random.default_rng([seed, hvd.rank()])
    types = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
    kinds = [(str(common.choice(list(types))), int(2 ** common.uniform(0, 16))) for _ in range(20)]
    parameters = [torch.nn.Parameter(torch.zeros(count, dtype=types[name])) for name, count in kinds]
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), named, groups=groups)
    for step in range(3):
        optimizer.zero_grad()
        inputs = [
            [contribution(seed, step, i, rank, DTYPES[name], count) for rank in range(hvd.size())]
            for i, (name, count) in enumerate(kinds)
        ]
        factors = [torch.from_numpy(x[hvd.rank()].copy()) for x in inputs]
        factors = [f.view(torch.bfloat16) if n == "bfloat16" else f for f, (n, _) in zip(factors, kinds, strict=True)]
        loss: Any = 0.0
        for i in own.permutation(len(kinds)):  # autograd goes back in the opposite order
            loss = loss + (parameters[i] * factors[i]).sum().double()
        loss.backward()
        optimizer.step()
        for i, (name, _) in enumerate(kinds):
            gradient = parameters[i].grad
            assert gradient is not None
            stored = gradient.view(torch.int16) if name == "bfloat16" else gradient
            expected = reference(inputs[i], DTYPES[name], ReduceOp.AVERAGE)
            assert stored.numpy().tobytes() == expected.tobytes(), (step, i, kinds[i])
    return step


@pytest.mark.parametrize(
    ("size", "bucket", "groups"), [(2, "1KiB", None), (3, "100KB", None), (3, "16MiB", 3), (2, "16MiB", None)]
)
def test_gradients_have_the_same_bits_for_every_size_of_buckets(
    size: int, bucket: str, groups: int | None, rank_pool: Pools
) -> None:
    env = {"REIGEN_BUCKET_BYTES": bucket}
    assert rank_pool(size).run(averaged_gradients, 7, groups, init=True, env=env) == [2] * size
