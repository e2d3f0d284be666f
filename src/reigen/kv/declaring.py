"""How keys come into being on servers: all workers say what they are, rank 0 where their cells lie and what they hold.

The steps stand in `reigen.kv.protocol` (c); those of a worker that takes another's place in (h).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from reigen.config import Config
from reigen.frontends.adapter import Array
from reigen.kv.holdings import Holding, Messages
from reigen.kv.operations import Operation, Request
from reigen.kv.protocol import (
    COUNT_UNKNOWN,
    DECLARE_CODEC,
    DECLARED_CODEC,
    Declare,
    Declared,
    Flag,
    Kind,
    Place,
    pack_counts,
    unpack_counts,
)
from reigen.kv.sharding import Cell, Placer, choose_slice_bytes, home
from reigen.kv.values import ROW_SPARSE
from reigen.kv.worker import Worker

_log = logging.getLogger(__name__)


class Declaring:
    """Declares the keys of one store.

    Args:
        worker: carries the requests.
        messages: makes them.
        config: the knobs.

    Attributes:
        is_whole: keys that are placed from now on are not cut.
    """

    def __init__(self, worker: Worker, messages: Messages, config: Config) -> None:
        self._worker = worker
        self._messages = messages
        self._is_first = worker.member.number == 0
        num_processes = worker.member.num_workers + worker.num_servers
        slice_bytes, reason = choose_slice_bytes(
            config.kv_slice_bytes, worker.server_hosts, num_processes, os.cpu_count() or 1
        )
        if self._is_first:
            _log.info("keys are cut into cells of at most %d bytes (%s)", slice_bytes, reason)
        self._placer = Placer(worker.num_servers, config.kv_bigarray_bound, slice_bytes)
        self.is_whole = False

    def declare(self, holdings: Sequence[Holding], values: Mapping[int, Array]) -> None:
        """Create keys, or take part in what others have created. Returns when they can be used.

        Args:
            holdings: the keys; they learn where their cells are.
            values: (rank 0) by key id, the first values, flat.

        Raises:
            MismatchError: the workers do not mean the same by a key.
            DeadlineError: not all workers came; names them.
        """
        placed = {held.id: self._place(held) for held in holdings} if self._is_first else {}
        answers = self._at_home(holdings, placed)
        for held, answer in zip(holdings, answers, strict=True):
            held.lie(answer.places)
            if self._is_first:
                self._placer.adopt([_cell(held, place) for place in answer.places], held.spec.dtype.itemsize)
        new = [held for held, answer in zip(holdings, answers, strict=True) if not answer.was_initialised]
        if self._is_first and new:
            self._elsewhere(new)
            self._fill(new, values)
            self._at_home(new, {held.id: held.places for held in new}, is_initialised=True)
        self._recover([held for held in holdings if held not in new])

    def _place(self, held: Holding) -> tuple[Place, ...]:
        spec = held.spec
        row_length = spec.row_length if spec.stype == ROW_SPARSE else 1
        cells, _ = self._placer.place(held.id, spec.num_elements, spec.dtype.itemsize, row_length, self.is_whole)
        return tuple(Place(cell.index, cell.begin, cell.end, cell.server) for cell in cells)

    def _at_home(
        self, holdings: Sequence[Holding], placed: Mapping[int, tuple[Place, ...]], *, is_initialised: bool = False
    ) -> list[Declared]:
        requests = []
        operation = Operation(self._worker, f"init of {_listed(holdings)}")
        for held in holdings:
            server = home(held.id, self._worker.num_servers)
            body = _said(held, placed.get(held.id), is_initialised)
            requests.append(Request(Kind.DECLARE, server, operation, held.id, body=body, flags=int(Flag.HOME)))
        self._ask(operation, requests)
        return [DECLARED_CODEC.decode(bytes(each.answer or b"")) for each in requests]

    def _elsewhere(self, holdings: Sequence[Holding]) -> None:
        """Tell the other servers that hold cells."""
        operation = Operation(self._worker, f"init of {_listed(holdings)}")
        requests = []
        for held in holdings:
            at_home = home(held.id, self._worker.num_servers)
            for server in sorted({place.server for place in held.places} - {at_home}):
                body = _said(held, held.places, False)
                requests.append(Request(Kind.DECLARE, server, operation, held.id, body=body))
        self._ask(operation, requests)

    def _fill(self, holdings: Sequence[Holding], values: Mapping[int, Array]) -> None:
        operation = Operation(self._worker, f"init of {_listed(holdings)}")
        for held in holdings:
            for place in held.places:
                part = values[held.id][place.begin : place.end]
                self._worker.submit([self._messages.put(Kind.INIT, operation, held, place, part)])
        operation.wait()

    def _recover(self, holdings: Sequence[Holding]) -> None:
        """Go on where this worker, or the one whose place it takes, had come to."""
        by_server: dict[int, list[tuple[int, int, int]]] = {}
        for held in holdings:
            for place in held.places:
                by_server.setdefault(place.server, []).append((held.id, place.index, COUNT_UNKNOWN))
        requests = self._worker.ask_servers(
            Kind.RESUME, "asking how far this worker had come", lambda server: pack_counts(by_server[server]), by_server
        )
        known = {held.id: held for held in holdings}
        for request in requests:
            for key, cell, count in unpack_counts(request.answer or b""):
                if key in known and cell < len(known[key].done):
                    known[key].done[cell] = count
        for held in holdings:
            held.round = min(held.done, default=0)

    def _ask(self, operation: Operation, requests: Sequence[Request]) -> None:
        if requests:
            self._worker.submit(requests)
            operation.wait()


def _said(held: Holding, places: tuple[Place, ...] | None, is_initialised: bool) -> bytes:
    spec = held.spec
    return DECLARE_CODEC.encode(
        Declare(held.name, spec.shape, spec.dtype.name, spec.stype, places, is_initialised, "", held.generation)
    )


def _cell(held: Holding, place: Place) -> Cell:
    return Cell(held.id, place.index, place.begin, place.end, place.server)


def _listed(holdings: Sequence[Holding]) -> str:
    names = [repr(held.name) for held in holdings[:3]]
    more = f" and {len(holdings) - 3} more" if len(holdings) > 3 else ""
    return f"key {', '.join(names)}{more}" if len(holdings) == 1 else f"keys {', '.join(names)}{more}"
