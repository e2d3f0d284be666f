"""Bucket plan: where each gradient lies in registered memory. Pure.

A bucket is a run of bytes that is reduced in one piece. Its gradients share one element type, and come in the order in
which backward is expected to produce them, so that a bucket is complete as early as possible. The sums do not depend on
the plan (they are taken in rank order for every element), so it may be chosen for speed alone.

A *unit* is what is submitted at once, when all its gradients are there: one bucket, or, for a group that the user has
put together, one bucket for each element type in it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from reigen.config import default_bucket_bytes
from reigen.context import Context

Item = TypeVar("Item")

#: Every place starts on a cache line: no two gradients, so no two threads that write them, share one.
ALIGNMENT_BYTES = 64

#: The first bucket may hold this part of the others' bytes, so that communication starts early in backward.
FIRST_BUCKET_DIVISOR = 4


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Facts of one parameter that a plan needs: its elements, and their bytes and type as communicated."""

    numel: int
    itemsize: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient as communicated."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class GradientSlice:
    """Place of one parameter's gradient: ``offset`` and ``nbytes`` in bytes, within the whole region."""

    parameter: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of bytes of one element type that is reduced in one piece; offsets are within the whole region."""

    dtype: str
    offset: int
    nbytes: int
    places: tuple[GradientSlice, ...]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets, in the order in which they are expected to be complete.

    Attributes:
        buckets: disjoint, in ascending order of offset.
        nbytes: size of the region that holds them all.
        units: the buckets that are submitted together; every bucket is in one unit.
        unit_of: parameter -> index of its unit, for the parameters that the plan holds.
    """

    buckets: tuple[Bucket, ...]
    nbytes: int
    units: tuple[tuple[int, ...], ...]
    unit_of: dict[int, int]


def arrival_order(observed: Iterable[int], num_parameters: int) -> tuple[int, ...]:
    """Every parameter once: the observed ones first, then the rest from last to first.

    Backward runs from the last layer to the first, so the reverse of the order of definition is the best guess for what
    has not been seen. ``observed`` may hold repetitions and foreign numbers; both are dropped.
    """
    guessed = [*observed, *range(num_parameters - 1, -1, -1)]
    return tuple(index for index in dict.fromkeys(guessed) if 0 <= index < num_parameters)


def split_list(items: Sequence[Item], num_parts: int) -> list[Sequence[Item]]:
    """``num_parts`` pieces of nearly one length, in order; the last ones are the shorter. Horovod's helper, too."""
    each, longer = divmod(len(items), num_parts)
    ends = [each * number + min(number, longer) for number in range(num_parts + 1)]
    return [items[begin:end] for begin, end in itertools.pairwise(ends)]


def split_evenly(items: Sequence[Item], num_parts: int) -> list[Sequence[Item]]:
    """``items`` in ``num_parts`` runs whose lengths differ by one at most; fewer if there are too few items."""
    return [part for part in split_list(items, num_parts) if part]


def choose_bucket_bytes(context: Context, overlaps: bool = True) -> int:
    """The size of a gradient bucket in this job; ``overlaps``: buckets are reduced while backward runs."""
    return context.config.bucket_bytes or default_bucket_bytes(context.has_network, overlaps)


def plan_buckets(
    parameters: Sequence[ParameterSpec],
    order: Iterable[int],
    bucket_bytes: int,
    groups: Iterable[Iterable[int]] = (),
) -> BucketPlan:
    """Fill buckets with gradients in the given order.

    Args:
        parameters: every parameter; its position is its number.
        order: the numbers of the parameters to place, each at most once.
        bucket_bytes: a bucket holds at most this many bytes; a larger gradient is a bucket alone. The first bucket of
            each element type is smaller (see :data:`FIRST_BUCKET_DIVISOR`).
        groups: disjoint sets of numbers that belong together: each becomes a unit of its own, of any size. Numbers that
            are not in ``order`` are left out.
    """
    order = tuple(order)
    group_of = {number: index for index, group in enumerate(groups) for number in group}
    #: members of each group that are still to come
    left = Counter(group_of[number] for number in order if number in group_of)
    grouped: dict[int, dict[str, list[int]]] = {}
    filling = _BucketFiller(bucket_bytes)
    closed: list[list[list[int]]] = []
    for number in order:
        spec, group = parameters[number], group_of.get(number)
        if group is None:
            full = filling.add(number, spec)
            if full:
                closed.append([full])
            continue
        grouped.setdefault(group, {}).setdefault(spec.dtype, []).append(number)
        left[group] -= 1
        if not left[group]:
            closed.append(list(grouped[group].values()))
    closed.extend([rest] for rest in filling.open.values())
    return _place_buckets(parameters, closed)


class _BucketFiller:
    """The bucket that is being filled, for each element type."""

    def __init__(self, bucket_bytes: int) -> None:
        self.open: dict[str, list[int]] = {}
        self._held: dict[str, int] = {}
        self._caps: dict[str, int] = {}
        self._bucket_bytes = bucket_bytes

    def add(self, number: int, spec: ParameterSpec) -> list[int] | None:
        """Put a gradient in; if that needs a new bucket, the one that is full now is returned."""
        full = None
        cap = self._caps.get(spec.dtype, self._bucket_bytes // FIRST_BUCKET_DIVISOR)
        if spec.dtype in self.open and self._held[spec.dtype] + spec.nbytes > cap:
            full = self.open.pop(spec.dtype)
            self._caps[spec.dtype], self._held[spec.dtype] = self._bucket_bytes, 0
        self.open.setdefault(spec.dtype, []).append(number)
        self._held[spec.dtype] = self._held.get(spec.dtype, 0) + _align(spec.nbytes)
        return full


def _place_buckets(parameters: Sequence[ParameterSpec], closed: Sequence[Sequence[Sequence[int]]]) -> BucketPlan:
    buckets: list[Bucket] = []
    units: list[tuple[int, ...]] = []
    unit_of: dict[int, int] = {}
    offset = 0
    for unit in closed:
        units.append(tuple(range(len(buckets), len(buckets) + len(unit))))
        for numbers in unit:
            start = end = offset
            places: list[GradientSlice] = []
            for number in numbers:
                nbytes = parameters[number].nbytes
                places.append(GradientSlice(number, offset, nbytes))
                unit_of[number] = len(units) - 1
                end = max(end, offset + nbytes)
                offset += _align(nbytes)
            buckets.append(Bucket(parameters[numbers[0]].dtype, start, end - start, tuple(places)))
    return BucketPlan(tuple(buckets), offset, tuple(units), unit_of)


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
