"""Which announced operations travel together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reigen.engine.messages import Kind, Operation, Response


def plan(ready: Sequence[tuple[Operation, Response]], threshold_bytes: int) -> list[list[int]]:
    """Group ready operations into batches.

    Allreduces of one dtype, operator and scale travel together up to ``threshold_bytes``; one that does not fit does
    not end the batch: the search goes on behind it. Everything else travels alone. A batch stands where its first
    member stood.

    Args:
        ready: operations of any one rank with what was agreed, in the order in which they became ready.
        threshold_bytes: size of a batch; 0 turns fusion off. A larger tensor travels alone.

    Returns:
        Batches of indices into ``ready``; every index once.
    """
    batches: list[list[int]] = []
    open_batches: dict[object, list[_Open]] = {}
    for index, (operation, response) in enumerate(ready):
        key = _key(operation, response)
        nbytes = operation.nbytes
        if key is None or nbytes >= threshold_bytes:
            batches.append([index])
            continue
        same = open_batches.setdefault(key, [])
        batch = next((b for b in same if nbytes <= b.room), None)
        if batch is None:
            batch = _Open([], threshold_bytes)
            batches.append(batch.members)
            same.append(batch)
            del same[:-_MOST_OPEN]
        batch.members.append(index)
        batch.room -= nbytes
    return batches


#: Batches with room that are kept open; bounds the search.
_MOST_OPEN = 8


@dataclass(slots=True)
class _Open:
    members: list[int]
    room: int


def _key(operation: Operation, response: Response) -> object:
    if operation.kind is not Kind.ALLREDUCE:
        return None
    return operation.dtype, operation.op, operation.prescale, operation.postscale, response.in_place
