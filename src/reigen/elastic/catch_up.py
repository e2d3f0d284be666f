"""Plan by which the members of a view come to hold the same state. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldState:
    """State of a member that enters a view.

    Attributes:
        number: steps that its weights have had.
        is_member: it was given the state of the job, or went on with it; otherwise its weights are its own.
        is_whole: the program went on behind the update to the end of the step, so that learning rate and loss scale are
            of this step, too.
    """

    number: int
    is_member: bool
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class CatchUpPlan:
    """Source and receivers of the state that the members of a view are to have.

    Attributes:
        source: rank whose state all will have.
        receivers: ranks that get everything.
        partial_receivers: ranks that have the weights, and get what is small: schedulers and the like.
    """

    source: int
    receivers: frozenset[int] = frozenset()
    partial_receivers: frozenset[int] = frozenset()


def plan_catch_up(held: Sequence[HeldState]) -> CatchUpPlan:
    """Choose the source: who has applied most steps, best to their end; of equals, the lowest rank.

    Before anybody is a member, that is who has loaded the latest checkpoint.

    Args:
        held: by all ranks of the view, in order.
    """
    are_members = any(each.is_member for each in held)
    chosen = [rank for rank, each in enumerate(held) if each.is_member or not are_members]
    source = max(chosen, key=lambda rank: (held[rank].number, held[rank].is_whole, -rank))
    best = held[source]
    receivers = {
        rank for rank, each in enumerate(held) if rank != source and not (each.is_member and each.number == best.number)
    }
    partial = {
        rank for rank, each in enumerate(held) if rank not in receivers and best.is_whole and not each.is_whole
    } - {source}
    return CatchUpPlan(source, frozenset(receivers), frozenset(partial))
