"""Line of the launcher about a change of members: who, why, how long, and which work is done again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reigen.cluster.membership.views.history import ChangeNote, describe_moves
from reigen.errors import format_ranks
from reigen.launch.metrics.live_table import format_bytes

Members = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ViewLine:
    """Line about a view that begins; see `describe_view`.

    Attributes:
        epoch: of the view.
        head: ``view 2: 3 ranks go on``, and, after a death, how long after it.
        parts: who has gone and come, and which ranks have moved.
        is_explained: it is known why each one has gone, and that somebody has gone or come.
        outcome: what is done again, where no member tells; empty: nothing.
        due: when it is said though members have not told what is done again.
    """

    epoch: int
    head: str
    parts: tuple[str, ...]
    is_explained: bool
    outcome: str
    has_seconds: bool
    due: float = 0.0

    def text(self, note: ChangeNote | None) -> str:
        """Return the line, with the note of its members."""
        if note is None:
            return "; ".join([self.head, *self.parts, *filter(None, [self.outcome])])
        head = self.head if self.has_seconds or not note.seconds else f"{self.head} after {note.seconds:.2f} s"
        reason = "" if note.is_hearsay and self.is_explained else note.reason
        return "; ".join([head, *self.parts, *filter(None, [reason, note.describe_outcome()])])


def describe_view(
    epoch: int,
    before: Members,
    members: Members,
    reasons: Mapping[tuple[int, int], str],
    seconds: float | None,
    outcome: str,
    due: float,
) -> ViewLine:
    """Describe what has changed.

    Args:
        epoch: of the view that begins.
        before: slots and incarnations of the view before, by rank.
        members: those of the view that begins.
        reasons: why processes have gone, as far as that is known.
        seconds: since the first death; None: nobody has died.
        outcome: see `ViewLine`.
        due: see `ViewLine`.
    """
    ranks = {member: rank for rank, member in enumerate(before)}
    size = len(members)
    head = f"view {epoch}: {size} rank{'s go' if size != 1 else ' goes'} on"
    head += "" if seconds is None else f" {seconds:.1f} s after that"
    by_reason: dict[str, list[int]] = {}
    for member in before:
        if member not in members:
            by_reason.setdefault(reasons.get(member, ""), []).append(member[0])
    parts = [_describe_gone(slots, reason) for reason, slots in by_reason.items()]
    new = [(rank, member[0]) for rank, member in enumerate(members) if member not in ranks]
    joined = [f"slot {slot} joins as rank {rank}" for rank, slot in new]
    parts += [", ".join(joined)] if joined else []
    moved = [(ranks[each], rank) for rank, each in enumerate(members) if ranks.get(each, rank) != rank]
    parts += [describe_moves(moved)] if moved else []
    is_explained = bool(by_reason or joined) and "" not in by_reason
    return ViewLine(epoch, head, tuple(parts), is_explained, outcome, seconds is not None, due)


def describe_pause(seconds: float, num_bytes: int, slots: Sequence[int]) -> str:
    """Describe a pause that is about to begin.

    Args:
        seconds: how long it will be; 0: not known.
        num_bytes: that are sent meanwhile.
        slots: who get them.
    """
    who = f"slot{'s' * (len(slots) > 1)} {format_ranks(slots)}"
    how_long = f" about {seconds:.1f} s" if seconds else ""
    return f"members wait{how_long} while {who} get{'s' * (len(slots) == 1)} the state ({format_bytes(num_bytes)})"


def _describe_gone(slots: Sequence[int], reason: str) -> str:
    who = f"slots {format_ranks(slots)} have" if len(slots) > 1 else f"slot {slots[0]} has"
    return f"{who} gone{reason and f' ({reason})'}"
