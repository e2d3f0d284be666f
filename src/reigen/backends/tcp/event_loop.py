"""The event loop of the TCP backend: messages to and from several ranks at once, on one thread, without blocking.

An algorithm posts sends and receives and says what follows each of them; `TcpEventLoop.run` moves bytes until nothing
that was posted is left. Between two ranks messages arrive in the order in which they were sent. The loop is always
ready to receive while it sends, so ranks that send to each other cannot block each other, however large their messages
are.

Messages leave in the order in which they were posted, to at most two ranks at a time. Where all ranks begin with the
next one and go on to the one after it, every rank then receives from about two at a time, too: all at once
would fill the queue before a receiver's port, and what the network drops has to be sent again. (Four hosts, each with
100 Mbit/s and a queue of 20 ms: some 500 packets dropped a second before, 1 since. One rank at a time leaves gaps.)
A link gets its next message when the last one has left, so that the second to one rank is not ahead of the first to
another: there the first row of a sum would be complete later, and nothing can follow until it is.

Whatever goes wrong ends in one error of `reigen.backends.base`: see `backends.tcp.errors`. A host that is silent is
detected by the kernel on connections on which nothing is owed (keepalive), and by this loop on the others.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Self

from reigen.backends.base import FailureCheck, MissingRanksCallback, ProgressHook
from reigen.backends.tcp.connection import CompletionCallback, PeerConnection, TcpPeer
from reigen.backends.tcp.errors import FailureDiagnosis
from reigen.cluster.connection_pool import ConnectionPool
from reigen.cluster.membership.abort_message import has_left
from reigen.errors import AuthenticationError, CollectiveError, WireError
from reigen.net.bulk_connection import BulkConnection
from reigen.net.fork_safety import close_in_children

#: Where a message lies, or what tells when it is the message's turn to leave.
MessageBuffer = memoryview | Callable[[], memoryview]

#: How often to look around while nothing moves.
_SLICE_SECONDS = 0.1
#: How many messages a link is given at a time where there is one rank to send to, and to how many ranks messages leave.
_DEPTH, _BREADTH = 4, 2

_IN, _OUT = select.POLLIN, select.POLLOUT


class TcpEventLoop:
    """Messages between this rank and others. Ranks are numbers in the job.

    Operations follow each other, each of them within ``with loop.operation(...)``. `abort` may come from another
    thread, everything else from one thread at a time.

    The arguments are those of `TcpNetwork`.
    """

    def __init__(
        self, mesh: ConnectionPool, failure: FailureCheck, num_sockets: int = 1, hosts: Mapping[int, str] | None = None
    ) -> None:
        self.rank = mesh.rank
        self._mesh, self._failure, self._num_sockets = mesh, failure, num_sockets
        #: of these connections, so many are used
        self._num_used = num_sockets
        self._peers: dict[int, TcpPeer] = {}
        self._connections: dict[int, PeerConnection] = {}
        self._diagnosis = FailureDiagnosis(self.rank, self._peers, failure, hosts or {})
        self._poll = select.poll()
        self._untried: deque[TcpPeer] = deque()
        #: messages that no link has been given
        self._queue: deque[tuple[TcpPeer, MessageBuffer, CompletionCallback | None]] = deque()
        #: how many messages a link is given at a time; 1 where there are several ranks to send to
        self._depth = _DEPTH
        #: how many ranks messages are leaving for
        self._breadth = 0
        self._num_pending = 0
        #: bytes of messages that were given to links, ever
        self.num_sent_bytes = 0
        self._deadline = 0.0
        self._ranks_missing: MissingRanksCallback | None = None
        self._progress_hook: ProgressHook | None = None
        self._ranks: AbstractSet[int] = frozenset()
        #: held while an operation runs
        self._running = threading.Lock()
        #: why this rank has given up, or is to
        self._stop: CollectiveError | None = None
        close_in_children(self)

    # -- operations ---------------------------------------------------------------------------------------------------

    def operation(
        self,
        deadline: float,
        ranks_missing: MissingRanksCallback | None,
        progress_hook: ProgressHook | None,
        ranks: AbstractSet[int],
    ) -> TcpEventLoop:
        """Return a context in which everything that is posted belongs to one operation.

        ``ranks`` are those with which this one exchanges messages; they do the same, so that there can be connections.
        The others: see `reigen.backends.base`; ``ranks_missing`` gets numbers in the job.
        """
        self._deadline, self._ranks_missing, self._progress_hook, self._ranks = (
            deadline,
            ranks_missing,
            progress_hook,
            ranks,
        )
        return self

    def __enter__(self) -> Self:
        self._running.acquire()
        if self._stop is not None:
            self._running.release()
            raise self._stop.anew()
        for peer in self._peers.values():
            peer.is_heard = peer.is_active = peer.is_silent = False
        try:
            if self._progress_hook is not None:
                self._poll.register(self._progress_hook.descriptor, _IN)
            if not self._peers.keys() >= self._ranks:
                self._connect([rank for rank in self._ranks if rank not in self._peers])
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._progress_hook is not None:
            self._poll.unregister(self._progress_hook.descriptor)
        self._ranks_missing = self._progress_hook = None
        if error is not None and self._stop is None:
            if isinstance(error, CollectiveError):
                self._stop = error.anew()
            else:
                reason = f"rank {self.rank} gave up in the middle of a collective ({error!r})"
                self._stop = CollectiveError(reason, ranks=(self.rank,))
        if self._stop is not None:
            self._diagnosis.send_abort(self._stop)
        self._running.release()

    def use_sockets(self, num_sockets: int) -> None:
        """Between two operations, on all ranks: messages take so many of the connections in turn, from the first on."""
        self._num_used = min(num_sockets, self._num_sockets)
        for peer in self._peers.values():
            peer.use_sockets(self._num_used)

    def _connect(self, missing: Sequence[int]) -> None:
        peers = {rank: TcpPeer(rank) for rank in missing}
        self._open(peers, "data")
        near = {rank: peer for rank, peer in peers.items() if peer.connections[0].is_same_host}
        self._open(near, "back")
        for rank, peer in near.items():
            there, back = peer.connections[: self._num_sockets], peer.connections[self._num_sockets :]
            peer.ways = (there, back) if self.rank < rank else (back, there)
        for peer in peers.values():
            peer.use_sockets(self._num_used)
        self._peers.update(peers)
        if len(self._peers) > 1:
            self._depth = 1
            for connection in self._connections.values():
                connection.leave_little_unsent()

    def _open(self, peers: Mapping[int, TcpPeer], purpose: str) -> None:
        """More connections to these ranks, for both directions."""
        for number in range(self._num_sockets if peers else 0):
            try:
                streams = self._mesh.open(
                    list(peers), f"{purpose}/{number}", self._deadline, self._wait_to_connect, bulk=True
                )
            except AuthenticationError as error:
                raise CollectiveError(str(error)) from error
            for rank, stream in streams.items():
                connection = PeerConnection(peers[rank], BulkConnection(*stream.detach()))
                peers[rank].connections.append(connection)
                self._connections[connection.fd] = connection

    def send(self, rank: int, data: MessageBuffer, then: CompletionCallback | None = None) -> None:
        """Post a message. Its memory stays as it is until ``then`` is called, or `run` returns."""
        self._num_pending += 1
        self._queue.append((self._peers[rank], data, then))
        self._start_sends()

    def receive(self, rank: int, into: memoryview, then: CompletionCallback | None = None) -> None:
        """Post the place of the next message that has none; it must have exactly that length."""
        peer = self._peers[rank]
        connections = peer.incoming
        connection = connections[peer.num_expected % len(connections)]
        peer.num_expected += 1
        connection.link.post_receive(into)
        connection.receiving.append(then if len(connections) == 1 else peer.call_in_order(then))
        self._num_pending += 1
        peer.expects_more = True
        self._mark_untried(peer)

    def run(self) -> None:
        """Return when all that was posted, and what followed, has left and arrived.

        Raises:
            PeerLostError, DeadlineError, CollectiveError: as told in `reigen.backends.base`.
        """
        next_look = time.monotonic() + _SLICE_SECONDS
        while True:
            self._try_posted()
            if not self._num_pending:
                return
            now = time.monotonic()
            if self._stop is not None:
                raise self._stop.anew()
            if now >= self._deadline:
                raise self._diagnosis.of_deadline(self._pending())
            events = self._poll.poll(max(0.0, min(next_look, self._deadline) - now) * 1000)
            if events:
                self._serve(events)
            elif now >= next_look:
                self._check_peers()
                next_look = time.monotonic() + _SLICE_SECONDS

    # -- moving bytes -------------------------------------------------------------------------------------------------

    def _mark_untried(self, peer: TcpPeer) -> None:
        if not peer.has_untried:
            peer.has_untried = True
            self._untried.append(peer)

    def _try_posted(self) -> None:
        """Try what has been posted: often the kernel takes it, and has it, at once."""
        untried = self._untried
        while untried:
            peer = untried.popleft()
            peer.has_untried = False
            if peer.num_leaving:
                self._push(peer)
            if peer.expects_more:
                peer.expects_more = False
                for connection in peer.incoming:
                    if (
                        connection.receiving
                    ):  # the end of any other may only mean that its rank has done its part, and left
                        self._pull(connection)

    def _start_sends(self) -> None:
        """Give links the messages whose turn it is."""
        queue = self._queue
        while queue:
            peer, place, then = queue[0]
            connection = peer.outgoing[peer.num_given % len(peer.outgoing)]
            if len(connection.sending) >= self._depth or (not peer.num_leaving and self._breadth >= _BREADTH):
                return
            queue.popleft()
            data = place() if callable(place) else place
            connection.link.post_send(data)
            self.num_sent_bytes += data.nbytes
            connection.sending.append(then)
            peer.num_given += 1
            self._breadth += not peer.num_leaving
            peer.num_leaving += 1
            self._mark_untried(peer)

    def _serve(self, events: Sequence[tuple[int, int]]) -> None:
        for fd, event in events:
            connection = self._connections.get(fd)
            if connection is None:
                assert self._progress_hook is not None
                self._progress_hook.work()
                continue
            if event & ~_OUT:
                self._pull(connection)
            if event & _OUT:
                self._push(connection.peer)

    def _push(self, peer: TcpPeer) -> None:
        """Send to a rank what its links take."""
        for connection in peer.outgoing:
            if connection.sending:
                try:
                    completed = connection.link.advance_sends()
                except (ConnectionError, WireError, AuthenticationError) as error:
                    raise self._diagnosis.of_link(connection, error, self._pending()) from error
                if completed:
                    peer.num_leaving -= completed
                    self._breadth -= not peer.num_leaving
                self._conclude(connection, connection.sending, completed)
        self._start_sends()

    def _pull(self, connection: PeerConnection) -> None:
        """Take what has come from a link."""
        try:
            completed = connection.link.advance_receives()
        except (ConnectionError, WireError, AuthenticationError) as error:
            raise self._diagnosis.of_link(connection, error, self._pending()) from error
        if completed or connection.link.num_placed_bytes:
            connection.peer.is_heard = connection.peer.is_active = True
        self._conclude(connection, connection.receiving, completed)

    def _conclude(self, connection: PeerConnection, waiting: deque[CompletionCallback | None], completed: int) -> None:
        for _ in range(completed):
            then = waiting.popleft()
            self._num_pending -= 1
            if then is not None:
                then()
        events = (_IN if connection.receiving else 0) | (_OUT if connection.link.wants_to_send else 0)
        if events != connection.events:
            connection.events = events
            if events:
                self._poll.register(connection.fd, events)
            else:
                self._poll.unregister(connection.fd)

    # -- while nothing moves ------------------------------------------------------------------------------------------

    def _pending(self) -> list[int]:
        """Ranks from which something is to come, or to which something is to go."""
        queued = {peer.rank for peer, _, _ in self._queue}
        return [peer.rank for peer in self._peers.values() if peer.owes_data or peer.num_leaving or peer.rank in queued]

    def _check_peers(self) -> None:
        pending = self._pending()
        silent = [rank for rank in pending if not self._peers[rank].is_active]
        if self._ranks_missing is not None and silent:
            self._ranks_missing(silent)
        error = self._failure(pending)
        # A rank that is gone may have sent all before; and behind all that one sent which left, the connection ends.
        if error is not None and not has_left(error) and not self._poll.poll(0):
            raise error
        self._listen(pending)
        for rank in pending:
            peer = self._peers[rank]
            peer.is_active = False
            # Twice: where this host did not run for so long itself, its kernel takes a moment to hear of the other.
            was_silent, peer.is_silent = peer.is_silent, peer.silent_seconds >= self._mesh.peer_timeout_seconds
            if was_silent and peer.is_silent:
                raise self._diagnosis.of_silence(rank, self._mesh.peer_timeout_seconds)

    def _wait_to_connect(self, missing: Sequence[int]) -> None:
        if self._stop is not None:
            raise self._stop.anew()
        if self._ranks_missing is not None:
            self._ranks_missing(missing)
        error = self._failure(missing)
        if error is not None:
            raise error
        self._listen(())

    def _listen(self, pending: Sequence[int]) -> None:
        self._diagnosis.listen(
            [connection for connection in self._connections.values() if not connection.receiving], pending
        )

    # -- giving up ----------------------------------------------------------------------------------------------------

    def abort(self, error: CollectiveError) -> None:
        """Give up: send the error to all connected ranks, and end the operation that runs, in any thread."""
        if self._stop is None:
            self._stop = error
        if self._running.acquire(blocking=False):
            try:
                self._diagnosis.send_abort(error)
            finally:
                self._running.release()

    def close(self) -> None:
        """Close all connections. May be called twice."""
        for connection in self._connections.values():
            connection.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._connections.clear()

    def close_descriptors(self) -> None:
        """Implement `reigen.net.fork_safety`."""
        for connection in self._connections.values():
            connection.link.close()
