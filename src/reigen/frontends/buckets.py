"""Which gradient lies where: the pure plan of buckets in registered memory.

A bucket is a run of bytes that is reduced in one piece. Its gradients share one element type, and come in the order in
which backward is expected to produce them, so that a bucket is complete as early as possible. The sums do not depend on
the plan (they are taken in rank order for every element), so it may be chosen for speed alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Every place starts on a cache line: no two gradients, so no two threads that write them, share one.
ALIGNMENT_BYTES = 64

#: The first bucket may hold this part of the others' bytes, so that communication starts early in backward.
FIRST_BUCKET_DIVISOR = 4


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What a plan needs to know of one parameter.

    Attributes:
        numel: number of elements.
        itemsize: bytes per element as communicated.
        dtype: name of the element type as communicated.
    """

    numel: int
    itemsize: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient as communicated."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Place:
    """Where the gradient of one parameter lies: ``offset`` and ``nbytes`` in bytes, within the whole region."""

    parameter: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of bytes of one element type that is reduced in one piece; offsets are within the whole region."""

    dtype: str
    offset: int
    nbytes: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets, in the order in which they are expected to be complete.

    Attributes:
        buckets: disjoint, in ascending order of offset.
        nbytes: size of the region that holds them all.
        bucket_of: parameter -> index of its bucket, for the parameters that the plan holds.
    """

    buckets: tuple[Bucket, ...]
    nbytes: int
    bucket_of: dict[int, int]


def arrival_order(observed: Iterable[int], num_parameters: int) -> tuple[int, ...]:
    """Every parameter once: the observed ones first, then the rest from last to first.

    Backward runs from the last layer to the first, so the reverse of the order of definition is the best guess for what
    has not been seen. ``observed`` may hold repetitions and foreign numbers; both are dropped.
    """
    guessed = [*observed, *range(num_parameters - 1, -1, -1)]
    return tuple(index for index in dict.fromkeys(guessed) if 0 <= index < num_parameters)


def plan_buckets(parameters: Sequence[ParameterSpec], order: Iterable[int], bucket_bytes: int) -> BucketPlan:
    """Fill buckets with gradients in the given order.

    Args:
        parameters: every parameter; its position is its number.
        order: the numbers of the parameters to place, each at most once.
        bucket_bytes: a bucket holds at most this many bytes; a larger gradient is a bucket alone. The first bucket of
            each element type is smaller (see :data:`FIRST_BUCKET_DIVISOR`).
    """
    filling: dict[str, list[int]] = {}
    held: dict[str, int] = {}
    caps: dict[str, int] = {}
    closed: list[list[int]] = []
    for number in order:
        spec = parameters[number]
        cap = caps.get(spec.dtype, bucket_bytes // FIRST_BUCKET_DIVISOR)
        if spec.dtype in filling and held[spec.dtype] + spec.nbytes > cap:
            closed.append(filling.pop(spec.dtype))
            caps[spec.dtype], held[spec.dtype] = bucket_bytes, 0
        filling.setdefault(spec.dtype, []).append(number)
        held[spec.dtype] = held.get(spec.dtype, 0) + _aligned(spec.nbytes)
    closed.extend(filling.values())
    return _placed(parameters, closed)


def _placed(parameters: Sequence[ParameterSpec], groups: Sequence[Sequence[int]]) -> BucketPlan:
    buckets: list[Bucket] = []
    bucket_of: dict[int, int] = {}
    offset = 0
    for group in groups:
        start = end = offset
        places: list[Place] = []
        for number in group:
            nbytes = parameters[number].nbytes
            places.append(Place(number, offset, nbytes))
            bucket_of[number] = len(buckets)
            end = max(end, offset + nbytes)
            offset += _aligned(nbytes)
        buckets.append(Bucket(parameters[group[0]].dtype, start, end - start, tuple(places)))
    return BucketPlan(tuple(buckets), offset, bucket_of)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
