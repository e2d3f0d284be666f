"""Buckets of gradients that travel as codes.

A rank encodes its bucket, gets all ranks' codes, and adds up what they stand for, in rank order: all ranks come to the
same bits. What its own codes lack stays in its residual and is added to the next gradients.

While some rank has joined, nothing can be gathered. Then the buckets travel as they are, with what the residual held:
an allreduce can do without data of the ranks that have joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen import context as contexts
from reigen.api.gradients.reduce_group import ReduceGroup
from reigen.compression import Codec, Residual, add_up
from reigen.context import Handle
from reigen.kernels import half_precision
from reigen.types import DType, ReduceOp


@dataclass(slots=True)
class _CompressedBucket:
    """One bucket: its gradients, this rank's codes of them, those of all ranks, and this rank's residual."""

    array: NDArray[Any]
    codes: NDArray[np.uint8]
    gathered: NDArray[np.uint8]
    residual: Residual


class CompressedBuckets:
    """The buckets of one plan, in the memory ``arrays``: flat, in the storage types of floating-point ``dtypes``."""

    def __init__(
        self, codec: Codec, reduce_group: ReduceGroup, arrays: list[NDArray[Any]], dtypes: list[DType]
    ) -> None:
        self._codec = codec
        self._reduce_group = reduce_group
        self._buckets = [self._make(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]

    @property
    def residuals(self) -> list[Residual]:
        """Of each bucket, what has not been sent yet."""
        return [bucket.residual for bucket in self._buckets]

    def submit(self, number: int, part: str, *, blocking: bool = False) -> Handle:
        """Encode a bucket and submit its codes; its gradients are left as they are until `receive`."""
        bucket = self._buckets[number]
        self._codec.encode(bucket.array, bucket.residual, bucket.codes)
        counters = contexts.current().counters
        counters.encoded_bytes += bucket.array.nbytes
        counters.code_bytes += bucket.codes.nbytes
        return self._reduce_group.gather(bucket.codes, part, bucket.gathered, blocking=blocking)

    def receive(self, number: int) -> None:
        """Decode the codes of all ranks into the bucket."""
        bucket, reduction = self._buckets[number], self._reduce_group.reduction
        factor = reduction.prescale * reduction.postscale
        if reduction.op is ReduceOp.AVERAGE:
            factor /= self._reduce_group.size
        add_up(self._codec, list(bucket.gathered.reshape(self._reduce_group.size, -1)), bucket.array, factor)

    def take_back(self, number: int) -> None:
        """The codes have not gone out: the bucket becomes all that was to be sent, uncoded, and nothing remains."""
        bucket = self._buckets[number]
        if bucket.residual is not None:
            self._codec.decode(bucket.codes, bucket.residual, accumulate=True)
            if bucket.array.itemsize > 2:
                np.copyto(bucket.array, bucket.residual)
            else:
                _, narrow = half_precision.converters("bfloat16" if bucket.array.dtype == np.uint16 else "float16")
                narrow(bucket.residual, bucket.array)
            bucket.residual[:] = 0.0

    def _make(self, array: NDArray[Any], dtype: DType) -> _CompressedBucket:
        nbytes = self._codec.max_bytes(len(array))
        gathered = np.empty(self._reduce_group.size * nbytes, np.uint8)
        return _CompressedBucket(array, np.empty(nbytes, np.uint8), gathered, self._codec.begin(len(array), dtype))
