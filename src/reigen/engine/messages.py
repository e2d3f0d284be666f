"""What ranks and coordinator say to each other. Small msgspec structures, written as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from reigen.types import DTYPES, ReduceOp


class Kind(IntEnum):
    """What is to be done. The first seven numbers are Horovod's."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ALLTOALL = 5
    BARRIER = 6
    REDUCESCATTER = 7
    ALLOCATE = 8
    FREE = 9


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """What one rank asks for under a name.

    Attributes:
        kind: which collective.
        name: what it is called on every rank.
        dtype: name of the element type; empty where there are no elements.
        shape: this rank's shape. ALLOCATE: the number of bytes.
        op: for reductions.
        prescale: factor before the reduction.
        postscale: factor after it.
        root: for BROADCAST.
        splits: for ALLTOALL, rows that go to each rank.
        offset: position in registered memory, or -1. FREE: the region.
    """

    kind: Kind
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    offset: int = -1

    @property
    def num_elements(self) -> int:
        """Elements of this rank's tensor."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tensor."""
        return self.num_elements * DTYPES[self.dtype].itemsize if self.dtype else 0


class Response(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks agreed on for a name.

    Attributes:
        name: the operation's.
        slot: number in the response cache, or -1 when it is not cached.
        sizes: ALLGATHER: ``((rows of rank 0, rows of rank 1, ...),)``. ALLTOALL: row i is what rank i sends to each
            rank. Else empty.
        in_place: all ranks gave the same registered memory.
    """

    name: str
    slot: int = -1
    sizes: tuple[tuple[int, ...], ...] = ()
    in_place: bool = False


# -- rank to coordinator ----------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """This rank has the tensor ready, and this is what it wants."""

    operation: Operation


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """This rank has the tensor of a cached response ready, with the same operation as then."""

    slot: int


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """This rank shuts down; it takes part in nothing more."""


class Topic(IntEnum):
    """What a `Note` is about: who listens to it."""

    TIMELINE = 1
    STACKS = 2


class Note(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Something for a listener that negotiation carries and does not read: from a rank to rank 0, or from it to all.

    Attributes:
        topic: who listens.
        data: at most `MAX_NOTE_BYTES`; only listener and sender know what it means.
    """

    topic: Topic
    data: bytes


#: A note shares a message of the transport with others.
MAX_NOTE_BYTES = 32 << 10

Report = Submit | Ready | Leave | Note

# -- coordinator to all ranks -----------------------------------------------------------------------------------------


class Run(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Execute these, batch after batch; a batch travels together. A number stands for a cached response."""

    batches: tuple[tuple[int | Response, ...], ...]


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The submissions of ``submitted`` under this name fail, there and nowhere else.

    Attributes:
        name: the operation's.
        late: a deadline passed (else: the ranks disagree).
        reason: what is wrong.
        submitted: ranks whose submission this answers.
        at_fault: ranks that the error names.
        details: what each rank said, by rank.
    """

    name: str
    late: bool
    reason: str
    submitted: tuple[int, ...]
    at_fault: tuple[int, ...] = ()
    details: tuple[tuple[int, str], ...] = ()


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """These responses left the cache."""

    slots: tuple[int, ...]


class Left(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """A rank has left. What has not been announced before this will never be."""

    rank: int


Announcement = Run | Refuse | Forget | Left | Note

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
