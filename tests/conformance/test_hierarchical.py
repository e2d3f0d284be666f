"""The backend of several machines passes the conformance suite, however the ranks are spread over machines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from reigen.testing import RankPool, check_backend
from tests.machines import Groups, Machines, over_tcp


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([[0], [1]], marks=pytest.mark.slow),
        [[0, 1], [2]],
        pytest.param([[0, 1], [2, 3]], marks=pytest.mark.slow),
        pytest.param([[0, 2], [1]], marks=pytest.mark.slow),
        pytest.param([[0, 2], [1, 3], [4]], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_between_threads(groups: Groups) -> None:
    machines = Machines(groups)
    check_backend(machines.backend, machines.size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "groups",
    [
        [[5, 6, 7], [0, 2, 4], [1, 3]],
        [[0, 1, 2, 3, 4], [5], [6, 7, 8, 9], [10, 11, 12]],
    ],
    ids=str,
)
def test_between_many_threads(groups: Groups) -> None:
    machines = Machines(groups)
    check_backend(machines.backend, machines.size, trimmed=True)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [[[0, 1], [2]], [[0, 3], [2, 4, 5], [1]]], ids=str)
def test_in_many_chunks(groups: Groups) -> None:
    machines = Machines(groups, chunk_bytes=100_000)
    check_backend(machines.backend, machines.size, trimmed=True)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [[[0, 1], [2]], [[0, 2], [1, 3], [4]]], ids=str)
def test_over_tcp_between_processes(groups: Groups, rank_pool: Callable[[int], RankPool]) -> None:
    size = sum(map(len, groups))
    check_backend(partial(over_tcp, groups=groups), size, pool=rank_pool(size), trimmed=size > 3)


@pytest.mark.slow
def test_over_a_ring_of_tcp(rank_pool: Callable[[int], RankPool]) -> None:
    groups = [[0, 1], [2, 3], [4]]
    check_backend(partial(over_tcp, groups=groups, algorithm="ring"), 5, pool=rank_pool(5), trimmed=True)


@pytest.mark.slow
def test_over_tcp_between_many_processes(rank_pool: Callable[[int], RankPool]) -> None:
    groups = [[0, 1, 2], [3], [4, 5], [6, 7]]
    check_backend(partial(over_tcp, groups=groups), 8, pool=rank_pool(8), trimmed=True)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [[[0, 1], [2]], [[0, 2], [1, 3, 4]]], ids=str)
def test_over_tcp_where_ranks_of_a_machine_read_each_other(
    groups: Groups, rank_pool: Callable[[int], RankPool]
) -> None:
    size = sum(map(len, groups))
    check_backend(partial(over_tcp, groups=groups, direct=True), size, pool=rank_pool(size), trimmed=True)
