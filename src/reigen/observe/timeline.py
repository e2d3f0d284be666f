"""Timeline of a job on one rank: when to record, where to send it, which rank writes.

Every rank has a `Timeline` from the beginning; it costs nothing until it is started. `reigen.observe.messages` has the
protocol.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import msgspec

from reigen.engine.engine import Engine
from reigen.engine.messages import Topic
from reigen.errors import ArgumentError
from reigen.observe import messages
from reigen.observe.clock_sync import TimelineClock, monotonic_clock
from reigen.observe.collector import TraceCollector
from reigen.observe.recorder import EventRecorder
from reigen.observe.sender import TraceRecording, TraceSender

#: Seconds that a rank that leaves waits until the file is complete; longer than rank 0 waits for the others.
_LEAVE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_log = logging.getLogger("reigen")


class Timeline:
    """Timelines of the job on one rank, at most one at a time.

    The ``channel`` must not have received anything yet: notes without a listener are dropped. In an elastic ``job``,
    which has a name, each ``view`` has its own timeline, and rank 0 continues the file of the view before.
    """

    def __init__(
        self,
        channel: Engine,
        rank: int,
        size: int,
        host: str,
        clock: TimelineClock | None = None,
        *,
        view: int = 0,
        job: str = "",
    ) -> None:
        self._view, self._job = view, job
        self._channel = channel
        self._rank, self._size, self._host = rank, size, host
        self._clock = clock or monotonic_clock()
        self._lock = threading.Lock()
        self._recorder: EventRecorder | None = None
        #: rank 0: the writer of the file; the other ranks: the sender to rank 0
        self._collector: TraceCollector | None = None
        self._sender: TraceSender | None = None
        self._session = 0
        channel.listen(Topic.TIMELINE, self._on_rank_note if rank == 0 else self._on_coordinator_note)

    def start(self, path: str, mark_cycles: bool) -> None:
        """Rank 0: record on all ranks, into a file. Other ranks: nothing, until rank 0's request comes.

        A second start with the file of the first is ignored, as in Horovod.

        Raises:
            ArgumentError: another file is being written already; the file cannot be written.
        """
        if self._rank != 0:
            return
        file = Path(path).absolute()
        with self._lock:
            if self._collector is not None and self._collector.is_active:
                if self._collector.path == file:
                    return
                raise ArgumentError(
                    f"a timeline is being written to {self._collector.path} already: call stop_timeline() first"
                )
            recorder = self._begin_recording()
            recording = TraceRecording(recorder, self._clock, self._session + 1, self._host, mark_cycles)
            try:
                collector = TraceCollector(
                    self._channel, recording, file, self._size, self._end_recording, self._view, self._job
                )
            except OSError as error:
                self._end_recording()
                raise ArgumentError(f"the timeline cannot be written to {path}: {error.strerror}") from error
            self._session += 1
            self._collector = collector
            self._post(messages.TraceStart(self._session, mark_cycles, self._clock.identity))
            collector.start()

    def view_begins(self, size: int, change: str, lost_seconds: float) -> None:
        """Record on rank 0, in an elastic job, that the steps of its view may be run."""
        with self._lock:
            if self._collector is not None:
                self._collector.view_begins(size, change, lost_seconds)

    def prepare(self) -> None:
        """Other ranks than 0: begin to record, since rank 0 is about to start a timeline."""
        with self._lock:
            if self._rank != 0 and self._recorder is None:
                self._begin_recording()

    def start_as_configured(self, path: str | None, mark_cycles: bool) -> None:
        """Start at the beginning of the job as its environment asks for. A job does not fail for want of a timeline."""
        if path is None or path == "DYNAMIC":
            return
        if self._rank != 0:
            self.prepare()
            return
        try:
            self.start(path, mark_cycles)
        except ArgumentError as error:
            _log.warning("%s; the job goes on without it", error)
            self._post(messages.TraceStop(self._session + 1))

    def stop(self) -> None:
        """Complete the file on rank 0; return when that is done. Nothing on other ranks, or without a timeline."""
        with self._lock:
            if self._collector is not None:
                self._collector.finish()
                self._collector = None

    def close(self) -> None:
        """Make sure, before this rank leaves the job, that the file has its last events. Raises nothing; bounded."""
        self.stop()
        sender = self._sender
        if sender is not None:
            sender.finish()
            until = time.monotonic() + _LEAVE_SECONDS
            while self._channel.is_operational and time.monotonic() < until:
                if sender.is_closed.wait(_POLL_SECONDS):
                    break
        with self._lock:
            self._end_recording()

    @property
    def is_recording(self) -> bool:
        """Return whether this rank records its engine's events."""
        return self._recorder is not None

    @property
    def recorder(self) -> EventRecorder | None:
        """Return what records this rank's events; None: nothing does."""
        return self._recorder

    def _begin_recording(self) -> EventRecorder:
        self._recorder = EventRecorder(self._clock.read)
        self._channel.observe(self._recorder)
        return self._recorder

    def _end_recording(self) -> None:
        self._channel.observe(None)
        self._recorder = None

    def _post(self, message: messages.FromRankZero) -> None:
        self._channel.post(Topic.TIMELINE, messages.encode(message))

    # -- notes, on the thread that drives the engine ------------------------------------------------------------------

    def _on_rank_note(self, sender: int, data: bytes) -> None:
        try:
            message = messages.decode_at_rank_zero(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            _log.warning("rank %d sent an unreadable piece of its timeline", sender)
            return
        collector = self._collector
        if collector is None or message.session != collector.session:
            return
        if isinstance(message, messages.ClockPing):
            self._post(messages.ClockPong(message.session, sender, message.sent, self._clock.read()))
        else:
            collector.receive(sender, message)

    def _on_coordinator_note(self, sender: int, data: bytes) -> None:
        try:
            message = messages.decode_from_rank_zero(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            _log.warning("rank 0 sent an unreadable message about the timeline")
            return
        match message:
            case messages.TraceStart(session, mark_cycles, clock):
                recorder = self._recorder or self._begin_recording()
                recording = TraceRecording(recorder, self._clock, session, self._host, mark_cycles)
                self._sender = TraceSender(self._channel, recording, self._rank, clock)
                self._sender.start()
            case messages.TraceStop(session):
                self._end_recording()
                if self._sender is not None and self._sender.session == session:
                    self._sender.end()
            case messages.TraceClosed(session):
                if self._sender is not None and self._sender.session == session:
                    self._sender.is_closed.set()
            case messages.ClockPong() if self._sender is not None:
                self._sender.answered(message)
