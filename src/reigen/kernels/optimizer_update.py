"""Optimizer updates of one piece of a weight, block by block, so that each number is fetched from memory once.

`BlockUpdate` is one update with its numbers filled in. It computes on a block: flat arrays of `BLOCK` elements that
stay in the cache while NumPy passes over them once per operation. `run_update` cuts a piece into blocks, takes float16
and bfloat16 through float32, and keeps nothing: any number of threads may run disjoint pieces at once.

Every element is computed by itself with IEEE operations in a fixed order, so its bits do not depend on how a weight is
cut. The layer-wise rules (LAMB, LARS) need norms of the whole weight, and two passes over it. Sums of squares are
pairwise within a block, and float64 over the blocks.

Weight decay (``decay``) is added to the gradient as a product of its own and never folded into a factor of the weight:
``1 - lr * decay`` in float32 has steps of 6e-8, and a decay of 1e-7 a step would be 1.2e-7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.kernels import half_precision
from reigen.kernels.float_errors import ignore_float_errors
from reigen.types import DType

Array = NDArray[Any]
Arrays = Sequence[Array]

#: Elements of a block: 256 KiB of float32. Beginning an operation costs NumPy about 1 us, a third of what 16 Ki
#: elements take; much larger blocks leave the cache.
BLOCK = 1 << 16


#: Number of arrays in ``scratch``.
_NUM_SCRATCH = 3

#: ``(weight, grad, states, scratch)``: updates a block, ``weight`` and ``states``, in place. All are flat, of one
#: length, float32 or float64; ``scratch``, three of them, is overwritten.
BlockUpdate = Callable[[Array, Array, Arrays, Arrays], None]


@dataclass(frozen=True, slots=True)
class LayerwiseUpdate:
    """Update that needs two norms of the whole weight first.

    Attributes:
        measure: arguments of a `BlockUpdate` -> the block's share of two sums of squares. May update states, not the
            weight.
        finish: the sums of all blocks -> the update of the second pass.
    """

    measure: Callable[[Array, Array, Arrays, Arrays], tuple[float, float]]
    finish: Callable[[float, float], BlockUpdate]


@dataclass(frozen=True, slots=True)
class UpdateOperands:
    """Arrays of one piece of a weight: flat, of one length.

    Attributes:
        weight: updated; storage of ``weight_type`` (bfloat16 is uint16).
        grad: only read; storage of ``grad_type``, any floating type.
        states: updated; float64 where the weight is float64, else float32.
        weight_type, grad_type: the element types.
        master: float32 copy of a float16 or bfloat16 weight that is updated in its place and then rounded into it.
    """

    weight: Array
    grad: Array
    states: Sequence[Array]
    weight_type: DType
    grad_type: DType
    master: Array | None = None


def run_update(update: BlockUpdate | LayerwiseUpdate, operands: UpdateOperands) -> None:
    """Update a piece in place, block by block; with a layer-wise rule a whole weight, once all blocks are measured."""
    with ignore_float_errors():
        blocks = _BlockLoader(operands)
        if isinstance(update, LayerwiseUpdate):
            first = second = 0.0
            for begin in range(0, len(operands.weight), BLOCK):
                shares = update.measure(*blocks.load(begin))
                first, second = first + shares[0], second + shares[1]
            update = update.finish(first, second)
        for begin in range(0, len(operands.weight), BLOCK):
            loaded = blocks.load(begin)
            update(*loaded)
            blocks.store(begin, loaded[0])


class _BlockLoader:
    """Loader of blocks of `UpdateOperands` into the working type, and of weights back."""

    def __init__(self, operands: UpdateOperands) -> None:
        self._operands = operands
        double = operands.weight_type.name == "float64"
        working = np.dtype(np.float64 if double else np.float32)
        length = min(len(operands.weight), BLOCK)
        widens_weight = operands.weight_type.itemsize == 2
        converts_grad = operands.grad_type.storage != working
        rows = np.empty((_NUM_SCRATCH + widens_weight + converts_grad, length), working)
        self._scratch = list(rows[:_NUM_SCRATCH])
        self._wide_weight = rows[_NUM_SCRATCH] if widens_weight else None
        self._wide_grad = rows[-1] if converts_grad else None

    def load(self, begin: int) -> tuple[Array, Array, list[Array], list[Array]]:
        """Return weight, gradient, states and scratch of the block at ``begin``, in the working type."""
        operands = self._operands
        end = min(begin + BLOCK, len(operands.weight))
        weight = (operands.weight if operands.master is None else operands.master)[begin:end]
        grad = operands.grad[begin:end]
        if self._wide_weight is not None and operands.master is None:
            widen, _ = half_precision.converters(operands.weight_type.name)
            wide = self._wide_weight[: end - begin]
            widen(weight, wide)
            weight = wide
        if self._wide_grad is not None:
            wide = self._wide_grad[: end - begin]
            if operands.grad_type.name != "bfloat16":
                np.copyto(wide, grad, casting="same_kind")
            elif wide.dtype == np.float32:
                half_precision.widen_bfloat16(grad, wide)
            else:
                np.copyto(wide, np.left_shift(grad, 16, dtype=np.uint32).view(np.float32))
            grad = wide
        scratch = [array[: end - begin] for array in self._scratch]
        return weight, grad, [state[begin:end] for state in operands.states], scratch

    def store(self, begin: int, weight: Array) -> None:
        """Round the updated block back, where it is not the weight itself."""
        if self._wide_weight is None:
            return
        operands = self._operands
        if operands.master is not None:  # narrowing uses up its source
            wide = self._wide_weight[: len(weight)]
            np.copyto(wide, weight)
            weight = wide
        _, narrow = half_precision.converters(operands.weight_type.name)
        narrow(weight, operands.weight[begin : begin + len(weight)])


def run_update_on_rows(update: BlockUpdate, operands: UpdateOperands, rows: NDArray[np.int64], row_length: int) -> None:
    """Update only some rows of a weight, and only the states of these rows.

    Args:
        update: of a block.
        operands: as for `run_update`, but ``grad`` holds the gradients of ``rows`` alone, one row after the other.
        rows: indices of rows of the weight, each at most once.
        row_length: elements of a row.
    """
    if not row_length:
        return
    count = max(1, BLOCK // row_length)
    master = [] if operands.master is None else [operands.master]
    arrays = [array.reshape(-1, row_length) for array in (operands.weight, *operands.states, *master)]
    grads = operands.grad.reshape(-1, row_length)
    for begin in range(0, len(rows), count):
        chosen = rows[begin : begin + count]
        copies = [array[chosen] for array in arrays]
        weight, *states = (copy.reshape(-1) for copy in copies)
        part = replace(
            operands,
            weight=weight,
            grad=grads[begin : begin + count].reshape(-1),
            states=states[: len(operands.states)],
            master=states[-1] if master else None,
        )
        run_update(update, part)
        for array, updated in zip(arrays, copies, strict=True):
            array[chosen] = updated


def clip_to(array: Array, bound: float) -> None:
    """Limit ``array`` to ``[-bound, bound]`` in place. NaN stays NaN."""
    np.minimum(array, bound, out=array)
    np.maximum(array, -bound, out=array)
