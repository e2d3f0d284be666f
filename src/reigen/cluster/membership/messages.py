"""Messages between a membership service and the members of a job: ranks, or a parameter server's workers and servers.

The protocol, after the handshake of ``net.auth``, one msgspec message a frame, on one connection for each member:

a. A member sends Register; the service answers Assigned, or Refused with the reason, and ends the connection. What
   members say is enough to know the job again: a service that was started anew learns from those that connect again who
   is there, and which job and epoch it is. So do snapshots, when the processes that wrote them have died with it.
b. When all servers have come, and whenever a member registers after that, it is sent ServerList.
c. What happens to others comes as News. A member with heartbeats sends one every now and then.
d. A worker sends EnterBarrier, and BarrierOver comes when all have; or when one of them gives it up, and then it comes
   to all, whenever they enter. On a new connection workers say so again, of the barriers at which they wait, of the
   last one of every name, and of the latest that were broken.
e. StatusQuery asks whom the start waits for, and of how many nothing was heard.
f. A member that goes in good order sends Leave, and hears of it as News. A rank that cannot go on sends Abort. A
   connection that ends before that: the member is lost; or, where its role may, it connects again, as it does when the
   service has gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from reigen.cluster.membership.abort_message import AbortMessage
from reigen.errors import CollectiveError, DeadlineError, PeerLostError
from reigen.net.codec import MessageCodec

MemberRole = Literal["rank", "worker", "server"]

#: Number in members' messages: what a liar says can be counted on, and still be sent.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]

#: The largest is a value of the rendezvous, a key and a few numbers.
MAX_MESSAGE_BYTES = (1 << 20) + 1024
MAX_BARRIER_NAME_BYTES = 256
#: Jobs of which a server says that it has snapshots, the latest ones.
MAX_SAVED_JOBS = 4


# -- what happens to members ------------------------------------------------------------------------------------------


class _Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of messages and their parts."""


class ServerInfo(_Message, frozen=True):
    """Server, as workers need to know it.

    Attributes:
        number: from 0.
        address: where it listens for workers, ``host:port`` (``[host]:port`` for IPv6).
        incarnation: another one for each process that was this server.
        host: its name for people.
    """

    number: int
    address: str
    incarnation: int
    host: str


class _MemberEvent(_Message, frozen=True):
    """Base of events of one member: its role, its number, its host."""

    role: MemberRole
    number: int
    host: str


