"""Reader of a timeline's file: complete, or cut short anywhere."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from reigen.errors import ReigenError
from reigen.observe.chrome_format import CPUS_EVENT, START_EVENT, UNTIL_EVENT, VIEW, VIEW_STRIDE
from reigen.observe.trace_events import COLLECTIVE, ERROR, GRADIENT, NEGOTIATION, PHASE, SERVER, THREAD, parse_title
from reigen.resources.cpu import AllowedCpus

#: Begin and end.
Interval = tuple[float, float]


class TraceError(ReigenError):
    """Error for a file that is no timeline."""


class _EventArguments(msgspec.Struct, gc=False):
    tensor: str = ""
    bytes: int = 0
    dtype: str = ""
    number: int = 0
    batch: int = 1
    process_set: int = 0
    name: str = ""
    error_us: float | None = None
    ts_us: float = 0.0
    count: int = 0
    size: int = 0
    view: int = 0
    change: str = ""
    server: int = 0
    cpu_us: float | None = None
    cpu_delay_us: float = 0.0
    process_cpu_us: float = 0.0
    mask: str = "0"
    quota: float = 0.0


class _EventLine(msgspec.Struct, gc=False):
    """Fields that are read of a record; see `reigen.observe.chrome_format.ChromeEvent`."""

    name: str = ""
    ph: str = ""
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    cat: str = ""
    args: _EventArguments | None = None

    @property
    def view(self) -> int:
        """The view of an elastic job that a rank's record is of; 1 in other jobs."""
        return self.pid // VIEW_STRIDE + 1


#: Of what is read of both ends of a file, the beginning is this part.
_HEAD_PART = 8
_ARRAY_DECODER = msgspec.json.Decoder(list[_EventLine])
_LINE_DECODER = msgspec.json.Decoder(_EventLine)
_NO_ARGUMENTS = _EventArguments()


@dataclass(slots=True)
class CollectiveExecution:
    """Execution of a collective on one rank. Times are microseconds since the timeline's start.

    Attributes:
        kind: ALLREDUCE and the like.
        process_set: its ranks.
        nbytes: of this rank's tensor.
        batch: the number of tensors in its batch.
        submitted: None when that was not recorded.
        announced: when all ranks had submitted it and rank 0 had said so; None when that was not recorded.
        dtype: of its elements; empty where it is several tensors.
    """

    rank: int
    kind: str
    tensor: str
    process_set: int
    nbytes: int
    batch: int
    submitted: float | None
    begun: float
    ended: float
    announced: float | None = None
    dtype: str = ""


@dataclass(slots=True)
class RequestExecution:
    """Request to a parameter server, from sent to answered; ``nbytes`` of values, there and back."""

    rank: int
    kind: str
    server: int
    nbytes: int
    begun: float
    ended: float


@dataclass(slots=True)
class GradientMoment:
    """Moment at which backward had made a gradient of a rank; see `reigen.observe.recorder.GradientArrival`."""

    at: float
    number: int
    name: str
    nbytes: int
    dtype: str


@dataclass(slots=True)
class StepProcessorTime:
    """Processor time of a step, in microseconds; see `reigen.resources.cpu.ProcessorTime`."""

    thread: float
    delay: float
    process: float


@dataclass(slots=True)
class UnfinishedCollective:
    """Submission that had not been answered when the recording ended."""

    rank: int
    tensor: str
    since: float


@dataclass(slots=True)
class Trace:
    """Content of a timeline.

    Attributes:
        size: number of ranks of the job.
        names: of the ranks that recorded something, with their hosts.
        executions: in no order.
        failures: rank and tensor of submissions that failed.
        pending: submissions without an answer at the end.
        phases: by rank and begin of a batch: time of each phase.
        requests: in no order.
        gradients: by rank, in order: of the first steps of an optimizer of `reigen.torch`.
        steps: by rank, in order.
        processor_times: by rank: of each of its steps; empty where that is unknown.
        cpus: by rank: which processors it may use.
        waits: by rank: times at which a caller could do nothing but wait.
        waited_for: by rank and begin of a wait: the tensor.
        clock_errors: by rank: the largest error of its times, in microseconds.
        num_dropped: events, or chunks of them, that are missing.
        end: the last time in the file.
        is_cut: the file breaks off.
        views: of an elastic job: of each its number, and what changed when it began. All else is of one of them.
        view: the number of that one.
    """

    size: int = 0
    names: dict[int, str] = field(default_factory=dict)
    executions: list[CollectiveExecution] = field(default_factory=list)
    phases: dict[tuple[int, float], dict[str, float]] = field(default_factory=dict)
    requests: list[RequestExecution] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    pending: list[UnfinishedCollective] = field(default_factory=list)
    gradients: dict[int, list[GradientMoment]] = field(default_factory=dict)
    steps: dict[int, list[Interval]] = field(default_factory=dict)
    processor_times: dict[int, list[StepProcessorTime]] = field(default_factory=dict)
    cpus: dict[int, AllowedCpus] = field(default_factory=dict)
    waits: dict[int, list[Interval]] = field(default_factory=dict)
    waited_for: dict[tuple[int, float], str] = field(default_factory=dict)
    clock_errors: dict[int, float] = field(default_factory=dict)
    num_dropped: int = 0
    end: float = 0.0
    is_cut: bool = False
    views: list[tuple[int, str]] = field(default_factory=list)
    view: int = 1


