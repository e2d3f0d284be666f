"""Order of sums: MPI's own, or rank order, by Reigen's kernels. Pure decisions with their reasons."""

from __future__ import annotations

from reigen.kernels.reduce import Reduction
from reigen.types import ReduceOp

#: Up to so many ranks, sums are taken in rank order. An alltoall and an allgather then take no longer than the
#: allreduce of Open MPI or MPICH, but the number of their messages grows with the square of the number of ranks.
ORDERED_RANKS = 16


def sums_in_rank_order(size: int, native: bool | None) -> tuple[bool, str]:
    """Return ``(whether floating-point sums are taken in rank order, why)`` in a backend of ``size`` ranks.

    ``native``: whether MPI's own reductions are to be used; None: undecided.
    """
    if native is not None:
        return not native, "MPI's own reductions were asked for" if native else "sums in rank order were asked for"
    if size <= ORDERED_RANKS:
        return True, f"{size} ranks, at most {ORDERED_RANKS}: sums in rank order cost nothing"
    return False, f"{size} ranks, more than {ORDERED_RANKS}: MPI's own reductions send fewer messages"


def can_reduce_by_mpi(reduction: Reduction) -> tuple[bool, str]:
    """Return ``(whether MPI computes this as Reigen's kernels would but for the order, why or why not)``."""
    dtype, op = reduction.dtype, reduction.op
    if dtype.itemsize < 4:
        # Open MPI 5.0.9 adds uint8 with saturation where the processor has AVX; MPICH 4.0.2 takes MIN of uint8 as if
        # it were signed. And no MPI sums halves in float32.
        return False, f"MPI libraries do not agree on {op.name} of {dtype.name}"
    if dtype.is_floating and op in {ReduceOp.MIN, ReduceOp.MAX}:
        return False, f"MPI does not say what {op.name} of a NaN is"
    return True, f"MPI has {op.name} of {dtype.name}"
