"""Worker of a distributed store: its requests to all servers, and waiting for them.

A caller that waits drives the connections itself, so that a blocking call changes threads not once. While no caller
waits and something is pending, a thread of the store drives them. It leaves at once when a caller comes, and comes back
when there have been no calls for a moment.

Requests of a key leave in the order in which they were begun. A server answers a pull when the pushes before it are
done, since it says how many there were. A push must not be done before an earlier pull is answered: it is held back
here until then.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from reigen.cluster.host_discovery import host_identity
from reigen.cluster.membership.messages import JobEnded, MemberLost, MemberReturned
from reigen.cluster.membership.rendezvous import split_address
from reigen.cluster.metrics import MetricSample
from reigen.config import Config
from reigen.context import timeline_recorder
from reigen.errors import CollectiveError, DeadlineError, PeerLostError, ReigenError
from reigen.kv.client.requests import BatchRequest, ClientRequest, KeyOrder, KVOperation
from reigen.kv.client.server_connection import ServerConnection
from reigen.kv.membership.scheduler_client import EventFeed, SchedulerClient
from reigen.kv.protocol import (
    COMMAND_CODEC,
    PUSH_KINDS,
    READ_KINDS,
    RESULT_CODEC,
    KVHello,
    MessageHeader,
    MessageKind,
    ServerNotice,
    StoreCommand,
)
from reigen.kv.receive_window import ReceiveRate
from reigen.kv.shm_arena import ShmArena
from reigen.net.fork_safety import close_in_children

_log = logging.getLogger(__name__)

#: Copied values are announced to the servers as soon as they are so many bytes, not only at the end of a call.
_FLUSH_BYTES = 1 << 18
#: After so many, what has been answered meanwhile is taken in, too.
_TURN_BYTES = 1 << 22
#: While the user's calls are no further apart than this, they drive the connections.
_YIELD_SECONDS = 0.0005
#: How long a turn waits at most, and by how much more it may really take.
_LONGEST_TURN_SECONDS, _MOST_LATE_SECONDS = 1.0, 0.2
#: How long servers may take to hear that a worker goes.
_GOODBYE_SECONDS = 10.0
#: How long a worker that leaves waits for what it has begun, before it says that it has nothing more to push.
_LINGER_SECONDS = 5.0
#: Servers keep the deadline and know who is missing; this end waits a little longer, for a server that says nothing.
_TOLERANCE_SECONDS = 1.0


class IOLock:
    """Lock of a worker's connections whose holder can be woken from ``poll`` by a thread that wants the lock.

    The holder polls `fileno`, an eventfd, too, and releases the lock soon when it `is_wanted`. The lock is not fair: a
    thread that comes back at once may be faster than one that has written to the eventfd. So the threads that wait are
    counted, and the eventfd is only for a holder that sleeps.

    Attributes:
        num_releases: how often it was left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._counting = threading.Lock()
        self._num_waiting = 0
        self.num_releases = 0

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            with self._counting:
                self._num_waiting += 1
            self.ring()
            self._lock.acquire()
            with self._counting:
                self._num_waiting -= 1

    def try_acquire(self) -> bool:
        """Come in if the lock is free; return whether it was."""
        return self._lock.acquire(blocking=False)

    @property
    def is_wanted(self) -> bool:
        """Return whether a thread waits to come in."""
        return self._num_waiting > 0

    def __exit__(self, *_: object) -> None:
        self.num_releases += 1
        self._lock.release()

    def fileno(self) -> int:
        """Return a descriptor that is readable after `ring`."""
        return self._eventfd

    def ring(self) -> None:
        """Ask the holder to leave."""
        os.eventfd_write(self._eventfd, 1)

    def clear(self) -> None:
        """Reset the eventfd."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)

    def close(self) -> None:
        """Give up the descriptor. May be called twice."""
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1


class CallDeadlines:
    """Deadlines of one store's calls, which come one after the other."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        #: when the user's call that is under way has to be over, where it consists of several waits
        self._until: float | None = None

    @contextlib.contextmanager
    def one(self, until: float | None = None) -> Iterator[float]:
        """Have all waits of a block end together, at the time that is yielded. A block within another is part of that.

        Args:
            until: the end, on the clock of ``time.monotonic()``; None: the job's deadline, from now on.
        """
        if self._until is not None:
            yield self._until
            return
        self._until = time.monotonic() + self._seconds if until is None else until
        try:
            yield self._until
        finally:
            self._until = None

    def latest(self, what: KVOperation | str) -> float:
        """Return the end of a wait; that of an operation is set where it is first waited for, and is never later."""
        until = time.monotonic() + self._seconds if self._until is None else self._until
        latest = until + _TOLERANCE_SECONDS
        if isinstance(what, str):
            return latest
        what.latest = latest if what.latest is None else min(what.latest, latest)
        return what.latest


