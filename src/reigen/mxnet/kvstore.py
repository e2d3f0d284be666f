"""Stores of Reigen for MXNet's `mx.kv.create`, `gluon.Trainer` and `mx.mod.Module`.

``import reigen.mxnet.kvstore`` registers them as ``reigen_dist_sync``, ``reigen_dist_async`` and so on, beside MXNet's
own. :func:`register_kvstores` puts them in the place of MXNet's distributed ones: `reigen run --as-mxnet` calls it in
scripts that know nothing of Reigen.

Dense pushes and pulls go through MXNet's engine (:mod:`reigen.mxnet.kvstore_queue`): the caller does not wait. Values
are read and written where they are; those on GPUs go through an NDArray in host memory. A small NDArray for each key,
which all its operations seem to write, keeps them in order. Row-sparse operations, and those that all workers do
together, wait.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import mxnet as mx
from mxnet.base import KVStoreHandle, MXNetError

from reigen import kv, optim
from reigen.errors import ArgumentError, PeerLostError
from reigen.kv import Pending
from reigen.kv.factory import STORE_TYPES
from reigen.kv.values import ROW_SPARSE, Key, group_by_key
from reigen.mxnet.arrays import is_sparse, on_host, reorder_in_engine
from reigen.mxnet.errors import raises_mxnet_errors
from reigen.mxnet.kvstore_keys import KVStoreKey, get_rows, set_rows
from reigen.mxnet.kvstore_queue import KVStoreQueue
from reigen.mxnet.optimizer_conversion import LocalLearningRate, convert_optimizer

#: Types that have no counterpart, or another meaning, in MXNet 1.9.1; those of one process stay MXNet's.
NAMES = tuple(sorted(name for name, meant in STORE_TYPES.items() if meant.where != "local"))


class KVStore(mx.kvstore.KVStore):
    """Store of :mod:`reigen.kv` behind MXNet's interface. It inherits from MXNet's, for code that checks the class.

    Args:
        name: its type; None: that of the class.
        options: of `reigen.kv.create`.

    Attributes:
        store: the store of `reigen.kv`. Call it only while nothing is on its way (`wait`).
    """

    registered_type: ClassVar[str] = "dist_sync"

    @raises_mxnet_errors
    def __init__(self, name: str | None = None, **options: Any) -> None:
        # not the one of the base class, which needs a store of MXNet's library
        self.handle = KVStoreHandle()
        self._type = (name or self.registered_type).lower()
        self.store = kv.create(self._type.removeprefix("reigen_"), **options)
        self._is_ring = STORE_TYPES[self.store.type].where == "ring"
        self._queue = KVStoreQueue(self.store)
        self._held: dict[Key, KVStoreKey] = {}
        self._updater: Any = None
        self._rate: LocalLearningRate | None = None
        #: the optimizer as it was set, and the rate that servers know
        self._converted: optim.Optimizer | None = None
        self._sent_rate = 0.0
        self._is_closed = False
        atexit.register(self._at_exit)

    def __del__(self) -> None:
        """Free nothing: there is no store of MXNet's library."""

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        """Name that it was created by."""
        return self._type

    @property
    def rank(self) -> int:
        """Number of this worker."""
        return self.store.rank

    @property
    def num_workers(self) -> int:
        """Number of workers that share the store."""
        return self.store.num_workers

    def is_capable(self, capability: str) -> bool:
        """Return whether it can ``"optimizer"``: update weights, which those on servers can; raises ValueError."""
        if capability.lower() != self.OPTIMIZER:
            raise ValueError(f"unknown capability {capability!r}")
        return not self._is_ring

    # -- values -------------------------------------------------------------------------------------------------------

    @raises_mxnet_errors
    def init(self, key: Any, value: Any) -> None:
        """Create keys, with the values of worker 0. All workers call it alike."""
        self._queue.settle()
        pairs = group_by_key(key, value)
        values = [self._first_value(one, each[0]) for one, each in pairs]
        for one, each in pairs:
            if len(each) > 1:
                raise ArgumentError(f"key {one!r} was given {len(each)} times in one init(); a key has one value")
        with self._queue.store_lock:
            self.store.init([one for one, _ in pairs], values)
        for (one, each), first in zip(pairs, values, strict=True):
            self._held[one] = KVStoreKey(each[0], isinstance(first, kv.RowSparse))

    @raises_mxnet_errors
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Do `init`, then `pull`."""
        self.init(key, value)
        self.pull(key, out, priority)

    @raises_mxnet_errors
    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Add values to this round of their keys, without waiting, as dense `pull` and `pushpull`."""
        groups = self._checked(key, value)
        self._update_rate([one for one, _ in groups])
        for one, values in groups:
            if any(is_sparse(each) for each in values) and self._held[one].is_sparse:
                self._queue.settle()
                with self._queue.store_lock:
                    self.store.push(one, [get_rows(each) for each in values], priority)
            else:
                self._begin(one, _on_host(values), [], priority)

    @raises_mxnet_errors
    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Pull the stored values into ``out``; row_sparse ones stay, with a warning: `row_sparse_pull`."""
        if out is None:
            raise ArgumentError("pull() needs out=: the NDArray that receives what is stored")
        if not ignore_sparse and not self._is_ring:  # as in MXNet
            raise ArgumentError("pull() of a distributed store leaves row_sparse outs alone; use row_sparse_pull()")
        for one, outs in self._checked(key, out, "out"):
            dense = [each for each in outs if not is_sparse(each)]
            sparse = [each for each in outs if is_sparse(each)]
            if dense:
                self._begin(one, [], dense, priority)
            if sparse and ignore_sparse:
                warnings.warn(
                    f"key {one!r}: pull() leaves row_sparse outs as they are; use row_sparse_pull()", stacklevel=2
                )
            elif sparse:
                self._pull_rows(one, sparse, None, priority)

    @raises_mxnet_errors
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Do `push` and `pull` in one; into the values themselves without ``out``."""
        groups = self._checked(key, value)
        outs = dict(groups if out is None else self._checked(key, out, "out"))
        if set(outs) != {one for one, _ in groups}:
            raise ArgumentError("pushpull() needs an out for each key that it is given a value for")
        for one, values in groups:
            if any(is_sparse(each) for each in (*values, *outs[one])):
                raise ArgumentError(f"key {one!r}: pushpull() takes dense NDArrays only, got a row_sparse one")
        self._update_rate([one for one, _ in groups])
        for one, values in groups:
            self._begin(one, _on_host(values), outs[one], priority)

    @raises_mxnet_errors
    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Pull some of the stored rows into row_sparse ``out``."""
        if out is None or row_ids is None:
            raise ArgumentError("row_sparse_pull() needs out= and row_ids=")
        for (one, outs), (_, ids) in zip(
            group_by_key(key, out, "out"), group_by_key(key, row_ids, "row_ids"), strict=True
        ):
            if not all(is_sparse(each) for each in outs):
                raise ArgumentError(f"key {one!r}: out of row_sparse_pull() is a row_sparse NDArray, got a dense one")
            if len(ids) == 1:
                self._pull_rows(one, outs, ids[0], priority)
            else:
                for each, rows in zip(outs, ids, strict=True):
                    self._pull_rows(one, [each], rows, priority)

    # -- optimizers ---------------------------------------------------------------------------------------------------

    @raises_mxnet_errors
    def set_optimizer(self, optimizer: Any) -> None:
        """Have pushes update the stored values from now on. All workers call it alike, before the first push.

        A later change of the optimizer's learning rate reaches the servers with the next push.

        Args:
            optimizer: MXNet's, if it has a counterpart (`reigen.mxnet.optimizer_conversion`), or one of `reigen.optim`.

        Raises:
            ConfigError: it has no counterpart; the message says what to do.
        """
        self._queue.settle()
        if isinstance(optimizer, optim.Optimizer):
            converted, self._rate = optimizer, None
        else:
            converted, self._rate = convert_optimizer(optimizer)
            # a Trainer reads it after it has loaded states: ``kvstore._updater.optimizer``
            self._updater = SimpleNamespace(optimizer=optimizer)
        before, self._converted = self._converted, converted
        if before is not None and _is_same_but_for_rate(before, converted):
            self._send_rate(converted.learning_rate)  # a common way to change the rate: MXNet's servers see no other
            return
        self._sent_rate = converted.learning_rate
        with self._queue.store_lock:
            self.store.set_optimizer(converted)

    @raises_mxnet_errors
    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Have dense values travel in fewer bits, like ``{"type": "2bit"}`` (docs/kv.md); before the first push."""
        if not isinstance(compression_params, Mapping):
            raise ArgumentError(
                'compression_params is a dict such as {"type": "2bit", "threshold": 0.5}, '
                f"got {type(compression_params).__name__} {compression_params!r:.100}"
            )
        self._queue.settle()
        with self._queue.store_lock:
            self.store.set_gradient_compression(
                {name: _parse_number(each) for name, each in compression_params.items()}
            )

    @raises_mxnet_errors
    def save_optimizer_states(self, fname: str | Path, dump_optimizer: bool = False) -> None:
        """Write the optimizer's states, of all servers, to a file: numbers and names, no code."""
        self._queue.settle()
        with self._queue.store_lock:
            self.store.save_optimizer_states(fname, dump_optimizer)

    @raises_mxnet_errors
    def load_optimizer_states(self, fname: str | Path) -> None:
        """Read a file of `save_optimizer_states`. All workers call it, before they go on."""
        self._queue.settle()
        with self._queue.store_lock:
            self.store.load_optimizer_states(fname)
            self.store.barrier()
        saved = optim.States.load(fname).optimizer
        if saved is not None and self._updater is not None and self._updater.optimizer.lr_scheduler is None:
            self._updater.optimizer.set_learning_rate(saved.learning_rate)

    @raises_mxnet_errors
    def _set_updater(self, updater: Any) -> None:
        raise ArgumentError("a store on servers takes no updater, which is code; use set_optimizer()")

    # -- end ----------------------------------------------------------------------------------------------------------

    @raises_mxnet_errors
    def _barrier(self) -> None:
        """Wait until all workers have come here, but not for pending operations."""
        self._queue.check()
        self.store.barrier()

    @raises_mxnet_errors
    def _send_command_to_servers(self, head: int, body: str) -> None:
        self.store._send_command_to_servers(head, body)

    @raises_mxnet_errors
    def wait(self) -> None:
        """Wait for pending operations, and raise their error."""
        self._queue.settle()

    @raises_mxnet_errors
    def close(self) -> None:
        """Wait, and leave the store. May be called twice; the end of the process does it."""
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self._at_exit)
            try:
                if not self._is_ring:  # servers may wait until they know that this worker has nothing more to push
                    self._queue.wait_until_begun()
                    with contextlib.suppress(PeerLostError, ArgumentError):  # no servers are left; it was closed
                        self.store.leave()
            finally:
                self._queue.wait_until_done()
                self.store.close()
                self._queue.close()

    def _at_exit(self) -> None:
        """Close the store: MXNet's engine must not call Python any more when this process has left it."""
        if not self._queue.is_owner_process:
            return
        if getattr(sys, "last_value", None) is None:
            self.close()
            return
        self.store.__exit__(sys.last_type, sys.last_value, None)  # the others learn that this worker is lost
        for end in (self.close, mx.nd.waitall):  # what was on its way fails; the user has the first error already
            with contextlib.suppress(MXNetError):
                end()

    # -- implementation -----------------------------------------------------------------------------------------------

    def _begin(self, key: Key, values: Sequence[Any], outs: Sequence[Any], priority: int) -> None:
        """Have MXNet's engine push ``values`` (none: nothing), and fill ``outs`` (none: push alone)."""
        held = self._held[key]
        are_on_host = all(on_host(out) for out in outs)
        targets = outs if are_on_host else [held.host_buffer]
        begin = functools.partial(self._operate, key, values, targets, priority)
        name = f"kv.{'pushpull' if values and outs else 'push' if values else 'pull'} {key}"
        self._queue.add(begin, reads=values, writes=[held.order, *targets], priority=priority, name=name)
        if not are_on_host:
            with mx.autograd.pause():
                for out in outs:
                    held.host_buffer.copyto(out)

    def _operate(self, key: Key, values: Sequence[Any], targets: Sequence[Any], priority: int) -> Pending | None:
        """Push and pull in the store, in MXNet's engine."""
        for target in targets:
            reorder_in_engine(target)
        held = self._held[key]
        reads, writes = _one_or_all([*map(held.view, values)]), _one_or_all([*map(held.view, targets)])
        if not values:
            return self.store.pull(key, writes, priority, wait=False)
        if targets:
            return self.store.pushpull(key, reads, writes, priority, wait=False)
        pending = self.store.push(key, reads, priority)
        return pending if self._is_ring else None  # for servers it is over when they have it

    def _pull_rows(self, key: Key, outs: Sequence[Any], rows: Any, priority: int) -> None:
        self._queue.settle()
        with self._queue.store_lock:
            received = self._held[key].rows()
            if rows is None:
                self.store.pull(key, received, priority, ignore_sparse=False)
            else:
                self.store.row_sparse_pull(key, received, priority, rows.asnumpy())
        with mx.autograd.pause():  # a gluon parameter pulls its rows in the forward pass
            for out in outs:
                set_rows(received, out)

    def _update_rate(self, keys: Sequence[Key]) -> None:
        """Send a new learning rate to the servers, before its pushes and behind all others."""
        if self._rate is not None:
            self._send_rate(self._rate.before(keys))

    def _send_rate(self, rate: float) -> None:
        if rate == self._sent_rate:
            return
        self._sent_rate = rate
        if self.store.staleness and self.rank:  # a worker that lags behind would set it back
            return
        self._queue.settle()
        with self._queue.store_lock:
            self.store.set_learning_rate(rate)

    def _first_value(self, key: Key, value: Any) -> Any:
        """Return the first value of a key: as row-sparse where a Trainer's parameter has row-sparse gradients."""
        if is_sparse(value):
            return get_rows(value)
        parameters = {} if self._updater is None else self._updater.optimizer.param_dict
        if getattr(parameters.get(key), "_grad_stype", "default") == ROW_SPARSE:
            return get_rows(value)
        return value.asnumpy()

    def _checked(self, key: Any, value: Any, what: str = "value") -> list[tuple[Key, list[Any]]]:
        """Check arguments: keys that exist, and NDArrays that are like their values."""
        groups = group_by_key(key, value, what)
        for one, values in groups:
            if one not in self._held:
                raise ArgumentError(f"key {one!r} was never initialised; call init() with its first value")
            for each in values:
                self._held[one].check(one, each)
        return groups


