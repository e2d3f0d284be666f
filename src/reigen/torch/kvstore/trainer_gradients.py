"""Contribution of a worker to a round: its gradients, as the store wants them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from reigen.errors import ArgumentError
from reigen.torch.kvstore.trainer_params import TrainerParam


class TrainerGradients:
    """The gradients of a Trainer's parameters.

    Args:
        entries: the parameters.
        on_store: the store updates the weights.
        keeps_sparse: sparse gradients may stay sparse, since they go nowhere.
        counts: rounds count workers, so that everyone has to contribute something.
    """

    def __init__(self, entries: Sequence[TrainerParam], *, on_store: bool, keeps_sparse: bool, counts: bool) -> None:
        self._entries = entries
        self._on_store, self._keeps_sparse, self._counts = on_store, keeps_sparse, counts
        self._warned: set[int] = set()

    def gradients(self, ignore_stale: bool) -> list[tuple[int, torch.Tensor | None]]:
        """The gradient of each parameter that requires one, with the parameter's index.

        Raises:
            ArgumentError: some have none, and that is not to be ignored.
        """
        trained = [(index, entry) for index, entry in enumerate(self._entries) if entry.parameter.requires_grad]
        stale = [str(entry.key) for _, entry in trained if entry.parameter.grad is None]
        if stale and not ignore_stale:
            raise ArgumentError(
                f"{len(stale)} of {len(trained)} parameters got no gradient since zero_grad(): {', '.join(stale[:5])}"
                f"{', ...' if len(stale) > 5 else ''}. If that is meant, call step(..., ignore_stale_grad=True)."
            )
        return [(index, entry.parameter.grad) for index, entry in trained]

    def of(self, index: int, gradient: torch.Tensor | None, factor: float, overflow: bool) -> torch.Tensor | None:
        """Return this worker's contribution for a parameter, of the store's kind: the gradient times ``factor``.

        Zeros where there is no gradient, or ``overflow``: some gradient of this worker is not finite. None where these
        would not be missed.
        """
        entry = self._entries[index]
        by_rows = self._on_store and entry.has_sparse_rows
        if gradient is None or overflow:
            if not self._counts:
                return None
            return _empty_rows(entry.parameter) if by_rows else torch.zeros_like(entry.parameter, requires_grad=False)
        gradient = gradient.detach()
        if by_rows and not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        if gradient.is_sparse and not by_rows and not self._keeps_sparse:
            self._warn(index)
            gradient = gradient.to_dense()
        return gradient if factor == 1.0 else gradient * factor

    def _warn(self, index: int) -> None:
        if self._on_store and index not in self._warned:
            self._warned.add(index)
            warnings.warn(
                f"the gradient of parameter {self._entries[index].key!r} is sparse, and travels as a dense one: the "
                'Trainer was not told. Give it the module, or {"params": [...], "grad_stype": "row_sparse"}.',
                UserWarning,
                stacklevel=5,
            )


def _empty_rows(parameter: torch.Tensor) -> torch.Tensor:
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
