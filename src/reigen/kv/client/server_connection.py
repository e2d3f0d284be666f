"""Connection of a worker to one server, and the requests that this server owes an answer: across reconnections.

The steps, after `connect`:

a. HELLO leaves; WELCOME says whether both ends share memory.
b. After a reconnection RESUME tells the server how far this worker is, since the server may be another process that
   goes on from a snapshot. Then everything that was not answered is sent again, in its order.
c. Requests leave as they come. With PS_RESEND, one of which nothing was heard in time is sent again, or asked about
   once the server has said that it has it.

A connection that is lost is made again at once. Where one after the other is lost before it has led to anything, pauses
become longer, and the time without a connection counts from the first of them.

Nothing here blocks. The owner (`reigen.kv.client.worker`) waits for the socket, and keeps the time.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from msgspec import structs

from reigen.api.adapter import Array
from reigen.cluster.membership.messages import ServerInfo
from reigen.cluster.membership.rendezvous import split_address
from reigen.config import Config
from reigen.errors import AuthenticationError, ReigenError, WireError
from reigen.kv.client.requests import BatchRequest, ByteArray, ClientRequest
from reigen.kv.connection import KVConnection, MessageDropper
from reigen.kv.membership.scheduler_client import SchedulerClient
from reigen.kv.protocol import (
    HELLO_CODEC,
    MAX_CONTROL_BYTES,
    NOTICE_CODEC,
    PURPOSE,
    PUSH_KINDS,
    REMOTE_ERROR_CODEC,
    KVHello,
    MessageFlag,
    MessageHeader,
    MessageKind,
    ServerNotice,
    pack_counts,
)
from reigen.kv.receive_window import MAX_ANSWER_ROUND_TRIP_SECONDS, ReceiveRate, ReceiveWindow
from reigen.kv.shm_arena import PeerShmArena, explain_mapping_failure
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import HANDSHAKE_ENDED_TEXT, Connection, ConnectionOptions

_log = logging.getLogger(__name__)

#: For the server's host to accept a connection. Its process may come to it much later, when it has restored its
#: snapshots: if it hangs, or its host goes, the scheduler or the kernel says so.
_CONNECT_SECONDS = 2.0
#: The pause behind one that fails; behind several connections that led to nothing it doubles, up to the second.
_BETWEEN_ATTEMPTS_SECONDS, _MOST_BETWEEN_SECONDS = 0.1, 2.0
#: A connection that has lasted so long was one, whether anything was answered or not.
_SETTLED_SECONDS = 5.0
#: The time after which a request is sent again doubles so many times.
_MOST_DOUBLINGS = 4
#: Answers in the server's memory that are given back together at most, and so many bytes: it needs memory for the next.
_MOST_COPIED, _MOST_COPIED_BYTES = 64, 4 << 20
#: Above all priorities of requests.
_FIRST = 1 << 31
#: A process that cannot prove to be the server may be one that is about to end, for that long.
_REPLACED_SECONDS = 1.0
#: The largest answer for which no call waits any more, which has to be read all the same.
_MAX_LATE_BYTES = 1 << 31
# As plain numbers: headers are looked at for every message, and enumerations are slow.
_ENCODED, _IN_MEMORY, _UNKNOWN = int(MessageFlag.ENCODED), int(MessageFlag.IN_MEMORY), int(MessageFlag.UNKNOWN)
_WELCOME, _NOTICE, _RECEIVED, _VALUE, _ERROR = map(
    int, (MessageKind.WELCOME, MessageKind.NOTICE, MessageKind.RECEIVED, MessageKind.VALUE, MessageKind.ERROR)
)
_ANSWERS = frozenset({_VALUE, _ERROR, int(MessageKind.DONE), int(MessageKind.DECLARED)})


class ServerConnectionOwner(Protocol):
    """Owner of the connections."""

    def over(self, request: ClientRequest) -> None:
        """Take back a request that has been answered; its operation knows already if that was an error."""

    def key_completed(self, batch: BatchRequest, place: int, *, is_done: bool) -> None:
        """Note that one key of a batch has been answered by itself; errors as of `over`."""

    def handle_notice(self, notice: ServerNotice) -> None:
        """Take note of a server's NOTICE."""

    def counts(self, server: int) -> Iterable[tuple[int, int, int]]:
        """Yield for RESUME: (key, shard, pushes of it that were answered), of all shards of that server."""

    def server_lost_state(self, connection: ServerConnection) -> None:
        """Raise an error if a server that is empty now should not be."""


