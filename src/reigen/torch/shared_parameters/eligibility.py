"""Eligibility for shared parameters: optimizers, options and ranks, and the pieces to divide into."""

from __future__ import annotations

import logging

import torch

from reigen import context as contexts
from reigen.api.compression import CastCompression, CodecCompression
from reigen.api.gradients.sharding import SHARD_ALIGNMENT_BYTES, ShardGranularity
from reigen.api.process_sets import ProcessSet
from reigen.elastic import membership
from reigen.errors import ArgumentError
from reigen.torch.shared_parameters.elementwise import choose_division

_log = logging.getLogger(__name__)

AUTO = "auto"


def choose_parameter_sharing(
    optimizer: torch.optim.Optimizer,
    wanted: object,
    compression: CastCompression | CodecCompression,
    process_set: ProcessSet,
    *,
    asserted: bool,
) -> ShardGranularity | None:
    """Choose whether to share, and the pieces, as ``share_parameters`` asks, where there are several ranks.

    With "auto" the lowest of these ranks logs what was chosen, and why. ``asserted``: the user says that the
    optimizer treats every element by itself, whatever its class.

    Raises:
        ArgumentError: it is wanted and cannot be, with the reason; also in a job of one rank. Or it is neither.
    """
    if wanted is False:
        return None
    if wanted is not True and wanted != AUTO:
        raise ArgumentError(f"share_parameters is True, False or 'auto', got {wanted!r}")
    current = contexts.current()
    members = sorted(process_set.ranks or range(current.size))
    division: ShardGranularity | None = None
    try:
        division = _division(optimizer, compression, asserted=asserted)
        reason = f"each rank of a host updates its part of them, divided by {division.value}"
    except ArgumentError as error:
        if wanted is True:
            raise ArgumentError(f"share_parameters: {error}") from error
        reason = str(error)
    if not process_set.included() or (len(members) == 1 and not membership.may_change()):
        return None
    if wanted is True:
        return division
    if division is not None and membership.may_change():  # who comes later must choose the same
        division, reason = None, "the members of an elastic job change: share_parameters=True if that is wanted"
    elif division is not None and all(len(set(members).intersection(host)) < 2 for host in current.hosts):
        division, reason = None, "no host has several ranks"
    if current.rank == members[0] and not membership.is_candidate():
        where = "once a host" if division is not None else "once a rank"
        _log.info("share_parameters='auto': parameters exist %s: %s", where, reason)
    return division


def _division(
    optimizer: torch.optim.Optimizer, compression: CastCompression | CodecCompression, *, asserted: bool
) -> ShardGranularity:
    if isinstance(compression, CodecCompression):
        raise ArgumentError("gradients that travel as codes cannot be reduced to their owners; use another compression")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type != "cpu" or parameter.layout is not torch.strided:
                where = f"{parameter.layout} on {parameter.device}"
                raise ArgumentError(f"parameters must be dense tensors on the host, one is {where}")
    return choose_division(optimizer, asserted=asserted, alignment_bytes=SHARD_ALIGNMENT_BYTES)
