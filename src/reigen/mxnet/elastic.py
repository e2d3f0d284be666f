"""Elastic training with MXNet: ``hvd.elastic``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import mxnet as mx
from mxnet.gluon.parameter import DeferredInitializationError

from reigen.api.functions import broadcast_object
from reigen.api.job import rank
from reigen.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, history, leave, membership
from reigen.elastic.loop import repeat_in_views
from reigen.errors import ArgumentError
from reigen.mxnet.engine import change_job, written_again
from reigen.mxnet.functions import broadcast_parameters

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "MXNetState",
    "ObjectState",
    "State",
    "history",
    "leave",
    "run",
]

#: Attributes of an optimizer that are no state of the training; the trainer sets the factor in each step.
_NOT_STATE = {"param_dict", "idx2name", "sym_info", "rescale_grad", "_index_update_count"}


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, as `reigen.elastic.run` does; failures in MXNet's engine count, too.

    They come where the function waits for an array, at the latest in ``state.commit()``.
    """
    return repeat_in_views(func, reset=lambda: change_job(membership.reset), errors=written_again)


class MXNetState(ObjectState):
    """State of gluon Parameters and their trainer; other keyword arguments are attributes as of `ObjectState`.

    A ``DistributedTrainer``, or a trainer with a ``DistributedOptimizer``, goes on with the members that there are.

    Args:
        params: ``net.collect_params()``, or a dict of Parameters or NDArrays. Their shapes have to be known: with
            deferred initialisation, call the net once before.
        trainer: a ``gluon.Trainer``; its optimizer's states and counts belong to the state, too.
        kwargs: names and first values of more attributes, such as ``epoch=0, batch=0``.

    Raises:
        ArgumentError: a parameter has no values yet; or, in a newcomer, they are not those of the members.
    """

    def __init__(self, params: Mapping[str, Any], trainer: Any = None, **kwargs: Any) -> None:
        self.params, self.trainer = params, trainer
        self._saved_arrays: dict[str, list[Any]] = {}
        self._saved_optimizer: Any = None
        super().__init__(broadcast_object, rank, **kwargs)

    def save(self) -> None:
        """Keep copies of the parameters, of the optimizer's state and of the attributes."""
        copies = {name: [array.copy() for array in arrays] for name, arrays in self._arrays().items()}
        for arrays in copies.values():
            for array in arrays:
                array.wait_to_read()  # a step that has failed is no commit
        self._saved_optimizer = copy.deepcopy(self._optimizer_state())
        self._saved_arrays = copies
        super().save()

    def restore(self) -> None:
        """Go back to the saved values."""
        for name, arrays in self._arrays().items():
            for array, saved in zip(arrays, self._saved_arrays[name], strict=True):
                saved.copyto(array)
        self._set_optimizer_state(copy.deepcopy(self._saved_optimizer))
        super().restore()

    def sync(self) -> None:
        """Collective: parameters, optimizer and attributes become those of rank 0, and are saved."""
        own = [f"{name}: {arrays[0].shape} {arrays[0].dtype.__name__}" for name, arrays in self._arrays().items()]
        expected, optimizer = broadcast_object((own, self._optimizer_state()), name="elastic.optimizer")
        if own != expected:
            different = next((pair for pair in zip(own, expected, strict=False) if pair[0] != pair[1]), None)
            here, there = different or (f"{len(own)} parameters", f"{len(expected)}")
            raise ArgumentError(f"the parameters of this rank are not those of rank 0: {here} here, {there} there")
        broadcast_parameters(self.params, 0, prefix="elastic.")
        if rank():
            self._set_optimizer_state(optimizer)
        super().sync()

    def _arrays(self) -> dict[str, list[Any]]:
        """Return the parameters' arrays, one for each context."""
        found = {}
        for name, value in sorted(self.params.items()):
            try:
                found[name] = [value] if isinstance(value, mx.nd.NDArray) else value.list_data()
            except (DeferredInitializationError, RuntimeError) as error:
                raise ArgumentError(
                    f"parameter {name} has no values yet: initialize the net, and call it once, before its state is "
                    "made"
                ) from error
        return found

    def _optimizer_state(self) -> Any:
        if self.trainer is None:
            return None
        optimizer = _own_optimizer(self.trainer)
        return self.trainer._updaters[0].get_states(dump_optimizer=False), {
            name: value for name, value in vars(optimizer).items() if name not in _NOT_STATE
        }

    def _set_optimizer_state(self, state: Any) -> None:
        if self.trainer is None:
            return
        states, attributes = state
        for updater in self.trainer._updaters:
            updater.set_states(states)
        optimizer = _own_optimizer(self.trainer)
        scheduler = optimizer.lr_scheduler
        vars(optimizer).update(attributes)
        optimizer._index_update_count = optimizer._all_index_update_counts[0]  # which MXNet changes by this name
        if scheduler is not None:  # it stays the object that the program has
            vars(scheduler).update(vars(optimizer.lr_scheduler))
            optimizer.lr_scheduler = scheduler


def _own_optimizer(trainer: Any) -> Any:
    """Return the optimizer behind a DistributedOptimizer."""
    return vars(trainer.optimizer).get("_optimizer", trainer.optimizer)
