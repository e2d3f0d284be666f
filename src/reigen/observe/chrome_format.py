"""Converter from chunks of all ranks to a Chrome trace: the array format, for Perfetto and chrome://tracing.

One process for each rank, one thread for each of its rows. Times are microseconds of rank 0's clock since the start.
In an elastic job each view has processes of its own, since its ranks are others, and one more has a row of all views.
"""

from __future__ import annotations

import msgspec

from reigen._version import __version__
from reigen.observe.messages import INSTANT, PHASES, TraceChunk

#: Name of the first record, and of the number in its arguments: the mark of a timeline's file. Horovod's name.
START_EVENT = "start_time_since_epoch_in_micros"
#: Name of regular records that show how far the recording has come: a job that hangs records nothing else.
UNTIL_EVENT = "recorded_until"
#: Name of the record of the processors that a rank may use: a mask, hexadecimal, and how many at a time, 0 for all.
CPUS_EVENT = "allowed_cpus"
#: Category of the spans of views.
VIEW = "view"
#: Numbers of processes: of a rank, less by this for each view behind the first; and of the row of views.
VIEW_STRIDE = 1_000_000
_VIEWS_PROCESS = VIEW_STRIDE - 1

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
        view: of an elastic job; 0: of another one.
        job: in an elastic job, names it, so that the file of an earlier one is not continued.
    """

    def __init__(self, start: int, epoch_micros: int, size: int, view: int = 0, job: str = "") -> None:
        self._start, self._epoch_micros = start, epoch_micros
        self._view, self._first_process = view, max(0, view - 1) * VIEW_STRIDE
        self._clocks: dict[int, tuple[int, int]] = {}
        self._dropped: dict[int, int] = {}
        about = {START_EVENT: epoch_micros, "reigen": __version__, "size": size, **({"job": job} if job else {})}
        self.first = metadata_event(START_EVENT, 0, about)

    def continue_file(self, epoch_micros: int) -> None:
        """Count times from the beginning of a file that began at that moment."""
        self._start -= (self._epoch_micros - epoch_micros) * 1000
        self._epoch_micros = epoch_micros

    def view_begins(self, size: int, change: str, now: int, lost_seconds: float) -> list[bytes]:
        """Return the records that the view before has ended, and this one begins ``now`` (rank 0's clock)."""
        micros = (now - self._start) / 1000
        records = [
            metadata_event("process_name", _VIEWS_PROCESS, {"name": "views"}),
            metadata_event("process_sort_index", _VIEWS_PROCESS, {"sort_index": -1}),
            metadata_event("thread_name", _VIEWS_PROCESS, {"name": "views"}, 0),
        ]
        if self._view > 1:
            ended = max(0.0, micros - lost_seconds * 1e6)
            records.append(_ENCODER.encode(ChromeEvent("", "E", _VIEWS_PROCESS, 0, ended, category=VIEW)))
        arguments = msgspec.Raw(_ENCODER.encode({"view": self._view, "size": size, "change": change}))
        name = f"view {self._view}: {size} ranks"
        begins = ChromeEvent(name, "B", _VIEWS_PROCESS, 0, max(0.0, micros), category=VIEW, args=arguments)
        return [*records, _ENCODER.encode(begins)]

    def records(self, rank: int, chunk: TraceChunk) -> list[bytes]:
        """Return the records that a chunk of a rank adds to the trace."""
        found = self._about(rank, chunk)
        rank += self._first_process
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
        return metadata_event(UNTIL_EVENT, self._first_process, {"ts_us": (now - self._start) / 1000})

    def lost(self, rank: int, num_chunks: int) -> bytes:
        """Return the record of chunks that could not be written in time."""
        return metadata_event("dropped_pages", self._first_process + rank, {"count": num_chunks})

    def _about(self, rank: int, chunk: TraceChunk) -> list[bytes]:
        """Return records of changes of the rank's host, clock, and number of dropped events."""
        found: list[bytes] = []
        process = self._first_process + rank
        if rank not in self._dropped:
            self._dropped[rank] = 0
            where = f"{chunk.host}, view {self._view}" if self._view > 1 else chunk.host
            found.append(metadata_event("process_name", process, {"name": f"rank {rank} ({where})"}))
            found.append(metadata_event("process_sort_index", process, {"sort_index": process}))
            if chunk.cpus:
                found.append(metadata_event(CPUS_EVENT, process, {"mask": chunk.cpus, "quota": chunk.cpu_quota}))
        known = self._clocks.get(rank)
        if known is None or chunk.offset != known[0] or not known[1] / 2 <= chunk.error <= 2 * known[1]:
            self._clocks[rank] = (chunk.offset, chunk.error)
            error = chunk.error / 1000 if chunk.error >= 0 else None
            found.append(metadata_event("clock_offset", process, {"offset_us": chunk.offset / 1000, "error_us": error}))
        if chunk.num_dropped != self._dropped[rank]:
            self._dropped[rank] = chunk.num_dropped
            found.append(metadata_event("dropped_events", process, {"count": chunk.num_dropped}))
        return found
