"""The profile of a real job: its gradients, in order, and when they were there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reigen.torch as hvd
from reigen.observe.trace_reader import read_trace
from reigen.planner.trace_profile import profile_from_trace
from reigen.testing import run_ranks

pytestmark = pytest.mark.slow  # processes of its own


def train(file: str) -> list[tuple[str, int]]:
    """A few steps with a timeline; the parameters in order."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 20))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    hvd.start_timeline(file)
    for _ in range(8):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.ones(8, 40)).square().mean())
        optimizer.step()
    hvd.stop_timeline()
    return [(name, parameter.numel()) for name, parameter in model.named_parameters()]


def test_a_real_job_has_a_profile(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    parameters, _ = run_ranks(train, 2, str(file), init=True)
    trace = read_trace(file)
    profile = profile_from_trace(trace, batch=8)
    assert [(tensor.name, tensor.elements) for tensor in profile.tensors] == parameters
    ready = [tensor.ready_seconds for tensor in profile.tensors]
    assert ready[2] <= ready[0]
    assert ready[3] <= ready[1]  # the last layer's come first
    longest = max(end - begin for steps in trace.steps.values() for begin, end in steps) / 1e6
    assert 0 < profile.step_seconds < longest
    assert profile.steps is not None
    assert profile.steps >= 3
