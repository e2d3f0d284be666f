"""Reduction of one block: n equally long arrays, one of each rank, to one array.

The result is ``postscale * op(prescale * x)``. Every element is combined strictly in rank order,
``((x0 + x1) + x2) + ...``, so its bits do not depend on how a tensor was cut into blocks or which rank did the work.
(Where two NaN meet, NumPy's vector and scalar loops may keep different ones: it is NaN in any case.)

How each type computes:

============================ ==========================================================================================
float32, float64             in their own precision, factors too. AVERAGE divides the sum by the count; a count that is
                             a power of two is folded into the factor, which is as exact and saves a pass.
float16, bfloat16            ``prescale * x`` is rounded to the type; all else is float32, rounded once to nearest even.
integers                     sums and products wrap around. A factor applies in float64 and the product is truncated
                             toward zero (at the ends of the type, it saturates). AVERAGE truncates toward zero.
bool                         SUM and MAX are "or", PRODUCT and MIN are "and". There is no AVERAGE and no factor: neither
                             "all" nor "any" is the obvious result of it.
============================ ==========================================================================================

MIN and MAX propagate NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.errors import ArgumentError, UnsupportedTypeError
from reigen.kernels import half_precision
from reigen.kernels.float_errors import ignore_float_errors, make_quiet_runner
from reigen.types import DType, ReduceOp

_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.AVERAGE: np.add,
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


@dataclass(frozen=True, slots=True)
class Reduction:
    """Element type, operator, number of ranks and factors of a reduction.

    Attributes:
        dtype: element type of every input and of the result.
        op: combines elements of the same index.
        count: number of ranks, at least 1; AVERAGE divides by it.
        prescale: factor of every input.
        postscale: factor of the result.

    Raises:
        UnsupportedTypeError: AVERAGE or a factor with bool.
        ArgumentError: an operator that does not work element by element (ADASUM), ``count`` < 1, or a factor of an
            integer type that is infinite or NaN.
    """

    dtype: DType
    op: ReduceOp
    count: int
    prescale: float = 1.0
    postscale: float = 1.0

    def __post_init__(self) -> None:
        if self.op not in _UFUNCS:
            raise ArgumentError(f"{self.op.name} does not work element by element; use another operator")
        if self.count < 1:
            raise ArgumentError(f"a reduction needs at least 1 rank, not {self.count}")
        scaled = self.prescale != 1.0 or self.postscale != 1.0
        if self.dtype.name == "bool" and (scaled or self.op is ReduceOp.AVERAGE):
            what = "scaled" if scaled else "averaged"
            raise UnsupportedTypeError(f"bool cannot be {what}; use SUM (or), PRODUCT (and), or convert to float32")
        finite = math.isfinite(self.prescale) and math.isfinite(self.postscale)
        if not (self.dtype.is_floating or finite):
            raise ArgumentError(f"{self.dtype.name} cannot be scaled by {self.prescale} and {self.postscale}")


def neutral_element(dtype: DType, op: ReduceOp) -> Any:
    """Return the neutral element of ``op``, in the storage type: 0, 1, or an end of the range."""
    if op is ReduceOp.PRODUCT:
        value: Any = True if dtype.name == "bool" else 1
    elif op not in {ReduceOp.MIN, ReduceOp.MAX}:
        value = 0
    elif dtype.name == "bool":
        value = op is ReduceOp.MIN
    elif dtype.is_floating:
        value = math.inf if op is ReduceOp.MIN else -math.inf
    else:
        limits = np.iinfo(dtype.name)
        value = limits.max if op is ReduceOp.MIN else limits.min
    if dtype.name == "bfloat16":  # the upper half of a float32
        return np.float32(value).view(np.uint32) >> 16
    return value


#: Conversion of an input to the working type. The reducer is an argument: a bound method would be a cycle,
#: and a reducer's scratch would live on until the garbage collector comes.
_Step = Callable[["BlockReducer", NDArray[Any], NDArray[Any]], None]


class ScratchArrays:
    """Arrays that are used for block after block. Not for two threads at once."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def take(self, name: str, length: int, dtype: Any) -> NDArray[Any]:
        """Return the array called ``name``, its content undefined. Each is always asked for in one dtype."""
        array = self._arrays.get(name)
        if array is None or len(array) < length:
            array = self._arrays[name] = np.empty(length, dtype)
        return array[:length]


