"""The arithmetic of benchmarks, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.harness.figures import (
    Overhead,
    joint_durations,
    num_iterations,
    overhead,
    overhead_ratio,
    own_durations,
    ratio,
    summarize,
)


def test_a_joint_operation_lasts_from_the_last_arrival_to_the_last_result() -> None:
    rank0 = [(0.0, 5.0), (10.0, 12.0)]
    rank1 = [(4.0, 5.5), (9.0, 13.0)]
    assert joint_durations([rank0, rank1]) == [1.5, 3.0]


def test_ranks_must_have_done_the_same_number_of_operations() -> None:
    with pytest.raises(ValueError, match="shorter"):
        joint_durations([[(0.0, 1.0)], []])


def test_each_ranks_own_calls_count_one_by_one() -> None:
    assert own_durations([[(0.0, 1.0), (1.0, 3.0)], [(0.5, 1.0)]]) == [1.0, 2.0, 0.5]


def test_the_figure_is_the_median_of_the_rounds_medians() -> None:
    summary = summarize([[1.0, 2.0, 100.0], [4.0], [3.0, 3.0]])
    assert summary.rounds == (2.0, 4.0, 3.0)
    assert summary.median == 3.0
    assert summary.num_operations == 6


def test_spread_is_over_all_operations() -> None:
    summary = summarize([[float(n) for n in range(6)], [float(n) for n in range(6, 11)]])
    assert summary.p10 == pytest.approx(1.0)
    assert summary.p90 == pytest.approx(9.0)


def test_noise_is_how_far_the_rounds_lie_apart() -> None:
    assert summarize([[5.0, 9.0, 1.0]] * 3).noise == 0.0
    assert summarize([[float(n)] for n in range(11)]).noise == pytest.approx(8.0)


def test_a_ratio_knows_its_smallest_and_largest_round() -> None:
    found = ratio(summarize([[6.0], [8.0], [30.0]]), summarize([[3.0], [2.0], [3.0]]))
    assert (found.value, found.low, found.high) == (8.0 / 3.0, 2.0, 10.0)


def test_overhead_is_taken_round_by_round() -> None:
    """The machine is slower in the second round; the difference is not."""
    found = overhead(summarize([[3.0], [13.0], [3.5]]), summarize([[2.0], [12.0], [2.0]]))
    assert found.rounds == (1.0, 1.0, 1.5)
    assert found.median == 1.0


def test_overheads_are_divided_where_theirs_is_clear() -> None:
    value, _ = overhead_ratio(Overhead(2.0, (2.0,), 0.5), Overhead(8.0, (8.0,), 0.5))
    assert value == 0.25


@pytest.mark.parametrize("theirs", [0.004, 0.005, 0.0, -0.1])
def test_no_ratio_is_given_where_theirs_is_within_noise(theirs: float) -> None:
    value, reason = overhead_ratio(Overhead(0.001, (0.001,), 0.005), Overhead(theirs, (theirs,), 0.005))
    assert value is None
    assert reason == f"no ratio: their overhead of {theirs * 1e3:.2f} ms is within the noise of 5.00 ms"


@pytest.mark.parametrize(("each", "expected"), [(0.1, 5), (10.0, 3), (1e-6, 1000), (0.0, 1000), (0.01, 50)])
def test_a_turn_has_as_many_operations_as_fit_within_limits(each: float, expected: int) -> None:
    assert num_iterations(each, 0.5) == expected
