"""Start from the same state everywhere: parameters and optimizer state."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from reigen import context
from reigen.api import objects
from reigen.api.gradients.plan_agreement import check_digests, compute_digest
from reigen.api.operations import check_root
from reigen.errors import ArgumentError
from reigen.torch.ops import broadcast_async_
from reigen.torch.parallel_wrappers import check_not_sharded


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite parameters in place with those of the root.

    Args:
        params: ``model.state_dict()``, or a list of tensors or of ``(name, tensor)``.
        root_rank: whose values all get.

    Raises:
        ArgumentError: ``params`` is something else, or a tensor is sharded (FSDP).
        UnsupportedTypeError: an entry is no tensor, or of a dtype that cannot be communicated.
        CollectiveError: the ranks' tensors differ in shape or dtype, or the job is broken.
    """
    if isinstance(params, Mapping):
        items: list[Any] = sorted(params.items())
    elif isinstance(params, list):
        items = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise ArgumentError(f"invalid params of type: {type(params)}")
    check_root(root_rank, context.current().size)
    if context.current().size > 1:
        check_not_sharded(items)
    _broadcast_all([(None if name is None else f"parameters.{name}", tensor) for name, tensor in items], root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the root's optimizer state and options (learning rate, ...). The root's are not changed.

    It makes no difference whether the others have state already: what the root has is what all have afterwards. Where
    it has none, parameters without a gradient have one of zeros then, as in Horovod, whose scripts may look at it.

    Args:
        optimizer: with the same parameter groups on every rank.
        root_rank: whose state all get.
        model: accepted for Horovod's sake.

    Raises:
        ArgumentError: LBFGS, whose state cannot be told apart by parameter.
        MismatchError: the ranks' parameter groups differ.
    """
    current = context.current()
    check_root(root_rank, current.size)
    shapes = tuple(
        f"group {index}: {[(tuple(p.shape), str(p.dtype)) for p in group['params']]}"
        for index, group in enumerate(optimizer.param_groups)
    )
    digests = objects.allgather_bytes(current, compute_digest(shapes), "optimizer_state.groups")
    check_digests(current, digests, shapes, "optimizer_state")
    tensors, install = share_optimizer_state(optimizer, root_rank, receives=current.rank != root_rank)
    broadcast_tensors(tensors, root_rank, "optimizer_state")
    install()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not optimizer.state and not isinstance(optimizer, torch.optim.SparseAdam):
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def share_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, *, receives: bool
) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Collective: tell the others how the root's optimizer state is built, with its options, but no tensor's values.

    Args:
        optimizer: with the same parameter groups on every rank.
        root_rank: whose state it is.
        receives: this rank gets it.

    Returns:
        The tensors, in the same order on all ranks: where they are received new ones, whose values are still to come,
        otherwise the state's own. And what makes the new ones the optimizer's state.

    Raises:
        ArgumentError: LBFGS, whose state cannot be told apart by parameter.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError("cannot broadcast torch.optim.LBFGS state")
    data, tensors = (None, []) if receives else pack_optimizer_state(optimizer)
    received = objects.broadcast_bytes(context.current(), data, root_rank, "optimizer_state")
    return unpack_optimizer_state(optimizer, received) if receives else (tensors, lambda: None)


def pack_optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[bytes, list[torch.Tensor]]:
    """Return how the optimizer's state is built, with its options, but no tensor's values; and the tensors.

    Args:
        optimizer: not LBFGS.
    """
    return _pack_optimizer(optimizer, _parameters_of(optimizer))


def unpack_optimizer_state(
    optimizer: torch.optim.Optimizer, data: bytes
) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Return new tensors for what `pack_optimizer_state` has returned elsewhere, and what makes them the state."""
    parameters = _parameters_of(optimizer)
    snapshot, tensors = _unpack_optimizer(data, parameters)
    return tensors, partial(_install, optimizer, parameters, snapshot)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def broadcast_tensors(tensors: Iterable[torch.Tensor], root_rank: int, name: str) -> None:
    """Collective: overwrite tensors with those of the root."""
    _broadcast_all([(f"{name}.{number}", tensor) for number, tensor in enumerate(tensors)], root_rank)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill a piece of memory without gaps, in whatever order."""
    if tensor.layout != torch.strided:
        return False
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return extent == tensor.numel() or not tensor.numel()


def _broadcast_all(named: Iterable[tuple[str | None, Any]], root_rank: int) -> None:
    for handle in [broadcast_async_(tensor, root_rank, name) for name, tensor in named]:
        handle.wait()


class _Pickler(pickle.Pickler):
    """Pickler that writes a tensor's number and type in place of the tensor."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        """(number, shape, strides, dtype, device type) of a tensor; None for everything else."""
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        strides = obj.stride() if is_dense(obj) else torch.empty(obj.shape, device="meta").stride()
        return self._numbers[id(obj)], tuple(obj.shape), strides, str(obj.dtype).removeprefix("torch."), obj.device.type


class _Unpickler(pickle.Unpickler):
    """Makes an empty tensor for each one that the root has."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self.tensors: dict[int, torch.Tensor] = {}
        self._device = device

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """The tensor of that number."""
        number, shape, strides, dtype, device_type = pid
        if number not in self.tensors:
            device = torch.device("cpu") if device_type == "cpu" else self._device
            self.tensors[number] = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device)
        return self.tensors[number]


def _pack_optimizer(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]
) -> tuple[bytes, list[torch.Tensor]]:
    states = {index: dict(optimizer.state[p]) for index, p in enumerate(parameters) if p in optimizer.state}
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump((states, options))
    return file.getvalue(), pickler.tensors


def _unpack_optimizer(data: bytes, parameters: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    unpickler = _Unpickler(io.BytesIO(data), parameters[0].device if parameters else torch.device("cpu"))
    snapshot = unpickler.load()
    return snapshot, [unpickler.tensors[number] for number in range(len(unpickler.tensors))]


def _install(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], snapshot: Any) -> None:
    # Not through load_state_dict(): that would cast the state to the parameters' dtype.
    states, options = snapshot
    optimizer.state.clear()
    for index, state in states.items():
        optimizer.state[parameters[index]] = state
    for group, received in zip(optimizer.param_groups, options, strict=True):
        group.update(received)
