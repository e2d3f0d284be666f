"""The key-value store's interface: MXNet's, for tensors of any framework.

What every store promises:

a. A key is an int (64 bits) or a str; one store takes one of the two. A value keeps the shape and dtype of `init`.
b. ``push`` adds up the values of all devices and workers: one *round* of the key. Without an optimizer the sum takes
   the place of what was stored (it is assigned, not added). With one, the stored value is updated by it. ``pull``
   gives what is stored.
c. Operations of one worker on one key take effect in the order in which they were begun; a pull sees the pushes
   before it. Operations on different keys are independent of each other: those with a higher ``priority`` overtake.
d. ``push`` has taken its values when it returns: they may be changed at once. It does not wait for anybody. An error
   that it meets later is raised by its `Pending`, or else by the next call to the store.
e. ``pull`` and ``pushpull`` return when ``out`` is there, because nobody can wait for an array when it is read. With
   ``wait=False`` they return at once, and ``out`` is there when the `Pending` has been waited for.
f. Every wait ends: with the result, with an error that names who is missing, or at the deadline (REIGEN_DEADLINE).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self, TypeAlias

from reigen.compression import means_none
from reigen.errors import ArgumentError, UnsupportedError, UnsupportedTypeError
from reigen.kv.samples import SampleLease
from reigen.kv.values import (
    KEY_TYPES,
    ROW_SPARSE,
    Key,
    RowSparse,
    TensorSpec,
    as_value,
    check_key_type,
    check_tensor_specs,
    group_by_key,
    tensor_spec,
)
from reigen.optim import Optimizer

#: One key, or several.
Keys: TypeAlias = "Key | Sequence[Key]"
#: A tensor, a list with one for each device, or for several keys a list of these.
Values: TypeAlias = Any
#: what a priority is below, and its negative not below
_PRIORITIES = 2**31
#: A key and its tensors.
KeyTensors: TypeAlias = tuple[Key, list[Any]]


#: Function of a local store on a sum: ``updater(key, sum, stored)`` changes ``stored`` in place, a tensor of the
#: framework that the key was initialised with.
UpdateFunction: TypeAlias = Callable[[Key, Any, Any], None]


class Pending(Protocol):
    """Operations that were begun."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when they are done, and their results are in place.

        Args:
            timeout: seconds; None: until the job's deadline.

        Raises:
            DeadlineError: they are not done in time; names who is waited for. With a ``timeout`` they go on, and can be
                waited for again.
            CollectiveError: they have failed.
        """

    def done(self) -> bool:
        """Return whether `wait` would return at once. An operation that has failed is done."""

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when they are `done`: now, or on whichever thread finds out, which it must not keep."""


