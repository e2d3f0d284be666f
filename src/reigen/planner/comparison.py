"""Comparison of strategies on a cluster, and the answer to "how many servers?"."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reigen.errors import ArgumentError
from reigen.planner.cluster import Cluster
from reigen.planner.costs import Costs
from reigen.planner.prediction import Prediction, Strategy
from reigen.planner.profile import TrainingProfile
from reigen.planner.simulator import simulate
from reigen.planner.units import format_number

#: Throughputs that are closer than this count as one: predictions are not better than that.
SAME_THROUGHPUT = 0.03
#: Up to so many workers every number of servers is tried; from there on powers of two, n and 2 n.
_MOST_SINGLE = 8


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """Strategies to compare.

    Attributes:
        server_counts: numbers of servers; empty for 1 to twice the number of workers.
        compressions: parameters of compression, each for the best way without any.
        sums_on_host, update_on_servers: of parameter servers, see `Strategy`.
    """

    server_counts: tuple[int, ...] = ()
    compressions: tuple[Mapping[str, object], ...] = ({"type": "fp16"},)
    sums_on_host: bool = False
    update_on_servers: bool = True


@dataclass(frozen=True, slots=True)
class Comparison:
    """Predictions of one job on one cluster.

    Attributes:
        predictions: in the order of strategies: allreduce, ring, servers, and those with compression.
        best: the fastest of them.
        cheapest: of an epoch; None where costs are not known.
        num_servers: how many servers to take, if servers it must be; 0: there is no place for any.
        servers_reason: why so many.
    """

    predictions: tuple[Prediction, ...]
    best: Prediction
    cheapest: Prediction | None
    num_servers: int
    servers_reason: str


def compare(
    profile: TrainingProfile, cluster: Cluster, costs: Costs, options: ComparisonOptions | None = None
) -> Comparison:
    """Predict all strategies.

    Raises:
        ArgumentError: the cluster cannot hold the job.
    """
    options = options or ComparisonOptions()
    alive = cluster.without_failed()
    strategies = [Strategy()]
    if alive.num_ranks > 1:
        strategies.append(Strategy("ring"))
    counts = options.server_counts or server_counts(alive, sums_on_host=options.sums_on_host)
    base = Strategy("servers", 1, sums_on_host=options.sums_on_host, update_on_servers=options.update_on_servers)
    strategies += [_changed(base, num_servers=count) for count in counts]
    found = [simulate(profile, cluster, strategy, costs) for strategy in strategies]
    servers = [each for each in found if each.strategy.num_servers]
    number, reason = choose_num_servers(servers)
    if alive.num_ranks > 1:
        coded = [Strategy(), *(each.strategy for each in servers if each.strategy.num_servers == number)]
        for params, strategy in itertools.product(options.compressions, coded):
            found.append(simulate(profile, cluster, _changed(strategy, compression=dict(params)), costs))
    best = max(found, key=lambda each: each.samples_per_second)
    priced = [(each.epoch_cost, index) for index, each in enumerate(found) if each.epoch_cost is not None]
    cheapest = found[min(priced)[1]] if len(priced) == len(found) else None
    return Comparison(tuple(found), best, cheapest, number, reason)


def _changed(strategy: Strategy, **changes: object) -> Strategy:
    return replace(strategy, **changes)  # type: ignore[arg-type]


def server_counts(cluster: Cluster, *, sums_on_host: bool = False) -> tuple[int, ...]:
    """Return numbers of servers that are worth a look: 1 to twice the number of workers, as far as there are places."""
    workers = sum(1 for host in cluster.hosts if host.num_ranks) if sums_on_host else cluster.num_ranks
    places = cluster.num_server_places
    most = min(2 * workers, places) if places else 2 * workers
    if workers <= _MOST_SINGLE:
        return tuple(range(1, most + 1))
    powers = itertools.takewhile(lambda count: count <= most, (1 << power for power in itertools.count()))
    return tuple(sorted({*powers, *(count for count in (workers, most) if count <= most)}))


def choose_num_servers(predictions: Sequence[Prediction]) -> tuple[int, str]:
    """Return how many servers to take, and the reason.

    The fewest whose throughput is the best but for `SAME_THROUGHPUT`: more servers bring more messages, more memory and
    more that can fail.

    Args:
        predictions: of parameter servers that differ in their number alone, in ascending order.
    """
    if not predictions:
        return 0, "there is no place for servers"
    best = max(each.samples_per_second for each in predictions)
    chosen = next(each for each in predictions if each.samples_per_second >= best * (1 - SAME_THROUGHPUT))
    number = chosen.strategy.num_servers
    fewer = [each for each in predictions if each.strategy.num_servers < number]
    more = [each for each in predictions if each.strategy.num_servers > number]
    throughput = format_number(chosen.samples_per_second)
    parts = [f"{_servers(number)}: {throughput} samples/s, bound by {chosen.bound} ({chosen.reason})"]
    if fewer:
        last = fewer[-1]
        parts.append(
            f"with {_servers(last.strategy.num_servers)} it is {format_number(last.samples_per_second)}, bound by "
            f"{last.bound} ({last.reason})"
        )
    if more:
        last = max(more, key=lambda each: each.samples_per_second)
        change = last.samples_per_second / chosen.samples_per_second - 1
        verb = "would gain" if change > 0 else "would lose"
        parts.append(f"more, up to {more[-1].strategy.num_servers}, {verb} {abs(change):.1%} at best")
    return number, "; ".join(parts)


def _servers(number: int) -> str:
    return f"{number} server" + ("s" if number > 1 else "")


def check_can_hold(cluster: Cluster, num_ranks: Sequence[int]) -> None:
    """Check that jobs of so many ranks fit a cluster.

    Raises:
        ArgumentError: one does not.
    """
    for count in num_ranks:
        if not 0 < count <= cluster.num_ranks:
            raise ArgumentError(
                f"the cluster cannot hold a job of {count} ranks: its hosts have room for {cluster.num_ranks}; raise "
                "'count' or 'ranks' of its hosts"
            )
