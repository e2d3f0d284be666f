"""What a scheduler and its workers and servers say to each other, on one connection for each of them.

The protocol, after the handshake of ``wire.auth``, one msgspec message a frame:

a. A node sends Register: what it is, its number if it knows one, where it listens. The scheduler answers Assigned, or
   Refused with the reason. What a node says is enough to know the job again: a scheduler that was started anew learns
   from the nodes that connect again who is there.
b. When all servers have come, and whenever a node registers after that, it is sent Welcome: where they all are.
c. A node sends Heartbeat every now and then. What happens to others comes as News.
d. A worker sends EnterBarrier, and BarrierDone comes when all have. After a new connection it says so again, of the
   barriers at which it waits and of the last one of every name.
e. WhoIsMissing asks whom the start, or a barrier, waits for; the answer is Missing.
f. A node that goes in good order sends Leave. A connection that ends before that: the node is lost, or it connects
   again, as it does when the scheduler has gone.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from reigen.kv.nodes import Event, Peer
from reigen.kv.nodes import Role as NodeRole
from reigen.wire.auth import Identity, Role
from reigen.wire.codec import Codec

SCHEDULER = Identity(Role.RANK, 0, "kv scheduler")

MAX_NAME_BYTES = 256
MAX_MESSAGE_BYTES = 1 << 20


class Register(msgspec.Struct, tag=1, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A node is there.

    Attributes:
        role: what it is.
        number: which one, -1 where it was not told.
        host: what people call its machine.
        address: where a server listens; empty for a worker.
        incarnation: of its process.
        num_workers: how many workers it expects to be in the job.
        num_servers: how many servers.
        is_known: it has been told its number by this job's scheduler before.
        is_recovery: as it was told then.
        left: workers that have left in good order, as far as it was told.
    """

    role: NodeRole
    number: int
    host: str
    address: str
    incarnation: int
    num_workers: int
    num_servers: int
    is_known: bool = False
    is_recovery: bool = False
    left: tuple[int, ...] = ()


class Heartbeat(msgspec.Struct, tag=2, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The process runs."""


class Leave(msgspec.Struct, tag=3, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The node goes in good order."""


class EnterBarrier(msgspec.Struct, tag=4, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A worker is at a barrier, for the ``sequence``-th time at one of this name."""

    name: str
    sequence: int


class WhoIsMissing(msgspec.Struct, tag=5, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Whom does the start wait for, or the barrier of this name?"""

    barrier: str = ""
    sequence: int = 0


class Assigned(msgspec.Struct, tag=6, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The node has its place.

    Attributes:
        number: which.
        is_recovery: it takes the place of one that was lost.
        barriers: and goes on there: how often the barriers of each name are over.
    """

    number: int
    is_recovery: bool
    barriers: tuple[tuple[str, int], ...] = ()


class Refused(msgspec.Struct, tag=7, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The node cannot be in this job."""

    reason: str


class Welcome(msgspec.Struct, tag=8, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where all servers are, by number."""

    servers: tuple[Peer, ...]


class News(msgspec.Struct, tag=9, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What has happened."""

    events: tuple[Event, ...]


class BarrierDone(msgspec.Struct, tag=10, array_like=True, frozen=True, forbid_unknown_fields=True):
    """All workers have come."""

    name: str
    sequence: int


class Missing(msgspec.Struct, tag=11, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Who was asked for: numbers of those that have not come."""

    barrier: str
    sequence: int
    workers: tuple[int, ...]
    servers: tuple[int, ...]


Call = Register | Heartbeat | Leave | EnterBarrier | WhoIsMissing
Answer = Assigned | Refused | Welcome | News | BarrierDone | Missing

CALLS: Codec[Call] = Codec(Call, MAX_MESSAGE_BYTES)
ANSWERS: Codec[Answer] = Codec(Answer, MAX_MESSAGE_BYTES)


def name_nodes(workers: tuple[int, ...], servers: tuple[int, ...]) -> str:
    """The nodes in words: ``workers 1 and 2, server 0``."""
    parts: list[str] = []
    kinds: tuple[tuple[Literal["worker", "server"], tuple[int, ...]], ...] = (("worker", workers), ("server", servers))
    for role, numbers in kinds:
        if numbers:
            words = [str(number) for number in sorted(numbers)]
            listed = " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
            parts.append(f"{role}{'s' if len(words) > 1 else ''} {listed}")
    return ", ".join(parts)
