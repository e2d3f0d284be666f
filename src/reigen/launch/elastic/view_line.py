"""Lines of the launcher about changes of members: who, why, how long, and which work is done again. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from reigen.cluster.membership.views.history import ChangeNote, StepOutcome, describe_members, describe_moves
from reigen.errors import format_ranks
from reigen.launch.units import format_bytes

Members = Sequence[tuple[int, int]]

#: How long the line about a view waits for what its members make of the step that was under way.
OUTCOME_SECONDS = 10.0


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
        size: number of its members.
        least_size: the fewest with which steps are run, as far as the launcher knows.
    """

    epoch: int
    head: str
    parts: tuple[str, ...]
    is_explained: bool
    outcome: str
    has_seconds: bool
    due: float = 0.0
    size: int = 1
    least_size: int = 1

    def is_short(self, note: ChangeNote | None) -> bool:
        """Return whether steps wait for more members; until then it is not known which work is done again."""
        return self.size < self._least(note)

    def _least(self, note: ChangeNote | None) -> int:
        return max(self.least_size, 1 if note is None else note.least_size)

    def text(self, note: ChangeNote | None) -> str:
        """Return the line, with the note of its members."""
        if self.is_short(note):
            return "; ".join([f"view {self.epoch}: {describe_shortage(self.size, self._least(note))}", *self.parts])
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
    spares: tuple[Collection[tuple[int, int]], Collection[tuple[int, int]]] = ((), ()),
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
        spares: the warm ones among the members of the view before, and of this one.
    """
    ranks = {member: rank for rank, member in enumerate(before)}
    spares_before, spares_now = spares
    head = f"view {epoch}: {describe_members(len(members), len(spares_now))} on"
    head += "" if seconds is None else f" {seconds:.1f} s after that"
    by_reason: dict[str, list[int]] = {}
    for member in before:
        if member not in members:
            by_reason.setdefault(reasons.get(member, ""), []).append(member[0])
    parts = [_describe_gone(slots, reason) for reason, slots in by_reason.items()]
    took = [member[0] for member in members if member in spares_before and member not in spares_now]
    parts += [_describe_takeover(took)] if took else []
    new = [(rank, member) for rank, member in enumerate(members) if member not in ranks]
    joined = [
        f"slot {member[0]} joins as rank {rank}{', a warm spare' * (member in spares_now)}" for rank, member in new
    ]
    parts += [", ".join(joined)] if joined else []
    moved = [(ranks[each], rank) for rank, each in enumerate(members) if ranks.get(each, rank) != rank]
    parts += [describe_moves(moved)] if moved else []
    is_explained = bool(by_reason or joined) and "" not in by_reason
    return ViewLine(epoch, head, tuple(parts), is_explained, outcome, seconds is not None, due, len(members))


def describe_shortage(num: int, least: int) -> str:
    """Return ``1 rank is there, and 2 are needed: steps wait``."""
    return f"{num} rank{'s are' if num != 1 else ' is'} there, and {least} are needed: steps wait"


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


def _describe_takeover(slots: Sequence[int]) -> str:
    if len(slots) > 1:
        return f"slots {format_ranks(slots)}, warm spares, take over"
    return f"slot {slots[0]}, a warm spare, takes over"


class ChangeLines:
    """Lines about the changes of a job's members, and the facts of each until its line can be printed.

    Members are named by slot and incarnation.
    """

    def __init__(self) -> None:
        #: why processes have gone, or are to
        self._why_gone: dict[tuple[int, int], str] = {}
        #: when the first member has died since the last view began
        self._died_at: float | None = None
        #: what members have told of the two latest changes, by epoch; the line that waits for it
        self._notes: dict[int, ChangeNote] = {}
        #: warm spares of the latest view
        self._spares: frozenset[tuple[int, int]] = frozenset()
        self._line: ViewLine | None = None
        #: view of which a pause was announced
        self._paused_epoch: int | None = None

    @property
    def due(self) -> float:
        """Time at which a line is printed although members have sent nothing; inf: there is none."""
        return inf if self._line is None else self._line.due

    def note_gone(self, members: Iterable[tuple[int, int]], why: str) -> None:
        """Take note why processes have gone, or are asked to go."""
        self._why_gone.update(dict.fromkeys(members, why))

    def note_death(self, now: float) -> None:
        """Take note that a member has died."""
        self._died_at = now if self._died_at is None else self._died_at

    def explain(self, note: ChangeNote) -> None:
        """Take in what members tell of the latest change. That of a view behind it may come before its line is due."""
        self._notes[note.epoch] = note
        while len(self._notes) > 2:
            del self._notes[min(self._notes)]

    def begin_view(
        self,
        epoch: int,
        before: Members | None,
        members: Members,
        completed_step: int | None,
        now: float,
        spares: Collection[int] = (),
        *,
        least: int = 1,
    ) -> None:
        """Make the line about a view that begins: ``view 2: 3 ranks go on after 0.1 s; rank 3 is now 2; ...``.

        Args:
            epoch: of the view.
            before: members of the view before, by rank; None: it is the first one, about which there is nothing to say.
            members: its members, by rank.
            completed_step: the one that those who are left have finished; None: none.
            now: when it begins.
            spares: ranks of its warm spares.
            least: members without which no step is run; the program may need more (`ChangeNote.least_size`).
        """
        spares_before, self._spares = self._spares, frozenset(members[rank] for rank in spares)
        if before is not None:
            seconds = None if self._died_at is None else now - self._died_at
            outcome = "" if seconds is None else "what was done since the last commit is done again"
            if completed_step is not None and set(before) - set(members):
                outcome = f"step {completed_step} was completed without those who died"
            due = now + (OUTCOME_SECONDS if epoch in self._notes else 0.0)
            spares_of_both = spares_before, self._spares
            line = describe_view(epoch, before, members, self._why_gone, seconds, outcome, due, spares_of_both)
            self._line = replace(line, least_size=least)
        self._died_at = None
        self._why_gone = {member: why for member, why in self._why_gone.items() if member in members}

    def take_line(self, now: float, *, must: bool) -> str:
        """Return the line about the latest view if it need not wait for what members tell; it is said once.

        Args:
            now: the time.
            must: nothing will be told any more.

        Returns:
            Empty: there is none, or it is too early.
        """
        line = self._line
        if line is None:
            return ""
        note = self._notes.get(line.epoch)
        is_whole = line.is_short(note) or (note is not None and note.outcome is not StepOutcome.PENDING)
        if not is_whole and not must and now < line.due:
            return ""
        self._line = None
        return line.text(note)

    def describe_pause(self, epoch: int | None, seconds: float, num_bytes: int, slots: Collection[int]) -> str:
        """Describe a pause in a view, once: a transfer that fails is made again. Empty: there is nothing to say.

        Args:
            epoch: of the view.
            seconds: see the function of this name.
            num_bytes: see there.
            slots: see there; those that run.
        """
        if not slots or self._paused_epoch == epoch:
            return ""
        self._paused_epoch = epoch
        return describe_pause(seconds, num_bytes, sorted(slots))
