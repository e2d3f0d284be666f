"""A training with PyTorch as `reigen.elastic.job` needs it: copies, undoing, transfer between members."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from reigen.api.job import rank
from reigen.api.objects import dumps
from reigen.backends.shm.reduction_journal import journal_bytes
from reigen.elastic.cursor import Part
from reigen.elastic.pauses import BroadcastPauses
from reigen.elastic.state_transfer import (
    UNREAD,
    OfferAddress,
    OverlappedTransfer,
    StateOffer,
    begin_overlapped_transfer,
    digest_of,
    may_all_read,
    read_from_source,
)
from reigen.elastic.training import LocalState, generator_states, set_generator_states
from reigen.errors import ArgumentError, CollectiveError
from reigen.torch.adapter import tensor_bytes
from reigen.torch.distributed_optimizer import distribute_in_place
from reigen.torch.elastic.local_state import TorchLocalState, find_synchronized_layer, unlearned_state
from reigen.torch.elastic.offered_state import ReadableState, begin_reading, memory_of, offer_state
from reigen.torch.elastic.state import (
    ModelStateHandler,
    OptimizerStateHandler,
    align_gradient_sets,
    copy_state,
    count_gradient_sets,
)
from reigen.torch.elastic.untrained_parameters import UntrainedParameters
from reigen.torch.optimizers.allreduce_optimizer import AllreduceOptimizer
from reigen.torch.optimizers.optimizer_wrapper import WrappedOptimizer
from reigen.torch.shared_parameters.optimizer import SharedParametersOptimizer
from reigen.torch.state import broadcast_parameters, broadcast_tensors, share_optimizer_state

#: In a bucket, and between buckets, a gradient may have so many bytes in front of it.
_MAX_GAP_BYTES = 128
#: Newcomers get smaller weights at once: that is done sooner than a step without their help.
LEAST_OVERLAPPED_BYTES = 8 << 20
#: Rows of the matrices that are multiplied so that libraries have been begun with.
_WARM_UP_SIZE = 64
#: Gradients of a second one are not averaged, or not weighted by samples, and its steps are not undone with the job's.
_SECOND_OPTIMIZER_TEXT = (
    "{} is an optimizer ({}), and a Job has one, whose gradients it averages and whose steps it undoes: give that one "
    "the parameters of all models, as parameter groups (torch.optim.SGD([{{'params': first.parameters()}}, "
    "{{'params': second.parameters()}}], lr=...)), and the Job a ModuleList of the models"
)
_is_cuda_used: Callable[[], bool] = torch.cuda.is_initialized


class TorchTraining:
    """Implementation of `reigen.elastic.training.TrainingState`.

    Args:
        model: a module.
        optimizer: a ``DistributedOptimizer`` of its parameters; another one becomes one.
        objects: by name: what else belongs to it, with ``state_dict()`` and ``load_state_dict()``.

    Raises:
        ArgumentError: one of these is something else, or has a state that cannot be sent to other ranks.
    """

    #: buffers are what each rank's samples have made of them
    _has_own_buffers = True

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, objects: Mapping[str, Any]) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        for name, each in objects.items():
            if isinstance(each, torch.optim.Optimizer):
                raise ArgumentError(_SECOND_OPTIMIZER_TEXT.format(name, type(each).__name__))
            if not callable(getattr(each, "state_dict", None)) or not callable(getattr(each, "load_state_dict", None)):
                raise ArgumentError(f"{name} must have state_dict() and load_state_dict(), got {type(each).__name__}")
            _check_state(name, each.state_dict())
        self._model, self._objects = model, dict(objects)
        self._optimizer = self._prepare_optimizer(model, optimizer)
        self._hooks: list[RemovableHandle] = []
        self._factor = 1.0
        #: copies of the step's beginning
        self._generators: dict[str, Any] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._options: list[dict[str, Any]] = []
        self._states: dict[str, Any] = {}
        self._untrained = UntrainedParameters(self._named_fixed_parameters)
        self.local: LocalState = TorchLocalState(
            model, self._named_fixed_parameters, self._untrained, self._buffers, has_buffers=self._has_own_buffers
        )
        #: of what this rank has given to others, which has not changed since; empty: none
        self._sent_digest = b""
        #: this rank could not read what it was to
        self._is_unread = False
        self._broadcasts = BroadcastPauses()

    def _prepare_optimizer(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """Return the optimizer as this training uses it; raises ArgumentError."""
        if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, WrappedOptimizer):
            distribute_in_place(optimizer, model.named_parameters())
        if not isinstance(optimizer, AllreduceOptimizer):
            raise ArgumentError(f"optimizer must be one of torch.optim, and not of Adasum, got {optimizer!r:.60}")
        return optimizer

    def attach(self, update: AbstractContextManager[None], complete: Callable[[CollectiveError], bool]) -> None:
        """Implement `TrainingState.attach`."""
        self._optimizer.update_context = update
        self._optimizer.complete_sums_by(complete)
        self._hooks = [_hook_gradient(p, self._scaled) for p in self._parameters() if p.requires_grad]

    def detach(self) -> None:
        """Implement `TrainingState.detach`."""
        self._optimizer.__dict__.pop("update_context", None)
        self._optimizer.complete_sums_by(None)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def registered_bytes(self) -> int:
        """Implement `TrainingState.registered_bytes`."""
        sizes = [p.numel() * p.element_size() for p in self._parameters() if p.requires_grad and p.device.type == "cpu"]
        return sum(sizes) + _MAX_GAP_BYTES * len(sizes) + journal_bytes(len(sizes)) if sizes else 0

    def warm_up(self) -> None:
        """Implement `TrainingState.warm_up`: the first gradient starts libraries and autograd's threads."""
        dumps(None)  # loads what it needs
        if any(parameter.device.type == "cpu" for parameter in self._parameters()):
            with torch.inference_mode(mode=False), torch.enable_grad():
                weight = torch.ones(_WARM_UP_SIZE, _WARM_UP_SIZE, device="cpu", dtype=torch.float32, requires_grad=True)
                torch.autograd.backward(torch.nn.functional.linear(weight.detach(), weight).square().mean())

    def change_view(self, change: Callable[[], None]) -> None:
        """Implement `TrainingState.change_view`."""
        change()

    def collective_error(self, error: BaseException) -> BaseException:
        """Implement `TrainingState.collective_error`."""
        return error

    def begin_step(self) -> None:
        """Implement `TrainingState.begin_step`."""
        self._clear_gradients()
        for each in self._objects.values():
            if isinstance(each, torch.amp.GradScaler):  # it learns its device by a loss, and this rank may have none
                devices = [parameter.device for parameter in self._parameters()]
                each.scale(torch.zeros((), device=_device_of(each, devices)))
        self._generators = _generator_states()
        for name, buffer in self._model.named_buffers():
            self._buffers[name] = copy_state(buffer, self._buffers.get(name))
        self._untrained.begin_step()
        self._options = _copy_options(self._optimizer)
        for name, each in self._objects.items():
            self._states[name] = copy_state(each.state_dict(), self._states.get(name))

    def finish_gradients(self) -> None:
        """Implement `TrainingState.finish_gradients`."""
        if self._optimizer.has_outstanding_gradients:
            self._optimizer.synchronize()

    def failed_update(self) -> bool | None:
        """Implement `TrainingState.failed_update`."""
        return self._optimizer.failed_update if isinstance(self._optimizer, SharedParametersOptimizer) else False

    def begin_part(self, part: Part, step: int, size: int) -> None:
        """Implement `TrainingState.begin_part`."""
        self._factor = part.share * size
        self._untrained.note_samples()

    def end_parts(self) -> None:
        """Implement `TrainingState.end_parts`."""

    def undo_step(self) -> None:
        """Implement `TrainingState.undo_step`."""
        self.drop_gradients()
        self._restore_generators()
        self._restore_buffers()
        self._untrained.undo_step()
        self._load_options_and_states(self._options, self._states)

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad()

    def _restore_generators(self) -> None:
        _set_generator_states(self._generators)

    def _restore_buffers(self) -> None:
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                if name in self._buffers:
                    buffer.copy_(self._buffers[name])

    def drop_gradients(self) -> None:
        """Implement `TrainingState.drop_gradients`."""
        self._optimizer.abandon()
        for parameter in self._parameters():
            parameter.grad = None

    def describe(self) -> dict[str, list[str]]:
        """Implement `TrainingState.describe`."""
        found = {
            "model": ModelStateHandler.describe_value(self._model),
            "optimizer": OptimizerStateHandler.describe_value(self._optimizer),
        }
        return {**found, **{name: [type(each).__name__] for name, each in self._objects.items()}}

    def describe_view(self) -> dict[int, int]:
        """Implement `TrainingState.describe_view`."""
        return count_gradient_sets()

    def enter_view(self, described: Sequence[dict[int, int]], *, keeps_gradients: bool) -> None:
        """Implement `TrainingState.enter_view`."""
        align_gradient_sets(described)
        if not keeps_gradients:
            self._optimizer.renew()

    def renew(self) -> None:
        """Implement `TrainingState.renew`."""
        self._optimizer.renew()

    def gradients(self) -> list[torch.Tensor | None]:
        """Implement `TrainingState.gradients`."""
        return [parameter.grad for parameter in self._parameters()]

    def set_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        """Implement `TrainingState.set_gradients`."""
        for parameter, gradient in zip(self._parameters(), gradients, strict=True):
            parameter.grad = gradient

    def backup(self) -> Any:
        """Implement `TrainingState.backup`."""
        states = {parameter: dict(state) for parameter, state in self._optimizer.state.items()}
        known = {id(each) for each in self._model.parameters()}  # the optimizer may have others
        others = [(each, each.detach().clone()) for each in self._parameters() if id(each) not in known]
        return copy_state(dict(self._model.state_dict()), None), others, states, _copy_options(self._optimizer)

    def recover(self, backup: Any) -> None:
        """Implement `TrainingState.recover`."""
        weights, others, states, options = backup
        self._model.load_state_dict(weights)
        with torch.no_grad():
            for parameter, value in others:
                parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(states)
        _set_options(self._optimizer, options)
        self._untrained.keep_state()

    def offer(self) -> StateOffer | None:
        """Implement `TrainingState.offer`."""
        return offer_state(self._optimizer, self._weights())

    def transfer(
        self,
        source: int,
        receivers: frozenset[int],
        *,
        may_overlap: bool = False,
        offers: Sequence[OfferAddress | None] = (),
        message: Any = None,
    ) -> OverlappedTransfer | None:
        """Implement `TrainingState.transfer`."""
        receives = rank() in receivers
        self._sent_digest, self._is_unread = b"", False
        self._transfer_buffers(source, receives=receives)
        overlaps = may_overlap and self._is_overlap_worth_it()
        overlapped, may_read = None, bool(offers) and may_all_read(offers, receivers)
        state = None
        if receives and may_read:
            state = ReadableState.find(self._optimizer, self._weights(), offers, source, receivers)
        if may_read and overlaps:
            overlapped = begin_reading(state, source, receivers, self._contents, self._version, message)
        elif may_read and receives:
            self._is_unread = state is None or not state.read()
        elif may_read and rank() == source:
            self._note_digest()
        if not may_read or (overlaps and overlapped is None):
            overlapped = self._exchange_state(source, receivers, overlaps=overlaps)
        for parameter in self._parameters():
            parameter.grad = None
        return overlapped

    def _exchange_state(self, source: int, receivers: frozenset[int], *, overlaps: bool) -> OverlappedTransfer | None:
        """Collective: do the work of `transfer` where members do not offer their state, or that cannot be read."""
        receives = rank() in receivers
        states, install = share_optimizer_state(self._optimizer, source, receives=receives)
        tensors = [*self._weights(), *states]
        where = *memory_of(tensors), source, receivers
        overlapped = None
        if overlaps:
            overlapped = begin_overlapped_transfer(*where, self._contents, self._version)
            is_sent = overlapped is not None
        else:
            is_sent = read_from_source(*where, self._note_digest)
        if not is_sent:
            num_bytes = sum(each.numel() * each.element_size() for each in tensors)
            with self._broadcasts.measured(num_bytes, receivers, is_source=rank() == source):
                broadcast_tensors(tensors, source, "elastic.state")
        install()
        return overlapped

    def _transfer_buffers(self, source: int, *, receives: bool) -> None:
        """Collective: receivers get the buffers of the source, and all other state of its modules but parameters."""
        others = unlearned_state(self._model)
        if not receives:  # buffers may differ, and each keeps its own
            others = {n: value.clone() if isinstance(value, torch.Tensor) else value for n, value in others.items()}
        broadcast_parameters(others, source)

    def digest(self) -> bytes:
        """Implement `TrainingState.digest`."""
        if self._is_unread:
            return UNREAD
        sent, self._sent_digest = self._sent_digest, b""
        return sent or digest_of(self._contents())

    def _is_overlap_worth_it(self) -> bool:
        """Return whether members may go on while newcomers read the state; the same on all ranks.

        Weights that exist once a host move when a step begins. Newcomers without samples do not call `forward`, in
        which normalization over all ranks needs all, and which may change parameters that the optimizer does not have:
        those of a moving average, say.
        """
        if isinstance(self._optimizer, SharedParametersOptimizer) or any(True for _ in self._named_fixed_parameters()):
            return False
        if find_synchronized_layer(self._model) is not None:
            return False
        num_bytes = sum(each.numel() * each.element_size() for each in self._parameters())
        return num_bytes >= LEAST_OVERLAPPED_BYTES

    def _contents(self) -> Iterator[NDArray[np.uint8]]:
        fixed = (each for _, each in self._named_fixed_parameters())
        return map(tensor_bytes, itertools.chain(fixed, self._tensors()))

    def _version(self) -> list[tuple[int, int]]:
        """Return versions of weights and optimizer state, and where they lie: others after each change."""
        return [(each.data_ptr(), each._version) for each in self._tensors()]

    def _note_digest(self) -> None:
        """Compute the digest while others read the state, so that they need not wait for it."""
        self._sent_digest = b""
        self._sent_digest = self.digest()

    def small_state(self) -> Any:
        """Implement `TrainingState.small_state`."""
        states = {name: each.state_dict() for name, each in self._objects.items()}
        return _copy_options(self._optimizer), states, self._untrained.moving

    def load_small_state(self, small: Any) -> None:
        """Implement `TrainingState.load_small_state`."""
        options, states, moving = small
        self._load_options_and_states(options, states)
        self._untrained.follow(moving, {})

    def _load_options_and_states(self, options: list[dict[str, Any]], states: Mapping[str, Any]) -> None:
        for name, each in self._objects.items():
            each.load_state_dict(copy_state(states[name], None))
        _set_options(self._optimizer, options)

    def state_dict(self) -> dict[str, Any]:
        """Implement `TrainingState.state_dict`."""
        found = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        return {**found, "objects": {name: each.state_dict() for name, each in self._objects.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Implement `TrainingState.load_state_dict`."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(copy_state(state["optimizer"], None))
        for name, each in self._objects.items():
            each.load_state_dict(copy_state(state["objects"][name], None))

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return None if self._factor == 1.0 else gradient * self._factor

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self._optimizer.__dict__["param_groups"]:
            yield from group["params"]

    def _weights(self) -> list[torch.Tensor]:
        """Return the model's parameters that the optimizer does not have, and those that it has, as on all ranks."""
        return [
            *(each.detach() for _, each in self._named_fixed_parameters()),
            *(p.detach() for p in self._parameters()),
        ]

    def _named_fixed_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        trained = {id(each) for each in self._parameters()}
        yield from ((n, each) for n, each in sorted(self._model.named_parameters()) if id(each) not in trained)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield weights and the optimizer's state, in the same order on all ranks."""
        for parameter in self._parameters():
            yield parameter
            state = self._optimizer.state.get(parameter, {})
            yield from (state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor))


def _device_of(scaler: torch.amp.GradScaler, devices: Sequence[torch.device]) -> torch.device:
    """Return the first of the weights' devices that is of the scaler's kind; others may come before it."""
    kind = getattr(scaler, "_device", devices[0].type)
    return next((device for device in devices if device.type == kind), devices[0])


def _check_state(name: str, state: Any) -> None:
    """Raise ArgumentError if an object's state cannot be kept for undoing a step, or given to newcomers."""
    try:
        dumps(_without_tensors(state))
    except Exception as error:
        raise ArgumentError(
            f"the state_dict() of {name} can be neither copied nor given to other ranks ({type(error).__name__}: "
            f"{error}): it must hold tensors, numbers, text, and what else pickle can write"
        ) from error


def _without_tensors(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return None
    if isinstance(state, dict):
        return {key: _without_tensors(value) for key, value in state.items()}
    return [_without_tensors(value) for value in state] if type(state) in (list, tuple) else state


def _hook_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
    register: Callable[..., RemovableHandle] = parameter.register_hook
    return register(hook)


def _generator_states() -> dict[str, Any]:
    found = {**generator_states(), "torch": torch.get_rng_state()}
    if _is_cuda_used():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _set_generator_states(states: Mapping[str, Any]) -> None:
    set_generator_states(states)
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _copy_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = optimizer.__dict__["param_groups"]
    return [{name: copy.deepcopy(value) for name, value in group.items() if name != "params"} for group in groups]


def _set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    for group, own in zip(optimizer.__dict__["param_groups"], options, strict=True):
        group.update(copy.deepcopy(own))
