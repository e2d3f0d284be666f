"""JAX as Keras's backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

from reigen.api.process_sets import ProcessSet
from reigen.engine.operation_builders import ReductionSpec
from reigen.jax.collectives import reduce_gradients
from reigen.jax.native import change_job, collective_errors, shutdown


class JaxKerasBackend:
    """A `reigen.keras.backend.KerasBackend`: inside of traced programs, and outside."""

    skips_updates = False

    def reduce_gradients(
        self, tensors: Sequence[Any], reduction: ReductionSpec, name: str, process_set: ProcessSet
    ) -> list[Any]:
        """Return the arrays, reduced as one operation."""
        return reduce_gradients(tensors, reduction, name, process_set)

    def reduce_sparse(self, gradient: Any, reduction: ReductionSpec, name: str, process_set: ProcessSet) -> Any:
        """Return a sparse gradient as a dense one, reduced; JAX's gradients are not sparse."""
        return reduce_gradients([self.to_dense(gradient)], reduction, name, process_set)[0]

    def wait_for(self, values: Sequence[Any]) -> None:
        """Return when arrays have been computed; raise what kept them from it.

        A step that was interrupted may have been given the memory of some: they are not waited for.
        """
        with collective_errors():
            jax.block_until_ready([value for value in values if not value.is_deleted()])

    def shutdown(self) -> None:
        """Leave the job, when all dispatched computations are complete."""
        shutdown()

    def change_job(self, change: Callable[[], None]) -> None:
        """Leave the job, and enter another."""
        change_job(change)

    def collective_errors(self) -> AbstractContextManager[None]:
        """Return a context in which errors of failed collectives are CollectiveErrors."""
        return collective_errors()

    def leave_uncompiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function itself: tracing follows tensors, not Python."""
        return function

    def without_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which an optimizer is applied."""
        return nullcontext()

    def is_sparse(self, gradient: Any) -> bool:
        """Return whether it is a sparse array."""
        return hasattr(gradient, "todense")

    def to_dense(self, gradient: Any) -> Any:
        """Return it as a dense array."""
        return gradient.todense()


BACKEND = JaxKerasBackend()
