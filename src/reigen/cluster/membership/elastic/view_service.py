"""Control service of views, hosted by the process that is their rank 0.

The members of a view meet there, and learn there of each other's ends. Where it listens is in the view. So a change of
members needs no process but theirs, and the death of the service is that of rank 0: another view follows.

A connection to the service is kept, and used in the next view that meets there. On one host it is needed no more when
the view is built; a newcomer there connects before it asks for its place (`ViewService.connect`).
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.membership.elastic.node import ElasticNode
from reigen.cluster.membership.rendezvous import PrefixRendezvous, RendezvousClient
from reigen.cluster.membership.views.record import View
from reigen.errors import AuthenticationError, CollectiveError, WireError
from reigen.net.auth import Identity, ProcessRole
from reigen.net.fork_safety import close_in_children
from reigen.net.listener import join_address

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

#: How long the service is kept for members that are still in their last step when the program is done in this process.
_LAST_SECONDS, _LOOK_SECONDS = 1.0, 0.01
#: How long a newcomer may take to connect ahead of its view: it does so then if it has not come to anything.
_AHEAD_SECONDS = 2.0
_FAILURES = (OSError, CollectiveError, AuthenticationError, WireError)


def view_service_address(view: View) -> str:
    """Return where rank 0 of a view serves its members, as ``host:port``."""
    host = view.hosts[0]
    return join_address(host.address, host.members[0].service_port)


def view_service_name(epoch: int) -> str:
    """Return the name of a view at the service: that of the rendezvous of its members."""
    return f"view {epoch}"


class _ViewRendezvous(PrefixRendezvous):
    """Rendezvous of a view's members, whose connection goes back to the service's end here."""

    def __init__(self, service: ViewService, address: str, client: RendezvousClient, epoch: int) -> None:
        super().__init__(client, view_service_name(epoch))
        self._service, self._address, self._client = service, address, client
        self._is_closed = False

    def close(self) -> None:
        """Implement `Rendezvous.close`."""
        if not self._is_closed:
            self._is_closed = True
            self._service.keep(self._address, self._client)


class ViewService:
    """Service of the views of which this process is rank 0. It is started with the first of them.

    Args:
        node: this process.
        secret: the job's 32 bytes.
        tls: encrypt everything; so must all.
    """

    def __init__(self, node: ElasticNode, secret: bytes, tls: TlsContext | None) -> None:
        self._node, self._secret, self._tls = node, secret, tls
        self._lock = threading.Lock()
        close_in_children(self)
        self._service: ControlService | None = None
        #: epochs of views that have met here
        self._served: set[int] = set()
        self._is_closed = False
        #: connection that nobody uses, and where it leads
        self._kept: tuple[str, RendezvousClient] | None = None
        #: the latest view has several hosts, whose members connect to each other when they need to
        self._has_hosts = False

    def meet(self, view: View, timeout_seconds: float) -> PrefixRendezvous:
        """Return the rendezvous of a view's members, of which this process is one; as rank 0, serve it.

        What members of earlier views have put is dropped.

        Args:
            view: the view.
            timeout_seconds: see `RendezvousClient`, which also says what is raised.
        """
        rank, address = view.ranks[self._node.me], view_service_address(view)
        if rank == 0:
            self._start()
        client = self._take(address)
        if client is None:
            client = RendezvousClient(address, self._secret, rank, timeout_seconds, self._tls)
        client.timeout_seconds = timeout_seconds  # one made ahead had less
        self._has_hosts = len(view.hosts) > 1
        try:
            if rank == 0:
                with self._lock:
                    passed = {epoch for epoch in self._served if epoch < view.epoch}
                    self._served = self._served - passed | {view.epoch}
                for epoch in sorted(passed):
                    client.forget(f"{view_service_name(epoch)}/")
        except BaseException:
            client.close()
            raise
        return _ViewRendezvous(self, address, client, view.epoch)

    def connect(self, view: View) -> None:
        """Connect to the service of a view of this host, of which this process is no member, for the next one."""
        address = view_service_address(view)
        with suppress(*_FAILURES):  # it ends, say: the next view is somewhere else
            self.keep(address, RendezvousClient(address, self._secret, view.size, _AHEAD_SECONDS, self._tls))

    def keep(self, address: str, client: RendezvousClient) -> None:
        """Keep a connection for the next view that meets at this address."""
        with self._lock:
            dropped = self._kept
            if self._is_closed:
                dropped = address, client
            else:
                self._kept = address, client
        if dropped is not None:
            dropped[1].close()

    def _take(self, address: str) -> RendezvousClient | None:
        """Return the connection that was kept, if it leads there, and has not ended."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is None:
            return None
        if kept[0] == address and kept[1].is_idle:
            return kept[1]
        kept[1].close()
        return None

    def close(self) -> None:
        """Stop serving, when the others have left, or a second later. May be called twice."""
        with self._lock:
            self._is_closed = True
            service, kept, self._kept = self._service, self._kept, None
        if kept is not None:
            kept[1].close()
        if service is None:
            return
        until = time.monotonic() + _LAST_SECONDS
        while self._has_hosts and service.num_clients and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        service.close()

    def close_descriptors(self) -> None:
        """Close the connection that is kept, in a child: `reigen.net.fork_safety`."""
        if self._kept is not None:
            self._kept[1].close()

    def _start(self) -> None:
        with self._lock:
            if self._service is not None or self._is_closed:
                return
            self._service = ControlService(
                self._secret,
                listening=self._node.serving,
                me=Identity(ProcessRole.RANK, 0),
                peer_timeout_seconds=self._node.peer_timeout_seconds,
                tls=self._tls,
            )
            self._service.start()
