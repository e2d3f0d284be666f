"""What REIGEN_CHECK_REPLICAS costs each time it compares: ``reigen run -np 2 python -m benchmarks.replica_check``.

``--json docs/data/records/replica-check.json`` writes the table there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import torch

import reigen.torch as hvd
from benchmarks.harness.machine import Machine, this_machine
from benchmarks.harness.record import Column, Quantity, Record, make_record
from reigen import context
from reigen.api.gradients.reduce_group import ReduceGroup
from reigen.api.gradients.replica_check import check_replicas
from reigen.engine.operation_builders import ReductionSpec
from reigen.torch.adapter import tensor_bytes
from reigen.types import ReduceOp

_ROUNDS = 21


def make_table(found: Mapping[tuple[int, int], float], num_ranks: int, machine: Machine) -> Record:
    """Return what was found, as a table.

    Args:
        found: by how many tensors there are, and of how many elements each is, the milliseconds of a comparison.
        num_ranks: of the job.
        machine: as it was before.
    """
    lines: dict[str, dict[str, Quantity | str]] = {}
    for (num_tensors, numel), took in found.items():
        title = f"{num_tensors * numel / 1e6:.0f} M in {num_tensors:,} tensors"
        lines[title] = {"": Quantity(took, 1 if took < 10 else 0, unit="ms")}
    command = f"reigen run -np {num_ranks} python -m benchmarks.replica_check"
    conditions = f"{num_ranks} ranks, medians of {_ROUNDS} comparisons"
    return make_record(
        command, conditions, "parameters (float32)", [Column("")], lines, machine, {"torch": torch.__version__}
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replica_check", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args()
    before = this_machine()
    hvd.init()
    torch.set_num_threads(1)
    reduce_group = ReduceGroup(context.current(), hvd.global_process_set, ReductionSpec(ReduceOp.SUM, 1.0, 1.0))
    found: dict[tuple[int, int], float] = {}
    for num_tensors, numel in ((10, 2_500_000), (161, 155_280), (1000, 1024)):
        parameters = [torch.randn(numel, generator=torch.Generator().manual_seed(i)) for i in range(num_tensors)]
        names = [f"parameter {i}" for i in range(num_tensors)]
        took = []
        for _ in range(_ROUNDS):
            hvd.barrier()
            start = time.perf_counter()
            check_replicas(reduce_group, [tensor_bytes(p) for p in parameters], names)
            took.append(1e3 * (time.perf_counter() - start))
        found[num_tensors, numel] = statistics.median(took)
        if hvd.rank() == 0:
            elements = num_tensors * numel / 1e6
            print(f"{elements:5.1f} M float32 in {num_tensors:4} tensors: {statistics.median(took):6.2f} ms (median)")
    if options.json is not None and hvd.rank() == 0:
        make_table(found, hvd.size(), before).save(options.json)


if __name__ == "__main__":
    main()
