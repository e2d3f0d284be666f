"""Builder of slices in rows from a rank's engine events. Pure: events in, chunks out.

Slices of a collective, one after the other in one row, with Horovod's names:

* NEGOTIATE_ALLREDUCE: this rank has submitted it, and waits until all have and rank 0 has announced it
* QUEUE: announced, while another one is being carried out
* ALLREDUCE: carried out. Within it, in the row of the first tensor of a batch, its phases

and of a thread STEP, from one mark to the next, with the processor time in it, and within it WAIT: it can do nothing
but wait for a collective, or for parameter servers. Of these PUSH, PULL and the like: requests, from sent to answered.
GRADIENT is a moment: backward has made one.

A slice becomes known when it ends. One that takes long is shown as begun already (`TraceEventBuilder.emit_long`), so
that the file of a job that hangs, or was killed, has the collectives that it was waiting for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from reigen.engine.messages import UNNAMED, Operation, OperationKind, Response
from reigen.observe import recorder
from reigen.observe.messages import BEGUN, COMPLETE, INSTANT, OVER, TraceSlice
from reigen.observe.recorder import Event, GradientArrival, ServerRequest
from reigen.resources.cpu import ProcessorTime

#: A slice that has not ended after this time is shown as begun.
LONG_NANOSECONDS = 1_000_000_000
#: Shorter times in the queue, or in a phase, are not shown.
_SHORT_NANOSECONDS = 1_000
_MAX_REMEMBERED = 4096

#: Numbers of rows, a trace's "threads". They begin at 1000, because Perfetto takes thread 0 for none, and the thread
#: that has its process's number for the main one.
CYCLES, _FIRST_THREAD, _FIRST_REQUESTS, FIRST_TENSOR = 1000, 1001, 1050, 1100
#: Rows that are named after a tensor.
MAX_NAMED = 200
FIRST_SHARED = FIRST_TENSOR + MAX_NAMED

#: Categories of slices.
NEGOTIATION, COLLECTIVE, PHASE, QUEUE = "negotiation", "collective", "phase", "queue"
THREAD, CYCLE, ERROR, SERVER, GRADIENT = "thread", "cycle", "error", "server", "gradient"

#: Arguments of steps, in microseconds: a `ProcessorTime`.
PROCESSOR_ARGUMENTS = ("cpu_us", "cpu_delay_us", "process_cpu_us")

#: Limit of a chunk's content, estimated from above, in bytes; one addition more fits into a note.
CHUNK_BYTES = 24 << 10
_SLICE_BYTES = 34
_ENTRY_BYTES = 12

Arguments = dict[str, Any]
#: Encode arguments of a slice.
encode_arguments: Callable[[Arguments], bytes] = msgspec.json.Encoder().encode
Batch = Sequence[tuple[Operation, Response]]


@dataclass(slots=True)
class ChunkContent:
    """Content of a chunk; see `reigen.observe.messages.TraceChunk`."""

    rows: list[tuple[int, str]] = field(default_factory=list)
    labels: list[tuple[str, str]] = field(default_factory=list)
    arguments: list[bytes] = field(default_factory=list)
    slices: list[TraceSlice] = field(default_factory=list)


class ChunkBuilder:
    """Builder of chunks; names and arguments stand once in each."""

    def __init__(self) -> None:
        self._done: list[ChunkContent] = []
        self._start_chunk()

    def _start_chunk(self) -> None:
        self._page = ChunkContent()
        self._done.append(self._page)
        self._labels: dict[tuple[str, str], int] = {}
        self._arguments: dict[bytes, int] = {}
        self._nbytes = 0

    def add_rows(self, rows: list[tuple[int, str]]) -> None:
        """Add new rows, before the slices in them."""
        for row in rows:
            self._page.rows.append(row)
            self._nbytes += len(row[1].encode()) + _ENTRY_BYTES
            if self._nbytes > CHUNK_BYTES:
                self._start_chunk()

    def add(self, form: int, label: tuple[str, str], row: int, begin: int, nanoseconds: int, arguments: bytes) -> None:
        """Add a slice; ``arguments`` is a JSON object, or empty."""
        page = self._page
        place = self._labels.get(label)
        if place is None:
            place = self._labels[label] = len(page.labels)
            page.labels.append(label)
            self._nbytes += len(label[0]) + len(label[1]) + _ENTRY_BYTES
        detail = self._arguments.get(arguments) if arguments else -1
        if detail is None:
            detail = self._arguments[arguments] = len(page.arguments)
            page.arguments.append(arguments)
            self._nbytes += len(arguments) + _ENTRY_BYTES
        page.slices.append((form, place, row, begin, nanoseconds, detail))
        self._nbytes += _SLICE_BYTES
        if self._nbytes > CHUNK_BYTES:
            self._start_chunk()

    def take(self) -> list[ChunkContent]:
        """Return the chunks so far; the next slice begins a new one."""
        done = [page for page in self._done if page.slices or page.rows]
        self._done = []
        self._start_chunk()
        return done


class TrackAllocator:
    """Rows of one rank's part of the trace, allocated so that nothing overlaps in a row.

    A tensor that comes again has a row of its own from then on, which carries its name, as long as there are not too
    many. The others share rows that are free. A thread that waits or marks steps has one, too.
    """

    def __init__(self) -> None:
        #: rows that have not been announced: number and title
        self.new: list[tuple[int, str]] = []
        self._threads: dict[int, int] = {}
        self._named: dict[str, int] = {}
        #: tensors that have come once
        self._seen: set[str] = set()
        self._busy: set[int] = set()
        #: when the latest request in each of their rows was answered
        self._requests: list[int] = []
        #: shared rows that are free, and how many there are in all
        self._free: list[int] = []
        self._num_shared = 0

    def thread_track(self, thread: int) -> int:
        """Return the row of a thread."""
        row = self._threads.get(thread)
        if row is None:
            row = self._threads[thread] = min(_FIRST_THREAD + len(self._threads), _FIRST_REQUESTS - 1)
            number = len(self._threads)
            self.new.append((row, "steps and waits" if number == 1 else f"steps and waits, thread {number}"))
        return row

    def request_track(self, begin: int, end: int) -> int:
        """Return the first row of requests in which nothing has ended behind ``begin``; the last one, of too many."""
        for number, latest in enumerate(self._requests):
            if latest <= begin or number == FIRST_TENSOR - _FIRST_REQUESTS - 1:
                break
        else:
            number = len(self._requests)
            self._requests.append(end)
            self.new.append((_FIRST_REQUESTS + number, f"requests to servers {number + 1}"))
        self._requests[number] = max(end, self._requests[number])
        return _FIRST_REQUESTS + number

    def take(self, name: str) -> int:
        """Take a free row for a tensor, until it is given back."""
        row = self._named.get(name)
        if row is None and name in self._seen and len(self._named) < MAX_NAMED:
            row = self._named[name] = FIRST_TENSOR + len(self._named)
            self._seen.discard(name)
            self.new.append((row, name))
        elif row is None:
            if len(self._seen) >= _MAX_REMEMBERED:
                self._seen.clear()
            self._seen.add(name)
        if row is None or row in self._busy:
            row = self._shared()
        self._busy.add(row)
        return row

    def give_back(self, row: int) -> None:
        """Free the row."""
        self._busy.discard(row)
        if row >= FIRST_SHARED:
            heapq.heappush(self._free, row)

    def _shared(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        row = FIRST_SHARED + self._num_shared
        self._num_shared += 1
        self.new.append((row, f"other tensors {self._num_shared}"))
        return row


@dataclass(slots=True)
class _OpenSlice:
    """Slice that has begun at ``begin`` nanoseconds; its arguments are JSON.

    ``is_shown``: as begun; it has to be shown as ended, then.
    """

    label: tuple[str, str]
    row: int
    begin: int
    arguments: bytes
    is_shown: bool = False


class TraceEventBuilder:
    """Builder of one rank's part of the trace; ``mark_cycles``: show CYCLE_START."""

    def __init__(self, mark_cycles: bool) -> None:
        self._mark_cycles = mark_cycles
        self._pages = ChunkBuilder()
        self._rows = TrackAllocator()
        #: submissions that are not being carried out, by name
        self._negotiating: dict[str, _OpenSlice] = {}
        #: the batch that is being carried out: one slice for each operation
        self._executing: list[_OpenSlice] = []
        #: by thread
        self._waiting: dict[int, _OpenSlice] = {}
        #: by thread and name: time and number of the last mark, and the processor time until then
        self._marks: dict[tuple[int, str], tuple[int, int, ProcessorTime]] = {}
        self._announced = 0
        #: latest arguments by name: of its negotiation, and of which kind it was; and of its execution, alone or with
        #: others
        self._names: dict[str, tuple[OperationKind, bytes]] = {}
        self._descriptions: dict[str, tuple[Operation, int, bytes]] = {}

    def follow(self, events: Sequence[Event]) -> None:
        """Take events, in the order in which they were noted."""
        for what, now, a, b in events:
            if what == recorder.SUBMITTED:
                self._submitted(now, a)
            elif what == recorder.BEGAN:
                self._began(now, a)
            elif what == recorder.ENDED:
                self._ended(now, b)
            elif what == recorder.ANNOUNCED:
                self._note_announcement(now)
            elif what == recorder.WAITING:
                self._begin_wait(now, a, b)
            elif what == recorder.WAITED:
                self._end_wait(now, a)
            elif what == recorder.MARK:
                self._mark(now, a, *b)
            elif what == recorder.ANSWERED:
                self._answered(now, a)
            elif what == recorder.GRADIENT:
                self._gradient_arrived(now, a, b)
            else:
                self._failed(now, a)

    def emit_long(self, now: int) -> None:
        """Show slices that began long ago as begun."""
        for group in (self._negotiating.values(), self._executing, self._waiting.values()):
            for one in group:
                if not one.is_shown and now - one.begin > LONG_NANOSECONDS:
                    one.is_shown = True
                    self._pages.add(BEGUN, one.label, one.row, one.begin, 0, one.arguments)

    def take(self) -> list[ChunkContent]:
        """Return the chunks since the last call."""
        if self._rows.new:
            self._pages.add_rows(self._rows.new)
            self._rows.new = []
        return self._pages.take()

    # -- events -------------------------------------------------------------------------------------------------------

    def _submitted(self, now: int, operation: Operation) -> None:
        name = operation.name
        lost = self._negotiating.pop(name, None)  # its end was dropped
        if lost is not None:
            self._rows.give_back(lost.row)
        row = self._rows.take(make_title(operation))
        label = (f"NEGOTIATE_{operation.kind.name}", NEGOTIATION)
        known = self._names.get(name)
        if known is None or known[0] is not operation.kind:
            if len(self._names) >= _MAX_REMEMBERED:
                self._names.clear()
            known = self._names[name] = (operation.kind, encode_arguments({"tensor": make_title(operation)}))
        self._negotiating[name] = _OpenSlice(label, row, now, known[1])

    def _began(self, now: int, batch: Batch) -> None:
        for one in self._executing:  # the batch before, whose end was dropped
            self._rows.give_back(one.row)
        self._executing = []
        for operation, _ in batch:
            name = operation.name
            negotiation = self._negotiating.pop(name, None)
            if negotiation is None:  # submitted before the recording began, or by the others alone
                row = self._rows.take(make_title(operation))
            else:
                row = negotiation.row
                announced = max(negotiation.begin, min(self._announced or now, now))
                if now - announced < _SHORT_NANOSECONDS:
                    announced = now
                self._close(negotiation, announced)
                if announced < now:
                    self._pages.add(COMPLETE, ("QUEUE", QUEUE), row, announced, now - announced, b"")
            arguments = self._arguments_of(operation, len(batch))
            self._executing.append(_OpenSlice((operation.kind.name, COLLECTIVE), row, now, arguments))

    def _ended(self, now: int, phases: dict[str, list[int]]) -> None:
        if not self._executing:
            return
        first = self._executing[0]
        for one in self._executing:
            self._close(one, now)
            self._rows.give_back(one.row)
        begin = first.begin
        for name, (nanoseconds, count) in phases.items():
            if nanoseconds >= _SHORT_NANOSECONDS:
                arguments = encode_arguments({"count": count}) if count > 1 else b""
                self._pages.add(COMPLETE, (name, PHASE), first.row, begin, min(nanoseconds, now - begin), arguments)
            begin += nanoseconds
        self._executing = []

    def _note_announcement(self, now: int) -> None:
        self._announced = now
        if self._mark_cycles:
            self._pages.add(INSTANT, ("CYCLE_START", CYCLE), CYCLES, now, 0, b"")

    def _begin_wait(self, now: int, thread: int, name: str) -> None:
        row = self._rows.thread_track(thread)
        known = self._names.get(name)
        arguments = known[1] if known else encode_arguments({"tensor": name})
        self._waiting[thread] = _OpenSlice(("WAIT", THREAD), row, now, arguments)

    def _end_wait(self, now: int, thread: int) -> None:
        if (wait := self._waiting.pop(thread, None)) is not None:
            self._close(wait, now)

    def _failed(self, now: int, name: str) -> None:
        negotiation = self._negotiating.pop(name, None)
        if negotiation is not None:
            self._close(negotiation, now)
            self._pages.add(INSTANT, ("FAILED", ERROR), negotiation.row, now, 0, negotiation.arguments)
            self._rows.give_back(negotiation.row)

    def _mark(self, now: int, thread: int, name: str, processor_time: ProcessorTime) -> None:
        before = self._marks.get((thread, name))
        number = 0 if before is None else before[1] + 1
        self._marks[thread, name] = (now, number, processor_time)
        if before is not None:
            arguments: Arguments = {"number": number}
            for key, end, begin in zip(PROCESSOR_ARGUMENTS, processor_time, before[2], strict=True):
                arguments[key] = (end - begin) // 1000
            row = self._rows.thread_track(thread)
            self._pages.add(COMPLETE, (name, THREAD), row, before[0], now - before[0], encode_arguments(arguments))

    def _answered(self, now: int, request: ServerRequest) -> None:
        begin = now - request.nanoseconds
        arguments = encode_arguments({"server": request.server, "bytes": request.nbytes})
        row = self._rows.request_track(begin, now)
        self._pages.add(COMPLETE, (request.kind, SERVER), row, begin, request.nanoseconds, arguments)

    def _gradient_arrived(self, now: int, thread: int, arrival: GradientArrival) -> None:
        arguments = encode_arguments(
            {"tensor": arrival.name, "number": arrival.parameter, "bytes": arrival.nbytes, "dtype": arrival.dtype}
        )
        self._pages.add(INSTANT, ("GRADIENT", GRADIENT), self._rows.thread_track(thread), now, 0, arguments)

    # -- slices -------------------------------------------------------------------------------------------------------

    def _close(self, one: _OpenSlice, now: int) -> None:
        if one.is_shown:
            self._pages.add(OVER, one.label, one.row, now, 0, b"")
        else:
            self._pages.add(COMPLETE, one.label, one.row, one.begin, now - one.begin, one.arguments)

    def _arguments_of(self, operation: Operation, batch_size: int) -> bytes:
        known = self._descriptions.get(operation.name)
        if known is not None and known[1] == batch_size and known[0] == operation:
            return known[2]
        if len(self._descriptions) >= _MAX_REMEMBERED:
            self._descriptions.clear()
        arguments = encode_arguments(describe_operation(operation, batch_size))
        self._descriptions[operation.name] = (operation, batch_size, arguments)
        return arguments


