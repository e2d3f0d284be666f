"""State machine of a process that wants to become a member: a spare, a replacement, one of a job that grows. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from itertools import islice

from reigen.cluster.membership.views.events import (
    Copied,
    CopyStarted,
    EndProcess,
    Evidence,
    JoinView,
    LeaveRequested,
    MemberEvent,
    Received,
    SendTo,
    StartTimer,
    TimerFired,
    Verdict,
    ViewTimer,
)
from reigen.cluster.membership.views.messages import MemberReady, ViewDecided
from reigen.cluster.membership.views.record import MemberId, View, ViewHost

#: How much less often a process says that it is there where there is no place for it.
_SPARE_RETRIES = 5
#: Hosts that are asked at once whether they can be reached.
MAX_ASKED_HOSTS = 32
CandidateAction = SendTo | StartTimer | JoinView | EndProcess


class CandidateState(Enum):
    """State of a process that wants to become a member."""

    #: started and authenticated
    LOBBY = "lobby"
    #: it receives the state while members train
    COPYING = "copying"
    #: it has the state of a stable step, and says so
    READY = "ready"
    #: a view has it; `ElasticMember` takes over
    JOINED = "joined"
    #: it has ended
    GONE = "gone"


class ElasticCandidate:
    """A process that wants to become a member. Members never wait for it.

    It is taken when a member of each host of the view has answered it. Otherwise one that a host cannot reach would be
    left out as soon as it is there, and after it whatever is started in its place: no view would last.

    Args:
        me: who it is.
        host: its host, with this process alone.
        retry_seconds: between two messages to members.

    Attributes:
        state: where it is.
        view: the latest that it knows to be decided.
    """

    def __init__(self, me: MemberId, host: ViewHost, retry_seconds: float = 0.1) -> None:
        self.me, self._host, self._retry_seconds = me, host, retry_seconds
        self.state = CandidateState.LOBBY
        self.view: View | None = None
        self._lost: set[MemberId] = set()
        #: members that have answered, and may still be reached
        self._heard: set[MemberId] = set()
        #: hosts that are asked
        self._asked: tuple[str, ...] = ()
        self._step = self._turn = 0

    def handle(self, event: MemberEvent) -> list[CandidateAction]:
        """Take in an event; returns actions, in order. Events of members mean nothing to it."""
        if self.state in {CandidateState.JOINED, CandidateState.GONE}:
            return []
        match event:
            case Received(sender, ViewDecided(_, view)):
                learned = self._learn(view, is_copying=False)
                return learned if learned or not isinstance(sender, MemberId) else self._hear(sender)
            case CopyStarted(view):
                return self._learn(view, is_copying=True)
            case Copied(step, True) if self.state is CandidateState.COPYING:
                self.state, self._step = CandidateState.READY, step
                return self._announce()
            case TimerFired(ViewTimer.RETRY) if self.state is CandidateState.READY:
                return self._announce()
            case Received(MemberId() as member, _):
                return self._hear(member)
            case Evidence(member, verdict):
                self._heard.discard(member)
                if verdict is Verdict.DEAD:
                    self._lost.add(member)
            case LeaveRequested():
                self.state = CandidateState.GONE
                return [EndProcess(0, "left before it was a member")]
        return []

    def _learn(self, view: View, *, is_copying: bool) -> list[CandidateAction]:
        if is_copying and self.state is CandidateState.LOBBY:
            self.state = CandidateState.COPYING
        if self.view is not None and view.epoch <= self.view.epoch:
            return []
        self.view = view
        if self.me not in view.ranks:
            return []
        self.state = CandidateState.JOINED
        return [JoinView(view)]

    def _hear(self, member: MemberId) -> list[CandidateAction]:
        """Take note that a member can be reached; say so when that is true of all hosts that were asked."""
        self._heard.add(member)
        is_news = self.state is CandidateState.READY and self._asked and not {*self._asked} & {*self._unreached()}
        return self._announce() if is_news else []

    def _unreached(self) -> Iterator[str]:
        """Yield names of other hosts of which no member has answered."""
        assert self.view is not None
        for host in self.view.hosts:
            if host.name != self._host.name and not any(member.id in self._heard for member in host.members):
                yield host.name

    def _announce(self) -> list[CandidateAction]:
        """Tell rank 0, who acts on it, and another member by turns: rank 0 may be another one now; and ask hosts."""
        assert self.view is not None, "its state is that of a view's members"
        self._asked = tuple(islice(self._unreached(), MAX_ASKED_HOSTS))
        ready = MemberReady(self.view.epoch, self._host, self._step, self._asked)
        self._turn += 1
        members = [self.view.members[0], self.view.members[self._turn % self.view.size]]
        asked = [host.members for host in self.view.hosts if host.name in self._asked]
        members += [each[self._turn % len(each)].id for each in asked]
        receivers = (member for member in dict.fromkeys(members) if member not in self._lost)
        is_spare = self.view.size >= self.view.max_size  # no member waits for its word
        seconds = self._retry_seconds * (_SPARE_RETRIES if is_spare else 1)
        return [*(SendTo(member, ready) for member in receivers), StartTimer(ViewTimer.RETRY, seconds)]
