"""Batches of a worker: small keys of one call travel in one message to each server; see `reigen.kv.protocol` (l)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from reigen.api.adapter import Array
from reigen.kv.client.key_table import KeyState, RequestFactory
from reigen.kv.client.requests import PUSH_KINDS, BatchRequest, KVOperation
from reigen.kv.client.worker import KVWorker
from reigen.kv.protocol import DTYPE_NUMBERS, MAX_BATCH_BYTES, MAX_BATCH_KEYS, MessageFlag, MessageKind
from reigen.kv.values import DENSE

#: Keys of more bytes travel by themselves: for these, one more copy on the server costs as much as a message.
MAX_BATCHED_KEY_BYTES = 1 << 18


@dataclass(slots=True, eq=False)
class _KeyGroup:
    """What goes to one server in one batch."""

    holdings: list[KeyState] = field(default_factory=list)
    elements: list[Array] = field(default_factory=list)
    outs: list[Array] = field(default_factory=list)
    num_bytes: int = 0


class BatchBuilder:
    """Begins one call for several keys: small ones in batches, which leave when they are full or with `end`.

    Args:
        messages: begins what travels by itself.
        worker: carries the batches.
        kind: PUSH, PULL or PUSHPULL.
        operation: that all of it is part of.
        priority: of that.
        num_keys: of the call.
    """

    def __init__(
        self,
        messages: RequestFactory,
        worker: KVWorker,
        kind: MessageKind,
        operation: KVOperation,
        priority: int,
        num_keys: int,
    ) -> None:
        self._messages, self._worker = messages, worker
        self._kind, self._operation, self._priority = kind, operation, priority
        self._is_single = num_keys == 1
        self._packs: dict[tuple[int, str], _KeyGroup] = {}

    def add(self, held: KeyState, elements: Array | None, out: Array | None) -> None:
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
            num_bytes > MAX_BATCHED_KEY_BYTES
            or len(held.places) != 1
            or spec.stype != DENSE
            or not held.order.is_free(self._kind)
            or (self._messages.codec is not None and spec.dtype.is_floating)
        ):
            self._alone(held, elements, out)
            return
        where = held.places[0].server, spec.dtype.name
        pack = self._packs.get(where)
        if pack is None:
            pack = self._packs[where] = _KeyGroup()
        elif pack.num_bytes + num_bytes > MAX_BATCH_BYTES or len(pack.holdings) == MAX_BATCH_KEYS:
            self._send(pack)
            pack = self._packs[where] = _KeyGroup()
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

    def _alone(self, held: KeyState, elements: Array | None, out: Array | None) -> None:
        if elements is not None:
            self._messages.push(self._operation, held, elements, self._priority, out)
        elif out is not None:
            self._messages.pull(self._operation, held, out, self._priority)

    def _send(self, pack: _KeyGroup) -> None:
        if len(pack.holdings) == 1:
            self._alone(pack.holdings[0], *(each[0] if each else None for each in (pack.elements, pack.outs)))
            return
        first = pack.holdings[0]
        is_push = self._kind in PUSH_KINDS
        numbers = [held.next_round() if is_push else held.last_round() for held in pack.holdings]
        try:
            batch = BatchRequest(
                self._kind, first.places[0].server, self._operation, 0, len(numbers), 0,
                DTYPE_NUMBERS[first.spec.dtype.name], int(MessageFlag.BATCH), self._priority,
                numbers=numbers, outs=pack.outs,
            )  # fmt: skip
            if is_push:
                batch.notes, batch.on_done = [held.note for held in pack.holdings], batch.note
            about = np.array([[held.id for held in pack.holdings], numbers], np.uint64).reshape(-1).view(np.uint8)
            parts = [about, *(each.view(np.uint8) for each in pack.elements)]
            batch.body, batch.block = self._worker.bodies.copy(*parts)
            self._worker.submit([batch], *(held.order for held in pack.holdings))
        except BaseException:
            for held in pack.holdings if is_push else ():
                held.discard_round()
            raise
