"""Messages between workers and servers of the parameter server.

Every message is a header of 72 bytes and, perhaps, a body. They travel by `reigen.net.framing.FramedConnection`
(`reigen.kv.connection`); the body of a message with `MessageFlag.IN_MEMORY` does not travel, but lies in the sender's
arena (`reigen.kv.shm_arena`). All numbers are little-endian, arrays are in the memory order of the hosts.

A value is cut into shards (`reigen.kv.client.sharding`): everything below names one shard of one key of one store.

a. A worker opens one connection to each server for each of its stores, for `PURPOSE`, and says HELLO: who it is,
   where its arena is, and how synchronous the store is. The server says WELCOME, with its own arena if it has opened
   the worker's. Then the worker may send bodies by `MessageFlag.IN_MEMORY`, and asks for such answers by
   `MessageFlag.ANSWER_IN_MEMORY` if it has opened the server's. A worker that is not welcome hears a NOTICE of a
   problem.
b. Every other message of a worker is a request with an id of its own, unique among the worker's requests to that
   server in the life of the worker, and never 0. Every request is answered once by DONE, VALUE, DECLARED or ERROR
   with the same id, in any order. A request that is sent again, with the same id or for the same (shard, round), is
   answered again and done once.
c. DECLARE comes first for every key: all workers say what they mean by it to the key's home server
   (`MessageFlag.HOME`), rank 0 says where its shards are. When all have said the same, the home server answers rank 0;
   rank 0 declares the key at the other servers that hold shards of it, sends INIT for every shard, waits, and declares
   it at the home server once more with ``is_initialised``. Then the home server answers all others. So DECLARED means
   that the key can be used. Workers that disagree all get an ERROR. A server that is started again amid this may have
   forgotten what it was told, but no value for which INIT was answered: rank 0, which is told by WELCOME that it is
   another process, begins again, until it has come through with all servers as they were. All of them then say RESUME.
   In an elastic job any worker may be the one that does this. All say where the shards would be; the home server
   chooses one of those that have come (`KeyDeclared.is_first`), and another one where that is lost before it has sent
   all values. Those that have declared the key until then take part in the first round of all its shards.
d. PUSH, PUSHPULL and ROW_PUSH say the worker's own count of its pushes of that shard, from 1, in ``round``; PULL and
   ROW_PULL say how many pushes of the shard the worker has sent before. When they are answered is decided by the
   store's consistency (`reigen.kv.consistency.state_machine`): in a synchronous store when the round is complete and
   applied. A push is answered by DONE, all others by VALUE. Rows travel as their numbers (int64, ascending, each once,
   counted from the first row of the shard), and after them, in ROW_PUSH, their elements; ROW_PULL brings the elements
   back. Every push of a key is a push of each of its shards, if only of no rows.
e. The memory of a push that lies in the worker's arena belongs to the server until the answer. A VALUE in the
   server's arena belongs to the worker until it says RELEASE: its body is the ids of the answers that have been
   copied out, also of those that came twice. RELEASE has no answer. The end of a connection releases everything.
f. COMMAND has a `StoreCommand` as body and is answered by DONE with a `CommandResult`, or ERROR.
g. With PS_RESEND, the server says RECEIVED as soon as a request is there that it cannot answer yet. A worker that has
   heard neither that nor an answer sends the request again; one that has heard RECEIVED asks by QUERY: the same
   header without the body, with what it was in ``about``. The server answers, says RECEIVED, or says RECEIVED with
   `MessageFlag.UNKNOWN`: send it again.
h. RESUME, after a reconnection: the worker's counts of answered pushes (`pack_counts`); DONE has the server's. A
   worker that replaces another says `COUNT_UNKNOWN` and goes on from what the server has. In an elastic job all do so
   behind DECLARED, and once more with the largest count that they have heard, where those of a key's shards differ.
   One that was welcome before says so in HELLO, and names in its first RESUME all keys that it has joined.
i. GET_STATES is answered by VALUE, PUT_STATES by DONE: bodies of `reigen.optim.States`.
j. NOTICE is what a server says unasked: a `ServerNotice`. It has no id and no answer.
k. GOODBYE: the worker has nothing more to push; it is not expected any more. Answered by DONE. The connection stays.
l. PUSH, PUSHPULL and PULL of several keys in one message, with `MessageFlag.BATCH`: each key is one dense shard, all
   are of one element type, none is there twice, and ``shard`` says how many there are. The body is their ids, what
   ``round`` would be for each (both uint64), and for pushes their elements in the same order, without gaps. Each key is
   treated as if it had come by itself. What is done for all keys at the same time has one answer: a VALUE has the
   elements in the same order. Otherwise each key has an answer of its own, as soon as it is done: the keys' ids are
   those behind the id of the batch, in order. QUERY of a batch is answered by `MessageFlag.UNKNOWN`, unless something
   of it is open.
m. BEGIN_COPY, COPY_SHARD, COPY_STORE, DROP_COPY, COMPLETE_COPY and FETCH_COPY are what servers say to each other, over
   connections of their own (`reigen.kv.server.replicas`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum, IntFlag
from typing import Any

import msgspec
import numpy as np

from reigen.errors import (
    ArgumentError,
    CollectiveError,
    ConfigError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    ReigenError,
    SharedMemoryError,
    UnsupportedError,
    UnsupportedTypeError,
    WireError,
)
from reigen.files import Buffer
from reigen.net.codec import MessageCodec
from reigen.types import DTYPES

#: What the connections are for, in the handshake; the ranks there are the numbers of worker and server.
PURPOSE = "kv"
HEADER_BYTES = 72
#: The largest body that is not numbers of an array.
MAX_CONTROL_BYTES = 1 << 20
#: Bodies below this travel with the header even where memory is shared.
INLINE_BYTES = 64 << 10
#: In RESUME: the worker does not know how often its predecessor has pushed.
COUNT_UNKNOWN = (1 << 64) - 1
#: Batches have no more bytes of elements than this, and no more keys.
MAX_BATCH_BYTES, MAX_BATCH_KEYS = 1 << 20, 1 << 12

_HEADER = struct.Struct("<BBBBHBxIiQQQQQQQ")
_COUNTS = np.dtype([("key", "<u8"), ("shard", "<u8"), ("count", "<u8")])


class MessageKind(IntEnum):
    """Kind of a message. Requests of workers, and of servers to others, are below 64, answers from there on."""

    HELLO = 1
    DECLARE = 2
    INIT = 3
    PUSH = 4
    PULL = 5
    PUSHPULL = 6
    ROW_PUSH = 7
    ROW_PULL = 8
    COMMAND = 9
    RELEASE = 10
    QUERY = 11
    RESUME = 12
    GET_STATES = 13
    PUT_STATES = 14
    GOODBYE = 15
    BEGIN_COPY = 16
    COPY_SHARD = 17
    COPY_STORE = 18
    DROP_COPY = 19
    COMPLETE_COPY = 20
    FETCH_COPY = 21
    WELCOME = 64
    DECLARED = 65
    DONE = 66
    VALUE = 67
    RECEIVED = 68
    ERROR = 69
    NOTICE = 70


class MessageFlag(IntFlag):
    """Flags of a message."""

    IN_MEMORY = 1  #: the body lies in the sender's arena
    HOME = 2  #: (DECLARE) the receiver is the key's home server
    ENCODED = 4  #: the body is encoded by the store's gradient compression
    ENCODE_ANSWER = 8  #: (PULL, PUSHPULL) the answer may be
    UNKNOWN = 16  #: (RECEIVED) it was not received: send it again
    RESENT = 32  #: this request was sent before
    ANSWER_IN_MEMORY = 64  #: the answer's body may lie in the server's arena
    BATCH = 128  #: (PUSH, PUSHPULL, PULL) this is about several keys


#: The numbers of element types on the wire; 0 for none.
DTYPE_NUMBERS: Mapping[str, int] = {name: number for number, name in enumerate(sorted(DTYPES), 1)}

# As plain numbers: headers are read for every message, and enumerations are slow.
#: Kinds whose bodies are control messages, or lists that are bounded like them; these bodies are authenticated.
CONTROL_KINDS = frozenset(
    map(int, (
        MessageKind.HELLO, MessageKind.DECLARE, MessageKind.COMMAND, MessageKind.WELCOME, MessageKind.DECLARED,
        MessageKind.DONE, MessageKind.ERROR, MessageKind.NOTICE, MessageKind.RELEASE, MessageKind.RESUME,
    ))
)  # fmt: skip
#: Requests that count as a push, and those that are answered with what later pushes of the same worker change.
PUSH_KINDS = frozenset(map(int, (MessageKind.PUSH, MessageKind.PUSHPULL, MessageKind.ROW_PUSH)))
READ_KINDS = frozenset(map(int, (MessageKind.PULL, MessageKind.PUSHPULL, MessageKind.ROW_PULL)))
_KINDS = frozenset(map(int, MessageKind))
_IN_MEMORY = int(MessageFlag.IN_MEMORY)


class MessageHeader(msgspec.Struct, frozen=True, gc=False):
    """Header of a message.

    Attributes:
        request: the id of the request that this is, or answers; 0 for none.
        key: its id (`reigen.kv.values`), as an unsigned number.
        shard: index of the shard in its key; of a batch, how many keys it is about.
        round: of pushes, as above.
        dtype: of the body's elements, by `DTYPE_NUMBERS`.
        about: (QUERY, RECEIVED) the kind of the request in question.
        store: number of the store in its job.
        priority: of the answer, higher first.
        body_bytes: length of the body that follows on the connection.
        offset, memory_bytes: where the body lies in the sender's arena, and how long it is there.
        batch: of pushes during a lease of samples, its number (`reigen.kv.consistency.sample_leases`); else 0.
    """

    kind: int
    request: int = 0
    key: int = 0
    shard: int = 0
    round: int = 0
    flags: int = 0
    dtype: int = 0
    about: int = 0
    store: int = 0
    priority: int = 0
    body_bytes: int = 0
    offset: int = 0
    memory_bytes: int = 0
    batch: int = 0

    @property
    def num_bytes(self) -> int:
        """Length of the body, wherever it is."""
        return self.memory_bytes if self.flags & _IN_MEMORY else self.body_bytes

    def answer(
        self, kind: int, flags: int = 0, dtype: int = 0, body_bytes: int = 0, offset: int = 0, memory_bytes: int = 0
    ) -> MessageHeader:
        """Return the header of an answer to this request, or of one to the request that this QUERY is about."""
        return MessageHeader(
            kind, self.request, self.key, self.shard, self.round, flags, dtype, self.about or self.kind, self.store,
            self.priority, body_bytes, offset, memory_bytes,
        )  # fmt: skip

    def pack(self) -> bytes:
        """Return the 72 bytes."""
        return _HEADER.pack(
            self.kind, self.flags, self.dtype, self.about, self.store, 0, self.shard, self.priority, self.request,
            self.key, self.round, self.body_bytes, self.offset, self.memory_bytes, self.batch,
        )  # fmt: skip


def unpack_header(data: Buffer) -> MessageHeader:
    """Return the header in 72 bytes; raises WireError if they are none."""
    if len(data) != HEADER_BYTES:
        raise WireError(f"a header of {len(data)} bytes where {HEADER_BYTES} are expected")
    (
        kind, flags, dtype, about, store, zero, shard, priority, request, key, round_, body_bytes, offset, memory_bytes,
        batch,
    ) = _HEADER.unpack(data)  # fmt: skip
    if kind not in _KINDS or zero or dtype > len(DTYPE_NUMBERS):
        raise WireError(f"a message of kind {kind}, flags {flags} and dtype {dtype}, which no end sends")
    if kind in CONTROL_KINDS and body_bytes > MAX_CONTROL_BYTES:
        raise WireError(f"a {MessageKind(kind).name} of {body_bytes} bytes; at most {MAX_CONTROL_BYTES} are allowed")
    if flags & _IN_MEMORY and body_bytes:
        raise WireError(f"a {MessageKind(kind).name} whose body is in two places")
    return MessageHeader(
        kind, request, key, shard, round_, flags, dtype, about, store, priority, body_bytes, offset, memory_bytes, batch
    )


def pack_counts(counts: Iterable[tuple[int, int, int]]) -> bytes:
    """Return the body of RESUME, or of the DONE that answers it, of (key id, shard index, number of pushes)."""
    return np.array(list(counts), _COUNTS).tobytes()


def unpack_counts(body: Buffer) -> list[tuple[int, int, int]]:
    """Return the counts of `pack_counts`; raises WireError if it is something else."""
    if len(body) % _COUNTS.itemsize:
        raise WireError(f"counts of pushes in {len(body)} bytes, which is no multiple of {_COUNTS.itemsize}")
    return [(int(key), int(shard), int(count)) for key, shard, count in np.frombuffer(body, _COUNTS)]


# ---------------------------------------------------------------- bodies


class KVHello(msgspec.Struct, array_like=True, frozen=True):
    """HELLO, and with the server's number in ``number``, WELCOME.

    Attributes:
        incarnation: which of the processes that had the number one after the other.
        host_id: equal where memory can be shared (`reigen.cluster.host_discovery.host_identity`); empty: it will not.
        fd, inode: its descriptor of the arena's segment, and that file's number, which the opener compares.
        is_empty: (WELCOME) the server holds nothing of this store yet, and had nothing in a snapshot.
        staleness: of the store (`reigen.kv.consistency.state_machine`), the same for all; None is infinite.
        resumes: (HELLO) this process was welcome before, and says RESUME next.
    """

    number: int
    incarnation: int
    host: str
    host_id: str = ""
    pid: int = 0
    fd: int = -1
    inode: int = 0
    is_empty: bool = True
    staleness: int | None = 0
    resumes: bool = False


class ShardRange(msgspec.Struct, array_like=True, frozen=True):
    """Shard of a key: elements ``[begin, end)`` of the flat value are at ``server``."""

    index: int
    begin: int
    end: int
    server: int

    @property
    def num_elements(self) -> int:
        return self.end - self.begin


class KeySpec(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Meaning of a key, the same for all workers.

    Attributes:
        name: the key as the user wrote it.
        dtype: its name in `reigen.types.DTYPES`.
        stype: ``default`` or ``row_sparse``.
        generation: how often the key was declared anew: all workers do so to have it cut in another way before the
            first push. Shards of an earlier generation are forgotten where the key is declared with a later one.
    """

    name: int | str
    shape: tuple[int, ...]
    dtype: str
    stype: str = "default"
    generation: int = 0

    def __str__(self) -> str:
        kind = "" if self.stype == "default" else f" ({self.stype})"
        again = f", declared again {self.generation} time(s)" if self.generation else ""
        return f"{self.name!r}: {self.dtype} {self.shape}{kind}{again}"


