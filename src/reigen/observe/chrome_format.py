"""From pages of all ranks to records of a Chrome trace: the array format, which Perfetto and chrome://tracing read.

One process for each rank, one thread for each of its rows. Times are microseconds of rank 0's clock since the start.
"""

from __future__ import annotations

import msgspec

from reigen._version import __version__
from reigen.observe.messages import INSTANT, PHASES, TraceChunk

#: Name of the first record, and of the number in its arguments: it tells that a file is a timeline. Horovod's name.
START_EVENT = "start_time_since_epoch_in_micros"
#: Comes now and then: a job that hangs does nothing else.
UNTIL_EVENT = "recorded_until"

_ENCODER = msgspec.json.Encoder()


class ChromeEvent(msgspec.Struct, omit_defaults=True):
    """One record; the fields' names are the format's, but for ``category``.

    Attributes:
        name: what happened.
        ph: phase: M metadata, X complete, B begin, E end, i instant.
        pid: rank.
        tid: row.
        ts: begin, in microseconds.
        dur: length, in microseconds.
        category: kind of event.
        s: scope of an instant: t for its row.
        args: JSON object.
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
    """A record that describes a process, a row, or the timeline itself."""
    return _ENCODER.encode(ChromeEvent(name, "M", rank, row, args=msgspec.Raw(_ENCODER.encode(args))))


class TraceMerger:
    """Puts the pages of all ranks into one trace.

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

    def records(self, rank: int, page: TraceChunk) -> list[bytes]:
        """What a page of a rank adds to the trace."""
        found = self._about(rank, page)
        for row, title in page.rows:
            found.append(metadata_event("thread_name", rank, {"name": title}, row))
            found.append(metadata_event("thread_sort_index", rank, {"sort_index": row}, row))
        shift = page.offset - self._start
        arguments = [msgspec.Raw(text) for text in page.arguments]
        encode, labels, unset = _ENCODER.encode, page.labels, msgspec.UNSET
        for form, place, row, begin, nanoseconds, detail in page.slices:
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
        """That the recording went on until ``now`` (rank 0's clock), though nothing may have happened."""
        return metadata_event(UNTIL_EVENT, 0, {"ts_us": (now - self._start) / 1000})

    def lost(self, rank: int, num_pages: int) -> bytes:
        """Pages that came and could not be written in time."""
        return metadata_event("dropped_pages", rank, {"count": num_pages})

    def _about(self, rank: int, page: TraceChunk) -> list[bytes]:
        """What has changed about the rank: who it is, how far its clock is, and how much it has lost."""
        found: list[bytes] = []
        if rank not in self._dropped:
            self._dropped[rank] = 0
            found.append(metadata_event("process_name", rank, {"name": f"rank {rank} ({page.host})"}))
            found.append(metadata_event("process_sort_index", rank, {"sort_index": rank}))
        known = self._clocks.get(rank)
        if known is None or page.offset != known[0] or not known[1] / 2 <= page.error <= 2 * known[1]:
            self._clocks[rank] = (page.offset, page.error)
            error = page.error / 1000 if page.error >= 0 else None
            found.append(metadata_event("clock_offset", rank, {"offset_us": page.offset / 1000, "error_us": error}))
        if page.num_dropped != self._dropped[rank]:
            self._dropped[rank] = page.num_dropped
            found.append(metadata_event("dropped_events", rank, {"count": page.num_dropped}))
        return found
