"""Interface of a worker's or a server's place in its job; `kv.membership.scheduler_client` is the real one.

A job has one scheduler, which knows who is there and carries no data, servers, and workers. Workers connect to the
servers; servers do not connect to each other, nor workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from reigen.cluster.membership.messages import MemberRole, MembershipEvent, ServerInfo

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext


class JobMembership(Protocol):
    """Membership of a worker or a server in its job. Any thread may use it.

    Attributes:
        role: ``worker`` or ``server``.
        number: which one: a worker's rank, a server's number.
        job: its number, not 0: the same for all schedulers that it has.
        is_recovery: this process takes the place of one that was lost.
        num_workers: how many workers the job was started with.
        num_servers: how many servers.
        incarnation: of this process, never 0.
        secret: the job's 32 bytes.
        tls: encrypt all connections; None: do not.
        host: what people call this machine.
    """

    role: MemberRole
    number: int
    job: int
    is_recovery: bool
    num_workers: int
    num_servers: int
    incarnation: int
    secret: bytes
    tls: TlsContext | None
    host: str

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
        """Return the events since the last call. Does not wait."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are `events`."""

    def num_dead_nodes(self, timeout: float) -> int:
        """Count workers and servers that are lost now, or were not heard of for ``timeout`` seconds.

        Where the scheduler does not answer: those of whose loss was heard.
        """

    def leave(self) -> None:
        """Tell the others that this node goes in good order. The connection stays until `close`. Repeatable."""

    def close(self) -> None:
        """End the connection: without `leave` before it, this node is lost for the others. Repeatable."""
