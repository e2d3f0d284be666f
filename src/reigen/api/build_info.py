"""Answers to Horovod's questions about its build, for Reigen.

There is no Gloo in Reigen, and MPI may carry data and start jobs, but controls none. Scripts do not ask for the
libraries' sake, though, but to choose a path: with MPI, to avoid a second ``init()``, to start by ``mpirun``, or to
share a communicator; with Gloo, to rely on nothing but the launcher's environment. The second is how things are here,
so everything about Gloo is answered with yes (read it as "collectives for the CPU are built in, started without MPI")
and everything about MPI, NCCL and the other libraries with no: a script that asks takes the path that works.
"""

from __future__ import annotations

from reigen.errors import ArgumentError


def mpi_threads_supported() -> bool:
    """Never returns.

    Raises:
        ArgumentError: MPI is not enabled (as in a Horovod without MPI).
    """
    raise ArgumentError("MPI is not enabled: it may carry data between hosts, but controls no job of Reigen's")


def mpi_enabled() -> bool:
    """False: no job is controlled by MPI."""
    return False


def mpi_built() -> bool:
    """False: there is no controller over MPI inside."""
    return False


def gloo_enabled() -> bool:
    """True: jobs work as with Horovod's Gloo controller; ``init()`` after ``shutdown()`` is possible."""
    return True


def gloo_built() -> bool:
    """True: collectives for tensors in the CPU's memory are always there, as in a Horovod built with Gloo."""
    return True


def nccl_built() -> int:
    """0: no version of NCCL is built in; Reigen uses the one that torch brings, if there is one.

    Scripts ask in order to scale learning rates for Adasum, which works on the host here.
    """
    return 0


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False: no oneCCL."""
    return False


def cuda_built() -> bool:
    """False: nothing here runs on a GPU."""
    return False


def rocm_built() -> bool:
    """False."""
    return False
