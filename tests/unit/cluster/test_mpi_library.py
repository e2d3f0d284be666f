"""Whether a process may use MPI, and how it ends afterwards. Decisions only: no MPI is loaded here."""

from __future__ import annotations

import atexit
import logging
import sys

import pytest

from reigen.backends.mpi.backend import ORDERED_RANKS, can_reduce_by_mpi, sums_in_rank_order
from reigen.cluster.bootstrap.mpi_library import (
    MpiExitHandler,
    _find_mpi_problem,
    can_survive_failures,
    can_use_mpi,
    mpi_comm_world,
)
from reigen.errors import ConfigError
from reigen.kernels.reduce import Reduction
from reigen.types import ReduceOp, dtype_named

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4"}
GOOD = {
    "serialized": True,
    "size": 4,
    "num_launched": "4",
    "variable": "PMI_SIZE",
    "library": "MPICH Version: 4.0.2",
}


@pytest.mark.parametrize("environ", [OPEN_MPI, HYDRA])
def test_launchers_of_mpi_are_recognised(environ: dict[str, str]) -> None:
    pytest.importorskip("mpi4py")
    can, reason = can_use_mpi(environ)
    assert can
    assert all(f"{name}={value}" in reason for name, value in environ.items())


@pytest.mark.parametrize("environ", [{}, {"OMPI_COMM_WORLD_RANK": "1"}, {"PMI_RANK": "x", "PMI_SIZE": "4"}])
def test_without_a_launcher_mpi_is_not_initialised(environ: dict[str, str]) -> None:
    assert not can_use_mpi(environ)[0]
    with pytest.raises(ConfigError, match="no MPI launcher started this process"):
        mpi_comm_world(environ)


def test_a_library_that_is_as_the_launcher_says() -> None:
    assert _find_mpi_problem(**GOOD) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ({"serialized": False}, "without MPI_THREAD_SERIALIZED"),
        ({"size": 1}, "PMI_SIZE=4, but MPICH Version: 4.0.2 in this process sees 1 process"),
    ],
)
def test_a_library_that_is_not(fault: dict[str, object], complaint: str) -> None:
    assert complaint in (_find_mpi_problem(**{**GOOD, **fault}) or "")  # type: ignore[arg-type]


def test_who_survives_a_death() -> None:
    assert can_survive_failures({"OMPI_MCA_mpi_ft_enable": "1"}, "Open MPI v5.0.9")[0]
    assert can_survive_failures({}, "Open MPI v5.0.9") == (
        False,
        "MPI ends the job when a rank dies; Open MPI 5 can go on if started with `mpirun --with-ft ulfm`",
    )
    assert not can_survive_failures({"OMPI_MCA_mpi_ft_enable": "1"}, "MPICH Version: 5.0.2")[0]


class Aborts:
    """Stands for MPI_Abort, which does not return."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def __call__(self, code: int) -> None:
        self.codes.append(code)


@pytest.fixture
def aborts() -> Aborts:
    return Aborts()


def test_who_has_not_failed_leaves_as_mpi_processes_do(aborts: Aborts) -> None:
    farewell = MpiExitHandler(aborts)
    farewell.leave()
    atexit.unregister(farewell.leave)
    assert aborts.codes == []


def test_who_has_failed_does_not_wait_for_the_others(aborts: Aborts, caplog: pytest.LogCaptureFixture) -> None:
    farewell = MpiExitHandler(aborts)
    try:
        farewell.failed("rank 2 is gone")
        farewell.failed("and another thing")
        with caplog.at_level(logging.ERROR):
            farewell.leave()
    finally:
        atexit.unregister(farewell.leave)
    assert aborts.codes == [1]
    assert "rank 2 is gone" in caplog.text


def test_who_ends_by_an_exception_does_not_wait_either(aborts: Aborts, monkeypatch: pytest.MonkeyPatch) -> None:
    farewell = MpiExitHandler(aborts)
    atexit.unregister(farewell.leave)
    monkeypatch.setattr(sys, "last_value", ValueError("a bug"), raising=False)
    farewell.leave()
    assert aborts.codes == [1]


def test_sums_in_rank_order_unless_there_are_many_ranks() -> None:
    assert sums_in_rank_order(ORDERED_RANKS, None)[0]
    assert not sums_in_rank_order(ORDERED_RANKS + 1, None)[0]
    assert sums_in_rank_order(1000, False)[0]
    assert not sums_in_rank_order(2, True)[0]


@pytest.mark.parametrize(
    ("dtype", "op", "expected"),
    [
        ("float32", ReduceOp.SUM, True),
        ("float64", ReduceOp.AVERAGE, True),
        ("int64", ReduceOp.MIN, True),
        ("float32", ReduceOp.MAX, False),
        ("float16", ReduceOp.SUM, False),
        ("bfloat16", ReduceOp.PRODUCT, False),
        ("uint8", ReduceOp.SUM, False),
        ("bool", ReduceOp.SUM, False),
    ],
)
def test_what_mpi_computes_as_we_do(dtype: str, op: ReduceOp, expected: bool) -> None:
    assert can_reduce_by_mpi(Reduction(dtype_named(dtype), op, 4))[0] is expected
