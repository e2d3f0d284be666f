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
        requests = [
            ClientRequest(
                MessageHeader(MessageKind.GET_STATES, key=entry.id, shard=place.index), place.server, operation
            )
            for place in entry.places
        ]
        worker.submit(requests)
        asked.append((entry, requests))
    operation.wait()
    pieces: list[Piece] = []
    facts: dict[str, Any] = {}
    for entry, requests in asked:
        try:
            of_key = States(()).merged(States.from_bytes(request.answer or b"") for request in requests)
            if of_key.pieces:
                pieces.append(_merge_shard_states(entry, of_key))
        except ConfigError as error:
            raise WireError(f"the states of key {entry.name!r} from the servers make no sense: {error}") from None
        facts.update(of_key.facts)
    return States(pieces, None, facts)


def _merge_shard_states(entry: KeyState, states: States) -> Piece:
    """Put together the states of a key's shards."""
    size, dtype = entry.spec.num_elements, entry.spec.dtype.name
    if states.keys != (entry.name,) or {(piece.num_elements, piece.dtype) for piece in states.pieces} != {
        (size, dtype)
    }:
        raise ConfigError("they are of something else")
    return states.cut(entry.name, 0, size)


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