class DeclareKey(msgspec.Struct, array_like=True, frozen=True):
    """DECLARE: meaning of a key; from rank 0 all its shards, too, and whether it has sent them.

    ``workers``: those of an elastic job that take part in its first round.
    """

    spec: KeySpec
    places: tuple[ShardRange, ...] | None = None
    is_initialised: bool = False
    workers: tuple[int, ...] = ()


class KeyDeclared(msgspec.Struct, array_like=True, frozen=True):
    """DECLARED: all shards of the key, and whether it had a value before, so that rank 0's is not wanted.

    In an elastic job also whether this worker is to send the value, and who takes part in the first round.
    """

    places: tuple[ShardRange, ...]
    was_initialised: bool = False
    is_first: bool = False
    workers: tuple[int, ...] = ()


class StoreCommand(msgspec.Struct, array_like=True, frozen=True):
    """COMMAND: something for a whole store on one server; `reigen.kv.server.store_settings` has names and arguments."""

    name: str
    arguments: dict[str, Any]


class CommandResult(msgspec.Struct, array_like=True, frozen=True):
    """Result of a COMMAND."""

    value: Any = None


class RemoteError(msgspec.Struct, array_like=True, frozen=True):
    """ERROR: an error of `reigen.errors` on its way to a worker.

    Attributes:
        error: a name in `REMOTE_ERRORS`.
        key: the key's name, as the user wrote it; None where it concerns them all.
        workers: the workers at fault.
        details: one line for each worker, where they differ.
    """

    error: str
    reason: str
    key: int | str | None = None
    workers: tuple[int, ...] = ()
    details: dict[int, str] = {}

    def raised(self) -> ReigenError:
        """Return it as an error to be raised."""
        name = None if self.key is None else f"key {self.key!r}"
        kind = REMOTE_ERRORS.get(self.error, CollectiveError)
        if issubclass(kind, CollectiveError):
            return kind(self.reason, tensor=name, ranks=self.workers, details=self.details)
        return kind(self.reason if name is None else f"{name}: {self.reason}")

    @classmethod
    def of(cls, error: ReigenError, key: int | str | None = None) -> RemoteError:
        """Return an error in the form in which it travels."""
        name = next(
            (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in REMOTE_ERRORS), "CollectiveError"
        )
        if isinstance(error, CollectiveError):
            return cls(name, error.reason, key, error.ranks, error.details)
        return cls(name, str(error), key)


