"""Quantizers of blocks of float32 numbers, and back: two bits, one bit, eight bits, and the largest alone.

Pure NumPy, block by block in cache. The two-bit and one-bit codes have MXNet's layout, byte for byte: the first element
in the highest bits of the first byte, whole 32-bit words, zeros at the end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reigen.kernels.reduce import ScratchArrays

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

#: Elements of int8 that share one scale.
INT8_GROUP = 256

#: One of so many elements is sampled to estimate how large the largest are.
_SAMPLE = 64
#: Gathers the lowest two bits of the four bytes of a word in its highest byte, the first byte's on top: they are added
#: where they belong, and no two of the sixteen products share a bit, so that nothing carries.
_GATHER = np.uint32(1 << 30 | 1 << 20 | 1 << 10 | 1)
#: A group of int8: its scale, then its elements.
_ROW = np.dtype([("scale", "<f4"), ("codes", np.int8, (INT8_GROUP,))])
#: The largest magnitude with a reciprocal that float32 can hold, times 127, is a little below this.
_SMALLEST_PEAK = np.float32(1e-36)


def pack_ternary(values: Floats, threshold: np.float32, out: Bytes, scratch: ScratchArrays) -> None:
    """Encode (n,) as (4 * ceil(n / 16),): 11 where >= threshold, 10 where <= -threshold, else 00 (so is NaN)."""
    length, padded = len(values), 4 * len(out)
    high, low = scratch.take("high", padded, np.uint8), scratch.take("low", padded, np.uint8)
    high[length:] = low[length:] = 0
    np.greater_equal(values, threshold, out=high[:length].view(np.bool_))
    np.less_equal(values, -threshold, out=low[:length].view(np.bool_))
    np.add(low, high, out=low)  # the upper bit,
    np.add(low, low, out=low)  # in its place,
    np.add(low, high, out=low)  # and the lower
    codes = low.view("<u4")
    np.multiply(codes, _GATHER, out=codes)
    np.right_shift(codes, 24, out=codes)
    np.copyto(out, codes, casting="unsafe")


def ternary_table(threshold: np.float32) -> Floats:
    """Return (256, 4): the four numbers that each byte of `pack_ternary` stands for."""
    meaning = np.array([0, 0, -threshold, threshold], np.float32)  # 01 is never written
    every = np.arange(256)[:, None]
    return np.ascontiguousarray(meaning[every >> np.array([6, 4, 2, 0]) & 3])


def pack_signs(values: Floats, threshold: np.float32, out: Bytes, scratch: ScratchArrays) -> None:
    """Encode (n,) as (4 * ceil(n / 32),): one bit, 1 where it is > threshold, else 0 (so is NaN)."""
    bits = np.greater(values, threshold, out=scratch.take("bits", len(values), np.bool_))
    packed = np.packbits(bits)
    out[: len(packed)] = packed
    out[len(packed) :] = 0


def sign_table(scale: np.float32) -> Floats:
    """Return (256, 8): the eight numbers, ``scale`` or ``-scale``, that each byte of `pack_signs` stands for."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    return np.where(bits, scale, -scale)


def unpack_codes(codes: Bytes, table: Floats, out: Floats) -> None:
    """Decode at least ceil(n / m) bytes by a table (256, m) into ``out`` (n,)."""
    each = table.shape[1]
    num_full = len(out) // each
    # "clip", because "raise" would write to a copy first; every byte is an index of the table.
    np.take(table, codes[:num_full], axis=0, out=out[: num_full * each].reshape(num_full, each), mode="clip")
    rest = len(out) - num_full * each
    if rest:
        out[-rest:] = table[codes[num_full], :rest]


def int8_bytes(length: int) -> int:
    """Return the size of ``length`` elements as int8 with their scales."""
    return length + 4 * -(-length // INT8_GROUP)


def pack_int8(values: Floats, out: Bytes, scratch: ScratchArrays) -> None:
    """Round (n,) to eight bits, -127 to 127, to nearest even: one float32 scale for each `INT8_GROUP` elements.

    The scale is a 127th of the group's largest magnitude. A group with NaN or infinity in it becomes NaN as a whole;
    one whose largest magnitude is below 1e-36 becomes zeros. ``out`` has `int8_bytes` (n): of each group the scale,
    then its elements.
    """
    num_full = len(values) // INT8_GROUP
    if num_full:
        rows = out[: num_full * _ROW.itemsize].view(_ROW)
        _quantize(values[: num_full * INT8_GROUP].reshape(num_full, INT8_GROUP), rows["scale"], rows["codes"], scratch)
    rest = values[num_full * INT8_GROUP :]
    if len(rest):
        tail = out[num_full * _ROW.itemsize :]
        _quantize(rest[None], tail[:4].view("<f4"), tail[4:].view(np.int8)[None], scratch)


def unpack_int8(codes: Bytes, out: Floats) -> None:
    """Decode the (`int8_bytes` (n),) bytes of `pack_int8` into ``out`` (n,)."""
    num_full = len(out) // INT8_GROUP
    if num_full:
        rows = codes[: num_full * _ROW.itemsize].view(_ROW)
        target = out[: num_full * INT8_GROUP].reshape(num_full, INT8_GROUP)
        np.copyto(target, rows["codes"])
        np.multiply(target, rows["scale"][:, None], out=target)
    rest = out[num_full * INT8_GROUP :]
    if len(rest):
        tail = codes[num_full * _ROW.itemsize :]
        np.multiply(tail[4:].view(np.int8), tail[:4].view("<f4"), out=rest, dtype=np.float32)


def _quantize(values: Floats, scales: Floats, codes: NDArray[np.int8], scratch: ScratchArrays) -> None:
    """Quantize rows of ``values`` to int8. ``scales``: one a row."""
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
    """Return the indices (count,) of the largest magnitudes, ascending. Of equal ones the first; NaN is largest."""
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
    """Estimate a bound that a few more than ``count`` of the magnitudes reach, from a sample; it may be mistaken.

    Finding the bound exactly costs ten times as much as looking at each element once, so few should remain.
    """
    sample = magnitudes[::_SAMPLE]
    expected = count / _SAMPLE
    rank = int(1.25 * expected + 4 * expected**0.5) + 8  # far more than the deviation by chance
    if rank >= len(sample):
        return np.uint32(0)
    return np.uint32(np.partition(sample, len(sample) - rank)[len(sample) - rank])
