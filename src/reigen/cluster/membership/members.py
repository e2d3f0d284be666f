"""Members of a job, and the policies in which their roles differ."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from reigen.cluster.membership.messages import (
    MemberLeft,
    MemberLost,
    MemberReturned,
    MemberRole,
    RegisterMember,
)

NEVER = math.inf

#: Names a connection.
ConnectionId = Hashable


class LossPolicy(Enum):
    """Consequence of a member's loss for the others; for workers the words of REIGEN_KV_ON_WORKER_LOSS."""

    #: they cannot go on, and it cannot come back
    ABORT = "abort"
    #: they go on without it
    CONTINUE = "continue"
    #: they wait for it, or for another process in its place
    WAIT = "wait"
    #: they go on without it, and other processes may join, in its place or in a free one; it does not come back itself
    ELASTIC = "elastic"


@dataclass(frozen=True)
class RolePolicy:
    """Policy for the members of one role. Times are in seconds.

    Attributes:
        count: how many there are.
        on_loss: what becomes of the others if one is lost.
        return_seconds: how long a lost one is awaited, under WAIT.
        start_seconds: how long, from the first member's coming, for one that has not come.
        reconnect_seconds: how long one may take to connect again; 0: the end of its connection is its own.
        heartbeat_timeout_seconds: how long it may say nothing; infinite if it sends no heartbeats.
        hold_seconds: how long a loss is held for others at the same time, so that they are told together.
        leaves_together: departures are announced together, and not to members that have left themselves.
    """

    count: int
    on_loss: LossPolicy = LossPolicy.ABORT
    return_seconds: float = NEVER
    start_seconds: float = NEVER
    reconnect_seconds: float = 0.0
    heartbeat_timeout_seconds: float = NEVER
    hold_seconds: float = 0.0
    leaves_together: bool = False


@dataclass(frozen=True)
class JobSpec:
    """Roles of a job, and their policies.

    Attributes:
        roles: its members.
        return_seconds: how long others wait, once all workers have left or are lost, for a process in place of a lost
            one; and for all members after a restart of the service.
        first_workers: with so many an elastic job begins.
    """

    roles: Mapping[MemberRole, RolePolicy]
    return_seconds: float = 30.0
    first_workers: int = 1

    @property
    def is_elastic(self) -> bool:
        """Return whether workers come and go."""
        return self.has_places("worker")

    def has_places(self, role: MemberRole) -> bool:
        """Return whether the numbers of a role are places that processes take and leave."""
        return role in self.roles and self.roles[role].on_loss is LossPolicy.ELASTIC

    @property
    def restart_reconnect_seconds(self) -> float:
        """Return how long an elastic job's workers may take to connect to a service that was started anew."""
        return min(self.roles["worker"].heartbeat_timeout_seconds, self.return_seconds)

    @property
    def counts(self) -> dict[MemberRole, int]:
        """Return how many members there are of each role."""
        return {role: policy.count for role, policy in self.roles.items()}


#: How long the death of a rank, or its giving up, is held for what went wrong at the same time.
RANK_HOLD_SECONDS = 0.25
#: How long a worker or a server may take to connect again.
RECONNECT_GRACE_SECONDS = 1.0


def rank_job(size: int) -> JobSpec:
    """Specify a job of ranks: each has one connection, whose end is its own, and does not come back."""
    policy = RolePolicy(size, hold_seconds=RANK_HOLD_SECONDS, leaves_together=True)
    return JobSpec(MappingProxyType({"rank": policy}))


