"""Messages between ranks and coordinator. Small msgspec structures, written as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from reigen.types import DTYPES, ReduceOp


class OperationKind(IntEnum):
    """Kind of an operation. The first seven numbers are Horovod's."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    JOIN = 3
    ALLTOALL = 5
    BARRIER = 6
    REDUCESCATTER = 7
    ALLOCATE = 8
    FREE = 9
    ADD_SET = 10
    REMOVE_SET = 11
    REDUCE_TO_OWNERS = 12
    ALLOCATE_SHARED = 13
    EXCHANGE = 14


#: What every rank calls its JOIN, and nothing else is called.
JOIN_NAME = "join (all ranks)"
#: Part of every name that was made up.
UNNAMED = ".noname."


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """Request of one rank under a name.

    Attributes:
        kind: which collective.
        name: what it is called on every rank.
        dtype: name of the element type; empty where there are no elements.
        shape: this rank's shape. ALLOCATE, ALLOCATE_SHARED: how many bytes. ADD_SET: the ranks. REMOVE_SET: the set.
        op: for reductions.
        prescale: factor before the reduction.
        postscale: factor after it.
        root: for BROADCAST, a rank of the job; for EXCHANGE too, or -1 where it is about something of all ranks.
        splits: for ALLTOALL, rows that go to each rank of the process set. REDUCE_TO_OWNERS: elements of each owner.
        offset: position in registered memory, or -1. FREE: the region.
        process_set: whose ranks take part; 0 is all.
        divide_by_active: AVERAGE divides by the ranks that have not joined, instead of by all of the set.
        members: of a group, which is negotiated as one: the operations, all of this kind. The group itself has no dtype
            and no shape. A member's name says which tensor it is, or is empty.
        device: the kind of device in whose memory the tensors lie, for a backend of its own; empty: the host's. The
            members of a group have none, theirs is the group's.
        payload: for EXCHANGE: what this rank says to the others, at most `MAX_NOTE_BYTES`.
    """

    kind: OperationKind
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    offset: int = -1
    process_set: int = 0
    divide_by_active: bool = False
    members: tuple[Operation, ...] = ()
    device: str = ""
    payload: bytes = b""

    @property
    def parts(self) -> tuple[Operation, ...]:
        """The members of a group; else the operation itself."""
        return self.members or (self,)

    @property
    def num_elements(self) -> int:
        """Elements of this rank's tensor."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tensor; of a group's tensors together."""
        if self.members:
            return sum(member.nbytes for member in self.members)
        return self.num_elements * DTYPES[self.dtype].itemsize if self.dtype else 0


class Response(msgspec.Struct, frozen=True, array_like=True):
    """Agreement of the ranks on an operation of a name.

    Attributes:
        name: the operation's.
        slot: number in the response cache, or -1 when it is not cached.
        sizes: ALLGATHER: ``((rows of rank 0, rows of rank 1, ...),)``. ALLTOALL: row i is what rank i sends to each
            rank. Else empty.
        in_place: all ranks gave the same registered memory.
        process_set: the operation's.
        value: JOIN: the last rank that joined. ADD_SET: the number of the new set.
        num_active: how many ranks contribute where some have joined; 0 while none has.
        template: while some rank has joined: what the others submitted, for it to stand in with neutral elements.
        members: of a group, in its order.
        payloads: EXCHANGE: what each rank of the set said, in their order.
    """

    name: str
    slot: int = -1
    sizes: tuple[tuple[int, ...], ...] = ()
    in_place: bool = False
    process_set: int = 0
    value: int = -1
    num_active: int = 0
    template: Operation | None = None
    members: tuple[Response, ...] = ()
    payloads: tuple[bytes, ...] = ()

    @property
    def parts(self) -> tuple[Response, ...]:
        """The members of a group; else the response itself."""
        return self.members or (self,)


# -- rank to coordinator ----------------------------------------------------------------------------------------------


class SubmitRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Report that this rank has the tensor ready, with its operation.

    Attributes:
        operation: what it wants.
        instead_of: the slot of the cache hit that this replaces, since it crossed the `CacheEviction`; else -1.
    """

    operation: Operation
    instead_of: int = -1


class ShutdownRequest(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Report that this rank shuts down; it takes part in nothing more."""


class Topic(IntEnum):
    """Topic of a `Note`: it decides which listener gets it."""

    TIMELINE = 1
    STACKS = 2
    APPLIED_STEPS = 3


