"""The optimizer's state machine: event in, instructions out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.api.gradients.bucket_plan import ParameterSpec, plan_buckets
from reigen.api.gradients.tracker import FinishAction, GradientAction, GradientTracker
from reigen.errors import ArgumentError, StepOrderError

LATER, COLLECT = GradientAction(False), GradientAction(True)


def tracker(passes: int = 1) -> GradientTracker:
    """Parameters 3 and 2 in bucket 0, 1 and 0 in bucket 1; no gradient has come."""
    machine = GradientTracker(4, passes)
    machine.adopt(plan_buckets([ParameterSpec(16, 4, "float32")] * 4, [3, 2, 1, 0], 512))
    return machine


def submit(bucket: int) -> GradientAction:
    return GradientAction(True, (bucket,))


def test_the_last_gradient_of_a_bucket_submits_it():
    machine = tracker()
    assert [machine.gradient(p) for p in (3, 2, 1, 0)] == [COLLECT, submit(0), COLLECT, submit(1)]
    assert machine.finish() == FinishAction((), ())


def test_a_bucket_is_submitted_by_whichever_gradient_is_last():
    machine = tracker()
    assert [machine.gradient(p) for p in (2, 0, 1, 3)] == [COLLECT, COLLECT, submit(1), submit(0)]


def test_a_group_is_submitted_at_once_when_its_last_gradient_has_come():
    specs = [ParameterSpec(16, 4, dtype) for dtype in ("float32", "float64", "float32", "float32")]
    machine = GradientTracker(4)
    machine.adopt(plan_buckets(specs, [3, 2, 1, 0], 64, groups=[[0, 1, 3]]))
    assert [machine.gradient(p) for p in (1, 2, 3, 0)] == [COLLECT, submit(2), COLLECT, GradientAction(True, (0, 1))]
    machine.failed([1])
    assert machine.finish() == FinishAction((), (1,))


def test_finish_names_what_did_not_come():
    machine = tracker()
    machine.gradient(2)
    machine.gradient(1)
    machine.gradient(0)
    assert machine.finish() == FinishAction(missing=(3,), submit=(0,))


def test_finish_without_any_gradient_contributes_everything():
    assert tracker().finish() == FinishAction(missing=(3, 2, 1, 0), submit=(0, 1))


def test_a_bucket_that_could_not_be_submitted_is_named_again():
    machine = tracker()
    machine.gradient(3)
    machine.gradient(2)
    machine.failed([0])
    assert machine.finish().submit == (0, 1)


def test_the_first_pass_only_records_the_order():
    machine = GradientTracker(3)
    assert [machine.gradient(p) for p in (1, 2, 0)] == [LATER] * 3
    assert machine.order == [1, 2, 0]
    with pytest.raises(StepOrderError):
        machine.finish()
    machine.adopt(plan_buckets([ParameterSpec(8, 4, "float32")] * 3, machine.order, 1024))
    assert machine.finish() == FinishAction(missing=(1, 2, 0), submit=(0,))


def test_an_abandoned_plan_is_for_one_pass():
    machine = tracker()
    assert [machine.gradient(p) for p in (3, 2)] == [COLLECT, submit(0)]
    machine.finish()
    machine.reset()
    machine.abandon()
    machine.validate()
    assert [machine.gradient(p) for p in (3, 2, 1, 0)] == [LATER] * 4
    with pytest.raises(StepOrderError):
        machine.finish()
    machine.adopt(plan_buckets([ParameterSpec(16, 4, "float32")] * 4, [0, 1, 2, 3], 64))
    assert machine.finish() == FinishAction((0, 1, 2, 3), (0, 1, 2, 3))


def test_parameters_outside_the_plan_are_counted_and_otherwise_left_alone():
    machine = GradientTracker(2)
    machine.adopt(plan_buckets([ParameterSpec(8, 4, "float32")] * 2, [1], 1024))
    assert machine.gradient(0) == LATER
    assert machine.outstanding
    assert machine.finish() == FinishAction(missing=(1,), submit=(0,))


def test_gradients_accumulate_for_the_declared_number_of_passes():
    machine = tracker(passes=3)
    for _ in range(2):
        assert [machine.gradient(p) for p in (3, 2)] == [LATER, LATER]
    assert not machine.outstanding
    assert [machine.gradient(p) for p in (3, 2)] == [COLLECT, submit(0)]
    assert machine.outstanding


def test_one_gradient_too_many_is_an_error_that_changes_nothing():
    machine = tracker(passes=2)
    machine.gradient(3)
    machine.gradient(3)
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times before call to step"):
        machine.gradient(3)
    machine.validate()
    assert machine.finish() == FinishAction(missing=(2, 1, 0), submit=(0, 1))


def test_after_reset_everything_may_come_again():
    machine = tracker()
    for _ in range(3):
        assert [machine.gradient(p) for p in (3, 2, 1, 0)] == [COLLECT, submit(0), COLLECT, submit(1)]
        machine.reset()
        assert not machine.outstanding
        assert machine.num_arrived == 0


def test_the_number_of_passes_can_change_between_steps_only():
    machine = tracker()
    machine.set_backward_passes_per_step(2)
    assert machine.gradient(3) == LATER
    machine.set_backward_passes_per_step(1)  # an incomplete one is forgotten
    assert machine.gradient(3) == COLLECT
    with pytest.raises(StepOrderError):
        machine.set_backward_passes_per_step(2)


@pytest.mark.parametrize("passes", [0, -1, 1.5, True, None])
def test_the_number_of_passes_must_be_a_positive_integer(passes):
    with pytest.raises(ArgumentError, match="backward_passes_per_step"):
        GradientTracker(1, passes)


@given(
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(16, 400),
    st.lists(st.lists(st.integers(0, 8), max_size=40), min_size=1, max_size=4),
    st.lists(st.integers(-3, 2), min_size=9, max_size=9),
)
def test_whatever_comes_each_bucket_is_submitted_once_a_pass_and_complete(num_parameters, passes, cap, events, group):
    machine = GradientTracker(num_parameters, passes)
    specs = [ParameterSpec(4 * (p + 1), 4, ("float32", "int32")[p % 2]) for p in range(num_parameters)]
    groups = [[p for p in range(num_parameters) if group[p] == g] for g in range(3)]
    plan = plan_buckets(specs, range(num_parameters), cap, groups)
    machine.adopt(plan)
    for arrivals in events:
        collected: list[int] = []
        submitted: list[int] = []
        counts = [0] * num_parameters
        for parameter in (p for p in arrivals if p < num_parameters):
            counts[parameter] += 1
            if counts[parameter] > passes:
                with pytest.raises(StepOrderError):
                    machine.gradient(parameter)
                continue
            arrival = machine.gradient(parameter)
            machine.validate()
            assert arrival.collect == (counts[parameter] == passes)
            if arrival.collect:
                collected.append(parameter)
            for bucket in arrival.submit:
                submitted.append(bucket)
                assert {place.parameter for place in plan.buckets[bucket].places} <= set(collected)
        left = machine.finish()
        assert sorted([*collected, *left.missing]) == list(range(num_parameters))
        assert sorted([*submitted, *left.submit]) == list(range(len(plan.buckets)))
        machine.reset()
        machine.validate()