class KVStore(ABC):
    """Store; `reigen.kv.create` makes one. One thread at a time may use it.

    Wherever there is a ``key`` there may be a list. ``value`` and ``out`` are a tensor, or a list with one for each
    device; for a list of keys, a list of as many of that. Operations of a higher ``priority``, an int of 32 bits,
    overtake; step (e) of the module says what ``wait`` does. All of them raise ArgumentError where a key was never
    initialised, a tensor is not like the one that it was initialised with, or the priority is no such int.

    Attributes:
        type: the name that it was created by.
        rank: this worker's number; in an elastic job its place among those that are there now, by age.
        num_workers: how many workers share the store, in an elastic job now.
        is_recovery: this worker takes the place of one that was lost; `rounds` tells where that one had come to.
        is_elastic: workers come and go; those that come take the values from the store.
        staleness: by how many rounds a worker may be ahead of the slowest one; math.inf: by any number. 0 where the
            values are in this process.
    """

    OPTIMIZER: ClassVar[str] = "optimizer"

    rank: int = 0
    num_workers: int = 1
    is_recovery: bool = False
    is_elastic: bool = False
    staleness: float = 0

    def __init__(self, kind: str) -> None:
        self.type = kind
        #: what is known of every key that was initialised
        self._specs: dict[Key, TensorSpec] = {}

    # -- values -------------------------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Values) -> None:
        """Create keys. All workers do so; the value of rank 0 counts, shape and dtype must be the same on all.

        A `RowSparse` value makes a key of which single rows can be pushed and pulled.

        Raises:
            ArgumentError: a key exists, or int and str keys are mixed.
            MismatchError: the workers gave different shapes or dtypes: on all of them.
        """
        groups = [(one, [as_value(each) for each in values]) for one, values in group_by_key(key, value)]
        check_key_type((one for one, _ in groups), self._kind())
        for one, values in groups:
            if one in self._specs:
                raise ArgumentError(f"key {one!r} has been initialised before; a key is initialised once")
            if len(values) > 1:
                raise ArgumentError(f"key {one!r} was given {len(values)} times in one init(); a key has one value")
        specs = {one: tensor_spec(values[0]) for one, values in groups}
        self._init([(one, values[0]) for one, values in groups])
        self._specs.update(specs)

    def push(self, key: Keys, value: Values, priority: int = 0) -> Pending:
        """Add values to this round of their keys; one that is there several times gets the sum."""
        return self._push(self._tensors(key, value), _check_priority(priority))

    def pull(
        self, key: Keys, out: Values = None, priority: int = 0, ignore_sparse: bool = True, wait: bool = True
    ) -> Pending:
        """Have ``out``, which there has to be, hold the stored values.

        With ``ignore_sparse``, `RowSparse` outs are left as they are; otherwise they receive all rows.
        """
        if out is None:
            raise ArgumentError("pull() needs out=: the tensor that receives what is stored")
        priority = _check_priority(priority)
        groups = self._tensors(key, out, "out")
        rows = [(one, each) for one, outs in groups for each in outs if isinstance(each, RowSparse)]
        groups = [(one, [each for each in outs if not isinstance(each, RowSparse)]) for one, outs in groups]
        pending = self._pull([(one, outs) for one, outs in groups if outs], priority, wait)
        whole = [] if ignore_sparse else [self._pull_rows(one, [each], None, priority) for one, each in rows]
        return self._waited([pending, *whole], wait)

    def pushpull(self, key: Keys, value: Values, out: Values = None, priority: int = 0, wait: bool = True) -> Pending:
        """`push` and `pull` in one: have ``out``, or the values themselves, hold the values after this round.

        Raises:
            ArgumentError: see the class; or a value or out is row-sparse.
        """
        priority = _check_priority(priority)
        values = self._tensors(key, value)
        if out is None:
            outs = [(one, [_as_output(one, tensor) for tensor in tensors]) for one, tensors in values]
        else:
            outs = self._tensors(key, out, "out")
        for one, tensors in [*values, *outs]:
            if self._specs[one].stype == ROW_SPARSE and any(isinstance(tensor, RowSparse) for tensor in tensors):
                raise ArgumentError(f"key {one!r}: pushpull() takes dense tensors only, got a row-sparse one")
        return self._waited([self._pushpull(values, outs, priority, wait)], wait)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """`init`, then `pull`: have ``out`` hold the value of rank 0 on all workers."""
        priority = _check_priority(priority)
        with self.one_deadline():
            self.init(key, value)
            self.pull(key, out, priority)

    def row_sparse_pull(self, key: Keys, out: Values = None, priority: int = 0, row_ids: Any = None) -> None:
        """Have row-sparse ``out`` hold some of the stored rows.

        The contents of ``out``, `RowSparse` tensors, are replaced. ``row_ids`` are numbers of rows, in any shape and
        order, repeated or not; or a list of these, one for each out.

        Raises:
            ArgumentError: see the class; ``out`` is dense, or a row does not exist.
        """
        if out is None or row_ids is None:
            raise ArgumentError("row_sparse_pull() needs out= and row_ids=")
        priority = _check_priority(priority)
        groups = self._tensors(key, out, "out")
        outs = [(one, each) for one, tensors in groups for each in tensors]
        ids = list(row_ids) if _is_one_for_each(row_ids) else [row_ids] * len(outs)
        if len(ids) != len(outs):
            raise ArgumentError(f"{len(outs)} outs need {len(outs)} row_ids, or one for all of them; got {len(ids)}")
        for one, each in outs:
            if not isinstance(each, RowSparse):
                raise ArgumentError(f"key {one!r}: out of row_sparse_pull() is a RowSparse, got a dense tensor")
        pending = [self._pull_rows(one, [each], rows, priority) for (one, each), rows in zip(outs, ids, strict=True)]
        self._waited(pending, True)

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
        """Yield batches of a data set, each to one worker, until all of them are in the stored values.

        What is pushed in the body of the loop belongs to the batch, at most one push of each key. The batch is
        committed when all these pushes are acknowledged, at the end of the body. One whose worker dies before that, or
        breaks out of the loop, goes to another worker. Each key has each batch exactly once, whoever dies.

        The loop ends when all batches of all epochs are committed, by whichever workers. Until then a worker for which
        there is none waits: one of the others may die. All workers give the same arguments. A worker that comes later
        takes part in what is left.

        Args:
            num_samples: of the data set.
            batch_size: samples of a batch. The last one of an epoch may have fewer.
            epochs: how many there are in all, beginning with epoch 0: a loop over ``epochs=2`` behind one over
                ``epochs=1`` goes on with the second epoch.
            seed: of the epochs' orders, which are those of `reigen.elastic.Cursor`, for any number of workers.
            shuffle: False: in the order of the data set.
            drop_last: leave out a last batch that would be shorter.
            first_epoch: where to begin if there was no loop before: epochs below that are done.

        Raises:
            ArgumentError: an argument makes no sense; another worker has leases by other arguments; a key is pushed
                again in the body.
            UnsupportedError: the store cannot lease samples: it has no optimizer, for example.
            DeadlineError: the workers that have the last batches do not commit them; names them.
        """
        raise UnsupportedError(f"a store of type {self.type!r} leases no samples")

    # -- optimizers ---------------------------------------------------------------------------------------------------

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return whether a store can do something that not every one can: so far ``"optimizer"``, which all here can.

        Raises:
            ArgumentError: there is no such capability.
        """
        if capability.lower() != KVStore.OPTIMIZER:
            raise ArgumentError(f"unknown capability {capability!r}; there is: {KVStore.OPTIMIZER!r}")
        return True

    @abstractmethod
    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Have pushes update the stored values from now on. All workers call it alike, before the first push.

        Raises:
            ArgumentError: no optimizer of `reigen.optim`; or there were pushes already.
            MismatchError: the workers gave different ones.
        """

    def set_updater(self, updater: UpdateFunction) -> None:
        """Have pushes update the stored values by a function of this process. Local stores only.

        Raises:
            UnsupportedError: the values are not in this process.
        """
        raise UnsupportedError(
            f"a store of type {self.type!r} keeps its values in other processes, which no function of this one "
            "reaches; use set_optimizer()"
        )

    @abstractmethod
    def set_learning_rate(self, learning_rate: float) -> None:
        """Change the optimizer's learning rate, for updates from now on. All workers may call it; one is enough.

        Raises:
            ArgumentError: there is no optimizer, or it has a schedule of its own.
        """

    def set_gradient_compression(self, params: Mapping[str, object]) -> None:
        """Have values travel in fewer bits. All workers call it alike, before the first push.

        Args:
            params: ``{"type": "2bit", "threshold": 0.5}``; the other types are listed in docs/kv.md. With the type
                ``none`` values travel as they are, in a store of any type.

        Raises:
            UnsupportedError: nothing travels in a store of this type.
            ArgumentError: there is no such type, or parameter.
        """
        if not means_none(params):
            raise UnsupportedError(f"gradient compression is not supported by a store of type {self.type!r}")

    @abstractmethod
    def save_optimizer_states(self, fname: str | Path, dump_optimizer: bool = False) -> None:
        """Write the optimizer's states of all keys to a file. A distributed store: of all servers, on any worker.

        Args:
            fname: the file; it is replaced as a whole.
            dump_optimizer: its name and parameters, too.

        Raises:
            ArgumentError: there is no optimizer.
            OSError: the file cannot be written.
        """

    @abstractmethod
    def load_optimizer_states(self, fname: str | Path) -> None:
        """Read what `save_optimizer_states` wrote, by any number of servers. All workers may call it; one is enough.

        Raises:
            ArgumentError: it is no such file, it is damaged, or its keys are not those of this store.
            OSError: the file cannot be read.
        """

    # -- the other workers --------------------------------------------------------------------------------------------

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all workers have come here.

        Raises:
            DeadlineError: names the workers that have not.
        """

    def num_dead_nodes(self, timeout: float = 60.0) -> int:
        """Return how many workers and servers have been silent for ``timeout`` seconds, or are known to be dead.

        Raises:
            ArgumentError: the time is negative.
        """
        return 0

    def resize_servers(self, num: int) -> None:
        """Have the servers of an elastic job run in ``num`` processes. Any worker may call this, at any time.

        Returns when the launcher has the request. Servers then move one by one, with all that they hold, while pushes
        and pulls go on; results are the same bits as with any other number. Of several requests the last one counts.

        Raises:
            ArgumentError: there are to be fewer than 1, or more than ``--max-servers``.
            UnsupportedError: the number of processes cannot change in this job.
        """
        raise UnsupportedError(
            f"resize_servers(): a store of type {self.type!r} has no servers. Those of dist_* stores run in as many "
            "processes as you want in an elastic job: reigen run -np 4 --min-np 2 -s 2 --max-servers 4"
        )

    @abstractmethod
    def leave(self) -> None:
        """Have rounds from now on do without this worker, which has no more data. It may still pull."""

    def rounds(self, key: Key) -> int:
        """Return how many pushes of this rank the key has taken; one in a lost worker's place goes on from there."""
        self._known(key)
        return 0

    @abstractmethod
    def wait(self) -> None:
        """Return when everything that this worker has begun is done.

        Raises:
            CollectiveError: something of it has failed.
        """

    def _waited(self, parts: Sequence[Pending], wait: bool) -> Pending:
        pending = parts[0] if len(parts) == 1 else PendingGroup(parts, self.one_deadline)
        if wait:
            pending.wait()
        return pending

    def one_deadline(self, until: float | None = None) -> AbstractContextManager[object]:
        """Have all waits of a block end together, where a store waits for others and keeps deadlines itself.

        Args:
            until: the end, on the clock of ``time.monotonic()``; None: the job's deadline, from now on.
        """
        return contextlib.nullcontext()

    def attention(self) -> AbstractContextManager[None]:
        """Promise for a block to call `attend` whenever something is pending.

        Nothing else need be woken for it, and what is begun may leave as late as with the next `attend`.
        """
        return contextlib.nullcontext()

    def attend(self, oldest: Pending, is_enough: Callable[[], bool]) -> None:  # noqa: B027  often, there is nothing to do
        """Go on with pending operations until ``oldest`` is done, or ``is_enough()``.

        That is asked again whenever something has come, and after `interrupt`. Stores whose operations go on by
        themselves return at once.

        Raises:
            DeadlineError: ``oldest`` is not done in time, as of `Pending.wait`.
        """

    def interrupt(self) -> None:  # noqa: B027  the same
        """Have an `attend` that waits ask whether it is enough. Any thread may call this."""

    @abstractmethod
    def close(self) -> None:
        """Wait for pending operations and close the store, as a ``with`` block does. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- MXNet's private names ----------------------------------------------------------------------------------------

    def _barrier(self) -> None:
        self.barrier()

    def _set_updater(self, updater: UpdateFunction) -> None:
        self.set_updater(updater)

    def _send_command_to_servers(self, head: int, body: str) -> None:
        """MXNet's numbered commands. Methods here, which all workers call alike, do the same.

        Raises:
            UnsupportedError: 0 and 1 (`set_optimizer`), 3 (the type), 4 (`set_gradient_compression`), 2 and 5.
        """
        instead = {
            0: "set_optimizer() tells servers the optimizer",
            1: "the optimizer's multi_precision tells servers",
            2: "servers stop when the last worker has closed its store",
            3: "the store's type says whether it is synchronous",
            4: "set_gradient_compression() tells servers",
            5: "servers have no profiler",
        }
        raise UnsupportedError(f"command {head} is not sent: {instead.get(head, 'there is no such command')}")

    # -- what a kind of store does ------------------------------------------------------------------------------------

    @abstractmethod
    def _init(self, pairs: list[tuple[Key, Any]]) -> None:
        """Create keys that do not exist."""

    @abstractmethod
    def _push(self, groups: list[KeyTensors], priority: int) -> Pending:
        """Push each key's values: tensors that are like the key's, dense or `RowSparse`."""

    @abstractmethod
    def _pull(self, groups: list[KeyTensors], priority: int, blocking: bool) -> Pending:
        """Fill each key's outs: dense tensors that may be written. ``blocking``: it is waited for next."""

    @abstractmethod
    def _pushpull(self, values: list[KeyTensors], outs: list[KeyTensors], priority: int, blocking: bool) -> Pending:
        """Push dense values, and fill dense outs with those of this round. ``blocking``: it is waited for next."""

    @abstractmethod
    def _pull_rows(self, key: Key, outs: list[RowSparse], rows: Any, priority: int) -> Pending:
        """Fill each out with the rows of these numbers; None: with all."""

    def _kind(self) -> type | None:
        return type(next(iter(self._specs))) if self._specs else None

    def _known(self, key: Key) -> TensorSpec:
        """Return the spec of a key; raises ArgumentError if it was never initialised."""
        check_key_type([key], self._kind())
        if key not in self._specs:
            raise ArgumentError(f"key {key!r} was never initialised; call init() with its first value")
        return self._specs[key]

    def _tensors(self, keys: Keys, values: Values, what: str = "value") -> list[KeyTensors]:
        """Return a user's arguments as keys that exist, and tensors that are like what those hold."""
        if type(keys) in KEY_TYPES and keys in self._specs and not isinstance(values, (list, tuple)):
            named: list[KeyTensors] = [(keys, [values])]  # the usual case, and the one that is timed
        else:
            named = group_by_key(keys, values, what, self._specs)
        groups = []
        for key, several in named:
            spec = self._specs.get(key) or self._known(key)
            tensors = [as_value(each) if what == "value" else _as_output(key, each) for each in several]
            check_tensor_specs(key, spec, tensors, can_be_sparse=spec.stype == ROW_SPARSE)
            groups.append((key, tensors))
        return groups


