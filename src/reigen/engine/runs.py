"""What became ready, as announcements of bounded size. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from reigen.engine.messages import Operation, Response, Run

#: Size of one announcement, roughly; a message of the transport has room for more.
_MOST_BYTES = 48 << 10
#: As many slots fit into one.
MOST_SLOTS = _MOST_BYTES // 9


def runs(batches: Sequence[Sequence[int | Response]]) -> list[Run]:
    """Batches as announcements of bounded size: a long list is cut between batches, a long batch is cut too."""
    runs: list[Run] = []
    current: list[tuple[int | Response, ...]] = []
    room = _MOST_BYTES
    for batch in batches:
        part: list[int | Response] = []
        for item in batch:
            nbytes = _most_bytes(item)
            if nbytes > room and (part or current):
                runs.append(Run((*current, tuple(part)) if part else tuple(current)))
                part, current, room = [], [], _MOST_BYTES
            part.append(item)
            room -= nbytes
        current.append(tuple(part))
    return [*runs, Run(tuple(current))]


def _most_bytes(item: int | Response) -> int:
    """At most so many bytes are needed to tell of a ready operation."""
    if isinstance(item, int):
        return 9
    return (
        64
        + len(item.name.encode())
        + sum(5 + 9 * len(row) for row in item.sizes)
        + (0 if item.template is None else _most_bytes_of(item.template))
        + sum(map(_most_bytes, item.members))
    )


def _most_bytes_of(operation: Operation) -> int:
    """At most so many bytes are needed for a template."""
    return 96 + len(operation.name.encode()) + 9 * len(operation.shape) + sum(map(_most_bytes_of, operation.members))
