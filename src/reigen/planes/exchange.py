"""The event loop of the TCP plane: messages to and from several ranks at once, on one thread, without blocking.

An algorithm posts sends and receives and says what follows each of them; `Exchange.run` moves bytes until nothing that
was posted is left. Between two ranks messages arrive in the order in which they were sent. The loop is always ready to
receive while it sends, so ranks that send to each other cannot block each other, however large their messages are.

Whatever goes wrong ends in one error of `reigen.planes.base`:

a. A connection ends: its rank has died. Who knows more about it (``failure``) is asked first, for a moment.
b. A rank gives up: it says why on all its connections.
c. The deadline passes: late are those who have not been heard of since the operation began, or, where all have, those
   who owe something. A rank that is blamed although it waits itself says so, and for whom, on its connections.
d. A machine is silent: the kernel ends connections on which nothing is owed (keepalive), this loop looks at the others.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Self

import msgspec

from reigen.cluster.fates import named
from reigen.cluster.forks import not_in_children
from reigen.cluster.mesh import Mesh
from reigen.cluster.told import Abort, has_left, listed, raised, told
from reigen.errors import AuthenticationError, CollectiveError, DeadlineError, PeerLostError, WireError
from reigen.planes.base import Lacking, Meanwhile
from reigen.wire.link import Link, LinkAborted
from reigen.wire.sockets import silent_seconds

#: What follows when a message has left or arrived.
Then = Callable[[], None]
#: Where a message lies, or what tells when it is the message's turn to leave.
Place = memoryview | Callable[[], memoryview]
#: Why what waits for these ranks of the job will never succeed, or None while it may.
Failure = Callable[[Sequence[int]], CollectiveError | None]

#: How often to look around while nothing moves.
_SLICE_SECONDS = 0.1
#: For how long to ask why a connection has ended, and whether who is late waits for somebody else.
_REASON_SECONDS, _EXCUSE_SECONDS = 0.7, 0.3
_PAUSE_SECONDS = 0.02
#: How many messages a link is given at a time.
_DEPTH = 4
#: Of an error that is told, so that it fits: at most four bytes a character, five a rank.
_MAX_CHARACTERS, _MAX_RANKS = 180, 40

_IN, _OUT = select.POLLIN, select.POLLOUT


class _Lane:
    """One link to a rank.

    Attributes:
        sending, receiving: what follows the messages that the link has been given, in their order.
        events: what the poll object is told to look for.
    """

    __slots__ = ("events", "fd", "link", "peer", "receiving", "sending")

    def __init__(self, peer: _Peer, link: Link) -> None:
        self.peer, self.link = peer, link
        self.fd = link.fileno()
        self.sending: deque[Then | None] = deque()
        self.receiving: deque[Then | None] = deque()
        self.events = 0

    @property
    def silent_seconds(self) -> float:
        """See `reigen.wire.sockets.silent_seconds`."""
        connection = socket.socket(fileno=self.fd)
        try:
            return silent_seconds(connection)
        finally:
            connection.detach()


@dataclass(slots=True)
class _Arrival:
    """A message that is expected from a rank with several links."""

    then: Then | None
    is_here: bool = False


class _Peer:
    """A rank and the links to it, which messages take in turn.

    Attributes:
        queue: messages that have not been given to a link.
        is_hot: something was posted and has not been tried.
        is_heard: something has come since the operation began.
        is_stirring: something has come since the last look around.
    """

    __slots__ = ("_arriving", "is_heard", "is_hot", "is_stirring", "lanes", "num_received", "num_sent", "queue", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lanes: list[_Lane] = []
        self.queue: deque[tuple[Place, Then | None]] = deque()
        self.num_sent = self.num_received = 0
        self.is_hot = self.is_heard = self.is_stirring = False
        self._arriving: deque[_Arrival] = deque()

    def in_order(self, then: Then | None) -> Then:
        """Have ``then`` called when its message and all posted before it are there, though they take several links."""
        arrival = _Arrival(then)
        self._arriving.append(arrival)

        def arrived() -> None:
            arrival.is_here = True
            while self._arriving and self._arriving[0].is_here:
                next_one = self._arriving.popleft().then
                if next_one is not None:
                    next_one()

        return arrived

    @property
    def owes(self) -> bool:
        """Whether something is expected from it."""
        return any(lane.receiving for lane in self.lanes)

    @property
    def is_pending(self) -> bool:
        """Whether something is to come from it or to go to it."""
        return bool(self.queue) or any(lane.receiving or lane.sending for lane in self.lanes)


class Exchange:
    """Messages between this rank and others. Ranks are numbers in the job.

    Operations follow each other, each of them within ``with exchange.operation(...)``. `abort` may come from another
    thread, everything else from one thread at a time.

    Args:
        mesh: where connections come from.
        failure: what the job knows of ranks that others wait for.
        num_sockets: how many connections to make to each rank.
        hosts: of every rank, for messages.
    """

    def __init__(
        self, mesh: Mesh, failure: Failure, num_sockets: int = 1, hosts: Mapping[int, str] | None = None
    ) -> None:
        self.rank = mesh.rank
        self._hosts = hosts or {}
        self._mesh, self._failure, self._num_sockets = mesh, failure, num_sockets
        self._peers: dict[int, _Peer] = {}
        self._lanes: dict[int, _Lane] = {}
        self._poll = select.poll()
        self._hot: deque[_Peer] = deque()
        self._num_pending = 0
        self._deadline = 0.0
        self._lacking: Lacking | None = None
        self._meanwhile: Meanwhile | None = None
        self._ranks: AbstractSet[int] = frozenset()
        #: held while an operation runs
        self._running = threading.Lock()
        #: why this rank has given up, or is to
        self._stop: CollectiveError | None = None
        self._has_told = False
        not_in_children(self)

    # -- operations ---------------------------------------------------------------------------------------------------

    def operation(
        self, deadline: float, lacking: Lacking | None, meanwhile: Meanwhile | None, ranks: AbstractSet[int]
    ) -> Exchange:
        """To be used in a ``with`` statement: what is posted there is of one operation.

        Args:
            deadline: until when it must be over.
            lacking: see `reigen.planes.base`; gets numbers in the job.
            meanwhile: see `reigen.planes.base`.
            ranks: whom this rank exchanges messages with; they do the same, so that there can be connections.
        """
        self._deadline, self._lacking, self._meanwhile, self._ranks = deadline, lacking, meanwhile, ranks
        return self

    def __enter__(self) -> Self:
        self._running.acquire()
        if self._stop is not None:
            self._running.release()
            raise self._stop
        for peer in self._peers.values():
            peer.is_heard = peer.is_stirring = False
        try:
            if self._meanwhile is not None:
                self._poll.register(self._meanwhile.descriptor, _IN)
            if not self._peers.keys() >= self._ranks:
                self._connect([rank for rank in self._ranks if rank not in self._peers])
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._meanwhile is not None:
            self._poll.unregister(self._meanwhile.descriptor)
        if error is not None and self._stop is None:
            reason = f"rank {self.rank} gave up in the middle of a collective ({error!r})"
            self._stop = error if isinstance(error, CollectiveError) else CollectiveError(reason, ranks=(self.rank,))
        if self._stop is not None:
            self._tell(self._stop)
        self._running.release()

    def _connect(self, missing: Sequence[int]) -> None:
        peers = {rank: _Peer(rank) for rank in missing}
        for number in range(self._num_sockets):
            try:
                streams = self._mesh.open(missing, f"data/{number}", self._deadline, self._wait_for, bulk=True)
            except AuthenticationError as error:
                raise CollectiveError(str(error)) from error
            for rank, stream in streams.items():
                lane = _Lane(peers[rank], Link(*stream.detach()))
                peers[rank].lanes.append(lane)
                self._lanes[lane.fd] = lane
        self._peers.update(peers)

    def send(self, rank: int, data: Place, then: Then | None = None) -> None:
        """Post a message. Its memory stays as it is until ``then`` is called, or `run` returns."""
        peer = self._peers[rank]
        peer.queue.append((data, then))
        self._num_pending += 1
        if not peer.is_hot:
            peer.is_hot = True
            self._hot.append(peer)

    def receive(self, rank: int, into: memoryview, then: Then | None = None) -> None:
        """Post the place of the next message that has none; it must have exactly that length."""
        peer = self._peers[rank]
        lanes = peer.lanes
        lane = lanes[peer.num_received % len(lanes)]
        peer.num_received += 1
        lane.link.post_receive(into)
        lane.receiving.append(then if len(lanes) == 1 else peer.in_order(then))
        self._num_pending += 1
        if not peer.is_hot:
            peer.is_hot = True
            self._hot.append(peer)

    def run(self) -> None:
        """Return when all that was posted, and what followed, has left and arrived.

        Raises:
            PeerLostError, DeadlineError, CollectiveError: as told in `reigen.planes.base`.
        """
        next_look = time.monotonic() + _SLICE_SECONDS
        while True:
            self._try_hot()
            if not self._num_pending:
                return
            now = time.monotonic()
            if self._stop is not None:
                raise self._stop
            if now >= self._deadline:
                raise self._too_late()
            events = self._poll.poll(max(0.0, min(next_look, self._deadline) - now) * 1000)
            if events:
                self._serve(events)
            elif now >= next_look:
                self._look_around()
                next_look = time.monotonic() + _SLICE_SECONDS

    # -- moving bytes -------------------------------------------------------------------------------------------------

    def _try_hot(self) -> None:
        hot = self._hot
        while hot:
            peer = hot.popleft()
            peer.is_hot = False
            if peer.queue:
                self._push(peer)
            for lane in peer.lanes:
                if lane.receiving:
                    self._pull(lane)

    def _serve(self, events: Sequence[tuple[int, int]]) -> None:
        for fd, event in events:
            lane = self._lanes.get(fd)
            if lane is None:
                assert self._meanwhile is not None
                self._meanwhile.work()
                continue
            if event & ~_OUT:
                self._pull(lane)
            if event & _OUT:
                self._push(lane.peer)

    def _push(self, peer: _Peer) -> None:
        """Send to a rank what its links take."""
        num_left = 1
        while num_left:
            self._fill(peer)
            num_left = 0
            for lane in peer.lanes:
                if lane.sending:
                    try:
                        completed = lane.link.advance_sends()
                    except (ConnectionError, WireError) as error:
                        raise self._broken(peer, error) from error
                    self._conclude(lane, lane.sending, completed)
                    if peer.queue:
                        num_left += completed

    def _fill(self, peer: _Peer) -> None:
        """Give links the messages whose turn it is."""
        queue, lanes = peer.queue, peer.lanes
        while queue:
            lane = lanes[peer.num_sent % len(lanes)]
            if len(lane.sending) >= _DEPTH:
                return
            place, then = queue.popleft()
            lane.link.post_send(place() if callable(place) else place)
            lane.sending.append(then)
            peer.num_sent += 1

    def _pull(self, lane: _Lane) -> None:
        """Take what has come from a link."""
        try:
            completed = lane.link.advance_receives()
        except (ConnectionError, WireError, AuthenticationError) as error:
            raise self._broken(lane.peer, error) from error
        if completed or lane.link.num_received_bytes:
            lane.peer.is_heard = lane.peer.is_stirring = True
        self._conclude(lane, lane.receiving, completed)

    def _conclude(self, lane: _Lane, waiting: deque[Then | None], completed: int) -> None:
        for _ in range(completed):
            then = waiting.popleft()
            self._num_pending -= 1
            if then is not None:
                then()
        events = (_IN if lane.receiving else 0) | (_OUT if lane.link.wants_to_send else 0)
        if events != lane.events:
            lane.events = events
            if events:
                self._poll.register(lane.fd, events)
            else:
                self._poll.unregister(lane.fd)

    # -- while nothing moves ------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        pending = [peer for peer in self._peers.values() if peer.is_pending]
        self._wait_for([peer.rank for peer in pending if not peer.is_stirring], [peer.rank for peer in pending])
        for peer in pending:
            peer.is_stirring = False
            for lane in peer.lanes:
                if lane.silent_seconds >= self._mesh.peer_timeout_seconds:
                    raise PeerLostError(
                        f"rank {self._named(self.rank)} has heard nothing of the machine of rank "
                        f"{self._named(peer.rank)} for {self._mesh.peer_timeout_seconds:g} s (REIGEN_PEER_TIMEOUT): it "
                        "crashed, or the network between the two is cut",
                        ranks=[peer.rank],
                    )

    def _wait_for(self, silent: Sequence[int], pending: Sequence[int] | None = None) -> None:
        """Nothing comes from these ranks; raises if nothing will."""
        if self._lacking is not None and silent:
            self._lacking(silent)
        error = self._failure(silent if pending is None else pending)
        # Who is gone may have sent all before; and behind all that somebody sent who left, the connection ends.
        if error is not None and not has_left(error) and not self._poll.poll(0):
            raise error
        for lane in self._lanes.values():
            if not lane.receiving:  # nobody would see that its rank gives up
                self._listen(lane)

    def _listen(self, lane: _Lane) -> None:
        """See whether a rank gives up from which nothing is expected, or not any more. That it has gone is no error."""
        try:
            lane.link.advance_receives()
        except LinkAborted as error:
            raise self._told_by(lane.peer, error) from error
        except ConnectionError:
            pass
        except (WireError, AuthenticationError) as error:
            raise self._broken(lane.peer, error) from error

    def _broken(self, peer: _Peer, error: Exception) -> CollectiveError:
        """What the end of a link means."""
        if isinstance(error, LinkAborted):
            return self._told_by(peer, error)
        if isinstance(error, WireError | AuthenticationError):
            return CollectiveError(
                f"rank {peer.rank} and this one do not understand each other: {error}", ranks=[peer.rank]
            )
        until = time.monotonic() + _REASON_SECONDS
        needed = sorted({peer.rank, *(other.rank for other in self._peers.values() if other.is_pending)})
        while time.monotonic() < until:
            known = self._failure(needed)
            if known is not None:
                return known
            time.sleep(_PAUSE_SECONDS)
        return PeerLostError(
            f"rank {self._named(peer.rank)} died, or was cut off, in the middle of a collective ({error})",
            ranks=[peer.rank],
        )

    def _named(self, rank: int) -> str:
        return named([rank], self._hosts)

    def _told_by(self, peer: _Peer, aborted: LinkAborted) -> CollectiveError:
        try:
            return raised(msgspec.msgpack.decode(aborted.reason, type=Abort), f"rank {peer.rank}")
        except (msgspec.DecodeError, UnicodeDecodeError):
            return CollectiveError(f"rank {peer.rank} gave up", ranks=[peer.rank])

    # -- giving up ----------------------------------------------------------------------------------------------------

    def abort(self, error: CollectiveError) -> None:
        """Give up: tell all ranks that there is a connection to, and end the operation that runs, in any thread."""
        if self._stop is None:
            self._stop = error
        if self._running.acquire(blocking=False):
            try:
                self._tell(error)
            finally:
                self._running.release()

    def close(self) -> None:
        """Close all connections. May be called twice."""
        self.close_descriptors()
        self._peers.clear()
        self._lanes.clear()

    def close_descriptors(self) -> None:
        """See `reigen.cluster.forks`."""
        for lane in self._lanes.values():
            lane.link.close()

    def _tell(self, error: CollectiveError) -> None:
        if self._has_told:
            return
        self._has_told = True
        full = told(error, self.rank)
        reason = msgspec.structs.replace(full, reason=full.reason[:_MAX_CHARACTERS], ranks=full.ranks[:_MAX_RANKS])
        for lane in self._lanes.values():
            lane.link.abort(msgspec.msgpack.encode(reason))

    def _too_late(self) -> CollectiveError:
        """The deadline has passed: say so, and find out who is to blame."""
        pending = [peer for peer in self._peers.values() if peer.is_pending]
        late = (
            {peer.rank for peer in pending if not peer.is_heard}
            or {peer.rank for peer in pending if peer.owes}
            or {peer.rank for peer in pending}
        )
        self._stop = _lateness(late)
        self._tell(self._stop)
        excused: set[int] = set()
        until = time.monotonic() + _EXCUSE_SECONDS
        while late - excused and time.monotonic() < until:
            for lane in [lane for lane in self._lanes.values() if lane.peer.rank in late - excused]:
                try:
                    self._listen(lane)
                except DeadlineError as excuse:
                    others = set(excuse.ranks) - {self.rank}
                    if others:
                        excused.add(lane.peer.rank)
                        late |= others
                except CollectiveError as reason:
                    return reason
            time.sleep(_PAUSE_SECONDS)
        return _lateness(late - excused or late)


def _lateness(ranks: Iterable[int]) -> DeadlineError:
    late = sorted(ranks)
    return DeadlineError(f"rank(s) {listed(late)} did not take their part in time (REIGEN_DEADLINE)", ranks=late)
