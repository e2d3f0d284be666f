"""Fusion: groups of announced operations that travel together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reigen.engine.messages import Operation, OperationKind, Response


def fuse_responses(
    ready: Sequence[tuple[Operation, Response]], threshold_bytes: int, *, fuse_groups: bool = True
) -> list[list[int]]:
    """Group ready operations into batches.

    Allreduces of one process set, device, dtype, operator and scale travel together up to ``threshold_bytes``; one that
    does not fit does not end the batch: the search goes on behind it. Everything else travels alone. A batch stands
    where its first member stood. A group whose members are alike counts as one tensor of their size: it is never
    divided.

    Args:
        ready: operations of any one rank with what was agreed, in the order in which they became ready.
        threshold_bytes: size of a batch; 0 turns fusion off. A larger tensor travels alone.
        fuse_groups: whether a group may travel with other tensors.

    Returns:
        Batches of indices into ``ready``; every index once.
    """
    batches: list[list[int]] = []
    open_batches: dict[object, list[_OpenBatch]] = {}
    for index, (operation, response) in enumerate(ready):
        key = _fusion_key(operation, response, fuse_groups)
        nbytes = operation.nbytes
        if key is None or nbytes >= threshold_bytes:
            batches.append([index])
            continue
        same = open_batches.setdefault(key, [])
        batch = next((b for b in same if nbytes <= b.free_bytes), None)
        if batch is None:
            batch = _OpenBatch([], threshold_bytes)
            batches.append(batch.members)
            same.append(batch)
            del same[:-_MAX_OPEN_BATCHES]
        batch.members.append(index)
        batch.free_bytes -= nbytes
    return batches


#: Batches with room that are kept open; bounds the search.
_MAX_OPEN_BATCHES = 8


@dataclass(slots=True)
class _OpenBatch:
    members: list[int]
    free_bytes: int


def _fusion_key(operation: Operation, response: Response, fuse_groups: bool) -> object:
    if operation.kind is not OperationKind.ALLREDUCE or (operation.members and not fuse_groups):
        return None
    keys = {
        (part.dtype, part.op, part.prescale, part.postscale, part.divide_by_active, agreed.in_place)
        for part, agreed in zip(operation.parts, response.parts, strict=True)
    }
    return (operation.process_set, operation.device, response.num_active, *keys) if len(keys) == 1 else None
