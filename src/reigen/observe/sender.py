"""What one rank records, and the thread that brings it to rank 0."""

from __future__ import annotations

import threading
import time

from reigen.engine.messages import Topic
from reigen.observe.clock_sync import ClockOffsetEstimate, TimelineClock, estimate_offset
from reigen.observe.messages import ClockPing, ClockPong, TraceChunk, TraceEnd, encode
from reigen.observe.note_channel import NoteChannel
from reigen.observe.recorder import EventRecorder
from reigen.observe.trace_events import TraceEventBuilder

#: How often events are taken from the recorder, and chunks written: what two of these take, programs wait for a file.
PERIOD_SECONDS = 0.05
#: So many events at a time: others want the interpreter, too.
_EVENTS_AT_ONCE = 256
#: In one period, whatever comes; what remains waits in the recorder, and is dropped where that is full.
_EVENTS_IN_A_PERIOD = 20_000
#: While so many notes have not left, no more are made: they share the control channel with the collectives.
_MAX_UNSENT = 4
_BACKLOG_SECONDS = 0.005
#: Questions in a row, at the start and then now and then.
_PINGS_AT_START, _PINGS = 10, 4
_PING_SECONDS = 5.0
#: How long the first page waits for the clock to be known.
_CLOCK_SECONDS = 1.0
_END_SECONDS = 2.0


class TraceRecording:
    """From events to pages.

    Args:
        recorder: is told by the engine.
        clock: the recorder's.
        session: number of the timeline.
        host: this rank's.
        mark_cycles: whether rounds of negotiation are shown.
    """

    def __init__(
        self, recorder: EventRecorder, clock: TimelineClock, session: int, host: str, mark_cycles: bool
    ) -> None:
        self.recorder, self.clock, self.session = recorder, clock, session
        self._host = host
        self._layout = TraceEventBuilder(mark_cycles)

    def pages(self, offset: int, error: int, most: int = _EVENTS_IN_A_PERIOD) -> list[TraceChunk]:
        """What has become known since the last call.

        Args:
            offset: of this rank's clock, see `TraceChunk`.
            error: of the offset.
            most: about how many events to take.
        """
        num_taken = 0
        while num_taken < most and (events := self.recorder.take(_EVENTS_AT_ONCE)):
            self._layout.follow(events)
            num_taken += len(events)
            time.sleep(0)
        self._layout.emit_long(self.clock.read())
        dropped = self.recorder.num_dropped
        return [
            TraceChunk(self.session, self._host, offset, error, dropped, c.rows, c.labels, c.arguments, c.slices)
            for c in self._layout.take()
        ]


class TraceSender:
    """Sends what a rank other than 0 records, on a thread of its own.

    Args:
        channel: of this rank.
        recording: of this rank.
        rank: this rank.
        clock: identity of rank 0's clock.
    """

    def __init__(self, channel: NoteChannel, recording: TraceRecording, rank: int, clock: str) -> None:
        self._channel, self._recording, self._rank = channel, recording, rank
        self.session = recording.session
        own = recording.clock.identity
        self._estimate = ClockOffsetEstimate(is_same=bool(own) and own == clock)
        self._pings_left = 0
        self._ping_next = 0.0
        self._answered = threading.Event()
        self._ending = threading.Event()
        #: rank 0 says that the file is complete
        self.is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reigen-timeline-{rank}", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def end(self) -> None:
        """Send the rest and no more; returns at once."""
        self._ending.set()

    def finish(self) -> None:
        """Send the rest and no more; returns when it has been handed over."""
        self.end()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)

    def answered(self, pong: ClockPong) -> None:
        """Rank 0 has told its time."""
        clock = self._recording.clock.read()
        if pong.rank != self._rank or pong.session != self.session:
            return
        self._estimate.learn(estimate_offset(pong.sent, pong.there, clock))
        self._pings_left -= 1
        if self._pings_left > 0:
            self._ping()
        else:
            self._answered.set()

    def _ping(self) -> None:
        self._post(ClockPing(self.session, self._recording.clock.read()))

    def _measure(self, num_pings: int) -> None:
        self._ping_next = time.monotonic() + _PING_SECONDS
        self._pings_left = num_pings
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
