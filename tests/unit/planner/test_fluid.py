"""Activities that share resources: closed forms of max-min fairness."""

from __future__ import annotations

import pytest

from reigen.planner.fluid import FluidSimulator


def ends(simulator: FluidSimulator, activities: dict[str, tuple[float, dict[str, float]]]) -> dict[str, float]:
    """When each of some activities ends, which all begin now."""
    found: dict[str, float] = {}
    for name, (seconds, load) in activities.items():
        simulator.start(seconds, load, lambda name=name: found.setdefault(name, simulator.now))  # type: ignore[misc]
    simulator.run()
    return found


def test_an_activity_alone_takes_the_longest_of_its_times() -> None:
    found = ends(FluidSimulator({"link": 100.0}), {"short": (0.5, {"link": 20.0}), "nothing": (0.0, {})})

    assert found == pytest.approx({"short": 0.5, "nothing": 0.0})


def test_flows_share_a_link_until_one_of_them_ends() -> None:
    found = ends(FluidSimulator({"link": 100.0}), {"small": (0.0, {"link": 50.0}), "large": (0.0, {"link": 150.0})})

    assert found == pytest.approx({"small": 1.0, "large": 2.0})


def test_a_flow_that_one_link_slows_down_leaves_the_rest_of_another_to_others() -> None:
    # a and b share x (rates 50, 50); b and c share y, of which b takes 50 only
    simulator = FluidSimulator({"x": 100.0, "y": 200.0})
    loads = {"a": {"x": 100.0}, "b": {"x": 100.0, "y": 100.0}, "c": {"y": 300.0}}

    found = ends(simulator, {name: (0.0, load) for name, load in loads.items()})

    assert found == pytest.approx({"a": 2.0, "b": 2.0, "c": 2.0})
    assert simulator.busy == pytest.approx({"x": 2.0, "y": 2.0})


def test_four_threads_on_two_processors_run_at_half_speed() -> None:
    found = ends(FluidSimulator({"cpu": 2.0}), {name: (1.0, {"cpu": 1.0}) for name in "abcd"})

    assert found == pytest.approx(dict.fromkeys("abcd", 2.0))


def test_ends_start_other_activities() -> None:
    simulator = FluidSimulator({"link": 1.0})
    log: list[tuple[str, float]] = []

    def first() -> None:
        log.append(("first", simulator.now))
        simulator.start(0.0, {"link": 2.0}, lambda: log.append(("second", simulator.now)), "track", "second")

    simulator.start(1.0, {}, first)
    simulator.run()

    assert log == [("first", 1.0), ("second", 3.0)]
    assert [(span.name, span.begin, span.end) for span in simulator.spans] == [("second", 1.0, 3.0)]