class Note(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Something for a listener that negotiation carries and does not read: from a rank to rank 0, or from it to all.

    Attributes:
        topic: who listens.
        data: at most `MAX_NOTE_BYTES`; only listener and sender know what it means.
    """

    topic: Topic
    data: bytes


#: A note, or a rank's part of an EXCHANGE, shares a message of the transport with others.
MAX_NOTE_BYTES = 32 << 10


class MessageFragment(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """A part of a message that is too long for the transport; the whole is read when the last one has come."""

    data: bytes
    last: bool


#: A relay adds no more to a message of one rank than this: names of ranks.
MAX_FORWARDING_BYTES = 4 << 10


class MergedReports(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """Reports of a relay (`reigen.engine.control_tree`): each of these ranks reports each of these.

    Attributes:
        first: the lowest rank.
        ranks: all of them, as bits; the first one is that of ``first`` (`reigen.engine.rank_masks`).
        reports: in an order that is that of each of them.
    """

    first: int
    ranks: bytes
    reports: tuple[int | SubmitRequest | ShutdownRequest, ...]


class ForwardedMessage(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """A message of one rank that its relay does not read."""

    rank: int
    message: Note | MessageFragment


#: A number is a cache hit: this rank has the tensor of the cached response in that slot ready, with the same operation
#: as then.
Report = int | SubmitRequest | ShutdownRequest | MergedReports | ForwardedMessage | Note | MessageFragment

# -- coordinator to all ranks -----------------------------------------------------------------------------------------


class ResponseList(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Execute these, batch after batch; a batch travels together. A number stands for a cached response."""

    batches: tuple[tuple[int | Response, ...], ...]


class ErrorCause(IntEnum):
    """Reason for which a submission is refused."""

    MISMATCH = 0  #: the ranks disagree
    LATE = 1  #: a deadline passed
    JOINED = 2  #: a rank has joined, and this is nothing in which zeros could stand for it


class ErrorResponse(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The submissions of ``submitted`` under this name fail, there and nowhere else.

    Attributes:
        name: the operation's.
        cause: what kind of error it is.
        reason: what is wrong.
        submitted: ranks whose submission this answers.
        at_fault: ranks that the error names.
        details: what each rank said, by rank.
    """

    name: str
    cause: ErrorCause
    reason: str
    submitted: tuple[int, ...]
    at_fault: tuple[int, ...] = ()
    details: tuple[tuple[int, str], ...] = ()


class CacheEviction(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """These responses left the cache."""

    slots: tuple[int, ...]


class RankShutdown(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """A rank has left. What has not been announced before this will never be."""

    rank: int


class JobAbort(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The job ends with a DeadlineError on all ranks; the attributes are the error's."""

    reason: str
    tensor: str
    ranks: tuple[int, ...]
    details: tuple[tuple[int, str], ...]


class TunedParameters(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Parameters that autotuning has chosen; they count from here on, between two batches, on every rank.

    Attributes:
        version: counts the choices of a job.
        fusion_threshold_bytes: rank 0 fuses by it; the others keep it for a view in which one of them is rank 0.
        bucket_bytes: size of a gradient bucket, or 0 for none chosen. Whoever has buckets agrees on when it counts.
        tcp_algorithm: of reductions over TCP; empty: it is not tuned.
        tcp_sockets: connections between two ranks that are used; 0: it is not tuned.
        is_final: tuning is over.
    """

    version: int
    fusion_threshold_bytes: int
    bucket_bytes: int = 0
    tcp_algorithm: str = ""
    tcp_sockets: int = 0
    is_final: bool = False


Announcement = (
    ResponseList | ErrorResponse | CacheEviction | RankShutdown | JobAbort | TunedParameters | Note | MessageFragment
)

_ENCODER = msgspec.msgpack.Encoder()
_REPORTS = msgspec.msgpack.Decoder(list[Report])
_ANNOUNCEMENTS = msgspec.msgpack.Decoder(list[Announcement])


def encode(messages: Sequence[Report | Announcement]) -> bytes:
    """Several messages as bytes."""
    return _ENCODER.encode(messages)


def decode_reports(data: bytes) -> list[Report]:
    """Raises msgspec.DecodeError for anything but what `encode` writes."""
    return _REPORTS.decode(data)


def decode_announcements(data: bytes) -> list[Announcement]:
    """Raises msgspec.DecodeError for anything but what `encode` writes."""
    return _ANNOUNCEMENTS.decode(data)


# -- integers instead of messages: what is said again and again, where the transport carries them ---------------------

#: Slots from here on are told by messages.
_END_OF_BATCH = 1 << 31
#: So many integers fit into one message.
_MAX_INTEGERS = 1 << 13


def pack_cache_hits(reports: Sequence[Report | Announcement]) -> Sequence[int] | None:
    """Reports as integers, the slots; None where they are more than cache hits, or too many."""
    for report in reports:
        if not isinstance(report, int) or report >= _END_OF_BATCH:
            return None
    return reports if len(reports) <= _MAX_INTEGERS else None  # type: ignore[return-value]  # they have been looked at


def pack_batches(announcements: Sequence[Report | Announcement]) -> Sequence[int] | None:
    """One announcement as integers: slots, with a mark at the last of each batch; None where there is more to say."""
    if len(announcements) != 1 or not isinstance(announcements[0], ResponseList):
        return None
    found: list[int] = []
    for batch in announcements[0].batches:
        for item in batch:
            if not isinstance(item, int) or item >= _END_OF_BATCH:
                return None
            found.append(item)
        found[-1] |= _END_OF_BATCH
    return found if len(found) <= _MAX_INTEGERS else None


def unpack_batches(integers: Sequence[int]) -> list[Announcement]:
    """Return the batches that `pack_batches` packed.

    Raises:
        msgspec.DecodeError: it is something else.
    """
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    for integer in integers:
        if integer < _END_OF_BATCH:
            batch.append(integer)
        else:
            batches.append((*batch, integer - _END_OF_BATCH))
            batch = []
    if batch:
        raise msgspec.DecodeError("a batch that does not end")
    return [ResponseList(tuple(batches))]
