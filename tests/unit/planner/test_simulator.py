"""Predictions against closed forms: what travels over which link, and what a step consists of."""

from __future__ import annotations

import dataclasses

import pytest

from reigen.errors import ArgumentError
from reigen.planner.cluster import make_cluster
from reigen.planner.costs import Costs
from reigen.planner.layout import JobLayout
from reigen.planner.prediction import Strategy
from reigen.planner.simulator import simulate
from tests.unit.planner.jobs import FREE, cluster, profile

#: Elements of float32: 4 MiB, which take 4.194304 s over a link of 1 MB/s.
ELEMENTS, SECONDS = 1 << 20, 4.194304
ONE_BUCKET = Strategy(bucket_bytes=1 << 30, overlaps=False)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_an_allreduce_sends_what_its_algorithm_does(size: int) -> None:
    found = simulate(profile(), cluster(size), ONE_BUCKET, FREE)

    assert found.step_seconds == pytest.approx(1.0 + 2 * (size - 1) / size * SECONDS, rel=1e-3)
    assert found.wire_bytes == pytest.approx(2 * (size - 1) / size * 4 * ELEMENTS)
    assert found.bound == "link"
    assert found.efficiency == pytest.approx(1 / found.step_seconds)
    assert found.samples_per_second == pytest.approx(size * 10 / found.step_seconds)


def test_the_ranks_of_a_host_send_together_what_one_rank_would() -> None:
    one, many = (simulate(profile(), cluster(4, ranks), ONE_BUCKET, FREE) for ranks in (1, 8))

    assert many.step_seconds == pytest.approx(one.step_seconds, rel=1e-3)
    assert many.num_ranks == 32


def test_one_ring_through_all_ranks_loads_a_link_once_per_host() -> None:
    found = simulate(profile(), cluster(4, 8), dataclasses.replace(ONE_BUCKET, kind="ring"), FREE)

    assert found.step_seconds == pytest.approx(1.0 + 2 * 31 / 32 * SECONDS, rel=1e-3)


def test_gpus_take_the_faster_of_a_ring_and_trees() -> None:
    far = {"ranks": 8, "device_bandwidth": 1e15, "latency": 0.001}
    few = simulate(profile(), cluster(4, **far), ONE_BUCKET, FREE)
    many = simulate(profile(), cluster(5000, **far), ONE_BUCKET, FREE)

    assert few.step_seconds == pytest.approx(1.0 + 6 * 0.001 + 2 * 3 / 4 * SECONDS, rel=1e-3)
    # 13 levels of a tree, up and down, besides the way of reports and announcements through the ranks' own tree
    assert 1.0 + 26 * 0.001 + 2 * SECONDS < many.step_seconds < 1.0 + 40 * 0.001 + 2 * SECONDS


def test_what_backward_hides_costs_nothing() -> None:
    # gradients are ready after 0.25 s and 0.5 s: the first travels while the second is computed
    small = profile((50_000, 50_000))
    hidden = simulate(small, cluster(2), Strategy(bucket_bytes=200_000), FREE)
    shown = simulate(small, cluster(2), Strategy(bucket_bytes=200_000, overlaps=False), FREE)

    assert shown.step_seconds == pytest.approx(1.4, rel=1e-3)
    assert hidden.step_seconds == pytest.approx(1.2, rel=1e-3)


def test_hosts_that_are_alike_are_simulated_as_one_exactly() -> None:
    costs = Costs()
    alike = {"ranks": 2, "bandwidth": "1 Gbit/s", "latency": "1 ms"}
    # a little more of a processor makes each host a kind of its own, and nothing else
    apart = [{"name": f"h{index}", "processors": 4 + index * 1e-9, **alike} for index in range(4)]
    together = make_cluster({"hosts": [{"name": "h", "count": 4, "processors": 4, **alike}]})
    for strategy in (Strategy(), Strategy("ring"), Strategy("servers", 4), Strategy("servers", 1)):
        both = [simulate(profile((3 << 20, 1000)), each, strategy, costs) for each in
                (together, make_cluster({"hosts": apart}))]  # fmt: skip
        assert both[0].step_seconds == pytest.approx(both[1].step_seconds, rel=1e-6), strategy.name


