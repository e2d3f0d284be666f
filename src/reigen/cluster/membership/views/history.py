"""History of the views that a process was a member of: what changed, why, and how long it took. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reigen.cluster.membership.views.record import View
from reigen.errors import format_ranks


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
        completes: the step that was under way was finished with what is left of it.
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

    @property
    def reruns(self) -> bool:
        """True if the step that was under way is run again; for `hvd.elastic.run`: all since the last commit."""
        return bool(self.reason) and not self.is_planned and not self.completes

    def describe(self) -> str:
        """Return the change in a sentence: ``view 3: 3 ranks go on after 0.12 s; rank 1 has gone; ...``."""
        parts = [f"view {self.epoch}: {self.size} rank{'s' * (self.size != 1)} go{'es' * (self.size == 1)} on"]
        if self.seconds:
            parts[0] += f" after {self.seconds:.2f} s"
        if self.lost:
            parts.append(f"rank{'s' * (len(self.lost) > 1)} {format_ranks(self.lost)} left")
        if self.num_joined:
            parts.append(f"{self.num_joined} joined")
        if self.moved:
            parts.append(describe_moves(self.moved))
        if self.reruns:
            parts.append("what was done since the last commit is done again")
        elif self.completes:
            parts.append(f"step {self.step} was completed by those who are left")
        return "; ".join([*parts, *([self.reason] if self.reason else [])])


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


def compare_views(before: View | None, view: View, *, reason: str, seconds: float, is_planned: bool) -> ViewChange:
    """Return what has changed.

    Args:
        before: the view that ended; None: this process begins with ``view``.
        view: the one that begins.
        reason: why.
        seconds: how long this process could run no steps.
        is_planned: see `ViewChange`.
    """
    step = view.base.target
    if before is None:
        return ViewChange(view.epoch, view.size, step=step)
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
    )
