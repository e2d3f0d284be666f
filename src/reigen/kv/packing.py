"""Bundles of a worker: small keys of one call travel in one message to each server; see `reigen.kv.protocol` (l)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from reigen.frontends.adapter import Array
from reigen.kv.holdings import Holding, Messages
from reigen.kv.operations import WRITING, Bundle, Operation
from reigen.kv.protocol import DTYPE_NUMBERS, MOST_BUNDLED_BYTES, MOST_BUNDLED_KEYS, Flag, Kind
from reigen.kv.values import DENSE
from reigen.kv.worker import Worker

#: Keys of more bytes travel by themselves: for these, one more copy on the server costs as much as a message.
SMALL_BYTES = 1 << 18


@dataclass(slots=True, eq=False)
class _Pack:
    """What goes to one server in one bundle."""

    holdings: list[Holding] = field(default_factory=list)
    elements: list[Array] = field(default_factory=list)
    outs: list[Array] = field(default_factory=list)
    num_bytes: int = 0


class Packing:
    """Begins one call for several keys: small ones in bundles, which leave when they are full or with `end`.

    Args:
        messages: begins what travels by itself.
        worker: carries the bundles.
        kind: PUSH, PULL or PUSHPULL.
        operation: that all of it is part of.
        priority: of that.
        num_keys: of the call.
    """

    def __init__(
        self, messages: Messages, worker: Worker, kind: Kind, operation: Operation, priority: int, num_keys: int
    ) -> None:
        self._messages, self._worker = messages, worker
        self._kind, self._operation, self._priority = kind, operation, priority
        self._is_single = num_keys == 1
        self._packs: dict[tuple[int, str], _Pack] = {}

    def add(self, held: Holding, elements: Array | None, out: Array | None) -> None:
        """One more key, which has not come before.

        Args:
            held: the key; all of its elements are meant.
            elements: that are pushed, flat; they stay as they are until `end`. None: PULL.
            out: flat memory that receives what is stored. None: PUSH.
        """
        array = out if elements is None else elements
        assert array is not None
        spec, num_bytes = held.spec, array.nbytes
        if self._is_single or (
            num_bytes > SMALL_BYTES
            or len(held.places) != 1
            or spec.stype != DENSE
            or not held.track.is_free(self._kind)
            or (self._messages.codec is not None and spec.dtype.is_floating)
        ):
            self._alone(held, elements, out)
            return
        where = held.places[0].server, spec.dtype.name
        pack = self._packs.get(where)
        if pack is None:
            pack = self._packs[where] = _Pack()
        elif pack.num_bytes + num_bytes > MOST_BUNDLED_BYTES or len(pack.holdings) == MOST_BUNDLED_KEYS:
            self._send(pack)
            pack = self._packs[where] = _Pack()
        pack.holdings.append(held)
        pack.num_bytes += num_bytes
        if elements is not None:
            pack.elements.append(elements)
        if out is not None:
            pack.outs.append(out)

    def end(self) -> None:
        """There are no more keys."""
        for pack in self._packs.values():
            self._send(pack)

    def _alone(self, held: Holding, elements: Array | None, out: Array | None) -> None:
        if elements is not None:
            self._messages.push(self._operation, held, elements, self._priority, out)
        elif out is not None:
            self._messages.pull(self._operation, held, out, self._priority)

    def _send(self, pack: _Pack) -> None:
        if len(pack.holdings) == 1:
            self._alone(pack.holdings[0], *(each[0] if each else None for each in (pack.elements, pack.outs)))
            return
        first = pack.holdings[0]
        is_push = self._kind in WRITING
        numbers = [held.next_round() if is_push else held.last_round() for held in pack.holdings]
        try:
            bundle = Bundle(
                self._kind, first.places[0].server, self._operation, 0, len(numbers), 0,
                DTYPE_NUMBERS[first.spec.dtype.name], int(Flag.BUNDLE), self._priority, numbers=numbers, outs=pack.outs,
            )  # fmt: skip
            if is_push:
                bundle.notes, bundle.on_done = [held.note for held in pack.holdings], bundle.note
            about = np.array([[held.id for held in pack.holdings], numbers], np.uint64).reshape(-1).view(np.uint8)
            parts = [about, *(each.view(np.uint8) for each in pack.elements)]
            bundle.body, bundle.block = self._worker.bodies.copy(*parts)
            self._worker.submit([bundle], *(held.track for held in pack.holdings))
        except BaseException:
            for held in pack.holdings if is_push else ():
                held.not_pushed()
            raise
