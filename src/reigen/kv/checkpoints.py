"""Optimizer states of a store on servers, in the same files as those of local ones: whatever the number of servers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from reigen.errors import ArgumentError
from reigen.kv import states
from reigen.kv.holdings import Holding, Messages
from reigen.kv.operations import Operation, Request
from reigen.kv.protocol import Kind
from reigen.kv.worker import Worker
from reigen.optim import Piece, States

#: The fact of a file that says which optimizer the states are of.
_OPTIMIZER = "optimizer"


def collect(worker: Worker, holdings: Iterable[Holding]) -> States:
    """The states of keys, from all servers.

    Raises:
        CollectiveError: a server does not answer, or what it says makes no sense.
    """
    operation = Operation(worker, "asking for optimizer states")
    asked: list[tuple[Holding, list[Request]]] = []
    for held in holdings:
        requests = [Request(Kind.GET_STATES, place.server, operation, held.id, place.index) for place in held.places]
        worker.submit(requests)
        asked.append((held, requests))
    operation.wait()
    pieces: list[Piece] = []
    facts: dict[str, Any] = {}
    for held, requests in asked:
        parts: list[tuple[int, int, bytes | bytearray | memoryview]] = [
            (place.begin, place.end, request.answer or b"")
            for place, request in zip(held.places, requests, strict=True)
        ]
        known, arrays = states.join(parts)
        if known.optimizer:
            facts[_OPTIMIZER] = known.optimizer
            size, dtype = held.spec.num_elements, held.spec.dtype.name
            pieces.append(Piece(held.name, size, 0, size, dtype, known.updates, known.rate, arrays))
    return States(pieces, None, facts)


def restore(worker: Worker, messages: Messages, holdings: Sequence[Holding], saved: States, optimizer: str) -> None:
    """Give the servers what `collect`, or a local store, has collected.

    Args:
        worker: carries the requests.
        messages: makes them.
        holdings: the keys of the store.
        saved: of whole keys.
        optimizer: the name of the one that the store uses.

    Raises:
        ArgumentError: the states are of another optimizer.
    """
    name = str(saved.facts.get(_OPTIMIZER, optimizer))
    if name != optimizer:
        raise ArgumentError(f"the states are of the optimizer {name!r}, the store uses {optimizer!r}")
    operation = Operation(worker, "loading optimizer states")
    by_name = {held.name: held for held in holdings}
    for piece in saved.pieces:
        held = by_name[piece.key]
        about = states.CellFacts(name, (), piece.count, piece.rate)
        for place in held.places:
            parcel = states.cut(about, piece.arrays, place.begin, place.end)
            body = np.frombuffer(parcel, np.uint8)
            worker.submit([messages.put(Kind.PUT_STATES, operation, held, place, body)])
    operation.wait()
