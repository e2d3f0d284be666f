"""Members that a collective of a view has waited for until its deadline: they get no more patience. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from reigen.cluster.membership.views.events import Evidence, MembersLate, StartTimer, Verdict, ViewTimer
from reigen.cluster.membership.views.record import MemberId, View


class LateMembers:
    """Late members of ``view`` of which nothing has been heard since; their programs may be slow.

    Where the view ends, a leader asks all members, and each hears of the leader. So who is silent to others than the
    leader need not be stuck; no harm is done, for a member that has reported is not left out.

    Args:
        me: the member that waits.
        view: the present one.
        seconds: until those who are silent in a change are stuck.
    """

    def __init__(self, me: MemberId, view: View, seconds: float) -> None:
        self._me, self._epoch, self._seconds = me, view.epoch, seconds
        self._silent: set[MemberId] = set()

    def take(self, event: MembersLate, *, is_changing: bool) -> Iterator[StartTimer]:
        """Take in who is late."""
        if event.epoch == self._epoch:
            self._silent = {*event.members} - {self._me}
            yield from self.watch() if is_changing else ()

    def watch(self) -> Iterator[StartTimer]:
        """Wait for a word of them: a change has begun."""
        if self._silent:
            yield StartTimer(ViewTimer.LATE, self._seconds)

    def hear(self, member: MemberId) -> None:
        """Take note that a member lives."""
        self._silent.discard(member)

    def evidence(self) -> Iterator[Evidence]:
        """Yield evidence about those who are silent."""
        for member in sorted(self._silent):
            yield Evidence(member, Verdict.STUCK, "a collective has waited for it, and it is silent")