def make_title(operation: Operation) -> str:
    """Return the title of a collective: Horovod puts the kind before the name, ``allreduce.loss``."""
    name, kind = operation.name, operation.kind.name.lower()
    has_it = UNNAMED in name or name.startswith((f"{kind}.", f"{kind} "))
    return name if has_it else f"{kind}.{name}"


def parse_title(title: str) -> str:
    """Return the tensor's name of a title."""
    kind, _, name = title.partition(".")
    return name if kind.upper() in OperationKind.__members__ and UNNAMED not in title else title


def describe_operation(operation: Operation, batch_size: int) -> Arguments:
    """Describe a collective beside its name.

    Shape and bytes are of this rank, as Horovod's are; ``batch_size`` counts the operations of its batch.
    """
    arguments: Arguments = {"tensor": make_title(operation)}
    if operation.members:
        arguments |= {"tensors": len(operation.members), "bytes": operation.nbytes}
    elif operation.dtype:
        shape = ", ".join(map(str, operation.shape))
        arguments |= {"dtype": operation.dtype, "shape": f"[{shape}]", "bytes": operation.nbytes}
    elif operation.kind in (OperationKind.ALLOCATE, OperationKind.ALLOCATE_SHARED):
        arguments["bytes"] = operation.shape[0]
    if operation.kind in (OperationKind.ALLREDUCE, OperationKind.REDUCESCATTER, OperationKind.REDUCE_TO_OWNERS):
        arguments["op"] = operation.op.name
    if operation.kind is OperationKind.BROADCAST:
        arguments["root"] = operation.root
    if operation.process_set:
        arguments["process_set"] = operation.process_set
    arguments["batch"] = batch_size
    return arguments
