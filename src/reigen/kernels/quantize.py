"""Blocks of float32 numbers as few bits, and back: two bits, one bit, eight bits, and the largest alone.

Pure NumPy, block by block in cache. The two-bit and one-bit codes have MXNet's layout, byte for byte: the first element
in the highest bits of the first byte, whole 32-bit words, zeros at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

#: Elements of int8 that share one scale.
INT8_GROUP = 256

#: Of so many elements one is looked at to estimate how large the largest are.
_SAMPLE = 64
#: Gathers the lowest two bits of the four bytes of a word in its highest byte, the first byte's on top: they are added
#: where they belong, and no two of the sixteen products share a bit, so that nothing carries.
_GATHER = np.uint32(1 << 30 | 1 << 20 | 1 << 10 | 1)
#: A group of int8: its scale, then its elements.
_ROW = np.dtype([("scale", "<f4"), ("codes", np.int8, (INT8_GROUP,))])
#: The largest magnitude with a reciprocal that float32 can hold, times 127, is a little below this.
_SMALLEST_PEAK = np.float32(1e-36)


class QuantizeScratch:
    """Arrays that one call uses for block after block. Not for two threads at once."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def take(self, name: str, length: int, dtype: Any) -> NDArray[Any]:
        """The array called ``name``; what it holds is whatever was left there."""
        array = self._arrays.get(name)
        if array is None or len(array) < length:
            array = self._arrays[name] = np.empty(length, dtype)
        return array[:length]


def pack_ternary(values: Floats, threshold: np.float32, out: Bytes, scratch: QuantizeScratch) -> None:
    """Two bits an element: 11 where it is >= threshold, 10 where it is <= -threshold, else 00 (so is NaN).

    Args:
        values: (n,).
        threshold: above zero.
        out: (4 * ceil(n / 16),).
        scratch: used up.
    """
    length, padded = len(values), 4 * len(out)
    high, low = scratch.take("high", padded, np.uint8), scratch.take("low", padded, np.uint8)
    high[length:] = low[length:] = 0
    np.greater_equal(values, threshold, out=high[:length].view(np.bool_))
    np.less_equal(values, -threshold, out=low[:length].view(np.bool_))
    np.add(low, high, out=low)  # the upper bit,
    np.add(low, low, out=low)  # in its place,
    np.add(low, high, out=low)  # and the lower
    words = low.view("<u4")
    np.multiply(words, _GATHER, out=words)
    np.right_shift(words, 24, out=words)
    np.copyto(out, words, casting="unsafe")


def ternary_table(threshold: np.float32) -> Floats:
    """(256, 4): the four numbers that each byte of `pack_ternary` stands for."""
    meaning = np.array([0, 0, -threshold, threshold], np.float32)  # 01 is never written
    every = np.arange(256)[:, None]
    return np.ascontiguousarray(meaning[every >> np.array([6, 4, 2, 0]) & 3])


def pack_signs(values: Floats, threshold: np.float32, out: Bytes, scratch: QuantizeScratch) -> None:
    """One bit an element: 1 where it is > threshold, else 0 (so is NaN).

    Args:
        values: (n,).
        threshold: any number.
        out: (4 * ceil(n / 32),).
        scratch: used up.
    """
    bits = np.greater(values, threshold, out=scratch.take("bits", len(values), np.bool_))
    packed = np.packbits(bits)
    out[: len(packed)] = packed
    out[len(packed) :] = 0


