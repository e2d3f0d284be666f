"""State of an optimizer for one piece of a weight: states, float32 copy, number of updates.

A piece is a range of the flat elements of a weight: a cell of a server, or a whole parameter in one process. A slot
belongs to one piece. Slots of different pieces may be used by different threads; so may disjoint blocks of one slot
between two calls of `Slot.begin`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.errors import ArgumentError, ConfigError, UnsupportedTypeError
from reigen.kernels import half_precision
from reigen.kernels.optimizer_update import BLOCK, UpdateOperands
from reigen.optim.base import Key, Optimizer, Step, states_type
from reigen.types import DType

#: Name of the float32 copy among the arrays of a slot.
MASTER = "master"


class Slot:
    """Optimizer states of one piece, zeros at first.

    Args:
        optimizer: the owner of the states.
        weight: the piece as it is now, flat, storage of ``dtype`` (bfloat16 is uint16); only its float32 copy is made
            here, where the optimizer needs one.
        dtype: element type of the weight.

    Attributes:
        length: number of elements of the weight.
        arrays: name -> states of the piece's length, in the optimizer's order; the float32 copy, if any, is "master".
        count: updates so far, from the optimizer's ``begin_num_update`` on.
        rate: learning rate of the latest update, or None before the first.

    Raises:
        UnsupportedTypeError: the weight is of no floating type.

    Example:
        >>> from reigen.optim import SGD
        >>> from reigen.types import dtype_named
        >>> w, optimizer = np.array([1.0, 2.0], np.float32), SGD(learning_rate=0.5, momentum=0.9)
        >>> slot = Slot(optimizer, w, dtype_named("float32"))
        >>> slot.update(optimizer, w, np.ones(2, np.float32))
        >>> w, slot.count
        (array([0.5, 1.5], dtype=float32), 1)
    """

    __slots__ = ("arrays", "count", "dtype", "length", "rate")

    def __init__(self, optimizer: Optimizer, weight: NDArray[Any], dtype: DType) -> None:
        if not dtype.is_floating:
            raise UnsupportedTypeError(f"an optimizer cannot update {dtype.name} weights; use a floating type")
        self.dtype, self.length = dtype, len(weight)
        self.count = optimizer.begin_num_update
        self.rate: float | None = None
        kept = states_type(dtype).storage
        self.arrays: dict[str, NDArray[Any]] = {name: np.zeros(len(weight), kept) for name in optimizer.state_names}
        if optimizer.multi_precision and dtype.itemsize == 2:
            self.arrays[MASTER] = master = np.empty(len(weight), np.float32)
            half_precision.converters(dtype.name)[0](weight, master)

    def begin(self, optimizer: Optimizer, *, key: Key | None = None, num_update: int | None = None) -> Step:
        """Count one update of the whole piece and fix its numbers.

        The optimizer may have other numbers than at first (`check_fits`); ``key`` and ``num_update`` are for
        `Optimizer.step`.
        """
        step = optimizer.step(self.count + 1, key=key, num_update=num_update, last_rate=self.rate)
        self.count += 1
        self.rate = step.rate
        return step

    def apply(
        self, step: Step, weight: NDArray[Any], grad: NDArray[Any], begin: int = 0, grad_type: DType | None = None
    ) -> None:
        """Update ``weight``, the block at ``begin`` of the piece, with one that `begin` has counted.

        Args:
            step: from `begin`.
            weight: flat; updated in place. A layer-wise optimizer needs the whole weight.
            grad: as long as ``weight``; only read.
            begin: index of the block's first element in the piece.
            grad_type: of the gradient; default: that of the weight.

        Raises:
            ArgumentError: the step needs the whole weight, and this is a part of it.
        """
        if len(weight) != self.length and step.needs_whole:
            raise ArgumentError(f"a layer-wise optimizer needs all {self.length} elements, not {len(weight)} of them")
        step.run(self._operands(weight, grad, begin, grad_type))

    def update(
        self,
        optimizer: Optimizer,
        weight: NDArray[Any],
        grad: NDArray[Any],
        *,
        key: Key | None = None,
        num_update: int | None = None,
        grad_type: DType | None = None,
    ) -> None:
        """Do `begin` and `apply` with the whole piece."""
        self.apply(self.begin(optimizer, key=key, num_update=num_update), weight, grad, grad_type=grad_type)

    def update_rows(
        self,
        optimizer: Optimizer,
        weight: NDArray[Any],
        rows: NDArray[np.int64],
        grad: NDArray[Any],
        *,
        key: Key | None = None,
        num_update: int | None = None,
        grad_type: DType | None = None,
    ) -> None:
        """Do one update with a sparse gradient; the other arguments are as above.

        Where the optimizer is lazy, only ``rows`` and their states change (and decay). Where not, the other rows get a
        gradient of 0. ``weight`` is the whole piece in two dimensions, ``rows`` the increasing indices of some of its
        rows, and ``grad`` their gradients, in two dimensions.

        Raises:
            ArgumentError: the shapes do not fit, or ``rows`` do not increase or are none of the piece's.
        """
        _check_rows(weight, rows, grad)
        row_length = weight.shape[1]
        step = self.begin(optimizer, key=key, num_update=num_update)
        flat = weight.reshape(-1)
        if optimizer.is_lazy:
            step.run_rows(self._operands(flat, grad.reshape(-1), 0, grad_type), rows, row_length)
        elif not optimizer.is_elementwise:
            dense = np.zeros(weight.shape, grad.dtype)
            dense[rows] = grad
            self.apply(step, flat, dense.reshape(-1), grad_type=grad_type)
        else:
            self._apply_with_zeros(step, flat, rows, grad, grad_type)

    def _apply_with_zeros(
        self, step: Step, weight: NDArray[Any], rows: NDArray[np.int64], grad: NDArray[Any], grad_type: DType | None
    ) -> None:
        """Update some rows at a time, so that no dense gradient of the whole piece is made."""
        row_length = grad.shape[1]
        count = max(1, BLOCK // max(row_length, 1))
        dense = np.empty((count, row_length), grad.dtype)
        num_rows = len(weight) // row_length if row_length else 0
        for first in range(0, num_rows, count):
            last = min(first + count, num_rows)
            low, high = np.searchsorted(rows, (first, last))
            dense.fill(0)
            dense[rows[low:high] - first] = grad[low:high]
            block = weight[first * row_length : last * row_length]
            self.apply(step, block, dense[: last - first].reshape(-1), first * row_length, grad_type)

    def _operands(
        self, weight: NDArray[Any], grad: NDArray[Any], begin: int, grad_type: DType | None
    ) -> UpdateOperands:
        arrays = {name: array[begin : begin + len(weight)] for name, array in self.arrays.items()}
        master = arrays.pop(MASTER, None)
        return UpdateOperands(weight, grad, [*arrays.values()], self.dtype, grad_type or self.dtype, master)

    def check_fits(self, optimizer: Optimizer) -> None:
        """Raise ConfigError unless ``optimizer`` can go on with these states."""
        needed = {*optimizer.state_names}
        if optimizer.multi_precision and self.dtype.itemsize == 2:
            needed.add(MASTER)
        if needed != set(self.arrays):
            raise ConfigError(
                f"the states are {_format_names(self.arrays)}; {optimizer.name} with these numbers keeps "
                f"{_format_names(needed)}"
            )


def _check_rows(weight: NDArray[Any], rows: NDArray[np.int64], grad: NDArray[Any]) -> None:
    if weight.ndim != 2 or grad.ndim != 2 or grad.shape != (len(rows), weight.shape[1]):
        raise ArgumentError(f"{len(rows)} rows of a weight of shape {weight.shape} cannot have gradients {grad.shape}")
    if not weight.flags.c_contiguous:
        raise ArgumentError("a weight that is updated by rows must be contiguous")
    if len(rows) and (rows[0] < 0 or rows[-1] >= len(weight) or not bool(np.all(rows[1:] > rows[:-1]))):
        raise ArgumentError(f"rows must increase and lie between 0 and {len(weight) - 1}, each at most once")


def _format_names(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"
