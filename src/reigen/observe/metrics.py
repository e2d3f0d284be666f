"""Metrics of this process, and the thread that reports them to the launcher (`reigen.cluster.metrics`)."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from reigen.cluster.metrics import (
    MAX_LABEL_LENGTH,
    METRICS_PREFIX,
    REPORT_CODEC,
    MetricSample,
    MetricsReport,
    ProcessKind,
    find_metric,
)
from reigen.engine.counters import EngineCounters
from reigen.errors import ReigenError

if TYPE_CHECKING:  # loaded by those who join a job
    from reigen.cluster.membership.rendezvous import Rendezvous

#: How long the last report may take.
_LAST_SECONDS = 2.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: Metrics of which several sources have the same, and not each a part.
_GREATEST = frozenset({"reigen_staleness_rounds"})
_log = logging.getLogger(__name__)


class MetricSource(Protocol):
    """Part of this process that has metrics.

    Attributes:
        started: since when, on the clock of ``time.monotonic()``.
    """

    started: float

    def samples(self) -> Iterable[MetricSample]:
        """Yield them. Any thread; must take microseconds, and raise nothing."""


class JobPart(Protocol):
    """Part of this process in its job, as a rank.

    Attributes:
        rank, size: its number, and of how many.
        view: of which view of an elastic job; 0 in another one.
        counters: of what it does; they may be read when it has left the job.
    """

    rank: int
    size: int
    view: int
    counters: EngineCounters

    def samples(self) -> Iterable[MetricSample]:
        """Yield its metrics."""


#: Stores, and servers, of this process.
_sources: weakref.WeakSet[MetricSource] = weakref.WeakSet()
_reporter: MetricsReporter | None = None
#: the time of computing that was told last, and since when it counts
_computed = 0.0, 0.0


def add_source(source: MetricSource) -> None:
    """Have `collect_samples` ask this object, for as long as it lives."""
    _sources.add(source)


def collect_samples(part: JobPart | EngineCounters | None) -> list[MetricSample]:
    """Return all metrics of this process.

    Args:
        part: its part in the job, or what is left of that; None: it is no rank.
    """
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    starts = []
    if part is not None:
        starts.append((part if isinstance(part, EngineCounters) else part.counters).started)
        _add(found, part.samples_now() if isinstance(part, EngineCounters) else part.samples())
    for source in list(_sources):
        starts.append(source.started)
        _add(found, source.samples())
    if starts:
        waited = found.get(("reigen_wait_seconds_total", ()), 0.0)
        waited += found.get(("reigen_transfer_seconds_total", ()), 0.0)
        found["reigen_compute_seconds_total", ()] = _compute_seconds(min(starts), waited)
    found["reigen_memory_bytes", ("resident",)] = _resident_bytes()
    return [(name, labels, value) for (name, labels), value in found.items()]


def _compute_seconds(begun: float, waited: float) -> float:
    """Return the time since ``begun`` that is left of waits; a counter does not fall when a wait is known later."""
    global _computed  # noqa: PLW0603  # of this process, as its sources
    value = max(0.0, time.monotonic() - begun - waited)
    if _computed[0] == begun:
        value = max(value, _computed[1])
    _computed = begun, value
    return value


def _add(found: dict[tuple[str, tuple[str, ...]], float], samples: Iterable[MetricSample]) -> None:
    for sample in samples:
        name, labels, value = sample
        assert find_metric(sample) is not None, f"{name} is not in the table of metrics"
        key = name, tuple([label[:MAX_LABEL_LENGTH] for label in labels])
        before = found.get(key, 0)
        found[key] = max(before, value) if name in _GREATEST else before + value


def _resident_bytes() -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    return 0


@dataclass(frozen=True, slots=True)
class ProcessName:
    """Name of this process in its reports.

    Attributes:
        kind: what it is.
        number: which one, as its launcher has said. Ranks of an elastic job may have another one in each view.
        key: number of its place in the job: another process with the same one has taken its place.
    """

    kind: ProcessKind
    number: int
    key: int


class MetricsReporter:
    """Reporter of this process's metrics, on a thread of its own.

    Args:
        name: of this process.
        rendezvous: of the launcher; closed by this.
        find_part: returns this process's part in its job as it is now.
        seconds: between two reports.
    """

    def __init__(
        self,
        name: ProcessName,
        rendezvous: Rendezvous,
        find_part: Callable[[], JobPart | None],
        seconds: float,
    ) -> None:
        self._name, self._rendezvous, self._find_part, self._seconds = name, rendezvous, find_part, seconds
        self._host = socket.gethostname()
        self.pid = os.getpid()
        #: of the part that was found last
        self._counters: EngineCounters | None = None
        self._place = (name.number, 0, 0)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reigen-metrics", daemon=True)

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    def finish(self) -> None:
        """Report for the last time, if that is possible, and end."""
        self._ending.set()
        self._thread.join(_LAST_SECONDS)

    def report(self, *, is_last: bool) -> MetricsReport:
        """Make a report."""
        part = self._find_part()
        if part is not None:
            self._counters, self._place = part.counters, (part.rank, part.view, part.size)
        samples = collect_samples(part or self._counters)
        counters, (number, epoch, size) = self._counters, self._place
        waits_for = counters.waits_for if counters is not None and counters.is_waiting else ""
        text = waits_for[:MAX_LABEL_LENGTH]
        return MetricsReport(self._name.kind, number, self._host, epoch, size, text, is_last, tuple(samples))

    def _run(self) -> None:
        while True:
            is_last = self._ending.is_set()
            self._put(is_last=is_last)
            if is_last:
                break
            self._ending.wait(self._seconds)
        self._rendezvous.close()

    def _put(self, *, is_last: bool) -> None:
        key = f"{METRICS_PREFIX}{self._name.kind}.{self._name.key}"
        try:
            self._rendezvous.put(key, REPORT_CODEC.encode(self.report(is_last=is_last)))
        except (OSError, ReigenError) as error:  # the launcher may be stopped, or gone: training goes on
            _log.debug("metrics were not reported: %s", error)
        except Exception:  # noqa: BLE001  a source in a state that nobody thought of: the next report may be whole
            _log.debug("metrics were not reported", exc_info=True)


def start_reporting(make: Callable[[], MetricsReporter]) -> None:
    """Report this process's metrics until its end; does nothing where it does so already."""
    global _reporter  # noqa: PLW0603  # a process is one in the eyes of its launcher
    if _reporter is not None and _reporter.pid == os.getpid():
        return
    _reporter = make()
    _reporter.start()
    atexit.register(finish_reporting)


def finish_reporting() -> None:
    """Report for the last time; at the end of the process that is done by itself. Does nothing where nothing is."""
    global _reporter  # see above
    reporter, _reporter = _reporter, None
    if reporter is not None and reporter.pid == os.getpid():
        reporter.finish()
