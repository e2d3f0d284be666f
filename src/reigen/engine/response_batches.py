"""Response batches: ready operations as announcements of bounded size. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from reigen.engine.messages import Operation, Response, ResponseList

#: Size of one announcement, roughly; a message of the transport has room for more.
_MAX_BYTES = 48 << 10
#: As many slots fit into one.
MAX_SLOTS = _MAX_BYTES // 9


def build_response_lists(batches: Sequence[Sequence[int | Response]]) -> list[ResponseList]:
    """Batches as announcements of bounded size: a long list is cut between batches, a long batch is cut too."""
    runs: list[ResponseList] = []
    current: list[tuple[int | Response, ...]] = []
    free_bytes = _MAX_BYTES
    for batch in batches:
        part: list[int | Response] = []
        for item in batch:
            nbytes = _max_item_bytes(item)
            if nbytes > free_bytes and (part or current):
                runs.append(ResponseList((*current, tuple(part)) if part else tuple(current)))
                part, current, free_bytes = [], [], _MAX_BYTES
            part.append(item)
            free_bytes -= nbytes
        current.append(tuple(part))
    return [*runs, ResponseList(tuple(current))]


def _max_item_bytes(item: int | Response) -> int:
    """At most so many bytes are needed to tell of a ready operation."""
    if isinstance(item, int):
        return 9
    return (
        64
        + len(item.name.encode())
        + sum(5 + 9 * len(row) for row in item.sizes)
        + (0 if item.template is None else _max_template_bytes(item.template))
        + sum(map(_max_item_bytes, item.members))
    )


def _max_template_bytes(operation: Operation) -> int:
    """At most so many bytes are needed for a template."""
    return (
        96 + len(operation.name.encode()) + 9 * len(operation.shape) + sum(map(_max_template_bytes, operation.members))
    )
