"""The nodes of a job with parameter servers: who they are, what happens to them, and what one of them hears of it.

A job has one scheduler, which knows who is there and carries no data, servers, and workers. Workers connect to the
servers; servers do not connect to each other, nor workers. `JobMembership` is how a worker or a server sees all that;
`kv.membership.scheduler_client` is the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from reigen.errors import CollectiveError, DeadlineError, PeerLostError

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

NodeRole = Literal["worker", "server"]


class ServerInfo(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A server, as workers need to know it.

    Attributes:
        number: from 0.
        address: where it listens for workers, ``host:port`` (``[host]:port`` for IPv6).
        incarnation: another one for each process that was this server.
        host: what people call its machine.
    """

    number: int
    address: str
    incarnation: int
    host: str


class NodeLost(msgspec.Struct, tag="lost", array_like=True, frozen=True, forbid_unknown_fields=True):
    """A worker or a server is gone, and did not say so before.

    Attributes:
        reason: how that was noticed, for people: "its process ended", "nothing was heard of it for 20 s".
        will_return: somebody is expected to take its place: the wait is for that.
        incarnation: of the process that is gone, 0 where it is not known: another one may be there already.
    """

    role: NodeRole
    number: int
    host: str
    reason: str
    will_return: bool = False
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.number} on host {self.host} is lost: {self.reason}"


class NodeLeft(msgspec.Struct, tag="left", array_like=True, frozen=True, forbid_unknown_fields=True):
    """A worker or a server has gone in good order. It is not waited for any more."""

    role: NodeRole
    number: int
    host: str

    def __str__(self) -> str:
        return f"{self.role} {self.number} on host {self.host} has left in good order"


class NodeReturned(msgspec.Struct, tag="returned", array_like=True, frozen=True, forbid_unknown_fields=True):
    """A worker that was lost is there again, or another process in its place.

    Attributes:
        incarnation: as before: the process that was silent; another one: a replacement.
    """

    role: NodeRole
    number: int
    host: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.role} {self.number} is there again, on host {self.host}"


class ServerMoved(msgspec.Struct, tag="moved", array_like=True, frozen=True, forbid_unknown_fields=True):
    """A server that was lost has been started again, and is to be found there from now on."""

    server: ServerInfo

    def __str__(self) -> str:
        return f"server {self.server.number} is there again, on host {self.server.host} at {self.server.address}"


class JobEnded(msgspec.Struct, tag="stop", array_like=True, frozen=True, forbid_unknown_fields=True):
    """The job is over; nothing more will be heard.

    Attributes:
        exit_code: 0: all workers have left in good order; WORKERS_LOST_EXIT_CODE: it ends since some are lost.
        reason: why, for people.
        is_late: it never began as it should: somebody did not come.
        workers: and these of them are workers.
    """

    exit_code: int
    reason: str
    is_late: bool = False
    workers: tuple[int, ...] = ()

    def error(self) -> CollectiveError:
        """What a process of the job is told that wants to go on."""
        kind = DeadlineError if self.is_late else PeerLostError
        return kind(f"the job is over: {self.reason}", ranks=self.workers)

    def __str__(self) -> str:
        return f"the job is over: {self.reason}"


MembershipEvent = NodeLost | NodeLeft | NodeReturned | ServerMoved | JobEnded


class JobMembership(Protocol):
    """A worker's or a server's place in its job. Any thread may use it.

    Attributes:
        role: ``worker`` or ``server``.
        num_workers: how many workers the job was started with.
        num_servers: how many servers.
        incarnation: of this process, never 0.
        secret: the job's 32 bytes.
        tls: encrypt all connections; None: do not.
        host: what people call this machine.
    """

    role: NodeRole
    num_workers: int
    num_servers: int
    incarnation: int
    secret: bytes
    tls: TlsContext | None
    host: str

    @property
    def number(self) -> int:
        """Which one: a worker's rank, a server's number."""

    @property
    def job(self) -> int:
        """The job's number, not 0: the same for all schedulers that it has."""

    @property
    def is_recovery(self) -> bool:
        """Whether this process takes the place of one that was lost."""

    def servers(self, deadline: float) -> Sequence[ServerInfo]:
        """All servers by number, as they are to be found now; waits until all have come for the first time.

        Args:
            deadline: on the clock of ``time.monotonic()``.

        Raises:
            DeadlineError: not all came; names them.
            PeerLostError: the job is over, or the scheduler has gone.
        """

    def barrier(self, name: str, deadline: float) -> None:
        """Wait until every worker that is still in the job has entered the barrier of this name as often as this one.

        It ends alike for all: where one of them does not want to wait any more, nobody passes.

        Raises:
            DeadlineError: not all came by this worker's deadline, or another's; ``ranks`` are those. Or the scheduler
                does not answer: only then others may have passed.
            PeerLostError: a worker was lost (and the policy is not to go on without it), or the job is over.
        """

    def events(self) -> list[MembershipEvent]:
        """What has happened since the last call. Does not wait."""

    def fileno(self) -> int:
        """A descriptor that is readable while `events` has something to tell."""

    def num_dead_nodes(self, timeout: float) -> int:
        """How many workers and servers are lost now, or were not heard of for ``timeout`` seconds.

        Where the scheduler does not answer: those of whose loss was heard.
        """

    def leave(self) -> None:
        """Tell the others that this node goes in good order. The connection stays until `close`. Repeatable."""

    def close(self) -> None:
        """End the connection: whoever has not said `leave` is lost for the others. Repeatable."""