class ServerConnection:
    """Connection to a server. One thread at a time may use it.

    Args:
        peer: see below.
        member, config, store: as of `reigen.kv.client.worker.KVWorker`.
        hello: the worker's first message.
        owner: gets what comes.
        inflow: of this worker, from all servers; None: windows are the kernel's (`reigen.kv.receive_window`).

    Attributes:
        peer: the server, where it is now.
        is_ready: requests are sent as they come.
        incarnation: of the process that said WELCOME last, 0 before.
        lost_since: when the connection ended, or the first of several that led to nothing, on the clock of
            ``time.monotonic()``; None while there is one.
        last_error: what ended it, or what the last attempt to make another met.
        outstanding: what is not answered, by its id, in the order in which it was asked.
    """

    def __init__(
        self,
        peer: ServerInfo,
        member: SchedulerClient,
        config: Config,
        hello: KVHello,
        store: int,
        owner: ServerConnectionOwner,
        inflow: ReceiveRate | None = None,
    ) -> None:
        self.peer = peer
        self.is_ready = False
        self.incarnation = 0
        self.lost_since: float | None = time.monotonic()
        self.last_error: Exception | None = None
        self.outstanding: dict[int, ClientRequest] = {}
        self._member, self._config, self._own_hello, self._store, self._owner = member, config, hello, store, owner
        #: after how long a request is sent again; None: never
        self._resend_seconds = config.kv_resend_timeout_ms / 1000 if config.kv_resend else None
        self._line: KVConnection | None = None
        self._inflow = inflow
        self._window: ReceiveWindow | None = None
        self._arena: PeerShmArena | None = None
        #: the server reads this process's arena
        self._is_read = False
        self._num_requests = 0
        #: the id of a RESUME that is not answered, and when it was sent
        self._resuming = 0
        self._resume_sent_at = 0.0
        #: answers that lay in the server's arena and have been copied out, and their size
        self._copied: list[int] = []
        self._num_copied_bytes = 0
        #: the next connection, until both ends are proven; not before that
        self._attempt: Connection | None = None
        self._attempt_until = 0.0
        self._retry_at = 0.0
        #: when the connection was made; it has led to an answer; how many before it in a row did not, and since when
        self._made_at, self._is_proven = 0.0, False
        self._num_failed, self._failing_since = 0, self.lost_since
        #: this process can map what the server shares
        self._reads_memory = True
        #: why the server does not read that of this worker
        self._unread = ""
        #: until when a failed handshake may be that of a server that ended just then
        self._accept_failed_auth_until = 0.0
        self._counters = member.counters
        self._drops = MessageDropper(config.kv_drop_percent, seed=member.number * 1009 + peer.number)

    @property
    def name(self) -> str:
        """Name in messages for people."""
        return f"server {self.peer.number} on host {self.peer.host}"

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 without a connection, and without an attempt to make one."""
        if self._line is None:
            return -1 if self._attempt is None else self._attempt.fileno()
        return self._line.fileno()

    @property
    def is_connecting(self) -> bool:
        return self._attempt is not None

    @property
    def wants_to_send(self) -> bool:
        """Return whether `flush` would do something once the socket is writable."""
        if self._line is None:
            return self._attempt is not None and self._attempt.num_unsent_bytes > 0
        return self._line.wants_to_send

    # -- the connection -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Begin to connect, if it is time; without success, `lost_since` stays. `receive` goes on with it.

        Raises AuthenticationError if the server does not know the secret.
        """
        now = time.monotonic()
        if self._line is not None:
            return
        if self._attempt is not None:
            if now >= self._attempt_until and not _is_connected(self._attempt.socket):
                self._give_up(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
            return
        if now < self._retry_at:
            return
        member, me = self._member, Identity(ProcessRole.RANK, self._member.number, PURPOSE)
        silence = self._config.peer_timeout_seconds
        options = ConnectionOptions(member.secret, me, MAX_CONTROL_BYTES, member.tls, silence, bulk=True)
        try:
            self._attempt = options.start_connecting(split_address(self.peer.address))
        except OSError as error:
            self._give_up(error)
        self._attempt_until = now + _CONNECT_SECONDS

    def _shake_hands(self, attempt: Connection) -> None:
        """Go on with an attempt; behind it, say HELLO."""
        try:
            if not attempt.advance():
                return
            tcp = attempt.socket
            connection, session = attempt.detach()
        except (OSError, AuthenticationError) as error:
            self._give_up(error)
            return
        self._attempt, self._accept_failed_auth_until = None, 0.0
        logs = self._config.kv_verbose >= 2
        self._line = KVConnection(connection, session, self, self.name, drops=self._drops, log_messages=logs)
        if self._inflow is not None:
            self._window = ReceiveWindow(tcp, self.peer.number, self._inflow, MAX_ANSWER_ROUND_TRIP_SECONDS)
        self.lost_since, self._made_at, self._is_proven = None, time.monotonic(), False
        hello = HELLO_CODEC.encode(structs.replace(self._own_hello, resumes=bool(self.incarnation)))
        self._line.send(MessageHeader(int(MessageKind.HELLO), store=self._store, body_bytes=len(hello)), hello)
        self.flush()

    def _give_up(self, error: Exception) -> None:
        """An attempt has failed."""
        self._end_attempt()
        if isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError):
            error = AuthenticationError(HANDSHAKE_ENDED_TEXT)
        self.last_error = error
        now = time.monotonic()
        self._retry_at = now + _BETWEEN_ATTEMPTS_SECONDS
        if not isinstance(error, AuthenticationError):
            self._accept_failed_auth_until = 0.0  # no process is there that could fail to prove anything
            return
        self._accept_failed_auth_until = self._accept_failed_auth_until or now + _REPLACED_SECONDS
        if now > self._accept_failed_auth_until:
            raise error

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    def moved(self, peer: ServerInfo) -> None:
        """The server is another process now, perhaps at another address."""
        if peer != self.peer:
            self.lose(ConnectionResetError(f"the server moved to {peer.address}"))
            self.peer = peer
            self.lost_since = self._failing_since = time.monotonic()
            self._retry_at, self._num_failed, self._reads_memory = 0.0, 0, True
            self._accept_failed_auth_until = 0.0

    def lose(self, error: Exception) -> None:
        """End the connection; unanswered requests are kept, and sent again over the next one."""
        self.last_error = error
        self._end_attempt()
        if self._line is not None:
            _log.log(logging.INFO, "the connection to %s has ended: %s", self.name, error)
            self._line.close()
            self._line = self._window = None
            self._note_loss(time.monotonic())
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self.is_ready = self._is_read = False
        self._resuming = 0
        self._copied.clear()
        self._num_copied_bytes = 0

    def _note_loss(self, now: float) -> None:
        """Note since when there was no connection that led to anything, and when to make another."""
        if self._is_proven or now - self._made_at >= _SETTLED_SECONDS:
            self._num_failed, self._failing_since = 0, now
        else:
            pause = _BETWEEN_ATTEMPTS_SECONDS * 2 ** min(self._num_failed, _MOST_DOUBLINGS + 1)
            self._retry_at = now + min(pause, _MOST_BETWEEN_SECONDS)
            self._num_failed += 1
        self.lost_since = self._failing_since

    def close(self) -> None:
        """Close the connection for good. May be called twice."""
        self.lose(ConnectionAbortedError("closed by this worker"))

    def close_descriptors(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
        if self._line is not None:
            self._line.close()

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: ClientRequest) -> None:
        """Queue a request; `flush` has it leave."""
        request.header = structs.replace(request.header, request=self._num_requests + 1, store=self._store)
        self._num_requests += request.num_ids
        self.outstanding[request.header.request] = request
        if self.is_ready:
            self._send(request)

    def flush(self) -> None:
        """Send as much as the kernel takes now.

        Memory that was copied out is given back with it, or when there is much of it or nothing more to come: a message
        of its own for each value would cost both ends more than the memory is worth.
        """
        if self._line is None:
            return
        is_much = len(self._copied) >= _MOST_COPIED or self._num_copied_bytes >= _MOST_COPIED_BYTES
        if self._copied and (is_much or self._line.wants_to_send or not self.outstanding):
            body = np.array(self._copied, "<u8").tobytes()
            self._copied.clear()
            self._num_copied_bytes = 0
            header = MessageHeader(int(MessageKind.RELEASE), store=self._store, body_bytes=len(body))
            self._line.send(header, body, priority=_FIRST)  # before a push that changes what was read
        if self._line.wants_to_send:
            self._guarded(self._line.advance_sends)

    def receive(self) -> None:
        """Take the messages that have come."""
        if self._attempt is not None:
            self._shake_hands(self._attempt)
        while self._line is not None and self._guarded(self._line.receive):
            pass
        if self._window is not None and self._line is not None:
            window, num_bytes, now = self._window, self._line.num_received_bytes, time.monotonic()
            self._guarded(lambda: window.bound(num_bytes, now))

    def resend(self, now: float) -> float | None:
        """Send again, or ask about, what nothing was heard of for too long; returns when to call this again."""
        interval = self._resend_seconds
        if interval is None:
            return None
        if self._resuming:
            if self._resume_sent_at + interval <= now:
                self._ask_where_it_is()
            return self._resume_sent_at + interval
        due: float | None = None
        for request in self.outstanding.values():
            if not (request.sent_at and self.is_ready):
                continue
            # a server that is slow is not made faster by questions
            if request.sent_at + interval * (1 << min(request.num_retries, _MOST_DOUBLINGS)) <= now:
                request.num_retries += 1
                self._retry(request, now)
            if not request.sent_at:
                continue
            when = request.sent_at + interval * (1 << min(request.num_retries, _MOST_DOUBLINGS))
            due = min(due or when, when)
        return due

    def _retry(self, request: ClientRequest, now: float) -> None:
        if request.is_received and self._line is not None:
            request.sent_at = now
            self._line.send(request.query(), priority=request.header.priority)
        else:
            self._send(request, again=True)

    def _send(self, request: ClientRequest, *, again: bool = False) -> None:
        if self._line is None:
            return
        header, body = request.message(is_read=self._is_read, can_read=self._arena is not None, again=again)
        request.is_received = False
        if header.kind in PUSH_KINDS:
            is_memory = bool(header.flags & _IN_MEMORY)
            self._counters.pushed(header.memory_bytes if is_memory else len(body), is_memory=is_memory)
        if self._resend_seconds is None:
            request.sent_at = time.monotonic()
            self._line.send(header, body, priority=request.header.priority)
            return
        request.sent_at = 0.0  # what waits for its turn on the wire is not lost

        def left() -> None:
            request.sent_at = time.monotonic()

        self._line.send(header, body, priority=request.header.priority, on_sent=left)

    # -- what arrives -------------------------------------------------------------------------------------------------

    def place(self, line: KVConnection, header: MessageHeader) -> memoryview:
        """Return the place of a value."""
        nbytes = header.body_bytes
        request = self.outstanding.get(header.request)
        if header.kind == _VALUE and request is not None:
            if request.into is None or header.flags & _ENCODED:
                return memoryview(bytearray(nbytes))
            return self._place_in(request.into, nbytes)
        if header.kind == _VALUE and (part := self._part(header.request)) is not None:
            return self._place_in(self._out_of(*part), nbytes)
        if nbytes > _MAX_LATE_BYTES:
            raise WireError(f"{self.name} sent {nbytes} bytes that were not requested")
        return memoryview(bytearray(nbytes))

    def arrived(self, line: KVConnection, header: MessageHeader, body: memoryview) -> None:
        if header.kind == _WELCOME:
            self._welcomed(HELLO_CODEC.decode(bytes(body)))
        elif header.kind == _NOTICE:
            notice = NOTICE_CODEC.decode(bytes(body))
            if notice.what != "unread":
                self._owner.handle_notice(notice)
            elif notice.reason != self._unread:  # that is said on each connection
                self._unread = notice.reason
                _log.warning("%s", notice.reason)
        elif self._resuming and header.request == self._resuming:
            self._resumed(header, body)
        elif header.kind == _RECEIVED:
            self._received(header)
        elif header.kind in _ANSWERS:
            self._answered(header, body)
        else:
            raise WireError(f"{self.name} sent a {MessageKind(header.kind).name}, which only workers send")

    def _welcomed(self, hello: KVHello) -> None:
        if hello.number != self.peer.number:
            raise WireError(f"{self.peer.address} is server {hello.number}, not server {self.peer.number}")
        is_first, self.incarnation = not self.incarnation, hello.incarnation
        own = self._own_hello
        if not own.host_id or not self._reads_memory:
            self._arena, reason = None, "switched off here" if not own.host_id else "this process cannot map it"
        else:
            self._arena, reason = PeerShmArena.open(hello, own.host_id)
        self._is_read = bool(own.host_id and hello.host_id)
        _log.info("connected to %s at %s; its memory is %s here: %s", self.name, self.peer.address,
                  "read" if self._arena is not None else "not read", reason)  # fmt: skip
        if is_first:
            self._begin()
            return
        if hello.is_empty:
            self._owner.server_lost_state(self)
        self._num_requests += 1
        self._resuming = self._num_requests
        self._ask_where_it_is()

    def _ask_where_it_is(self) -> None:
        counts = pack_counts(self._owner.counts(self.peer.number))
        header = MessageHeader(int(MessageKind.RESUME), self._resuming, store=self._store, body_bytes=len(counts))
        self._resume_sent_at = time.monotonic()
        if self._line is not None:
            self._line.send(header, counts)

    def _resumed(self, header: MessageHeader, body: memoryview) -> None:
        if header.kind == _RECEIVED:
            return
        self._resuming = 0
        if header.kind == _ERROR:
            raise REMOTE_ERROR_CODEC.decode(bytes(body)).raised()
        self._begin()

    def _begin(self) -> None:
        self.is_ready = True
        for request in self.outstanding.values():
            self._send(request, again=bool(request.sent_at or request.num_retries))

    def _received(self, header: MessageHeader) -> None:
        request = self.outstanding.get(header.request)
        if request is None:
            return
        if header.flags & _UNKNOWN:
            self._send(request, again=True)
        else:
            request.is_received = True

    def _place_in(self, into: Array, nbytes: int) -> memoryview:
        if into.nbytes == nbytes:
            return into.view(np.uint8).data
        raise WireError(f"{self.name} sent a value of {nbytes} bytes where {into.nbytes} were asked for")

    def _copy_in(self, into: Array, data: memoryview) -> None:
        target: ByteArray = np.frombuffer(self._place_in(into, len(data)), np.uint8)
        target[:] = np.frombuffer(data, np.uint8)

    def _out_of(self, batch: BatchRequest, place: int) -> Array:
        if not batch.outs:
            raise WireError(f"{self.name} sent a value that was not requested")
        return batch.outs[place]

    def _part(self, number: int) -> tuple[BatchRequest, int] | None:
        """Return the batch, and the number of the key there, that an id belongs to, unless that was answered."""
        for batch in self.outstanding.values():
            place = number - batch.header.request - 1
            if isinstance(batch, BatchRequest) and 0 <= place < len(batch.numbers):
                return None if place in batch.alone else (batch, place)
        return None

    def _answered(self, header: MessageHeader, body: memoryview) -> None:
        request = self.outstanding.get(header.request)
        if header.kind == _VALUE:
            is_memory = bool(header.flags & _IN_MEMORY)
            self._counters.pulled(header.memory_bytes if is_memory else header.body_bytes, is_memory=is_memory)
        if header.flags & _IN_MEMORY:
            self._copied.append(header.request)
            self._num_copied_bytes += header.memory_bytes
        if request is None:
            if (part := self._part(header.request)) is not None:
                self._answered_in_part(*part, header, body)
            return  # or answered twice: it was sent twice
        if header.kind == _ERROR:
            request.operation.fail(REMOTE_ERROR_CODEC.decode(bytes(body)).raised())
        elif header.kind == _VALUE:
            self._take_value(request, header, self._in_memory(header) if header.flags & _IN_MEMORY else body)
        else:
            request.answer = bytes(body)
        self._over(request, header)

    def _answered_in_part(self, batch: BatchRequest, place: int, header: MessageHeader, body: memoryview) -> None:
        if header.kind == _ERROR:
            batch.operation.fail(REMOTE_ERROR_CODEC.decode(bytes(body)).raised())
        elif header.kind == _VALUE and header.flags & _IN_MEMORY:
            self._copy_in(self._out_of(batch, place), self._in_memory(header))
        self._owner.key_completed(batch, place, is_done=header.kind != _ERROR)
        if len(batch.alone) == len(batch.numbers):
            self._over(batch, header)

    def _over(self, request: ClientRequest, header: MessageHeader) -> None:
        """Give a request that was answered to the owner; one whose answer makes no sense stays outstanding."""
        self._is_proven = True
        request.answer_header = header
        del self.outstanding[request.header.request]
        self._owner.over(request)

    def _in_memory(self, header: MessageHeader) -> memoryview:
        if self._arena is None:
            raise WireError(f"{self.name} refers to memory that is not shared")
        try:
            return self._arena.view(header.offset, header.memory_bytes).data
        except OSError as error:  # what is asked over the next connection travels through it
            self._reads_memory = False
            _log.warning("this process cannot read the values of %s in memory: %s. %s", self.name, str(error),
                         explain_mapping_failure("this process"))  # fmt: skip
            raise

    def _take_value(self, request: ClientRequest, header: MessageHeader, data: memoryview) -> None:
        into = request.into
        if into is None:
            request.take(data)
        elif header.flags & _ENCODED:
            if request.codec is None:
                raise WireError(f"{self.name} sent an encoded value that was not requested")
            request.codec.decode(data, into)
        elif header.flags & _IN_MEMORY:
            self._copy_in(into, data)

    def _guarded(self, step: Callable[[], bool | None]) -> bool:
        """Do something with the line; a connection that has ended is no error here."""
        try:
            return bool(step())
        except OSError as error:
            self.lose(error)
        except ReigenError as error:
            self.lose(error)
            raise
        return False


def _is_connected(connection: socket.socket) -> bool:
    """Return whether the other host has accepted a connection, if not the process there."""
    try:
        connection.getpeername()
    except OSError:
        return False
    return True
