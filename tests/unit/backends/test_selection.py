"""Which backends are chosen, and why."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from reigen.backends.selection import BackendChoice, choose_backends
from reigen.errors import ConfigError

_NOT_MPI = "mpirun did not start it"


@pytest.mark.parametrize(
    ("machines", "requested", "no_mpi", "name", "reason"),
    [
        ((1,), None, None, "null", "one rank"),
        ((1,), "null", _NOT_MPI, "null", "one rank"),
        ((2,), None, _NOT_MPI, "shm", "all 2 ranks run on this host"),
        ((2,), None, None, "shm", "all 2 ranks run on this host"),
        ((64,), "shm", _NOT_MPI, "shm", "all 64 ranks run on this host"),
        ((3,), "tcp", _NOT_MPI, "tcp", "REIGEN_PLANE=tcp: even between the 3 ranks of one host"),
        ((3,), "mpi", None, "mpi", "REIGEN_PLANE=mpi: even between the 3 ranks of one host"),
        ((1, 1), None, _NOT_MPI, "tcp", "2 ranks on 2 hosts: tcp between them (MPI does not carry it: mpirun did not"),
        ((2, 1), None, _NOT_MPI, "shm+tcp", "3 ranks on 2 hosts: shared memory within each, tcp between them"),
        ((2, 2), None, None, "shm+mpi", "mpi between them (MPI started the job)"),
        ((2, 2), "tcp", None, "shm+tcp", "tcp between them (REIGEN_PLANE=tcp)"),
    ],
)
def test_choices(machines: Sequence[int], requested: str | None, no_mpi: str | None, name: str, reason: str) -> None:
    choice = choose_backends(machines, requested, no_mpi)
    assert choice.name == name
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("machines", "requested", "reason"),
    [
        ((2,), "nccl", "REIGEN_PLANE=nccl: there is no such backend; there are null, shm, tcp, mpi"),
        ((1,), "", "REIGEN_PLANE=: there is no such backend"),
        ((2,), "null", "jobs of one rank, this one has 2"),
        ((2, 2), "shm", "serves jobs on one host, this one has 4 ranks on 2"),
        ((2, 2), "mpi", "MPI cannot carry data: mpirun did not start it"),
    ],
)
def test_impossible_wishes_are_refused(machines: Sequence[int], requested: str | None, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_backends(machines, requested, _NOT_MPI)
    assert reason in str(caught.value)


def test_memory_is_shared_where_a_host_has_several_ranks() -> None:
    assert choose_backends((1, 1), no_mpi=_NOT_MPI) == BackendChoice(
        False, "tcp", choose_backends((1, 1), no_mpi=_NOT_MPI).reason
    )
    assert choose_backends((1, 2), no_mpi=_NOT_MPI).shares_memory