def parameter_server_job(
    num_workers: int,
    num_servers: int,
    *,
    policy: LossPolicy = LossPolicy.ABORT,
    servers_return: bool = False,
    heartbeat_timeout_seconds: float = 20.0,
    return_seconds: float = 30.0,
    start_seconds: float = 30.0,
    deadline_seconds: float = 600.0,
    first_workers: int = 1,
) -> JobSpec:
    """Specify a job of workers, under a policy for their losses, and servers, which return where they have snapshots.

    Times are of `RolePolicy`; ``start_seconds`` and ``return_seconds`` of servers, ``deadline_seconds`` of workers.
    """
    workers = RolePolicy(
        num_workers,
        policy,
        start_seconds=NEVER if policy is LossPolicy.ELASTIC else deadline_seconds,
        reconnect_seconds=RECONNECT_GRACE_SECONDS,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
    )
    servers = RolePolicy(
        num_servers,
        LossPolicy.WAIT if servers_return else LossPolicy.ABORT,
        min(return_seconds, start_seconds) if policy is LossPolicy.ELASTIC else return_seconds,
        start_seconds,
        RECONNECT_GRACE_SECONDS,
        heartbeat_timeout_seconds,
    )
    return JobSpec(MappingProxyType({"worker": workers, "server": servers}), return_seconds, first_workers)


class MemberState(Enum):
    """State of a member."""

    #: has not come yet
    ABSENT = auto()
    #: connected, or may connect again
    PRESENT = auto()
    LOST = auto()
    LEFT = auto()
    #: has said that it cannot go on: its end is no loss
    ABORTED = auto()


@dataclass(slots=True)
class Member:
    """Place in the job, and the process that has it.

    Attributes:
        owner: its connection, None where there is none.
        heard_at: when something was heard of it last.
        until: when something follows from its silence, whatever state it is in.
        loss: what others hear of it, in state LOST.
        lost_at: since when it is.
        replacement: another process that has come for the place.
        is_missed: it has not come to this service yet, and others believe that it is lost.
        joined: in an elastic job, the how-manieth process it was that has joined.
        slot: the launcher's number for its place, and how often that was used before.
        has_died: the launcher says that its process has ended: it does not connect again.
        moves: a server has said that it goes to another process.
    """

    role: MemberRole
    number: int
    policy: RolePolicy
    state: MemberState = MemberState.ABSENT
    owner: ConnectionId | None = None
    host: str = ""
    host_id: str = ""
    address: str = ""
    incarnation: int = 0
    is_recovery: bool = False
    heard_at: float = -NEVER
    until: float = NEVER
    loss: MemberLost | None = None
    lost_at: float = 0.0
    replacement: tuple[ConnectionId, RegisterMember] | None = None
    is_missed: bool = False
    joined: int = 0
    slot: tuple[int, int] | None = None
    has_died: bool = False
    moves: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.role} {self.number}"

    @property
    def left_event(self) -> MemberLeft:
        """Make the event of its departure."""
        is_elastic = self.policy.on_loss is LossPolicy.ELASTIC
        return MemberLeft(self.role, self.number, self.host, self.incarnation if is_elastic else 0)

    @property
    def return_event(self) -> MemberReturned:
        """Make the event of its return."""
        is_new = self.policy.on_loss is LossPolicy.ELASTIC
        return MemberReturned(self.role, self.number, self.host, self.incarnation, self.address, is_new)

    @property
    def loss_reason(self) -> str:
        """Return how its loss was noticed."""
        return "" if self.loss is None else self.loss.reason

    @property
    def is_final(self) -> bool:
        """Return whether it is lost, and its place stays empty."""
        if self.loss is None or self.policy.on_loss in {LossPolicy.CONTINUE, LossPolicy.ELASTIC}:
            return False
        return not self.loss.will_return

    @property
    def is_excluded(self) -> bool:
        """Return whether the process that had the place may not go on, even if it lives."""
        return self.is_final or (self.loss is not None and self.policy.on_loss is LossPolicy.ELASTIC)

    @property
    def is_needed(self) -> bool:
        """Return whether others cannot go on without it now."""
        if self.policy.on_loss is LossPolicy.ELASTIC:
            return self.state is MemberState.PRESENT
        is_optional = self.state is MemberState.LOST and self.policy.on_loss is LossPolicy.CONTINUE
        return self.state is not MemberState.LEFT and not is_optional
