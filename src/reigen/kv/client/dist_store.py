"""Store whose values lie on servers: ``dist_sync``, ``dist_async`` and ``dist_ssp``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from reigen import optim
from reigen.api.adapter import Array
from reigen.cluster.metrics import MetricSample
from reigen.compression import from_params, means_none
from reigen.config import Config
from reigen.errors import ArgumentError, UnsupportedError, WireError
from reigen.kv import residual_files
from reigen.kv.client import optimizer_states
from reigen.kv.client.key_init import KeyInitializer
from reigen.kv.client.key_table import BatchBuilder, KeyState, RequestFactory, collect_residuals
from reigen.kv.client.requests import KVOperation
from reigen.kv.client.sample_leases import SampleLeaser
from reigen.kv.client.worker import KVWorker
from reigen.kv.local_store import copy_to_host, fill_tensor
from reigen.kv.membership.scheduler_client import SchedulerClient
from reigen.kv.protocol import MessageKind
from reigen.kv.samples import SampleLease, checked_plan
from reigen.kv.store import KeyTensors, KVStore, Pending, check_optimizer
from reigen.kv.values import (
    Key,
    RowSparse,
    flatten_tensor,
    key_id,
    row_numbers,
    sum_row_sparse,
    sum_tensors,
    tensor_spec,
    write_tensor,
)
from reigen.observe.metrics import add_source


class DistStore(KVStore):
    """Store on servers, as one worker sees it; ``on_close`` is called once when it is closed.

    The other arguments are those of `KVStore` and `reigen.kv.client.worker.KVWorker`.
    """

    def __init__(
        self,
        kind: str,
        member: SchedulerClient,
        config: Config,
        number: int = 0,
        staleness: int | None = 0,
        on_close: Callable[[DistStore], None] = lambda store: None,
        start_until: float | None = None,
    ) -> None:
        super().__init__(kind)
        self.is_recovery, self.is_elastic = member.is_recovery, member.is_elastic
        self.staleness = math.inf if staleness is None else staleness
        self._member, self._config, self._number, self._on_close = member, config, number, on_close
        self._keys: dict[Key, KeyState] = {}
        #: this worker has said that it has nothing more to push
        self.has_left = False
        self._is_closed = False
        self._optimizer: optim.Optimizer | None = None
        self._worker = KVWorker(member, config, number, staleness, self._counts, start_until)
        self._factory = RequestFactory(self._worker)
        self._key_init = KeyInitializer(self._worker, self._factory, config)
        self._leaser = SampleLeaser(self._worker, self._factory)
        self.started = member.counters.started
        add_source(member.counters)
        add_source(self)

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self._member.place()[0]

    @property
    def num_workers(self) -> int:  # type: ignore[override]
        return self._member.place()[1]

    def samples(self) -> Iterator[MetricSample]:
        """Yield the metrics of this store alone, for `reigen.observe.metrics`; any thread."""
        yield from self._worker.samples()
        behind = (entry.round - min(entry.done, default=entry.round) for entry in list(self._keys.values()))
        yield "reigen_staleness_rounds", (), max(behind, default=0)

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: optim.Optimizer) -> None:
        """Set the optimizer of the servers. Of layer-wise ones (LAMB, LARS), a key lies on one server in one piece."""
        check_optimizer(optimizer)
        self._check()
        with self.one_deadline():
            self._worker.command("set_optimizer", {"spec": optimizer.to_spec()})
            self._optimizer = optimizer
            self._key_init.is_whole = not optimizer.is_elementwise
            if self._key_init.is_whole:
                self._put_together([entry for entry in self._keys.values() if len(entry.places) > 1])

    def set_learning_rate(self, learning_rate: float) -> None:
        self._check()
        self._worker.command("set_learning_rate", {"learning_rate": float(learning_rate)})

    def set_gradient_compression(self, params: Mapping[str, object]) -> None:
        """Encode dense pushes, and the answers of servers without an optimizer."""
        wanted = {} if means_none(params) else dict(params)
        if not means_none(params):
            from_params(params)
        self._check()
        self._worker.command("set_gradient_compression", {"params": wanted})
        self._factory.compress(wanted, self._member.num_workers)

    def save_optimizer_states(self, fname: str | Path, dump_optimizer: bool = False) -> None:
        """Write the states of all servers. Residuals of compression are this worker's own: one file each."""
        self._check()
        optim.check_can_be_written(fname)
        states = optim.States(())
        if self._factory.codec is None or self._optimizer is not None:
            self._optimizing()
            with self.one_deadline():
                collected = optimizer_states.collect_states(self._worker, self._keys.values())
                spec = self._optimizer_now() if dump_optimizer else None
            states = optim.States(collected.pieces, spec, collected.facts)
        left: residual_files.Residuals = {}
        for entry in self._keys.values():
            left.update(collect_residuals(entry, self._owner))
        residual_files.merge_residuals(states, left, self._specs).save(fname)

    def load_optimizer_states(self, fname: str | Path) -> None:
        self._check()
        states, left = residual_files.load_states(fname, self._specs)
        if states.pieces or self._factory.codec is None:
            optimizer = self._optimizing()
            entries = list(self._keys.values())
            with self.one_deadline():
                optimizer_states.restore_states(self._worker, self._factory, entries, states, optimizer.name)
        for (key, owner), residual in left.items():
            entry = self._keys[key]
            if owner == self._owner and self._factory.codec is not None:
                entry.residuals = {place.index: residual[place.begin : place.end].copy() for place in entry.places}

    # -- samples ------------------------------------------------------------------------------------------------------

    def sample_leases(
        self,
        num_samples: int,
        batch_size: int,
        *,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        first_epoch: int = 0,
    ) -> Iterator[SampleLease]:
        plan, first, stop = checked_plan(
            num_samples, batch_size, epochs, first_epoch, seed, shuffle=shuffle, drop_last=drop_last
        )
        self._check(pushes=True)
        if self._config.kv_on_worker_loss == "wait":
            raise UnsupportedError(
                "sample_leases() does not work with REIGEN_KV_ON_WORKER_LOSS=wait, where a new process goes on with "
                "the rounds of a lost one, shard by shard; use an elastic job (reigen run --min-np)"
            )
        if not (self.is_elastic or math.isinf(self.staleness)):
            raise UnsupportedError(
                f"a store of type {self.type!r} leases samples in elastic jobs only (reigen run --min-np): in others, "
                "rounds wait for a worker for which there are no samples. Use dist_async, or divide the samples with "
                "reigen.data"
            )
        return self._leaser.leases(plan, first, stop, None if math.isinf(self.staleness) else self._rejoin)

    def _rejoin(self) -> None:
        """Take part in rounds again."""
        self._key_init.rejoin(list(self._keys.values()))

    # -- the other workers --------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        self._check()
        self._member.barrier(f"store {self._number}", time.monotonic() + self._config.deadline_seconds)

    def num_dead_nodes(self, timeout: float = 60.0) -> int:
        """Return how many nodes are silent. They are heard of every PS_HEARTBEAT_INTERVAL seconds."""
        if not timeout >= 0:
            raise ArgumentError(f"num_dead_nodes() takes seconds, 0 or more, got {timeout!r}")
        return self._member.num_dead_nodes(float(timeout))

    def resize_servers(self, num: int) -> None:
        self._check()
        if not self._member.servers_move:
            raise UnsupportedError(
                "resize_servers(): the servers of this job stay where they are. Start an elastic job in which they may "
                "move: reigen run -np 4 --min-np 2 -s 2 --max-servers 4"
            )
        if isinstance(num, bool) or not isinstance(num, int) or not 1 <= num <= self._member.num_servers:
            raise ArgumentError(
                f"resize_servers({num!r}): it must be a number of processes from 1 to {self._member.num_servers}, "
                "which is --max-servers"
            )
        self._member.resize_servers(num, time.monotonic() + self._config.deadline_seconds)

    def leave(self) -> None:
        """Leave, behind the requests that were begun.

        Where that takes long, it may wait for others that wait for this worker, since they have pushed other keys: they
        hear of it then.
        """
        with self.one_deadline():
            if not self.has_left:
                nothing_pending = self._worker.linger()
                self.has_left = True
                if nothing_pending:
                    self._worker.goodbye()
                    return
                self._worker.goodbye(None)
            self.wait()

    def rounds(self, key: Key) -> int:
        self._known(key)
        return self._keys[key].last_round()

    def wait(self) -> None:
        self._worker.wait_for_all()

    def one_deadline(self, until: float | None = None) -> AbstractContextManager[float]:
        return self._worker.deadlines.one(until)

    def attention(self) -> AbstractContextManager[None]:
        return self._worker.attention()

    def attend(self, oldest: Pending, is_enough: Callable[[], bool]) -> None:
        assert isinstance(oldest, KVOperation), "a call that waits for nothing begins one"
        self._worker.attend(oldest, is_enough)

    def interrupt(self) -> None:
        self._worker.interrupt()

    def close(self) -> None:
        """Leave and close the store. The others go on without this worker."""
        try:
            if not (self._is_closed or self._worker.has_failed):
                self.leave()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Give the store up as a worker that dies does: the others learn that it is lost. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._worker.close()
            self._on_close(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    # -- values -------------------------------------------------------------------------------------------------------

    def _init(self, pairs: list[tuple[Key, Any]]) -> None:
        self._check()
        entries = [KeyState(key, key_id(key), tensor_spec(value)) for key, value in pairs]
        values: dict[int, Array] = {}
        if self._may_be_first:
            for entry, (_, value) in zip(entries, pairs, strict=True):
                values[entry.id] = flatten_tensor(copy_to_host(value) if isinstance(value, RowSparse) else value)[0]
        with self.one_deadline():
            self._key_init.declare(entries, values, lambda: self._keys.update((entry.name, entry) for entry in entries))

    def _push(self, groups: list[KeyTensors], priority: int) -> Pending:
        return self._begin(MessageKind.PUSH, groups, None, priority, False)

    def _pull(self, groups: list[KeyTensors], priority: int, blocking: bool) -> Pending:
        return self._begin(MessageKind.PULL, None, groups, priority, blocking)

    def _pushpull(self, values: list[KeyTensors], outs: list[KeyTensors], priority: int, blocking: bool) -> Pending:
        if [key for key, _ in values] != [key for key, _ in outs]:
            raise ArgumentError("pushpull() needs an out for each key that it is given a value for")
        return self._begin(MessageKind.PUSHPULL, values, outs, priority, blocking)

    def _begin(
        self,
        kind: MessageKind,
        values: list[KeyTensors] | None,
        outs: list[KeyTensors] | None,
        priority: int,
        blocking: bool,
    ) -> Pending:
        """Begin a call: push ``values`` of keys, if any, and fill ``outs`` of the same keys, if any."""
        self._check(pushes=values is not None)
        keys = [key for key, _ in values or outs or ()]
        counters = self._member.counters
        counters.num_pushes += len(values or ())
        counters.num_pulls += len(outs or ())
        targets = [_PullTarget(several) for _, several in outs or ()]

        def finish() -> None:
            for target in targets:
                target.finish()

        operation = KVOperation(self._worker.wait_for, kind.name.lower(), finish if targets else None, keys)
        builder = BatchBuilder(self._factory, self._worker, kind, operation, priority, len(keys))
        for place, key in enumerate(keys):
            entry, elements = self._keys[key], None
            if values is not None:
                tensors = values[place][1]
                if kind is MessageKind.PUSH and any(isinstance(tensor, RowSparse) for tensor in tensors):
                    self._factory.push_rows(operation, entry, *sum_row_sparse(tensors, entry.spec), priority)
                    continue
                elements = sum_tensors(tensors, entry.spec)[0]
            builder.add(entry, elements, targets[place].elements if targets else None)
        builder.end()
        if not blocking:
            self._worker.flush()
        return operation

    def _pull_rows(self, key: Key, outs: list[RowSparse], rows: Any, priority: int) -> Pending:
        self._check()
        entry = self._keys[key]
        spec = entry.spec
        wanted = np.arange(spec.shape[0]) if rows is None else np.unique(row_numbers(rows, spec.shape[0]))
        received = np.empty((len(wanted), spec.row_length), spec.dtype.storage)

        def finish() -> None:
            for out in outs:
                out.receive(wanted.copy(), received.reshape(len(wanted), *spec.shape[1:]).copy())

        operation = KVOperation(self._worker.wait_for, f"row_sparse_pull of key {key!r}", finish)
        self._factory.pull_rows(operation, entry, wanted, received, priority)
        self._worker.flush()
        return operation

    # -- help ---------------------------------------------------------------------------------------------------------

    @property
    def _owner(self) -> str:
        return f"worker {self._member.number}"

    @property
    def _may_be_first(self) -> bool:
        """Return whether the first values of keys may be this worker's."""
        return self._member.is_elastic or self._member.number == 0

    def _check(self, *, pushes: bool = False) -> None:
        if self._is_closed:
            raise ArgumentError("this store was closed")
        if pushes and self.has_left:
            raise ArgumentError("this worker has left: it said that it has no more data, and may only pull")
        if pushes and self._optimizer is None and self._factory.has_lease:
            raise UnsupportedError(
                "a loop over sample_leases() needs an optimizer on the servers, set by set_optimizer(): without one, a "
                "push takes the place of the value, which then has one batch only"
            )
        self._worker.check()

    def _optimizing(self) -> optim.Optimizer:
        if self._optimizer is None:
            raise ArgumentError("this store has no optimizer; call set_optimizer() before")
        return self._optimizer

    def _optimizer_now(self) -> optim.Optimizer:
        """Return the optimizer as the servers have it: any worker may have changed its learning rate."""
        (spec,) = self._worker.command("get_optimizer", {}, [0])
        if not isinstance(spec, dict):
            raise WireError("server 0 has no optimizer, and took one before")
        return optim.from_spec(spec)

    def _put_together(self, entries: list[KeyState]) -> None:
        """Have keys that were cut lie in one piece: declare them anew, with the values that they have."""
        values: dict[int, Array] = {}
        for entry in entries:
            if self._may_be_first:
                values[entry.id] = np.empty(entry.spec.num_elements, entry.spec.dtype.storage)
                operation = KVOperation(self._worker.wait_for, f"moving key {entry.name!r}")
                self._factory.pull(operation, entry, values[entry.id], 0)
                operation.wait()
        for entry in entries:
            entry.generation += 1
        if entries:
            self._key_init.declare(entries, values)

    def _counts(self, server: int) -> Iterable[tuple[int, int, int]]:
        for entry in list(self._keys.values()):
            for place in entry.places:
                if place.server == server:
                    yield entry.id, place.index, entry.done[place.index]


class _PullTarget:
    """Target of a pull: the first out itself, if it can be written, and from there the others."""

    def __init__(self, outs: list[Any]) -> None:
        self._outs = outs
        self.elements, self._aliases = flatten_tensor(outs[0])

    def finish(self) -> None:
        """Have all outs hold the elements."""
        write_tensor(self._outs[0], self.elements, self._aliases)
        for out in self._outs[1:]:
            fill_tensor(out, self.elements)
