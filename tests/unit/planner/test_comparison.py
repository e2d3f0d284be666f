"""How many servers: which numbers are tried, which one is taken, and the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reigen.planner.cluster import make_cluster
from reigen.planner.comparison import ComparisonOptions, choose_num_servers, compare, server_counts
from reigen.planner.prediction import Prediction, Strategy
from reigen.planner.simulator import simulate
from tests.unit.planner.jobs import FREE, cluster, profile


def predictions(**throughputs: float) -> list[Prediction]:
    """Predictions for ``s1=...``, ``s2=...`` samples a second."""
    one = simulate(profile(), cluster(2), Strategy("servers", 1), FREE)
    return [
        replace(one, strategy=Strategy("servers", int(name[1:])), samples_per_second=rate, bound=f"bound {name}")
        for name, rate in throughputs.items()
    ]


@pytest.mark.parametrize(
    ("throughputs", "number", "words"),
    [
        ({"s1": 100.0, "s2": 101.0, "s4": 102.0}, 1, ("1 server: 100 samples/s", "up to 4, would gain 2.0%")),
        ({"s1": 50.0, "s2": 100.0, "s4": 102.0}, 2, ("bound by bound s2", "with 1 server it is 50, bound by bound s1")),
        ({"s1": 50.0, "s2": 60.0, "s4": 90.0}, 4, ("4 servers: 90", "with 2 servers it is 60")),
        ({"s1": 100.0, "s2": 80.0}, 1, ("would lose 20.0%",)),
    ],
)
def test_the_fewest_servers_that_are_nearly_the_best(
    throughputs: dict[str, float], number: int, words: tuple[str, ...]
) -> None:
    found, reason = choose_num_servers(predictions(**throughputs))

    assert found == number
    for each in words:
        assert each in reason


def test_numbers_of_servers_go_up_to_twice_the_workers() -> None:
    assert server_counts(cluster(3)) == (1, 2, 3, 4, 5, 6)
    assert server_counts(cluster(6, 2)) == (1, 2, 4, 8, 12, 16, 24)
    assert server_counts(cluster(6, 2), sums_on_host=True) == tuple(range(1, 13))


def test_numbers_of_servers_end_where_there_is_no_place() -> None:
    hosts = [{"name": "w", "count": 4}, {"name": "s", "ranks": 0, "servers": 3}]

    assert server_counts(make_cluster({"hosts": hosts})) == (1, 2, 3)


def test_a_comparison_has_every_strategy() -> None:
    options = ComparisonOptions(compressions=({"type": "fp16"}, {"type": "2bit"}))

    found = compare(profile(), cluster(2, price_per_hour=1), FREE, options)

    names = [each.strategy.name for each in found.predictions]
    servers = f"{found.num_servers} server" + ("s" if found.num_servers > 1 else "")
    assert names[:6] == ["allreduce", "ring", "1 server", "2 servers", "3 servers", "4 servers"]
    assert names[6:] == ["allreduce + fp16", f"{servers} + fp16", "allreduce + 2bit", f"{servers} + 2bit"]
    assert found.best.samples_per_second == max(each.samples_per_second for each in found.predictions)
    assert found.cheapest is found.best


def test_one_rank_needs_no_strategy() -> None:
    found = compare(profile(), cluster(1), FREE)

    assert [each.strategy.name for each in found.predictions] == ["allreduce", "1 server", "2 servers"]
    assert found.num_servers == 1
