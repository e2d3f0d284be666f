"""What each kind of request does to a store: where its body lands, what is checked, what then happens to a cell."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from reigen.errors import ArgumentError, ReigenError, UnsupportedError, UnsupportedTypeError, WireError
from reigen.kv.bundles import MOST_BYTES, Bundles
from reigen.kv.cells import Cell, KeyFacts
from reigen.kv.events import Event, PullWanted, Pushed, Recovered, Resumed, Returned
from reigen.kv.protocol import (
    COMMAND_CODEC,
    CONTROL_KINDS,
    COUNT_UNKNOWN,
    DECLARE_CODEC,
    DTYPE_NUMBERS,
    MAX_CONTROL_BYTES,
    Flag,
    Header,
    Kind,
    Place,
    pack_counts,
    unpack_counts,
)
from reigen.kv.requests import Connection, Reading, Request
from reigen.kv.stores import Store
from reigen.kv.sums import Contribution
from reigen.types import dtype_named

# As plain numbers: each request is compared with them, and enumerations are slow.
_ENCODED, _RELEASE, _QUERY, _PUSHPULL = int(Flag.ENCODED), int(Kind.RELEASE), int(Kind.QUERY), int(Kind.PUSHPULL)
_BUNDLE, _BUNDLED = int(Flag.BUNDLE), frozenset({int(Kind.PUSH), int(Kind.PUSHPULL), int(Kind.PULL)})
_PUSHES = frozenset({int(Kind.PUSH), int(Kind.PUSHPULL), int(Kind.ROW_PUSH)})
#: The largest body for a cell that is not here: it is read, and answered with an error.
_MOST_LOST_BYTES = 1 << 28
_NOTHING = np.empty(0, np.uint8)


class Desk:
    """Takes the requests of a store's workers.

    Args:
        store: what they are about.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._bundles = Bundles(store, lambda part, body: self._handle(self._handlers[part.header.kind], part, body))
        self._handlers: dict[int, Callable[[Request, NDArray[np.uint8]], None]] = {
            Kind.DECLARE: self._declare,
            Kind.INIT: self._init,
            Kind.PUSH: self._push,
            Kind.PUSHPULL: self._push,
            Kind.ROW_PUSH: self._push,
            Kind.PULL: self._pull,
            Kind.ROW_PULL: self._pull,
            Kind.COMMAND: self._command,
            Kind.RESUME: self._resume,
            Kind.GET_STATES: self._get_states,
            Kind.PUT_STATES: self._put_states,
            Kind.GOODBYE: self._goodbye,
        }

    def place(self, header: Header) -> NDArray[np.uint8]:
        """Where the body of a request is to land.

        Raises:
            WireError: it has a length that no such request has.
        """
        if header.kind in CONTROL_KINDS:
            return np.empty(header.body_bytes, np.uint8)
        cell = None if header.flags & _BUNDLE else self.store.cells.get((header.key, header.cell))
        # nearly all bodies are as long as the value, and none may not be
        if cell is None or header.body_bytes > cell.num_bytes:
            most = self._most_bytes(header, cell)
            if header.body_bytes > most:
                raise WireError(f"a {Kind(header.kind).name} of {header.body_bytes} bytes; at most {most} are expected")
        return self.store.around.buffers.take(header.body_bytes)

    def arrived(self, connection: Connection, header: Header, received: NDArray[np.uint8]) -> None:
        """A request is there; it is answered now or later.

        Raises:
            WireError: no worker of this version sends that.
        """
        if header.kind == _RELEASE:
            for request in np.frombuffer(received, np.uint64) if len(received) % 8 == 0 else ():
                connection.release(int(request))
            return
        if header.kind == _QUERY:
            self._query(connection, header)
            return
        handler = self._handlers.get(header.kind)
        if header.flags & _BUNDLE:
            handler = self._bundles.take if header.kind in _BUNDLED else None
        if handler is None or not header.request:
            raise WireError(f"a {Kind(header.kind).name} with the id {header.request}, which no worker sends")
        if connection.is_busy_with(header.request):  # sent again
            if self.store.around.acknowledges:
                self._received(connection, header)
            return
        request = Request(connection, header, time.monotonic())
        connection.open_requests[header.request] = request
        if header.kind not in CONTROL_KINDS and header.body_bytes:
            request.buffer = received
            connection.num_held_bytes += received.nbytes
        self._handle(handler, request, connection.body_of(header, received))
        if not request.is_answered and self.store.around.acknowledges:
            self._received(connection, header)

    def _handle(
        self, handler: Callable[[Request, NDArray[np.uint8]], None], request: Request, body: NDArray[np.uint8]
    ) -> None:
        store, connection = self.store, request.connection
        if store.broken is not None:
            connection.fail(request, store.broken)
            return
        try:
            handler(request, body)
        except WireError:
            raise
        except ReigenError as error:
            request.used(store.around.buffers)
            name = None if request.cell is None else request.cell.facts.name
            connection.refuse(request, error, name)

    def _received(self, connection: Connection, header: Header, *, flags: int = 0) -> None:
        kind = header.about if header.kind == Kind.QUERY else header.kind
        connection.send(
            Header(
                Kind.RECEIVED, header.request, header.key, header.cell, header.round, flags, about=kind,
                store=connection.store,
            )
        )  # fmt: skip

    def _query(self, connection: Connection, header: Header) -> None:
        """Step g: what has become of a request whose body shall not travel again."""
        if connection.is_busy_with(header.request):
            self._received(connection, header)
            return
        cell = self.store.cells.get((header.key, header.cell))
        is_over = header.about in _PUSHES and cell is not None and header.round <= cell.engine.done(connection.worker)
        if header.flags & _BUNDLE or (not is_over and header.about != Kind.PULL):
            self._received(connection, header, flags=int(Flag.UNKNOWN))
            return
        # a push that is over is not applied again, so that its body does not matter
        again = Header(
            header.about, header.request, header.key, header.cell, header.round, header.flags & ~Flag.IN_MEMORY,
            header.dtype, store=header.store, priority=header.priority,
        )  # fmt: skip
        request = Request(connection, again, time.monotonic())
        connection.open_requests[again.request] = request
        self._handle(self._push_again if is_over else self._pull, request, _NOTHING)

    # ---- keys and settings

    def _declare(self, request: Request, body: NDArray[np.uint8]) -> None:
        self._check_aborted(request)
        self.store.declarations.declare(request, DECLARE_CODEC.decode(body.tobytes()))

    def _command(self, request: Request, body: NDArray[np.uint8]) -> None:
        self._check_aborted(request)
        self.store.settings.command(request, COMMAND_CODEC.decode(body.tobytes()))

    def _init(self, request: Request, body: NDArray[np.uint8]) -> None:
        self._check_aborted(request)
        store, header = self.store, request.header
        cell_id = header.key, header.cell
        planned = store.planned.get(cell_id)
        if planned is not None:
            if len(body) != (num_bytes := _num_bytes(*planned)):  # before there is memory for it
                raise WireError(f"{len(body)} bytes for the first value of a cell of {num_bytes}")
            cell = store.new_cell(header.key, *planned)
            cell.write(body)
            store.add(cell)
        elif cell_id not in store.cells:
            raise ArgumentError(f"cell {header.cell} was never declared on server {store.around.server}")
        request.used(store.around.buffers)
        # once it is in a snapshot, if there are any
        store.then(store.cells[cell_id], lambda: request.connection.answer(request, Kind.DONE))

    def _goodbye(self, request: Request, _: NDArray[np.uint8]) -> None:
        self.store.said_goodbye(request)

    def _resume(self, request: Request, body: NDArray[np.uint8]) -> None:
        """Step h."""
        worker, counts = request.connection.worker, []
        for key, index, count in unpack_counts(body.data):
            cell = self.store.cells.get((key, index))
            if cell is None:
                continue
            event = Returned(worker) if count == COUNT_UNKNOWN else Resumed(worker, count)
            told = [one.round for one in self.store.happen(cell, event) if isinstance(one, Recovered)]
            counts.append((key, index, told[0] if told else cell.engine.done(worker)))
        request.connection.answer(request, Kind.DONE, pack_counts(counts))

    # ---- values

    def _push(self, request: Request, body: NDArray[np.uint8]) -> None:
        cell = self._cell_of(request)
        self._check_can_be_pushed(cell)
        if request.header.round < 1:
            raise WireError("a push without a round")
        request.contribution = self._contribution(cell, request.header, body)
        self._pushed(request, cell, request.connection.worker)

    def _push_again(self, request: Request, _: NDArray[np.uint8]) -> None:
        self._pushed(request, self._cell_of(request), request.connection.worker)

    def _pushed(self, request: Request, cell: Cell, worker: int) -> None:
        round_ = request.header.round
        events: list[Event] = [Pushed(worker, round_, request)]
        if request.header.kind == _PUSHPULL:
            request.reading = Reading(request)
            events.append(PullWanted(worker, round_, request.reading))
        self.store.happen(cell, *events)

    def _pull(self, request: Request, body: NDArray[np.uint8]) -> None:
        cell = self._cell_of(request)
        if request.header.kind == Kind.ROW_PULL:
            request.numbers = self._row_numbers(cell, body).copy()
        request.used(self.store.around.buffers)
        self.store.happen(cell, PullWanted(request.connection.worker, request.header.round, request))

    def _get_states(self, request: Request, _: NDArray[np.uint8]) -> None:
        cell = self._cell_of(request)

        def answer() -> None:
            request.connection.answer(request, Kind.VALUE, cell.pack_states(self.store.settings.optimizer))

        self.store.then(cell, answer)

    def _put_states(self, request: Request, body: NDArray[np.uint8]) -> None:
        cell = self._cell_of(request)

        def take() -> None:
            try:
                cell.put_states(body, self.store.settings.optimizer)
            except ReigenError as error:
                request.connection.refuse(request, error, cell.facts.name)
            request.used(self.store.around.buffers)
            request.connection.answer(request, Kind.DONE)

        self.store.then(cell, take)

    # ---- checks

    def _check_aborted(self, request: Request) -> None:
        if self.store.aborted is not None:
            raise self.store.aborted.raised()

    def _check_can_be_pushed(self, cell: Cell) -> None:
        optimizer = self.store.settings.optimizer
        if optimizer is None and not cell.engine.is_synchronous:
            raise UnsupportedError(
                "without an optimizer a push takes the place of what was stored, which makes no sense where workers "
                "are not synchronous; call set_optimizer() before"
            )
        if optimizer is not None and not cell.dtype.is_floating:
            raise UnsupportedTypeError(f"an optimizer cannot update {cell.dtype.name} values; use a floating type")
        if optimizer is not None and not optimizer.is_elementwise and not cell.is_whole:
            raise ArgumentError(
                f"{optimizer.name} needs the whole value, and this key is cut into cells; call set_optimizer() "
                "before init()"
            )

    def _cell_of(self, request: Request) -> Cell:
        header = request.header
        cell = self.store.cells.get((header.key, header.cell))
        if cell is None:
            if (header.key, header.cell) in self.store.planned:
                raise ArgumentError(f"key {self.store.planned[header.key, header.cell][0].name!r} has no value yet")
            raise ArgumentError(
                f"there is no cell {header.cell} of a key {header.key} on server {self.store.around.server}; "
                "it was never initialised, or the server has lost it"
            )
        if header.dtype and header.dtype != DTYPE_NUMBERS[cell.facts.dtype]:
            raise WireError(f"elements of another type than those of key {cell.facts.name!r}")
        request.cell = cell
        return cell

    def _contribution(self, cell: Cell, header: Header, body: NDArray[np.uint8]) -> Contribution:
        if header.kind == Kind.ROW_PUSH:
            num_rows = self._num_rows(cell, len(body))
            numbers = self._row_numbers(cell, body[: 8 * num_rows])
            return Contribution(body[8 * num_rows :].view(cell.dtype.storage), rows=numbers)
        if header.flags & _ENCODED:
            codec = self.store.settings.codec
            if codec is None or not cell.dtype.is_floating:
                raise WireError(f"codes for key {cell.facts.name!r}, whose gradients are not compressed")
            codec.check(body, cell.length)
            return Contribution(body, codec)
        if len(body) != cell.num_bytes:
            raise WireError(f"a push of {len(body)} bytes to a cell of {cell.num_bytes}")
        return Contribution(body.view(cell.dtype.storage))

    def _num_rows(self, cell: Cell, num_bytes: int) -> int:
        num_rows, rest = divmod(num_bytes, 8 + cell.row_length * cell.dtype.itemsize)
        if rest or num_rows > cell.num_rows:
            raise WireError(f"{num_bytes} bytes of rows for a cell of {cell.num_rows}")
        return num_rows

    def _row_numbers(self, cell: Cell, body: NDArray[np.uint8]) -> NDArray[np.int64]:
        if cell.facts.stype != "row_sparse" or len(body) % 8:
            raise WireError(f"rows of key {cell.facts.name!r}, which is {cell.facts.stype}, in {len(body)} bytes")
        numbers = body.view(np.int64)
        if len(numbers) and (numbers[0] < 0 or numbers[-1] >= cell.num_rows or (np.diff(numbers) <= 0).any()):
            raise WireError(f"rows that are not ascending, or not below {cell.num_rows}")
        return numbers

    def _most_bytes(self, header: Header, cell: Cell | None) -> int:
        """How long the body of a request may be."""
        if header.flags & _BUNDLE:
            return MOST_BYTES
        if cell is None:
            planned = self.store.planned.get((header.key, header.cell))
            return max(0 if planned is None else _num_bytes(*planned), _MOST_LOST_BYTES)
        if header.kind in {Kind.ROW_PUSH, Kind.ROW_PULL}:
            return cell.num_bytes + 8 * cell.num_rows
        if header.kind == Kind.PUT_STATES:
            return 16 * max(8, cell.dtype.itemsize) * cell.length + MAX_CONTROL_BYTES
        codec = self.store.settings.codec
        return max(cell.num_bytes, 0 if codec is None else codec.max_bytes(cell.length))


def _num_bytes(facts: KeyFacts, place: Place) -> int:
    """How long the value of a cell is."""
    return (place.end - place.begin) * dtype_named(facts.dtype).itemsize
