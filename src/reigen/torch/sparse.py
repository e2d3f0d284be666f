"""Sparse gradients: their indices and values are gathered from all ranks, as Horovod does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from reigen.frontends.collectives import Pending
from reigen.torch.differentiable import COLLECTIVES

if TYPE_CHECKING:
    from reigen.context import Context


class SparseGradients:
    """Gathers the gradients that are sparse on some rank.

    Args:
        dims: parameter -> number of sparse dimensions, the same on every rank.
        average: divide the values by the number of ranks.
    """

    def __init__(self, dims: dict[int, int], *, average: bool = False) -> None:
        self._dims = dims
        self._average = average
        self._pending: dict[int, tuple[Pending[torch.Tensor], Pending[torch.Tensor]]] = {}

    def start(self, context: Context, name: str, parameters: list[torch.Tensor]) -> None:
        """Submit every sparse gradient; a rank without one contributes nothing, a dense one is made sparse."""
        for index, dim in self._dims.items():
            gradient = _coalesced(parameters[index], dim)
            label = f"{name}.sparse.{index}"
            self._pending[index] = (
                COLLECTIVES.allgather(gradient.indices().t(), f"{label}.indices"),
                COLLECTIVES.allgather(gradient.values(), f"{label}.values"),
            )

    def wait(self, parameters: list[torch.Tensor], size: int) -> None:
        """Every rank's indices and values, in rank order, become the gradient. Repeated indices are not merged.

        Raises:
            CollectiveError: an operation failed.
        """
        pending, self._pending = self._pending, {}
        for index, (indices, values) in pending.items():
            rows: Any = indices.wait()
            data: Any = values.wait()
            if self._average:
                data = data / size
            parameter = parameters[index]
            parameter.grad = torch.sparse_coo_tensor(rows.t(), data, parameter.shape, check_invariants=False)


def _coalesced(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty((0, *parameter.shape[sparse_dim:]))
        gradient = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
    elif gradient.layout is torch.strided:
        gradient = gradient.detach().to_sparse(sparse_dim)
    return gradient.detach().coalesce()
