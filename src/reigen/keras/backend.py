"""Interface to the framework that is Keras's backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol

import keras

from reigen.api.process_sets import ProcessSet
from reigen.engine.operation_builders import ReductionSpec
from reigen.errors import ConfigError


class KerasBackend(Protocol):
    """Collectives and gradients of a framework, inside of its traced programs too.

    Attributes:
        skips_updates: a step that only accumulates gradients runs no update (Keras's jax optimizers run all, and drop
            the results).
    """

    skips_updates: bool

    def reduce_gradients(
        self, tensors: Sequence[Any], reduction: ReductionSpec, name: str, process_set: ProcessSet
    ) -> list[Any]:
        """Return dense tensors, reduced as one operation, all or none.

        Args:
            tensors: at least one.
            reduction: the operator and its factors.
            name: matches the ranks' operations.
            process_set: whose ranks take part.

        Raises:
            CollectiveError: it failed; or what the framework's programs raise then.
        """

    def reduce_sparse(self, gradient: Any, reduction: ReductionSpec, name: str, process_set: ProcessSet) -> Any:
        """Return a sparse gradient with the rows of all ranks."""

    def wait_for(self, values: Sequence[Any]) -> None:
        """Return when tensors have been computed, but for those whose memory has been given away.

        Raises:
            CollectiveError: a collective has failed of which they were to be computed.
        """

    def shutdown(self) -> None:
        """Leave the job."""

    def change_job(self, change: Callable[[], None]) -> None:
        """Call ``change``, which leaves the job and enters another; compiled programs of the old one are not used."""

    def collective_errors(self) -> AbstractContextManager[None]:
        """Return a context in which the framework's errors of failed collectives become CollectiveErrors."""

    def leave_uncompiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs as it is in programs of a compiler that reads Python; or the function itself."""

    def without_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which an optimizer is applied: the framework computes no gradients of that."""

    def is_sparse(self, gradient: Any) -> bool:
        """Return whether it is a gradient of rows and their numbers."""

    def to_dense(self, gradient: Any) -> Any:
        """Return a sparse gradient as a tensor."""


@functools.cache
def load_backend() -> KerasBackend:
    """Return the implementation for the backend that Keras runs on.

    Raises:
        ConfigError: there is nothing for it.
    """
    name = keras.backend.backend()
    if name not in ("tensorflow", "torch", "jax"):
        raise ConfigError(f"Reigen knows the backends tensorflow, torch and jax, not {name!r}: set KERAS_BACKEND")
    # by name: the frameworks' packages lie above this one, and this one's imported already
    backend: KerasBackend = import_module(f"reigen.{name}.keras_backend").BACKEND
    return backend