def create(name: str, **options: Any) -> KVStore:
    """Create a store by its name in `reigen.kv.create`, with its options: ``create("dist_ssp", staleness=2)``."""
    return KVStore(name, **options)


def register_kvstores() -> None:
    """Have `mx.kv.create` make Reigen's stores under MXNet's names of distributed ones, ``horovod`` and ``byteps``.

    Other names with ``dist`` in them are errors then, where MXNet would wait for servers of its own.
    """
    for name in NAMES:
        _register(name, name)
    original = mx.kvstore.create

    @functools.wraps(original)
    @raises_mxnet_errors
    def create(name: Any = "local") -> Any:
        if isinstance(name, str) and "dist" in name.lower() and name.lower() not in mx.kvstore.KVStoreBase.kv_registry:
            raise ArgumentError(f"unknown type of store {name!r}; the distributed ones are {', '.join(NAMES)}")
        return original(name)

    mx.kvstore.create = create
    for each in ("set_config", "set_state", "dump", "pause", "resume"):
        setattr(mx.profiler, each, _profile_workers_only(getattr(mx.profiler, each)))


def _profile_workers_only(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function of ``mx.profiler`` that does nothing for servers, which are none of MXNet's."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def profile(*args: Any, **kwargs: Any) -> None:
        facts = signature.bind(*args, **kwargs).arguments
        if {**facts, **facts.get("kwargs", {})}.get("profile_process") == "server":
            warnings.warn(
                "Reigen's servers cannot be profiled by mx.profiler: profile_process='server' does nothing "
                "(REIGEN_KV_VERBOSE=1 logs what they do)",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        function(*args, **kwargs)

    return profile


def _register(name: str, kind: str) -> None:
    """Register a class under a name, unless that exists already."""
    if name not in mx.kvstore.KVStoreBase.kv_registry:
        made = type(name, (KVStore,), {"registered_type": kind, "__module__": __name__})
        mx.kvstore.KVStoreBase.register(made)


def _one_or_all(arrays: list[Any]) -> Any:
    """Return one array itself, several as a list: most stores have one device."""
    return arrays[0] if len(arrays) == 1 else arrays


def _parse_number(value: Any) -> Any:
    """Parse a number that was given as text, as command lines have it."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _is_same_but_for_rate(one: optim.Optimizer, other: optim.Optimizer) -> bool:
    has_schedule = one.lr_scheduler is not None or other.lr_scheduler is not None
    return not has_schedule and one == other.replace(learning_rate=one.learning_rate)


def _on_host(values: Sequence[Any]) -> list[Any]:
    """Copy the devices' values to dense NDArrays in host memory."""
    with mx.autograd.pause():
        dense = [each.tostype("default") if is_sparse(each) else each for each in values]
        return [each if on_host(each) else each.as_in_context(mx.cpu()) for each in dense]


for _name in NAMES:
    _register(f"reigen_{_name}", f"reigen_{_name}")
