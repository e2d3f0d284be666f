"""Optimizer with its states by key, for weights that live in this process: local stores and trainers."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.errors import ArgumentError, ConfigError
from reigen.optim.base import Key, Optimizer
from reigen.optim.optimizer_state import Slot
from reigen.optim.states import States, piece_of, slot_of
from reigen.types import DType, dtype_named


class Updater:
    """Updater of weights by key; the states of a key appear with its first update. MXNet's ``get_updater(optimizer)``.

    One thread at a time.

    Attributes:
        optimizer: may be replaced by one that keeps the same states (`set_optimizer`).

    Example:
        >>> from reigen.optim import SGD
        >>> updater, w = Updater(SGD(learning_rate=0.5)), np.array([1.0, 2.0], np.float32)
        >>> updater("w", np.ones(2, np.float32), w)
        >>> w
        array([0.5, 1.5], dtype=float32)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._slots: dict[Key, Slot] = {}
        #: Loaded, and of keys that have not been updated since: a slot needs the weight's type and size.
        self._loaded = States(())

    def __call__(self, key: Key, grad: NDArray[Any], weight: NDArray[Any], dtype: DType | None = None) -> None:
        """Update ``weight`` in place.

        Args:
            key: of the states.
            grad: of the same shape and type; only read.
            weight: any shape. Where it is not contiguous, it is copied and written back.
            dtype: of both, where NumPy does not know it (bfloat16, stored as uint16).

        Raises:
            ArgumentError: the shapes differ, or the key has had a weight of another size or type.
            ConfigError: loaded states do not fit.
            UnsupportedTypeError: the weight is of no floating type.
        """
        if grad.shape != weight.shape:
            raise ArgumentError(f"{key!r}: a gradient of shape {grad.shape} for a weight of shape {weight.shape}")
        flat = np.ascontiguousarray(weight).reshape(-1)
        slot = self._slot(key, flat, dtype or dtype_named(weight.dtype.name))
        grad_type = dtype or dtype_named(grad.dtype.name)
        slot.update(self.optimizer, flat, np.ascontiguousarray(grad).reshape(-1), key=key, grad_type=grad_type)
        if not np.may_share_memory(flat, weight):
            np.copyto(weight, flat.reshape(weight.shape))

    def update_rows(
        self, key: Key, rows: NDArray[np.int64], grad: NDArray[Any], weight: NDArray[Any], dtype: DType | None = None
    ) -> None:
        """Update ``weight`` in place with a sparse gradient: ``grad`` has the gradients of the increasing ``rows``.

        ``weight`` is contiguous, and its first dimension counts rows. All else is as for a dense update.

        Raises:
            ArgumentError: the shapes do not fit, the rows do not increase, or the weight is not contiguous.
        """
        if not weight.ndim or not weight.flags.c_contiguous:
            raise ArgumentError(f"{key!r}: a weight that is updated by rows must have rows and be contiguous")
        if grad.shape != (len(rows), *weight.shape[1:]):
            raise ArgumentError(f"{key!r}: {len(rows)} rows of shape {weight.shape[1:]} and a gradient {grad.shape}")
        slot = self._slot(key, weight.reshape(-1), dtype or dtype_named(weight.dtype.name))
        row_length = math.prod(weight.shape[1:])  # given, and not -1: there may be no rows to guess it from
        by_rows = weight.reshape(len(weight), row_length)
        grad_type = dtype or dtype_named(grad.dtype.name)
        slot.update_rows(
            self.optimizer, by_rows, rows, grad.reshape(len(rows), row_length), key=key, grad_type=grad_type
        )

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Go on with other numbers, such as another learning rate; raises ConfigError if it keeps other states."""
        for slot in self._slots.values():
            slot.check_fits(optimizer)
        self.optimizer = optimizer

    def _slot(self, key: Key, weight: NDArray[Any], dtype: DType) -> Slot:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = self._first_slot(key, weight, dtype)
        if slot.length != len(weight) or slot.dtype != dtype:
            raise ArgumentError(
                f"{key!r} has been updated as {slot.length} elements of {slot.dtype.name}; "
                f"now it has {len(weight)} of {dtype.name}"
            )
        return slot

    def _first_slot(self, key: Key, weight: NDArray[Any], dtype: DType) -> Slot:
        loaded = self._loaded.of(key)
        if not loaded:
            return Slot(self.optimizer, weight, dtype)
        if (loaded[0].num_elements, loaded[0].dtype) != (len(weight), dtype.name):
            raise ConfigError(
                f"the loaded states of {key!r} are of {loaded[0].num_elements} elements of {loaded[0].dtype}; "
                f"the weight has {len(weight)} of {dtype.name}"
            )
        return slot_of(self._loaded.cut(key, 0, len(weight)), self.optimizer, weight)

    # ---- states

    def get_states(self, dump_optimizer: bool = False) -> States:
        """Return the states of all keys, loaded ones, too; arrays in use. ``dump_optimizer``: and its numbers."""
        pieces = [piece_of(slot, key, slot.length, 0) for key, slot in self._slots.items()]
        pieces += [piece for piece in self._loaded.pieces if piece.key not in self._slots]
        return States(pieces, self.optimizer if dump_optimizer else None)

    def set_states(self, states: States) -> None:
        """Go on from ``states``, and with their optimizer where they name one.

        Raises:
            ConfigError: the states of a key are incomplete, or not those of the optimizer.
        """
        optimizer = states.optimizer or self.optimizer
        for key in states.keys:
            piece = states.cut(key, 0, states.of(key)[0].num_elements)
            if missing := set(optimizer.state_names) - set(piece.arrays):
                raise ConfigError(f"the states of {key!r} lack {', '.join(sorted(missing))} of {optimizer.name}")
        self.optimizer, self._loaded, self._slots = optimizer, states, {}

    def save(self, path: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the states to a file (layout: `reigen.optim.states`); raises OSError."""
        self.get_states(dump_optimizer).save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from the states in a file; raises OSError, or ConfigError: not states of this optimizer."""
        self.set_states(States.load(path))
