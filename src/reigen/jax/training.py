"""Gradients and parameters of data-parallel training: optax transformations, wrappers of ``jax.grad``, broadcasts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from reigen import context
from reigen.api import objects
from reigen.api.gradients.plan_agreement import check_digests, compute_digest
from reigen.api.gradients.reduce_group import choose_reduction
from reigen.api.gradients.tracker import check_passes
from reigen.api.operations import BROADCAST, Average, check_root
from reigen.api.process_sets import ProcessSet, global_process_set, process_set_number
from reigen.engine.operation_builders import ReductionSpec
from reigen.errors import ArgumentError
from reigen.jax.adapter import JaxAdapter
from reigen.jax.collectives import JaxCollectives, reduce_gradients
from reigen.jax.compression import Compression, Compressor

_GRADIENTS = "DistributedOptimizer.gradients"


class DistributedState(NamedTuple):
    """State of `distributed` with several passes a step.

    Attributes:
        count: passes since the last step.
        gradients: their sum.
        inner: state of the wrapped transformation.
    """

    count: Any
    gradients: Any
    inner: Any


def reduce_tree(
    gradients: Any, reduction: ReductionSpec, name: str | None, process_set: ProcessSet, compression: Compressor
) -> Any:
    """Reduce a pytree of gradients as one group; leaves that are None stay."""
    leaves, tree = jax.tree.flatten(gradients)
    return jax.tree.unflatten(tree, reduce_gradients(leaves, reduction, name, process_set, compression))


def distributed(
    optimizer: Any,
    *,
    name: str | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap an optax transformation: gradients are reduced over all ranks, as one group, before it sees them.

    It goes around the whole chain: ``distributed(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))``
    clips by the norm of the reduced gradients, the same on every rank. Ranks that begin with the same parameters
    (`broadcast_parameters`) keep the same bits. Inside ``jit`` or outside of it. A rank without data gives zeros.

    Args:
        optimizer: an ``optax.GradientTransformation``, with extra arguments or without.
        name: matches the ranks' reductions, where there are several optimizers.
        compression: in which type gradients travel: ``Compression.fp16`` or ``.bf16``.
        backward_passes_per_step: calls of ``update`` whose gradients are summed up here before they are reduced; those
            between return updates of zeros. They are not averaged: divide the loss by their number for that.
        op: Average, Sum, Adasum, Min, Max or Product.
        gradient_predivide_factor: with Average, gradients are divided by it before they are added, multiplied after.
        average_aggregated_gradients: divide the sum of several passes by their number.
        process_set: the ranks that reduce among themselves.

    Returns:
        An ``optax.GradientTransformationExtraArgs``.

    Raises:
        ArgumentError: an argument makes no sense.
        CollectiveError: from ``update``, if the reduction failed; inside a program JAX raises a JaxRuntimeError where
            a result is needed (see `collective_errors`).
    """
    import optax

    reduction = choose_reduction(op, gradient_predivide_factor)
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        raise ArgumentError(f"an optax.GradientTransformation is needed, got {type(optimizer).__name__}")
    inner = optax.with_extra_args_support(optimizer)
    passes = check_passes(backward_passes_per_step)

    def reduce(gradients: Any) -> Any:
        if passes > 1 and average_aggregated_gradients:
            gradients = jax.tree.map(lambda gradient: gradient / passes, gradients)
        return reduce_tree(gradients, reduction, name or _GRADIENTS, process_set, compression)

    if passes == 1:

        def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            return inner.update(reduce(gradients), state, params, **extra)  # type: ignore[no-any-return]

        return optax.GradientTransformationExtraArgs(inner.init, update)

    def init(params: Any) -> DistributedState:
        return DistributedState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), inner.init(params))

    def update_seldom(
        gradients: Any, state: DistributedState, params: Any = None, **extra: Any
    ) -> tuple[Any, DistributedState]:
        total = jax.tree.map(jnp.add, state.gradients, gradients)

        def step() -> tuple[Any, DistributedState]:
            updates, changed = inner.update(reduce(total), state.inner, params, **extra)
            return updates, DistributedState(jnp.zeros_like(state.count), jax.tree.map(jnp.zeros_like, total), changed)

        def wait() -> tuple[Any, DistributedState]:
            shapes = jax.eval_shape(lambda: inner.update(total, state.inner, params, **extra)[0])
            updates = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), shapes)
            return updates, DistributedState(state.count + 1, total, state.inner)

        return jax.lax.cond(state.count == passes - 1, step, wait)  # type: ignore[no-any-return]

    return optax.GradientTransformationExtraArgs(init, update_seldom)


def value_and_grad(
    function: Callable[..., Any],
    argnums: Any = 0,
    *,
    has_aux: bool = False,
    op: int = Average,
    average_value: bool = False,
    compression: Compressor = Compression.none,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> Callable[..., Any]:
    """Make ``jax.value_and_grad(function)`` with gradients that are reduced over all ranks, as one group.

    Args:
        function: of this rank's data; returns the loss, or with ``has_aux`` a pair of it and anything.
        argnums: which arguments to differentiate.
        has_aux: see ``jax.value_and_grad``.
        op: how the gradients are reduced.
        average_value: average the value over the ranks, too; otherwise it is this rank's.
        compression: in which type gradients travel.
        process_set: the ranks that reduce among themselves.
        name: matches the ranks' reductions.
    """
    differentiated = jax.value_and_grad(function, argnums, has_aux=has_aux)
    reduction, mean = choose_reduction(op, 1.0), choose_reduction(Average, 1.0)
    name = name or f"gradients of {getattr(function, '__qualname__', 'function')}"

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiated(*args, **kwargs)
        gradients = reduce_tree(gradients, reduction, name, process_set, compression)
        if average_value:
            loss, aux = value if has_aux else (value, None)
            loss = reduce_tree(loss, mean, f"{name}.value", process_set, Compression.none)
            value = (loss, aux) if has_aux else loss
        return value, gradients

    return wrapped


def grad(
    function: Callable[..., Any], argnums: Any = 0, *, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """Make ``jax.grad(function)`` with gradients that are reduced over all ranks; options as of `value_and_grad`."""
    both = value_and_grad(function, argnums, has_aux=has_aux, **options)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return wrapped


def broadcast_parameters(
    params: Any, root_rank: int = 0, *, name: str = "parameters", process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's pytree (parameters, optimizer state, random keys), on every rank. Not inside a program.

    Args:
        params: of the same structure, shapes and dtypes on all ranks.
        root_rank: whose values all get.
        name: matches the ranks' calls.
        process_set: whose ranks take part; ``root_rank`` is a rank of the job all the same.

    Raises:
        ArgumentError: there is no such rank.
        UnsupportedTypeError: a leaf is no array.
        MismatchError: the ranks' pytrees differ; the error says where.
    """
    job, number = context.current(), process_set_number(process_set)
    check_root(root_rank, job.size)
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    description = tuple(
        f"{jax.tree_util.keystr(path)}: {getattr(leaf, 'shape', ())} {getattr(leaf, 'dtype', type(leaf).__name__)}"
        for path, leaf in paths
    )
    digests = objects.allgather_bytes(job, compute_digest(description), f"{name}.digest", number)
    check_digests(job, digests, description, name, number)
    run = JaxCollectives(JaxAdapter()).run_on_tree
    return run(BROADCAST, False, params, root_rank, name, process_set)