class BlockReducer:
    """Computes one `Reduction` on block after block. Keeps scratch between calls; not for two threads at once."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self._ufunc = _UFUNCS[reduction.op]
        self._take = ScratchArrays().take
        is_half = reduction.dtype.is_floating and reduction.dtype.itemsize == 2
        #: Working type: float32 for the half types, else the storage type.
        self.working: np.dtype[Any] = np.dtype(np.float32) if is_half else reduction.dtype.storage
        #: Conversion of an input to the working type, where that is another.
        self._load: _Step | None = None
        #: Conversion of the combined elements to the result's type, where that is another.
        self._narrow: half_precision.Convert | None = None
        if is_half:
            self._load = BlockReducer._load_half
            self._widen, self._narrow = half_precision.converters(reduction.dtype.name)
        elif reduction.dtype.is_floating:
            self._load = BlockReducer._scale_float if reduction.prescale != 1.0 else None
        elif reduction.prescale != 1.0:
            self._load = BlockReducer._scale_integer
        self._finish = self._choose_finish()
        self._run_quietly = make_quiet_runner()

    def reduce(self, inputs: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        """Combine ``inputs`` into ``out``.

        Args:
            inputs: one flat array per rank, in rank order, at least one; all of one length and of the dtype's storage
                type (bfloat16 is uint16).
            out: receives the result; like the inputs, and either apart from all of them or exactly one of them.
        """
        if not self.reduction.dtype.is_floating and self._load is None and self._finish is None:
            self._combine(inputs, out)  # NumPy's integers wrap around silently
            return
        if self._narrow is None:
            if self._load is None and len(inputs) == 2:
                self._run_quietly(self._ufunc, *inputs, out=out)
            else:
                self.combine(inputs, out)
            if self._finish is not None:
                self.finish(out, out)
        else:
            total = self._take("total", len(out), self.working)
            self.combine(inputs, total)
            self.finish(total, out)

    def combine(self, inputs: Sequence[NDArray[Any]], total: NDArray[Any]) -> None:
        """Do the first half of `reduce`: scale by ``prescale`` and combine some inputs, in the type `working`."""
        self._run_quietly(self._combine, inputs, total)

    def finish(self, total: NDArray[Any], out: NDArray[Any]) -> None:
        """Do the second half: divide by the count for AVERAGE, scale by ``postscale``, round to the type of ``out``.

        ``total`` is used up; ``out`` may be ``total`` where the types are the same.
        """
        self._run_quietly(self._finish_and_store, total, out)

    def _finish_and_store(self, total: NDArray[Any], out: NDArray[Any]) -> None:
        if self._finish is not None:
            self._finish(self, total)
        if self._narrow is not None:
            self._narrow(total, out)
        elif out is not total:
            np.copyto(out, total)

    def _combine(self, inputs: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        """Fold ``inputs``, loaded, in rank order; ``out`` may be one of them."""
        if len(inputs) == 1:
            self._load(self, inputs[0], out) if self._load else np.copyto(out, inputs[0])
        elif self._load is None:
            self._combine_raw(inputs, out)
        else:
            self._combine_loaded(self._load, inputs, out)

    def _combine_raw(self, inputs: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        first, second, *rest = inputs
        if not rest:
            self._ufunc(first, second, out=out)
            return
        last = rest.pop()
        total = self._ufunc(first, second, out=self._accumulator(out, inputs[2:]))
        for other in rest:
            self._ufunc(total, other, out=total)
        self._ufunc(total, last, out=out)

    def _combine_loaded(self, load: _Step, inputs: Sequence[NDArray[Any]], out: NDArray[Any]) -> None:
        first, *rest = inputs
        last = rest.pop()
        total = self._accumulator(out, inputs[1:])
        loaded = self._take("loaded", len(out), self.working)
        load(self, first, total)
        for other in rest:
            load(self, other, loaded)
            self._ufunc(total, loaded, out=total)
        load(self, last, loaded)
        self._ufunc(total, loaded, out=out)

    def _accumulator(self, out: NDArray[Any], pending: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Return ``out``, which saves cache, unless it holds an input that is still to be read; then scratch."""
        if any(np.may_share_memory(out, source) for source in pending):
            return self._take("accumulator", len(out), self.working)
        return out

    # Loading.

    def _scale_float(self, source: NDArray[Any], target: NDArray[Any]) -> None:
        np.multiply(source, self.working.type(self.reduction.prescale), out=target)

    def _scale_integer(self, source: NDArray[Any], target: NDArray[Any]) -> None:
        values = self._take("float64", len(source), np.float64)
        np.multiply(source, self.reduction.prescale, out=values, dtype=np.float64)
        _truncate(values, target)

    def _load_half(self, source: NDArray[Any], target: NDArray[Any]) -> None:
        self._widen(source, target)
        if self._narrow is not None and self.reduction.prescale != 1.0:
            np.multiply(target, np.float32(self.reduction.prescale), out=target)
            rounded = self._take("half", len(source), self.reduction.dtype.storage)
            self._narrow(target, rounded)
            self._widen(rounded, target)

    # After the last combination, in place.

    def _choose_finish(self) -> Callable[[BlockReducer, NDArray[Any]], None] | None:
        reduction = self.reduction
        divisor = reduction.count if reduction.op is ReduceOp.AVERAGE else 1
        if divisor == 1 and reduction.postscale == 1.0:
            return None
        if not reduction.dtype.is_floating:
            return lambda reducer, total: reducer._finish_integer(total, divisor)
        # In the working precision: a quotient by a power of two is the product with its reciprocal.
        real = self.working.type
        factor, quotient = real(reduction.postscale), real(divisor)
        with ignore_float_errors():
            folded = factor / quotient
            if divisor & (divisor - 1) == 0 and folded * quotient == factor:
                factor, quotient = folded, real(1.0)

        def finish(_: BlockReducer, total: NDArray[Any]) -> None:
            if quotient != 1.0:
                np.divide(total, quotient, out=total)
            if factor != 1.0:
                np.multiply(total, factor, out=total)

        return finish

    def _finish_integer(self, total: NDArray[Any], divisor: int) -> None:
        if self.reduction.postscale == 1.0 and total.dtype == np.int64:
            # float64 would lose bits beyond 2**53. NumPy's // rounds down: exact once the remainder (of the dividend's
            # sign, as in C) is gone.
            np.subtract(total, np.fmod(total, divisor), out=total)
            np.floor_divide(total, divisor, out=total)
            return
        values = self._take("float64", len(total), np.float64)
        np.divide(total, float(divisor), out=values, dtype=np.float64)
        np.multiply(values, self.reduction.postscale, out=values)
        _truncate(values, total)


def _truncate(values: NDArray[np.float64], target: NDArray[Any]) -> None:
    """Write ``values`` toward zero into the integers ``target``. ``values`` is used up."""
    limits = np.iinfo(target.dtype)
    # 2**63 - 1 is no float64; the one below fits.
    highest = float(limits.max) if target.dtype.itemsize < 8 else math.nextafter(2.0**63, 0.0)
    np.clip(values, float(limits.min), highest, out=values)
    np.copyto(target, values, casting="unsafe")
