"""Which of Dask's workers have how many ranks."""

from __future__ import annotations

from typing import Any

import pytest

from reigen.dask.call import WorkerSlots, find_workers, host_of, place_ranks, run
from reigen.errors import ConfigError

KNOWN: dict[str, dict[str, Any]] = {
    "tcp://10.0.0.2:40": {"name": "b", "nthreads": 2, "resources": {}},
    "tcp://10.0.0.1:41": {"name": 0, "nthreads": 1, "resources": {"reigen": 4.0}},
}


def test_all_workers_in_the_order_of_addresses() -> None:
    assert find_workers(KNOWN, None) == [
        WorkerSlots("tcp://10.0.0.1:41", 4, has_resource=True),
        WorkerSlots("tcp://10.0.0.2:40", 2),
    ]


def test_workers_by_name_and_by_address_in_the_users_order() -> None:
    found = find_workers(KNOWN, ["tcp://10.0.0.2:40", "0", "b"])
    assert [worker.address for worker in found] == ["tcp://10.0.0.2:40", "tcp://10.0.0.1:41"]


def test_workers_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match=r"no worker c, d; it has tcp://10.0.0.1:41, tcp://10.0.0.2:40"):
        find_workers(KNOWN, ["b", "c", "d"])
    with pytest.raises(ConfigError, match=r"no workers now: .*wait_for_workers"):
        find_workers({}, None)


def test_ranks_are_spread_evenly_and_within_threads() -> None:
    workers = [WorkerSlots("a", 1), WorkerSlots("b", 3), WorkerSlots("c", 2)]
    assert place_ranks(workers, None) == {"a": 1, "b": 1, "c": 1}
    assert place_ranks(workers, 2) == {"a": 1, "b": 1}
    assert place_ranks(workers, 6) == {"a": 1, "b": 3, "c": 2}


@pytest.mark.parametrize("num_proc", [0, -1, 1.0, True, "2"])
def test_a_number_of_ranks_that_is_none(num_proc: Any) -> None:
    with pytest.raises(ConfigError, match="num_proc must be a number of ranks"):
        place_ranks([WorkerSlots("a", 2)], num_proc)


def test_more_ranks_than_threads() -> None:
    with pytest.raises(ConfigError, match="num_proc is 4; Dask's 2 workers have 3 threads"):
        place_ranks([WorkerSlots("a", 1), WorkerSlots("b", 2)], 4)


def test_the_host_of_an_address() -> None:
    assert host_of("tcp://10.0.0.1:41") == "10.0.0.1"
    assert host_of("tls://[fd77::1]:41") == "fd77::1"
    assert host_of("inproc://10.0.0.1/1/2") == "127.0.0.1"


def test_a_function_where_the_client_belongs() -> None:
    with pytest.raises(ConfigError, match=r"the first argument is not a distributed\.Client: <built-in function len>"):
        run(len, 0.1, num_proc=2)  # type: ignore[arg-type]
