"""History of the views that a process was a member of: what changed, why, and how long it took. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated

import msgspec

from reigen.cluster.membership.messages import Count
from reigen.cluster.membership.views.record import View
from reigen.errors import format_ranks
from reigen.net.codec import MessageCodec

#: Characters of a reason that is told.
MAX_REASON = 500
_MAX_NOTE_BYTES = 4096


class StepOutcome(Enum):
    """Outcome of a change of views for the work that was under way."""

    #: the program will say it, in this view
    PENDING = "pending"
    #: nobody was in a step: all had stopped behind the same one, or were between two
    NOTHING = "nothing"
    #: what was done since the last commit is done again
    COMMIT = "commit"
    #: nobody had applied the step; it is run again
    UNDONE = "undone"
    #: its sums were finished by those who are left
    COMPLETED = "completed"
    #: some had applied it, and the others get its result
    RECEIVED = "received"

    def describe(self, step: str) -> str:
        """Return the outcome as a part of a sentence about a step; empty while it is pending."""
        return {
            StepOutcome.PENDING: "",
            StepOutcome.NOTHING: "nothing is done again",
            StepOutcome.COMMIT: "what was done since the last commit is done again",
            StepOutcome.UNDONE: f"{step} is undone and run again",
            StepOutcome.COMPLETED: f"{step} is completed with what the dead had computed",
            StepOutcome.RECEIVED: f"{step} had been applied by some, and the others get its result",
        }[self]


@dataclass(frozen=True, slots=True)
class ViewChange:
    """Change from one view to the next, as a process of the second one has seen it.

    Attributes:
        epoch: number of the view that began.
        size: its number of ranks.
        reason: why the change began, for the user.
        seconds: from its beginning here until steps may be run again; 0 for the view with which a process begins.
        lost: ranks of the view before that are not in this one.
        num_joined: members that were not in the view before.
        moved: ranks in this view by ranks in the one before, of those that are not the same.
        step: number of steps that all members have applied when it begins.
        is_planned: all stopped behind the same step, and nothing is run again.
        completes: the step that was under way was to be finished with what is left of it, when the view was decided.
        outcome: what became of the work that was under way. Where steps are undone one by one it is pending until the
            members have the same state again.
        num_spares: how many of the ranks are warm spares, which take no samples.
    """

    epoch: int
    size: int
    reason: str = ""
    seconds: float = 0.0
    lost: tuple[int, ...] = ()
    num_joined: int = 0
    moved: tuple[tuple[int, int], ...] = ()
    step: int = 0
    is_planned: bool = False
    completes: bool = False
    outcome: StepOutcome = StepOutcome.PENDING
    num_spares: int = 0

    @property
    def reruns(self) -> bool:
        """True if the step that was under way is run again; for `hvd.elastic.run`: all since the last commit."""
        if self.outcome is StepOutcome.PENDING:
            return bool(self.reason) and not self.is_planned and not self.completes
        return self.outcome in {StepOutcome.COMMIT, StepOutcome.UNDONE}

    def describe(self) -> str:
        """Return the change in a sentence: ``view 3: 3 ranks go on after 0.12 s; rank 1 has gone; ...``."""
        parts = [f"view {self.epoch}: {describe_members(self.size, self.num_spares)} on"]
        if self.seconds:
            parts[0] += f" after {self.seconds:.2f} s"
        if self.lost:
            parts.append(f"rank{'s' * (len(self.lost) > 1)} {format_ranks(self.lost)} left")
        if self.num_joined:
            parts.append(f"{self.num_joined} joined")
        if self.moved:
            parts.append(describe_moves(self.moved))
        return "; ".join(filter(None, [*parts, self._describe_outcome(), self.reason]))

    def _describe_outcome(self) -> str:
        if not self.reason or self.is_planned:  # which says it
            return ""
        if self.outcome is not StepOutcome.PENDING:
            return self.outcome.describe("the step that was under way")
        if self.completes:
            return f"step {self.step} was completed by those who are left"
        return "the step that was under way is run again, unless all of it, or its result, is there"


class ChangeNote(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Facts about a change of views that rank 0 of the new one tells the launcher.

    Attributes:
        epoch: of the view that begins.
        reason: why the change began, where that is no end of a process that the launcher sees itself.
        is_hearsay: the reason is another member's word.
        seconds: how long rank 0 could run no steps.
        outcome: what became of the step that was under way.
        step: its number, where the program counts steps.
        samples: its epoch, and its first place and the one behind its last in the epoch's order; empty: not known.
        least_size: the fewest members with which its program runs steps.
    """

    epoch: Count
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""
    is_hearsay: bool = False
    seconds: float = 0.0
    outcome: StepOutcome = StepOutcome.PENDING
    step: Count = 0
    samples: tuple[Count, ...] = ()
    least_size: Count = 1

    def describe_outcome(self) -> str:
        """Return the outcome as a part of a sentence; empty while it is pending."""
        step = f"step {self.step}"
        if self.samples:
            epoch, start, stop = self.samples
            step += f" (samples {start}-{stop - 1} of epoch {epoch})"
        return self.outcome.describe(step)


