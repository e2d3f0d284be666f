"""Copies of a server's shards in the memory of another server, its backup, from which it is started again.

The backup is the next server in order, on another host if there is one (`choose_backup`). What is copied are snapshots,
the same that `reigen.kv.server.snapshots` keeps on a disk, each before what it contains is acknowledged. So at any
moment what was acknowledged is in the memory of two processes, or of one while the other one is started again.

a. A server connects to its backup for `COPIES_PURPOSE`, from the threads that compute, which wait there; a thread that
   does I/O never waits for another server. If that process has no copy of this one yet, BEGIN_COPY comes first, until
   it is answered; with COMPLETE_COPY in ``about`` where there is nothing to copy: then the copy is complete at once.
b. COPY_SHARD and COPY_STORE replace the copy of a shard, or of the facts of a store; DROP_COPY removes that of a shard.
   COMPLETE_COPY says that all that there was at the beginning has been copied: only a complete copy can be taken up.
   Each of these is answered by DONE. A message that is not answered is sent again, over another connection.
c. A backup that has died is another process (`MemberReturned`): the server copies everything anew. Until then threads
   that have something to save wait, and with them the acknowledgements. So the second copy is never left out.
d. A server that is started again asks its backup by FETCH_COPY: each snapshot comes as a VALUE, then DONE, whose
   ``round`` says whether the copy `can be taken up`. If it cannot, because the backup has died, too, the job ends.
e. Each of these messages has the sender's incarnation in ``request``, and which of its connections this is in
   ``round``. From FETCH_COPY on the copy is that of the process which asked: the one before it may live, if it was
   only stopped, and is heard no more; nor is what comes late by an earlier connection.

A snapshot ends with a code by the job's secret, so that what comes back is what this server, or the process before it,
has copied. The backup reads nothing of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from reigen.cluster.membership.messages import ServerInfo
from reigen.cluster.membership.rendezvous import split_address
from reigen.errors import ConfigError, PeerLostError, ReigenError, WireError
from reigen.files import Buffer
from reigen.kv.connection import KVConnection
from reigen.kv.membership.scheduler_client import SchedulerClient
from reigen.kv.protocol import MessageHeader, MessageKind
from reigen.kv.server.shard import ShardId, ShardSnapshot
from reigen.kv.server.snapshots import LoadedShard, StoreSnapshot
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import Connection, open_connection
from reigen.net.event_loop import Callback, EventLoop, wait_ready
from reigen.optim import packed, unpacked

_log = logging.getLogger(__name__)

#: What the connections are for, in the handshake; the rank there is the number of the server whose copies they carry.
COPIES_PURPOSE = "kv copies"
#: How long one attempt to connect may take, the pause behind one that has failed, and how long to wait for an answer
#: before looking whether this server is to end, or the backup is another process by now.
_CONNECT_SECONDS, _AGAIN_SECONDS, _LOOK_SECONDS = 5.0, 0.1, 0.5
#: How long the backup may be away before there is a warning.
_WARN_SECONDS = 5.0
_MAX_HANDSHAKE_BYTES = 1 << 12
_TAG_BYTES = 32
#: In DONE, the answer to FETCH_COPY: the copy cannot be taken up, is complete, or there was never anything to copy.
_CANNOT, _IS_COMPLETE, _IS_EMPTY = 0, 1, 2
_COPY_SHARD, _COPY_STORE, _VALUE, _DONE = map(
    int, (MessageKind.COPY_SHARD, MessageKind.COPY_STORE, MessageKind.VALUE, MessageKind.DONE)
)

#: A shard of a store, or, with None, the facts of the store.
CopyItem = tuple[int, ShardId | None]


def choose_backup(server: int, hosts: Sequence[str]) -> int:
    """Return the number of a server's backup: the next one in order that is on another host, else the next one.

    Args:
        server: its number.
        hosts: of all servers, by number; at least two.
    """
    num = len(hosts)
    following = [(server + step) % num for step in range(1, num)]
    return next((one for one in following if hosts[one] != hosts[server]), following[0])


def check_owner(peer: Identity, server: int, num_servers: int) -> None:
    """Check who wants to be copied; raises WireError if it is no other server of the job.

    Args:
        peer: as it has proven.
        server: number of the one that is to keep the copy.
        num_servers: of the job.
    """
    if peer.role is not ProcessRole.RANK or not 0 <= peer.rank < num_servers or peer.rank == server:
        raise WireError(f"{peer.role.name.lower()} {peer.rank} wants to be copied, and is no other server of this job")


# ---------------------------------------------------------------- decisions


class CopyProgress:
    """Progress of a server's copy: which process has it, and whether it is complete. No I/O.

    Attributes:
        incarnation: of the backup's process that has the copy, or a part of it; 0: none has.
    """

    def __init__(self) -> None:
        self.incarnation = 0
        #: what the copy must have to be complete, and of which process of the backup; None: nothing was copied yet
        self._expected: tuple[int, frozenset[CopyItem]] | None = None
        self._copied: set[CopyItem] = set()
        self._is_announced = False

    def has_nothing(self, incarnation: int) -> bool:
        """Return whether there is nothing to copy to a process of the backup, before what will be saved."""
        return self._expected is None or self._expected == (incarnation, frozenset())

    def connect(self, incarnation: int) -> bool:
        """Note that a process of the backup begins with the copy, or has it; return whether it begins."""
        if incarnation == self.incarnation:
            return False
        if self._expected is None:
            self._expected = incarnation, frozenset()
        self.incarnation, self._is_announced = incarnation, False
        self._copied.clear()
        return True

    def adopt(self, incarnation: int, items: Iterable[CopyItem]) -> None:
        """Note that this server has been restored from the copy that this process has."""
        self.incarnation, self._is_announced = incarnation, True
        self._copied = set(items)
        self._expected = incarnation, frozenset()

    def expect(self, incarnation: int, items: Iterable[CopyItem]) -> None:
        """Note that the backup is another process: all these items are to be copied anew."""
        self._expected = incarnation, frozenset(items)

    def add(self, item: CopyItem) -> None:
        """Note that the backup has an item."""
        self._copied.add(item)

    def drop(self, item: CopyItem) -> None:
        """Note that there is no such item any more."""
        self._copied.discard(item)
        if self._expected is not None:
            self._expected = self._expected[0], self._expected[1] - {item}

    def is_stale(self, item: CopyItem) -> bool:
        """Return whether the copy that counts lacks an item."""
        return self._expected is None or self._expected[0] != self.incarnation or item not in self._copied

    def becomes_complete(self) -> bool:
        """Return whether the copy is complete, and that is to be said now; once for each process of the backup."""
        if self._is_announced or self._expected is None or self._expected[0] != self.incarnation:
            return False
        self._is_announced = self._expected[1] <= self._copied
        return self._is_announced


@dataclass
class HeldCopy:
    """Copy that a backup holds of another server.

    Attributes:
        snapshots: by item.
        is_complete: it can be taken up.
    """

    snapshots: dict[CopyItem, memoryview] = field(default_factory=dict)
    is_complete: bool = False


# ---------------------------------------------------------------- the server that is copied


class _CopyLine:
    """Connection to a backup, one request at a time; its caller waits.

    Args:
        peer: the backup.
        sender: incarnation of this process.
        number: which of its connections this is.
    """

    def __init__(self, connection: Connection, peer: ServerInfo, sender: int, number: int) -> None:
        self.incarnation, self._sender, self._number = peer.incarnation, sender, number
        stream, session = connection.detach()
        self._line = KVConnection(stream, session, self, f"server {peer.number} on host {peer.host}")
        self._answers: list[MessageHeader] = []
        self.values: list[tuple[MessageHeader, memoryview]] = []

    def place(self, line: KVConnection, header: MessageHeader) -> memoryview:
        return memoryview(bytearray(header.body_bytes if header.kind == _VALUE else 0))

    def arrived(self, line: KVConnection, header: MessageHeader, body: memoryview) -> None:
        if header.kind == _VALUE:
            self.values.append((header, body))
        elif header.kind == _DONE:
            self._answers.append(header)
        else:
            raise WireError(f"{line.name} answers with a {MessageKind(header.kind).name}")

    def ask(self, header: MessageHeader, body: Buffer, look: Callable[[], None]) -> MessageHeader:
        """Send a message and return the answer; raises OSError if the connection ends, and what ``look`` raises."""
        line, header = self._line, msgspec.structs.replace(header, request=self._sender, round=self._number)
        self._answers.clear()
        self.values.clear()
        line.send(header, memoryview(body))
        while not self._answers:
            line.advance_sends()
            events = select.POLLIN | (select.POLLOUT if line.wants_to_send else 0)
            if not wait_ready(line, _LOOK_SECONDS, events):
                look()
            while line.receive():
                pass
        return self._answers[0]

    def close(self) -> None:
        self._line.close()


class ServerCopies:
    """Snapshots of this server in its backup's memory. Any thread may save; only those that compute may wait.

    Args:
        member: the server's place in the job.
        peer_timeout_seconds: after which a host that is silent is given up.
    """

    #: saving waits for another process
    is_remote = True

    def __init__(self, member: SchedulerClient, peer_timeout_seconds: float) -> None:
        if member.num_servers < 2:
            raise ConfigError(
                "REIGEN_KV_REPLICAS=2 (--replicate-servers 2): the copies are in the memory of another server, and the "
                "job has only one; use at least two"
            )
        self._member, self._peer_timeout_seconds = member, peer_timeout_seconds
        self._progress = CopyProgress()
        #: guards the connection; and what is known
        self._sending, self._lock = threading.Lock(), threading.Lock()
        self._line: _CopyLine | None = None
        self._num_lines = 0
        #: when to warn that the backup is away
        self._warn_at = math.inf
        self._is_over = threading.Event()
        #: shards that are gone, and still are in the copy
        self._dropped: set[CopyItem] = set()
        self._fetched: dict[CopyItem, memoryview] = {}

    @property
    def place(self) -> str:
        """Description of where the snapshots are."""
        return "the memory of another server"

    # ---- saving

    def save_store(self, store: int, facts: StoreSnapshot) -> None:
        """Copy the facts of a store; raises OSError if this server ends."""
        self._save((store, None), packed(facts, {}))

    def save_shard(self, store: int, shard: ShardId, contents: list[Buffer]) -> None:
        """Copy a shard; raises OSError if this server ends."""
        self._save((store, shard), contents)

    def forget_shard(self, store: int, shard: ShardId) -> None:
        """Remove a shard from the copy, with the next message. Does not wait."""
        with self._lock:
            self._progress.drop((store, shard))
            self._dropped.add((store, shard))

    def is_stale(self, store: int, shard: ShardId | None) -> bool:
        """Return whether a shard, or the facts of a store, are to be copied once more."""
        with self._lock:
            return self._progress.is_stale((store, shard))

    def copy_anew(self, incarnation: int, items: Iterable[CopyItem]) -> None:
        """Note that the backup is another process, which is to have all these items. Does not wait."""
        with self._lock:
            self._progress.expect(incarnation, items)

    def announce(self, incarnation: int) -> None:
        """Tell this process of the backup that there was nothing to copy; raises OSError if this server ends."""
        with self._sending:
            self._ask(MessageHeader(MessageKind.COMPLETE_COPY), incarnation=incarnation)

    def backup(self) -> ServerInfo:
        """Return the backup, as it is to be found now; waits until all servers have come once."""
        servers = self._member.servers(time.monotonic() + _CONNECT_SECONDS)
        return servers[choose_backup(self._member.number, [each.host for each in servers])]

    def _save(self, item: CopyItem, contents: list[Buffer]) -> None:
        body = b"".join([*contents, self._tag(contents[-1])])
        store, shard = item
        key, index = shard or (0, 0)
        kind = _COPY_STORE if shard is None else _COPY_SHARD
        with self._sending:
            with self._lock:
                self._dropped.discard(item)
            self._ask(MessageHeader(kind, key=key, shard=index, store=store, body_bytes=len(body)), body)
            with self._lock:
                self._progress.add(item)
                incarnation = self._progress.incarnation if self._progress.becomes_complete() else 0
                dropped, self._dropped = self._dropped, set()
            for other, gone in dropped:
                if gone is not None:
                    self._ask(MessageHeader(MessageKind.DROP_COPY, key=gone[0], shard=gone[1], store=other))
            if incarnation:
                self._ask(MessageHeader(MessageKind.COMPLETE_COPY), incarnation=incarnation)

    def _tag(self, digest: Buffer) -> bytes:
        return hashlib.blake2b(digest, key=self._member.secret, digest_size=_TAG_BYTES).digest()

    def _ask(self, header: MessageHeader, body: Buffer = b"", incarnation: int = 0) -> MessageHeader:
        """Have the backup do something, however often it takes to reach it; or its process of one incarnation alone."""
        problem, self._warn_at = "", time.monotonic() + _WARN_SECONDS
        while not self._is_over.is_set():
            try:
                line = self._connected()
                if incarnation not in {0, self._progress.incarnation}:
                    return header
                return line.ask(header, body, self._look)
            except (OSError, ReigenError) as error:  # also a process that cannot prove anything: it is about to end
                self._disconnect()
                if problem != str(error):
                    problem = str(error)
                    _log.info("the copies of this server cannot be reached now: %s", problem)
                self._warn(problem)
                self._is_over.wait(_AGAIN_SECONDS)
        raise ConnectionAbortedError("this server ends")

    def _look(self) -> None:
        """Look whether an answer is to be waited for any longer; raises OSError if not."""
        if self._is_over.is_set():
            raise ConnectionAbortedError("this server ends")
        if self._line is None or self._line.incarnation != self.backup().incarnation:
            raise ConnectionResetError("the backup is another process by now")
        self._warn("it does not answer")

    def _warn(self, problem: str) -> None:
        if time.monotonic() >= self._warn_at:
            self._warn_at = math.inf
            _log.warning(
                "the backup of this server has been away for %g s, and pushes wait: %s", _WARN_SECONDS, problem
            )

    def _connected(self) -> _CopyLine:
        peer = self.backup()
        if self._line is not None and self._progress.incarnation == peer.incarnation:
            return self._line
        self._disconnect()
        member, me = self._member, Identity(ProcessRole.RANK, self._member.number, COPIES_PURPOSE)
        until = time.monotonic() + _CONNECT_SECONDS
        address = split_address(peer.address)
        connection = open_connection(address, member.secret, me, _MAX_HANDSHAKE_BYTES, until, member.tls)
        connection.keep_alive(self._peer_timeout_seconds, bulk=True)
        self._num_lines += 1
        line = self._line = _CopyLine(connection, peer, member.incarnation, self._num_lines)
        with self._lock:
            must_begin = self._progress.incarnation != peer.incarnation and not self._is_fetching
            about = int(MessageKind.COMPLETE_COPY) if self._progress.has_nothing(peer.incarnation) else 0
        if must_begin:
            line.ask(MessageHeader(MessageKind.BEGIN_COPY, about=about), b"", self._look)
        with self._lock:
            self._progress.connect(peer.incarnation)
        return line

    def _disconnect(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    # ---- taking up

    _is_fetching = False

    def fetch(self) -> None:
        """Get the copy of the process before this one, for `load`.

        Raises:
            PeerLostError: the backup has died, too, and has none.
            WireError: it is damaged.
        """
        self._is_fetching = True
        with self._sending:
            answer = self._ask(MessageHeader(MessageKind.FETCH_COPY))
            assert self._line is not None, "it has answered"
            values = list(self._line.values)
            self._is_fetching = False
            if answer.round == _CANNOT:
                raise PeerLostError(
                    f"what server {self._member.number} held is lost: its backup, server {self.backup().number}, has "
                    "died, too, before it had all of it again. REIGEN_KV_SNAPSHOT_DIR would have kept it"
                )
            for header, body in values:
                self._fetched[_item_of(header, header.about)] = body
            with self._lock:
                incarnation = self._progress.incarnation
                if answer.round == _IS_COMPLETE:
                    self._progress.adopt(incarnation, self._fetched)
                else:
                    self._progress = CopyProgress()
        self._disconnect()

    def load(self) -> Iterator[tuple[int, StoreSnapshot, Iterator[LoadedShard]]]:
        """Yield each store of the copy that was fetched: number, facts, and shards with their arrays."""
        fetched, self._fetched = self._fetched, {}
        for store in sorted(number for number, shard in fetched if shard is None):
            shards = [one for (number, shard), one in fetched.items() if number == store and shard is not None]
            facts = unpacked(self._checked(fetched[store, None]), StoreSnapshot)[0]
            yield store, facts, (unpacked(self._checked(one), ShardSnapshot) for one in shards)

    def _checked(self, body: memoryview) -> memoryview:
        contents, tag = body[:-_TAG_BYTES], body[-_TAG_BYTES:]
        if not hmac.compare_digest(self._tag(contents[-_TAG_BYTES:]), tag):
            raise WireError("the copy of this server is not what it had copied")
        return contents

    # ---- the end

    def give_up(self) -> None:
        """End all waiting for the backup. Any thread may call this."""
        self._is_over.set()

    def close(self) -> None:
        """End the connection. No thread may save any more. May be called twice."""
        self.give_up()
        self._disconnect()

    def remove(self) -> None:
        """Do nothing: memory leaves no files behind."""

    def remove_if_empty(self) -> bool:
        """Return whether nothing is left behind."""
        return True


# ---------------------------------------------------------------- the backup


class _CopyConnection:
    """Connection by which another server has itself copied."""

    def __init__(self, holder: CopyHolder, accepted: Connection) -> None:
        self._holder, self.accepted, self.owner = holder, accepted, accepted.peer.rank
        connection, session = accepted.detach()
        self.line = KVConnection(connection, session, self, f"server {self.owner}")

    def place(self, line: KVConnection, header: MessageHeader) -> memoryview:
        self._check(header)
        if header.body_bytes > _host_bytes():
            raise MemoryError(f"{header.body_bytes} bytes, more than this host has")
        return memoryview(bytearray(header.body_bytes if header.kind in (_COPY_SHARD, _COPY_STORE) else 0))

    def arrived(self, line: KVConnection, header: MessageHeader, body: memoryview) -> None:
        self._check(header)
        outcome = _CANNOT
        if header.kind == MessageKind.FETCH_COPY:
            outcome = self._send_copy()
        else:
            self._holder.change(self.owner, header, body)
        line.send(MessageHeader(_DONE, round=outcome))

    def _check(self, header: MessageHeader) -> None:
        self._holder.check(self.owner, header)
        self._holder.confirm(self.accepted)

    def _send_copy(self) -> int:
        copy = self._holder.held.get(self.owner)
        if copy is None:
            return _CANNOT if self._holder.is_restarted else _IS_EMPTY
        if not copy.is_complete:
            return _CANNOT
        for (store, shard), body in copy.snapshots.items():
            key, index = shard or (0, 0)
            about = _COPY_STORE if shard is None else _COPY_SHARD
            header = MessageHeader(_VALUE, key=key, shard=index, store=store, about=about, body_bytes=len(body))
            self.line.send(header, body)
        return _IS_COMPLETE


class CopyHolder:
    """Copies that this server holds of others, of which it is the backup.

    Args:
        loop: of the server.
        confirm: counts a connection as pending no more; it has sent a message, or has ended.
        is_restarted: a process before this one may have held copies.

    Attributes:
        held: by number of the server.
    """

    def __init__(self, loop: EventLoop, confirm: Callable[[Connection], None], *, is_restarted: bool) -> None:
        self.held: dict[int, HeldCopy] = {}
        self.is_restarted = is_restarted
        self._loop, self.confirm = loop, confirm
        self._connections: set[_CopyConnection] = set()
        #: the process that is copied, and the latest of its connections, by number of the server; and those before it
        self._senders: dict[int, tuple[int, int]] = {}
        self._replaced: set[int] = set()
        #: servers for whose copies there was no memory; that is logged once
        self._refused: set[int] = set()

    def accept(self, accepted: Connection) -> Callback | None:
        """Take a connection of a server that is proven."""
        connection = _CopyConnection(self, accepted)
        self._connections.add(connection)
        self._watch(connection)
        self._loop.call_at(0.0, partial(self._receive, connection))  # something may have been read with the handshake
        return partial(self._drop, connection)

    def check(self, owner: int, header: MessageHeader) -> None:
        """Note who sends a message; raises WireError if another process has its place, or another connection."""
        incarnation, connection = self._senders.get(owner, (0, 0))
        if header.request != incarnation:
            if (incarnation and header.kind != MessageKind.FETCH_COPY) or header.request in self._replaced:
                raise WireError(f"another process is server {owner} by now")
            self._replaced.add(incarnation)
        elif header.round < connection:
            raise WireError(f"server {owner} has another connection by now")
        self._senders[owner] = header.request, header.round

    def change(self, owner: int, header: MessageHeader, body: memoryview) -> None:
        """Change a copy as a message says; raises WireError if it is another one."""
        copy = self.held.get(owner)
        if header.kind == MessageKind.BEGIN_COPY:
            self.held[owner] = HeldCopy(is_complete=header.about == MessageKind.COMPLETE_COPY)
        elif copy is None:
            raise WireError(f"server {owner} goes on with a copy that is not here")
        elif header.kind in (_COPY_SHARD, _COPY_STORE):
            copy.snapshots[_item_of(header, header.kind)] = body
        elif header.kind == MessageKind.DROP_COPY:
            copy.snapshots.pop(_item_of(header, _COPY_SHARD), None)
        elif header.kind == MessageKind.COMPLETE_COPY:
            copy.is_complete = True
        else:
            raise WireError(f"server {owner} sends a {MessageKind(header.kind).name}")

    def close(self) -> None:
        """End all connections. May be called twice."""
        for connection in list(self._connections):
            self._drop(connection)

    def _receive(self, connection: _CopyConnection) -> None:
        if connection not in self._connections:
            return
        try:
            while connection.line.receive():
                pass
            connection.line.advance_sends()
        except MemoryError as error:
            if connection.owner not in self._refused:
                self._refused.add(connection.owner)
                _log.error("no memory for the copy of server %d, which waits: %s", connection.owner, str(error))
            self._drop(connection)
        except (ReigenError, OSError) as error:
            _log.info("the connection of server %d, whose copy is here, has ended: %s", connection.owner, error)
            self._drop(connection)
        except Exception:  # noqa: BLE001 - the copy may lack something, which is sent again
            _log.exception("a message of server %d, whose copy is here, has met a bug of this server", connection.owner)
            self._drop(connection)
        else:
            self._watch(connection)

    def _watch(self, connection: _CopyConnection) -> None:
        receive = partial(self._receive, connection)
        self._loop.watch(connection.line, receive, receive if connection.line.wants_to_send else None)

    def _drop(self, connection: _CopyConnection) -> None:
        self._connections.discard(connection)
        self.confirm(connection.accepted)
        self._loop.unwatch(connection.line)
        with contextlib.suppress(OSError):
            connection.line.close()


def _item_of(header: MessageHeader, kind: int) -> CopyItem:
    return header.store, None if kind == _COPY_STORE else (header.key, header.shard)


def _host_bytes() -> int:
    """Return how much memory this host has: no shard of another one that is to be copied here may be larger."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