class KVWorker:
    """Connections of one store to all servers of its job. Any thread may use it.

    Args:
        member: this worker's place in the job; it is not closed here.
        config: the knobs.
        store: number of the store in the job: the same for all workers.
        staleness: of the store; None: infinite.
        counts: for `reigen.kv.client.server_connection.ServerConnectionOwner.counts`.
        start_until: when all servers are to be connected, on the clock of ``time.monotonic()``; None: the knob's time
            from now on.

    Attributes:
        arena: memory for what requests send.
        deadlines: of the store's calls.

    Raises:
        DeadlineError: servers did not come in time; names them.
    """

    def __init__(
        self,
        member: SchedulerClient,
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
        #: operations that have failed, and were not reported yet
        self._failed: deque[KVOperation] = deque()
        self._num_outstanding = 0
        self._num_unsent_bytes = self._num_announced_bytes = 0
        #: requests that are held back (see the module), in order, by their identity
        self._held: dict[int, Sequence[ClientRequest]] = {}
        self.arena = ShmArena(f"reigen-kv-worker-{member.number}")
        #: of the scheduler; and, besides the connections, what a turn waits for
        self._events = member.feed()
        self._others: dict[int, IOLock | EventFeed] = {each.fileno(): each for each in (self._driving, self._events)}
        self._servers: list[ServerConnection] = []
        #: servers that are lost, and will be started again: the scheduler says if they are not
        self._awaited: set[int] = set()
        #: a caller has promised to drive whenever something is pending
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
        """Return whether nothing works any more."""
        return self._failure is not None

    @property
    def num_servers(self) -> int:
        return len(self._servers)

    @property
    def server_hosts(self) -> list[str]:
        """Addresses at which the servers are reached, by number."""
        return [split_address(connection.peer.address)[0] for connection in self._servers]

    @property
    def server_incarnations(self) -> list[int]:
        """Incarnation of each server when this worker was last connected to it."""
        return [connection.incarnation for connection in self._servers]

    def samples(self) -> Iterator[MetricSample]:
        """Yield the metrics of this store alone; any thread."""
        yield "reigen_queue_length", ("store",), self._num_outstanding
        yield "reigen_memory_bytes", ("arena",), self.arena.segment.size

    # -- for the store ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error that has ended all, or that of a push without a waiting caller."""
        if self._failure is not None:
            raise self._failure.anew()
        while self._failed:
            operation = self._failed.popleft()
            if not operation.is_reported and operation.error is not None:
                operation.is_reported = True
                raise operation.error.anew()

    def submit(self, requests: Sequence[ClientRequest], *orders: KeyOrder) -> None:
        """Begin requests of one operation and kind. They leave when there are many bytes of them, or by `flush`.

        ``orders`` are those of their key, none if they are in no order with others; of a batch, those of its keys,
        which are all free.
        """
        operation, is_push = requests[0].operation, requests[0].header.kind in PUSH_KINDS
        with self._driving:
            if is_push and not all(order.has_push_slot() for order in orders):
                self._drive(operation, lambda: all(order.has_push_slot() for order in orders), None)
            if self._failure is not None:
                operation.fail(self._failure)
                return
            for order in orders if is_push else ():
                order.num_pushes += len(requests)
            operation.num_left += len(requests)
            self._num_outstanding += len(requests)
            for request in requests:
                request.orders = orders
            busy = next((order for order in orders if order.held or order.must_wait(requests)), None)
            if busy is not None:  # the only one: keys of batches are free
                busy.held.append(requests)
                self._held[id(requests)] = requests
            else:
                self._send(requests)
                if self._num_unsent_bytes > _FLUSH_BYTES:
                    self._announce()

    def flush(self) -> None:
        """Send submitted requests as far as the kernel takes them; the rest follows by itself."""
        if self._has_driver:
            return
        with self._driving:
            self._flush_all()
        self._leave_to_thread()

    def command(self, name: str, arguments: dict[str, object], servers: Iterable[int] | None = None) -> list[object]:
        """Have servers, all or some, do a command of `reigen.kv.server.store_settings`; return the answer of each."""
        body = COMMAND_CODEC.encode(StoreCommand(name, arguments))
        requests = self.ask_servers(MessageKind.COMMAND, name, lambda _: body, servers)
        return [RESULT_CODEC.decode(bytes(each.answer or b"")).value for each in requests]

    def ask_servers(
        self, kind: MessageKind, what: str, body: Callable[[int], bytes], servers: Iterable[int] | None = None
    ) -> list[ClientRequest]:
        """Send each server a request of one kind, and wait for the answers."""
        operation = KVOperation(self.wait_for, what)
        numbers = range(self.num_servers) if servers is None else servers
        requests = [ClientRequest(MessageHeader(kind), number, operation, body(number)) for number in numbers]
        self.ask(requests)
        return requests

    def ask(self, requests: Sequence[ClientRequest]) -> None:
        """Submit requests of one operation, if any, and wait for it."""
        if requests:
            self.submit(requests)
            requests[0].operation.wait()

    def wait_for(self, operation: KVOperation, until: float | None) -> None:
        """Return when an operation is over; see `reigen.kv.client.requests.KVOperation`."""
        self._drive_until(operation, lambda: not operation.num_left, until)
        self._leave_to_thread()

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        self._has_driver = True
        try:
            yield
        finally:
            self._has_driver = False
            self.flush()

    def attend(self, oldest: KVOperation, is_enough: Callable[[], bool]) -> None:
        with self._driving:
            self._flush_all()
        self._drive_until(oldest, lambda: not oldest.num_left or is_enough(), None)

    def interrupt(self) -> None:
        self._driving.ring()

    def wait_for_all(self) -> None:
        """Return when nothing is pending any more, and raise the first error that was not reported."""
        with self.deadlines.one():
            self._drive_until("what was begun", lambda: not self._num_outstanding, None)
        self.check()

    def linger(self) -> bool:
        """Wait a while until nothing is pending any more; returns whether nothing is.

        What is pending then has left: it counts, although this worker says goodbye now. The first error that was not
        reported is raised.
        """
        with self.deadlines.one() as until:
            try:
                enough = min(until, time.monotonic() + _LINGER_SECONDS)
                self._drive_until("what was begun", lambda: not self._num_outstanding, enough)
            except DeadlineError:
                self._drive_until("what was begun", lambda: not self._held, None)
        self.check()
        return not self._num_outstanding

    def goodbye(self, timeout_seconds: float | None = _GOODBYE_SECONDS) -> None:
        """Tell all servers that this worker has nothing more to push.

        They may take ``timeout_seconds``, within the call's deadline; None: until that.
        """
        operation = KVOperation(self.wait_for, "saying goodbye to the servers")
        header = MessageHeader(MessageKind.GOODBYE)
        self.submit([ClientRequest(header, number, operation) for number in range(self.num_servers)])
        if timeout_seconds is not None:
            timeout_seconds = min(timeout_seconds, max(0.0, self.deadlines.latest(operation) - time.monotonic()))
        operation.wait(timeout_seconds)

    def close(self) -> None:
        """End all connections; pending requests fail. May be called twice."""
        if self._is_inherited:
            return
        self._closing.set()
        self._signal.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._driving.ring()
            self._thread.join()
        with self._driving:
            self._fail(CollectiveError("the store was closed"))
            for connection in self._servers:
                connection.close()
            self._servers.clear()
            self.arena.close()
            self._events.close()
        self._driving.close()
        self._counts = lambda _: ()  # the store's, which has this worker

    def close_descriptors(self) -> None:
        """Close descriptors in a child. Locks stay as they were at the fork: nothing else is touched."""
        self._is_inherited = True
        self._failure = CollectiveError(
            "this process was forked from a worker, and is none: let the worker itself call its store, or fork before"
        )
        for connection in self._servers:
            connection.close_descriptors()
        self._driving.close()

    # -- what the connections tell ------------------------------------------------------------------------------------

    def over(self, request: ClientRequest) -> None:
        if request.block is not None:
            self.arena.free(request.block)
            request.block = None
        request.note()
        if request.sent_at and (recorder := timeline_recorder()) is not None:
            recorder.answered(request.seen(time.monotonic()))
        self._release(request.header.kind, request.leave())
        self._num_outstanding -= 1
        operation = request.operation
        operation.num_left -= 1  # last: a caller that asks whether it is done may go on at once
        if not operation.num_left:
            if operation.error is not None:
                self._failed.append(operation)
            operation.over()

    def key_completed(self, batch: BatchRequest, place: int, *, is_done: bool) -> None:
        self._release(batch.header.kind, [batch.complete_part(place, is_done=is_done)])

    def handle_notice(self, notice: ServerNotice) -> None:
        _log.info("worker %d on host %s: %s (%s)", notice.worker, notice.host, notice.what, notice.reason)
        if notice.problem is not None:
            self._fail(notice.problem.raised())

    def counts(self, server: int) -> Iterable[tuple[int, int, int]]:
        return self._counts(server)

    def server_lost_state(self, connection: ServerConnection) -> None:
        if any(True for _ in self._counts(connection.peer.number)):
            raise PeerLostError(
                f"{connection.name} was started again and holds nothing: what it held is lost. Servers that have "
                "copies (REIGEN_KV_REPLICAS=2, --replicate-servers 2) or write snapshots (REIGEN_KV_SNAPSHOT_DIR) go "
                "on from them"
            )

    # -- driving ------------------------------------------------------------------------------------------------------

    def _connect(self, store: int, staleness: int | None, start_until: float) -> None:
        config, member = self._config, self.member
        host_id, host = host_identity(config.host_id or "")
        hello = KVHello(member.number, member.incarnation, host, staleness=staleness)
        if config.kv_shared_memory:
            hello = self.arena.announced(hello, host_id)
        # servers bound what is on its way from workers then, and workers what is on its way from servers
        inflow = ReceiveRate() if member.num_workers > member.num_servers else None
        for peer in member.servers(start_until):
            self._servers.append(ServerConnection(peer, member, config, hello, store, self, inflow))
        with self._driving:
            self._drive("connecting to servers", lambda: all(each.is_ready for each in self._servers), start_until)
        self.check()

    def _drive_until(self, what: KVOperation | str, is_done: Callable[[], bool], until: float | None) -> None:
        """Return when something is done, or nothing works any more; see `_drive`."""
        if is_done():
            return
        recorder = timeline_recorder()
        name = "" if recorder is None else what if isinstance(what, str) else what.what
        if recorder is not None:
            recorder.waiting(name)
        since, is_woken = time.monotonic(), True
        try:
            while is_woken:
                with self._driving:
                    is_woken = self._drive(what, is_done, until)
                if is_woken:
                    self._closing.wait(_YIELD_SECONDS)  # another thread waits for the lock
        finally:
            self.member.counters.waited_seconds += time.monotonic() - since
            if recorder is not None:
                recorder.waited(name)

    def _leave_to_thread(self) -> None:
        """Have the store's thread drive pending requests."""
        if self._num_outstanding and not self._has_driver and not self._signal.is_set():
            self._signal.set()

    def _announce(self) -> None:
        """Have the servers hear of submitted requests."""
        self._num_announced_bytes += self._num_unsent_bytes
        self._flush_all()
        if self._num_announced_bytes >= _TURN_BYTES:
            self._num_announced_bytes = 0
            self._turn(0.0)

    def _flush_all(self) -> None:
        self._num_unsent_bytes = 0
        try:
            for connection in self._servers:
                connection.flush()
        except ReigenError as error:
            self._fail(error)

    def _drive(self, what: KVOperation | str, is_done: Callable[[], bool], until: float | None) -> bool:
        """Take turns until something is done, by ``until`` (None: the deadline of the job); with the lock.

        Returns whether it is not, since another thread waits for the lock. Raises DeadlineError where it is late.
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
        """Do all that can be done now, or wait for something. Returns whether another caller wants to come in."""
        if self._driving.is_wanted:
            timeout = 0.0
        try:
            now = time.monotonic()
            due = now + timeout
            for connection in self._servers:
                if connection.lost_since is not None:
                    self._reconnect(connection, now)
                    due = min(due, now + 0.1)
                connection.flush()
                if self._config.kv_resend:  # of what has left
                    due = min(due, connection.resend(now) or due)
                    connection.flush()
            for ready in self._wait_for_any(max(0.0, due - now)):
                if ready is self._driving:
                    self._driving.clear()
                elif isinstance(ready, ServerConnection):
                    ready.receive()
                else:
                    self._handle_events()
            for connection in self._servers:
                connection.flush()
        except ReigenError as error:
            self._fail(error)
        return self._driving.is_wanted

    def _wait_for_any(self, timeout: float) -> list[ServerConnection | IOLock | EventFeed]:
        poll, ready = select.poll(), dict[int, ServerConnection | IOLock | EventFeed](self._others)
        for fd in self._others:
            poll.register(fd, select.POLLIN)
        for connection in self._servers:
            if (fd := connection.fileno()) >= 0:
                ready[fd] = connection
                poll.register(fd, select.POLLIN | (select.POLLOUT if connection.wants_to_send else 0))
        return [ready[fd] for fd, _ in poll.poll(timeout * 1000)]

    def _reconnect(self, connection: ServerConnection, now: float) -> None:
        connection.connect()
        if connection.is_connecting or not self._is_too_long(connection, now):
            return
        self._handle_events()  # the scheduler knows better
        if self._is_too_long(connection, now):
            raise PeerLostError(
                f"{connection.name} is lost: no connection, or none that led to anything, for "
                f"{self._reconnect_seconds(connection):g} s ({connection.last_error})"
            )

    def _is_too_long(self, connection: ServerConnection, now: float) -> bool:
        return connection.lost_since is not None and now - connection.lost_since > self._reconnect_seconds(connection)

    def _reconnect_seconds(self, connection: ServerConnection) -> float:
        """Return for how long there may be no connection."""
        is_awaited = connection.peer.number in self._awaited
        return self._config.deadline_seconds if is_awaited else self._config.peer_timeout_seconds

    def _handle_events(self) -> None:
        """Handle events of the scheduler."""
        for event in self._events.take():
            if isinstance(event, JobEnded):
                raise event.error()
            if isinstance(event, MemberReturned) and event.role == "server":
                self._awaited.discard(event.number)
                self._servers[event.number].moved(event.server)
            elif isinstance(event, MemberLost) and event.role == "server":
                if not event.will_return:
                    raise PeerLostError(f"{event}")
                self._awaited.add(event.number)
                what = "it moves to another process" if event.is_move else "it will be started again"
                _log.log(logging.INFO if event.is_move else logging.WARNING, "%s; %s", event, what)

    def _run(self) -> None:
        """Drive the connections while no caller does: the store's thread."""
        while not self._closing.is_set():
            self._signal.wait()
            num_calls = self._driving.num_releases
            if self._closing.wait(_YIELD_SECONDS):
                return
            if num_calls != self._driving.num_releases:
                continue
            if self._driving.try_acquire():
                try:
                    self._drive_alone()
                finally:
                    self._driving.__exit__()

    def _drive_alone(self) -> None:
        """Take turns until nothing is pending, or a caller comes."""
        self._signal.clear()
        is_wanted = False
        while self._num_outstanding and not is_wanted and not self._closing.is_set():
            is_wanted = self._turn(_LONGEST_TURN_SECONDS)
        if self._num_outstanding:
            self._signal.set()

    # -- requests -----------------------------------------------------------------------------------------------------

    def _send(self, requests: Sequence[ClientRequest]) -> None:
        for request in requests:
            for order in request.orders:
                order.last = request.operation
                if request.header.kind in READ_KINDS:
                    order.num_reads += 1
            self._servers[request.server].submit(request)
            self._num_unsent_bytes += len(request.body)

    def _release(self, kind: int, orders: Sequence[KeyOrder]) -> None:
        """Send requests that were held back because of one of these keys that is over."""
        for order in orders:
            order.num_pushes -= kind in PUSH_KINDS
            order.num_reads -= kind in READ_KINDS
        for order in orders:
            while order.held and not order.must_wait(order.held[0]):
                requests = order.held[0]
                self._send(requests)
                order.held.popleft()  # after that: see `KeyOrder.is_free`
                del self._held[id(requests)]

    def _fail(self, error: ReigenError) -> None:
        """Fail all that is pending, and whatever comes later."""
        if self._failure is None:
            self._failure = error
        pending = self._pending()
        self._held.clear()
        for connection in self._servers:
            connection.outstanding.clear()
        for request in pending:
            request.operation.fail(error)
            for order in request.leave():
                order.held.clear()
            self.over(request)

    def _pending(self) -> list[ClientRequest]:
        """Return all requests that are not answered: those that have left, and those that are held back."""
        waiting = [each.outstanding.values() for each in self._servers]
        return list(itertools.chain(*waiting, *self._held.values()))

    def _late(self, what: KVOperation | str, *, is_final: bool) -> DeadlineError:
        """Return the error of what did not happen in time; a final one has the operation's results go nowhere."""
        operation = what if isinstance(what, KVOperation) else None
        late = [request for request in self._pending() if operation in {None, request.operation}]
        late_servers = {request.server for request in late}
        names = [each.name for each in self._servers if not each.is_ready or each.peer.number in late_servers]
        if is_final:
            limit = "REIGEN_DEADLINE sets how long to wait"
        elif operation is None:
            limit = "REIGEN_START_TIMEOUT sets how long to wait"
        else:
            limit = "the caller's timeout is over"
        text = what if operation is None else operation.what
        error = DeadlineError(f"{text}: no answer from {', '.join(names) or 'servers'} in time ({limit})")
        if is_final and operation is not None:
            for request in late:
                request.forget()
            operation.fail(error)
            operation.is_reported = True  # by this error, which the waiting caller gets
        self._leave_to_thread()
        return error
