"""A process of an elastic job: who it is, where it listens, and its host's voter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reigen.cluster.local_peers import process_namespace_id
from reigen.cluster.membership.elastic.messages import MAX_LINK_FRAME_BYTES, LinkHello
from reigen.cluster.membership.elastic.process_identity import LocalProcess
from reigen.cluster.membership.elastic.voter_memory import VoterMemory
from reigen.cluster.membership.elastic.witness import WitnessVoter
from reigen.cluster.membership.views.record import MemberId, ViewHost, ViewMember
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import ConnectionOptions
from reigen.net.fork_safety import close_in_children
from reigen.net.listener import open_listening_socket

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

#: Begins the purpose of links between members; the incarnation follows.
_PURPOSE = "views "


class ElasticNode:
    """A process of an elastic job, with its socket and voter. It belongs to one `ViewDriver`, which closes it.

    Args:
        me: its place in the job, and how often that was filled before (REIGEN_SLOT, REIGEN_INCARNATION).
        host: name of its host in views: the same for all processes that have one voter, and for no others.
        address: of one interface of this host, at which the others reach it.
        secret: the job's 32 bytes.
        voter_fd: memory of the host's voter (REIGEN_VOTER_FD); stays the caller's, who may close it.
        tls: encrypt everything; so must all.
        peer_timeout_seconds: after so much silence a host counts as lost.
        failure_domain: see `ViewHost`.
        witness: a voter on no host; None: there is none.

    Attributes:
        me, host, address, peer_timeout_seconds, witness: as above.
        port: where it listens; connections queue there from now on.
        serving: socket at which it serves views of which it is rank 0; the same is true of it.
        voter: the host's.

    Raises:
        ConfigError: ``address`` is not this host's, or ``voter_fd`` no voter's memory.
        OSError: no port is free.
    """

    def __init__(
        self,
        me: MemberId,
        host: str,
        address: str,
        secret: bytes,
        voter_fd: int,
        *,
        tls: TlsContext | None = None,
        peer_timeout_seconds: float = 20.0,
        failure_domain: str = "",
        witness: WitnessVoter | None = None,
    ) -> None:
        self.me, self.host, self.address = me, host, address
        self.peer_timeout_seconds, self._failure_domain = peer_timeout_seconds, failure_domain
        self._secret, self._tls, self.witness = secret, tls, witness
        self.namespace = process_namespace_id()
        self._process = LocalProcess.current()
        self.voter = VoterMemory(voter_fd, host)
        try:
            self.listening, self.listens_at = open_listening_socket(address)
        except BaseException:
            self.voter.close()
            raise
        try:
            self.serving = open_listening_socket(address)[0]
        except BaseException:
            self.voter.close()
            self.listening.close()
            raise
        self.port: int = self.listening.getsockname()[1]
        close_in_children(self)

    def card(self) -> ViewHost:
        """Return the host with this process alone."""
        member = ViewMember(*self.me, 1, self.port, self.serving.getsockname()[1])
        return ViewHost(*self.voter.id, self.address, (member,), self._failure_domain)

    def hello(self, *, is_finished: bool) -> LinkHello:
        """Return the first message on a link."""
        pid, started = self._process.pid, self._process.started
        return LinkHello(self.listens_at, pid, started, self.namespace, is_finished)

    def connection_options(self) -> ConnectionOptions:
        """Return this end's side of links."""
        me = Identity(ProcessRole.RANK, self.me.slot, f"{_PURPOSE}{self.me.incarnation}")
        return ConnectionOptions(self._secret, me, MAX_LINK_FRAME_BYTES, self._tls, self.peer_timeout_seconds)

    def close(self) -> None:
        """Stop listening, and give up the voter. May be called twice."""
        self.close_descriptors()
        self.voter.close()

    def close_descriptors(self) -> None:
        """Close the sockets only; see `reigen.net.fork_safety`."""
        self.listening.close()
        self.serving.close()


def identify_member(peer: Identity) -> MemberId | None:
    """Return which member is at the other end of a connection; None: it is made for something else."""
    incarnation = peer.purpose.removeprefix(_PURPOSE)
    if peer.role is not ProcessRole.RANK or incarnation == peer.purpose or not incarnation.isdecimal():
        return None
    return MemberId(peer.rank, int(incarnation))
