"""Converter from chunks of all ranks to a Chrome trace: the array format, for Perfetto and chrome://tracing.

One process for each rank, one thread for each of its rows. Times are microseconds of rank 0's clock since the start.
"""

from __future__ import annotations

import msgspec

from reigen._version import __version__
from reigen.observe.messages import INSTANT, PHASES, TraceChunk

#: Name of the first record, and of the number in its arguments: the mark of a timeline's file. Horovod's name.
START_EVENT = "start_time_since_epoch_in_micros"
#: Name of regular records that show how far the recording has come: a job that hangs records nothing else.
UNTIL_EVENT = "recorded_until"

_ENCODER = msgspec.json.Encoder()


class ChromeEvent(msgspec.Struct, omit_defaults=True):
    """Record of a trace; the fields' names are the format's, but for ``category``.

    ``ph`` is the phase (M metadata, X complete, B begin, E end, i instant), ``pid`` the rank, ``tid`` the row, ``ts``
    and ``dur`` begin and length in microseconds, ``s`` the scope of an instant (t for its row), ``args`` a JSON object.
    """

    name: str
    ph: str
    pid: int
    tid: int | msgspec.UnsetType = msgspec.UNSET
    ts: float | msgspec.UnsetType = msgspec.UNSET
    dur: float | msgspec.UnsetType = msgspec.UNSET
    category: str | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="cat")
    s: str | msgspec.UnsetType = msgspec.UNSET
    args: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def metadata_event(
    name: str, rank: int, args: dict[str, object], row: int | msgspec.UnsetType = msgspec.UNSET
) -> bytes:
    """Encode a record that describes a process, a row, or the timeline itself."""
    return _ENCODER.encode(ChromeEvent(name, "M", rank, row, args=msgspec.Raw(_ENCODER.encode(args))))


class TraceMerger:
    """Merger of the chunks of all ranks into one trace.

    Args:
        start: rank 0's clock when the timeline began, nanoseconds.
        epoch_micros: the same moment in microseconds since 1970.
        size: number of ranks.
    """

    def __init__(self, start: int, epoch_micros: int, size: int) -> None:
        self._start = start
        self._clocks: dict[int, tuple[int, int]] = {}
        self._dropped: dict[int, int] = {}
        self.first = metadata_event(START_EVENT, 0, {START_EVENT: epoch_micros, "reigen": __version__, "size": size})

    def records(self, rank: int, chunk: TraceChunk) -> list[bytes]:
        """Return the records that a chunk of a rank adds to the trace."""
        found = self._about(rank, chunk)
        for row, title in chunk.rows:
            found.append(metadata_event("thread_name", rank, {"name": title}, row))
            found.append(metadata_event("thread_sort_index", rank, {"sort_index": row}, row))
        shift = chunk.offset - self._start
        arguments = [msgspec.Raw(text) for text in chunk.arguments]
        encode, labels, unset = _ENCODER.encode, chunk.labels, msgspec.UNSET
        for form, place, row, begin, nanoseconds, detail in chunk.slices:
            name, category = labels[place]
            found.append(
                encode(
                    ChromeEvent(
                        name,
                        PHASES[form],
                        rank,
                        row,
                        max(0, begin + shift) / 1000,
                        nanoseconds / 1000 if not form else unset,
                        category,
                        "t" if form == INSTANT else unset,
                        arguments[detail] if detail >= 0 else unset,
                    )
                )
            )
        return found

    def until(self, now: int) -> bytes:
        """Return the record that the recording has come to ``now`` (rank 0's clock)."""
        return metadata_event(UNTIL_EVENT, 0, {"ts_us": (now - self._start) / 1000})

    def lost(self, rank: int, num_chunks: int) -> bytes:
        """Return the record of chunks that could not be written in time."""
        return metadata_event("dropped_pages", rank, {"count": num_chunks})

    def _about(self, rank: int, chunk: TraceChunk) -> list[bytes]:
        """Return records of changes of the rank's host, clock, and number of dropped events."""
        found: list[bytes] = []
        if rank not in self._dropped:
            self._dropped[rank] = 0
            found.append(metadata_event("process_name", rank, {"name": f"rank {rank} ({chunk.host})"}))
            found.append(metadata_event("process_sort_index", rank, {"sort_index": rank}))
        known = self._clocks.get(rank)
        if known is None or chunk.offset != known[0] or not known[1] / 2 <= chunk.error <= 2 * known[1]:
            self._clocks[rank] = (chunk.offset, chunk.error)
            error = chunk.error / 1000 if chunk.error >= 0 else None
            found.append(metadata_event("clock_offset", rank, {"offset_us": chunk.offset / 1000, "error_us": error}))
        if chunk.num_dropped != self._dropped[rank]:
            self._dropped[rank] = chunk.num_dropped
            found.append(metadata_event("dropped_events", rank, {"count": chunk.num_dropped}))
        return found
