"""Do the ranks want the same thing? Pure functions over one operation per rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from reigen.engine.messages import Kind, Operation, Response

#: ``(what is wrong, what to show of each rank's operation)``
Disagreement = tuple[str, Callable[[Operation], str]]

_SAME_SHAPE = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCESCATTER, Kind.ALLOCATE)
_SCALED = (Kind.ALLREDUCE, Kind.REDUCESCATTER)
_GATHERED = (Kind.ALLGATHER, Kind.ALLTOALL)


def disagreement(operations: Mapping[int, Operation]) -> Disagreement | None:
    """The first thing in which the ranks' operations differ, in Horovod's order of checks; None when they agree."""
    ranks = sorted(operations)
    first, rest = operations[ranks[0]], [operations[r] for r in ranks[1:]]

    def differs(value: Callable[[Operation], object]) -> bool:
        return any(value(other) != value(first) for other in rest)

    kind = first.kind
    if differs(lambda o: o.dtype):
        return "the data types differ", lambda o: o.dtype or "no elements"
    if differs(lambda o: o.kind):
        return "the operations differ", lambda o: o.kind.name.lower()
    if kind in _SAME_SHAPE and differs(lambda o: o.shape):
        return "the shapes differ", lambda o: str(list(o.shape))
    if kind in _SCALED and differs(lambda o: (o.prescale, o.postscale)):
        return "the scale factors differ", lambda o: f"prescale {o.prescale}, postscale {o.postscale}"
    if kind in _SCALED and differs(lambda o: o.op):
        return "the reduction operators differ", lambda o: o.op.name.lower()
    if kind in _GATHERED and differs(lambda o: o.shape[1:]):
        return "the shapes differ in more than the first dimension", lambda o: str(list(o.shape))
    if kind is Kind.BROADCAST and differs(lambda o: o.root):
        return "the root ranks differ", lambda o: f"root_rank {o.root}"
    if kind is Kind.FREE and differs(lambda o: o.offset):
        return "the regions differ", lambda o: f"offset {o.offset}"
    return None


def respond(operations: Mapping[int, Operation], slot: int) -> Response:
    """What operations that agree come to."""
    ordered = [operations[rank] for rank in sorted(operations)]
    first = ordered[0]
    sizes: tuple[tuple[int, ...], ...] = ()
    if first.kind is Kind.ALLGATHER:
        sizes = (tuple(o.shape[0] for o in ordered),)
    elif first.kind is Kind.ALLTOALL:
        sizes = tuple(o.splits for o in ordered)
    in_place = first.offset >= 0 and all(o.offset == first.offset for o in ordered)
    return Response(first.name, slot, sizes, in_place)
