"""What REIGEN_CHECK_REPLICAS costs each time it compares: ``reigen run -np 2 python -m benchmarks.replica_check``."""

from __future__ import annotations

import statistics
import time

import torch

import reigen.torch as hvd
from reigen import context
from reigen.api.gradients.reduce_group import ReduceGroup
from reigen.api.gradients.replica_check import check_replicas
from reigen.engine.operation_builders import ReductionSpec
from reigen.torch.adapter import tensor_bytes
from reigen.types import ReduceOp


def main(rounds: int = 21) -> None:
    hvd.init()
    torch.set_num_threads(1)
    reduce_group = ReduceGroup(context.current(), hvd.global_process_set, ReductionSpec(ReduceOp.SUM, 1.0, 1.0))
    for num_tensors, numel in ((10, 2_500_000), (161, 155_280), (1000, 1024)):
        parameters = [torch.randn(numel, generator=torch.Generator().manual_seed(i)) for i in range(num_tensors)]
        names = [f"parameter {i}" for i in range(num_tensors)]
        took = []
        for _ in range(rounds):
            hvd.barrier()
            start = time.perf_counter()
            check_replicas(reduce_group, [tensor_bytes(p) for p in parameters], names)
            took.append(1e3 * (time.perf_counter() - start))
        if hvd.rank() == 0:
            elements = num_tensors * numel / 1e6
            print(f"{elements:5.1f} M float32 in {num_tensors:4} tensors: {statistics.median(took):6.2f} ms (median)")


if __name__ == "__main__":
    main()
