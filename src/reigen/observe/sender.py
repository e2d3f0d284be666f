"""Recording of one rank, and the thread that brings it to rank 0."""

from __future__ import annotations

import threading
import time

from reigen.engine.engine import Engine
from reigen.engine.messages import Topic
from reigen.observe.clock_sync import ClockOffsetEstimate, TimelineClock, estimate_offset
from reigen.observe.messages import ClockPing, ClockPong, TraceChunk, TraceEnd, encode
from reigen.observe.recorder import EventRecorder
from reigen.observe.trace_events import TraceEventBuilder
from reigen.resources.cpu import read_allowed_cpus

#: Seconds between looks at the recorder, and writes of chunks: programs wait for a file as long as two of these take.
PERIOD_SECONDS = 0.05
#: Limit of events at a time: other threads want the interpreter, too.
_EVENTS_AT_ONCE = 256
#: Limit of events in one period; the rest waits in the recorder, and is dropped where that is full.
_EVENTS_IN_A_PERIOD = 20_000
#: While so many notes have not left, no more are made: they share the control channel with the collectives.
_MAX_UNSENT = 4
_BACKLOG_SECONDS = 0.005
#: Pings in a row, at the start and then now and then.
_PINGS_AT_START, _PINGS = 10, 4
_PING_SECONDS = 5.0
#: Seconds that the first chunk waits for the clock to be known.
_CLOCK_SECONDS = 1.0
_END_SECONDS = 2.0


class TraceRecording:
    """Converter of one rank's events into chunks of timeline number ``session``.

    ``mark_cycles``: show rounds of negotiation.
    """

    def __init__(
        self, recorder: EventRecorder, clock: TimelineClock, session: int, host: str, mark_cycles: bool
    ) -> None:
        self.recorder, self.clock, self.session = recorder, clock, session
        self._host, self._cpus = host, read_allowed_cpus()
        self._layout = TraceEventBuilder(mark_cycles)

    def pages(self, offset: int, error: int, most: int = _EVENTS_IN_A_PERIOD) -> list[TraceChunk]:
        """Return chunks of the latest events, about ``most``.

        ``offset`` and ``error`` are of this rank's clock, as in `TraceChunk`.
        """
        num_taken = 0
        while num_taken < most and (events := self.recorder.take(_EVENTS_AT_ONCE)):
            self._layout.follow(events)
            num_taken += len(events)
            time.sleep(0)
        self._layout.emit_long(self.clock.read())
        dropped, (cpus, quota) = self.recorder.num_dropped, self._cpus
        return [
            TraceChunk(
                self.session, self._host, offset, error, dropped, c.rows, c.labels, c.arguments, c.slices,
                f"{cpus:x}", quota,
            )
            for c in self._layout.take()
        ]  # fmt: skip


class TraceSender:
    """Sender of the recording of a rank other than 0, on a thread of its own; ``clock`` is the identity of rank 0's."""

    def __init__(self, channel: Engine, recording: TraceRecording, rank: int, clock: str) -> None:
        self._channel, self._recording, self._rank = channel, recording, rank
        self.session = recording.session
        own = recording.clock.identity
        self._estimate = ClockOffsetEstimate(is_same=bool(own) and own == clock)
        self._num_pings_left = 0
        self._ping_next = 0.0
        self._answered = threading.Event()
        self._ending = threading.Event()
        #: set when rank 0 has completed the file
        self.is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reigen-timeline-{rank}", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def end(self) -> None:
        """Send the rest and no more; return at once."""
        self._ending.set()

    def finish(self) -> None:
        """Send the rest and no more; return when it has been handed over."""
        self.end()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)

    def answered(self, pong: ClockPong) -> None:
        """Take rank 0's answer with its time."""
        clock = self._recording.clock.read()
        if pong.rank != self._rank or pong.session != self.session:
            return
        self._estimate.learn(estimate_offset(pong.sent, pong.remote, clock))
        self._num_pings_left -= 1
        if self._num_pings_left > 0:
            self._ping()
        else:
            self._answered.set()

    def _ping(self) -> None:
        self._post(ClockPing(self.session, self._recording.clock.read()))

    def _measure(self, num_pings: int) -> None:
        self._ping_next = time.monotonic() + _PING_SECONDS
        self._num_pings_left = num_pings
        self._ping()

    def _run(self) -> None:
        self._measure(_PINGS_AT_START)
        until = time.monotonic() + _CLOCK_SECONDS
        while not (self._answered.wait(_BACKLOG_SECONDS) or self._ending.is_set() or time.monotonic() > until):
            pass
        while self._channel.is_operational and not self._ending.wait(PERIOD_SECONDS):
            self._send()
            if time.monotonic() >= self._ping_next:
                self._measure(_PINGS)
        self._send()
        self._post(TraceEnd(self.session))

    def _send(self) -> None:
        best = self._estimate.best
        offset, error = (0, -1) if best is None else (best.nanoseconds, best.error_at(self._recording.clock.read()))
        for page in self._recording.pages(offset, error):
            while self._channel.is_operational and self._channel.unsent >= _MAX_UNSENT:
                if self._ending.wait(_BACKLOG_SECONDS):
                    time.sleep(_BACKLOG_SECONDS)
            self._post(page)

    def _post(self, message: ClockPing | TraceChunk | TraceEnd) -> None:
        self._channel.post(Topic.TIMELINE, encode(message))
