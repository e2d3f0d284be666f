"""Members that are slow, silent to newcomers, or too few: how long the others wait. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from reigen.cluster.membership.views.events import Evidence, MembersLate, StartTimer, Verdict, ViewTimer
from reigen.cluster.membership.views.messages import MemberReady
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


class BusyMembers:
    """Members that have said in a change that they live, but are not ready: an update has begun, and is waited for.

    Args:
        most_looks: after so many looks they get no more patience.
    """

    def __init__(self, most_looks: int) -> None:
        self._most_looks, self._num_looks = most_looks, 0
        #: since the last look
        self._heard: set[MemberId] = set()

    def hear(self, member: MemberId) -> None:
        """Take note that a member lives."""
        self._heard.add(member)

    def find_silent(self, awaited: Iterable[MemberId]) -> list[MemberId]:
        """Look for members that are silent; return those that were not heard since the last look."""
        awaited, heard, self._heard = list(awaited), self._heard, set()
        if heard.isdisjoint(awaited) or self._num_looks >= self._most_looks:
            return awaited
        self._num_looks += 1
        return [member for member in awaited if member not in heard]


class SilentHosts:
    """Hosts of a view whose members wait for others, and that these do not reach.

    All processes there may be stopped, and no step shows it. So a change is begun, in which who is silent is left out;
    if none of them is, the newcomers are cut off. Therefore one is begun once for each newcomer, by whichever member is
    first: any change that begins while newcomers are known has asked all members. And only where there are enough
    members without such hosts.
    """

    def __init__(self) -> None:
        self._tried: set[MemberId] = set()

    def newcomers(self, view: View, candidates: Collection[MemberReady], least_size: int) -> set[MemberId]:
        """Return the newcomers for which a change may help.

        Args:
            view: the present one.
            candidates: all that want to be members.
            least_size: number of members with which steps are run.
        """
        names = {host.name for host in view.hosts}
        cut = {each.host.members[0].id: names.intersection(each.unreached) for each in candidates}
        found = {member for member, unreached in cut.items() if unreached and member not in self._tried}
        silent = {name for member in found for name in cut[member]}
        num_left = sum(len(host.members) for host in view.hosts if host.name not in silent)
        return found if num_left + len(candidates) >= least_size else set()

    def note_change(self, candidates: Iterable[MemberReady]) -> None:
        """Take note that a change begins, here or elsewhere, while these want to be members."""
        self._tried.update(each.host.members[0].id for each in candidates if each.unreached)


class MemberShortage:
    """Shortage of members for a step, in changes and views that follow each other: they have one time to wait.

    It counts from the first change: that no view can be decided, and that the next one is too small, are one shortage.

    Args:
        seconds: until no more members are waited for.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._goes_on = seconds, False
        #: the time is over, perhaps in a change that may bring more
        self.has_expired = False

    def begin(self) -> Iterator[StartTimer]:
        """Start the timer, if no change or view before this one has."""
        if not self._goes_on:
            yield StartTimer(ViewTimer.WAIT, self._seconds)
        self._goes_on = True

    def end(self) -> None:
        """Take note of a view with enough members."""
        self._goes_on = self.has_expired = False

    def expire(self) -> None:
        """Take note that the timer has ended; one of a shortage that is over means nothing."""
        self.has_expired = self._goes_on

    def join(self) -> None:
        """Take note that another member has waited as long as it may."""
        self._goes_on = self.has_expired = True

    def limit_change(self, seconds: float, stuck_seconds: float) -> StartTimer:
        """Return the timer of a change: when the time to wait is over, it may only find out who is stuck."""
        return StartTimer(ViewTimer.CHANGE, min(seconds, 2 * stuck_seconds) if self.has_expired else seconds)

    def explain(self, size: int, least_size: int) -> str:
        """Return why a member with `size` in its view ends."""
        text = f"{size} rank(s) are left, steps need {least_size}, and no more came"
        return f"{text} in {self._seconds:g} s (HOROVOD_ELASTIC_TIMEOUT)"
