"""What the ranks do in `test_mpirun`: one function a scenario, chosen by the first argument."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from reigen.backends.base import ProgressHook, ReduceBuffer
from reigen.backends.mpi.backend import MpiBackend
from reigen.backends.mpi.network import MpiNetwork
from reigen.cluster.bootstrap.mpi import broadcast_over_mpi
from reigen.cluster.bootstrap.mpi_library import mpi_comm_world
from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.errors import CollectiveError, ConfigError, DeadlineError, PeerLostError
from reigen.kernels.reduce import Reduction
from reigen.types import DTYPES, ReduceOp

SUM = ReduceOp.SUM
FOREVER = threading.Event()


def soon(seconds: float = 100.0) -> float:
    return time.monotonic() + seconds


def nobody_died(needed: Sequence[int]) -> CollectiveError | None:
    return None


def the_client(rank: int) -> RendezvousClient:
    secret = bytes.fromhex(os.environ["REIGEN_TEST_SECRET"])
    return RendezvousClient(os.environ["REIGEN_TEST_RENDEZVOUS"], secret, rank, 60.0)


def the_backend() -> MpiBackend:
    everybody = mpi_comm_world(os.environ)
    client = the_client(everybody.rank)
    network = MpiNetwork(everybody, range(everybody.size), everybody.rank, client, failure=nobody_died)
    backend = network.among(range(everybody.size), soon())
    assert isinstance(backend, MpiBackend)
    return backend


def add(backend: MpiBackend, array: np.ndarray[tuple[int], np.dtype[np.float32]], deadline: float) -> None:
    backend.allreduce([ReduceBuffer(array, array)], Reduction(DTYPES["float32"], SUM, backend.size), deadline)


def library() -> None:
    """Prints which MPI this is."""
    everybody = mpi_comm_world(os.environ)
    from mpi4py import MPI

    print(f"rank {everybody.rank} of {everybody.size}: {MPI.Get_library_version().splitlines()[0]}", flush=True)


def sharing() -> None:
    """Rank 0 tells the others."""
    everybody = mpi_comm_world(os.environ)
    told = broadcast_over_mpi(bytes(range(200)) if everybody.rank == 0 else None, soon(), os.environ)
    assert told == bytes(range(200))
    again = broadcast_over_mpi(b"" if everybody.rank == 0 else None, soon(), os.environ)
    print("shared", hashlib.sha256(told + again).hexdigest(), flush=True)


def sharing_without_rank_0() -> None:
    everybody = mpi_comm_world(os.environ)
    if everybody.rank == 0:
        FOREVER.wait()
    broadcast_over_mpi(None, soon(0.5), os.environ)


def wrong_threads() -> None:
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    try:
        mpi_comm_world(os.environ)
    except ConfigError as error:
        print(error, flush=True)


def not_initialised() -> None:
    import mpi4py

    mpi4py.rc.initialize = False
    for prepare in ("", "Init", "Finalize"):
        from mpi4py import MPI

        getattr(MPI, prepare, lambda: None)()
        try:
            mpi_comm_world(os.environ)
        except ConfigError as error:
            print(error, flush=True)


def wrong_mpirun() -> None:
    try:
        mpi_comm_world(os.environ)
    except ConfigError as error:
        print(error, flush=True)
    os._exit(3)


def silent_rank() -> None:
    """The last rank stops in the middle of everything; the others run into their deadline."""
    backend, patience = the_backend(), float(os.environ["REIGEN_TEST_PATIENCE"])
    add(backend, np.ones(10, np.float32), soon())
    backend.barrier(soon())
    if backend.rank == backend.size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    ranks_missing: list[tuple[int, ...]] = []
    backend.ranks_missing = lambda members: ranks_missing.append(tuple(members))
    begun = time.monotonic()
    try:
        add(backend, np.ones(1 << 20, np.float32), soon(patience))
    except DeadlineError as error:
        took = time.monotonic() - begun
        assert patience <= took < patience + 40.0
        assert error.ranks == (backend.size - 1,), error.ranks
        assert 2 <= len(ranks_missing) <= 2 + 10 * took, "looked at ten times a second, where the machine is not busy"
        assert ranks_missing[-1] == (backend.size - 1,)
        print("the others know who is missing", flush=True)
        backend.abort(error)
        raise


def late_data() -> None:
    """What comes after a collective was given up does not reach the caller's memory."""
    from mpi4py import MPI

    backend, word = the_backend(), np.zeros(1)
    array = np.full(1000, backend.rank, np.float32)
    if backend.rank == 0:
        with suppress(DeadlineError):
            backend.broadcast(None, array, 1, soon(0.3))
        array[:] = 7
        MPI.COMM_WORLD.Send(word, 1)
        MPI.COMM_WORLD.Recv(word, 1)  # makes progress: MPI writes wherever it was told to
        assert (array == 7).all(), "the caller's memory was written to"
        print("untouched", flush=True)
        MPI.COMM_WORLD.Send(word, 1)
    else:
        MPI.COMM_WORLD.Recv(word, 0)  # rank 0 has given up
        backend.broadcast(array, array, 1, soon())
        MPI.COMM_WORLD.Send(word, 0)
        MPI.COMM_WORLD.Recv(word, 0)


def aborted_by_another_thread() -> None:
    backend = the_backend()
    if backend.rank == 0:
        timer = threading.Timer(0.3, lambda: backend.abort(CollectiveError("enough is enough", ranks=(0,))))
        timer.start()
    try:
        if backend.rank == backend.size - 1:
            FOREVER.wait(1.0)
        backend.barrier(soon())
    except CollectiveError as error:
        assert "enough is enough" in str(error)
        assert error.ranks == (0,)
        print("told", flush=True)


def killed_rank() -> None:
    """The last rank dies. Where MPI survives that, the others learn who it was."""
    backend = the_backend()
    backend.barrier(soon())
    if backend.rank == backend.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        while True:
            add(backend, np.ones(1 << 18, np.float32), soon())
    except PeerLostError as error:
        assert error.ranks == (backend.size - 1,), error
        assert time.monotonic() - begun < 60.0
        print("survived the death of", *error.ranks, flush=True)
        backend.abort(error)
        raise


def other_work() -> None:
    """While a backend waits, what else there is to do is done."""
    backend = the_backend()
    reading, writing = os.pipe()
    done: list[bytes] = []
    client = the_client(backend.rank)

    def work() -> None:
        done.append(os.read(reading, 1))
        client.put("worked", b"")

    backend.progress_hook = ProgressHook(reading, work)
    if backend.rank == 0:
        timer = threading.Timer(0.1, lambda: os.write(writing, b"x"))
        timer.start()
    else:
        client.get("worked", 100.0)  # rank 0 waits in the barrier until then
    backend.barrier(soon())
    assert done == ([b"x"] if backend.rank == 0 else [])
    print("worked", flush=True)


def sets() -> None:
    """Backends of some ranks come and go."""
    backend = the_backend()
    for turn in range(50):
        part = backend.split([0, backend.size - 1], soon())
        if part is not None:
            array = np.full(1000, turn, np.float32)
            part.allreduce([ReduceBuffer(array, array)], Reduction(DTYPES["float32"], SUM, 2), soon())
            assert (array == 2 * turn).all()
            part.close()
    alone = backend.split([1], soon())
    assert (alone is None) == (backend.rank != 1)
    backend.barrier(soon())
    backend.close()
    print("closed", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
