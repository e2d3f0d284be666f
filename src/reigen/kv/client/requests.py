"""Operations of a worker's user, and the requests that they consist of."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from reigen.api.adapter import Array
from reigen.compression import Codec
from reigen.errors import ReigenError, WireError
from reigen.kv.protocol import PUSH_KINDS, MessageFlag, MessageHeader, MessageKind
from reigen.kv.shm_arena import ArenaBlock
from reigen.observe.recorder import ServerRequest

ByteArray = NDArray[np.uint8]

# As plain numbers: every request has them, and enumerations are slow.
_IN_MEMORY, _ANSWER_IN_MEMORY, _RESENT = map(
    int, (MessageFlag.IN_MEMORY, MessageFlag.ANSWER_IN_MEMORY, MessageFlag.RESENT)
)

#: Pushes of one key that may be under way; a further one waits for the first of them.
MAX_PENDING_PUSHES = 16


@dataclass(slots=True, eq=False)
class KeyOrder:
    """Order of the operations of one key.

    Attributes:
        num_reads: requests under way that have to be answered before the next push.
        num_pushes: requests under way that push.
        max_pushes: of that, before a further one has to wait.
        last: the operation whose requests left last.
        held: what waits for that, in order: requests of one operation each.
    """

    num_reads: int = 0
    num_pushes: int = 0
    max_pushes: int = MAX_PENDING_PUSHES
    last: KVOperation | None = None
    held: deque[Sequence[ClientRequest]] = field(default_factory=deque)

    def is_free(self, kind: MessageKind) -> bool:
        """Return whether a request of a new operation would not be held back.

        It would not be a moment later, either: others only finish what was begun, and what was held back counts as a
        read before it is held back no more. So this needs no lock.
        """
        return not self.held and (kind not in PUSH_KINDS or not self.num_reads)

    def has_push_slot(self) -> bool:
        """Return whether there are not too many under way."""
        return self.num_pushes < self.max_pushes

    def must_wait(self, requests: Sequence[ClientRequest]) -> bool:
        """Return whether requests of one operation, the next ones in order, have to wait for reads of others."""
        return self.num_reads > 0 and requests[0].header.kind in PUSH_KINDS and requests[0].operation is not self.last


class KVOperation:
    """Call of the user's: a `reigen.kv.store.Pending`.

    Args:
        wait_for: returns when all of its requests are over, or raises DeadlineError at a time on the clock of
            ``time.monotonic()``; None: at the job's deadline.
        what: in words, for errors: "push", to which it adds the ``keys``.
        finish: run once by the caller that waits, when all answers are there.

    Attributes:
        latest: when it has to be over, on the clock of ``time.monotonic()``; None before anybody waited for it.
        num_left: requests that are not answered.
        error: of the first of them that failed; the user has seen it, or that there is none, if ``is_reported``.
    """

    __slots__ = ("_callbacks", "_finish", "_keys", "_wait_for", "_what", "error", "is_reported", "latest", "num_left")

    def __init__(
        self,
        wait_for: Callable[[KVOperation, float | None], None],
        what: str,
        finish: Callable[[], None] | None = None,
        keys: Sequence[int | str] = (),
    ) -> None:
        self._wait_for = wait_for
        self._what, self._keys = what, keys
        self._finish = finish
        self._callbacks: list[Callable[[], None]] | None = None
        self.latest: float | None = None
        self.num_left = 0
        self.error: ReigenError | None = None
        self.is_reported = False

    @property
    def what(self) -> str:
        """In words, for errors: "push of key 'w'"."""
        if not self._keys:
            return self._what
        names = ", ".join(map(repr, self._keys[:3])) + (f" and {len(self._keys) - 3} more" if self._keys[3:] else "")
        return f"{self._what} of key{'' if len(self._keys) == 1 else 's'} {names}"

    def wait(self, timeout: float | None = None) -> None:
        if self.num_left:
            self._wait_for(self, None if timeout is None else time.monotonic() + timeout)
        self.is_reported = True
        if self.error is not None:
            raise self.error.anew()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def done(self) -> bool:
        return not self.num_left

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(callback)
        if not self.num_left:  # otherwise `over`, which looks for callbacks after that, finds it
            self.over()

    def over(self) -> None:
        """Call the callbacks: the last of its requests is over."""
        callbacks = self._callbacks
        while callbacks:
            try:
                callback = callbacks.pop()
            except IndexError:  # another thread was faster
                return
            callback()

    def fail(self, error: ReigenError) -> None:
        """Note the error of one of its requests; the first one counts."""
        if self.error is None:
            self.error = error


@dataclass(slots=True, eq=False)
class ClientRequest:
    """Message to one server, and where its answer belongs.

    Attributes:
        header: of the request; it says nothing of the body, and has its id when it was submitted.
        body: in memory that nobody changes; in the arena if ``block``, which is given back when the request is over.
        into: where a value that is answered belongs, in its own element type; None: `answer` keeps its bytes.
        codec: decodes a value that is encoded.
        on_push_over: called when a push is over: shard, round, and whether it was done.
        orders: that it is part of: that of its key, if any; of a batch, several.
        sent_at: when it left last; 0.0 before. Where nothing is sent again, when it was to leave.
        num_retries: how often it was sent again, or asked about, since.
        is_received: the server has said that it has it.
        answer: the body of the answer, where it is not a value that belongs somewhere.
    """

    header: MessageHeader
    server: int
    operation: KVOperation
    body: ByteArray | bytes = b""
    block: ArenaBlock | None = None
    into: Array | None = None
    codec: Codec | None = None
    on_push_over: Callable[[int, int, bool], None] | None = None
    orders: Sequence[KeyOrder] = ()
    sent_at: float = field(default=0.0, init=False)
    num_retries: int = field(default=0, init=False)
    is_received: bool = field(default=False, init=False)
    answer: bytes | bytearray | None = field(default=None, init=False)
    answer_header: MessageHeader | None = field(default=None, init=False)

    @property
    def num_ids(self) -> int:
        """Number of ids that belong to it, from that of its header on."""
        return 1

    @property
    def is_done(self) -> bool:
        """Return whether it was answered, and not with an error."""
        return self.answer_header is not None and self.answer_header.kind != MessageKind.ERROR

    def note(self) -> None:
        """Note the end of its push."""
        if self.on_push_over is not None:
            self.on_push_over(self.header.shard, self.header.round, self.is_done)

    def take(self, data: memoryview) -> None:
        """Take a value that does not belong to `into`; raises WireError if it is none."""
        self.answer = bytearray(data)

    def forget(self) -> None:
        """Have answers from now on go nowhere."""
        if self.into is not None:
            self.into = np.empty_like(self.into)

    def leave(self) -> Sequence[KeyOrder]:
        """Return the orders that it is part of, and take it out of them."""
        orders, self.orders = self.orders, ()
        return orders

    def message(self, *, is_read: bool, can_read: bool, again: bool) -> tuple[MessageHeader, memoryview | bytes]:
        """Return the header, and the body that follows it on the connection.

        ``is_read``: the server reads this process's arena; ``can_read``: this process reads the server's; ``again``:
        it was sent before.
        """
        nbytes, flags = len(self.body), self.header.flags
        if again:
            flags |= _RESENT
        if can_read:
            flags |= _ANSWER_IN_MEMORY
        if self.block is not None and is_read:
            where = {"flags": flags | _IN_MEMORY, "offset": self.block.offset, "memory_bytes": nbytes}
            return structs.replace(self.header, **where), b""
        body = self.body if isinstance(self.body, bytes) else self.body.data
        return structs.replace(self.header, flags=flags, body_bytes=nbytes), body

    @property
    def num_value_bytes(self) -> int:
        """Number of bytes of values that it brings and is answered with."""
        return len(self.body) + (0 if self.into is None else self.into.nbytes)

    def seen(self, now: float) -> ServerRequest:
        """Return its record for a timeline, answered ``now`` (``time.monotonic()``)."""
        nanoseconds = int((now - self.sent_at) * 1e9)
        return ServerRequest(MessageKind(self.header.kind).name, self.server, self.num_value_bytes, nanoseconds)

    def query(self) -> MessageHeader:
        """Return the header of the question what has become of it."""
        return structs.replace(self.header, kind=int(MessageKind.QUERY), about=self.header.kind)


@dataclass(slots=True, eq=False)
class BatchRequest(ClientRequest):
    """Request for several keys, whose `orders` are in their order. Each key may be answered by itself.

    Attributes:
        numbers: of each key, the round.
        notes: as `on_push_over`, for each key. None for pulls.
        outs: where the keys' values belong, flat; empty where none are asked for.
        alone: the keys, by their numbers in the batch, that were answered by themselves.
    """

    numbers: Sequence[int] = ()
    notes: Sequence[Callable[[int, int, bool], None]] = ()
    outs: list[Array] = field(default_factory=list)
    alone: set[int] = field(default_factory=set, init=False)

    @property
    def num_ids(self) -> int:
        return 1 + len(self.numbers)

    @property
    def num_value_bytes(self) -> int:
        return len(self.body) + sum(out.nbytes for out in self.outs)

    def take(self, data: memoryview) -> None:
        """Take the values of all keys."""
        if len(data) != sum(out.nbytes for out in self.outs):
            raise WireError(f"{len(data)} bytes for a batch of {sum(out.nbytes for out in self.outs)}")
        values = np.frombuffer(data, self.outs[0].dtype)
        begin = 0
        for out in self.outs:
            end = begin + len(out)
            out[:] = values[begin:end]
            begin = end

    def forget(self) -> None:
        self.outs = [np.empty_like(out) for out in self.outs]

    def leave(self) -> Sequence[KeyOrder]:
        orders = [order for place, order in enumerate(self.orders) if place not in self.alone]
        self.orders = ()
        return orders

    def complete_part(self, place: int, *, is_done: bool) -> KeyOrder:
        """Note that a key was answered by itself; return its order, which the batch is not part of any more."""
        self.alone.add(place)
        if self.notes:
            self.notes[place](0, self.numbers[place], is_done)
        return self.orders[place]

    def note(self) -> None:
        """Note the end of the pushes of all keys that were not answered by themselves."""
        for place, note in enumerate(self.notes):
            if place not in self.alone:
                note(0, self.numbers[place], self.is_done)
