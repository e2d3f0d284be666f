"""Leases of samples, as a worker of a store on servers takes them (`reigen.kv.consistency.sample_leases`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from reigen.errors import ArgumentError
from reigen.kv.client.key_table import RequestFactory
from reigen.kv.client.worker import KVWorker
from reigen.kv.consistency.sample_leases import SamplePlan, batch_number
from reigen.kv.samples import BatchOrder, SampleLease

#: The server that has the ledgers.
_LEDGER_SERVER = 0
#: Servers hear after so many batches which ones all shards have. Until then, shards to which no lease pushes keep gaps.
_FLOOR_BATCHES = 256


class SampleLeaser:
    """Takes leases of samples, one after the other, for one store.

    Args:
        worker: its connections.
        factory: marks what is pushed during a lease.
    """

    def __init__(self, worker: KVWorker, factory: RequestFactory) -> None:
        self._worker, self._factory = worker, factory
        self._is_leasing = False
        self._sent_floor = 0

    def leases(
        self, plan: SamplePlan, first: int, stop: int, rejoin: Callable[[], None] | None
    ) -> Iterator[SampleLease]:
        """Yield leases until all batches from ``first`` to ``stop`` (exclusive) are committed, by whichever worker.

        Args:
            plan: of the batches.
            first: number of a batch.
            stop: number behind the last one.
            rejoin: has this worker take part in rounds again, after `KVWorker.goodbye`; None: no other worker would
                wait for its pushes while it waits for samples.
        """
        if self._is_leasing:
            raise ArgumentError("this store leases samples already: end that loop before the next one begins")
        order, commits = BatchOrder(plan), None
        about = {"plan": msgspec.to_builtins(plan), "skips": first, "stop": stop}
        self._is_leasing, is_held = True, False
        try:
            while True:
                found = self._next({**about, "commits": commits}, rejoin)
                if found is None:
                    return
                batch, number = found
                is_held = True
                self._factory.begin_lease(batch_number(number, batch))
                yield order.lease(batch)
                self._worker.wait_for_all()  # every shard has it then (C)
                self._factory.end_lease()
                commits, is_held = batch, False
        finally:
            self._is_leasing = False
            self._factory.end_lease()
            if is_held and not self._worker.has_failed:
                self._worker.command("return_samples", {}, [_LEDGER_SERVER])

    def _next(self, arguments: dict[str, Any], rejoin: Callable[[], None] | None) -> tuple[int, int] | None:
        """Return the next batch and the number of its plan, or None when all are committed."""
        state, batch, floor, number = self._ask({**arguments, "waits": rejoin is None})
        if state == "wait":  # others wait for no pushes of this worker meanwhile
            assert rejoin is not None
            self._worker.goodbye(None)
            try:
                state, batch, floor, number = self._ask({**arguments, "commits": None, "waits": True})
            finally:
                if not self._worker.has_failed:
                    self._worker.command("rejoin_rounds", {})
                    rejoin()
        if not 0 <= floor - self._sent_floor < _FLOOR_BATCHES:
            self._sent_floor = floor
            self._worker.command("sample_floor", {"plan": number, "floor": floor})
        return (batch, number) if state == "leased" else None

    def _ask(self, arguments: dict[str, Any]) -> tuple[str, int, int, int]:
        (answer,) = self._worker.command("lease_samples", arguments, [_LEDGER_SERVER])
        return msgspec.convert(answer, tuple[str, int, int, int])
