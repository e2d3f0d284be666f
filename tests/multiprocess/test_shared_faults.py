"""A rank is killed in a step with shared parameters: the others learn whose death it was, and what the weights are."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import reigen.torch as hvd  # noqa: E402
from reigen.errors import CollectiveError  # noqa: E402
from reigen.planes.shm import ShmPlane  # noqa: E402
from reigen.testing import RankError, run_ranks  # noqa: E402
from reigen.torch import sharing_optimizer  # noqa: E402
from reigen.torch.shared_parameters import SharedParameters  # noqa: E402

pytestmark = pytest.mark.slow  # many real processes

VICTIM = 1


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(act: Any) -> Any:
    @functools.wraps(act)
    def done(*args: Any) -> None:
        act(*args)
        die()

    return done


def half_a_step(inner: Any) -> None:
    with torch.no_grad():
        pieces = inner.param_groups[0]["params"]
        pieces[0].view(-1)[: pieces[0].numel() // 2] += 1
    die()


def prepare(when: str) -> None:
    """From now on the victim dies at this point of a step."""
    if when == "before it comes":
        die()
    elif when == "sum":
        ShmPlane.reduce_to_owners = die  # type: ignore[method-assign]
    elif when == "between":
        SharedParameters.begin = die  # type: ignore[method-assign]
    elif when == "update":
        sharing_optimizer.inner_step = half_a_step
    elif when == "after":
        SharedParameters.end = die_after(SharedParameters.end)  # type: ignore[method-assign]


def model_of(seed: int) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Tanh(), torch.nn.Linear(200, 100))


def train(when: str) -> tuple[str, tuple[int, ...], str, bool | None, list[Any]]:
    """Four steps; in the last one the victim dies."""
    model = model_of(0)
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), share_parameters=True)
    generator = torch.Generator().manual_seed(hvd.rank())
    for number in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 300, generator=generator)).square().mean().backward()
        if number == 3 and hvd.rank() == VICTIM:
            prepare(when)
        if number < 3:
            optimizer.step()
            continue
        try:
            optimizer.step()
        except CollectiveError as error:
            told = " ".join(error.__notes__)
            now = [p.detach().numpy().copy() for p in model.parameters()]
            return type(error).__name__, error.ranks, told, optimizer.weights_are_whole, now
    raise AssertionError("nothing was raised")


def steps(count: int) -> list[Any]:
    """The weights after so many steps of three ranks, in one process and float64."""
    model = model_of(0).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generators = [torch.Generator().manual_seed(rank) for rank in range(3)]
    for _ in range(count):
        optimizer.zero_grad()
        for generator in generators:
            (model(torch.randn(8, 300, generator=generator).double()).square().mean() / 3).backward()
        optimizer.step()
    return [p.detach().numpy() for p in model.parameters()]


def is_after(count: int, weights: list[Any]) -> bool:
    return all(np.allclose(one, other, atol=1e-4) for one, other in zip(weights, steps(count), strict=True))


@pytest.mark.parametrize(
    ("when", "update"), [("before it comes", 3), ("sum", 3), ("between", None), ("update", None), ("after", 4)]
)
def test_a_killed_rank_is_named_and_the_weights_are_told_of(when: str, update: int | None) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(train, 3, when, init=True)
    assert [(f.rank, f.kind) for f in caught.value.failures] == [(VICTIM, "died")], str(caught.value)
    assert len(caught.value.results) == 2
    for kind, ranks, told, is_whole, weights in caught.value.results.values():
        assert (kind, ranks) == ("PeerLostError", (VICTIM,)), told
        assert is_whole is (update is not None), told
        if update is not None:
            assert f"the weights are whole: those after update {update}" in told
            assert is_after(update, weights)
        else:
            assert "THE WEIGHTS ARE NOT CONSISTENT: of update 4, 2 of 3 slices are done" in told
            assert "last checkpoint" in told
            assert not is_after(3, weights)
            assert not is_after(4, weights)
