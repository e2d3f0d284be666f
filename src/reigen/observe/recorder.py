"""Recorder of one rank's engine, as fast as possible.

An event is a tuple ``(kind, nanoseconds, a, b)``. Nothing is formatted, encoded or written on the threads that train:
they append, and another thread takes the events out. A method takes about half a microsecond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, NamedTuple

from reigen.engine.messages import Operation, Response
from reigen.resources.cpu import ProcessorTime, read_processor_time

#: Kinds of events, with a and b
SUBMITTED = 0  # operation, None
BEGAN = 1  # batch, None
ENDED = 2  # batch, phases: name -> [nanoseconds in all, how often]
FAILED = 3  # name, None
ANNOUNCED = 4  # None, None
WAITING = 5  # thread, name
WAITED = 6  # thread, name
MARK = 7  # thread, (name, processor time until now)
ANSWERED = 8  # ServerRequest, None
GRADIENT = 9  # thread, GradientArrival

Event = tuple[int, int, Any, Any]


class ServerRequest(NamedTuple):
    """Request to a parameter server that was answered.

    Attributes:
        kind: PUSH, PULL and the like.
        server: its number.
        nbytes: of values, there and back.
        nanoseconds: from when it was sent until the answer had come.
    """

    kind: str
    server: int
    nbytes: int
    nanoseconds: int


class GradientArrival(NamedTuple):
    """Gradient that backward has made.

    Attributes:
        parameter: its number among the optimizer's.
        name: of the parameter.
        nbytes: of the gradient.
        dtype: of the gradient, before any compression.
    """

    parameter: int
    name: str
    nbytes: int
    dtype: str


#: Limit of recorded gradients: of a profile's first steps; they would double the timeline of a long job.
MAX_GRADIENTS = 20_000
#: Limit of events that wait to be taken out: about 200 bytes each.
MAX_EVENTS = 100_000


class EventRecorder:
    """An `EngineObserver` that keeps events until they are taken.

    Args:
        clock: nanoseconds; never goes back.
        max_events: further events are dropped, and counted, while so many wait to be taken.
        processor_time: of the calling thread; read at each mark.
    """

    def __init__(
        self,
        clock: Callable[[], int],
        max_events: int = MAX_EVENTS,
        processor_time: Callable[[], ProcessorTime] = read_processor_time,
    ) -> None:
        self._clock, self._processor_time = clock, processor_time
        self._max_events = max_events
        self._events: deque[Event] = deque()
        #: phases of the batch that is being carried out; there is one at most, and one thread works on it
        self._phases: dict[str, list[int]] = {}
        self._phase_began = 0
        self._gradients_left = MAX_GRADIENTS
        #: number of dropped events
        self.num_dropped = 0

    def take(self, most: int) -> list[Event]:
        """Take out the oldest events, ``most`` at most. For one thread."""
        events = self._events
        return [events.popleft() for _ in range(min(most, len(events)))]

    def _note(self, what: int, a: object = None, b: object = None) -> None:
        if len(self._events) < self._max_events:
            self._events.append((what, self._clock(), a, b))
        else:
            self.num_dropped += 1

    def submitted(self, operation: Operation) -> None:
        self._note(SUBMITTED, operation)

    def waiting(self, name: str) -> None:
        self._note(WAITING, get_ident(), name)

    def waited(self, name: str) -> None:
        self._note(WAITED, get_ident(), name)

    def began(self, batch: Sequence[tuple[Operation, Response]]) -> None:
        self._phases = {}
        self._phase_began = self._clock()
        self._note(BEGAN, batch)

    def phase_ended(self, name: str) -> None:
        """Add a phase to its name's: a large tensor has hundreds."""
        now = self._clock()
        phase = self._phases.get(name)
        if phase is None:
            self._phases[name] = [now - self._phase_began, 1]
        else:
            phase[0] += now - self._phase_began
            phase[1] += 1
        self._phase_began = now

    def ended(self, batch: Sequence[tuple[Operation, Response]]) -> None:
        self._note(ENDED, batch, self._phases)

    def failed(self, name: str) -> None:
        self._note(FAILED, name)

    def announced(self) -> None:
        self._note(ANNOUNCED)

    def mark(self, name: str) -> None:
        """Record that the calling thread has come to the end of another ``name``, for example STEP."""
        self._note(MARK, get_ident(), (name, self._processor_time()))

    def gradient_arrived(self, arrival: GradientArrival) -> None:
        """Record that backward, on the calling thread, has just made a gradient; the first `MAX_GRADIENTS` of them."""
        if self._gradients_left:
            self._gradients_left -= 1
            self._note(GRADIENT, get_ident(), arrival)

    @property
    def wants_gradients(self) -> bool:
        """Return whether further arrivals of gradients are recorded."""
        return self._gradients_left > 0

    def answered(self, request: ServerRequest) -> None:
        """Record that a parameter server has just answered a request."""
        self._note(ANSWERED, request)
