"""Base of codecs: floating-point numbers to fewer bytes, and back.

Every codec turns n numbers into a number of bytes that depends on n alone, so that both ends know it beforehand. It
forgets its losses, unless :class:`~reigen.compression.error_feedback.ErrorFeedback` is around it.

Codecs are frozen and hold no state: one serves any number of arrays and threads. The state of an array is its
*residual*, a float32 array of the same length, which the caller keeps: it can be saved, cut and put together like the
array itself. float16, bfloat16 (in uint16), float32 and float64 arrays go in and out; all is computed in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.errors import ArgumentError, UnsupportedTypeError, WireError
from reigen.kernels import half_precision
from reigen.kernels.quantize import Bytes, Floats
from reigen.kernels.reduce import ScratchArrays
from reigen.types import DType

#: Residual of an array between calls of `Codec.encode`: the part that has not been sent; None where there is none.
Residual = NDArray[np.float32] | None
#: Description of a codec that can be sent over the wire: names and plain values.
Params = dict[str, str | int | float | bool]

#: Elements that are worked on at a time, so that they and the scratch stay in the core's own cache.
BLOCK = 1 << 16


class Codec(ABC):
    """Codec of arrays. Subclasses define `name`, `pack`, `unpack` and `max_bytes`; the rest is done here."""

    #: Codes of parts whose borders are multiples of this, put together, are the codes of the array; None: only the
    #: whole array has codes.
    block_multiple: int | None = 1

    @property
    @abstractmethod
    def name(self) -> str:
        """Type in `params`."""

    def params(self) -> Params:
        """Return the parameters with which :func:`~reigen.compression.from_params` makes the same codec."""
        return {"type": self.name, "ef": False}

    @abstractmethod
    def max_bytes(self, num_elements: int) -> int:
        """Return the size of the codes of so many elements: exactly, for any elements."""

    @abstractmethod
    def pack(self, values: Floats, out: Bytes, scratch: ScratchArrays) -> None:
        """Write the codes of ``values``, (n,), which do not change, into ``out``, (max_bytes(n),)."""

    @abstractmethod
    def unpack(self, data: Bytes, out: Floats) -> None:
        """Decode ``data``, (max_bytes(n),), into ``out``, (n,); raises WireError."""

    def check(self, data: Bytes, num_elements: int) -> None:
        """Raise the WireError of `decode`, before ``data`` is used."""
        if len(data) != self.max_bytes(num_elements):
            raise WireError(
                f"{len(data)} bytes of {self.name} codes for {num_elements} elements, which take "
                f"{self.max_bytes(num_elements)}"
            )

    def for_sums(self, num_arrays: int) -> Codec:
        """Return the codec for sums of so many arrays that have been coded by this one, as servers send them back.

        A threshold limits the code of an element; a sum is so many times as large, and would lag behind for ever.
        """
        return self

    def combine(self, data: Bytes, target: Floats, ufunc: np.ufunc, scratch: ScratchArrays) -> None:
        """Compute ``target = ufunc(target, decoded data)``; ``ufunc`` keeps elements that it combines with zero."""
        values = scratch.take("unpacked", len(target), np.float32)
        self.unpack(data, values)
        ufunc(target, values, out=target)

    def begin(self, num_elements: int, dtype: DType, saved: Residual = None) -> Residual:
        """Return the residual for an array that `encode` will get again and again; None where the codec has none.

        It is of ``num_elements``, zeros, or continues the ``saved`` one; `encode` changes it in place.

        Raises:
            UnsupportedTypeError: these elements cannot be compressed.
            ArgumentError: ``saved`` is of another array or another codec.
        """
        check_floating(dtype, self)
        if saved is not None:
            raise ArgumentError(f"a residual was saved, but {self.name} compression without error feedback has none")
        return None

    def encode(self, array: NDArray[Any], state: Residual, out: memoryview | bytearray | Bytes) -> int:
        """Write the codes of ``array`` and remember their error; returns the number of bytes.

        Args:
            array: flat and contiguous; it is not changed.
            state: the residual of `begin` for it; not for two threads at once.
            out: at least ``max_bytes(len(array))`` bytes of writable memory.

        Raises:
            ArgumentError: ``out`` is too small, or ``array`` or ``state`` is no array that this could have been for.
        """
        check_array(array)
        self._check_residual(array, state)
        target = writable_bytes(out, self.max_bytes(len(array)))
        scratch = ScratchArrays()
        with np.errstate(all="ignore"):
            for begin, end in block_ranges(len(array), self.block_multiple):
                part = target[self.max_bytes(begin) : self.max_bytes(end)]
                values = as_float32(array[begin:end], scratch)
                if state is None:
                    self.pack(values, part, scratch)
                else:
                    residual = state[begin:end]
                    np.add(residual, values, out=residual)
                    self.pack(residual, part, scratch)
                    self.combine(part, residual, np.subtract, scratch)
                    _zero_non_finite(residual)
        return len(target)

    def _check_residual(self, array: NDArray[Any], state: Residual) -> None:
        if state is not None:
            raise ArgumentError(f"{self.name} compression without error feedback has no residual")

    def decode(self, data: bytes | bytearray | memoryview | Bytes, out: NDArray[Any], accumulate: bool = False) -> None:
        """Decode exactly ``max_bytes(len(out))`` bytes into ``out``, or add them to it.

        Args:
            data: the codes.
            out: flat and contiguous, floating-point.
            accumulate: add to the content.

        Raises:
            WireError: ``data`` cannot be the codes of so many elements; ``out`` may have been changed in part.
            ArgumentError: ``out`` is no such array.
        """
        check_array(out)
        codes = np.frombuffer(data, np.uint8) if self.max_bytes(len(out)) else np.empty(0, np.uint8)
        Codec.check(self, codes, len(out))  # its content is checked once, where it is read
        scratch = ScratchArrays()
        with np.errstate(all="ignore"):
            for begin, end in block_ranges(len(out), self.block_multiple):
                self._decode(codes[self.max_bytes(begin) : self.max_bytes(end)], out[begin:end], accumulate, scratch)

    def _decode(self, data: Bytes, out: NDArray[Any], accumulate: bool, scratch: ScratchArrays) -> None:
        if out.dtype == np.float32:
            self.combine(data, out, np.add, scratch) if accumulate else self.unpack(data, out)
            return
        values = scratch.take("wide", len(out), np.float32)
        self.unpack(data, values)
        if out.dtype == np.float64:
            np.add(out, values, out=out) if accumulate else np.copyto(out, values)
            return
        if accumulate:
            np.add(as_float32(out, scratch), values, out=values)
        _narrow(values, out)


def block_ranges(length: int, granularity: int | None) -> Iterator[tuple[int, int]]:
    """Yield ``(begin, end)`` of the blocks of an array with ``length`` elements."""
    step = length if granularity is None else BLOCK // granularity * granularity
    for begin in range(0, length, max(step, 1)):
        yield begin, min(begin + step, length)


def as_float32(array: NDArray[Any], scratch: ScratchArrays) -> Floats:
    """Return the array (n,) itself, if it is float32; else its numbers (n,), in ``scratch``."""
    if array.dtype == np.float32:
        return array
    values: Floats = scratch.take("values", len(array), np.float32)
    if array.dtype == np.uint16:
        half_precision.widen_bfloat16(array, values)
    else:
        np.copyto(values, array, casting="same_kind")
    return values


def _narrow(values: Floats, out: NDArray[Any]) -> None:
    """Round ``values``, which are used up, to float16, or to bfloat16 where ``out`` is uint16."""
    half_precision.converters("bfloat16" if out.dtype == np.uint16 else "float16")[1](values, out)


def _zero_non_finite(residual: Floats) -> None:
    # NaN in any element is the maximum. Two passes in cache; looking at each element would make an array, too.
    if not (np.isfinite(residual.max()) and np.isfinite(residual.min())):
        residual[~np.isfinite(residual)] = 0.0


def writable_bytes(out: memoryview | bytearray | Bytes, nbytes: int) -> Bytes:
    """Return the first ``nbytes`` of ``out``; raises ArgumentError: it has not so many, or cannot be written to."""
    target = np.frombuffer(out, np.uint8) if nbytes else np.empty(0, np.uint8)
    if len(target) < nbytes or not target.flags.writeable:
        raise ArgumentError(f"codes need {nbytes} bytes of writable memory, there are {len(target)}")
    return target[:nbytes]


def check_floating(dtype: DType, codec: Codec) -> None:
    """Raise UnsupportedTypeError unless the element type is floating-point."""
    if not dtype.is_floating:
        raise UnsupportedTypeError(
            f"{codec.name} compression is for float16, bfloat16, float32 and float64, not for {dtype.name}"
        )


def check_array(array: NDArray[Any]) -> None:
    """Raise ArgumentError unless it is a flat contiguous array of floats; uint16 is how bfloat16 is stored."""
    if array.dtype not in _STORAGES or array.ndim != 1 or not array.flags.c_contiguous:
        raise ArgumentError(
            "compression needs a flat contiguous array of float16, bfloat16 (as uint16), float32 or float64, "
            f"got {array.dtype} of shape {array.shape}"
        )


_STORAGES = frozenset(np.dtype(name) for name in ("float16", "float32", "float64", "uint16"))


def add_up(codec: Codec, codes: Sequence[Bytes], out: NDArray[Any], factor: float = 1.0) -> None:
    """Compute ``factor`` times the sum of several ranks' decoded ``codes``, in their order for every element.

    float64 is added up in float64, all else in float32 and rounded once.

    ``codes`` are one array for each rank, in rank order, at least one; (max_bytes(n),). ``out``, (n,), is flat and
    contiguous, floating-point; bfloat16 as uint16.

    Raises:
        WireError: some cannot be the codes of so many elements; ``out`` may have been changed in part.
        ArgumentError: ``out`` is no such array.
    """
    check_array(out)
    for part in codes:
        Codec.check(codec, part, len(out))
    scratch = ScratchArrays()
    with np.errstate(all="ignore"):
        for begin, end in block_ranges(len(out), codec.block_multiple):
            block = out[begin:end]
            total = block if out.itemsize > 2 else scratch.take("total", len(block), np.float32)
            for number, part in enumerate(codes):
                codec._decode(part[codec.max_bytes(begin) : codec.max_bytes(end)], total, number > 0, scratch)
            if factor != 1.0:
                np.multiply(total, factor, out=total)
            if total is not block:
                _narrow(total, block)
