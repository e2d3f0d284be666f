"""gluon.Trainer's shape for torch: gradients go to a key-value store, and sums or updated weights come back."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from reigen import context, kv, optim
from reigen.cluster.environ import detect_job
from reigen.compression import means_none
from reigen.errors import ArgumentError, ConfigError, StepOrderError
from reigen.kv.update_on_kvstore import StoreKind, store_kind
from reigen.torch.adapter import TorchAdapter
from reigen.torch.kvstore.kvstore_sync import KVStoreSync, decide_update_location
from reigen.torch.kvstore.trainer_params import ROW_SPARSE, TrainerGradients, TrainerParam, parse_trainer_params

_log = logging.getLogger(__name__)
_ADAPTER = TorchAdapter()


class Trainer:
    """Applies an optimizer to parameters, with the gradients of all workers: through a store of :mod:`reigen.kv`.

    A step sums the gradients of all workers, divides them by ``batch_size`` and updates the weights: on the servers, or
    in every worker (``update_on_kvstore``; docs/trainer.md has the table). When it is made, all workers get the weights
    of worker 0. All workers make it alike; with a synchronous store, steps are collective.

    Args:
        params: a module (whose sparse embeddings are found), ``named_parameters()``, a dict of names, parameters, or
            dicts of these under ``"params"`` with ``lr_mult``, ``wd_mult``, ``stype`` or ``grad_stype``. Those
            that do not require gradients are given to all workers, too, and stay what they are.
        optimizer: a name or an optimizer of :mod:`reigen.optim`.
        optimizer_params: the named optimizer's parameters, ``{"learning_rate": 0.1}``.
        kvstore: a name for :func:`reigen.kv.create`, a store, or None: there is one worker.
        update_on_kvstore: who updates the weights; None: what suits the store.
        compression_params: gradients travel compressed, ``{"type": "2bit", "threshold": 0.5}``.

    Attributes:
        kvstore: the store, or None.
        update_on_kvstore: whether it updates the weights.

    Raises:
        ArgumentError: parameters, or a combination of store and options, that cannot be.
        ConfigError: an unknown store, optimizer or compression, or servers that are nowhere.
        MismatchError: the workers have different parameters: on all of them.

    Example:
        A loop of one of several workers (``reigen run -np 4 -s 2 python train.py``)::

            trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
            for images, labels in loader:
                trainer.zero_grad()
                cross_entropy(model(images), labels, reduction="sum").backward()
                trainer.step(batch_size * trainer.num_workers)
    """

    #: torch's GradScaler then leaves scale and overflow to ``step``.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        optimizer: str | optim.Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: str | kv.KVStore | None = "dist_sync",
        *,
        update_on_kvstore: bool | None = None,
        compression_params: Mapping[str, object] | None = None,
    ) -> None:
        self._entries = parse_trainer_params(params)
        self._optimizer = _with_multipliers(optim.create(optimizer, **dict(optimizer_params or {})), self._entries)
        #: what gradients are multiplied with besides; of the store, once it has the optimizer, with the batch size
        self._scale, self._sent_scale = self._optimizer.rescale_grad, 0.0
        self._num_steps = 0
        self._has_left = False
        if means_none(compression_params):
            compression_params = None
        self._is_compressed = bool(compression_params)
        self._owns_store = isinstance(kvstore, str)
        self.kvstore: Any = kv.create(kvstore) if isinstance(kvstore, str) else kvstore
        try:
            self._sync = self._connect(update_on_kvstore, compression_params)
        except BaseException:
            self.close()
            raise
        self.update_on_kvstore = self._sync is not None and self._sync.on_store
        if self._sync is not None and self.update_on_kvstore:
            self._num_steps = self._sync.resume()
        self._updater = None if self.update_on_kvstore else optim.Updater(self._optimizer)
        self._gradients = TrainerGradients(
            self._entries,
            on_store=self.update_on_kvstore,
            keeps_sparse=self._sync is None,
            counts=self._sync is not None and self._sync.counts_workers,
        )

    # -- the steps ----------------------------------------------------------------------------------------------------

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients of all workers, divide by ``batch_size``, update the weights.

        Args:
            batch_size: what the sum of all workers' gradients is divided by: with losses that sum over a worker's
                samples, the number of samples of all workers together; with mean losses, the number of workers. It may
                change from step to step, and differ between workers: each worker's gradients are divided by its own.
            ignore_stale_grad: parameters that got no gradient contribute zeros (to an asynchronous store: nothing).

        Raises:
            ArgumentError: a parameter has no gradient; the batch size is not above 0. Nothing was sent.
            StepOrderError: this worker has left.
            CollectiveError: another worker or a server was lost, or did not come before the deadline.
        """
        self._check_can_step()
        if self._sync is not None:
            self._sync.begin()
        scale, overflow = self._loss_scale()
        if not self.update_on_kvstore:
            if overflow and self._sync is None:
                return
            _check_batch(batch_size)
            self._sum(ignore_stale_grad, 1.0 / scale, overflow)
            self._update_locally(batch_size)
            context.mark("STEP")
            return
        assert self._sync is not None
        gradients = self._gradients.gradients(ignore_stale_grad)
        factor = self._send_optimizer(batch_size) / scale
        self._sync.update([(index, self._gradients.of(index, each, factor, overflow)) for index, each in gradients])
        self._num_steps += 1
        context.mark("STEP")

    def allreduce_grads(self, ignore_stale_grad: bool = False) -> None:
        """The first half of a step that updates in the worker: every ``.grad`` becomes the sum over all workers.

        Clip or look at the gradients afterwards, then call :meth:`update`.

        Raises:
            ArgumentError: the store updates the weights; otherwise as :meth:`step`.
        """
        self._check_can_step("allreduce_grads")
        if self._sync is not None:
            self._sync.begin()
        self._sum(ignore_stale_grad, 1.0, False)

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """The second half: update the weights with the gradients as they are, divided by ``batch_size``.

        Raises:
            ArgumentError: the store updates the weights; otherwise as :meth:`step`.
        """
        self._check_can_step("update")
        self._gradients.gradients(ignore_stale_grad)
        self._update_locally(batch_size)

    def zero_grad(self) -> None:
        """Forget the gradients: the next backward pass begins with none."""
        for entry in self._entries:
            entry.parameter.grad = None

    def row_sparse_pull(self, parameter: torch.Tensor, row_ids: torch.Tensor) -> None:
        """Have a parameter hold some of its rows as the store has them now: before a forward pass that uses them.

        Args:
            parameter: one with ``stype="row_sparse"``, whose rows a step does not bring.
            row_ids: their numbers, in any shape, order and repetition.

        Raises:
            ArgumentError: the parameter is not one of these, or a row does not exist.
        """
        entry = next((each for each in self._entries if each.parameter is parameter), None)
        if entry is None or entry.stype != ROW_SPARSE or self._sync is None:
            raise ArgumentError(
                'row_sparse_pull() takes a parameter of this Trainer that was given with stype="row_sparse"'
            )
        self._sync.begin()
        self._sync.pull_rows(entry, row_ids)

    def leave(self) -> None:
        """Leave for want of batches; the other workers go on: for parts of different length.

        Returns when all workers have left. They then hold the same weights, if the store updates them; if the workers
        do, one that left early keeps the weights that it had. No step can follow.

        Raises:
            DeadlineError: names the workers that are still training at the deadline (REIGEN_DEADLINE).

        Warns:
            UserWarning: the workers update the weights, and there are several.
        """
        if self._sync is None or self._has_left:
            return
        self._has_left = True
        self.kvstore.leave()
        self.kvstore.barrier()
        if self.update_on_kvstore and self._sync.has_servers:
            self._sync.refresh()
        elif self.num_workers > 1:
            warnings.warn(
                "a worker that left early keeps the weights of its last step, as each worker updates its own; use "
                "update_on_kvstore=True, or equal parts (reigen.data)",
                UserWarning,
                stacklevel=2,
            )

    # -- the optimizer ------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer as it is now."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The rate of this worker's next step, without multipliers."""
        return self._optimizer.rate_of(self._optimizer.begin_num_update + self._num_steps + 1)

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate for all updates from now on, those of the servers included.

        All workers call it between the same two steps. Of an asynchronous store's workers, worker 0's calls count: one
        that lags behind would set the rate back.

        Raises:
            ArgumentError: the optimizer has a schedule.
            ConfigError: there can be no such rate.
        """
        self._optimizer = self._optimizer.with_learning_rate(lr)
        if self._sent_scale and (self.rank == 0 or store_kind(self.kvstore) is not StoreKind.ASYNCHRONOUS):
            self.kvstore.set_learning_rate(lr)

    @property
    def num_steps(self) -> int:
        """Steps so far: where a loop goes on after `load_states`, or in the place of a worker that was lost."""
        return self._num_steps

    @property
    def num_workers(self) -> int:
        """Workers whose gradients are added up; 1 without a store."""
        return 1 if self.kvstore is None else self.kvstore.num_workers

    @property
    def rank(self) -> int:
        """Number of this worker; 0 without a store."""
        return 0 if self.kvstore is None else self.kvstore.rank

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the trained parameters, for torch's GradScaler."""
        return [{"params": [entry.parameter for entry in self._entries if entry.parameter.requires_grad]}]

    # -- states -------------------------------------------------------------------------------------------------------

    def save_states(self, fname: str | Path) -> None:
        """Write the optimizer, with its learning rate, and its states to a file; of all servers, on any one worker.

        With ``compression_params``, what this worker has not sent yet is kept, too: let each worker write a file of its
        own, and load it again. (A worker that updates by itself writes it beside, to a file ``fname.residuals``.)

        Args:
            fname: the file; it is replaced as a whole. It holds numbers and names only, no code.

        Raises:
            ArgumentError: the store updates the weights, and there was no step yet.
            OSError: the file cannot be written.
        """
        if self._updater is None:
            self.kvstore.save_optimizer_states(fname, dump_optimizer=True)
            return
        self._updater.set_optimizer(self._optimizer)
        self._updater.save(fname, dump_optimizer=True)
        if self._is_compressed:
            self.kvstore.save_optimizer_states(_residuals_path(fname))

    def load_states(self, fname: str | Path) -> None:
        """Go on with what :meth:`save_states` wrote, by a job of any number of servers: its optimizer, and its states.

        All workers call it, before the first step, with a file that all of them can read.

        Raises:
            StepOrderError: there was a step already.
            ConfigError: it is no such file, or damaged, or of other parameters.
            OSError: the file cannot be read.
        """
        if self._num_steps:
            raise StepOrderError("load_states() comes before the first step; make another Trainer")
        states = optim.States.load(fname)
        optimizer = states.optimizer or self._optimizer
        if self._updater is not None:
            self._updater.set_states(states)
            if self._is_compressed and _residuals_path(fname).exists():
                self.kvstore.load_optimizer_states(_residuals_path(fname))
        else:
            self._set_optimizer(optimizer)
            self.kvstore.load_optimizer_states(fname)
            self.kvstore.barrier()  # or a worker could step before the states are there
        self._optimizer = optimizer.replace(rescale_grad=self._scale)
        counts = [piece.count for piece in states.pieces]
        num_updates = max(counts, default=optimizer.begin_num_update) - optimizer.begin_num_update
        is_asynchronous = store_kind(self.kvstore) is StoreKind.ASYNCHRONOUS  # where each worker's push is an update
        self._num_steps = num_updates // self.num_workers if is_asynchronous else num_updates

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up the store, if it was made here. May be called twice; the end of a ``with`` block does it."""
        if self._owns_store and self.kvstore is not None:
            self.kvstore.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._owns_store and self.kvstore is not None:
            # after an error, the others must not go on without this worker
            self.kvstore.__exit__(kind, error, traceback)

    # -- how it is done -----------------------------------------------------------------------------------------------

    def _connect(self, wanted: bool | None, compression: Mapping[str, object] | None) -> KVStoreSync | None:
        place, reason = decide_update_location(self.kvstore, self._entries, wanted, by_name=self._owns_store)
        _log.info("weights are updated %s: %s", "on the store" if place.on_store else "by the worker", reason)
        if not place.on_store and getattr(self.kvstore, "is_elastic", False):
            raise ArgumentError(
                "in an elastic job the servers have to update the weights (update_on_kvstore=True): workers that come "
                "later take them from there"
            )
        if place.needs_store:
            if compression:
                self.kvstore.set_gradient_compression(compression)
            exchange = KVStoreSync(self.kvstore, store_kind(self.kvstore), self._entries, on_store=place.on_store)
            exchange.begin()
            return exchange
        if compression:
            raise ArgumentError(f"compression_params need a store through which gradients travel: {reason}")
        if self.kvstore is not None:
            self._warn_if_others()
            self.close()
            self.kvstore = None
        return None

    def _warn_if_others(self) -> None:
        try:
            size = detect_job(os.environ).size
        except ConfigError:
            return  # who started this process is for those to find out who need the others
        if size > 1:
            warnings.warn(
                f"this is one of {size} processes, which kvstore={self.kvstore.type!r} does not connect: each trains "
                'by itself. Use kvstore="ring", or "dist_sync" with servers; or None, if that is meant.',
                UserWarning,
                stacklevel=4,
            )

    def _check_can_step(self, half: str = "") -> None:
        """Check that this worker can take a step, or ``half`` of one, by the name of its method."""
        if half and self.update_on_kvstore:
            raise ArgumentError(
                f"{half}() is for weights that the worker updates; here the store does: use step(), or make the "
                "Trainer with update_on_kvstore=False"
            )
        if self._has_left:
            raise StepOrderError("this worker has left (Trainer.leave()); it cannot take another step")

    def _send_optimizer(self, batch_size: float) -> float:
        """Send the optimizer, once; what gradients are multiplied with so that they are divided by ``batch_size``.

        Servers divide by the first batch size. A worker whose batch is of another one corrects its gradients before
        they leave, so that the correction belongs to this worker, this round and nothing else.
        """
        _check_batch(batch_size)
        scale = self._scale / batch_size
        if not self._sent_scale:
            self._set_optimizer(self._optimizer.replace(rescale_grad=scale))
        return scale / self._sent_scale

    def _set_optimizer(self, optimizer: optim.Optimizer) -> None:
        self.kvstore.set_optimizer(optimizer)
        self._sent_scale = optimizer.rescale_grad

    def _loss_scale(self) -> tuple[float, bool]:
        """Return GradScaler's factor of the loss, and whether some gradient of this worker is not finite."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        return (1.0 if scale is None else float(scale)), (found_inf is not None and float(found_inf) > 0)

    def _sum(self, ignore_stale: bool, factor: float, overflow: bool) -> None:
        """Every gradient becomes the sum over all workers, multiplied with ``factor`` before."""
        sums = []
        for index, gradient in self._gradients.gradients(ignore_stale):
            own = self._gradients.of(index, gradient, factor, overflow)
            self._entries[index].parameter.grad = own
            if own is not None:
                sums.append((index, own))
        if self._sync is not None:
            self._sync.sum(sums)

    def _update_locally(self, batch_size: float) -> None:
        """Update every parameter that requires and has a gradient."""
        _check_batch(batch_size)
        self._num_steps += 1
        assert self._updater is not None
        self._updater.set_optimizer(self._optimizer.replace(rescale_grad=self._scale / batch_size))
        for entry in self._entries:
            if entry.parameter.requires_grad and entry.parameter.grad is not None:
                _update_parameter(self._updater, entry, entry.parameter.grad)


