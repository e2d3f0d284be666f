"""Who carries out a batch, and the sizes of its parts: for host memory and for that of devices."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from reigen.engine.handles import Task
from reigen.engine.messages import Operation, Response
from reigen.errors import CollectiveError
from reigen.kernels.reduce import Reduction
from reigen.planes.base import DataPlane
from reigen.planes.device import DevicePlane
from reigen.types import DTYPES, ReduceOp

#: One member of a batch: what was submitted, what was agreed, and this rank's memory.
Member = tuple[Operation, Response, Task]


@dataclass(frozen=True, slots=True)
class Team:
    """A process set, as one of the job's ranks sees it.

    Attributes:
        ranks: its ranks, ascending.
        plane: moves their data, numbered from 0 in that order; None for a rank that is none of them.
        device: moves what lies in the memory of devices, if there is a plane for that.
    """

    ranks: tuple[int, ...]
    plane: DataPlane | None
    device: DevicePlane | None = None

    def close(self, *, keep_plane: bool = False) -> None:
        """Release what the planes hold; with ``keep_plane``, what the plane for devices holds."""
        if self.device is not None:
            self.device.close()
        if self.plane is not None and not keep_plane:
            self.plane.close()

    def abort_on_device(self, error: CollectiveError) -> None:
        """End what devices are at work on."""
        if self.device is not None:
            self.device.abort(error)


@functools.lru_cache(maxsize=256)
def reduction_of(dtype: str, op: ReduceOp, count: int, prescale: float, postscale: float) -> Reduction:
    """The reduction of these parameters; made once, since the checks take longer than a small collective.

    Raises:
        ArgumentError, UnsupportedTypeError: there is no such reduction.
    """
    return Reduction(DTYPES[dtype], op, count, prescale, postscale)


def rows_of(num_rows: int, size: int) -> list[int]:
    """How reducescatter divides rows: the first ``num_rows % size`` ranks get one more."""
    return [num_rows // size + (rank < num_rows % size) for rank in range(size)]


def row_elements(operation: Operation) -> int:
    """Elements of one row: of an index of the first dimension."""
    return int(np.prod(operation.shape[1:], dtype=np.int64))
