"""Times at which something follows from a member's silence, of which the earliest is always known. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from reigen.cluster.membership.members import NEVER, Member


class MemberDeadlines:
    """`Member.until` of all members, as a heap: nothing here takes time for members whose time does not change.

    A member has one entry that counts, which is not behind its time. A time that moves on, as with every heartbeat,
    leaves the entry where it is; that moves when it has become the first.

    Args:
        members: all of the job.
    """

    def __init__(self, members: Collection[Member]) -> None:
        self._members = list(members)
        self._numbers = {(member.role, member.number): index for index, member in enumerate(self._members)}
        #: the time of the entry that counts, by member; `NEVER`: it has none
        self._entries = [NEVER] * len(self._members)
        self._heap: list[tuple[float, int]] = []

    def set(self, member: Member, until: float) -> None:
        """Change the time of a member."""
        member.until = until
        index = self._numbers[member.role, member.number]
        if until < self._entries[index]:
            self._entries[index] = until
            heapq.heappush(self._heap, (until, index))

    def earliest(self) -> float:
        """Return the earliest time of all; `NEVER`: no member has one."""
        while self._heap:
            until, index = self._heap[0]
            if self._entries[index] != until:  # a later entry of the member was earlier
                heapq.heappop(self._heap)
            elif (actual := self._members[index].until) == until:
                return until
            else:
                self._pop()
                self.set(self._members[index], actual)
        return NEVER

    def take_due(self, now: float) -> list[Member]:
        """Return the members whose time has come, in the order of their numbers; each is to be given another time."""
        due: list[int] = []
        while self.earliest() <= now < NEVER:
            due.append(self._pop())
        return [self._members[index] for index in sorted(due)]

    def _pop(self) -> int:
        _, index = heapq.heappop(self._heap)
        self._entries[index] = NEVER
        return index
