"""What a worker of a distributed store does: its requests to all servers, waiting, and what happens meanwhile.

Who works here: a caller that waits drives the connections itself, so that a blocking call changes threads not once.
While nobody waits and something is pending, a thread of the store drives them. It leaves at once when a caller comes,
and comes back when there have been no calls for a moment.

The order of a key's operations: requests leave in the order in which they were begun. A server answers a pull when the
pushes before it are done, since it says how many there were. A push must not be done before an earlier pull is
answered: it is held back here until then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import structs

from reigen.cluster.host_discovery import host_identity
from reigen.cluster.membership.rendezvous import split_address
from reigen.config import Config
from reigen.errors import CollectiveError, DeadlineError, PeerLostError, ReigenError
from reigen.kv.client.connection_poller import ConnectionPoller
from reigen.kv.client.deadlines import CallDeadlines
from reigen.kv.client.io_lock import IOLock
from reigen.kv.client.requests import PUSH_KINDS, READ_KINDS, BatchRequest, ClientRequest, KeyOrder, KVOperation
from reigen.kv.client.server_connection import ServerConnection, ServerConnectionOptions
from reigen.kv.membership.nodes import JobEnded, JobMembership, NodeLost, ServerMoved
from reigen.kv.protocol import COMMAND_CODEC, PURPOSE, RESULT_CODEC, KVHello, MessageKind, ServerNotice, StoreCommand
from reigen.kv.shm_arena import BodyAllocator, ShmArena
from reigen.net.auth import Identity, ProcessRole
from reigen.net.fork_safety import close_in_children

_log = logging.getLogger(__name__)

#: Copied values are announced to the servers as soon as they are so many bytes, not only at the end of a call.
_FLUSH_BYTES = 1 << 18
#: After so many, what has been answered meanwhile is taken in, too.
_TURN_BYTES = 1 << 22
#: While the user's calls are no further apart than this, they drive the connections.
_NAP_SECONDS = 0.0005
#: How long a turn waits at most, and by how much more it may really take.
_LONGEST_TURN_SECONDS, _MOST_LATE_SECONDS = 1.0, 0.2
#: How long servers may take to hear that a worker goes.
_GOODBYE_SECONDS = 10.0
#: How long a worker that leaves waits for what it has begun, before it says that it has nothing more to push.
_LINGER_SECONDS = 5.0


class KVWorker:
    """The connections of one store to all servers of its job. Any thread may use it.

    Args:
        member: this worker's place in the job; it is not closed here.
        config: the knobs.
        store: number of the store in the job: the same for all workers.
        staleness: of the store; None: infinite.
        counts: for `reigen.kv.client.server_connection.ServerConnectionOwner.counts`.
        start_until: when all servers are to be connected, on the clock of ``time.monotonic()``; None: the knob's time
            from now on.

    Attributes:
        member: see above.
        bodies: memory for what requests send.
        deadlines: of the store's calls.
        num_servers: how many there are.

    Raises:
        DeadlineError: servers did not come in time; names them.
    """

    def __init__(
        self,
        member: JobMembership,
        config: Config,
        store: int,
        staleness: int | None,
        counts: Callable[[int], Iterable[tuple[int, int, int]]],
        start_until: float | None = None,
    ) -> None:
        self.member = member
        self.deadlines = CallDeadlines(config.deadline_seconds)
        self._config = config
        self._counts = counts
        #: the connections are the caller's alone
        self._driving = IOLock()
        self._failure: ReigenError | None = None
        #: this process was forked from the one that made the connections
        self._is_inherited = False
        #: operations that have failed, about which nobody has been told yet
        self._failed: deque[KVOperation] = deque()
        self._num_outstanding = 0
        self._num_unsent_bytes = self._num_announced_bytes = 0
        #: requests that are held back (see the module), in order, by their identity
        self._held: dict[int, Sequence[ClientRequest]] = {}
        self.bodies = BodyAllocator(ShmArena(f"reigen-kv-worker-{member.number}"))
        self._watch = ConnectionPoller([self._driving, member])
        self._servers: list[ServerConnection] = []
        #: servers that are lost, and will be started again: the scheduler says if they are not
        self._awaited: set[int] = set()
        #: somebody has promised to drive whenever something is pending
        self._has_driver = False
        #: while something is to be driven by the thread
        self._signal = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reigen-kv-{store}", daemon=True)
        try:
            self._connect(store, staleness, start_until or time.monotonic() + config.start_timeout_seconds)
        except BaseException:
            self.close()
            raise
        self._thread.start()
        close_in_children(self)

    @property
    def has_failed(self) -> bool:
        """Whether nothing works any more."""
        return self._failure is not None

    @property
    def num_servers(self) -> int:
        """See the class."""
        return len(self._servers)

    @property
    def server_hosts(self) -> list[str]:
        """The addresses at which the servers are reached, by number."""
        return [split_address(upstream.peer.address)[0] for upstream in self._servers]

    @property
    def server_incarnations(self) -> list[int]:
        """Which process each server was when this worker was last connected to it."""
        return [upstream.incarnation for upstream in self._servers]

    # -- for the store ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has ended all, or what a push that nobody waited for has met."""
        if self._failure is not None:
            raise self._failure.anew()
        while self._failed:
            operation = self._failed.popleft()
            if not operation.is_reported and operation.error is not None:
                operation.is_reported = True
                raise operation.error.anew()

    def submit(self, requests: Sequence[ClientRequest], *tracks: KeyOrder) -> None:
        """Begin requests of one operation, all or some. They leave when there are many bytes of them, or by `flush`.

        Args:
            requests: all of one kind.
            tracks: of their key, none if they are in no order with others; of a bundle, those of its keys: all free.
        """
        operation, is_push = requests[0].operation, requests[0].kind in PUSH_KINDS
        with self._driving:
            if is_push and not all(track.has_push_slot() for track in tracks):
                self._drive(operation, lambda: all(track.has_push_slot() for track in tracks), None)
            if self._failure is not None:
                operation.fail(self._failure)
                return
            for track in tracks if is_push else ():
                track.num_pushes += len(requests)
            operation.num_left += len(requests)
            self._num_outstanding += len(requests)
            for request in requests:
                request.orders = tracks
            busy = next((track for track in tracks if track.held or track.must_wait(requests)), None)
            if busy is not None:  # the only one: keys of bundles are free
                busy.held.append(requests)
                self._held[id(requests)] = requests
            else:
                self._ask(requests)
                if self._num_unsent_bytes > _FLUSH_BYTES:
                    self._announce()

    def flush(self) -> None:
        """What was submitted leaves as far as the kernel takes it; the rest follows by itself."""
        if self._has_driver:
            return
        with self._driving:
            self._num_unsent_bytes = 0
            self._flush_all()
        self._leave_to_thread()

    def command(self, name: str, arguments: dict[str, object], servers: Iterable[int] | None = None) -> list[object]:
        """Have servers do something, and wait until all have.

        Args:
            name: see `reigen.kv.server.store_settings`.
            arguments: for it.
            servers: which; None: all.

        Returns:
            What each of them answered.
        """
        body = COMMAND_CODEC.encode(StoreCommand(name, arguments))
        requests = self.ask_servers(MessageKind.COMMAND, name, lambda _: body, servers)
        return [RESULT_CODEC.decode(bytes(each.answer or b"")).value for each in requests]

    def ask_servers(
        self, kind: MessageKind, what: str, body: Callable[[int], bytes], servers: Iterable[int] | None = None
    ) -> list[ClientRequest]:
        """Send each server a request of one kind, and wait for the answers."""
        operation = KVOperation(self, what)
        numbers = range(self.num_servers) if servers is None else servers
        requests = [ClientRequest(kind, number, operation, body=body(number)) for number in numbers]
        if requests:
            self.submit(requests)
            operation.wait()
        return requests

    def wait_for(self, operation: KVOperation, until: float | None) -> None:
        """See `reigen.kv.client.requests.OperationWaiter.wait_for`."""
        while operation.num_left:
            with self._driving:
                is_woken = self._drive(operation, lambda: not operation.num_left, until)
            if is_woken:
                self._closing.wait(_NAP_SECONDS)  # somebody else wants to come in
        self._leave_to_thread()

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """See `reigen.kv.store.KVStore.attention`."""
        self._has_driver = True
        try:
            yield
        finally:
            self._has_driver = False
            self.flush()

    def attend(self, oldest: KVOperation, is_enough: Callable[[], bool]) -> None:
        """See `reigen.kv.store.KVStore.attend`."""

        def is_done() -> bool:
            return not oldest.num_left or is_enough()

        is_woken = True
        while is_woken:
            with self._driving:
                self._num_unsent_bytes = 0
                self._flush_all()
                is_woken = self._drive(oldest, is_done, None)
            if is_woken:
                self._closing.wait(_NAP_SECONDS)  # somebody else wants to come in

    def interrupt(self) -> None:
        """See `reigen.kv.store.KVStore.interrupt`."""
        self._driving.ring()

    def wait_for_all(self) -> None:
        """Return when nothing is pending any more, and raise the first error that nobody was told of."""
        with self.deadlines.one():
            self._wait_until(lambda: not self._num_outstanding, None)
        self.check()

    def linger(self) -> bool:
        """Wait a while until nothing is pending any more, and raise the first error that nobody was told of.

        Returns:
            Whether nothing is. What is pending then has left: it counts, although this worker says goodbye now.
        """
        with self.deadlines.one() as until:
            try:
                enough = min(until, time.monotonic() + _LINGER_SECONDS)
                self._wait_until(lambda: not self._num_outstanding, enough)
            except DeadlineError:
                self._wait_until(lambda: not self._held, None)
        self.check()
        return not self._num_outstanding

    def goodbye(self, patience_seconds: float | None = _GOODBYE_SECONDS) -> None:
        """Tell all servers that this worker has nothing more to push.

        Args:
            patience_seconds: how long they may take to hear of it, and not longer than the call's deadline; None: until
                that.
        """
        operation = KVOperation(self, "saying goodbye to the servers")
        self.submit([ClientRequest(MessageKind.GOODBYE, number, operation) for number in range(self.num_servers)])
        if patience_seconds is not None:
            patience_seconds = min(patience_seconds, max(0.0, self.deadlines.latest(operation) - time.monotonic()))
        operation.wait(patience_seconds)

    def close(self) -> None:
        """End all connections; what is pending fails. May be called twice."""
        if self._is_inherited:
            return
        self._closing.set()
        self._signal.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._driving.ring()
            self._thread.join()
        with self._driving:
            self._fail(CollectiveError("the store was closed"))
            for upstream in self._servers:
                upstream.close()
            self._servers.clear()
            self._watch.clear()
            self.bodies.arena.close()
        self._driving.close()
        self._counts = lambda _: ()  # the store's, which has this worker

    def close_descriptors(self) -> None:
        """See `reigen.net.fork_safety`. Locks stay as they were at the fork: nothing else is touched."""
        self._is_inherited = True
        self._failure = CollectiveError(
            "this process was forked from a worker, and is none: let the worker itself call its store, or fork before"
        )
        for upstream in self._servers:
            upstream.close_descriptors()
        self._driving.close()

    # -- what the connections tell ------------------------------------------------------------------------------------

    def over(self, request: ClientRequest) -> None:
        """See `reigen.kv.client.server_connection.ServerConnectionOwner.over`."""
        request.is_over = True
        if request.block is not None:
            self.bodies.arena.free(request.block)
            request.block = None
        if request.on_done is not None:
            request.on_done(request)
        self._release(request.kind, request.leave())
        self._num_outstanding -= 1
        operation = request.operation
        operation.num_left -= 1  # last: whoever asks whether it is done may go on at once
        if not operation.num_left:
            if operation.error is not None:
                self._failed.append(operation)
            operation.over()

    def key_completed(self, bundle: BatchRequest, place: int, *, is_done: bool) -> None:
        """See `reigen.kv.client.server_connection.ServerConnectionOwner.key_completed`."""
        self._release(bundle.kind, [bundle.complete_part(place, is_done=is_done)])

    def heed(self, notice: ServerNotice) -> None:
        """See `reigen.kv.client.server_connection.ServerConnectionOwner.heed`."""
        _log.info("worker %d on host %s: %s (%s)", notice.worker, notice.host, notice.what, notice.reason)
        if notice.problem is not None:
            self._fail(notice.problem.raised())

    def counts(self, server: int) -> Iterable[tuple[int, int, int]]:
        """See `reigen.kv.client.server_connection.ServerConnectionOwner.counts`."""
        return self._counts(server)

    def server_lost_state(self, upstream: ServerConnection) -> None:
        """See `reigen.kv.client.server_connection.ServerConnectionOwner.server_lost_state`."""
        if any(True for _ in self._counts(upstream.peer.number)):
            raise PeerLostError(
                f"{upstream.name} was started again and holds nothing: what it held is lost. Servers that write "
                "snapshots (REIGEN_KV_SNAPSHOT_DIR) go on from the last one"
            )

    # -- driving ------------------------------------------------------------------------------------------------------

    def _connect(self, store: int, staleness: int | None, start_until: float) -> None:
        config, member = self._config, self.member
        machine, host = host_identity(config.host_id or "")
        hello = KVHello(member.number, member.incarnation, host, staleness=staleness)
        if config.kv_shared_memory:
            segment = self.bodies.arena.segment
            hello = structs.replace(hello, machine=machine, pid=os.getpid(), fd=segment.fd, inode=segment.inode)
        manner = ServerConnectionOptions(
            Identity(ProcessRole.RANK, member.number, PURPOSE),
            member.secret,
            member.tls,
            hello,
            store,
            config.kv_resend_timeout_ms / 1000 if config.kv_resend else None,
            config.peer_timeout_seconds,
            config.kv_drop_percent,
            config.kv_verbose >= 2,
        )
        for peer in member.servers(start_until):
            self._servers.append(ServerConnection(peer, manner, self))
        with self._driving:
            self._drive("connecting to servers", lambda: all(each.is_ready for each in self._servers), start_until)
        self.check()

    def _wait_until(self, is_done: Callable[[], bool], until: float | None) -> None:
        """Return when something is done, or nothing works any more; see `_drive`."""
        while not is_done():
            with self._driving:
                is_woken = self._drive("what was begun", is_done, until)
            if is_woken:
                self._closing.wait(_NAP_SECONDS)
            elif self._failure is not None:
                return

    def _leave_to_thread(self) -> None:
        """Nobody waits any more: what is still pending is driven by the store's thread."""
        if self._num_outstanding and not self._has_driver and not self._signal.is_set():
            self._signal.set()

    def _announce(self) -> None:
        """Have the servers know of what was submitted."""
        self._num_announced_bytes += self._num_unsent_bytes
        self._num_unsent_bytes = 0
        if self._num_announced_bytes < _TURN_BYTES:
            self._flush_all()
            return
        self._num_announced_bytes = 0
        self._turn(0.0)

    def _flush_all(self) -> None:
        try:
            for upstream in self._servers:
                upstream.flush()
        except ReigenError as error:
            self._fail(error)

    def _drive(self, what: KVOperation | str, is_done: Callable[[], bool], until: float | None) -> bool:
        """Take turns until something is done; with the lock.

        Returns:
            Whether somebody else wants to come in, so that it may not be done.

        Raises:
            DeadlineError: it is not done by ``until`` (None: by the deadline of the job).
        """
        self._signal.clear()
        if self._closing.is_set():
            self._signal.set()
        deadline = self.deadlines.latest(what) if until is None else until
        while not is_done() and self._failure is None:
            now = time.monotonic()
            left = deadline - now
            longest = max(0.0, min(left, _LONGEST_TURN_SECONDS))
            is_wanted = self._turn(longest)
            if left <= 0 and not is_done() and self._failure is None:
                raise self._late(what, is_final=until is None)
            if until is None:  # in what it takes beyond that, this process did not run: servers have not been heard
                deadline += max(0.0, time.monotonic() - now - longest - _MOST_LATE_SECONDS)
            if is_wanted:
                return not is_done()
        return False

    def _turn(self, timeout: float) -> bool:
        """Do what can be done now; if there is nothing, wait for it. Returns whether somebody else wants to come in."""
        if self._driving.is_wanted:
            timeout = 0.0
        try:
            now = time.monotonic()
            due = now + timeout
            for upstream in self._servers:
                if upstream.lost_since is not None:
                    self._reconnect(upstream, now)
                    due = min(due, now + 0.1)
                upstream.flush()
                if self._config.kv_resend:  # of what has left
                    due = min(due, upstream.resend(now) or due)
                    upstream.flush()
                self._watch.update(upstream)
            for ready in self._watch.wait(max(0.0, due - now)):
                if ready is self._driving:
                    self._driving.heed()
                elif isinstance(ready, ServerConnection):
                    ready.receive()
                else:
                    self._learn()
            for upstream in self._servers:
                upstream.flush()
        except ReigenError as error:
            self._fail(error)
        return self._driving.is_wanted

    def _reconnect(self, upstream: ServerConnection, now: float) -> None:
        upstream.connect()
        if upstream.is_connecting or not self._is_too_long(upstream, now):
            return
        self._learn()  # the scheduler knows better
        if self._is_too_long(upstream, now):
            raise PeerLostError(
                f"{upstream.name} is lost: no connection, or none that led to anything, for "
                f"{self._patience(upstream):g} s ({upstream.last_error})"
            )

    def _is_too_long(self, upstream: ServerConnection, now: float) -> bool:
        return upstream.lost_since is not None and now - upstream.lost_since > self._patience(upstream)

    def _patience(self, upstream: ServerConnection) -> float:
        """For how long there may be no connection."""
        is_awaited = upstream.peer.number in self._awaited
        return self._config.deadline_seconds if is_awaited else self._config.peer_timeout_seconds

    def _learn(self) -> None:
        """Hear what the scheduler tells."""
        for event in self.member.events():
            if isinstance(event, JobEnded):
                raise event.error()
            if isinstance(event, ServerMoved):
                self._awaited.discard(event.server.number)
                self._servers[event.server.number].moved(event.server)
            elif isinstance(event, NodeLost) and event.role == "server":
                if not event.will_return:
                    raise PeerLostError(f"{event}")
                self._awaited.add(event.number)
                _log.warning("%s; it will be started again", event)

    def _run(self) -> None:
        """The thread that drives while nobody waits."""
        while not self._closing.is_set():
            self._signal.wait()
            num_calls = self._driving.num_releases
            if self._closing.wait(_NAP_SECONDS):
                return
            if num_calls != self._driving.num_releases:
                continue
            if self._driving.try_acquire():
                try:
                    self._drive_alone()
                finally:
                    self._driving.__exit__()

    def _drive_alone(self) -> None:
        """Take turns until nothing is pending, or somebody comes."""
        self._signal.clear()
        is_wanted = False
        while self._num_outstanding and not is_wanted and not self._closing.is_set():
            is_wanted = self._turn(_LONGEST_TURN_SECONDS)
        if self._num_outstanding:
            self._signal.set()

    # -- requests -----------------------------------------------------------------------------------------------------

    def _ask(self, requests: Sequence[ClientRequest]) -> None:
        for request in requests:
            for track in request.orders:
                track.last = request.operation
                if request.kind in READ_KINDS:
                    track.num_reads += 1
            self._servers[request.server].submit(request)
            self._num_unsent_bytes += len(request.body)

    def _release(self, kind: MessageKind, tracks: Sequence[KeyOrder]) -> None:
        """A request of these keys is over: what was held back because of it may go."""
        for track in tracks:
            track.num_pushes -= kind in PUSH_KINDS
            track.num_reads -= kind in READ_KINDS
        for track in tracks:
            while track.held and not track.must_wait(track.held[0]):
                requests = track.held[0]
                self._ask(requests)
                track.held.popleft()  # after that: see `KeyOrder.is_free`
                del self._held[id(requests)]

    def _fail(self, error: ReigenError) -> None:
        """Nothing works any more."""
        if self._failure is None:
            self._failure = error
        pending = [request for upstream in self._servers for request in upstream.outstanding.values()]
        pending += [request for requests in self._held.values() for request in requests]
        self._held.clear()
        for upstream in self._servers:
            upstream.outstanding.clear()
        for request in pending:
            request.operation.fail(error)
            for track in request.leave():
                track.held.clear()
            self.over(request)

    def _late(self, what: KVOperation | str, *, is_final: bool) -> DeadlineError:
        """The error of what did not happen in time; one that is final has the operation's results go nowhere."""
        operation = what if isinstance(what, KVOperation) else None
        words = operation.what if operation is not None else what
        held = {one.server for some in self._held.values() for one in some if operation in {None, one.operation}}
        owing = [
            each
            for each in self._servers
            if not each.is_ready or self._owes(each, operation) or each.peer.number in held
        ]
        names = ", ".join(each.name for each in owing) or "servers"
        if is_final:
            whose = "REIGEN_DEADLINE sets how long to wait"
        else:
            whose = (
                "REIGEN_START_TIMEOUT sets how long to wait" if operation is None else "the caller's timeout is over"
            )
        error = DeadlineError(f"{words}: no answer from {names} in time ({whose})")
        if is_final and operation is not None:
            for upstream in owing:
                for request in upstream.outstanding.values():
                    if request.operation is operation:
                        request.forget()
            for requests in self._held.values():
                for request in requests if requests[0].operation is operation else ():
                    request.forget()
            operation.fail(error)
            operation.is_reported = True  # by this error, which whoever waits gets
        self._leave_to_thread()
        return error

    @staticmethod
    def _owes(upstream: ServerConnection, operation: KVOperation | None) -> bool:
        return any(operation in {None, request.operation} for request in upstream.outstanding.values())
