"""Control messages of rank 0: counted, and named where they bound a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reigen.planner.control import ControlPlan
from reigen.planner.layout import JobLayout
from reigen.planner.prediction import Strategy
from reigen.planner.simulator import simulate
from tests.unit.planner.jobs import FREE, cluster, profile


def test_ranks_of_one_host_send_rank_0_no_messages() -> None:
    plan = ControlPlan.of(JobLayout.of(cluster(1, 8)))

    assert (plan.children, plan.messages(7)) == (0, 0)
    assert plan.seconds(1.0, replace(FREE, barrier_seconds=0.5)) == 0.5


def test_small_jobs_have_a_star_and_large_ones_a_tree_by_hosts() -> None:
    assert ControlPlan.of(JobLayout.of(cluster(31, 2))) == ControlPlan(62, 61)
    # rank 0 has the 15 other ranks of its host, and 16 hosts, of which the 15th to 19th are one further down
    assert ControlPlan.of(JobLayout.of(cluster(20, 16))) == ControlPlan(320, 31, 2, 18)


def test_a_report_of_all_is_a_message_of_each_connection() -> None:
    plan = ControlPlan(size=64, children=21, depth=2, relay_children=10)

    assert plan.messages(63) == 21
    assert plan.seconds(0.25, replace(FREE, control_message_seconds=0.01)) == 3 * 0.25 + 2 * 10 * 0.01


def test_rank_0_bounds_a_step_where_its_messages_take_longest() -> None:
    costs = replace(FREE, control_message_seconds=0.001)
    job, hosts = profile((1000,) * 4), cluster(31, 2, bandwidth=1e12)
    strategy = Strategy(bucket_bytes=4000, fusion_bytes=0, overlaps=False)

    found = simulate(job, hosts, strategy, costs)

    # all four buckets are ready at once: one message from every other rank, and one to it
    assert found.bound == "coordinator"
    assert found.step_seconds == pytest.approx(1.0 + 2 * 61 * 0.001, rel=1e-3)
    assert found.busy["rank 0's negotiation"] * found.step_seconds == pytest.approx(2 * 61 * 0.001)
