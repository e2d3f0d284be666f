"""The peer torch.distributed with Gloo, for `reigen bench allreduce` and `calls`: sums of float32 in place.

By hand: torchrun --nproc-per-node 2 -m benchmarks.harness.rank benchmarks/gloo_allreduce.py ordinary 26214400
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from benchmarks.harness.arrays import SumOf
from benchmarks.harness.sizes import element_counts
from benchmarks.harness.work import Case

BUCKET_BYTES = 25 << 20  # DDP's default


class Gloo:
    def __init__(self, rank: int, size: int) -> None:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: whatever its name resolves to
        dist.init_process_group("gloo", rank=rank, world_size=size)
        self.rank, self.size = rank, size
        self.versions = {"torch": str(torch.__version__)}

    def open(self, case: Case) -> SumOf:
        match case.name:
            case "ordinary":
                tensor = torch.zeros(case.nbytes // 4)
                return SumOf([tensor.numpy()], self.rank, self.size, lambda: dist.all_reduce(tensor))
            case "separate":
                return self._asynchronous(element_counts(case))
            case "buckets":
                return self._asynchronous(bucket_counts(element_counts(case), BUCKET_BYTES // 4))
        raise ValueError(f"there is no case {case.name!r}")

    def close(self) -> None:
        dist.destroy_process_group()

    def _asynchronous(self, counts: list[int]) -> SumOf:
        """All of them at once. Buckets are flat already: the copies into them and out of them are not counted."""
        tensors = [torch.zeros(count) for count in counts]

        def operate() -> None:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

        return SumOf([tensor.numpy() for tensor in tensors], self.rank, self.size, operate)


def bucket_counts(counts: list[int], capacity: int) -> list[int]:
    """Elements of buckets that are filled in order and closed when the next gradient does not fit."""
    buckets = [0]
    for count in counts:
        if buckets[-1] and buckets[-1] + count > capacity:
            buckets.append(0)
        buckets[-1] += count
    return buckets


def start(rank: int, size: int) -> Gloo:
    return Gloo(rank, size)
