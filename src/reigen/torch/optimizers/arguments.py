"""Arguments of DistributedOptimizer: checks and meaning."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from reigen import context
from reigen.api.compression import CastCompression, CodecCompression, check_op_allowed, parse_compression
from reigen.errors import ArgumentError
from reigen.torch.compression import COMPRESSION_NAMES, Compressor
from reigen.torch.parallel_wrappers import check_not_sharded
from reigen.types import ReduceOp

#: How many groups, or the number of its group for each parameter that is in one; None for buckets of the usual size.
Groups = int | Mapping[torch.Tensor, int] | None


def choose_compression(compression: object, op: ReduceOp) -> CastCompression | CodecCompression:
    """Parse ``compression``: a `Compressor`, a codec, or the parameters of one.

    Raises:
        ArgumentError: nothing of the kind; or it does not go with the operator.
    """
    chosen = parse_compression(compression, COMPRESSION_NAMES)
    check_op_allowed(op, chosen)
    return chosen


def choose_compressor(compression: object) -> Compressor:
    """Parse ``compression`` for op=Adasum, where tensors cannot travel as codes; raises ArgumentError."""
    chosen = choose_compression(compression, ReduceOp.ADASUM)
    assert isinstance(chosen, CastCompression)
    return Compressor(chosen.wire)


def choose_groups(groups: int | list[list[torch.Tensor]] | None, num_groups: int) -> Groups:
    """Parse ``groups`` and the deprecated ``num_groups``. Parameters of other optimizers do no harm.

    Raises:
        ArgumentError: neither a positive number nor disjoint lists of tensors.
    """
    if num_groups:
        warnings.warn("Parameter `num_groups` is deprecated; use `groups`", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if not isinstance(groups, list):
        raise ArgumentError(f"groups should be a positive integer or a list of lists of torch.Tensor, got {groups!r}")
    lists: list[Any] = groups
    members = [member for group in lists if isinstance(group, (list, tuple)) for member in group]
    if any(not isinstance(item, (list, tuple)) for item in lists) or any(not torch.is_tensor(m) for m in members):
        raise ArgumentError("groups should be a list of lists of torch.Tensor")
    if len(set(members)) < len(members):
        raise ArgumentError("a parameter can be in one of the groups only")
    return {member: number for number, group in enumerate(lists) for member in group}


def name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters in their order, with names.

    Raises:
        ArgumentError: the names do not cover the parameters, are not unique, or are none; or a parameter is sharded.
    """
    named = _name_parameters(optimizer, named_parameters)
    if context.current().size > 1:
        check_not_sharded(named)
    return named


def _name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    owned = [(group, p) for group, options in enumerate(optimizer.param_groups) for p in options["params"]]
    if named_parameters is None:
        return [(f"group{group}.parameter{index}", parameter) for index, (group, parameter) in enumerate(owned)]
    named: list[Any] = list(named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str) for item in named):
        raise ArgumentError(
            "named_parameters should be a sequence of tuples (name, parameter), as model.named_parameters() gives them"
        )
    names = [name for name, _ in named]
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise ArgumentError(f"names in named_parameters must be unique; found twice: {', '.join(repeated)}")
    name_of = {parameter: name for name, parameter in named}
    unnamed = [index for index, (_, parameter) in enumerate(owned) if parameter not in name_of]
    if unnamed:
        raise ArgumentError(
            "named_parameters was specified, but one or more parameters of the optimizer were not named: "
            f"numbers {unnamed}, of shapes {[tuple(owned[index][1].shape) for index in unnamed]}"
        )
    return [(name_of[parameter], parameter) for _, parameter in owned]
