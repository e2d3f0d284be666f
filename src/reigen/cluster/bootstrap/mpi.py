"""Broadcast of the control service's address and the job's secret by rank 0, over MPI.

So `mpirun -np 4 python train.py` needs no port, no file and no variable, and the secret is on no command line and in
no environment. It travels as bytes, by one broadcast, in whatever the site's MPI travels in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from reigen.cluster.bootstrap.mpi_library import mpi_comm_world, mpi_exit_handler
from reigen.errors import ArgumentError, DeadlineError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

MAX_SHARED_BYTES = 1022
_LENGTH_BYTES = 2
_PAUSE_SECONDS = 0.0005


def broadcast_over_mpi(data: bytes | None, deadline: float, environ: Mapping[str, str]) -> bytes:
    """Broadcast rank 0's bytes over MPI_COMM_WORLD. Collective among all processes that the MPI launcher started.

    Args:
        data: on rank 0, at most `MAX_SHARED_BYTES`; None on the others.
        deadline: until when to wait, a value of ``time.monotonic()``.
        environ: the process's.

    Raises:
        ConfigError: MPI cannot be used (`reigen.cluster.bootstrap.mpi_library.mpi_comm_world`).
        DeadlineError: rank 0 did not call in time.
    """
    world = mpi_comm_world(environ)
    message = np.zeros(_LENGTH_BYTES + MAX_SHARED_BYTES, np.uint8)
    if world.rank == 0:
        if data is None or len(data) > MAX_SHARED_BYTES:
            raise ArgumentError(f"rank 0 shares at most {MAX_SHARED_BYTES} bytes")
        framed = len(data).to_bytes(_LENGTH_BYTES) + data
        message[: len(framed)] = np.frombuffer(framed, np.uint8)
    _broadcast_message(world, message, deadline)
    length = int.from_bytes(message[:_LENGTH_BYTES].tobytes())
    return message[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes()


def _broadcast_message(world: Intracomm, message: np.ndarray[tuple[int], np.dtype[np.uint8]], deadline: float) -> None:
    from mpi4py import MPI

    ending = mpi_exit_handler()
    request = world.Ibcast([message, message.size, MPI.BYTE], 0)
    try:
        while not request.Test():
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    "rank 0 did not call init() in time: it tells the others over MPI where they meet "
                    "(REIGEN_START_TIMEOUT sets how long to wait)",
                    ranks=(0,),
                )
            time.sleep(_PAUSE_SECONDS)
    except BaseException as error:
        ending.failed(str(error))
        ending.keep(request, message)
        raise
