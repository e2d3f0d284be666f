"""Models that torch's own data parallelism holds: FSDP, tensor parallelism, DistributedDataParallel."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch

from reigen.errors import ArgumentError


def check_not_sharded(named_tensors: Iterable[tuple[str | None, Any]]) -> None:
    """Check that every tensor is whole on this rank; other objects are let pass.

    Raises:
        ArgumentError: one is a DTensor, or is held by FullyShardedDataParallel.
    """
    tensor_module = sys.modules.get("torch.distributed.tensor")
    for name, tensor in named_tensors:
        if tensor_module is not None and isinstance(tensor, tensor_module.DTensor):
            kind = "a DTensor (of FSDP's fully_shard, or of tensor parallelism)"
        elif getattr(tensor, "_fsdp_flattened", False):
            kind = "held by FullyShardedDataParallel"
        else:
            continue
        raise ArgumentError(
            f"{'a parameter' if name is None else f'parameter {name!r}'} is {kind}: each rank has a part of it, and "
            "torch reduces its gradient. Reigen needs whole parameters: give it the model as it was before, and "
            "DistributedOptimizer(..., share_parameters=True) for one copy a host; or leave it to torch, without "
            "DistributedOptimizer and broadcast_parameters"
        )


def is_in_ddp(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether a DistributedDataParallel has one of the parameters. Slow: looks at all objects of the process."""
    ddp = torch.nn.parallel.DistributedDataParallel
    wanted = {id(parameter) for parameter in parameters}
    modules: list[torch.nn.Module] = [each for each in gc.get_objects() if issubclass(type(each), ddp)]
    return any(id(parameter) in wanted for module in modules for parameter in module.parameters())
