"""Bundles on a server: small keys of one call come in one message, and are added up as one array where they can be.

A message, a decision and an addition for each small key would cost many times what it takes to add them up. Workers
that do the same push the same keys together, round after round. So where all cells of a bundle are about to do nothing
but their next round, all workers are there, and nothing else has come, the bundle waits as a whole for those of the
other workers. Then one addition serves all, and one piece of memory has all answers.

Whatever else happens to one of these cells meanwhile (a push of this key alone, another selection of keys, a worker
that is lost, leaves, or connects again, a deadline) opens the bundles that wait: each key's request is handed to the
desk as if it had come by itself, in the order in which the bundles came. So engines decide everything that is not the
plain case, and what they do not know of is what makes no difference to them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reigen.errors import ArgumentError, WireError
from reigen.kv.cells import Cell, Update
from reigen.kv.consistency import MAX_AHEAD
from reigen.kv.memory import Scratch, Value
from reigen.kv.protocol import DTYPE_NUMBERS, MOST_BUNDLED_BYTES, MOST_BUNDLED_KEYS, Flag, Header, Kind
from reigen.kv.requests import Request
from reigen.kv.sums import Contribution, Sum
from reigen.optim import Optimizer

if TYPE_CHECKING:
    from reigen.kv.stores import Store

#: Selections of keys that are remembered.
_MOST_KNOWN = 256
#: Bytes of a key in front of the elements: its id and its round.
KEY_BYTES = 16
MOST_BYTES = MOST_BUNDLED_KEYS * KEY_BYTES + MOST_BUNDLED_BYTES
_ANSWER_IN_MEMORY = int(Flag.ANSWER_IN_MEMORY)
_OWN_FLAGS = int(Flag.BUNDLE | Flag.IN_MEMORY | Flag.ANSWER_IN_MEMORY | Flag.RESENT)
# As plain numbers, since enumerations are slow.
_PULL, _PUSH = int(Kind.PULL), int(Kind.PUSH)
_NOTHING = np.empty(0, np.uint8)
#: Has a part of a bundle done as if it had come by itself.
Handle = Callable[[Request, NDArray[np.uint8]], None]


@dataclass(eq=False)
class _Round:
    """What has come for one round of a selection.

    Attributes:
        numbers: of the round, for each key.
        came: the bundles with their elements, in the order in which they came.
        pushes: those that push, by worker.
    """

    numbers: list[int]
    came: list[tuple[Request, NDArray[np.uint8]]] = field(default_factory=list)
    pushes: dict[int, Contribution] = field(default_factory=dict)


class Selection:
    """Cells that come together.

    Args:
        cells: of one key each, all of one element type.
        handle: what a part of a bundle that is opened is given to.
    """

    def __init__(self, cells: list[Cell], handle: Handle) -> None:
        self.cells = cells
        self.dtype = cells[0].dtype
        ends = list(itertools.accumulate(cell.length for cell in cells))
        #: which elements are whose
        self.ranges = list(zip([0, *ends], ends, strict=False))
        self.length = ends[-1]
        self.num_bytes = self.length * self.dtype.itemsize
        #: consecutive ones, of which the first is next
        self.rounds: deque[_Round] = deque()
        self._handle = handle

    def round_of(self, numbers: list[int]) -> _Round | None:
        """What has come for a round."""
        return next((one for one in self.rounds if one.numbers == numbers), None)

    def begin(self, numbers: list[int]) -> _Round | None:
        """A round of which nothing has come yet; None: engines have to look at it."""
        if self.rounds:
            last = self.rounds[-1].numbers
            is_next = len(self.rounds) < MAX_AHEAD and [number - 1 for number in numbers] == last
        else:
            is_next = all(cell.is_free_for(number) for cell, number in zip(self.cells, numbers, strict=True))
        if not is_next:
            return None
        if not self.rounds:
            for cell in self.cells:
                cell.waiting = self
        self.rounds.append(_Round(numbers))
        return self.rounds[-1]

    def is_over(self) -> None:
        """The first round is over."""
        self.rounds.popleft()
        if not self.rounds:
            for cell in self.cells:
                cell.waiting = None

    def open(self) -> None:
        """See `reigen.kv.cells.Waiting`."""
        rounds = list(self.rounds)
        self.rounds.clear()
        for cell in self.cells:
            cell.waiting = None
        for one in rounds:
            for request, elements in one.came:
                self.hand_out(request, one.numbers, elements)

    def hand_out(self, request: Request, numbers: list[int], elements: NDArray[np.uint8]) -> None:
        """Have a bundle done key by key."""
        header = request.header
        parts = []
        for place, (cell, number) in enumerate(zip(self.cells, numbers, strict=True), 1):
            about = Header(
                header.kind, header.request + place, cell.key, 0, number, header.flags & _ANSWER_IN_MEMORY,
                header.dtype, store=header.store, priority=header.priority,
            )  # fmt: skip
            parts.append(Request(request.connection, about, request.since, bundle=request, num_holding=1))
        request.parts, request.num_holding = {part.header.request: part for part in parts}, len(parts)
        size = self.dtype.itemsize if len(elements) else 0
        for part, (begin, end) in zip(parts, self.ranges, strict=True):
            self._handle(part, elements[size * begin : size * end])


class Bundles:
    """Takes the bundles of one store.

    Args:
        store: whose cells they are about.
        handle: what a part of a bundle that was opened is given to.
    """

    def __init__(self, store: Store, handle: Handle) -> None:
        self._store = store
        self._handle = handle
        #: by ids and element type
        self._known: dict[tuple[bytes, int], Selection] = {}
        self._num_laid_out = -1

    def take(self, request: Request, body: NDArray[np.uint8]) -> None:
        """A bundle has come.

        Raises:
            WireError: no worker of this version sends that.
            ArgumentError: there is no such key.
        """
        header = request.header
        num_keys = header.cell
        if header.flags & ~_OWN_FLAGS or not 1 <= num_keys <= MOST_BUNDLED_KEYS or len(body) < KEY_BYTES * num_keys:
            raise WireError(f"a bundle of {num_keys} keys in {len(body)} bytes, with flags {header.flags}")
        ids = body[: 8 * num_keys].tobytes()
        numbers: list[int] = body[8 * num_keys : KEY_BYTES * num_keys].view(np.uint64).tolist()
        elements = body[KEY_BYTES * num_keys :]
        selection = self._selection(ids, header.dtype)
        if header.kind != _PULL and min(numbers) < 1:
            raise WireError("a push without a round")
        if len(elements) != (0 if header.kind == _PULL else selection.num_bytes):
            raise WireError(f"{len(elements)} bytes of elements for keys of {selection.num_bytes}")
        if not (self._read if header.kind == _PULL else self._push)(selection, request, numbers, elements):
            selection.hand_out(request, numbers, elements)

    def _selection(self, ids: bytes, dtype: int) -> Selection:
        if self._num_laid_out != self._store.num_laid_out or len(self._known) >= _MOST_KNOWN:
            self._num_laid_out = self._store.num_laid_out
            self._known.clear()
        selection = self._known.get((ids, dtype))
        if selection is None:
            selection = self._known[ids, dtype] = Selection(self._cells(ids, dtype), self._handle)
        return selection

    def _cells(self, ids: bytes, dtype: int) -> list[Cell]:
        keys: list[int] = np.frombuffer(ids, np.uint64).tolist()
        if len(set(keys)) < len(keys):
            raise WireError("a bundle with the same key twice")
        cells = []
        for key in keys:
            cell = self._store.cells.get((key, 0))
            if cell is None:
                raise ArgumentError(
                    f"there is no key {key} on server {self._store.around.server}; it was never initialised, or the "
                    "server has lost it"
                )
            if DTYPE_NUMBERS[cell.facts.dtype] != dtype or not cell.is_whole or cell.facts.stype != "default":
                raise WireError(f"key {cell.facts.name!r} in a bundle of others")
            cells.append(cell)
        if sum(cell.num_bytes for cell in cells) > MOST_BUNDLED_BYTES:
            raise WireError(f"a bundle of more than {MOST_BUNDLED_BYTES} bytes")
        return cells

    # ---- the plain case

    def _push(self, selection: Selection, request: Request, numbers: list[int], elements: NDArray[np.uint8]) -> bool:
        """Have a bundle wait for those of the others, or complete their round; whether that can be done."""
        store, worker = self._store, request.connection.worker
        optimizer = store.settings.optimizer
        if store.around.snapshots is not None or (optimizer is not None and not selection.dtype.is_floating):
            return False
        one = selection.round_of(numbers) or selection.begin(numbers)
        if one is None or worker in one.pushes:
            return False
        one.came.append((request, elements))
        one.pushes[worker] = Contribution(elements.view(selection.dtype.storage))
        while selection.rounds and len(selection.rounds[0].pushes) == store.around.num_workers:
            self._complete(selection, selection.rounds[0])
        return True

    def _complete(self, selection: Selection, one: _Round) -> None:
        """All workers have pushed the first round: add it up, and answer."""
        store, memory = self._store, self._store.around.memory
        parts = [one.pushes[worker] for worker in range(store.around.num_workers)]
        targets = [memory.target(cell.value) for cell in selection.cells]
        total, dtype = memory.new(selection.num_bytes), DTYPE_NUMBERS[selection.dtype.name]
        for cell, number in zip(selection.cells, one.numbers, strict=True):
            cell.engine.together(number)
        selection.is_over()

        at = [selection.cells[0]]

        def done(error: BaseException | None) -> None:
            if error is not None:
                store.fail_all(at[0], error)
                return
            for cell, target, number in zip(selection.cells, targets, one.numbers, strict=True):
                cell.settle(target, memory)
                cell.applied = cell.applied.over((number,) * len(parts))
            for request, _ in one.came:
                request.used(store.around.buffers)
                if request.header.kind == _PUSH:
                    request.connection.answer(request, Kind.DONE)
                else:
                    request.connection.answer_value(request, total, dtype)
            memory.retire(total)

        optimizer = store.settings.optimizer

        def change(scratch: Scratch) -> None:
            for cell in _change(selection, parts, optimizer, targets, total, scratch):
                at[0] = cell

        store.do(selection.cells, change, done, selection.num_bytes * (len(parts) + 1))
        if selection.cells[0].is_busy:
            selection.open()  # later rounds wait for the cells now, not for workers alone

    def _read(self, selection: Selection, request: Request, numbers: list[int], _: NDArray[np.uint8]) -> bool:
        """Answer a bundle of pulls, or have it wait for the round that it is to see; whether that can be done."""
        one = selection.round_of(numbers)
        if one is not None:
            request.used(self._store.around.buffers)
            one.came.append((request, _NOTHING))
            return True
        worker = request.connection.worker
        for cell, number in zip(selection.cells, numbers, strict=True):
            if cell.is_busy or not cell.engine.may_read(worker, number):
                return False
        memory = self._store.around.memory
        total = memory.new(selection.num_bytes)
        out = total.array.view(selection.dtype.storage)
        for cell, (begin, end) in zip(selection.cells, selection.ranges, strict=True):
            out[begin:end] = cell.array
        request.used(self._store.around.buffers)
        request.connection.answer_value(request, total, DTYPE_NUMBERS[selection.dtype.name])
        memory.retire(total)
        return True


def _change(
    selection: Selection,
    parts: Sequence[Contribution],
    optimizer: Optimizer | None,
    targets: Sequence[Value],
    total: Value,
    scratch: Scratch,
) -> Iterator[Cell]:
    """Have the cells' ``targets``, and ``total``, hold what is stored after ``parts``; yields each cell before."""
    storage = selection.dtype.storage
    out = total.array.view(storage)
    if optimizer is None:
        Sum(selection.dtype, selection.length, parts, 1.0, scratch).into(out)
    for cell, target, (begin, end) in zip(selection.cells, targets, selection.ranges, strict=True):
        yield cell
        if optimizer is None:
            target.array.view(storage)[:] = out[begin:end]
        else:
            update = Update([Contribution(part.data[begin:end]) for part in parts])
            cell.change(update, optimizer, target, scratch)
            out[begin:end] = target.array.view(storage)
