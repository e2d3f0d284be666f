"""A rank is lost in a step with shared parameters: the others learn which one it was, and what the weights are.

It is killed, stopped, or fails alone while the others wait for it.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.patience import patiently

torch = pytest.importorskip("torch")

import reigen.torch as hvd  # noqa: E402
from reigen.backends.shm.backend import ShmBackend  # noqa: E402
from reigen.errors import CollectiveError  # noqa: E402
from reigen.testing import RankError, RankPool, run_ranks  # noqa: E402
from reigen.torch.shared_parameters import optimizer as sharing_optimizer  # noqa: E402
from reigen.torch.shared_parameters.parameters import SharedParameters  # noqa: E402

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
        ShmBackend.reduce_to_owners = die  # type: ignore[method-assign]
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


Told = tuple[str, tuple[int, ...], str, bool | None, list[Any]]


def told_of(error: BaseException, optimizer: Any, model: Any) -> Told:
    ranks = error.ranks if isinstance(error, CollectiveError) else ()
    now = [p.detach().numpy().copy() for p in model.parameters()]
    words = " ".join([str(error), *getattr(error, "__notes__", ())])
    return type(error).__name__, ranks, words, optimizer.weights_are_whole, now


def train(when: str) -> Told:
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
            return told_of(error, optimizer, model)
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


def stop_before(act: Any) -> Any:
    @functools.wraps(act)
    def done(*args: Any) -> Any:
        # sent to this thread: one sent to the process may be taken later, by another thread, while this one goes on
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return act(*args)

    return done


def stopping(when: str) -> AbstractContextManager[Any]:
    """In it the victim stops at this point of a step, until it is continued."""
    if when == "sum":
        return patch.object(ShmBackend, "reduce_to_owners", stop_before(ShmBackend.reduce_to_owners))
    if when == "between":
        return patch.object(SharedParameters, "begin", stop_before(SharedParameters.begin))
    return patch.object(sharing_optimizer, "inner_step", stop_before(sharing_optimizer.inner_step))


def train_while_one_stops(when: str, victim: int, folder: Path) -> Told:
    """Five steps; in the fourth the victim stops. The others let it go on when both have their errors.

    If that was in its update, it may find its fourth step done: rank 0 reads what the others had said before. The next
    one fails.
    """
    model = model_of(0)
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), share_parameters=True)
    generator = torch.Generator().manual_seed(hvd.rank())
    numbers = hvd.allgather_object(os.getpid())
    for number in range(5):
        try:
            with stopping(when) if number == 3 and hvd.rank() == victim else nullcontext():
                optimizer.zero_grad()
                model(torch.randn(8, 300, generator=generator)).square().mean().backward()
                optimizer.step()
        except CollectiveError as error:
            told = told_of(error, optimizer, model)
            if hvd.rank() != victim:
                # the first one must not let it end the update before the second has looked how far it is
                (folder / str(hvd.rank())).touch()
                if len(list(folder.iterdir())) == 2:
                    os.kill(numbers[victim], signal.SIGCONT)
            return told
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("when", ["sum", "between", "update"])
def test_a_stopped_rank_is_named_at_the_deadline_and_gets_an_error_itself(
    when: str, victim: int, tmp_path: Path, rank_pool: Callable[[int], RankPool]
) -> None:
    def attempt(seconds: float) -> None:
        env = {"REIGEN_DEADLINE": f"{seconds:g}"}
        folder = tmp_path / f"{seconds:g}"
        folder.mkdir()
        results = rank_pool(3).run(train_while_one_stops, when, victim, folder, init=True, env=env)
        kind, _, told, is_whole, weights = results.pop(victim)
        assert kind in ("CollectiveError", "DeadlineError", "PeerLostError")
        if when == "sum":  # which it can do alone, once it goes on; the others have said that the weights are whole
            assert is_whole
            assert "the weights are whole: those after update 3" in told
            assert is_after(3, weights)
        for kind, ranks, told, is_whole, weights in results:
            assert (kind, ranks) == ("DeadlineError", (victim,)), told
            assert is_whole is (when == "sum"), told
            if when == "sum":
                assert "the weights are whole: those after update 3" in told
                assert is_after(3, weights)
            else:
                assert "THE WEIGHTS ARE NOT CONSISTENT: of update 4, 2 of 3 slices are done" in told

    patiently(attempt, 1.0)


def raise_in_the_middle(inner: Any) -> None:
    with torch.no_grad():
        inner.param_groups[0]["params"][0].view(-1)[:10] += 1
    raise ZeroDivisionError("a bug in the optimizer")


def fail_alone(how: str, model: Any, optimizer: Any) -> AbstractContextManager[Any]:
    """The victim does something that only it does, before the forward pass of a step or in that."""
    if how == "raises in its update":
        return patch.object(sharing_optimizer, "inner_step", raise_in_the_middle)
    if how == "loads another model's state":
        state = optimizer.state_dict()
        for name in ("exp_avg", "exp_avg_sq"):
            state["state"][0][name] = torch.zeros(7)
        optimizer.load_state_dict(state)
    else:
        model.double()
    return nullcontext()


def train_until_one_fails(how: str) -> Told:
    """Four steps; before the last one the victim does something. Nobody may wait for the deadline of ten minutes."""
    model = model_of(0)
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), share_parameters=True)
    generator = torch.Generator().manual_seed(hvd.rank())
    for number in range(4):
        is_victims = number == 3 and hvd.rank() == VICTIM
        try:
            with fail_alone(how, model, optimizer) if is_victims else nullcontext():
                optimizer.zero_grad()
                inputs = torch.randn(8, 300, generator=generator)
                model(inputs.to(model[0].weight.dtype)).square().mean().backward()
                optimizer.step()
        except Exception as error:  # noqa: BLE001  each rank has another one
            told = told_of(error, optimizer, model)
            with pytest.raises(CollectiveError):  # the job is over for all of them
                hvd.barrier()
            return told
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("raises in its update", "ZeroDivisionError", "a bug in the optimizer"),
        ("loads another model's state", "ArgumentError", "it belongs to another model"),
        ("moves its module", "StepOrderError", "0.weight no longer lies in the memory"),
    ],
)
def test_who_fails_alone_is_named_at_once(
    how: str, kind: str, words: str, rank_pool: Callable[[int], RankPool]
) -> None:
    results = rank_pool(3).run(train_until_one_fails, how, init=True)
    own_kind, _, told, *_ = results.pop(VICTIM)
    assert own_kind == kind
    assert words in told
    for other_kind, ranks, told, is_whole, weights in results:
        assert (other_kind, ranks) == ("CollectiveError", (VICTIM,)), told
        assert f"rank {VICTIM} was interrupted: {kind}" in told
        assert words in told
        if how == "moves its module":
            assert is_whole
            assert "the weights are whole: those after update 3" in told
            assert is_after(3, weights)
        else:
            assert not is_whole
            assert "THE WEIGHTS ARE NOT CONSISTENT: of update 4, 2 of 3 slices are done" in told