def test_one_server_on_a_host_of_its_own_receives_and_sends_everything() -> None:
    servers = make_cluster({"hosts": [
        {"name": "worker", "count": 4, "bandwidth": 1e6, "latency": 0},
        {"name": "server", "ranks": 0, "servers": 2, "count": 2, "bandwidth": 1e6, "latency": 0},
    ]})  # fmt: skip
    job = profile((2 << 20,))
    # 8 MiB: 8 shards, whose pushes and answers overlap, but for the last one
    one = simulate(job, servers, Strategy("servers", 1), FREE)
    two = simulate(job, servers, Strategy("servers", 2), FREE)

    assert one.step_seconds == pytest.approx(0.75 + 4 * 2 * SECONDS * 9 / 8, rel=1e-3)
    assert two.step_seconds == pytest.approx(0.75 + 4 * SECONDS * 5 / 4, rel=1e-3)
    assert one.bound == "link"
    assert "server" in one.reason
    assert one.num_hosts == 5
    assert two.num_hosts == 6


def test_servers_with_different_loads_have_links_of_their_own() -> None:
    # two servers get a key of 2 MB each, which are two shards, two others one of 1 MB
    servers = make_cluster({"hosts": [
        {"name": "worker", "bandwidth": 1e9, "latency": 0},
        {"name": "server", "ranks": 0, "servers": 1, "count": 4, "bandwidth": 1e6, "latency": 0},
    ]})  # fmt: skip
    job = profile((500_000, 500_000, 250_000, 250_000))

    layout = JobLayout.of(servers, (0, 0, 1, 1))
    found = simulate(job, servers, Strategy("servers", 4), FREE)

    assert len(layout.capacities) == 3 * len(layout.kinds) == 9
    # the second shard is pushed while the first one is answered
    assert found.step_seconds == pytest.approx(0.75 + 3.0, rel=1e-3)


def test_workers_that_update_by_themselves_take_the_time_of_the_update() -> None:
    on_servers = simulate(profile(), cluster(2), Strategy("servers", 2), FREE)
    on_workers = simulate(profile(), cluster(2), Strategy("servers", 2, update_on_servers=False), FREE)

    assert on_workers.step_seconds == pytest.approx(on_servers.step_seconds + 0.25)


def test_ranks_of_a_host_that_are_one_worker_push_once() -> None:
    each = simulate(profile(), cluster(4, 8), Strategy("servers", 4), FREE)
    once = simulate(profile(), cluster(4, 8), Strategy("servers", 4, sums_on_host=True), FREE)

    assert each.wire_bytes == pytest.approx(8 * once.wire_bytes)


def test_compression_sends_fewer_bytes() -> None:
    plain = simulate(profile(), cluster(4), ONE_BUCKET, FREE)
    half = simulate(profile(), cluster(4), dataclasses.replace(ONE_BUCKET, compression={"type": "fp16"}), FREE)
    codes = simulate(profile(), cluster(4), dataclasses.replace(ONE_BUCKET, compression={"type": "2bit"}), FREE)
    servers = simulate(profile(), cluster(4), Strategy("servers", 4, compression={"type": "2bit"}), FREE)

    assert half.wire_bytes == pytest.approx(plain.wire_bytes / 2)
    assert codes.wire_bytes == pytest.approx(3 * 4 * ELEMENTS / 16)  # all get the codes of all others
    # codes there, weights back: each host sends 3/4 of its codes, and its shard's weights to 3 others
    assert servers.wire_bytes == pytest.approx(4 * ELEMENTS * 3 / 4 * (1 / 16 + 1), rel=1e-3)


def test_a_straggler_bounds_a_step_and_is_named() -> None:
    slow = dataclasses.replace(cluster(4, bandwidth=1e9), slowdowns=((2, 1.5),))

    for strategy in (Strategy(), Strategy("servers", 4)):
        found = simulate(profile(), slow, strategy, FREE)
        assert found.bound == "straggler"
        assert "rank 2" in found.reason
        assert found.step_seconds > 1.0 + 0.375 - 0.25


