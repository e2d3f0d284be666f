"""Residuals of gradient compression in files of optimizer states: beside the states of each key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reigen.errors import ArgumentError, ConfigError
from reigen.kv.values import Key, TensorSpec
from reigen.optim import Piece, States

#: Names of arrays that are residuals begin so; what follows is the owner.
_PREFIX = "residual "

#: Of whole keys: key and owner ("device 1", "worker 0") -> what was not sent.
Residuals = dict[tuple[Key, str], NDArray[np.float32]]


def merge_residuals(states: States, residuals: Residuals, specs: Mapping[Key, TensorSpec]) -> States:
    """Optimizer states of whole keys, and residuals, as one."""
    pieces = {piece.key: piece for piece in states.pieces}
    for (key, owner), residual in residuals.items():
        size = specs[key].num_elements
        old = pieces.get(key) or Piece(key, size, 0, size, specs[key].dtype.name, 0, None, {})
        pieces[key] = replace(old, arrays={**old.arrays, _PREFIX + owner: residual})
    return States(list(pieces.values()), states.optimizer, states.facts)


def split_residuals(states: States) -> tuple[States, Residuals]:
    """Take apart what `merge_residuals` put together; the pieces of a key may be cut."""
    residuals: Residuals = {}
    pieces = []
    for key in states.keys:
        whole = states.cut(key, 0, states.of(key)[0].num_elements)
        own = {name: array for name, array in whole.arrays.items() if not name.startswith(_PREFIX)}
        for name, array in whole.arrays.items():
            if name.startswith(_PREFIX):
                residuals[key, name.removeprefix(_PREFIX)] = np.array(array, np.float32)
        if own or whole.count:
            pieces.append(replace(whole, arrays=own))
    return States(pieces, states.optimizer, states.facts), residuals


def load_states(fname: str | Path, specs: Mapping[Key, TensorSpec]) -> tuple[States, Residuals]:
    """Read a file for a store whose keys hold ``specs``.

    Raises:
        ArgumentError: it is no file of states, it is damaged, or it is of other keys.
        OSError: it cannot be read.
    """
    try:
        states = States.load(fname)
    except ConfigError as error:
        raise ArgumentError(f"{error}") from None
    for piece in states.pieces:
        spec = specs.get(piece.key)
        if spec is None:
            raise ArgumentError(f"{fname}: the states are of key {piece.key!r}, which this store does not have")
        if (piece.num_elements, piece.dtype) != (spec.num_elements, spec.dtype.name):
            raise ArgumentError(
                f"{fname}: the states of key {piece.key!r} are of {piece.num_elements} elements of {piece.dtype}, "
                f"the key holds {spec}"
            )
    return split_residuals(states)
