"""Clusters: hosts of a file, failed hosts, parts of a cluster; numbers with units."""

from __future__ import annotations

import pytest

from reigen.errors import ArgumentError
from reigen.planner.cluster import make_cluster
from reigen.planner.units import parse_count, parse_rate, parse_time


def test_hosts_of_one_entry_have_numbers() -> None:
    found = make_cluster({"hosts": [{"name": "a", "count": 2, "ranks": 3, "bandwidth": "8 Gbit/s"}, {"name": "b"}]})

    assert [host.name for host in found.hosts] == ["a-0", "a-1", "b"]
    assert found.num_ranks == 7
    assert found.hosts[0].bandwidth == 1e9


def test_ranks_behind_a_failed_host_are_renumbered() -> None:
    found = make_cluster({
        "hosts": [{"name": "a", "count": 3, "ranks": 2}],
        "failures": [{"host": "a-0"}],
        "stragglers": [{"rank": 1, "slowdown": 3}, {"host": "a-2", "slowdown": 2}],
    })  # fmt: skip

    left = found.without_failed()

    assert [host.name for host in left.hosts] == ["a-1", "a-2"]
    assert left.slowdowns == ((2, 2.0), (3, 2.0))
    assert left.without_failed() is left


def test_a_part_of_a_cluster_has_the_first_ranks_and_all_servers() -> None:
    found = make_cluster({"hosts": [{"name": "a", "count": 3, "ranks": 4}, {"name": "s", "ranks": 0, "servers": 2}]})

    part = found.resized(6)

    assert [(host.name, host.num_ranks) for host in part.hosts] == [("a-0", 4), ("a-1", 2), ("s", 0)]
    with pytest.raises(ArgumentError, match="room for 12"):
        found.resized(13)


@pytest.mark.parametrize(
    ("text", "value"),
    [("25 Gbit/s", 3.125e9), ("100Mbit/s", 1.25e7), ("3 GB/s", 3e9), ("1 GiB/s", 1 << 30), (5, 5.0), ("1e3", 1e3)],
)
def test_rates(text: object, value: float) -> None:
    assert parse_rate(text, "rate") == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("50 us", 5e-5), ("2ms", 2e-3), ("1.5 s", 1.5), (0, 0.0)])
def test_times(text: object, value: float) -> None:
    assert parse_time(text, "time") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "fast", "1 Gbit", "-1 Gbit/s", None, True, float("nan"), float("inf"), [1]])
def test_what_is_no_rate_is_refused_by_name(text: object) -> None:
    with pytest.raises(ArgumentError, match=r"link: .* is not bytes a second"):
        parse_rate(text, "link")


def test_counts_are_whole() -> None:
    assert parse_count(3.0, "count") == 3
    with pytest.raises(ArgumentError, match="no whole number"):
        parse_count(3.5, "count")