def test_a_failed_host_is_left_out() -> None:
    whole, rest = cluster(4), dataclasses.replace(cluster(4), failed=("a-1",))

    assert simulate(profile(), rest, ONE_BUCKET, FREE).step_seconds == pytest.approx(
        simulate(profile(), cluster(3), ONE_BUCKET, FREE).step_seconds
    )
    assert simulate(profile(), rest, ONE_BUCKET, FREE).num_ranks == 3
    assert simulate(profile(), whole, ONE_BUCKET, FREE).num_ranks == 4


def test_a_network_that_cannot_carry_all_links_bounds_a_step() -> None:
    found = simulate(profile(), cluster(4, network={"oversubscription": 4}), ONE_BUCKET, FREE)

    assert found.step_seconds == pytest.approx(1.0 + 4 * 2 * 3 / 4 * SECONDS, rel=1e-3)
    assert found.bound == "oversubscribed network"


def test_racks_share_an_uplink() -> None:
    racks = cluster(8, network={"oversubscription": 8, "hosts_per_rack": 4})
    ring = simulate(profile(), racks, dataclasses.replace(ONE_BUCKET, kind="ring"), FREE)
    direct = simulate(profile((1 << 18,)), racks, ONE_BUCKET, FREE)

    # one of four links leads out of a rack, at an eighth of four links; or each host sends 4/7 of all out
    assert ring.step_seconds == pytest.approx(1.0 + 2 * 2 * 7 / 8 * SECONDS, rel=1e-3)
    assert direct.step_seconds == pytest.approx(1.0 + 2 * 4 * 4 / 7 * 2 * 7 / 8 * SECONDS / 4, rel=1e-3)


def test_stand_in_hosts_share_the_processors_of_their_machine() -> None:
    busy = profile(processors=1)
    shared = dataclasses.replace(cluster(4, bandwidth=1e12), shared_processors=2.0)

    found = simulate(busy, shared, ONE_BUCKET, FREE)

    assert found.step_seconds == pytest.approx(2.0, rel=1e-3)
    assert found.bound == "processors"


def test_an_epoch_costs_what_its_hosts_cost() -> None:
    found = simulate(profile(), cluster(2, price_per_hour=3.6), ONE_BUCKET, FREE)

    assert found.epoch_seconds == pytest.approx(1000 / 20 * found.step_seconds)
    assert found.epoch_cost == pytest.approx(2 * 3.6 / 3600 * found.epoch_seconds)
    assert simulate(profile(), cluster(2), ONE_BUCKET, FREE).epoch_cost is None
    assert simulate(profile(samples_per_epoch=0), cluster(2, price_per_hour=1), ONE_BUCKET, FREE).epoch_cost is None


def test_one_rank_alone_reduces_nothing() -> None:
    found = simulate(profile(), cluster(1), Strategy(), Costs())

    assert found.step_seconds == pytest.approx(1.0, rel=1e-3)
    assert found.bound == "compute"


def test_four_thousand_ranks_are_simulated_as_fast_as_a_few() -> None:
    found = simulate(profile(), cluster(512, 8, bandwidth="25 Gbit/s"), Strategy(), Costs())

    assert found.num_ranks == 4096
    assert len(found.busy) < 20  # resources of two kinds of hosts: that of rank 0, and the others


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (Strategy("servers", 0), "0 servers"),
        (Strategy("ring", 2), "2 servers"),
        (Strategy(algorithm="star"), "no algorithm 'star'"),
        (Strategy(compression={"type": "3bit"}), "3bit"),
    ],
)
def test_strategies_without_sense_are_refused(strategy: Strategy, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        simulate(profile(), cluster(2), strategy, FREE)


def test_servers_that_find_no_place_are_refused() -> None:
    servers = make_cluster({"hosts": [{"name": "w"}, {"name": "s", "ranks": 0, "servers": 2}]})

    with pytest.raises(ArgumentError, match="room for 2"):
        simulate(profile(), servers, Strategy("servers", 3), FREE)
