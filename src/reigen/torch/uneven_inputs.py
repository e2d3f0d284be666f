"""Training loops in which some ranks have more batches than others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from reigen import context as contexts
from reigen.context import Context
from reigen.errors import ArgumentError, StepOrderError
from reigen.torch.optimizers.allreduce_optimizer import AllreduceOptimizer
from reigen.torch.optimizers.gradient_sync import GradientSynchronizer
from reigen.torch.shared_parameters.optimizer import SharedParametersOptimizer
from reigen.torch.state import broadcast_optimizer_state, broadcast_parameters
from reigen.types import DTYPES, ReduceOp


@contextmanager
def uneven_data(optimizer: Any, model: torch.nn.Module | None = None) -> Iterator[None]:
    """Within it every rank may take as many steps as it has data for. All ranks enter it, and all leave it together.

    Gradients are averaged over the ranks that still have data: the average divides by their number, not by the size of
    the job. A rank that comes to the end waits there for the others, and takes part in their reductions with nothing.
    When the last one has come, those that stopped early get its parameters and optimizer state, so that all ranks hold
    the same again, bit for bit.

    Within the loop ``step()``, ``synchronize()``, SyncBatchNorm and allreduces work (of metrics, for example;
    :func:`allreduce` divides by the size of the job). Other collectives, and sparse gradients without
    ``sparse_as_dense``, raise JoinedError as soon as some rank has no more data. Gradients that no ``step()`` has used
    when the loop ends, because fewer came than ``backward_passes_per_step``, are dropped; to use them, call ``step()``.

    An exception leaves the loop without waiting for anybody: let it end the process, and the others learn of it.

    Args:
        optimizer: a ``DistributedOptimizer`` of all ranks, or a list of them.
        model: its ``state_dict()`` is given to those that stopped early, with buffers such as running averages; without
            it the optimizer's parameters are.

    Raises:
        ArgumentError: the optimizer is something else, works in a process set, or is LBFGS; such a loop runs already.
        StepOrderError: complete gradients wait for a ``step()`` at the beginning or at the end.
        JoinedError, PeerLostError: see above.

    Example:
        Epochs of different length::

            for epoch in range(epochs):
                with hvd.uneven_data(optimizer, model):
                    for images, labels in my_batches:
                        optimizer.zero_grad()
                        loss_of(model(images), labels).backward()
                        optimizer.step()
    """
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    reducers = [_gradient_sync_of(each) for each in optimizers]
    job = contexts.current()
    if job.counts_active:
        raise ArgumentError("uneven_data() is running already; give it all optimizers of the loop as a list")
    _check_nothing_waits(reducers, "uneven_data() was entered")
    before = [reducer.num_passes for reducer in reducers]
    job.counts_active = True
    try:
        yield
        _check_nothing_waits(reducers, "the loop in uneven_data() ended")
        for each in optimizers:
            each.zero_grad()
        last = job.join(blocking=True).wait().value
    finally:
        job.counts_active = False
    counts = [reducer.num_passes - start for reducer, start in zip(reducers, before, strict=True)]
    if _step_counts_differ(job, counts):
        _broadcast_state(optimizers, model, last)


def _gradient_sync_of(optimizer: object) -> GradientSynchronizer:
    if not isinstance(optimizer, AllreduceOptimizer):
        raise ArgumentError(
            f"uneven_data() needs a DistributedOptimizer (not with op=Adasum), got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, SharedParametersOptimizer):
        raise ArgumentError("uneven_data() cannot be used with share_parameters: a rank without data updates nothing")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError("uneven_data() cannot be used with LBFGS, whose state cannot be broadcast")
    reducer = optimizer._reducer
    if reducer.process_set.process_set_id:
        raise ArgumentError("uneven_data() needs an optimizer of all ranks, not of a process set")
    return reducer


def _check_nothing_waits(reducers: Sequence[GradientSynchronizer], when: str) -> None:
    if any(reducer.outstanding for reducer in reducers):
        raise StepOrderError(f"{when} while complete gradients wait for optimizer.step(); call that first")


def _step_counts_differ(job: Context, counts: Sequence[int]) -> bool:
    """Collective: whether the ranks took different numbers of steps."""
    extremes = np.array([*counts, *(-count for count in counts)], np.int64)
    name = f"uneven_data.{job.num_joins}"
    job.allreduce(extremes, extremes, DTYPES["int64"], op=ReduceOp.MAX, name=name, blocking=True).wait()
    most, least = np.split(extremes, 2)
    return bool((most != -least).any())


def _broadcast_state(optimizers: Sequence[AllreduceOptimizer], model: torch.nn.Module | None, root: int) -> None:
    """Collective: broadcast the root's parameters and optimizer state."""
    given: set[torch.Tensor] = set()
    if model is not None:
        broadcast_parameters(model.state_dict(), root)
        given.update(model.parameters())
    for number, optimizer in enumerate(optimizers):
        named = optimizer._reducer.named(p for p in optimizer._parameters() if p not in given)
        broadcast_parameters([(f"{number}.{name}", parameter) for name, parameter in named], root)
        broadcast_optimizer_state(optimizer, root)