def _update_parameter(updater: optim.Updater, entry: TrainerParam, gradient: torch.Tensor) -> None:
    """Update weights: in place in the memory of a CPU, otherwise on a copy on the host that is written back."""
    parameter = entry.parameter
    dtype = _ADAPTER.dtype(parameter)
    weight, aliases = _ADAPTER.array(parameter)
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        rows = gradient.indices()[0].cpu().numpy().astype(np.int64, copy=False)
        values, _ = _ADAPTER.array(gradient.values())
        updater.update_rows(entry.key, rows, values, weight, dtype)
    else:
        values, _ = _ADAPTER.array(gradient)
        updater(entry.key, values, weight, dtype)
    if aliases:
        _ADAPTER.mark_modified(parameter)
    else:
        _ADAPTER.write(parameter, weight)


def _with_multipliers(optimizer: optim.Optimizer, entries: Sequence[TrainerParam]) -> optim.Optimizer:
    """Those of the parameters, beside those that the optimizer has: both count."""
    changes = {}
    for name in ("lr_mult", "wd_mult"):
        factors = dict(getattr(optimizer, name))
        for entry in entries:
            factor = getattr(entry, name)
            if factor != 1.0:
                factors[entry.key] = factors.get(entry.key, 1.0) * factor
        changes[name] = factors
    return optimizer.replace(**changes)


def _residuals_path(path: str | Path) -> Path:
    """Return the file of a worker that updates by itself, for compression's residuals."""
    return Path(f"{os.fspath(path)}.residuals")


def _check_batch(batch_size: float) -> None:
    if not 0 < batch_size < math.inf:
        raise ArgumentError(f"batch_size must be a number above 0, got {batch_size}")
