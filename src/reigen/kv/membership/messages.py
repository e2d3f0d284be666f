"""What a scheduler and its workers and servers say to each other, on one connection for each of them.

The protocol, after the handshake of ``net.auth``, one msgspec message a frame:

a. A node sends Register: what it is, its number if it knows one, where it listens, and, if it is a server, of which
   jobs there are snapshots on its disk. The scheduler answers Assigned, or Refused with the reason. What a node says is
   enough to know the job again: a scheduler that was started anew learns from the nodes that connect again who is
   there, and which job it is: the job's number is chosen by its first scheduler, and nodes say it ever after. So do
   snapshots, when the processes that wrote them have died with the scheduler.
b. When all servers have come, and whenever a node registers after that, it is sent Welcome: where they all are.
c. A node sends Heartbeat every now and then. What happens to others comes as News.
d. A worker sends EnterBarrier, and BarrierDone comes when all have. One that does not want to wait any more sends
   GiveUp: if not all have come by then, the barrier is broken, and BarrierBroken comes to all, whenever they enter.
   On a new connection workers say so again, of the barriers at which they wait, of the last one of every name, and of
   the latest that were broken.
e. MissingQuery asks whom the start waits for, the answer is Missing; SilentQuery whom nothing was heard of, the answer
   is Silent.
f. A node that goes in good order sends Leave, and hears of it as News, from a scheduler that is started again if need
   be: a worker waits for that, but not for longer than REIGEN_PEER_TIMEOUT. A connection that ends before that: the
   node is lost, or it connects again, as it does when the scheduler has gone.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from reigen.kv.membership.nodes import MembershipEvent, NodeRole, ServerInfo
from reigen.net.auth import Identity, ProcessRole
from reigen.net.codec import MessageCodec

SCHEDULER_IDENTITY = Identity(ProcessRole.RANK, 0, "kv scheduler")

MAX_BARRIER_NAME_BYTES = 256
MAX_MESSAGE_BYTES = 1 << 20
#: Jobs of which a server says that it has snapshots, the latest ones.
MAX_SAVED_JOBS = 4


class EnterBarrier(msgspec.Struct, tag=4, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A worker is at a barrier, for the ``sequence``-th time at one of this name.

    Attributes:
        is_over: it has been told that all have come.
    """

    name: str
    sequence: int
    is_over: bool = False


class AbandonBarrier(msgspec.Struct, tag=12, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A worker that is at a barrier does not want to wait any more.

    Attributes:
        is_over: it has been told that the barrier is broken.
    """

    name: str
    sequence: int
    is_over: bool = False


class SavedJob(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A job of which a server has found snapshots on its disk: all its servers had come once.

    Attributes:
        job: its number.
        left: workers that had left it in good order.
    """

    job: int
    left: tuple[int, ...] = ()


class RegisterNode(msgspec.Struct, tag=1, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A node is there.

    Attributes:
        role: what it is.
        number: which one, -1 where it was not told.
        host: what people call its machine.
        address: where a server listens; empty for a worker.
        incarnation: of its process.
        num_workers: how many workers it expects to be in the job.
        num_servers: how many servers.
        job: which job it is in, as a scheduler told it before; 0: none has.
        is_recovery: as it was told then.
        left: workers that have left in good order, as far as it was told.
        is_open: it was told where the servers are: all have come once.
        barriers: at which it waits, the last one of every name, and the latest that were broken.
        saved: the jobs with this secret of which a server that was not told its number yet has found snapshots.
        is_restart: its launcher says that it has started this process before: it takes a place that was lost.
    """

    role: NodeRole
    number: int
    host: str
    address: str
    incarnation: int
    num_workers: int
    num_servers: int
    job: int = 0
    is_recovery: bool = False
    left: tuple[int, ...] = ()
    is_open: bool = False
    barriers: tuple[EnterBarrier | AbandonBarrier, ...] = ()
    saved: tuple[SavedJob, ...] = ()
    is_restart: bool = False

    @property
    def is_known(self) -> bool:
        """Whether it has been told its number by this job's scheduler before."""
        return self.job != 0


class NodeHeartbeat(msgspec.Struct, tag=2, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The process runs."""


class LeaveJob(msgspec.Struct, tag=3, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The node goes in good order."""


class MissingQuery(msgspec.Struct, tag=5, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Whom does the start wait for?"""


class SilentQuery(msgspec.Struct, tag=13, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Of whom was nothing heard for so many seconds?"""

    seconds: float


class NodeAssigned(msgspec.Struct, tag=6, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The node has its place.

    Attributes:
        number: which.
        is_recovery: it takes the place of one that was lost.
        job: the job that it is a place in; never 0.
        barriers: and goes on there: how often the barriers of each name are over.
    """

    number: int
    is_recovery: bool
    job: int
    barriers: tuple[tuple[str, int], ...] = ()


class NodeRefused(msgspec.Struct, tag=7, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The node cannot be in this job."""

    reason: str


class ServerList(msgspec.Struct, tag=8, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where all servers are, by number."""

    servers: tuple[ServerInfo, ...]


class MembershipNews(msgspec.Struct, tag=9, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What has happened."""

    events: tuple[MembershipEvent, ...]


class BarrierDone(msgspec.Struct, tag=10, array_like=True, frozen=True, forbid_unknown_fields=True):
    """All workers have come."""

    name: str
    sequence: int


class BarrierBroken(msgspec.Struct, tag=14, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Somebody has given the barrier up: it counts as one that nobody has passed.

    Attributes:
        worker: who has.
        missing: those that had not come then.
    """

    name: str
    sequence: int
    worker: int
    missing: tuple[int, ...]


class MissingReply(msgspec.Struct, tag=11, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Who was asked for: numbers of those that have not come."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]


class SilentReply(msgspec.Struct, tag=15, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How many workers and servers are lost, or were not heard of for so long."""

    seconds: float
    num_nodes: int


NodeMessage = RegisterNode | NodeHeartbeat | LeaveJob | EnterBarrier | AbandonBarrier | MissingQuery | SilentQuery
SchedulerMessage = (
    NodeAssigned | NodeRefused | ServerList | MembershipNews | BarrierDone | BarrierBroken | MissingReply | SilentReply
)

NODE_MESSAGE_CODEC: MessageCodec[NodeMessage] = MessageCodec(NodeMessage, MAX_MESSAGE_BYTES)
SCHEDULER_MESSAGE_CODEC: MessageCodec[SchedulerMessage] = MessageCodec(SchedulerMessage, MAX_MESSAGE_BYTES)


def format_nodes(workers: tuple[int, ...], servers: tuple[int, ...]) -> str:
    """The nodes in words: ``workers 1 and 2, server 0``."""
    parts: list[str] = []
    kinds: tuple[tuple[Literal["worker", "server"], tuple[int, ...]], ...] = (("worker", workers), ("server", servers))
    for role, numbers in kinds:
        if numbers:
            words = [str(number) for number in sorted(numbers)]
            listed = " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
            parts.append(f"{role}{'s' if len(words) > 1 else ''} {listed}")
    return ", ".join(parts)