def _as_output(key: Key, out: Any) -> Any:
    """Return what receives a key's value, with errors that say so."""
    try:
        return as_value(out, writable=True)
    except (ArgumentError, UnsupportedTypeError) as error:
        raise type(error)(f"key {key!r}: out= cannot receive what is stored: {error}") from None


def check_optimizer(optimizer: object) -> None:
    """Raise ArgumentError if this is no optimizer of `reigen.optim`."""
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"an optimizer of reigen.optim is needed, for example reigen.optim.create('sgd', learning_rate=0.1); got "
            f"{type(optimizer).__name__}"
        )


def _check_priority(priority: object) -> int:
    """Return a priority as an int, before anything is begun: half an operation would never end."""
    try:
        number = index(priority)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"priority is an int, not {type(priority).__name__} ({priority!r})") from None
    if not -_PRIORITIES <= number < _PRIORITIES:
        raise ArgumentError(f"priority is an int of 32 bits, got {number}")
    return number


def _is_one_for_each(rows: Any) -> bool:
    """Return whether these are several arrays of numbers of rows, and not one."""
    return isinstance(rows, (list, tuple)) and any(getattr(each, "ndim", 0) > 0 for each in rows)


class PendingGroup:
    """Group of several `Pending` as one, or of none."""

    def __init__(
        self,
        parts: Sequence[Pending],
        one_deadline: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._parts, self._one_deadline = parts, one_deadline

    def wait(self, timeout: float | None = None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        with self._one_deadline():
            for part in self._parts:
                part.wait(None if until is None else max(0.0, until - time.monotonic()))

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        call_when_all_done([part.add_done_callback for part in self._parts], callback)


def call_when_all_done(
    add_callbacks: Sequence[Callable[[Callable[[], None]], None]], callback: Callable[[], None]
) -> None:
    """Call ``callback`` when all of which these are the ``add_done_callback`` are done; at once if there are none."""
    if not add_callbacks:
        callback()
        return
    left = itertools.count(len(add_callbacks) - 1, -1)

    def one_more() -> None:
        if next(left) == 0:
            callback()

    for add_callback in add_callbacks:
        add_callback(one_more)
