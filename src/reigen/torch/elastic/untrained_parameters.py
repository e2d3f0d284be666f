"""Parameters of a model that its optimizer does not have, as a job that undoes steps needs them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import torch

from reigen.torch.elastic.state import copy_state

_log = logging.getLogger(__name__)

#: So many bytes at most are copied to find out which parameters a step changes.
_MAX_TRIED_BYTES = 256 << 20


class UntrainedParameters:
    """Copies of parameters that steps change though the optimizer does not have them: a moving average's, say.

    Most such parameters never change (those of a frozen model), and would cost their copy in each step. So those are
    copied at the beginning of a step that have changed since the beginning of some step before. That is seen by their
    tensors' versions and addresses. In the first step in which this rank has samples all of them are copied, if they
    are not too large, and compared behind it, so that what is changed by ``.data`` is seen, too, and this step can be
    undone like others.

    Args:
        find: returns the parameters by name.
    """

    def __init__(self, find: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._find = find
        self._parameters: dict[str, torch.Tensor] = {}
        #: at the step's beginning; empty before the first one
        self._stamps: dict[str, tuple[int, int]] = {}
        self._copies: dict[str, torch.Tensor] = {}
        #: None: there was no step yet that could change any, and all are tried
        self._moving: set[str] | None = None
        #: the model has worked on samples since the step's beginning
        self._has_worked = False

    @property
    def moving(self) -> list[str] | None:
        """Names of those that steps have changed, for `follow`; None: no step was made with samples."""
        return None if self._moving is None else sorted(self._moving)

    def changing(self) -> dict[str, torch.Tensor | None]:
        """Return, by name, those that steps have changed, the present one too, with their copies for `undo_step`."""
        names = self._changed() | (self._moving or set())
        return {name: self._copies.get(name) for name in sorted(names)}

    def follow(self, moving: Iterable[str] | None, copies: Mapping[str, torch.Tensor]) -> None:
        """Take what `moving` is on another rank, whose parameters these have become.

        Args:
            moving: see there.
            copies: to which a step goes back that is under way; by name.
        """
        self._moving = None if moving is None else set(moving)
        self._parameters = dict(self._find()) if copies else {}
        self._stamps = _stamps_of(self._parameters)
        self._copies = {
            name: copy_state(copy.to(self._parameters[name].device), None)
            for name, copy in copies.items()
            if name in self._parameters
        }

    def begin_step(self) -> None:
        """Copy those that steps change."""
        if not self._parameters:
            self._parameters = dict(self._find())
            self._stamps = _stamps_of(self._parameters)
        elif self._moving is not None:
            self._moving |= self._changed()
        elif self._has_worked:
            self._moving = self._changed()
        self._has_worked = False
        self._stamps = _stamps_of(self._parameters)
        copied = self._moving
        if copied is None:
            num_bytes = sum(each.numel() * each.element_size() for each in self._parameters.values())
            copied = set(self._parameters) if num_bytes <= _MAX_TRIED_BYTES else set()
        self._copies = {
            name: copy_state(each.detach(), self._copies.get(name))
            for name, each in self._parameters.items()
            if name in copied
        }

    def note_samples(self) -> None:
        """Take note that the model works on samples from here on, and may change parameters."""
        self._has_worked = True

    def undo_step(self) -> None:
        """Go back to the copies."""
        changed = self._changed()
        with torch.no_grad():
            for name in changed & self._copies.keys():
                self._parameters[name].copy_(self._copies[name])
        if lost := sorted(changed - self._copies.keys()):
            _log.warning(
                "%s changed for the first time in a step that is undone, and stays as it is now: change it after the "
                "block, or give the job what holds it by name (average=...)",
                lost[0] if len(lost) == 1 else f"{lost[0]} and {len(lost) - 1} more parameters",
            )
        if changed or self._moving is not None:
            self._moving = changed | (self._moving or set())
        self._has_worked = False
        self._stamps = _stamps_of(self._parameters)

    def keep_state(self) -> None:
        """Take note that the parameters were written, by who has then restored them."""
        self._stamps = _stamps_of(self._parameters)

    def _changed(self) -> set[str]:
        stamps = _stamps_of(self._parameters)
        found = {name for name, stamp in stamps.items() if stamp != self._stamps[name]}
        unseen = self._copies.keys() - found
        return found | {name for name in unseen if not torch.equal(self._parameters[name], self._copies[name])}


def _stamps_of(parameters: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Return addresses and versions; those that were made in inference mode have no versions."""
    return {n: (each.data_ptr(), 0 if each.is_inference() else each._version) for n, each in parameters.items()}
