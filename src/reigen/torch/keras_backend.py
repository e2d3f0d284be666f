"""PyTorch as Keras's backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from reigen.api.collectives import Collectives
from reigen.api.job import shutdown
from reigen.api.operations import ALLREDUCE
from reigen.api.process_sets import ProcessSet
from reigen.engine.operation_builders import ReductionSpec
from reigen.torch.adapter import TorchAdapter

_COLLECTIVES = Collectives(TorchAdapter())


class TorchKerasBackend:
    """A `reigen.keras.backend.KerasBackend`: Keras runs eagerly, and collectives wait."""

    skips_updates = True

    def reduce_gradients(
        self, tensors: Sequence[torch.Tensor], reduction: ReductionSpec, name: str, process_set: ProcessSet
    ) -> list[Any]:
        """Return the tensors, reduced as one operation."""
        given = [tensor.detach() for tensor in tensors]
        return _COLLECTIVES.start_group(ALLREDUCE, given, reduction, name, process_set, blocking=True).wait()

    def reduce_sparse(
        self, gradient: torch.Tensor, reduction: ReductionSpec, name: str, process_set: ProcessSet
    ) -> torch.Tensor:
        """Return a sparse gradient as a dense one, reduced: Keras's optimizers take no others from PyTorch."""
        reduced: torch.Tensor = self.reduce_gradients([self.to_dense(gradient)], reduction, name, process_set)[0]
        return reduced

    def wait_for(self, values: Sequence[Any]) -> None:
        """They are there: a step waits for its collectives."""

    def shutdown(self) -> None:
        """Leave the job."""
        shutdown()

    def change_job(self, change: Callable[[], None]) -> None:
        """Leave the job, and enter another."""
        change()

    def collective_errors(self) -> AbstractContextManager[None]:
        """Return a context in which errors of failed collectives are CollectiveErrors."""
        return nullcontext()

    def leave_uncompiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that torch.compile runs as it is, with all that it calls."""
        outside: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return outside

    def without_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which an optimizer is applied."""
        return torch.no_grad()

    def is_sparse(self, gradient: Any) -> bool:
        """Return whether it is a sparse tensor."""
        return bool(gradient.is_sparse)

    def to_dense(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return it as a dense tensor."""
        return gradient.to_dense()


BACKEND = TorchKerasBackend()