def sign_table(scale: np.float32) -> Floats:
    """(256, 8): the eight numbers, ``scale`` or ``-scale``, that each byte of `pack_signs` stands for."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    return np.where(bits, scale, -scale)


def unpack_codes(codes: Bytes, table: Floats, out: Floats) -> None:
    """Write what ``codes`` stand for.

    Args:
        codes: at least ceil(n / m) bytes.
        table: (256, m).
        out: (n,).
    """
    each = table.shape[1]
    whole = len(out) // each
    # "clip", because "raise" would write to a copy first; every byte is an index of the table.
    np.take(table, codes[:whole], axis=0, out=out[: whole * each].reshape(whole, each), mode="clip")
    rest = len(out) - whole * each
    if rest:
        out[-rest:] = table[codes[whole], :rest]


def int8_bytes(length: int) -> int:
    """Size of ``length`` elements as int8 with their scales."""
    return length + 4 * -(-length // INT8_GROUP)


def pack_int8(values: Floats, out: Bytes, scratch: QuantizeScratch) -> None:
    """Eight bits an element, -127 to 127, rounded to nearest even: one float32 scale for each `INT8_GROUP` elements.

    The scale is a 127th of the group's largest magnitude. A group with NaN or infinity in it becomes NaN as a whole;
    one whose largest magnitude is below 1e-36 becomes zeros.

    Args:
        values: (n,).
        out: (`int8_bytes` (n),): of each group the scale, then its elements.
        scratch: used up.
    """
    whole = len(values) // INT8_GROUP
    if whole:
        rows = out[: whole * _ROW.itemsize].view(_ROW)
        _quantize(values[: whole * INT8_GROUP].reshape(whole, INT8_GROUP), rows["scale"], rows["codes"], scratch)
    rest = values[whole * INT8_GROUP :]
    if len(rest):
        tail = out[whole * _ROW.itemsize :]
        _quantize(rest[None], tail[:4].view("<f4"), tail[4:].view(np.int8)[None], scratch)


def unpack_int8(codes: Bytes, out: Floats) -> None:
    """The inverse of `pack_int8`.

    Args:
        codes: (`int8_bytes` (n),).
        out: (n,).
    """
    whole = len(out) // INT8_GROUP
    if whole:
        rows = codes[: whole * _ROW.itemsize].view(_ROW)
        target = out[: whole * INT8_GROUP].reshape(whole, INT8_GROUP)
        np.copyto(target, rows["codes"])
        np.multiply(target, rows["scale"][:, None], out=target)
    rest = out[whole * INT8_GROUP :]
    if len(rest):
        tail = codes[whole * _ROW.itemsize :]
        np.multiply(tail[4:].view(np.int8), tail[:4].view("<f4"), out=rest, dtype=np.float32)


def _quantize(values: Floats, scales: Floats, codes: NDArray[np.int8], scratch: QuantizeScratch) -> None:
    """Rows of ``values`` as int8. ``scales``: one a row."""
    scaled = scratch.take("scaled", values.size, np.float32).reshape(values.shape)
    peaks = np.abs(values, out=scaled).max(axis=1)
    finite = np.isfinite(peaks)
    usable = finite & (peaks >= _SMALLEST_PEAK)
    inverse = np.divide(np.float32(127), peaks, out=np.zeros_like(peaks), where=usable)
    peaks[~usable] = 0
    peaks[~finite] = np.nan
    scales[:] = peaks / np.float32(127)
    np.multiply(values, inverse[:, None], out=scaled)
    np.rint(scaled, out=scaled)
    if not finite.all():
        scaled[~finite] = 0
    np.copyto(codes, scaled, casting="unsafe")


def top_k_indices(values: Floats, count: int) -> NDArray[np.intp]:
    """The indices of the ``count`` largest magnitudes, ascending. Of equal ones the first; NaN is largest."""
    if count >= len(values):
        return np.arange(len(values))
    if count <= 0:
        return np.arange(0)
    # Without their sign, the bits of float32 numbers are ordered like their magnitudes, and NaN comes after infinity.
    magnitudes = np.bitwise_and(values.view(np.uint32), np.uint32(0x7FFFFFFF))
    candidates = np.flatnonzero(magnitudes >= _estimate_threshold(magnitudes, count))
    if len(candidates) < count:
        candidates = np.arange(len(values))
    among = magnitudes[candidates]
    bound = np.partition(among, len(among) - count)[len(among) - count]
    chosen = np.flatnonzero(among >= bound)
    surplus = len(chosen) - count
    if surplus:
        equal = np.flatnonzero(among[chosen] == bound)
        chosen = np.delete(chosen, equal[-surplus:])
    return candidates[chosen]


def _estimate_threshold(magnitudes: NDArray[np.uint32], count: int) -> np.uint32:
    """A bound that a few more than ``count`` of the magnitudes reach, as far as a sample tells; it may be mistaken.

    Finding the bound exactly costs ten times as much as looking at each element once, so few should remain.
    """
    sample = magnitudes[::_SAMPLE]
    expected = count / _SAMPLE
    rank = int(1.25 * expected + 4 * expected**0.5) + 8  # far more than chance makes of what is expected
    if rank >= len(sample):
        return np.uint32(0)
    return np.uint32(np.partition(sample, len(sample) - rank)[len(sample) - rank])
