"""Optimizer states of a store on servers, in the same files as those of local ones, whatever the number of servers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from reigen.errors import ArgumentError, ConfigError, WireError
from reigen.kv.client.key_table import KeyState, RequestFactory
from reigen.kv.client.requests import ClientRequest, KVOperation
from reigen.kv.client.worker import KVWorker
from reigen.kv.protocol import MessageHeader, MessageKind
from reigen.kv.server.shard import OPTIMIZER_FACT
from reigen.optim import Piece, States


def collect_states(worker: KVWorker, entries: Iterable[KeyState]) -> States:
    """Collect the states of keys from all servers.

    Raises:
        CollectiveError: a server does not answer, or its answer makes no sense.
    """
    operation = KVOperation(worker.wait_for, "asking for optimizer states")
    asked: list[tuple[KeyState, list[ClientRequest]]] = []
    for entry in entries:
        headers = [MessageHeader(MessageKind.GET_STATES, key=entry.id, shard=place.index) for place in entry.places]
        requests = [
            ClientRequest(header, place.server, operation) for header, place in zip(headers, entry.places, strict=True)
        ]
        worker.submit(requests)
        asked.append((entry, requests))
    operation.wait()
    pieces: list[Piece] = []
    facts: dict[str, Any] = {}
    for entry, requests in asked:
        try:
            of_key = States(()).merged(States.from_bytes(request.answer or b"") for request in requests)
            size, dtype = entry.spec.num_elements, entry.spec.dtype.name
            if {(piece.key, piece.num_elements, piece.dtype) for piece in of_key.pieces} - {(entry.name, size, dtype)}:
                raise ConfigError("they are of something else")
            if of_key.pieces:
                pieces.append(of_key.cut(entry.name, 0, size))
        except ConfigError as error:
            raise WireError(f"the states of key {entry.name!r} from the servers make no sense: {error}") from None
        facts.update(of_key.facts)
    return States(pieces, None, facts)


def restore_states(
    worker: KVWorker, factory: RequestFactory, entries: Sequence[KeyState], saved: States, optimizer: str
) -> None:
    """Give the servers states of whole keys, of `collect_states` or a local store.

    Raises:
        ArgumentError: the states are not of ``optimizer``, which the store uses.
    """
    name = str(saved.facts.get(OPTIMIZER_FACT, optimizer))
    if name != optimizer:
        raise ArgumentError(f"the states are of the optimizer {name!r}, the store uses {optimizer!r}")
    operation = KVOperation(worker.wait_for, "loading optimizer states")
    by_name = {entry.name: entry for entry in entries}
    for piece in saved.pieces:
        entry = by_name[piece.key]
        for place in entry.places:
            part = States([piece.part(place.begin, place.end)], None, {OPTIMIZER_FACT: name})
            body = np.frombuffer(part.to_bytes(), np.uint8)
            worker.submit([factory.put(MessageKind.PUT_STATES, operation, entry, place, body)])
    operation.wait()
