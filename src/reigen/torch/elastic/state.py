"""State of a training with PyTorch: modules, optimizers, samplers and schedulers by handlers, the rest as objects."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reigen import context as contexts
from reigen.api import objects
from reigen.api.functions import broadcast_object
from reigen.api.job import rank
from reigen.elastic.state import ObjectState
from reigen.errors import ArgumentError
from reigen.torch.elastic.sampler import ElasticSampler
from reigen.torch.optimizers.optimizer_wrapper import WrappedOptimizer
from reigen.torch.state import broadcast_optimizer_state, broadcast_parameters


class StateHandler(ABC):
    """Handler of one kind of attribute of a `TorchState`.

    Args:
        value: the attribute.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    @abstractmethod
    def save(self) -> None:
        """Keep a copy."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the copy."""

    @abstractmethod
    def sync(self) -> None:
        """Collective: become what rank 0's is."""

    def set_value(self, value: Any) -> None:
        """Handle another object from now on."""
        self.value = value
        self.save()

    def reset(self) -> None:  # noqa: B027 - most have nothing to do
        """Follow a change of members."""

    def abandon(self) -> None:  # noqa: B027 - likewise
        """Drop an unfinished step, before `restore`."""

    def describe(self) -> list[str]:
        """Return what must be the same on all ranks, in lines."""
        return []


class _StateDictHandler(StateHandler):
    """Handler of what has ``state_dict()`` and ``load_state_dict()``."""

    _saved: Any = None

    def save(self) -> None:
        """Keep a copy."""
        self._saved = copy_state(self.value.state_dict(), self._saved)

    def restore(self) -> None:
        """Go back to the copy."""
        self.value.load_state_dict(copy_state(self._saved, None))  # what is loaded may be kept, and changed

    def sync(self) -> None:
        """Collective: become what rank 0's is."""
        received = broadcast_object(self.value.state_dict(), name="elastic.state_dict")
        if contexts.current().rank:
            self.value.load_state_dict(received)

    def set_value(self, value: Any) -> None:
        """Handle another object from now on."""
        self._saved = None
        super().set_value(value)


class ModelStateHandler(_StateDictHandler):
    """Handler of a module."""

    def restore(self) -> None:
        """Go back to the copy."""
        self.value.load_state_dict(self._saved)  # which copies

    def sync(self) -> None:
        """Collective: become what rank 0's is."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)

    def describe(self) -> list[str]:
        """Return what must be the same on all ranks."""
        return self.describe_value(self.value)

    @staticmethod
    def describe_value(model: torch.nn.Module) -> list[str]:
        """Return what must be the same on all ranks."""
        items = model.state_dict().items()
        return [f"{n}: {v.dtype} {tuple(v.shape)}" if isinstance(v, torch.Tensor) else n for n, v in items]


class OptimizerStateHandler(_StateDictHandler):
    """Handler of an optimizer. A ``DistributedOptimizer`` begins in each view as if made there, with its state."""

    def sync(self) -> None:
        """Collective: become what rank 0's is."""
        if isinstance(self.value, WrappedOptimizer):
            self.value.renew()
        if isinstance(self.value, torch.optim.LBFGS):
            super().sync()
        else:
            broadcast_optimizer_state(self.value, root_rank=0)
        self.value.zero_grad(set_to_none=True)

    def reset(self) -> None:
        """Follow a change of members."""
        self.abandon()
        self.value.zero_grad(set_to_none=True)

    def abandon(self) -> None:
        """Drop an unfinished step."""
        if isinstance(self.value, WrappedOptimizer):
            self.value.abandon()

    def describe(self) -> list[str]:
        """Return what must be the same on all ranks."""
        return self.describe_value(self.value)

    @staticmethod
    def describe_value(optimizer: torch.optim.Optimizer) -> list[str]:
        """Return what must be the same on all ranks."""
        groups = enumerate(optimizer.param_groups)
        return [type(optimizer).__name__, *(f"group {n}: {[tuple(p.shape) for p in g['params']]}" for n, g in groups)]


class SamplerStateHandler(_StateDictHandler):
    """Handler of an `ElasticSampler`."""

    def reset(self) -> None:
        """Follow a change of members."""
        self.value.reset()

    def sync(self) -> None:
        """Collective: become what rank 0's is."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="elastic.sampler"))


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the types of attributes that have handlers; the first that fits is taken."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace what `get_handler_registry` returns, for states that are made from now on."""
    global _registry  # noqa: PLW0603 - Horovod's interface
    _registry = registry


