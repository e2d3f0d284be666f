"""Costs from times: made-up times whose costs are known."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.costs import KEYS, SIZES, MeasuredTimes, costs_content, derive_costs, fit_costs
from benchmarks.harness.report import Document
from reigen.errors import LaunchError
from reigen.planner.collectives import plan_tcp
from reigen.planner.costs import Costs, read_costs


def test_a_fit_finds_costs_behind_noise() -> None:
    rng = random.Random(5)
    features = [[1.0, float(size)] for size in SIZES for _ in range(20)]
    seconds = [(30e-6 + 2e-10 * size) * rng.uniform(0.95, 1.05) for _, size in features]
    fit = fit_costs(features, seconds)
    assert fit.values == (pytest.approx(30e-6, rel=0.03), pytest.approx(2e-10, rel=0.03))
    assert 0.01 < fit.error < 0.05


def test_no_cost_is_below_0() -> None:
    fit = fit_costs([[1.0, 10.0], [1.0, 20.0], [1.0, 40.0]], [1.0, 2.2, 5.0])  # a line through them begins below 0
    assert fit.values[0] == 0.0
    assert fit.values[1] == pytest.approx(0.11, rel=0.1)


def made_up(costs: Costs, num_ranks: int) -> MeasuredTimes:
    """Times of a machine with these costs."""

    def tcp(size: int) -> float:
        plan = plan_tcp(size // 4, 4, num_ranks, "auto")
        per_byte = costs.tcp_send_seconds_per_byte + costs.tcp_receive_seconds_per_byte
        data = plan.sent * per_byte + plan.reduced * costs.reduce_seconds_per_byte
        return plan.hops * costs.wakeup_seconds + 2 * plan.messages * costs.tcp_message_seconds + data

    def keys(several: Sequence[tuple[int, int]], per_byte: float) -> dict[tuple[int, int], float]:
        return {(n, size): 1e-4 + n * costs.request_seconds + n * size * (1e-9 + per_byte) for n, size in several}

    moved = costs.shm_seconds_per_byte + costs.copy_seconds_per_byte
    return MeasuredTimes(
        registered={size: costs.operation_seconds + 2 * costs.barrier_seconds + size * moved for size in SIZES},
        backend={size: 2 * costs.barrier_seconds + size * moved for size in SIZES[:4]},
        tcp={size: tcp(size) for size in SIZES},
        copies={size: size * costs.copy_seconds_per_byte for size in SIZES[-2:]},
        keys=keys(KEYS, 0.0),
        updated_keys=keys(KEYS, costs.server_update_seconds_per_byte),
        reduce_seconds_per_byte=costs.reduce_seconds_per_byte,
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_costs_come_back_from_their_times(num_ranks: int) -> None:
    truth = Costs(
        operation_seconds=70e-6,
        wakeup_seconds=35e-6,
        barrier_seconds=12e-6,
        tcp_message_seconds=9e-6,
        tcp_send_seconds_per_byte=0.4e-9,
        tcp_receive_seconds_per_byte=0.6e-9,  # in the ratio of the defaults
        request_seconds=80e-6,
        server_request_seconds=80e-6,
        server_update_seconds_per_byte=0.7e-9,
    )
    found, errors = derive_costs(made_up(truth, num_ranks), num_ranks)
    for name, value in found.items():
        assert value == pytest.approx(getattr(truth, name), rel=0.01), name
    assert len(found) == 12
    assert max(errors.values()) < 0.001


def test_what_was_not_measured_keeps_its_default() -> None:
    times = made_up(Costs(), 2)
    nothing = MeasuredTimes({}, {}, times.tcp, {}, {}, {}, 1e-10)
    found, _ = derive_costs(nothing, 2)
    assert {name.partition("_")[0] for name in found} == {"reduce", "wakeup", "tcp"}


def test_the_planner_reads_the_file(tmp_path: Path) -> None:
    found, _ = derive_costs(made_up(Costs(), 2), 2)
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(costs_content(Document("reigen bench costs", 2, 3), found)))
    read = read_costs(file)
    assert read.request_seconds == pytest.approx(Costs().request_seconds)
    assert "cores" in read.source


def test_a_run_in_which_nothing_was_measured_writes_nothing() -> None:
    document = Document("reigen bench costs", 2, 3, skipped=["shared memory is left out: x", "loopback is left out: y"])
    with pytest.raises(LaunchError, match="shared memory"):
        costs_content(document, {"reduce_seconds_per_byte": 1e-10})
