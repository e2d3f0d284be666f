"""Attribution of failures that happen at one time: which members are lost of themselves, and which follow them. Pure.

When a process dies, its peers notice broken connections and give up (Abort), and the service may hear that first. Also
the ranks of a host that crashes do not end at one moment. So where a role's policy says so, a loss or an abort is held
for a moment. What was held is then told together: losses first, one event for each host, in the order in which hosts
lost their first member; then the first abort; then who left. Nothing is held when a host has no member left that could
follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import msgspec

from reigen.cluster.membership.members import NEVER, Member, MemberState
from reigen.cluster.membership.messages import MemberAborted, MemberLeft, MemberLost, MembershipEvent


class HeldEvents:
    """Events of one job that are held.

    Args:
        members: all of the job.

    Attributes:
        until: when to tell them; `NEVER`: nothing is held.
    """

    def __init__(self, members: Collection[Member]) -> None:
        self._members, self.until = members, NEVER
        self._losses: dict[str, list[tuple[Member, MemberLost]]] = {}
        self._events: list[MembershipEvent] = []
        #: departures that are announced together, while nothing else is held
        self._departures: list[MembershipEvent] = []
        #: a member of a host that has lost others: while it is there, these are held
        self._follower: Member | None = None

    def __contains__(self, event: MembershipEvent) -> bool:
        losses = [loss for some in self._losses.values() for _, loss in some]
        return event in (*losses, *self._events, *self._departures)

    def add_loss(self, member: Member, loss: MemberLost, now: float) -> list[MembershipEvent]:
        """Add a loss; returns events to announce now."""
        if not member.policy.hold_seconds:
            return [loss]
        self.until = min(self.until, now + member.policy.hold_seconds)
        self._losses.setdefault(member.host_id, []).append((member, loss))
        return []

    def add_abort(self, event: MemberAborted, until: float) -> list[MembershipEvent]:
        """Add an abort with the time until which to hold it; returns events to announce now."""
        self.until = min(self.until, until)
        if self.until == NEVER:
            return [event]
        self._events.append(event)
        return []

    def add_departure(self, member: Member) -> list[MembershipEvent]:
        """Add a departure; returns events to announce now."""
        if self.until == NEVER and not member.policy.leaves_together:
            return [member.left_event]
        (self._departures if self.until == NEVER else self._events).append(member.left_event)
        return []

    @property
    def has_departures(self) -> bool:
        """Return whether `take_departures` would give something."""
        return bool(self._departures)

    def take_departures(self) -> list[MembershipEvent]:
        """Return the departures that are announced together."""
        departures, self._departures = self._departures, []
        return departures

    def release(self, now: float = NEVER) -> list[MembershipEvent]:
        """Return the events that are due, in order."""
        if self.until == NEVER:
            return []
        if now < self.until and (not self._losses or self._has_follower()):
            return []
        sizes = Counter(member.host_id for member in self._members if member.state is not MemberState.ABSENT)
        released: list[MembershipEvent] = []
        for host_id, losses in self._losses.items():
            first, *others = (loss for _, loss in losses)
            loss = msgspec.structs.replace(
                first,
                others=tuple(sorted(other.number for other in others)),
                is_whole_host=1 < len(losses) == sizes[host_id],
                is_silent=first.is_silent or any(other.is_silent for other in others),
            )
            for member, _ in losses:
                member.loss = loss
            released.append(loss)
        released += sorted(self._events, key=lambda event: isinstance(event, MemberLeft))
        self._losses, self._events, self.until = {}, [], NEVER
        return released

    def _has_follower(self) -> bool:
        """Return whether a host that has lost members has others, and remember one."""
        if self._follower is None or not self._may_follow(self._follower):
            self._follower = next(filter(self._may_follow, self._members), None)
        return self._follower is not None

    def _may_follow(self, member: Member) -> bool:
        return member.state is MemberState.PRESENT and member.host_id in self._losses

    def of_host(self, host_id: str) -> Iterator[Member]:
        """Return the members that have been on one host."""
        return (one for one in self._members if one.state is not MemberState.ABSENT and one.host_id == host_id)
