"""Server of the parameter server: connections, time, news of the scheduler; stores are in `reigen.kv.server.store`.

One thread does all I/O and decides; the threads of `reigen.kv.server.thread_pool` compute. Strangers get as far as the
handshake: how many there may be and for how long is bounded, and nothing of them is parsed. So are connections behind
whose handshake no HELLO comes. A worker that sends what is no message loses its connection; it may connect again.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np

from reigen.cluster.host_discovery import host_identity
from reigen.cluster.membership.members import LossPolicy
from reigen.cluster.membership.messages import (
    JobEnded,
    MemberLeft,
    MemberLost,
    MemberReturned,
    MembershipEvent,
    WorkerRoster,
)
from reigen.cluster.metrics import MetricSample
from reigen.config import Config
from reigen.errors import ConfigError, MismatchError, PeerLostError, ReigenError, WireError
from reigen.kernels.float_errors import ignore_float_errors
from reigen.kv.connection import KVConnection, MessageDropper
from reigen.kv.membership.scheduler_client import SchedulerClient
from reigen.kv.protocol import (
    HELLO_CODEC,
    NOTICE_CODEC,
    PURPOSE,
    KVHello,
    MessageHeader,
    MessageKind,
    RemoteError,
    ServerNotice,
)
from reigen.kv.receive_window import ReceiveRate, ReceiveWindow
from reigen.kv.server.buffers import BufferPool, ValueAllocator
from reigen.kv.server.flow_control import MAX_LEAD_BYTES, SILENT_SECONDS, should_pause
from reigen.kv.server.replicas import COPIES_PURPOSE, CopyHolder, ServerCopies, check_owner
from reigen.kv.server.request_handler import RequestHandler
from reigen.kv.server.requests import WorkerConnection
from reigen.kv.server.snapshots import SnapshotDirectory, SnapshotStorage
from reigen.kv.server.stalls import StallReporter
from reigen.kv.server.store import ServerContext, ServerRoster, ServerStore, describe_keys, is_at_rest, store_facts
from reigen.kv.server.thread_pool import ComputeThreads, choose_num_threads
from reigen.kv.shm_arena import PeerShmArena, ShmArena, explain_mapping_failure
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import Connection, ConnectionOptions
from reigen.net.event_loop import Callback, EventLoop
from reigen.net.listener import Listener

#: How often to look who is late; and how late that may be without this process having stood still.
_TICK_SECONDS, _MOST_LATE_SECONDS = 0.25, 0.5
_HANDSHAKE_BYTES = 1 << 12
_log = logging.getLogger(__name__)


class _ClientConnection:
    """Receiver of a worker's messages; the first must be HELLO.

    Attributes:
        accepted: as the listener knows it.
        connection: to a store, after HELLO.
        window: of what is on its way from the worker.
    """

    def __init__(
        self, server: KVServer, accepted: Connection, drops: MessageDropper | None, log_messages: bool
    ) -> None:
        self._server, self.accepted, tcp = server, accepted, accepted.socket
        connection, session = accepted.detach()
        self.worker = session.peer.rank
        self.window = ReceiveWindow(tcp, self.worker, server.inflow)
        name = f"worker {self.worker}"
        self.line = KVConnection(connection, session, self, name, drops=drops, log_messages=log_messages)
        self.connection: WorkerConnection | None = None
        self.handler: RequestHandler | None = None
        #: when something came last
        self.heard_at = 0.0

    def notify(self, store: int, notice: ServerNotice) -> None:
        """Queue a NOTICE."""
        body = NOTICE_CODEC.encode(notice)
        self.line.send(MessageHeader(MessageKind.NOTICE, store=store, body_bytes=len(body)), body)

    def place(self, line: KVConnection, header: MessageHeader) -> memoryview:
        if self.handler is None:
            return memoryview(bytearray(header.body_bytes if header.kind == MessageKind.HELLO else 0))
        return self.handler.place(header).data

    def arrived(self, line: KVConnection, header: MessageHeader, body: memoryview) -> None:
        if self.connection is None or self.handler is None:
            self._server.handle_hello(self, header, body)
            return
        if header.store != self.connection.store:
            raise WireError(f"{line.name}: a request for store {header.store} on a connection for another one")
        self.handler.arrived(self.connection, header, np.frombuffer(body, np.uint8))


#: New objects after which Python looks for cycles; requests under way are among them.
_OBJECTS_TILL_COLLECTION = 20_000


def limit_garbage_collection() -> None:
    """Have Python look for cycles rarely.

    Imported modules stay, and serving requests leaves no cycles.
    """
    gc.freeze()
    gc.set_threshold(_OBJECTS_TILL_COLLECTION)


def _open_storage(member: SchedulerClient, config: Config) -> tuple[SnapshotDirectory | None, ServerCopies | None]:
    """Return where this server's snapshots are: on a disk, or in the memory of another server; neither where nowhere.

    Raises:
        ConfigError: they cannot be kept there, or not in both.
    """
    if config.kv_replicas > 1 and config.kv_snapshot_dir is not None:
        raise ConfigError(
            "REIGEN_KV_REPLICAS=2 (--replicate-servers 2) and REIGEN_KV_SNAPSHOT_DIR: a server is started again from "
            "the memory of another one, or from a disk: choose one"
        )
    if config.kv_snapshot_dir is not None:
        return SnapshotDirectory(config.kv_snapshot_dir, member.secret, member.job, member.number), None
    if config.kv_replicas > 1:
        return None, ServerCopies(member, config.peer_timeout_seconds)
    return None, None


class KVServer:
    """Server, from its start to the end of the job.

    Args:
        member: its place in the job.
        config: the knobs; those of the parameter server begin with ``kv_``.
        listening: from `open_listening_socket`; its address is what the scheduler tells workers. It is closed with the
            server.
        handover: directory by which a server that keeps no snapshots moves to another process; empty: it does not.

    Attributes:
        is_released: another process may take this server (`release`).

    Raises:
        ConfigError: snapshots cannot be kept where they should be.
        WireError: this server takes another's place, and its snapshots are damaged.
    """

    def __init__(self, member: SchedulerClient, config: Config, listening: socket.socket, handover: str = "") -> None:
        self._member, self._config, self._handover = member, config, handover
        self.is_released = self._must_release = False
        self._is_elastic = LossPolicy(config.kv_on_worker_loss) is LossPolicy.ELASTIC
        self._directory: SnapshotDirectory | None
        self._copies: ServerCopies | None
        self._directory, self._copies = _open_storage(member, config)
        snapshots: SnapshotStorage | None = self._directory or self._copies
        self.host_id = host_identity(config.host_id or "")[0] if config.kv_shared_memory else ""
        self._arena = ShmArena(f"reigen-kv-server-{member.number}") if self.host_id else None
        saves, num_cores = snapshots is not None, len(os.sched_getaffinity(0))
        num_threads, why = choose_num_threads(config.kv_threads, num_cores, saves=saves)
        _log.info("threads that compute: %d (%s)", num_threads, why)
        self._workers = ComputeThreads(num_threads)
        self._context = ServerContext(
            member.number, member.num_workers, ValueAllocator(self._arena), BufferPool(), self._workers, snapshots,
            saves and (config.kv_snapshot_seconds == 0 or self._is_elastic or self._directory is None),
            LossPolicy(config.kv_on_worker_loss), ServerRoster(), config.deadline_seconds, config.kv_resend,
        )  # fmt: skip
        #: since when it serves, for `reigen.observe.metrics`
        self.started = time.monotonic()
        #: requests of all stores, by kind
        self._num_requests: Counter[int] = Counter()
        self._stores: dict[int, ServerStore] = {}
        self._handlers: dict[int, RequestHandler] = {}
        #: stores that go on from a snapshot, by number: whatever they had acknowledged they have, be it no shard
        self._restored: set[int] = set()
        #: workers that are lost now, for stores that begin later
        self._lost: dict[int, MemberLost] = {}
        self._connections: set[_ClientConnection] = set()
        #: the servers' wires are the narrowest; those that are ahead of others and are not read for the time being
        self._limits_senders = member.num_workers > member.num_servers
        #: from all workers
        self.inflow = ReceiveRate()
        self._waiting: set[_ClientConnection] = set()
        #: why the memory of workers' processes, by number and incarnation, cannot be mapped here
        self._unread: dict[tuple[int, int], str] = {}
        #: lines with more messages than one call took
        self._busy: set[_ClientConnection] = set()
        self._tick_seconds = min(_TICK_SECONDS, config.deadline_seconds / 4)
        self._next_tick = time.monotonic() + self._tick_seconds
        #: the last tick came late, and deadlines were not looked at
        self._is_behind = False
        self._next_snapshot = self._snapshot_time()
        #: the versions of the stores' layouts of which the scheduler knows
        self._reported_layouts: list[int] = []
        self._exit_code: int | None = None
        self._stalls = StallReporter(math.inf if config.stall_check_disable else config.stall_check_seconds)
        self._events = member.feed()
        self._loop = EventLoop()
        me = Identity(ProcessRole.RANK, member.number, PURPOSE)
        options = ConnectionOptions(
            member.secret, me, _HANDSHAKE_BYTES, member.tls, config.peer_timeout_seconds, bulk=True
        )
        self._listener = Listener(self._loop, listening, options, self._on_authenticated)
        self._holder = CopyHolder(self._loop, self._listener.confirm, is_restarted=member.is_recovery)
        #: a copy of this server is being fetched: workers wait
        self._is_fetching = False
        self._early_events: list[MembershipEvent] = []
        if snapshots is not None:
            self._restore(snapshots)
        elif handover and member.is_recovery:
            with closing(self._open_handover()) as storage:
                self._restore(storage)
                storage.remove()

    def serve(self) -> int:
        """Serve until the scheduler says that the job is over; returns the exit code for the process.

        Or until another process is to take this server: `is_released` says so, and the code is 0.
        """
        self._loop.watch(self._events.fileno(), self._handle_membership_events)
        self._loop.watch(self._workers.fileno(), self._workers.collect)
        self._handle_membership_events()
        try:
            with ignore_float_errors():
                while self._exit_code is None and not self._must_release:
                    self._turn()
                if self._exit_code is None:
                    self._hand_over()
                    return 0
            if self._copies is not None:
                self._copies.give_up()
            self._workers.close()  # which may be saving
            self._leave_snapshots()
        finally:
            self.close()
        return self._exit_code

    def release(self) -> None:
        """Have `serve` return, so that another process can take this server. Any thread may call this."""
        self._must_release = True
        self._loop.wake()

    def _hand_over(self) -> None:
        """Stop between two requests, and leave all that this server holds where the next process finds it.

        What has come and was not applied is not acknowledged: workers send it again. What was, is in the values.
        """
        self._listener.close()
        self._loop.unwatch(self._events.fileno())
        for client in self._connections:
            self._loop.unwatch(client.line)
        stores = self._stores.values()
        while self._workers.num_running or not all(map(is_at_rest, stores)):
            self._loop.wait(_TICK_SECONDS)
        if self._directory is None:
            with closing(self._open_handover()) as storage:
                for store in stores:
                    for shard in store.shards.values():
                        shard.applied = shard.engine.state()
                        storage.save_shard(store.number, shard.id, shard.pack())
                    storage.save_store(store.number, store_facts(store))
        for client in self._connections:  # whose ends are no worker's
            if client.connection is not None:
                client.connection.end()
                client.connection = None
        self._member.move()
        self.is_released = True

    def _open_handover(self) -> SnapshotDirectory:
        return SnapshotDirectory(self._handover, self._member.secret, self._member.job, self._member.number)

    def close(self) -> None:
        """End all connections and threads. May be called twice."""
        for client in list(self._connections):
            self._drop(client)
        self._holder.close()
        self._listener.close()
        if self._copies is not None:
            self._copies.give_up()
        self._workers.close()
        self._loop.close()
        self._events.close()
        for storage in (self._directory, self._copies):
            if storage is not None:
                storage.close()
        self._stores.clear()
        self._handlers.clear()
        if self._arena is not None:
            self._arena.close()

    def handle_hello(self, client: _ClientConnection, header: MessageHeader, body: memoryview) -> None:
        """Take in the first message of a worker; raises WireError if it is no HELLO."""
        if header.kind != MessageKind.HELLO:
            raise WireError(f"{client.line.name}: the first message is a {MessageKind(header.kind).name}, not HELLO")
        hello = HELLO_CODEC.decode(bytes(body))
        if hello.number != client.worker or not 0 <= hello.number < self._context.num_workers:
            raise WireError(f"{client.line.name}: says that it is worker {hello.number}")
        self._handle_membership_events()  # so that what led to a replacement is known before it
        staleness = math.inf if hello.staleness is None else hello.staleness
        store = self._store(header.store, staleness)
        try:
            if hello.incarnation in self._context.roster.excluded:
                raise PeerLostError(
                    f"worker {hello.number} on host {hello.host} was given up by the others", ranks=[hello.number]
                )
            if staleness != store.staleness:
                raise MismatchError(
                    "the workers do not agree on the type of the store",
                    ranks=[hello.number],
                    details={hello.number: f"a staleness of {staleness}; the first worker said {store.staleness}"},
                )
            unread = self._unread.get((hello.number, hello.incarnation))
            if unread or not self.host_id:
                peer, reason = None, unread or "it is turned off"
            else:
                peer, reason = PeerShmArena.open(hello, self.host_id)
        except ReigenError as error:
            problem = RemoteError.of(error)
            client.notify(header.store, ServerNotice("problem", hello.number, hello.host, problem.reason, problem))
            self._flush(client)
            return
        _log.info("worker %d on host %s is here, in store %d; shared memory: %s", hello.number, hello.host,
                  header.store, reason)  # fmt: skip
        connection = WorkerConnection(hello, header.store, client.line, self._context.memory, peer)
        for other in list(self._connections):
            if other.worker == hello.number and other.connection is not None and other.connection.store == header.store:
                self._drop(other)  # its end has not been noticed yet
        client.connection = connection
        client.handler = self._handlers.setdefault(header.store, RequestHandler(store))
        client.handler.num_requests = self._num_requests
        self._listener.confirm(client.accepted)
        store.connected(connection)
        welcome = HELLO_CODEC.encode(self._hello(store, shares=peer is not None))
        connection.send(MessageHeader(MessageKind.WELCOME, store=header.store, body_bytes=len(welcome)), welcome)
        if unread:
            client.notify(header.store, ServerNotice("unread", hello.number, hello.host, unread))

    def samples(self) -> Iterator[MetricSample]:
        """Yield the metrics of this server; any thread."""
        for kind, count in list(self._num_requests.items()):
            yield "reigen_server_requests_total", (MessageKind(kind).name.lower(),), count
        shards = [(number, each) for number, store in list(self._stores.items()) for each in list(store.shards)]
        yield "reigen_server_keys", (), len({(number, key) for number, (key, _) in shards})
        if self._arena is not None:
            yield "reigen_memory_bytes", ("arena",), self._arena.segment.size

    # ---- the loop

    def _turn(self) -> None:
        now = time.monotonic()
        due = min([self._next_tick, *([self._next_snapshot] if self._next_snapshot else [])])
        if self._waiting:
            due = min(due, now + SILENT_SECONDS)
        timeout = 0.0 if self._busy else max(0.0, due - now)
        self._loop.wait(timeout)
        for client in list(self._busy):
            self._receive(client)
        for client in list(self._waiting):
            self._throttle(client)
        for store in self._stores.values():
            store.save()  # before it is announced
        for client in list(self._connections):
            if client.connection is not None and client.connection.must_flush and not self._is_held(client):
                client.connection.must_flush = False
                self._flush(client)
        now = time.monotonic()
        if now >= self._next_tick:
            self._tick(now)
        if self._next_snapshot and now >= self._next_snapshot:
            self._next_snapshot = self._snapshot_time()
            for store in self._stores.values():
                store.save_all()

    def _tick(self, now: float) -> None:
        is_late, self._next_tick = now > self._next_tick + _MOST_LATE_SECONDS, now + self._tick_seconds
        layouts = [store.layout_version for store in self._stores.values()]
        if layouts != self._reported_layouts:
            self._reported_layouts = layouts
            names = {shard.spec.name for store in self._stores.values() for shard in store.shards.values()}
            self._member.report_keys(describe_keys(names))
        # this process did not run: what workers sent meanwhile comes first, once
        self._is_behind = is_late and not self._is_behind
        if self._is_behind:
            return
        for store in self._stores.values():
            store.expire()
        before = now - self._stalls.seconds
        waiting = [one for store in self._stores.values() for one in store.waiting(before)]
        if text := self._stalls.report(waiting, now):
            _log.warning("%s", text)

    def _is_held(self, client: _ClientConnection) -> bool:
        """Return whether a connection's answers must wait until the facts of its store are saved."""
        if client.connection is None or self._context.snapshots is None:
            return False
        store = self._stores[client.connection.store]
        return store.is_saving or store.must_save

    def _on_authenticated(self, accepted: Connection) -> Callback | None:
        worker, drops = accepted.peer.rank, None
        if self._config.kv_drop_percent:
            drops = MessageDropper(self._config.kv_drop_percent, self._member.number * 1009 + worker)
        try:
            if accepted.peer.purpose == COPIES_PURPOSE and self._copies is not None:
                check_owner(accepted.peer, self._member.number, self._member.num_servers)
                return self._holder.accept(accepted)
            if accepted.peer.purpose != PURPOSE:
                raise WireError(f"process {worker} connects for {accepted.peer.purpose!r}")
            client = _ClientConnection(self, accepted, drops, self._config.kv_verbose >= 2)
        except (WireError, OSError) as error:
            _log.info("a connection came to nothing: %s", error)
            accepted.close()
            return None
        self._connections.add(client)
        if not self._is_fetching:
            self._watch(client)
            self._busy.add(client)
        return partial(self._drop, client)

    def _receive(self, client: _ClientConnection) -> None:
        if client not in self._connections:
            self._busy.discard(client)
            return
        try:
            (self._busy.add if client.line.receive() else self._busy.discard)(client)
        except (ReigenError, OSError) as error:
            is_unread = self._note_unread(client)
            self._lose(client, ConnectionAbortedError("to go on without shared memory") if is_unread else error)
            return
        except MemoryError as error:
            reason = (
                f"has not enough memory ({str(error) or 'MemoryError'}). Give it more (its host, ulimit -v, its "
                "control group), or use more servers, on other hosts"
            )
            self._break_off(client, error, reason)
            return
        except Exception as error:  # noqa: BLE001 - the store may be half changed; the other stores are not
            _log.exception("a message of worker %d has met a bug of this server", client.worker)
            reason = f"has a bug: {type(error).__name__}: {error}. Its log has the traceback; please report it"
            self._break_off(client, error, reason)
            return
        client.heard_at = time.monotonic()
        if self._limits_senders and client.connection is not None:
            client.window.bound(client.line.num_received_bytes, client.heard_at)
            if client.connection.num_held_bytes > MAX_LEAD_BYTES:
                self._throttle(client)

    def _throttle(self, client: _ClientConnection) -> None:
        """Have a client wait for others, or go on, as `reigen.kv.server.flow_control` says."""
        connection, waits = client.connection, client in self._waiting
        assert connection is not None
        others = [
            (one.connection.num_held_bytes, one.heard_at)
            for one in self._connections
            if one is not client and one.connection is not None and one.connection.store == connection.store
        ]
        must, _ = should_pause(connection.num_held_bytes, others, waits=waits, now=time.monotonic())
        if must == waits:
            return
        (self._waiting.add if must else self._waiting.discard)(client)
        (self._busy.discard if must else self._busy.add)(client)  # something may have been read ahead
        self._watch(client)

    def _flush(self, client: _ClientConnection) -> None:
        if client not in self._connections:
            return
        if client.connection is not None and self._is_held(client):
            client.connection.must_flush = True
            self._watch(client)  # not for the time when it is writable, which it is
            return
        try:
            client.line.advance_sends()
        except ConnectionError as error:
            self._lose(client, error)
            return
        self._watch(client)

    def _watch(self, client: _ClientConnection) -> None:
        """Have the loop wait for the events that the connection needs now."""
        reads, writes = client not in self._waiting, client.line.wants_to_send and not self._is_held(client)
        if reads or writes:
            receive = partial(self._receive, client) if reads else None
            self._loop.watch(client.line, receive, partial(self._flush, client) if writes else None)
        else:
            self._loop.unwatch(client.line)

    def _note_unread(self, client: _ClientConnection) -> bool:
        """Return whether this process could not map a worker's memory: its next connection does without."""
        connection = client.connection
        if connection is None or connection.peer is None or not connection.peer.problem:
            return False
        who = f"server {self._member.number} on host {self._member.host}"
        reason = (
            f"{who} cannot read the memory of worker {client.worker}: {connection.peer.problem}. "
            f"{explain_mapping_failure('that server')}"
        )
        self._unread[client.worker, connection.hello.incarnation] = reason
        _log.warning("%s", reason)
        return True

    def _break_off(self, client: _ClientConnection, error: Exception, reason: str) -> None:
        """Break the store of a connection off, on all workers, and drop the connection."""
        if client.connection is not None:
            text = f"server {self._member.number} on host {self._member.host} {reason}"
            self._stores[client.connection.store].break_off(RemoteError("CollectiveError", text))
            self._flush(client)
        self._lose(client, error)

    def _lose(self, client: _ClientConnection, error: Exception) -> None:
        """Log why a connection is over, by itself or because of what came, and drop it."""
        host = "" if client.connection is None else f" on host {client.connection.hello.host}"
        header = client.line.receiving
        where = "" if header is None else f", in the middle of a {MessageKind(header.kind).name} of key id {header.key}"
        level = logging.INFO if isinstance(error, ConnectionError) else logging.WARNING
        _log.log(level, "the connection of worker %d%s has ended%s: %s", client.worker, host, where, str(error))
        self._drop(client)

    def _drop(self, client: _ClientConnection) -> None:
        self._connections.discard(client)
        self._busy.discard(client)
        self._waiting.discard(client)
        self._listener.confirm(client.accepted)
        self._loop.unwatch(client.line)
        if client.connection is not None:
            self._stores[client.connection.store].disconnected(client.connection)
        client.line.close()

    def _handle_membership_events(self) -> None:
        """Take in what has happened to workers, and the end of the job."""
        events, self._early_events = [*self._early_events, *self._events.take()], []
        for event in events:
            if isinstance(event, MemberReturned) and event.role == "server":
                self._server_returned(event)
            is_failure = isinstance(event, JobEnded) and event.exit_code != 0
            _log.log(logging.ERROR if is_failure else logging.INFO, "the scheduler says: %s", event)
            if isinstance(event, JobEnded):
                self._exit_code = event.exit_code
            elif self._is_elastic:
                self._follow(event)
            elif isinstance(event, MemberLost) and event.role == "worker":
                self._lost[event.number] = event
                for store in self._stores.values():
                    store.lost(event.number, event.host, event.reason, event.incarnation)
            elif isinstance(event, MemberReturned) and event.role == "worker":
                self._lost.pop(event.number, None)
                for store in self._stores.values():
                    if store.incarnations.get(event.number) == event.incarnation:
                        store.found(event.number, event.host)
            elif isinstance(event, MemberLeft) and event.role == "worker":
                for store in self._stores.values():
                    store.has_left(event.number, event.host)

    def _server_returned(self, event: MemberReturned) -> None:
        """Have the copy made anew where this server's backup is another process."""
        if self._copies is None or event.number != self._copies.backup().number:
            return
        stores = self._stores.values()
        shards = [(store.number, shard) for store in stores for shard in store.shards]
        self._copies.copy_anew(event.incarnation, [*shards, *((store.number, None) for store in stores)])
        for store in stores:
            store.save_anew()
        if not stores:  # or it would not know that this server has lost nothing with it
            copies = self._copies
            self._workers.begin(lambda _: copies.announce(event.incarnation), lambda _: None)

    def _follow(self, event: MembershipEvent) -> None:
        """Take in what has happened to workers of an elastic job."""
        roster, stores = self._context.roster, self._stores.values()
        if isinstance(event, WorkerRoster):
            is_first = not roster.has_begun
            present = dict(zip(event.workers, event.incarnations, strict=True))
            roster.begin(present, is_open=event.is_open)
            for store in stores:
                if is_first and roster.has_begun and store.number in self._restored:
                    roster.excluded.update(store.find_lost(present))
                store.begin()
        elif isinstance(event, MemberReturned) and event.role == "worker":
            roster.join(event.number, event.incarnation)
        elif isinstance(event, MemberLeft) and event.role == "worker":
            roster.remove(event.number, event.incarnation)
            for store in stores:
                if store.incarnations.get(event.number, event.incarnation) == event.incarnation:
                    store.has_left(event.number, event.host)
        elif isinstance(event, MemberLost) and event.role == "worker":
            roster.remove(event.number, event.incarnation)
            roster.excluded.add(event.incarnation)
            for client in list(self._connections):
                if client.connection is not None and client.connection.hello.incarnation == event.incarnation:
                    self._drop(client)
            for store in stores:
                store.lost(event.number, event.host, event.reason, event.incarnation)

    # ---- stores

    def _leave_snapshots(self) -> None:
        """Remove the snapshots at the end of the job; those of a job that failed stay."""
        snapshots = self._directory
        if snapshots is None:
            return
        some_lost = self._lost or any(store.losses for store in self._stores.values())
        if self._exit_code == 0 and not some_lost:
            try:
                snapshots.remove()
            except OSError as error:
                _log.warning("the snapshots in %s could not be removed: %s", snapshots.directory, error.strerror)
        elif not snapshots.remove_if_empty():
            _log.warning("the job has failed; its last snapshots stay in %s, and no other job reads them",
                         snapshots.directory)  # fmt: skip

    def _snapshot_time(self) -> float:
        """Return when the next snapshot is due; 0.0: never, or with every acknowledgement."""
        seconds = self._config.kv_snapshot_seconds
        return time.monotonic() + seconds if self._context.snapshots is not None and seconds else 0.0

    def _store(self, number: int, staleness: float) -> ServerStore:
        if number not in self._stores:
            self._stores[number] = ServerStore(number, staleness, self._context)
            for event in self._lost.values():
                self._stores[number].lost(event.number, event.host, event.reason)
        return self._stores[number]

    def _hello(self, store: ServerStore, *, shares: bool) -> KVHello:
        staleness = None if math.isinf(store.staleness) else int(store.staleness)
        is_empty = not store.shards and store.number not in self._restored
        member = self._member
        hello = KVHello(member.number, member.incarnation, member.host, is_empty=is_empty, staleness=staleness)
        return self._arena.announced(hello, self.host_id) if shares and self._arena is not None else hello

    def _fetch(self, copies: ServerCopies) -> None:
        """Get the copy of the process before this one; other servers may ask for theirs meanwhile, workers wait."""
        self._is_fetching, ended = True, list[BaseException | None]()
        self._loop.watch(self._workers.fileno(), self._workers.collect)
        self._workers.begin(lambda _: copies.fetch(), ended.append)
        while not ended:
            self._loop.wait(_TICK_SECONDS)
            self._early_events += self._events.take()
            if any(isinstance(event, JobEnded) for event in self._early_events):
                copies.give_up()
        self._is_fetching = False
        for client in self._connections:
            self._watch(client)
            self._busy.add(client)
        if ended[0] is not None:
            raise ended[0]

    def _restore(self, snapshots: SnapshotStorage) -> None:
        """Take the place of the process that this server was before, if there was one."""
        try:
            if self._copies is not None and self._member.is_recovery:
                self._fetch(self._copies)
            for number, facts, shards in snapshots.load():
                store = ServerStore(number, math.inf if facts.staleness is None else facts.staleness, self._context)
                store.restore(facts, shards)
                self._stores[number] = store
                self._restored.add(number)
                _log.info("store %d is restored from a snapshot: %d shards", number, len(store.shards))
        except (ReigenError, OSError):
            self.close()
            raise
