"""Which announced operations travel together. Pure."""

from __future__ import annotations

from collections.abc import Sequence

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
    open_batches: dict[object, tuple[list[int], int]] = {}
    for index, (operation, response) in enumerate(ready):
        key = _key(operation, response)
        nbytes = operation.nbytes
        if key is None or not threshold_bytes:
            batches.append([index])
            continue
        members, used = open_batches.get(key, ([], 0))
        if not members or used + nbytes > threshold_bytes:
            members, used = [], 0
            batches.append(members)
        members.append(index)
        open_batches[key] = members, used + nbytes
    return batches


def _key(operation: Operation, response: Response) -> object:
    if operation.kind is not Kind.ALLREDUCE:
        return None
    return operation.dtype, operation.op, operation.prescale, operation.postscale, response.in_place