class TorchState(ObjectState):
    """State of a training with PyTorch.

    Modules, optimizers and an `ElasticSampler` are handled as what they are, under whatever name; so is what has a
    ``state_dict()`` and a ``load_state_dict()``: learning rate schedulers, GradScaler. Everything else is an object as
    in `ObjectState`. An attribute that is set to another object of its kind is that object's from then on.

    After a change of members ``p.grad`` is None everywhere: gradients belong to members that are no more.

    Args:
        model: a module, or None.
        optimizer: an optimizer, or None.
        kwargs: names and first values of more attributes.

    Raises:
        ArgumentError: a value cannot be copied.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        self._handlers: dict[str, StateHandler] = {}
        given = {"model": model, "optimizer": optimizer, **kwargs}
        for name, value in given.items():
            if (kind := _handler_of(value)) is not None:
                object.__setattr__(self, name, value)
                self._handlers[name] = kind(value)
        objects_only = {name: value for name, value in given.items() if name not in self._handlers}
        super().__init__(bcast_object=_broadcast, get_rank=rank, **objects_only)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_handlers" and name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keep copies of everything."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to the saved values. An unfinished step is dropped, on this rank, with its gradients."""
        for handler in self._handlers.values():
            handler.abandon()
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Collective: everything becomes what rank 0 has; then it is saved.

        Raises:
            ArgumentError: this rank's model or optimizer is not like rank 0's; raised on this rank alone.
        """
        self._check_alike()
        job = contexts.current()
        align_gradient_sets(objects.allgather_object(job, count_gradient_sets(), "elastic.gradient_sets"))
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Follow a change of members."""
        for handler in self._handlers.values():
            handler.reset()

    def _check_alike(self) -> None:
        own = {name: handler.describe() for name, handler in self._handlers.items()}
        roots: Mapping[str, list[str]] = broadcast_object(own, name="elastic.description")
        if sorted(own) != sorted(roots):
            raise ArgumentError(f"the state of rank 0 has {sorted(roots)}, that of this rank {sorted(own)}")
        for name, lines in own.items():
            for mine, root in itertools.zip_longest(lines, roots[name], fillvalue="nothing more"):
                if mine != root:
                    raise ArgumentError(
                        f"state.{name} of this rank is not like that of rank 0, whose values it is to get: {mine} "
                        f"here, {root} there. Start this process with the same program and options as the others"
                    )


def _broadcast(value: Any) -> Any:
    return broadcast_object(value, name="elastic.objects")


def _handler_of(value: Any) -> type[StateHandler] | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return _StateDictHandler
    return None


def count_gradient_sets() -> dict[int, int]:
    """Return by process set how many optimizers have begun in this job; `align_gradient_sets` comes next."""
    job = contexts.current()
    sets = [number for number, ranks in job.process_sets.items() if job.rank in ranks]
    return {number: next(job.gradient_sets[number]) for number in sets}


def align_gradient_sets(counts: Sequence[dict[int, int]]) -> None:
    """Have optimizers that begin in this job from now on the same numbers on all ranks.

    A newcomer has made its optimizers here, the others theirs in a job before.

    Args:
        counts: what `count_gradient_sets` has returned on all ranks.
    """
    job = contexts.current()
    used = dict(counts[job.rank])
    for other in counts:
        for number in used.keys() & other.keys():
            used[number] = max(used[number], other[number])
    for number, first in used.items():
        job.gradient_sets[number] = itertools.count(first)


def copy_state(value: Any, memory: Any) -> Any:
    """A deep copy of a state dict; tensors are copied into those of an earlier one, ``memory``, where they fit."""
    if isinstance(value, torch.Tensor):
        if isinstance(memory, torch.Tensor) and _fits(value, memory):
            return memory.copy_(value)
        return value.detach().clone()
    if isinstance(value, dict):
        known = memory if isinstance(memory, dict) else {}
        copied = copy.copy(value)  # of the same class, with its attributes
        for key, one in value.items():
            copied[key] = copy_state(one, known.get(key))
        return copied
    if type(value) in (list, tuple):
        known_list = memory if type(memory) is type(value) and len(memory) == len(value) else [None] * len(value)
        return type(value)(copy_state(*pair) for pair in zip(value, known_list, strict=True))
    return copy.deepcopy(value)


def _fits(value: torch.Tensor, memory: torch.Tensor) -> bool:
    alike = value.shape == memory.shape and value.dtype is memory.dtype and value.device == memory.device
    return alike and value.layout is torch.strided is memory.layout and value.stride() == memory.stride()
