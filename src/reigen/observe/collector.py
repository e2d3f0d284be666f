"""Thread of rank 0 that puts all ranks' recordings into one file."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from reigen.engine.engine import Engine
from reigen.engine.messages import Topic
from reigen.observe.chrome_format import START_EVENT, TraceMerger
from reigen.observe.messages import TraceChunk, TraceClosed, TraceEnd, TraceStop, encode
from reigen.observe.sender import PERIOD_SECONDS, TraceRecording
from reigen.observe.trace_writer import TraceFile

#: Limit of other ranks' chunks that wait to be written, 24 KiB each at most. More are dropped, and counted.
_MAX_CHUNKS = 2000
#: Seconds that the file waits for the last events of the other ranks, once it is to be closed.
_FINAL_SECONDS = 3.0
_POLL_SECONDS = 0.02
#: Seconds between records of how far the recording has come.
_ALIVE_SECONDS = 2.0
_JOIN_SECONDS = 10.0
#: Seconds until rank 0 of the view before has closed the file.
_RESUME_SECONDS = 5.0
_log = logging.getLogger("reigen")


class TraceCollector:
    """Collector of one timeline into the file ``path``.

    ``end_recording`` is called when nothing more is to be recorded on rank 0. In an elastic ``job`` the file of the
    ``view`` before is continued, if it is here: another process may have written it until it died.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self,
        channel: Engine,
        recording: TraceRecording,
        path: Path,
        size: int,
        end_recording: Callable[[], None],
        view: int = 0,
        job: str = "",
    ) -> None:
        self.path = path
        self._end_recording = end_recording
        self.session = recording.session
        self._channel, self._recording = channel, recording
        self._merger = TraceMerger(recording.clock.read(), time.time_ns() // 1000, size, view, job)
        self._job = job
        #: None until the file of the view before is continued
        self._file = None if view > 1 else TraceFile(path, self._merger.first)
        #: size, change, time and lost seconds of a view that begins
        self._views: deque[tuple[int, str, int, float]] = deque()
        self._pages: deque[tuple[int, TraceChunk]] = deque()
        #: chunks that were dropped because too many waited, by rank
        self._lost: Counter[int] = Counter()
        #: ranks that may still send something
        self._expected = set(range(1, size))
        self._ending = threading.Event()
        self._alive_next = 0.0
        self._thread = threading.Thread(target=self._run, name="reigen-timeline-0", daemon=True)

    @property
    def is_active(self) -> bool:
        """Return False once the file has been closed."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def finish(self) -> None:
        """Complete the file; return when that is done."""
        self._ending.set()
        self._thread.join(_JOIN_SECONDS)

    def view_begins(self, size: int, change: str, lost_seconds: float) -> None:
        """Record that the steps of a view may be run. Quick."""
        self._views.append((size, change, self._recording.clock.read(), lost_seconds))

    def receive(self, rank: int, message: TraceChunk | TraceEnd) -> None:
        """Take another rank's message. Quick."""
        if isinstance(message, TraceEnd):
            self._ending.set()  # it leaves, or has lost touch: no collective can follow
            self._expected.discard(rank)
        elif len(self._pages) < _MAX_CHUNKS:
            self._pages.append((rank, message))
        else:
            self._lost[rank] += 1

    def _run(self) -> None:
        try:
            self._file = self._file or self._continue()
            while self._channel.is_operational and not self._ending.wait(PERIOD_SECONDS):
                self._write()
            self._post(TraceStop(self.session))
            until = time.monotonic() + _FINAL_SECONDS
            while self._channel.is_operational and self._expected and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
                self._write()
            self._end_recording()
            self._write()
            assert self._file is not None
            self._file.append([self._merger.lost(rank, count) for rank, count in sorted(self._lost.items())])
        except OSError as error:
            _log.warning("the timeline %s ends here, it cannot be written: %s", self.path, error.strerror)
            self._post(TraceStop(self.session))
        finally:
            self._end_recording()
            if self._file is not None:
                self._file.close()
            self._post(TraceClosed(self.session))

    def _continue(self) -> TraceFile:
        """Open the file of the view before, or a new one where that is another host's, or another job's."""
        try:
            file, first = TraceFile.resume(self.path, _RESUME_SECONDS)
        except FileNotFoundError:
            return TraceFile(self.path, self._merger.first)
        arguments = first.get("args", {})
        if first.get("name") != START_EVENT or arguments.get("job") != self._job:
            file.close()
            return TraceFile(self.path, self._merger.first)
        self._merger.continue_file(int(arguments[START_EVENT]))
        return file

    def _post(self, message: TraceStop | TraceClosed) -> None:
        self._channel.post(Topic.TIMELINE, encode(message))

    def _write(self) -> None:
        """Write this rank's recording, and the chunks of the others."""
        assert self._file is not None
        while self._views:
            self._file.append(self._merger.view_begins(*self._views.popleft()))
        for page in self._recording.pages(0, 0):
            self._file.append(self._merger.records(0, page))
        while self._pages:
            rank, page = self._pages.popleft()
            self._file.append(self._merger.records(rank, page))
            time.sleep(0)
        if time.monotonic() >= self._alive_next:
            self._alive_next = time.monotonic() + _ALIVE_SECONDS
            self._file.append([self._merger.until(self._recording.clock.read())])