#: Errors that travel, by their names.
REMOTE_ERRORS: Mapping[str, type[ReigenError]] = {
    kind.__name__: kind
    for kind in (
        CollectiveError, MismatchError, DeadlineError, PeerLostError, ArgumentError, ConfigError, UnsupportedError,
        UnsupportedTypeError, SharedMemoryError,
    )
}  # fmt: skip


class ServerNotice(msgspec.Struct, array_like=True, frozen=True):
    """NOTICE: something happened that this worker did not ask about.

    Attributes:
        what: ``lost``, ``left`` or ``returned``, of workers; ``problem``: nothing works any more, because of it;
            ``unread``: the server cannot map this worker's memory.
        reason: in words, with the round and the key that it interrupted.
        problem: the error that every call raises from now on, if any.
    """

    what: str
    worker: int
    host: str
    reason: str
    problem: RemoteError | None = None


HELLO_CODEC: MessageCodec[KVHello] = MessageCodec(KVHello, MAX_CONTROL_BYTES)
DECLARE_CODEC: MessageCodec[DeclareKey] = MessageCodec(DeclareKey, MAX_CONTROL_BYTES)
DECLARED_CODEC: MessageCodec[KeyDeclared] = MessageCodec(KeyDeclared, MAX_CONTROL_BYTES)
COMMAND_CODEC: MessageCodec[StoreCommand] = MessageCodec(StoreCommand, MAX_CONTROL_BYTES)
RESULT_CODEC: MessageCodec[CommandResult] = MessageCodec(CommandResult, MAX_CONTROL_BYTES)
REMOTE_ERROR_CODEC: MessageCodec[RemoteError] = MessageCodec(RemoteError, MAX_CONTROL_BYTES)
NOTICE_CODEC: MessageCodec[ServerNotice] = MessageCodec(ServerNotice, MAX_CONTROL_BYTES)
