"""Whether parameters can exist once a host: for these optimizers, options and ranks."""

from __future__ import annotations

import torch

from reigen import context as contexts
from reigen.errors import ArgumentError
from reigen.frontends.compression import Cast, Coded
from reigen.frontends.process_sets import ProcessSet
from reigen.frontends.sharing import PIECE_ALIGNMENT_BYTES
from reigen.torch.elementwise import check_elementwise

AUTO = "auto"


def choose_sharing(
    optimizer: torch.optim.Optimizer,
    wanted: object,
    compression: Cast | Coded,
    process_set: ProcessSet,
    *,
    vouched: bool,
) -> bool:
    """Whether to share: what ``share_parameters`` asks for, where there are several ranks.

    Args:
        optimizer: a plain one.
        wanted: True, False or "auto".
        compression: of the gradients.
        process_set: the ranks that average among themselves.
        vouched: the optimizer treats every element by itself, whatever its class.

    Raises:
        ArgumentError: it is wanted and cannot be, with the reason; also in a job of one rank. Or it is neither.
    """
    if wanted is False:
        return False
    if wanted is not True and wanted != AUTO:
        raise ArgumentError(f"share_parameters is True, False or 'auto', got {wanted!r}")
    try:
        _check(optimizer, compression, vouched=vouched)
    except ArgumentError as error:
        if wanted is True:
            raise ArgumentError(f"share_parameters: {error}") from error
        return False
    if not process_set.included() or (process_set.size() or 1) == 1:
        return False
    members = set(process_set.ranks or range(contexts.current().size))
    return wanted is True or any(len(members.intersection(machine)) > 1 for machine in contexts.current().machines)


def _check(optimizer: torch.optim.Optimizer, compression: Cast | Coded, *, vouched: bool) -> None:
    if isinstance(compression, Coded):
        raise ArgumentError("gradients that travel as codes cannot be reduced to their owners; use another compression")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type != "cpu" or parameter.layout is not torch.strided:
                where = f"{parameter.layout} on {parameter.device}"
                raise ArgumentError(f"parameters must be dense tensors on the host, one is {where}")
    check_elementwise(optimizer, vouched=vouched, alignment_bytes=PIECE_ALIGNMENT_BYTES)