def read_trace(path: Path, most_bytes: int | None = None) -> Trace:
    """Read a timeline that Reigen has written; of an elastic job, the last view in it.

    Args:
        path: of the file.
        most_bytes: read so much of it at most: its beginning, which says what the ranks are, and its end.

    Raises:
        TraceError: it is none.
        OSError: the file cannot be read.
    """
    if most_bytes is not None and path.stat().st_size > most_bytes:
        lines, is_cut = _read_both_ends(path, most_bytes), False
    else:
        data = path.read_bytes()
        try:
            lines, is_cut = _ARRAY_DECODER.decode(data), False
        except (msgspec.DecodeError, UnicodeDecodeError):
            lines, is_cut = _parse_truncated(data), True
    if not lines or lines[0].name != START_EVENT or lines[0].args is None:
        raise TraceError(
            f"{path} is no timeline of Reigen: its first record would be {START_EVENT}. "
            "HOROVOD_TIMELINE=FILE or start_timeline(FILE) writes one"
        )
    views = [line for line in lines if line.cat == VIEW and line.ph == "B" and line.args is not None]
    last = max([line.view for line in lines if line.cat != VIEW], default=1)
    size = next((line.args.size for line in views if line.args and line.args.view == last), lines[0].args.size)
    of_view = [line for line in lines if line.view == last and line.pid % VIEW_STRIDE != VIEW_STRIDE - 1]
    for line in of_view:
        line.pid %= VIEW_STRIDE
    trace = _TraceParser(size).read(of_view)
    for line in of_view if most_bytes is not None else ():  # what was left out may have named them
        if line.ph == "X" and 0 <= line.pid < size:
            trace.names.setdefault(line.pid, f"rank {line.pid}")
    trace.views = [(line.args.view, line.args.change) for line in views if line.args]
    trace.is_cut, trace.view = is_cut, last
    return trace


