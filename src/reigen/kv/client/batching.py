"""Batches of a worker: small keys of one call travel in one message to each server (`reigen.kv.protocol`, l)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from reigen.api.adapter import Array
from reigen.kv.client.key_table import KeyState, RequestFactory
from reigen.kv.client.requests import BatchRequest, KVOperation
from reigen.kv.client.worker import KVWorker
from reigen.kv.protocol import (
    DTYPE_NUMBERS,
    MAX_BATCH_BYTES,
    MAX_BATCH_KEYS,
    PUSH_KINDS,
    MessageFlag,
    MessageHeader,
    MessageKind,
)
from reigen.kv.values import DENSE

#: Keys of more bytes travel by themselves: for these, one more copy on the server costs as much as a message.
MAX_BATCHED_KEY_BYTES = 1 << 18


@dataclass(slots=True, eq=False)
class _KeyGroup:
    """Keys that go to one server in one batch."""

    entries: list[KeyState] = field(default_factory=list)
    elements: list[Array] = field(default_factory=list)
    outs: list[Array] = field(default_factory=list)
    num_bytes: int = 0


class BatchBuilder:
    """Begins one call for ``num_keys`` keys: small ones in batches, which leave when they are full or with `end`."""

    def __init__(
        self,
        factory: RequestFactory,
        worker: KVWorker,
        kind: MessageKind,
        operation: KVOperation,
        priority: int,
        num_keys: int,
    ) -> None:
        self._factory, self._worker = factory, worker
        self._kind, self._operation, self._priority = kind, operation, priority
        self._is_single = num_keys == 1
        self._groups: dict[tuple[int, str], _KeyGroup] = {}

    def add(self, entry: KeyState, elements: Array | None, out: Array | None) -> None:
        """Add a key that has not come before, all of its elements.

        Args:
            entry: the key.
            elements: that are pushed, flat; they stay as they are until `end`. None: PULL.
            out: flat memory that receives what is stored. None: PUSH.
        """
        array = out if elements is None else elements
        assert array is not None
        spec, num_bytes = entry.spec, array.nbytes
        if self._is_single or (
            num_bytes > MAX_BATCHED_KEY_BYTES
            or len(entry.places) != 1
            or spec.stype != DENSE
            or not entry.order.is_free(self._kind)
            or (self._factory.codec is not None and spec.dtype.is_floating)
        ):
            self._alone(entry, elements, out)
            return
        where = entry.places[0].server, spec.dtype.name
        group = self._groups.get(where)
        if group is None:
            group = self._groups[where] = _KeyGroup()
        elif group.num_bytes + num_bytes > MAX_BATCH_BYTES or len(group.entries) == MAX_BATCH_KEYS:
            self._send(group)
            group = self._groups[where] = _KeyGroup()
        group.entries.append(entry)
        group.num_bytes += num_bytes
        if elements is not None:
            group.elements.append(elements)
        if out is not None:
            group.outs.append(out)

    def end(self) -> None:
        """Send the last batches."""
        for group in self._groups.values():
            self._send(group)

    def _alone(self, entry: KeyState, elements: Array | None, out: Array | None) -> None:
        if elements is not None:
            self._factory.push(self._operation, entry, elements, self._priority, out)
        elif out is not None:
            self._factory.pull(self._operation, entry, out, self._priority)

    def _send(self, group: _KeyGroup) -> None:
        if len(group.entries) == 1:
            self._alone(group.entries[0], *(each[0] if each else None for each in (group.elements, group.outs)))
            return
        first = group.entries[0]
        is_push = self._kind in PUSH_KINDS
        numbers = [entry.next_round() if is_push else entry.last_round() for entry in group.entries]
        try:
            header = MessageHeader(
                self._kind, shard=len(numbers), flags=int(MessageFlag.BATCH),
                dtype=DTYPE_NUMBERS[first.spec.dtype.name], priority=self._priority,
            )  # fmt: skip
            notes = [entry.note for entry in group.entries] if is_push else []
            batch = BatchRequest(
                header, first.places[0].server, self._operation, numbers=numbers, notes=notes, outs=group.outs
            )
            about = np.array([[entry.id for entry in group.entries], numbers], np.uint64).reshape(-1).view(np.uint8)
            parts = [about, *(each.view(np.uint8) for each in group.elements)]
            batch.body, batch.block = self._worker.bodies.copy(*parts)
            self._worker.submit([batch], *(entry.order for entry in group.entries))
        except BaseException:
            for entry in group.entries if is_push else ():
                entry.discard_round()
            raise
