"""Elastic training with JAX: ``rj.elastic``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reigen.api.functions import broadcast_object
from reigen.api.job import rank
from reigen.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, history, leave, membership
from reigen.elastic.array_job import ArrayJob, ArrayTraining
from reigen.elastic.cursor import Cursor
from reigen.elastic.loop import repeat_in_views
from reigen.elastic.state import Departure
from reigen.errors import ArgumentError
from reigen.jax.keras_backend import BACKEND
from reigen.jax.native import change_job, collective_errors

__all__ = [
    "Cursor",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "JaxState",
    "Job",
    "ObjectState",
    "State",
    "history",
    "leave",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, as `reigen.elastic.run` does; failures in compiled programs count, too.

    Programs are compiled anew for other members: shapes in them, and branches by rank, were those of the ones before.
    A commit waits for what has been dispatched.
    """
    return repeat_in_views(func, reset=lambda: change_job(membership.reset), errors=collective_errors)


class JaxState(ObjectState):
    """State of a training with JAX: each keyword argument is an attribute.

    Args:
        kwargs: names and first values: pytrees of arrays (parameters, optimizer state, random keys), and other objects
            that pickle can write.

    Example::

        state = rj.elastic.JaxState(params=params, moments=optimizer.init(params), step=0)
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(broadcast_object, rank, **kwargs)

    def save(self) -> None:
        """Keep copies of the attributes, when they have been computed.

        A copy of an array whose program is still running would fail with it, later, and be what a restore goes back to.

        Raises:
            JaxRuntimeError: a program of which they were to be computed has failed; what had been saved stays.
        """
        jax.block_until_ready([getattr(self, name) for name in self._names])
        super().save()


class TreeTraining(ArrayTraining):
    """A `reigen.elastic.training.TrainingState` of pytrees, which are values: who keeps them can undo a step.

    Args:
        trees: by name.
    """

    def __init__(self, trees: Mapping[str, Any]) -> None:
        super().__init__(BACKEND)
        self.trees = dict(trees)

    def zeros(self) -> list[Any]:
        """Implement `ArrayTraining.zeros`."""
        return [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(next(iter(self.trees.values())))]

    def read(self) -> list[Any]:
        """Implement `ArrayTraining.read`."""
        return [_as_array(leaf) for leaf in jax.tree.leaves(self.trees)]

    def write(self, values: list[Any]) -> None:
        """Implement `ArrayTraining.write`."""
        leaves, tree = jax.tree.flatten(self.trees)
        self.trees = jax.tree.unflatten(tree, map(_like, leaves, values))

    def describe(self) -> dict[str, list[str]]:
        """Implement `TrainingState.describe`."""
        return {name: _describe(tree) for name, tree in self.trees.items()}

    def apply(self, changed: Mapping[str, Any]) -> None:
        """Take new values, when they have been computed."""
        for name, tree in changed.items():
            if name not in self.trees:
                raise ArgumentError(f"the job has no {name}, only {', '.join(self.trees)}")
            if _describe(tree) != _describe(self.trees[name]):
                raise ArgumentError(
                    f"{name} has other leaves, shapes or dtypes than before, which a job must not change"
                )
        with collective_errors():
            jax.block_until_ready(dict(changed))
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self.trees)):
            raise ArgumentError(
                "arrays of the job were donated to a program (donate_argnums), so that its step could not be undone"
            )
        assert self.update is not None
        with self.update:
            self.trees.update(changed)


class Job(ArrayJob):
    """Elastic training with JAX in which no step and no sample is lost when processes die.

    Parameters, optimizer state, random keys and what else a step computes anew belong to the job, as pytrees by name,
    which are its attributes; `apply` gives it those of the next step. Where members change in ``with step:``, that has
    not happened, and the step comes again from `steps` with its samples dealt to the members that there are now;
    nothing is raised. A step that some members had applied is not run again: the others get its result.

    Gradients are averaged by `average`, outside of compiled programs, and the optimizer is a plain one. Behind `apply`
    the block must not communicate. Collectives of your own belong into the block, before it.

    Args:
        data: the samples.
        min_size: with fewer members steps wait.
        resume: a checkpoint to begin with, if it is there; where ranks have different ones, the latest.
        on_leave: called with a `Departure` when this process leaves the job after a notice, before it ends.
        trees: pytrees of arrays, by name, that with the parameters first.

    Raises:
        ArgumentError: an argument makes no sense; or, in a newcomer, its trees are not those of the members.

    Example::

        data = rj.elastic.Cursor(len(images), global_batch=256, seed=1)
        with rj.elastic.Job(params=params, opt_state=optimizer.init(params), data=data, min_size=2) as job:
            for step in job.steps(epochs=10):
                with step:
                    gradients = [gradient_of(job.params, images[part.indices]) for part in step.parts]
                    updates, opt_state = optimizer.update(job.average(gradients), job.opt_state, job.params)
                    job.apply(params=optax.apply_updates(job.params, updates), opt_state=opt_state)
    """

    training: TreeTraining

    def __init__(
        self,
        *,
        data: Cursor,
        min_size: int = 1,
        resume: str | os.PathLike[str] | None = None,
        on_leave: Callable[[Departure], None] | None = None,
        **trees: Any,
    ) -> None:
        if not trees:
            raise ArgumentError("a Job needs pytrees, by name: Job(params=params, opt_state=opt_state, data=data)")
        super().__init__(TreeTraining(trees), data, min_size=min_size, resume=resume, on_leave=on_leave)
        if taken := [name for name in trees if name in vars(self) or hasattr(Job, name)]:
            raise ArgumentError(f"{', '.join(taken)} means something else in a Job: give the tree another name")

    def __getattr__(self, name: str) -> Any:
        """Return a pytree, as it is now."""
        training = self.__dict__.get("training")
        if training is None or name not in training.trees:
            raise AttributeError(f"the job has no {name}")
        return training.trees[name]

    def average(self, gradients: Sequence[Any], like: Any = None) -> Any:
        """Collective: return the gradient of the mean loss over all samples of the step, of all ranks.

        Args:
            gradients: for each of this rank's ``step.parts`` the pytree of gradients of the mean loss over it.
            like: a pytree of their shapes, for ranks without samples; None: the job's first tree, its parameters.

        Raises:
            CollectiveError: it failed: members change, and ``with step:`` undoes the step. Or the program is wrong.
            ArgumentError, StepOrderError: it is called in a wrong way.
        """
        rows = [jax.tree.leaves(each) for each in gradients]
        like = next(iter(self.training.trees.values())) if like is None else like
        leaves, tree = jax.tree.flatten(gradients[0] if gradients else like)
        with collective_errors():
            averaged = self._average(rows, lambda: [jnp.zeros_like(leaf) for leaf in leaves])
        return jax.tree.unflatten(tree, averaged)

    def apply(self, **changed: Any) -> None:
        """Give the job the trees that the step has computed, all at once; once a step.

        It waits for them. Trees that are not given stay.

        Raises:
            ArgumentError: the job has no such tree; it has other leaves; or arrays of the job were donated.
            CollectiveError: a program of which they were to be computed has failed; ``with step:`` undoes the step.
            StepOrderError: outside of a step, or twice in one.
        """
        self._check_in_step()
        self.training.apply(changed)


def _describe(tree: Any) -> list[str]:
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    lines = [
        f"{jax.tree_util.keystr(path)}: {getattr(leaf, 'dtype', type(leaf).__name__)} {np.shape(leaf)}"
        for path, leaf in paths
    ]
    return [*lines, str(structure)]


def _as_array(leaf: Any) -> Any:
    """Return a leaf as a NumPy array; random keys as their data."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _like(leaf: Any, value: Any) -> Any:
    """Return an array of `_as_array` in the type of a leaf."""
    if not isinstance(leaf, jax.Array):
        return np.array(value) if isinstance(leaf, np.ndarray) else type(leaf)(value)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.array(value), impl=jax.random.key_impl(leaf))
    return jnp.array(value)