class MemberLost(_MemberEvent, tag="lost", frozen=True):
    """Loss of a member: it has ended or is silent, without Leave or Abort.

    Attributes:
        reason: how that was noticed, for people: "its process ended", "nothing was heard of it for 20 s".
        will_return: a process is expected to take its place: the wait is for that.
        incarnation: of the process that is gone, 0 where it is not known: another one may be there already.
        others: members of its role and host that were lost at the same time.
        is_whole_host: these are more than one, and all that the host had.
        is_silent: the host was not heard of for so long that it counts as lost.
        is_move: it is a server that has said that it moves to another process.
    """

    reason: str
    will_return: bool = False
    incarnation: int = 0
    others: tuple[int, ...] = ()
    is_whole_host: bool = False
    is_silent: bool = False
    is_move: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return all that were lost, ascending."""
        return tuple(sorted((self.number, *self.others)))

    def __str__(self) -> str:
        return f"{self.role} {self.number} on host {self.host} is lost: {self.reason}"


class MemberLeft(_MemberEvent, tag="left", frozen=True):
    """Departure of a member in good order. It is not waited for any more.

    ``incarnation``: of the process of an elastic job; another one may have its place already.
    """

    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.number} on host {self.host} has left in good order"


class MemberAborted(_MemberEvent, tag="aborted", frozen=True):
    """Abort of a member that cannot go on."""

    abort: AbortMessage


class MemberReturned(_MemberEvent, tag="returned", frozen=True):
    """Return of a lost member, or another process in its place.

    Attributes:
        incarnation: as before: the process that was silent; another one: a replacement.
        address: where a server is to be found from now on.
        is_new: a process of an elastic job that has just come.
    """

    incarnation: int
    address: str = ""
    is_new: bool = False

    def __str__(self) -> str:
        where = f" at {self.address}" if self.address else ""
        if self.is_new:
            return f"{self.role} {self.number} joins, on host {self.host}"
        return f"{self.role} {self.number} is there again, on host {self.host}{where}"

    @property
    def server(self) -> ServerInfo:
        """Describe a server that has returned."""
        return ServerInfo(self.number, self.address, self.incarnation, self.host)


class WorkerRoster(_Message, tag="roster", frozen=True):
    """Workers of an elastic job that are there now; what follows changes it.

    Attributes:
        workers: their numbers, in the order in which they have joined.
        is_open: so many have come that the job has begun.
        incarnations: of their processes, in the same order.
    """

    workers: tuple[int, ...]
    is_open: bool
    incarnations: tuple[int, ...] = ()

    def __str__(self) -> str:
        what = "the job has begun with" if self.is_open else "the job has not begun; there are"
        return f"{what} {format_members(workers=self.workers) or 'no workers'}"


class JobEnded(_Message, tag="stop", frozen=True):
    """End of the job; no more news will come.

    Attributes:
        exit_code: 0: all workers have left in good order; WORKERS_LOST_EXIT_CODE: it ends since some are lost.
        reason: why, for people.
        is_late: it never began as it should: a member did not come.
        workers: and these of them are workers.
    """

    exit_code: int
    reason: str
    is_late: bool = False
    workers: tuple[int, ...] = ()

    def error(self) -> CollectiveError:
        """Make the error of a process of the job that wants to go on."""
        kind = DeadlineError if self.is_late else PeerLostError
        return kind(str(self), ranks=self.workers)

    def __str__(self) -> str:
        return f"the job is over: {self.reason}"


MembershipEvent = MemberLost | MemberLeft | MemberAborted | MemberReturned | WorkerRoster | JobEnded


# -- of members -------------------------------------------------------------------------------------------------------


class EnterBarrier(_Message, tag=21, frozen=True):
    """Arrival of a worker at a barrier, for the ``sequence``-th time at one of this name.

    Attributes:
        is_abandoned: it does not want to wait any more.
        is_over: it has heard that all have come; or, if it is abandoned, that it is broken.
    """

    name: str
    sequence: Count
    is_abandoned: bool = False
    is_over: bool = False


class SavedJob(_Message, frozen=True):
    """Job of which a server has found snapshots on its disk: all its servers had come once.

    Attributes:
        job: its number.
        left: workers that had left it in good order.
    """

    job: Count
    left: tuple[int, ...] = ()


class RegisterMember(_Message, tag=20, frozen=True):
    """Registration of a process that wants to be a member, or is one and has a new connection.

    Attributes:
        role: what it is.
        number: which one, -1 where it was not told.
        host: its host's name for people.
        incarnation: of its process; not 0.
        counts: how many members of each role it expects to be in the job.
        address: where a server listens; else empty.
        group: the name under which the ranks of one job meet; never used again. Empty where the service has one job.
        host_id: identity of its host, where the losses of a host are announced together.
        job: which job it is in, as a service said before; 0: none has.
        epoch: the latest of which it has heard.
        is_recovery: as it was told with its number.
        left: workers that have left in good order, as far as it has heard.
        lost: members that are lost, as far as it has heard: it may have missed their return.
        is_open: it has heard where the servers are: all have come once.
        barriers: at which it waits, the last one of every name, and the latest that were broken.
        saved: the jobs with this secret of which a server that was not told its number yet has found snapshots.
        is_restart: its launcher says that it has started this process before: it takes a place that was lost.
        slot: of a worker of an elastic job: its launcher's number for its place, and how often that was used before.
    """

    role: MemberRole
    number: int
    host: str
    incarnation: Count
    counts: dict[MemberRole, Count]
    address: str = ""
    group: str = ""
    host_id: str = ""
    job: Count = 0
    epoch: Count = 0
    is_recovery: bool = False
    left: tuple[int, ...] = ()
    lost: tuple[tuple[MemberRole, int], ...] = ()
    is_open: bool = False
    barriers: tuple[EnterBarrier, ...] = ()
    saved: tuple[SavedJob, ...] = ()
    is_restart: bool = False
    slot: tuple[int, int] | None = None

    @property
    def is_known(self) -> bool:
        """Return whether it has had its number from a service of this job before."""
        return self.job != 0


class MemberHeartbeat(_Message, tag=23, frozen=True):
    """Sign of life of a process."""


class LeaveJob(_Message, tag=24, frozen=True):
    """Departure of the sender in good order."""


class HeldKeys(_Message, tag=26, frozen=True):
    """Keys of which a server holds something, for the message about its death.

    Attributes:
        server: its number.
        text: for people, in one line: ``3 keys: 'a', 'b', 'c'``.
    """

    server: Count
    text: str


class MoveServer(_Message, tag=28, frozen=True):
    """Departure of a server whose place another process is about to take."""


class ResizeServers(_Message, tag=27, frozen=True):
    """Request of a worker that the servers of an elastic job run in so many processes.

    ``request`` is its number among the sender's, by which it is answered.
    """

    num: Count
    request: Count


class StatusQuery(_Message, tag=25, frozen=True):
    """Query of members that have not come, and the number of those silent for so many seconds."""

    seconds: float = 0.0


# -- of the service ---------------------------------------------------------------------------------------------------


class MemberAssigned(_Message, tag=30, frozen=True):
    """Place of the member.

    Attributes:
        number: which.
        is_recovery: it takes the place of one that was lost.
        job: the job that it is a place in; never 0.
        epoch: the latest change that is in this, and in what comes with it.
        barriers: and goes on there: how often the barriers of each name are over.
    """

    number: int
    is_recovery: bool
    job: int
    epoch: int = 0
    barriers: tuple[tuple[str, int], ...] = ()


class MemberRefused(_Message, tag=31, frozen=True):
    """Refusal: the process cannot be in this job."""

    reason: str


class ServerList(_Message, tag=32, frozen=True):
    """Addresses of all servers, by number."""

    servers: tuple[ServerInfo, ...]


class MembershipNews(_Message, tag=33, frozen=True):
    """Events up to an epoch, in the order in which to believe them."""

    events: tuple[MembershipEvent, ...]
    epoch: int = 0


class BarrierOver(_Message, tag=34, frozen=True):
    """End of a barrier: all workers have come, or it is broken for all of them, since one has given it up.

    Attributes:
        worker: the one that has; -1: none.
        missing: those that had not come then.
    """

    name: str
    sequence: int
    worker: int = -1
    missing: tuple[int, ...] = ()

    @property
    def is_broken(self) -> bool:
        """Return whether no worker passes it."""
        return self.worker >= 0


class StatusReply(_Message, tag=36, frozen=True):
    """Members that have not come, and the number of those that are lost, or silent for so long."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    seconds: float = 0.0
    num_silent: int = 0


