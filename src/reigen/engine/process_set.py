"""Backends of a process set, for host memory and for that of devices, and the sizes of its parts."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np

from reigen.backends.base import Backend
from reigen.backends.device import DeviceBackend
from reigen.engine.counters import way_of
from reigen.engine.handle import TensorTableEntry
from reigen.engine.messages import Operation, Response
from reigen.errors import CollectiveError
from reigen.kernels.reduce import Reduction
from reigen.types import DTYPES, ReduceOp

#: One member of a batch: what was submitted, what was agreed, and this rank's memory.
BatchItem = tuple[Operation, Response, TensorTableEntry]


@dataclass(frozen=True, slots=True)
class ProcessSetGroup:
    """A process set, as one of the job's ranks sees it.

    Attributes:
        ranks: its ranks, ascending.
        backend: moves their data, numbered from 0 in that order; None for a rank that is none of them.
        device: moves what lies in the memory of devices, if there is a backend for that.
        way: of host memory: see `reigen.engine.counters.way_of`.
    """

    ranks: tuple[int, ...]
    backend: Backend | None
    device: DeviceBackend | None = None
    way: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "way", "" if self.backend is None else way_of(self.backend.name))

    def close(self, *, keep_backend: bool = False) -> None:
        """Release the backends; with ``keep_backend``, the backend for devices alone."""
        if self.device is not None:
            self.device.close()
        if self.backend is not None and not keep_backend:
            self.backend.close()

    def abort_on_device(self, error: CollectiveError) -> None:
        """End what devices are at work on."""
        if self.device is not None:
            self.device.abort(error)


@functools.lru_cache(maxsize=256)
def get_reduction(dtype: str, op: ReduceOp, count: int, prescale: float, postscale: float) -> Reduction:
    """The reduction of these parameters; made once, since the checks take longer than a small collective.

    Raises:
        ArgumentError, UnsupportedTypeError: there is no such reduction.
    """
    return Reduction(DTYPES[dtype], op, count, prescale, postscale)


def split_rows(num_rows: int, size: int) -> list[int]:
    """Divide rows as reduce_scatter does: the first ``num_rows % size`` ranks get one more."""
    return [num_rows // size + (rank < num_rows % size) for rank in range(size)]


def elements_per_row(operation: Operation) -> int:
    """Elements of one row: of an index of the first dimension."""
    return int(np.prod(operation.shape[1:], dtype=np.int64))
