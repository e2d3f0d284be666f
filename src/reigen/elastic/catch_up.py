"""Plan by which the members of a view come to hold the same state. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from reigen.cluster.membership.views.history import StepOutcome
from reigen.cluster.membership.views.planning import STATE_LOST_TEXT
from reigen.errors import format_ranks


@dataclass(frozen=True, slots=True)
class SumsAtHand:
    """Sums of a step that a member has begun and not applied, and with which it can go on where it was cut off.

    Attributes:
        epoch: of the view in which they are made.
        rank: in that view.
        can_finish: all that they are made of lies in memory that it has mapped.
        are_whole: it has all sums.
    """

    epoch: int
    rank: int
    can_finish: bool
    are_whole: bool


@dataclass(frozen=True, slots=True)
class UpdateAtHand:
    """Update of weights that exist once a host, which some owner has begun: the members there finish it.

    Attributes:
        epoch: of the view in which the step began.
        host: of the weights, in that view.
        owner: number of the member among the owners of the weights; None: it owns nothing.
    """

    epoch: int
    host: int
    owner: int | None


@dataclass(frozen=True, slots=True)
class ArrivedState:
    """State that newcomers read during a step.

    Attributes:
        number: steps that the weights have had in it.
        digest: of it.
    """

    number: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class HeldState:
    """State of a member that enters a view.

    Attributes:
        number: steps that its weights have had.
        is_member: it was given the state of the job, or went on with it; otherwise its weights are its own.
        is_whole: the program went on behind the update to the end of the step, so that learning rate and loss scale are
            of this step, too.
        sums: of the following step, if the program waits for them, and can go on with them.
        update: of the following step, if the program can go on behind it.
        is_in_step: it has begun a step that it has not applied.
        arrived: what a newcomer has read during the present step or the one before, what its source had then, or what
            all have compared; None: not known here.
        description: digest of what must be the same on all members (`digest_description`); empty: not known here.
        has_lost: it was a member, and a part of its weights is of another step than the rest.
        was_spare: it was a warm spare, and has not followed what only forward passes change.
    """

    number: int
    is_member: bool
    is_whole: bool = True
    sums: SumsAtHand | None = None
    update: UpdateAtHand | None = None
    is_in_step: bool = False
    arrived: ArrivedState | None = None
    description: bytes = b""
    has_lost: bool = False
    was_spare: bool = False

    @property
    def reached(self) -> int:
        """Steps that the weights have had when all updates at hand are finished."""
        return self.number + (self.update is not None)


@dataclass(frozen=True, slots=True)
class CatchUpPlan:
    """Source and receivers of the state that the members of a view are to have.

    Attributes:
        source: rank whose state all will have.
        receivers: ranks that get everything.
        partial_receivers: ranks that have the weights, and get what is small: schedulers and the like.
        completing: ranks that go on with the step in which they were cut off, and apply it.
        finishing: if sums of this step have to be finished first, the ranks of those who do it, in the view in which
            the step began; nobody if all have them.
        waiting: ranks that get the state in the next view, which begins behind the step that is completed: until then
            nobody has all of it.
    """

    source: int
    receivers: frozenset[int] = frozenset()
    partial_receivers: frozenset[int] = frozenset()
    completing: frozenset[int] = frozenset()
    finishing: tuple[int, ...] = ()
    waiting: frozenset[int] = frozenset()


def note_arrival(number: int, digest: bytes) -> ArrivedState | None:
    """Take note of the state that newcomers have read; who dies may leave others that have not compared it.

    Args:
        number: steps that the weights have had in it.
        digest: of it; empty: it is not known here.
    """
    return ArrivedState(number, digest) if digest else None


def confirm_newcomers(held: Sequence[HeldState]) -> list[HeldState]:
    """Count newcomers as members if they hold the state of their source.

    A member that knows of it may be a step ahead: it has applied the step during which they have read.

    Args:
        held: by all ranks of the view, in order.
    """
    known = {each.arrived for each in held if each.is_member and each.arrived is not None}
    return [replace(each, is_member=True) if _has_read_one_of(each, known) else each for each in held]


def _has_read_one_of(each: HeldState, states: Collection[ArrivedState]) -> bool:
    return each.arrived is not None and each.arrived.number == each.number and each.arrived in states


def find_lost_state(held: Sequence[HeldState]) -> str:
    """Return why the job cannot go on: no rank holds its state any more, and some hold half of it; empty: it can.

    Args:
        held: by all ranks of the view, in order.
    """
    lost = [rank for rank, each in enumerate(held) if each.has_lost]
    if not lost or any(each.is_member for each in held):
        return ""
    return (
        f"{STATE_LOST_TEXT}: the weights of rank(s) {format_ranks(lost)} were "
        "being updated, in parts, when others died. Start the job again from its last checkpoint"
    )


def plan_catch_up(held: Sequence[HeldState]) -> CatchUpPlan:
    """Choose the source: who has applied most steps, best to their end, and no spare; of equals, the lowest rank.

    A step that all were in, and of whose sums nothing is lost, is completed by all. Who has not applied a step that
    others have, but has its sums, applies it by itself. If one is left who cannot, all of them get the state.

    An update that some owner of shared weights has begun is finished, whoever is there: until then weights are of no
    step. So where nobody has applied that step, newcomers wait for those who complete it.

    Before anybody is a member, that is who has loaded the latest checkpoint.

    Args:
        held: by all ranks of the view, in order.
    """
    are_members = any(each.is_member for each in held)
    chosen = [rank for rank, each in enumerate(held) if each.is_member or not are_members]
    source = max(chosen, key=lambda rank: _fitness(held[rank], rank))
    best = held[source]
    if best.update is not None:
        completes = frozenset(r for r in chosen if held[r].update is not None and held[r].reached == best.reached)
        return CatchUpPlan(source, completing=completes, waiting=frozenset(range(len(held))) - completes)
    receivers = {
        rank for rank, each in enumerate(held) if rank != source and not (each.is_member and each.number == best.number)
    }
    if all(each.sums is not None and each.sums.can_finish and each.is_member for each in held) and not receivers:
        are_whole = all(each.sums.are_whole for each in held if each.sums is not None)
        finishing = () if are_whole else tuple(each.sums.rank for each in held if each.sums is not None)
        if len({each.sums.epoch for each in held if each.sums is not None}) == 1:
            return CatchUpPlan(source, completing=frozenset(range(len(held))), finishing=finishing)
    completing: set[int] = set()
    if all(held[rank].is_member and _is_one_behind(held[rank], best) for rank in receivers):
        receivers, completing = set(), receivers
    partial = {
        rank
        for rank, each in enumerate(held)
        if rank not in receivers | completing and best.is_whole and not each.is_whole
    } - {source}
    if completing:
        return CatchUpPlan(source, partial_receivers=frozenset(partial), completing=frozenset(completing))
    return CatchUpPlan(source, frozenset(receivers), frozenset(partial))


def _fitness(each: HeldState, rank: int) -> tuple[int, bool, bool, bool, int]:
    return each.reached, not each.update, each.is_whole, not each.was_spare, -rank


def plan_local_state(
    held: Sequence[HeldState], plan: CatchUpPlan, sharing: Collection[int]
) -> tuple[int | None, frozenset[int]]:
    """Return whose statistics and the like are followed, and who gets them: who was a spare, or has a spare's state.

    A member that receives a spare's weights keeps its own statistics.

    Args:
        held: by all ranks of the view, in order.
        plan: made of that.
        sharing: ranks that take samples from here on.

    Returns:
        None: nobody is there that has followed them.
    """
    idle = {rank for rank, each in enumerate(held) if each.was_spare}
    new = {rank for rank, each in enumerate(held) if not each.is_member}
    stale = idle | (new & plan.receivers) if plan.source in idle else idle - plan.receivers
    followers = [rank for rank in range(len(held)) if rank not in stale | new | plan.waiting]
    return max(followers, key=lambda rank: (held[rank].reached, -rank), default=None), frozenset(
        stale.intersection(sharing) - plan.waiting
    )


def are_alike(held: Sequence[HeldState], plan: CatchUpPlan) -> bool:
    """Return whether receivers are known to have the model, optimizer and data of their source.

    Args:
        held: by all ranks of the view, in order.
        plan: made of that.
    """
    expected = held[plan.source].description
    return bool(expected) and all(held[rank].description == expected for rank in plan.receivers)


def may_overlap_transfer(held: Sequence[HeldState], plan: CatchUpPlan) -> bool:
    """Return whether receivers may get the state while the others are in the next step, of which they take no samples.

    Receivers are newcomers, and no more than there are members, so that a step with a constant batch takes no longer
    than two. Nor may a step be under way that is completed.

    Args:
        held: by all ranks of the view, in order.
        plan: made of that.
    """
    are_new = all(not held[rank].is_member for rank in plan.receivers)
    has_source = held[plan.source].is_member and not plan.completing and not plan.waiting
    return has_source and are_new and 0 < 2 * len(plan.receivers) <= len(held)


def is_step_redone(plan: CatchUpPlan, rank: int, number: int, base_number: int) -> bool:
    """Return whether a step that a rank has not applied, and does not complete, comes again; or others apply it.

    Args:
        plan: of the view behind that step.
        rank: which one.
        number: steps that its weights have had.
        base_number: steps that all weights will have had. A newcomer that had not read the state yet receives it, and
            its step comes again if these are no more.
    """
    if rank in plan.waiting:
        return False
    return rank not in plan.receivers or base_number == number


def find_outcome(held: Sequence[HeldState], plan: CatchUpPlan) -> tuple[StepOutcome, int]:
    """Return what becomes of the step that was under way in the view before, and its number.

    Args:
        held: by all ranks of the view.
        plan: made of that.
    """
    number = held[plan.source].number
    members = [each for each in held if each.is_member]
    if any(each.number < number for each in members):
        return StepOutcome.RECEIVED, number - 1
    if plan.completing:
        return StepOutcome.COMPLETED, number
    return StepOutcome.UNDONE if any(each.is_in_step for each in members) else StepOutcome.NOTHING, number


def _is_one_behind(each: HeldState, best: HeldState) -> bool:
    """Return whether a member has not applied the latest step, but has its sums."""
    has_sums = each.update is not None or (each.sums is not None and each.sums.are_whole)
    return each.number == best.number - 1 and has_sums


def plan_updates(held: Sequence[HeldState], rank: int) -> tuple[list[int | None], int] | None:
    """Return who finishes a rank's update: numbers of owners, and its own place among them; None: there is none.

    Args:
        held: by all ranks of the view, in order.
        rank: the rank.
    """
    own = held[rank].update
    if own is None:
        return None
    members = [r for r, e in enumerate(held) if e.update and (e.update.epoch, e.update.host) == (own.epoch, own.host)]
    return [update.owner for member in members if (update := held[member].update)], members.index(rank)
