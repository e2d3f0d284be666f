"""Membership of a worker or a server: its connection to the scheduler, kept by a small thread.

A job has one scheduler, which knows who is there and carries no data, servers, and workers. Workers connect to the
servers, not to each other; a server connects to another one only for its copy (`reigen.kv.server.replicas`).

The thread registers, tells now and then that the process runs, takes in news, and connects again when the scheduler has
gone: that one may have been started anew, and learns from its nodes who is in the job. For how long it tries is
REIGEN_PEER_TIMEOUT. `cluster.membership.messages` states the protocol.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from reigen.cluster.host_discovery import host_identity
from reigen.cluster.membership import messages
from reigen.cluster.membership.rendezvous import split_address
from reigen.cluster.membership.view import BarrierEntry, JobView
from reigen.errors import AuthenticationError, CollectiveError, DeadlineError, PeerLostError, ReigenError, WireError
from reigen.kv.counters import StoreCounters
from reigen.kv.membership.discovery import SchedulerLocator
from reigen.kv.membership.environment import ProcessConfig
from reigen.net import auth
from reigen.net.connection import Connection, open_connection
from reigen.net.event_loop import EventLoop, wait_ready
from reigen.net.fork_safety import close_in_children

_log = logging.getLogger(__name__)
SavedJobFinder = Callable[[bytes], tuple[messages.SavedJob, ...]]

_AGAIN_SECONDS = 0.1
#: One attempt to reach the scheduler may take that long.
_TRY_SECONDS = 1.0
#: A process that answers in the scheduler's place and cannot prove to be it may be about to end, for that long; a
#: scheduler that hangs up, because more connect than it can listen to at once, may do so for that long.
_REPLACED_SECONDS, _BUSY_SECONDS = 1.0, 5.0
#: How long the scheduler may take to answer a question, and to take a last word.
_ANSWER_SECONDS, _LAST_WORDS_SECONDS = 10.0, 2.0
#: How long after a deadline it may take to say what has become of that.
_TOLERANCE_SECONDS = 1.0
#: The pause behind a connection to it on which it did not answer; it doubles with each of them, up to the second.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0


class EventFeed:
    """Events of a job for one of those who hear of them.

    Args:
        lock: guards this and all other feeds.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self._events: list[messages.MembershipEvent] = []
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, events: Sequence[messages.MembershipEvent]) -> None:
        """Add events; the caller holds the lock."""
        if events:
            self._events += events
            os.eventfd_write(self._eventfd, 1)

    def take(self) -> list[messages.MembershipEvent]:
        """Return the events since the last call. Does not wait."""
        with self._lock:
            with contextlib.suppress(OSError):  # nothing was written, or it is closed
                os.eventfd_read(self._eventfd)
            events, self._events = self._events, []
            return events

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events; -1 after `close`."""
        return self._eventfd

    def close(self) -> None:
        """Hear of nothing any more. May be called twice."""
        with self._lock:
            self.close_descriptors()

    def close_descriptors(self) -> None:
        if self._eventfd >= 0:
            os.close(self._eventfd)
            self._eventfd = -1


class SchedulerClient:
    """Membership of a worker or a server in its job, which has given it its number. Any thread may use it.

    Args:
        settings: what this process is.
        address: where a server listens for workers, ``host:port``; empty for a worker.
        deadline: for joining, on the clock of ``time.monotonic()``.
        find_saved: given the job's secret, returns the jobs of which this server finds snapshots on its disk.

    Raises:
        ConfigError: the scheduler refuses: another process has this number, or the job has other numbers of workers and
            servers; or there is no secret for a job of several hosts.
        AuthenticationError: the scheduler has another secret.
        DeadlineError: there was no scheduler by the deadline.

    Attributes:
        role: ``worker`` or ``server``.
        number: which one: a worker's rank, a server's number.
        job: its number, not 0: the same for all schedulers that it has.
        is_recovery: this process takes the place of one that was lost.
        is_elastic: workers come and go.
        servers_move: servers move from process to process.
        num_workers, num_servers: how many the job was started with; of an elastic job, how many workers it may have.
        incarnation: of this process, never 0.
        secret: the job's 32 bytes.
        tls: encrypts all connections; None: nothing is encrypted.
        host: the name of this host.
        counters: of all stores of a worker.
    """

    def __init__(
        self,
        settings: ProcessConfig,
        address: str,
        deadline: float,
        find_saved: SavedJobFinder = lambda secret: (),
    ) -> None:
        config = settings.config
        self._find_saved = find_saved
        self.role: messages.MemberRole = "server" if settings.role == "server" else "worker"
        self.num_workers, self.num_servers = settings.num_workers, settings.num_servers
        self.incarnation = 1 + secrets.randbits(62)
        self.secret = b""
        self.tls = settings.create_tls_context()
        self.host = host_identity(config.host_id or "")[1]
        self.counters = StoreCounters()
        self.number, self.job, self.is_recovery = -1 if settings.number is None else settings.number, 0, False
        counts: dict[messages.MemberRole, int] = {"worker": settings.num_workers, "server": settings.num_servers}
        me = messages.RegisterMember(
            self.role,
            self.number,
            self.host,
            self.incarnation,
            counts,
            address,
            is_restart=settings.is_restart,
            slot=settings.slot if settings.is_elastic and self.role == "worker" else None,
        )
        self.is_elastic, self.servers_move = settings.is_elastic, settings.servers_move
        self._view = JobView(me, is_loss_fatal=config.kv_on_worker_loss == "abort")
        self._config, self._deadline = config, deadline
        self._locator = SchedulerLocator(settings)
        #: guards what stands here and `_view`
        self._changed = threading.Condition()
        self._is_closing = False
        #: when this process goes though no scheduler has heard that it leaves
        self._gone_at = math.inf
        self._outbox: deque[messages.MemberMessage] = deque()
        self._feeds: list[EventFeed] = []
        self._loop = EventLoop()
        self._connection: Connection | None = None
        #: the scheduler has answered the registration on this connection
        self._is_placed = False
        #: messages of the scheduler
        self._num_heard = 0
        self._thread = threading.Thread(target=self._run, name="reigen-kv-member", daemon=True)
        close_in_children(self)
        self._thread.start()
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        """Wait until the scheduler has given this process its number."""
        view = self._view
        with self._changed:
            self._await(lambda: view.is_assigned, self._deadline + _TOLERANCE_SECONDS)
            if not view.is_assigned:
                raise view.failure or self._too_late("it takes no part in the conversation")
            self.number, self.job, self.is_recovery = view.number, view.job, view.is_recovery

    def servers(self, deadline: float) -> Sequence[messages.ServerInfo]:
        """Return all servers by number, as they are to be found now; waits until all have come for the first time.

        Raises:
            DeadlineError: not all came by the deadline, on the clock of ``time.monotonic()``; names them.
            PeerLostError: the job is over, or the scheduler has gone.
        """
        with self._changed:
            servers = self._view.servers
            self._await(lambda: bool(servers), deadline)
            if servers:
                return tuple(servers[number] for number in sorted(servers))
            self._raise_failure()
            missing = self._ask_status(0.0, _TOLERANCE_SECONDS)
            if servers:  # they came just now
                return tuple(servers[number] for number in sorted(servers))
            if missing is None:  # it may have ended the job in the meantime, and says why
                self._raise_failure()
        if missing is None:
            raise DeadlineError(f"{self._locator.description} does not say where the servers are, nor who is missing")
        raise DeadlineError(
            f"{messages.format_members(workers=missing.workers, servers=missing.servers) or 'nobody'} of "
            f"{self.num_workers} worker(s) and {self.num_servers} server(s) did not start within "
            f"{self._config.start_timeout_seconds:g} s "
            "(REIGEN_START_TIMEOUT). Were they started, for the same scheduler, and with the same secret?",
            ranks=missing.workers,
        )

    def barrier(self, name: str, deadline: float) -> None:
        """Wait until every worker that is still in the job has entered the barrier of this name as often as this one.

        It ends alike for all: where one of them does not want to wait any more, none passes.

        Raises:
            DeadlineError: not all came by this worker's deadline, or another's; ``ranks`` are those. Or the scheduler
                does not answer: only then others may have passed.
            PeerLostError: a worker was lost (and the policy is not to go on without it), or the job is over.
        """
        with self._changed:
            view = self._view
            entry = view.enter(name)
            self._post(messages.EnterBarrier(*entry))
            try:
                if not self._is_over_at(entry, deadline):
                    self._post(view.give_up(entry))
                    self._is_over_at(entry, time.monotonic() + _TOLERANCE_SECONDS)
                outcome = view.outcome(entry)
            finally:
                view.forget(entry)
        if outcome is None:
            raise DeadlineError(
                f"barrier {name!r}: {self._locator.description} does not answer; whether others have passed it "
                "is not known"
            )
        if outcome.is_broken:
            who = messages.format_members(workers=outcome.missing) or "somebody"
            raise DeadlineError(
                f"{who} did not come to barrier {name!r} in time: worker {outcome.worker} waited until its "
                "REIGEN_DEADLINE, and no process passes it any more",
                ranks=outcome.missing,
            )

    def feed(self) -> EventFeed:
        """Return a feed of the events from now on, and of earlier ones that no feed has had."""
        with self._changed:
            feed = EventFeed(self._changed)
            self._feeds.append(feed)
            self._ring()
            return feed

    def num_dead_nodes(self, timeout: float) -> int:
        """Count workers and servers that are lost now, or were not heard of for ``timeout`` seconds.

        Where the scheduler does not answer: those of whose loss was heard.
        """
        with self._changed:
            view = self._view
            grace_seconds = min(_ANSWER_SECONDS, self._config.deadline_seconds)
            answer = self._ask_status(timeout, grace_seconds)
            return len(view.lost) if answer is None else answer.num_silent

    def place(self) -> tuple[int, int]:
        """Return this worker's rank among those that are there, and their number, as far as was heard."""
        if not self.is_elastic:
            return self.number, self.num_workers
        with self._changed:
            roster = list(self._view.roster)
        if self.number not in roster:  # it has gone, or was given up
            return len(roster), len(roster) + 1
        return roster.index(self.number), len(roster)

    def report_keys(self, text: str) -> None:
        """Tell the scheduler which keys this server holds, for messages about its death."""
        with self._changed:
            self._view.held_keys = messages.HeldKeys(self.number, text)
            self._post(self._view.held_keys)

    def resize_servers(self, num: int, deadline: float) -> None:
        """Have the launcher run the servers in so many processes; returns when it has the request.

        Raises:
            DeadlineError: the scheduler does not answer. The request may have come to it.
            PeerLostError: the job is over.
        """
        with self._changed:
            view = self._view
            message = view.resize_servers(num)
            self._post(message)
            self._await(lambda: message.request not in view.resizes, deadline)
            if view.resizes.pop(message.request, None) is None:
                return
            self._raise_failure()
            raise DeadlineError(f"resize_servers({num}): {self._locator.description} does not answer")

    def leave(self) -> None:
        """Tell the others that this node goes in good order. The connection stays until `close`. Repeatable."""
        with self._changed:
            if not self._view.has_left:
                self._view.has_left = True
                self._post(messages.LeaveJob())

    def move(self) -> None:
        """Tell the others that another process is about to become this server, behind `close`."""
        with self._changed:
            self._post(messages.MoveServer())

    def close(self) -> None:
        """End the connection: without `leave` before it, this node is lost for the others. Repeatable."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._gone_at = time.monotonic() + self._config.peer_timeout_seconds
            self._changed.notify_all()
            self._loop.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._locator.close()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close all descriptors in a child: `reigen.net.fork_safety`."""
        self._loop.close()
        if self._connection is not None:
            self._connection.close()
        for feed in self._feeds:
            feed.close_descriptors()

    # -- callers, who hold the lock -----------------------------------------------------------------------------------

    def _await(self, condition: Callable[[], bool], deadline: float) -> None:
        """Wait for the condition, a failure, or the deadline."""
        while not condition() and self._view.failure is None and not self._is_closing:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def _raise_failure(self) -> None:
        failure = self._view.failure
        if isinstance(failure, CollectiveError):
            raise type(failure)(failure.reason, ranks=failure.ranks)
        if failure is not None or self._is_closing:
            raise PeerLostError(str(failure or f"this process, {self._view.name}, has left the job"))

    def _ask_status(self, seconds: float, timeout_seconds: float) -> messages.StatusReply | None:
        """Return the scheduler's answer, if it comes within that time."""
        answers, asked = self._view.status, self._view.asked
        answers.pop(seconds, None)
        asked.add(seconds)
        self._post(messages.StatusQuery(seconds))
        self._await(lambda: seconds in answers, time.monotonic() + timeout_seconds)
        asked.discard(seconds)
        return answers.pop(seconds, None)

    def _is_over_at(self, entry: BarrierEntry, deadline: float) -> bool:
        """Wait for the scheduler's word of a barrier; whether it came. Raises where there is nothing to hope for."""
        view = self._view
        self._await(lambda: view.outcome(entry) is not None or view.fatal_loss() is not None, deadline)
        if view.outcome(entry) is not None:
            return True
        self._raise_failure()
        if loss := view.fatal_loss():
            ranks = (loss.number,) if loss.role == "worker" else ()
            raise PeerLostError(f"barrier {entry[0]!r}: {loss}", ranks=ranks)
        return False

    def _post(self, message: messages.MemberMessage) -> None:
        self._outbox.append(message)
        self._loop.wake()

    def _too_late(self, problem: str) -> DeadlineError:
        return DeadlineError(
            f"{self._locator.description} did not answer within {self._config.start_timeout_seconds:g} s "
            "(REIGEN_START_TIMEOUT); was it started, and is the job not over already?"
            f"{f' ({problem})' if problem else ''}"
        )

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        until, pause = self._deadline, _PAUSE_SECONDS
        while not self._is_over:
            try:
                connection = self._connection = self._connect(until)
            except ReigenError as error:
                with self._changed:
                    if not self._is_closing:
                        self._view.fail(error)
                    self._ring()
                return
            num_heard = self._num_heard
            try:
                self._exchange_messages(connection)
            except (OSError, AuthenticationError, WireError) as error:
                if not self._is_over:
                    _log.warning("the connection to the scheduler has ended (%s); connecting again", error)
            finally:
                self._loop.unwatch(connection)
                connection.close()
            if num_heard != self._num_heard:
                until, pause = time.monotonic() + self._config.peer_timeout_seconds, _PAUSE_SECONDS
                continue
            with self._changed:  # it has hung up without a word
                self._changed.wait_for(lambda: self._is_closing, pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    @property
    def _is_over(self) -> bool:
        """Return whether no message is to come or go. A scheduler that is started again must hear of a Leave, too."""
        with self._changed:
            view = self._view
            if view.failure is not None or not self._is_closing:
                return view.failure is not None
            return view.is_out or time.monotonic() >= self._gone_at

    def _connect(self, until: float) -> Connection:
        """Reach the scheduler, wherever it is now."""
        problem, refused_since = "", math.inf
        while not self._is_over:
            if self._view.is_assigned:  # the process that kept the secret may have died with the scheduler
                self._locator.keep(self.secret)
            try:
                found = self._reach_one()
            except (AuthenticationError, WireError, PeerLostError, OSError) as error:
                problem, now = str(error), time.monotonic()
                refused_since = min(refused_since, now)
                grace_seconds = _BUSY_SECONDS if isinstance(error.__context__, ConnectionError) else _REPLACED_SECONDS
                is_refused = isinstance(error, AuthenticationError) and not self._view.is_assigned
                if is_refused and now >= refused_since + grace_seconds:
                    raise AuthenticationError(f"{self._locator.description} cannot be believed: {error}") from error
            else:
                if not isinstance(found, str):
                    return found
                problem = found
            if time.monotonic() >= until:
                break
            time.sleep(_AGAIN_SECONDS)
        if not self._view.is_assigned:
            raise self._too_late(problem)
        raise PeerLostError(
            f"{self._locator.description} has gone, and was not started again within "
            f"{self._config.peer_timeout_seconds:g} s (REIGEN_PEER_TIMEOUT): {problem}"
        )

    def _reach_one(self) -> Connection | str:
        """Return a connection to the scheduler, or why there is none."""
        me = auth.Identity(auth.ProcessRole.RANK, max(0, self._view.number), f"kv {self.role}")
        problem = "nobody tells where it is"
        for pointer in self._locator.candidates():
            limit = time.monotonic() + _TRY_SECONDS
            try:
                address = split_address(pointer.address)
                connection = open_connection(address, pointer.secret, me, messages.MAX_MESSAGE_BYTES, limit, self.tls)
            except OSError as error:
                problem = f"{pointer.address}: {error.strerror or error}"
                continue
            with self._changed:
                self.secret = self.secret or pointer.secret
            _log.info("connected to the scheduler at %s", pointer.address)
            return connection
        return problem

    def _exchange_messages(self, connection: Connection) -> None:
        """Register, then send and receive until the connection ends or this process has left."""
        connection.keep_alive(self._config.peer_timeout_seconds)
        saved = () if self._view.is_assigned else self._find_saved(self.secret)
        with self._changed:
            self._outbox.clear()
            connection.post(messages.MEMBER_CODEC.encode(self._view.registration(saved)))
        heartbeat_seconds, self._is_placed = self._config.kv_heartbeat_seconds, False
        due = time.monotonic() if heartbeat_seconds else math.inf
        while not self._is_over:
            if self._is_placed and time.monotonic() >= due:
                connection.post(messages.MEMBER_CODEC.encode(messages.MemberHeartbeat()))
                due = time.monotonic() + heartbeat_seconds
            flush = None if self._send_outbox(connection) else partial(_flush, connection)
            self._loop.watch(connection, partial(self._read, connection), flush)
            until = min(self._gone_at, due if self._is_placed else math.inf)
            self._loop.wait(None if until == math.inf else max(0.0, until - time.monotonic()))
        self._send_outbox(connection)
        until = time.monotonic() + _LAST_WORDS_SECONDS
        while not _flush(connection) and (left := until - time.monotonic()) > 0:
            wait_ready(connection, left, select.POLLOUT)

    def _send_outbox(self, connection: Connection) -> bool:
        """Send what callers want to say, once the scheduler knows this process; returns whether all of it has left."""
        if self._is_placed:
            self._locator.keep(self.secret)
            with self._changed:
                while self._outbox:
                    connection.post(messages.MEMBER_CODEC.encode(self._outbox.popleft()))
        return _flush(connection)

    def _read(self, connection: Connection) -> None:
        """Take in what has come."""
        for payload in connection.read():
            message = messages.MEMBERSHIP_REPLY_CODEC.decode(payload)
            self._num_heard += 1
            with self._changed:
                self._outbox.extendleft(reversed(self._view.take(message)))
                self._is_placed |= isinstance(message, messages.MemberAssigned)
                self._ring()

    def _ring(self) -> None:
        """Wake the threads that wait for a change, and pass events on."""
        self._changed.notify_all()
        self._feeds = [feed for feed in self._feeds if feed.fileno() >= 0]
        if self._feeds:
            events, self._view.events = self._view.events, []
            for feed in self._feeds:
                feed.put(events)


def _flush(connection: Connection) -> bool:
    """Send as much as the kernel takes; returns whether all of it has left."""
    try:
        return connection.flush()
    except ConnectionError:  # what the other end sent before it went is still to be read, and then its end
        return True
