"""Installation of a view by one of its members: memory, layouts, and who else has come as far. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from reigen.cluster.membership.views.events import BuildLayouts, KillMember, SendTo, UseFreshSegments
from reigen.cluster.membership.views.messages import ViewInstalled
from reigen.cluster.membership.views.record import MemberId, View


class Installation:
    """Installation of ``view``.

    A process of this host that is not a member any more, and was only stopped, may go on in the middle of a step: it
    writes to memory that the others have mapped. So it is killed, and layouts are built when its end is seen, or in
    fresh memory.

    Args:
        me: the member.
        view: the one that is installed.
        dying: processes of this host that are not members any more, and may be alive.

    Attributes:
        installed: members that have installed it, as far as they have said so to this one.
    """

    def __init__(self, me: MemberId, view: View, dying: Collection[MemberId] = ()) -> None:
        self._me, self._view = me, view
        self.dying = set(dying)
        self.installed: set[MemberId] = set()
        self._are_layouts_built = False
        #: looks in a row at which nothing had been heard of a member since the one before
        self._num_silent: Counter[MemberId] = Counter()

    @property
    def is_complete(self) -> bool:
        """True if all members have said that they have installed the view."""
        return len(self.installed) == self._view.size

    def kill(self, leaving: Collection[MemberId]) -> Iterator[KillMember]:
        """Kill former members, but those that leave in good order: they are given the time for it."""
        yield from (KillMember(member) for member in sorted(self.dying) if member not in leaving)

    def advance(self) -> Iterator[BuildLayouts]:
        """Build layouts, once, when only members can write to memory of this host."""
        if not self._are_layouts_built and not self.dying:
            self._are_layouts_built = True
            yield BuildLayouts(self._view)

    def give_up_killing(self) -> Iterator[UseFreshSegments | BuildLayouts]:
        """Go on without the memory to which processes may write that do not die."""
        if self.dying:
            alive = tuple(sorted(self.dying))
            self.dying.clear()
            yield UseFreshSegments(alive)
            yield from self.advance()

    def announcement(self) -> Iterator[SendTo]:
        """Tell rank 0 that this member has installed the view."""
        if self._me in self.installed:
            yield SendTo(self._view.members[0], ViewInstalled(self._view.epoch, self._me))

    def hear(self, member: MemberId) -> None:
        """Take note that a member lives."""
        self._num_silent[member] = 0

    def find_silent(self, awaited: Iterable[MemberId], num_looks: int) -> list[MemberId]:
        """Look for members that are silent; return those not heard of at so many looks in a row.

        Looks are counted, and no seconds: to a process that was stopped itself, all others are silent for long.
        """
        awaited = list(awaited)
        self._num_silent.update(awaited)
        return [member for member in awaited if self._num_silent[member] > num_looks]

    def validate(self) -> None:
        """Assert that only members write to memory in use."""
        assert not (self._are_layouts_built and self.dying), "layouts are built when others are dead"
