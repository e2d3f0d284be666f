"""Sparse tensors: their indices and values are gathered from all ranks, as Horovod does."""

from __future__ import annotations

from collections.abc import Callable

import torch

from reigen.api.collectives import parse_op
from reigen.api.gradients.reduce_group import ReduceGroup
from reigen.api.process_sets import ProcessSet, global_process_set
from reigen.engine.handle import Handle
from reigen.errors import ArgumentError, CollectiveError, JoinedError, UnsupportedTypeError
from reigen.torch.ops import grouped_allgather_async
from reigen.types import ReduceOp


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Begin an allreduce of sparse tensors: the indices of all ranks, beside their values.

    Args:
        tensor: a COO tensor, of the same shape, dtype and number of sparse dimensions on every rank.
        name: matches the ranks' calls.
        op: Average, which divides the values by the number of ranks, or Sum.
        process_set: whose ranks take part.

    Returns:
        A function; call it for the result, as ``poll`` and ``synchronize`` do not take it. An index that several ranks
        have is there several times; ``coalesce()`` adds up.

    Raises:
        UnsupportedTypeError: the tensor is not sparse.
        ArgumentError: another operator.
    """
    chosen = parse_op(op)
    if chosen not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ArgumentError(f"sparse tensors can be reduced with op=Average or Sum, not {chosen.name.title()}")
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise UnsupportedTypeError("sparse_allreduce_async() needs a sparse tensor in COO format")
    own = tensor.detach().coalesce()
    label = None if name is None else f"{name}.sparse"
    gathered = grouped_allgather_async([own.indices().t(), own.values()], label, process_set)
    size = process_set.size() or 1 if chosen is ReduceOp.AVERAGE else 1

    def wait() -> torch.Tensor:
        rows, values = gathered.wait()
        return _assemble(rows, values if size == 1 else values / size, own.shape)

    return wait


class SparseGradients:
    """Gathers the gradients that are sparse on some rank; ``dims`` are their sparse dimensions, alike on all ranks."""

    def __init__(self, dims: dict[int, int], *, average: bool = False) -> None:
        self._dims = dims
        self._average = average
        self._pending: dict[int, Handle[list[torch.Tensor]]] = {}

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._dims)

    @staticmethod
    def refused(name: str, error: JoinedError) -> JoinedError:
        """Explain that a sparse gradient cannot be gathered, because some rank has joined."""
        return JoinedError(
            "this gradient is sparse, so it is gathered from all ranks, and some have joined; "
            "use DistributedOptimizer(sparse_as_dense=True) where ranks have different amounts of data",
            tensor=name,
            ranks=error.ranks,
        )

    def start(self, reduce_group: ReduceGroup, parameters: list[torch.Tensor]) -> None:
        """Submit every sparse gradient; a rank without one contributes nothing, a dense one is made sparse."""
        for index, dim in self._dims.items():
            own = _coalesce_gradient(parameters[index], dim)
            both = [own.indices().t(), own.values()]
            name = f"{reduce_group.name}.sparse.{index}"
            self._pending[index] = grouped_allgather_async(both, name, reduce_group.process_set)

    def abandon(self) -> None:
        """Drop the handles of submitted gradients: no caller will wait for them."""
        self._pending.clear()

    def wait(self, reduce_group: ReduceGroup, parameters: list[torch.Tensor], names: list[str]) -> None:
        """Every rank's indices and values, in rank order, become the gradient. Repeated indices are not merged.

        Raises:
            CollectiveError: the first failure; all operations have been waited for.
        """
        pending, self._pending = self._pending, {}
        failure: CollectiveError | None = None
        for index, gathered in pending.items():
            try:
                rows, values = gathered.wait()
            except CollectiveError as error:
                failure = failure or (self.refused(names[index], error) if isinstance(error, JoinedError) else error)
                continue
            if self._average:
                values = values / reduce_group.size
            parameter = parameters[index]
            try:
                parameter.grad = _assemble(rows, values, parameter.shape, names[index])
            except CollectiveError as error:
                failure = failure or error
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # it holds this frame


def _assemble(rows: torch.Tensor, values: torch.Tensor, shape: torch.Size, name: str | None = None) -> torch.Tensor:
    """Assemble a sparse tensor of the gathered parts.

    Without TLS an attacker between the hosts can have changed the indices: torch would write beyond the tensor's
    memory.

    Raises:
        CollectiveError: an index lies outside.
    """
    try:
        return torch.sparse_coo_tensor(rows.t(), values, shape, check_invariants=True)
    except RuntimeError as error:
        reason = f"gathered indices make no sense for a tensor of shape {tuple(shape)}: {error}"
        raise CollectiveError(reason, tensor=name) from None


def _coalesce_gradient(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty((0, *parameter.shape[sparse_dim:]))
        gradient = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
    elif gradient.layout is torch.strided:
        gradient = gradient.detach().to_sparse(sparse_dim)
    return gradient.detach().coalesce()