class ResizeAccepted(_Message, tag=37, frozen=True):
    """Answer to ResizeServers: the launcher has the request."""

    request: Count


MemberMessage = (
    RegisterMember | MemberHeartbeat | LeaveJob | AbortMessage
    | EnterBarrier | StatusQuery | HeldKeys | ResizeServers | MoveServer
)  # fmt: skip
MembershipReply = (
    MemberAssigned | MemberRefused | ServerList | MembershipNews
    | BarrierOver | StatusReply | ResizeAccepted
)  # fmt: skip

MEMBER_CODEC: MessageCodec[MemberMessage] = MessageCodec(MemberMessage, MAX_MESSAGE_BYTES)
MEMBERSHIP_REPLY_CODEC: MessageCodec[MembershipReply] = MessageCodec(MembershipReply, MAX_MESSAGE_BYTES)


def format_members(**numbers: Iterable[int]) -> str:
    """Members in words: ``workers 1 and 2, server 0`` of ``workers=(1, 2), servers=(0,)``."""
    parts: list[str] = []
    for roles, some in numbers.items():
        words = [str(number) for number in sorted(some)]
        if words:
            listed = " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
            parts.append(f"{roles if len(words) > 1 else roles.removesuffix('s')} {listed}")
    return ", ".join(parts)