def _read_both_ends(path: Path, most_bytes: int) -> list[_EventLine]:
    """Read records about the ranks at the beginning of a file, and all records at its end."""
    with path.open("rb") as file:
        head = file.read(most_bytes // _HEAD_PART)
        file.seek(-(most_bytes - len(head)), os.SEEK_END)
        tail = file.read(most_bytes)
    about = [line for line in _parse_truncated(head[: head.rfind(b"\n")]) if line.ph == "M" or line.cat == VIEW]
    return about + _parse_truncated(tail[tail.find(b"\n") :])


def _parse_truncated(data: bytes) -> list[_EventLine]:
    """Parse the records before the first that is broken: each has a line of its own."""
    lines: list[_EventLine] = []
    for text in data.splitlines():
        record = text.strip().strip(b",")
        if record in (b"[", b"]", b""):
            continue
        try:
            lines.append(_LINE_DECODER.decode(record))
        except (msgspec.DecodeError, UnicodeDecodeError):
            break
    return lines


class _TraceParser:
    """Parser of records."""

    def __init__(self, size: int) -> None:
        self._trace = Trace(size)
        #: by rank and tensor: when it was submitted, and announced
        self._submitted: dict[tuple[int, str], Interval] = {}
        #: by rank and row: when the latest collective in it began
        self._begun: dict[tuple[int, int], float] = {}
        #: by rank and row: slices that have begun and not ended
        self._open: dict[tuple[int, int], list[_EventLine]] = {}
        self._dropped: dict[tuple[int, str], int] = {}

    def read(self, lines: list[_EventLine]) -> Trace:
        for line in lines:
            if line.ph == "X":
                self._complete(line)
            elif line.ph == "M":
                self._about(line, line.args or _NO_ARGUMENTS)
            elif line.ph == "B":
                self._open.setdefault((line.pid, line.tid), []).append(line)
            elif line.ph == "E":
                self._end(line)
            elif line.cat == ERROR:
                failed = (line.pid, _tensor_of(line))
                self._trace.failures.append(failed)
                self._submitted.pop(failed, None)
            elif line.cat == GRADIENT and line.args is not None:
                about = line.args
                moment = GradientMoment(line.ts, about.number, about.tensor, about.bytes, about.dtype)
                self._trace.gradients.setdefault(line.pid, []).append(moment)
            self._trace.end = max(self._trace.end, line.ts + line.dur)
        for opened in self._open.values():
            for line in opened:
                if line.cat == NEGOTIATION:
                    self._trace.pending.append(UnfinishedCollective(line.pid, _tensor_of(line), line.ts))
                elif line.cat == THREAD:
                    line.dur = self._trace.end - line.ts
                    self._add_wait(line)
        self._trace.num_dropped = sum(self._dropped.values())
        return self._trace

    def _complete(self, line: _EventLine) -> None:
        arguments = line.args or _NO_ARGUMENTS
        trace, rank = self._trace, line.pid
        if line.cat == NEGOTIATION:
            self._submitted[rank, _tensor_of(line)] = (line.ts, line.ts + line.dur)
        elif line.cat == COLLECTIVE:
            tensor = _tensor_of(line)
            submitted, announced = self._submitted.pop((rank, tensor), (None, None))
            self._begun[rank, line.tid] = line.ts
            trace.executions.append(
                CollectiveExecution(
                    rank,
                    line.name,
                    tensor,
                    arguments.process_set,
                    arguments.bytes,
                    arguments.batch,
                    submitted,
                    line.ts,
                    line.ts + line.dur,
                    announced,
                    arguments.dtype,
                )
            )
        elif line.cat == PHASE:
            if (begun := self._begun.get((rank, line.tid))) is not None:
                phases = trace.phases.setdefault((rank, begun), {})
                phases[line.name] = phases.get(line.name, 0.0) + line.dur
        elif line.cat == SERVER:
            ended = line.ts + line.dur
            request = RequestExecution(rank, line.name, arguments.server, arguments.bytes, line.ts, ended)
            trace.requests.append(request)
        elif line.cat == THREAD:
            if line.name == "WAIT":
                self._add_wait(line)
            elif line.name == "STEP":
                trace.steps.setdefault(rank, []).append((line.ts, line.ts + line.dur))
                if arguments.cpu_us is not None:
                    of_step = StepProcessorTime(arguments.cpu_us, arguments.cpu_delay_us, arguments.process_cpu_us)
                    trace.processor_times.setdefault(rank, []).append(of_step)

    def _add_wait(self, line: _EventLine) -> None:
        self._trace.waits.setdefault(line.pid, []).append((line.ts, line.ts + line.dur))
        self._trace.waited_for[line.pid, line.ts] = _tensor_of(line)

    def _end(self, line: _EventLine) -> None:
        opened = self._open.get((line.pid, line.tid), [])
        for index in range(len(opened) - 1, -1, -1):
            if opened[index].name == line.name:
                begun = opened.pop(index)
                begun.dur = line.ts - begun.ts
                self._complete(begun)
                return

    def _about(self, line: _EventLine, arguments: _EventArguments) -> None:
        trace, rank = self._trace, line.pid
        if line.name == "process_name":
            trace.names[rank] = arguments.name
        elif line.name == "clock_offset" and arguments.error_us is not None:
            trace.clock_errors[rank] = max(trace.clock_errors.get(rank, 0.0), arguments.error_us)
        elif line.name == UNTIL_EVENT:
            trace.end = max(trace.end, arguments.ts_us)
        elif line.name == CPUS_EVENT:
            trace.cpus[rank] = _parse_cpus(arguments)
        elif line.name in ("dropped_events", "dropped_pages"):
            self._dropped[rank, line.name] = arguments.count


def _parse_cpus(arguments: _EventArguments) -> AllowedCpus:
    try:
        return AllowedCpus(int(arguments.mask, 16), arguments.quota)
    except ValueError:
        return AllowedCpus(0)


def _tensor_of(line: _EventLine) -> str:
    return parse_title((line.args or _NO_ARGUMENTS).tensor)
