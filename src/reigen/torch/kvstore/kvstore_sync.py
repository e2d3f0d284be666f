"""A Trainer's parameters in a store: gradients go there, and sums or weights come back."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from reigen import config
from reigen.kv.store import KVStore, Pending
from reigen.kv.update_on_kvstore import (
    StoreKind,
    UpdateLocation,
    UpdateRequirements,
    choose_update_location,
    store_kind,
)
from reigen.kv.values import RowSparse
from reigen.torch.kvstore.trainer_params import ROW_SPARSE, TrainerParam


class KVStoreSync:
    """All parameters of a Trainer in one store: a `KVStore`, or something with its ``init``, ``pull`` and ``pushpull``.

    Those ``entries`` come back first which the next forward pass needs first. ``on_store``: it updates the weights.
    """

    def __init__(self, store: Any, kind: StoreKind, entries: Sequence[TrainerParam], *, on_store: bool) -> None:
        self.store = store
        self.kind = kind
        self._entries = entries
        self.on_store = on_store
        self._initialised: set[int] = set()
        #: parameters of which the store holds more pushes than steps of the worker whose place this one takes
        self._ahead: dict[int, int] = {}

    @property
    def has_servers(self) -> bool:
        """Return whether the values lie in other processes, which go on when this worker stops."""
        return self.kind in {StoreKind.SYNCHRONOUS, StoreKind.ASYNCHRONOUS}

    @property
    def counts_workers(self) -> bool:
        """Return whether other workers wait for this one's part of a round."""
        return not (self.on_store and getattr(self.store, "staleness", 0) == math.inf)

    def begin(self) -> None:
        """Collective: put every parameter that has a shape by now into the store, and take worker 0's weights."""
        new = [
            index
            for index, entry in enumerate(self._entries)
            if index not in self._initialised and not entry.is_deferred
        ]
        if not new:
            return
        self._initialised.update(new)
        if self.kind is StoreKind.CUSTOM:
            for index in new:
                entry = self._entries[index]
                self.store.broadcast(entry.key, entry.parameter, [entry.parameter])
            return
        self.store.init([self._entries[index].key for index in new], [self._first_value(index) for index in new])
        self._pull(new)

    def resume(self) -> int:
        """Return the number of steps of the worker that this one replaces; 0 where it replaces none.

        One that was lost in the middle of a step has pushed some of its keys: `update` does not push those again.
        """
        if not getattr(self.store, "is_recovery", False):
            return 0
        trained = [index for index in self._initialised if self._entries[index].parameter.requires_grad]
        rounds = {index: int(self.store.rounds(self._entries[index].key)) for index in trained}
        steps = min(rounds.values(), default=0)
        self._ahead = {index: count - steps for index, count in rounds.items() if count > steps}
        return steps

    def refresh(self) -> None:
        """All weights as the store has them now."""
        self._pull(sorted(self._initialised))

    def update(self, gradients: Sequence[tuple[int, torch.Tensor | None]]) -> None:
        """Have the store update the weights, and take them; a parameter without a gradient is only taken."""
        pending: list[Pending] = []
        dense: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for index, gradient in gradients:
            entry = self._entries[index]
            given = None if self._is_ahead(index) else gradient
            if given is not None and not self._is_sparse(entry):
                dense.append((index, given, entry.parameter))
                continue
            if given is not None:
                self.store.push(entry.key, given, priority=-index)
            if entry.stype != ROW_SPARSE:
                pending.append(self.store.pull(entry.key, out=entry.parameter, priority=-index, wait=False))
        self._pushpull(dense)
        for each in pending:
            each.wait()

    def sum(self, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """The gradients become the sums over all workers, in place."""
        self._pushpull([(index, gradient, gradient) for index, gradient in gradients])

    def pull_rows(self, entry: TrainerParam, rows: torch.Tensor) -> None:
        """Some rows of a parameter as the store has them now."""
        received = RowSparse.empty(entry.parameter.detach())
        self.store.row_sparse_pull(entry.key, out=received, row_ids=rows)
        with torch.no_grad():
            entry.parameter[received.indices] = received.values

    def _is_ahead(self, index: int) -> bool:
        ahead = self._ahead.pop(index, 0)
        if ahead > 1:
            self._ahead[index] = ahead - 1
        return ahead > 0

    def _is_sparse(self, entry: TrainerParam) -> bool:
        return self.on_store and entry.has_sparse_rows

    def _first_value(self, index: int) -> Any:
        entry = self._entries[index]
        value = entry.parameter.detach()
        if not self._is_sparse(entry):
            return value
        return RowSparse(torch.arange(len(value)), value, tuple(value.shape))

    def _pushpull(self, several: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Push, and fill the last of each: in the parameters' order, and in one call, which this thread then drives."""
        keys = [self._entries[index].key for index, _, _ in several]
        if self.kind is StoreKind.CUSTOM:
            for key, (index, gradient, out) in zip(keys, several, strict=True):
                self.store.pushpull(key, gradient, out=out, priority=-index)
        elif keys:
            self.store.pushpull(keys, [gradient for _, gradient, _ in several], [out for _, _, out in several])

    def _pull(self, indices: Sequence[int]) -> None:
        pulled = [index for index in indices if self._entries[index].stype != ROW_SPARSE]
        if pulled:
            entries = [self._entries[index] for index in pulled]
            self.store.pull([entry.key for entry in entries], [entry.parameter for entry in entries])


def decide_update_location(
    store: Any, entries: Sequence[TrainerParam], wanted: bool | None, *, by_name: bool
) -> tuple[UpdateLocation, str]:
    """Decide where the weights of these parameters are updated, with the reason: `reigen.kv.update_on_kvstore`.

    ``wanted`` is the user's ``update_on_kvstore``; ``by_name``: the store was made for them.

    Raises:
        ArgumentError: what is wanted cannot be.
    """
    question = UpdateRequirements(
        store_kind(store),
        is_capable=store is not None and store.is_capable(KVStore.OPTIMIZER),
        wanted=wanted,
        default=config.load_config(os.environ).kv_update_on_kvstore,
        by_name=by_name,
        sparse_gradients=any(entry.has_sparse_rows for entry in entries),
        sparse_weights=any(entry.stype == ROW_SPARSE for entry in entries),
    )
    return choose_update_location(question)
