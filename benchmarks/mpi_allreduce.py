"""The peer MPI, through mpi4py, for `reigen bench allreduce`: sums of float32 in place.

By hand: mpirun -np 2 --bind-to none python -m benchmarks.harness.rank benchmarks/mpi_allreduce.py ordinary 26214400
"""

from __future__ import annotations

import mpi4py
import numpy as np
from mpi4py import MPI

from benchmarks.harness.arrays import SumOf
from benchmarks.harness.sizes import resnet50_counts
from benchmarks.harness.work import Case


class Mpi:
    def __init__(self) -> None:
        self.communicator = MPI.COMM_WORLD
        library = MPI.Get_library_version().partition(",")[0].strip()
        self.versions = {"mpi4py": mpi4py.__version__, "mpi": library}

    def open(self, case: Case) -> SumOf:
        match case.name:
            case "ordinary":
                return self._one_by_one([case.nbytes // 4])
            case "separate":
                return self._one_by_one(resnet50_counts())
        raise ValueError(f"there is no case {case.name!r}")

    def close(self) -> None:
        MPI.Finalize()

    def _one_by_one(self, counts: list[int]) -> SumOf:
        arrays = [np.zeros(count, np.float32) for count in counts]

        def operate() -> None:
            for array in arrays:
                self.communicator.Allreduce(MPI.IN_PLACE, array)

        return SumOf(arrays, self.communicator.rank, self.communicator.size, operate)


def start(rank: int, size: int) -> Mpi:
    return Mpi()
