"""Search space of autotuning: the parameters that may change in a job, and the values that each may take. Pure.

Only values that leave every bit of the results as it is are in it, unless the user allows another order of sums:

* The fusion threshold decides which tensors travel together, the bucket size how gradients are cut. Every element is
  added in rank order whatever lies beside it, except where partial sums go around a ring.
* ``ordered``, ``direct`` and ``latency`` add in rank order; ``auto`` takes the ring for large arrays among many ranks,
  and the size of an array depends on fusion and buckets. So the job begins with ``ordered`` in its place.
* The number of sockets decides only on which connection a message goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from reigen.backends.tcp.algorithm import adds_in_order
from reigen.config import MAX_TUNED_SOCKETS

_MIB = 1 << 20
#: Sizes that are tried, in bytes.
FUSION_THRESHOLDS = tuple(_MIB << power for power in range(8))
BUCKET_SIZES = tuple(_MIB << power for power in range(7))
_SOCKETS = (1, 2, MAX_TUNED_SOCKETS)
#: Among so many ranks of a network everything may be added up on every one of them.
_LATENCY_RANKS = 3
#: The first bucket has this part of the others' bytes: see `reigen.api.gradients.bucket_plan`.
_FIRST_BUCKET_DIVISOR = 4


@dataclass(frozen=True, slots=True)
class ParameterPoint:
    """Values of all parameters that are tuned.

    Attributes:
        fusion_threshold_bytes: allreduces of up to so many bytes in all travel together.
        bucket_bytes: size of a gradient bucket.
        tcp_algorithm: of reductions over TCP; empty without such a network.
        tcp_sockets: connections between two hosts that are used; 0 without such a network.
    """

    fusion_threshold_bytes: int
    bucket_bytes: int
    tcp_algorithm: str = ""
    tcp_sockets: int = 0


@dataclass(frozen=True, slots=True)
class SearchDimension:
    """Values of one parameter.

    Attributes:
        name: the field of `ParameterPoint`.
        values: in ascending order, if they have one.
        is_ordered: they have one: neighbours resemble each other.
    """

    name: str
    values: tuple[int | str, ...]
    is_ordered: bool = True


@dataclass(frozen=True)
class SearchSpace:
    """Points that may be tried.

    Attributes:
        base: where the job begins.
        dimensions: of the parameters that may change.
        fixed: why others may not, by name.
    """

    base: ParameterPoint
    dimensions: tuple[SearchDimension, ...]
    fixed: Mapping[str, str] = field(default_factory=dict)

    def points(self) -> list[ParameterPoint]:
        """Return all points; the base is one of them."""
        names = [dimension.name for dimension in self.dimensions]
        grid = itertools.product(*(dimension.values for dimension in self.dimensions))
        found = {self.base: None}
        for values in grid:
            found[replace(self.base, **dict(zip(names, values, strict=True)))] = None  # type: ignore[arg-type]
        return list(found)

    def coordinates(self, point: ParameterPoint) -> tuple[float, ...]:
        """Return the point's place in the unit cube: an ordered parameter is one number, another one for each value."""
        found: list[float] = []
        for dimension in self.dimensions:
            place = dimension.values.index(getattr(point, dimension.name))
            if dimension.is_ordered:
                found.append(place / max(1, len(dimension.values) - 1))
            else:
                found += [float(place == one) for one in range(len(dimension.values))]
        return tuple(found)

    def contains(self, point: ParameterPoint) -> bool:
        """Return whether the point may be tried."""
        names = {dimension.name: dimension.values for dimension in self.dimensions}
        return all(
            getattr(point, name) in names.get(name, (getattr(self.base, name),))
            for name in ParameterPoint.__dataclass_fields__
        )

    def limited(self, step_bytes: float, *, has_buckets: bool = True, is_fused: bool = True) -> SearchSpace:
        """Return the space without sizes that make no difference where a step reduces so many bytes.

        Of sizes that hold all of a step the smallest is kept, and the base's. Without buckets their size is left out,
        and so are thresholds below one by which nothing was fused.
        """
        enough = {"fusion_threshold_bytes": step_bytes, "bucket_bytes": step_bytes * _FIRST_BUCKET_DIVISOR}
        dimensions = []
        for dimension in self.dimensions:
            values = dimension.values
            if dimension.name == "bucket_bytes" and not has_buckets:
                continue
            if dimension.name == "fusion_threshold_bytes" and not is_fused:
                base_bytes = self.base.fusion_threshold_bytes
                values = tuple(value for value in values if isinstance(value, int) and value >= base_bytes)
            if dimension.name in enough and step_bytes > 0:
                limit, base = enough[dimension.name], getattr(self.base, dimension.name)
                large = [value for value in values if isinstance(value, int) and value > limit]
                kept = {*large[:1], base} if base not in large else {base}
                values = tuple(value for value in values if value not in large or value in kept)
            dimensions.append(replace(dimension, values=values))
        return replace(self, dimensions=tuple(one for one in dimensions if len(one.values) > 1))

    def moved(self, base: ParameterPoint) -> SearchSpace:
        """Return the space of a job that goes on at another point, if that is one of it."""
        return replace(self, base=base) if self.contains(base) else self


def make_search_space(
    base: ParameterPoint,
    origins: Mapping[str, str],
    *,
    network_ranks: int = 0,
    num_sockets: int = 1,
    allows_ring: bool = False,
) -> SearchSpace:
    """Make the search space of a job.

    Args:
        base: where it begins.
        origins: what has set a knob, by its name: what the user has set is not tuned.
        network_ranks: ranks that reduce together over TCP; 0: there is no such network.
        num_sockets: connections between two hosts that there are.
        allows_ring: sums may be taken in another order.
    """
    fixed = {
        name: f"set by {origin}" for name, origin in origins.items() if name in ParameterPoint.__dataclass_fields__
    }
    algorithms = ["auto" if allows_ring else "ordered", "direct"]
    if network_ranks <= _LATENCY_RANKS:
        algorithms.append("latency")
    if allows_ring and not adds_in_order(network_ranks or 1, "auto"):
        algorithms.append("ring")
    elif network_ranks and not adds_in_order(network_ranks, "auto"):
        fixed["ring"] = "it adds in another order, and would change bits (--autotune-allow-ring)"
    dimensions = [
        SearchDimension("fusion_threshold_bytes", FUSION_THRESHOLDS),
        SearchDimension("bucket_bytes", BUCKET_SIZES),
    ]
    if network_ranks:
        dimensions += [
            SearchDimension("tcp_algorithm", tuple(algorithms), is_ordered=False),
            SearchDimension("tcp_sockets", tuple(value for value in _SOCKETS if value <= num_sockets)),
        ]
    tuned = []
    for dimension in dimensions:
        if dimension.name in fixed:
            continue
        values, base_value = dimension.values, getattr(base, dimension.name)
        if base_value not in values:
            values = tuple(sorted((*values, base_value))) if dimension.is_ordered else (*values, base_value)
        if len(values) > 1:
            tuned.append(replace(dimension, values=values))
    return SearchSpace(base, tuple(tuned), fixed)