#: A note as bytes, as at `ELASTIC_CHANGE_KEY`.
CHANGE_NOTE_CODEC: MessageCodec[ChangeNote] = MessageCodec(ChangeNote, _MAX_NOTE_BYTES)


@dataclass(frozen=True, slots=True)
class ChangeReason:
    """Reason of a change of views, for the user.

    Attributes:
        text: what has happened.
        is_hearsay: another member's word.
        is_of_death: a process has ended.
    """

    text: str = ""
    is_hearsay: bool = False
    is_of_death: bool = False


@dataclass(frozen=True, slots=True)
class ElasticHistory:
    """Views of this process in its elastic job.

    Attributes:
        changes: the latest ones, oldest first; the first one of a process is how it began.
        num_changes: how many there were, without the first.
        seconds_lost: in all of them together.
        num_reruns: changes after which the step that was under way was run again.
    """

    changes: tuple[ViewChange, ...] = ()
    num_changes: int = 0
    seconds_lost: float = 0.0
    num_reruns: int = 0

    def add(self, change: ViewChange, most: int = 1000) -> ElasticHistory:
        """Return the history with one more change; the oldest of more than ``most`` are forgotten, but counted."""
        return ElasticHistory(
            (*self.changes, change)[-most:],
            self.num_changes + bool(self.changes),
            self.seconds_lost + change.seconds,
            self.num_reruns + change.reruns,
        )

    def explain(self, epoch: int, outcome: StepOutcome) -> ElasticHistory:
        """Return the history with the outcome of the latest change, if that is the one to this epoch and is pending."""
        if not self.changes or (last := self.changes[-1]).epoch != epoch or last.outcome is not StepOutcome.PENDING:
            return self
        change = replace(last, outcome=outcome)
        return replace(
            self, changes=(*self.changes[:-1], change), num_reruns=self.num_reruns - last.reruns + change.reruns
        )


def describe_members(size: int, num_spares: int) -> str:
    """Return ``3 ranks go``, or ``3 ranks and 1 warm spare go`` for a view of four."""
    num = size - num_spares
    ranks = f"{num} rank{'s' * (num != 1)}"
    if num_spares:
        return f"{ranks} and {num_spares} warm spare{'s' * (num_spares != 1)} go"
    return f"{ranks} go{'es' * (num == 1)}"


def describe_moves(moved: Sequence[tuple[int, int]]) -> str:
    """Return ``rank 2 is now 1``, or, of neighbours that move together, ``ranks 2-9 are now 1-8``."""
    runs: list[list[tuple[int, int]]] = []
    for old, new in moved:
        if runs and old == runs[-1][-1][0] + 1 and new == runs[-1][-1][1] + 1:
            runs[-1].append((old, new))
        else:
            runs.append([(old, new)])
    texts = []
    for run in runs:
        (first, to), (last, last_to) = run[0], run[-1]
        one, more = f"rank {first} is now {to}", f"ranks {first}-{last} are now {to}-{last_to}"
        texts.append(one if len(run) == 1 else more)
    return ", ".join(texts)


def compare_views(
    before: View | None,
    view: View,
    *,
    reason: str,
    seconds: float,
    is_planned: bool,
    outcome: StepOutcome = StepOutcome.PENDING,
) -> ViewChange:
    """Return what has changed.

    Args:
        before: the view that ended; None: this process begins with ``view``.
        view: the one that begins.
        reason: why.
        seconds: how long this process could run no steps.
        is_planned: see `ViewChange`.
        outcome: see `ViewChange`.
    """
    step = view.base.target
    if before is None:
        return ViewChange(view.epoch, view.size, step=step, outcome=StepOutcome.NOTHING, num_spares=len(view.spares))
    ranks = [(rank, view.ranks[member]) for member, rank in before.ranks.items() if member in view.ranks]
    return ViewChange(
        view.epoch,
        view.size,
        reason,
        seconds,
        tuple(rank for member, rank in before.ranks.items() if member not in view.ranks),
        sum(member not in before.ranks for member in view.members),
        tuple((old, new) for old, new in ranks if old != new),
        step,
        is_planned,
        view.base.completes,
        outcome,
        len(view.spares),
    )
