"""Protocol of a timeline between ranks, in notes beside the collectives.

a. Rank 0 opens the file and sends `TraceStart`. From then on every rank records, and sends its recording as
   `TraceChunk`.
b. A rank measures how far its clock is from rank 0's: `ClockPing`, answered by `ClockPong` (see
   `reigen.observe.clock_sync`).
c. Rank 0 sends `TraceStop`. Every rank sends the rest, and `TraceEnd`. Rank 0 closes the file, and sends `TraceClosed`.
d. A rank that leaves the job sends `TraceEnd` unasked, and waits for `TraceClosed`; rank 0 then goes on with (c),
   because no collective can follow. So the last events of all ranks arrive before the first of them is gone.

Every wait is bounded, and ends when a rank is lost.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

#: ``(form, label, row, begin, nanoseconds, arguments)``: label and arguments are indices, -1 for none.
TraceSlice = tuple[int, int, int, int, int, int]

#: Forms of slices: complete, begun (and long since), ended, instant.
COMPLETE, BEGUN, OVER, INSTANT = range(4)
#: The phase of a Chrome trace, by form.
PHASES = ("X", "B", "E", "i")


class TraceStart(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Request to record from now on, into timeline number ``session`` of the job.

    ``mark_cycles``: show the engine's rounds of negotiation. ``clock``: identity of rank 0's clock.
    """

    session: int
    mark_cycles: bool
    clock: str


class TraceStop(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Request to record no more, and to send the rest."""

    session: int


class TraceClosed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """File is complete."""

    session: int


class ClockPong(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Time of rank 0's clock, ``remote``, when it read this rank's `ClockPing`."""

    session: int
    rank: int
    sent: int
    remote: int


class ClockPing(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Request for rank 0's clock; this one's is at ``sent``."""

    session: int
    sent: int


class TraceChunk(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Slices of one rank, complete in itself: chunks before it may have been lost.

    Attributes:
        session: number of the timeline in this job.
        host: the rank's.
        offset: nanoseconds to add to this rank's clock to have rank 0's.
        error: largest error of it in nanoseconds; -1 when it is not known yet.
        num_dropped: events that this rank has dropped so far, because it could not send them in time.
        rows: number and title of rows that appear for the first time.
        labels: name and category of slices.
        arguments: JSON objects.
        slices: in the order in which they were known.
        cpus: processors that this rank may use: a mask, hexadecimal.
        cpu_quota: how many of them at a time; 0: all.
    """

    session: int
    host: str
    offset: int
    error: int
    num_dropped: int
    rows: list[tuple[int, str]]
    labels: list[tuple[str, str]]
    arguments: list[bytes]
    slices: list[TraceSlice]
    cpus: str = ""
    cpu_quota: float = 0.0


class TraceEnd(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """End of a rank's chunks."""

    session: int


ToRankZero = ClockPing | TraceChunk | TraceEnd
FromRankZero = TraceStart | TraceStop | TraceClosed | ClockPong

#: Encode one message as a note's data, and decode it; msgspec.DecodeError.
encode: Callable[[ToRankZero | FromRankZero], bytes] = msgspec.msgpack.Encoder().encode
decode_at_rank_zero: Callable[[bytes], ToRankZero] = msgspec.msgpack.Decoder(ToRankZero).decode
decode_from_rank_zero: Callable[[bytes], FromRankZero] = msgspec.msgpack.Decoder(FromRankZero).decode
