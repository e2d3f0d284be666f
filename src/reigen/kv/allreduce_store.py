"""Store without servers: every worker holds all values, and sums come from the all-reduce of the job."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from reigen import context
from reigen.api.adapter import Array
from reigen.api.objects import allgather_bytes
from reigen.context import Handle
from reigen.errors import MismatchError, ReigenError
from reigen.kv.local_store import LocalStore, copy_to_host
from reigen.kv.store import KeyTensors, Pending, PendingGroup, call_when_all_done
from reigen.kv.values import Key, RowSparse, TensorSpec, flatten_tensor, sum_row_sparse, sum_tensors, tensor_spec
from reigen.types import ReduceOp, dtype_named

_INDICES = dtype_named("int64")


@dataclass(eq=False)
class _PushRound:
    """Push of one key on its way."""

    store: AllreduceStore
    key: Key
    complete: Callable[[], None]
    handles: Sequence[Handle]
    #: the pulls that see this round, and not the next
    then: list[Callable[[], None]] = field(default_factory=list)
    is_over: bool = False
    error: ReigenError | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Finish the push; collectives keep the job's own deadline."""
        self.store.catch_up(self.key, self)
        if self.error is not None:
            raise self.error.anew()

    def done(self) -> bool:
        return self.is_over or all(handle.poll() for handle in self.handles)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        call_when_all_done([handle.add_done_callback for handle in self.handles], callback)


class AllreduceStore(LocalStore):
    """Store over the job's collectives; ``ring``, or ``horovod`` as MXNet calls it. `reigen.init` joins the job.

    Optimizers and updaters run on every worker alike, on sums that have the same bits everywhere.
    """

    #: numbers of the stores of this process: the same on workers that make them in the same order
    _numbers = itertools.count()

    def __init__(self, kind: str = "ring") -> None:
        super().__init__(kind)
        self._context = context.init()
        self.rank, self.num_workers = self._context.rank, self._context.size
        self._name = f"kv{next(AllreduceStore._numbers)}"
        self._process = os.getpid()
        self._num_inits = 0
        #: rounds on their way, by key, in order
        self._begun: dict[Key, deque[_PushRound]] = {}

    def barrier(self) -> None:
        self._check()
        self._context.barrier(name=f"{self._name}.barrier", blocking=True).wait()

    def leave(self) -> None:
        """Return when all workers have left. Only dense pushes do without a worker."""
        self.wait()
        self._context.join(blocking=True).wait()

    def wait(self) -> None:
        for key in list(self._begun):
            self.catch_up(key)

    def close(self) -> None:
        """Close the store. The job goes on; `reigen.shutdown` leaves it."""
        if os.getpid() == self._process:  # not in a child, where an inherited store is closed when an exception passes
            self.wait()
        super().close()

    def catch_up(self, key: Key, until: _PushRound | None = None) -> None:
        """Complete a key's rounds that were begun, in order, up to ``until``; None: all, and raise the first error."""
        waiting = self._begun.get(key)
        if waiting:
            self._check()
        first: ReigenError | None = None
        while waiting and not (until is not None and until.is_over):
            each = waiting.popleft()
            each.is_over = True
            try:
                each.complete()
                for then in each.then:
                    then()
            except ReigenError as error:
                each.error = error
                first = first or error
        if until is None and first is not None:
            raise first

    def _check(self) -> None:
        """Check that this process may use the store.

        Raises:
            ArgumentError: the store was closed.
            NotInitializedError: this process has left the job, or was forked from a rank and never was in it.
        """
        super()._check()
        context.current()

    # -- values -------------------------------------------------------------------------------------------------------

    def _init(self, pairs: list[tuple[Key, Any]]) -> None:
        self._check()
        name = f"{self._name}.init{self._num_inits}"
        self._num_inits += 1
        self._agree(name, [(key, tensor_spec(value)) for key, value in pairs])
        for key, value in pairs:
            stored = copy_to_host(value)
            elements = flatten_tensor(stored)[0]
            self._context.broadcast(
                elements, elements, tensor_spec(stored).dtype, root_rank=0, name=f"{name}.{key}", blocking=True
            ).wait()
            self._stored[key] = stored

    def _agree(self, name: str, pairs: list[tuple[Key, TensorSpec]]) -> None:
        """Check that all workers initialise the same keys alike."""
        own = ", ".join(f"{key!r}: {spec}" for key, spec in sorted(pairs, key=lambda pair: str(pair[0])))
        specs = [each.decode() for each in allgather_bytes(self._context, own.encode(), f"{name}.specs")]
        ranks = [rank for rank, spec in enumerate(specs) if spec != specs[0]]
        if ranks:
            raise MismatchError(
                "the workers do not initialise the same keys alike", tensor="init", ranks=ranks,
                details=dict(enumerate(specs)),
            )  # fmt: skip

    def _push(self, groups: list[KeyTensors], priority: int) -> Pending:
        return PendingGroup([self._begin(key, tensors) for key, tensors in groups])

    def _pull(self, groups: list[KeyTensors], priority: int, blocking: bool) -> Pending:
        before = []
        for key, outs in groups:
            if waiting := self._begun.get(key):
                waiting[-1].then.append(partial(self._give, key, outs))
                before.append(waiting[-1])
            else:
                self._give(key, outs)
        return PendingGroup(before)

    def _pull_rows(self, key: Key, outs: list[RowSparse], rows: Any, priority: int) -> Pending:
        self.catch_up(key)
        return super()._pull_rows(key, outs, rows, priority)

    def _begin(self, key: Key, tensors: list[Any]) -> _PushRound:
        spec = self._specs[key]
        self._check()
        waiting = self._begun.setdefault(key, deque())
        if waiting:  # one name, one collective at a time
            self.catch_up(key)
        self._rounds[key] += 1
        if any(isinstance(tensor, RowSparse) for tensor in tensors):
            begun = self._begin_rows(key, tensors, spec)
        else:
            begun = self._begin_dense(key, tensors, spec)
        waiting.append(begun)
        return begun

    def _begin_dense(self, key: Key, tensors: list[Any], spec: TensorSpec) -> _PushRound:
        elements, is_users = sum_tensors(tensors, spec)
        if is_users:
            elements = elements.copy()
        handle = self._context.allreduce(elements, elements, spec.dtype, op=ReduceOp.SUM, name=f"{self._name}.{key}")

        def complete() -> None:
            handle.wait()
            self._apply(key, elements)

        return _PushRound(self, key, complete, [handle])

    def _begin_rows(self, key: Key, tensors: list[Any], spec: TensorSpec) -> _PushRound:
        indices, rows = sum_row_sparse(tensors, spec)
        name = f"{self._name}.{key}"
        of_indices = self._context.allgather(indices, _INDICES, name=f"{name}.indices")
        of_rows = self._context.allgather(rows, spec.dtype, name=f"{name}.rows")

        def complete() -> None:
            gathered: Array = of_rows.wait().on_host
            parts = RowSparse(of_indices.wait().on_host, gathered, (spec.shape[0], spec.row_length))
            self._apply_rows(key, *sum_row_sparse([parts], TensorSpec(spec.dtype, parts.shape, spec.stype)))

        return _PushRound(self, key, complete, [of_indices, of_rows])
