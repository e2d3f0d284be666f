"""Agreement of the ranks on one plan of the gradient buckets, so that each gradient has the same place on all."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from reigen.api.gradients.reduce_group import ReduceGroup
from reigen.api.objects import allgather_bytes, allgather_object
from reigen.context import Context
from reigen.errors import MismatchError


@dataclass(frozen=True)
class PlanProposal:
    """Proposal of one rank for the plan of the gradient buckets, made at the end of its first backward pass.

    Attributes:
        description: one line per parameter, and the options that must be the same everywhere.
        order: the parameters in the order in which their gradients were complete.
        sparse_dims: per parameter the number of sparse dimensions of its gradient; 0 for a dense or unknown one.
        overlaps: buckets can be reduced here while backward runs.
    """

    description: tuple[str, ...]
    order: tuple[int, ...]
    sparse_dims: tuple[int, ...]
    overlaps: bool = False


def agree_on_plan(reduce_group: ReduceGroup, proposal: PlanProposal) -> tuple[list[int], list[int], bool]:
    """Collective over the group: every rank's proposal in, the same agreement out.

    Returns:
        The first rank's order, each parameter's largest ``sparse_dims`` of any rank, and whether any rank ``overlaps``.

    Raises:
        MismatchError: the descriptions differ. Every rank raises it; it says where each one first differs from rank 0.
    """
    order_bytes = struct.pack(f"<{len(proposal.order)}I", *proposal.order)
    packed = compute_digest(proposal.description) + bytes([proposal.overlaps, *proposal.sparse_dims]) + order_bytes
    replies = allgather_bytes(reduce_group.context, packed, f"{reduce_group.name}.agreement", reduce_group.number)
    check_digests(
        reduce_group.context,
        [reply[:32] for reply in replies],
        proposal.description,
        reduce_group.name,
        reduce_group.number,
    )
    num_parameters = len(proposal.sparse_dims)
    dims = [reply[33 : 33 + num_parameters] for reply in replies]
    order = [number for (number,) in struct.iter_unpack("<I", replies[0][33 + num_parameters :])]
    return order, [max(column) for column in zip(*dims, strict=True)], any(reply[32] for reply in replies)


def check_digests(
    context: Context, digests: Sequence[bytes], description: tuple[str, ...], name: str, process_set: int = 0
) -> None:
    """Raise the same error on every rank unless all digests are equal; collective only if they are not.

    Raises:
        MismatchError: they are not; its details say where each rank first differs from rank 0.
    """
    if all(digest == digests[0] for digest in digests):
        return
    descriptions = allgather_object(context, description, f"{name}.description", process_set)
    details = dict(zip(context.process_sets[process_set], first_differences(descriptions), strict=True))
    raise MismatchError("the ranks have different parameters or options", tensor=name, ranks=(), details=details)


def compute_digest(description: Sequence[str]) -> bytes:
    """32 bytes that differ if the lines do."""
    return hashlib.sha256("\n".join(description).encode()).digest()


def first_differences(descriptions: Sequence[Sequence[str]]) -> list[str]:
    """For each rank, its line at the first place where any rank differs from another."""
    for lines in itertools.zip_longest(*descriptions, fillvalue="(nothing)"):
        if len(set(lines)) > 1:
            return list(lines)
    return ["the same"] * len(descriptions)
