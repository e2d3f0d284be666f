"""Reigen's side of `reigen bench allreduce` and `calls`: sums of float32, as a user or a front end calls them."""

from __future__ import annotations

import itertools
import time

import numpy as np
import torch
from numpy.typing import NDArray

import reigen.torch as hvd
from benchmarks.harness.arrays import SumOf
from benchmarks.harness.sizes import element_counts
from benchmarks.harness.work import Case
from reigen import __version__, context
from reigen.api.gradients.bucket_plan import ParameterSpec, choose_bucket_bytes, plan_buckets
from reigen.backends.base import ReduceBuffer
from reigen.errors import ArgumentError
from reigen.kernels.reduce import Reduction
from reigen.types import DTYPES, ReduceOp

_FLOAT32 = DTYPES["float32"]
#: for one operation of the backend alone
_SECONDS = 60.0


class Reigen:
    """One rank of a Reigen job."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        hvd.init()
        self._context = context.current()
        self._numbers = itertools.count()
        self.versions = {"reigen": __version__, "numpy": np.__version__}

    def open(self, case: Case) -> SumOf:
        """``registered`` and ``ordinary``: one named tensor; the others: several, by default ResNet-50's gradients.

        ``backend`` is one without negotiation, ``buckets`` lie in registered memory, ``separate`` are asynchronous
        calls, ``group`` is one call.
        """
        name = f"bench.{next(self._numbers)}"
        match case.name:
            case "registered":
                return self._registered(name, [case.nbytes // 4], case.nbytes)
            case "ordinary":
                tensor = torch.zeros(case.nbytes // 4)
                return self._work([tensor], lambda: hvd.allreduce_(tensor, name=name, op=hvd.Sum))
            case "backend":
                return self._backend(np.zeros(case.nbytes // 4, np.float32))
            case "buckets":
                return self._registered(name, element_counts(case), choose_bucket_bytes(self._context))
            case "separate":
                return self._separate(name, element_counts(case))
            case "group":
                tensors = [torch.zeros(count) for count in element_counts(case)]
                return self._work(tensors, lambda: hvd.grouped_allreduce_(tensors, name=name, op=hvd.Sum))
        raise ArgumentError(f"there is no case {case.name!r}")

    def close(self) -> None:
        """Leave the job."""
        hvd.shutdown()

    def _registered(self, name: str, counts: list[int], bucket_bytes: int) -> SumOf:
        """Gradients of so many elements in buckets, as the optimizer lays them out; submitted in their order."""
        specs = [ParameterSpec(count, 4, "float32") for count in counts]
        plan = plan_buckets(specs, range(len(specs)), bucket_bytes)
        region = self._context.allocate(plan.nbytes, name=name)
        named = [
            (f"{name}.{number}", region.array[bucket.offset : bucket.offset + bucket.nbytes].view(np.float32))
            for number, bucket in enumerate(plan.buckets)
        ]
        alone = len(named) == 1

        def operate() -> None:
            handles = [
                self._context.allreduce(
                    array, array, _FLOAT32, op=ReduceOp.SUM, name=bucket, region=region, blocking=alone
                )
                for bucket, array in named
            ]
            for handle in handles:
                handle.wait()

        arrays = [array for _, array in named]
        rank, size = self._context.rank, self._context.size
        return SumOf(arrays, rank, size, operate, lambda: self._context.free(region))

    def _backend(self, array: NDArray[np.float32]) -> SumOf:
        """What moves the data, without the engine: for a job in which nothing else goes on."""
        backend = self._context._engine._backend
        rank, size = self._context.rank, self._context.size
        buffers, reduction = [ReduceBuffer(array, array)], Reduction(_FLOAT32, ReduceOp.SUM, size)
        return SumOf([array], rank, size, lambda: backend.allreduce(buffers, reduction, time.monotonic() + _SECONDS))

    def _separate(self, name: str, counts: list[int]) -> SumOf:
        named = [(f"{name}.{number}", torch.zeros(count)) for number, count in enumerate(counts)]

        def operate() -> None:
            handles = [hvd.allreduce_async_(tensor, name=gradient, op=hvd.Sum) for gradient, tensor in named]
            for handle in handles:
                hvd.synchronize(handle)

        return self._work([tensor for _, tensor in named], operate)

    def _work(self, tensors: list[torch.Tensor], operate: object) -> SumOf:
        assert callable(operate)
        return SumOf([tensor.numpy() for tensor in tensors], self._context.rank, self._context.size, operate)


def start(rank: int, size: int) -> Reigen:
    """The program of one rank."""
    return Reigen()
