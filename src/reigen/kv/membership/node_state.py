"""What a scheduler knows of a place in its job, and of the process that has it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, auto

from reigen.kv.consistency.events import LossPolicy
from reigen.kv.membership.messages import RegisterNode
from reigen.kv.membership.nodes import NodeLost, NodeRole, ServerInfo

NEVER = math.inf

#: Names a connection.
ConnectionId = Hashable


@dataclass(frozen=True)
class JobSpec:
    """What a job was started with.

    Attributes:
        num_workers: how many.
        num_servers: how many.
        policy: what becomes of the others if a worker is lost.
        servers_return: somebody starts a server again that is lost, and it has snapshots to go on from.
        heartbeat_timeout_seconds: how long a node may be silent; infinite if nodes send no heartbeats.
        return_seconds: how long others wait for a process in place of a lost server; of a lost worker, where no other
            is left; and for the nodes after a restart of the scheduler.
        start_seconds: how long, from the first node's coming, for all servers.
        deadline_seconds: and for all workers.
    """

    num_workers: int
    num_servers: int
    policy: LossPolicy = LossPolicy.ABORT
    servers_return: bool = False
    heartbeat_timeout_seconds: float = 20.0
    return_seconds: float = 30.0
    start_seconds: float = 30.0
    deadline_seconds: float = 600.0

    def count(self, role: NodeRole) -> int:
        """How many nodes of this role there are."""
        return self.num_workers if role == "worker" else self.num_servers


class NodeState(Enum):
    """What is known of a node."""

    #: has not come yet
    ABSENT = auto()
    #: connected, or may connect again
    HERE = auto()
    LOST = auto()
    LEFT = auto()


@dataclass
class NodeEntry:
    """A place in the job, and the process that has it.

    Attributes:
        owner: its connection, None where there is none.
        heard_at: when something was heard of it last.
        until: when something follows from its silence, whatever state it is in.
        loss: what was told of it, in state LOST.
        lost_at: since when it is.
        claimant: another process that has come for the place.
    """

    role: NodeRole
    number: int
    state: NodeState = NodeState.ABSENT
    owner: ConnectionId | None = None
    host: str = ""
    address: str = ""
    incarnation: int = 0
    is_recovery: bool = False
    heard_at: float = -NEVER
    until: float = NEVER
    loss: NodeLost | None = None
    lost_at: float = 0.0
    replacement: tuple[ConnectionId, RegisterNode] | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.role} {self.number}"

    @property
    def peer(self) -> ServerInfo:
        """A server as workers need to know it."""
        return ServerInfo(self.number, self.address, self.incarnation, self.host)
