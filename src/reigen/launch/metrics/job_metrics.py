"""Metrics of a job's processes at the launcher. Pure: reports and times in, rows out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import msgspec

from reigen.cluster.metrics import MetricSample, MetricsReport, find_metric

#: A process that says nothing for so long is shown as silent: two reports are missing.
SILENT_SECONDS = 2.3
#: Rates are of about so many seconds.
_WINDOW_SECONDS = 5.0
#: The others wait for a process if it waits by so much less of the time than they do.
_LEAST_DIFFERENCE = 0.1
#: Who waits for so much of the time waits now.
_MUCH_WAITING = 0.5

#: Name and labels of a sample.
SampleKey = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Metrics of a process at a time, on the clock of ``time.monotonic()``."""

    at: float
    values: dict[SampleKey, float]

    def get(self, name: str, *labels: str) -> float:
        """Return a value; 0 where it is not there."""
        return self.values.get((name, labels), 0.0)

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Return the time of computing, of transfers and of waiting so far."""
        compute, transfer, wait = (self.get(f"reigen_{what}_seconds_total") for what in ("compute", "transfer", "wait"))
        return compute, transfer, wait


@dataclass(frozen=True, slots=True)
class ProcessMetrics:
    """Metrics of a process.

    Attributes:
        report: the latest.
        latest: its metrics.
        before: those of some seconds earlier; of the same moment where there is one report.
        history: those between the two, oldest first.
    """

    report: MetricsReport
    latest: Snapshot
    before: Snapshot
    history: tuple[Snapshot, ...] = ()

    @property
    def name(self) -> str:
        """Name for people: ``rank 1``."""
        return f"{self.report.kind} {self.report.number}"

    @property
    def steps(self) -> float:
        """Number of steps so far."""
        return self.latest.get("reigen_steps_total")

    def rate(self, name: str) -> float:
        """Return by how much a counter has grown in a second."""
        seconds = self.latest.at - self.before.at
        return max(0.0, self.latest.get(name) - self.before.get(name)) / seconds if seconds > 0 else 0.0

    def way_rate(self, way: str) -> float:
        """Return the bytes a second of all operations that go this way."""
        seconds = self.latest.at - self.before.at
        keys = [key for key in self.latest.values if key[0] == "reigen_bytes_total" and key[1][-1] == way]
        grown = sum(max(0.0, self.latest.values[key] - self.before.values.get(key, 0.0)) for key in keys)
        return grown / seconds if seconds > 0 else 0.0

    def shares(self) -> tuple[float, float, float]:
        """Return the shares of the time of computing, of transfers and of waiting; 0 each where nothing is known."""
        spent = [max(0.0, now - then) for now, then in zip(self.latest.seconds, self.before.seconds, strict=True)]
        total = sum(spent)
        compute, transfer, wait = (each / total if total > 0 else 0.0 for each in spent)
        return compute, transfer, wait

    def report_next(self, report: MetricsReport, now: float) -> ProcessMetrics:
        """Return the same with one more report."""
        latest = Snapshot(now, sample_values(report))
        if sum(latest.seconds) < sum(self.latest.seconds) - 0.5 or latest.get("reigen_steps_total") < self.steps:
            return begin_process(report, now)  # another process has taken its place
        history = (*self.history, self.latest)
        while len(history) > 1 and now - history[1].at >= _WINDOW_SECONDS:
            history = history[1:]
        return replace(self, report=report, latest=latest, before=history[0], history=history)


def begin_process(report: MetricsReport, now: float) -> ProcessMetrics:
    """Return the metrics of a process with its first report."""
    first = Snapshot(now, sample_values(report))
    return ProcessMetrics(report, first, first)


def sample_values(report: MetricsReport) -> dict[SampleKey, float]:
    """Return the values that have a place in the table of metrics; others are dropped."""
    return {sample[:2]: sample[2] for sample in report.samples if find_metric(sample) is not None}


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """Row of the live table.

    Attributes:
        process: its metrics.
        age_seconds: since its last report.
        is_silent: that is long ago.
        is_waited_for: the others wait for it.
        eta_seconds: until the training is over; None where that is not known.
    """

    process: ProcessMetrics
    age_seconds: float
    is_silent: bool
    is_waited_for: bool
    eta_seconds: float | None


@dataclass
class JobMetrics:
    """Metrics of all processes of a job, by the keys of their reports."""

    processes: dict[str, ProcessMetrics] = field(default_factory=dict)

    def take(self, key: str, report: MetricsReport, now: float) -> None:
        """Take in a report; one that is there already changes nothing. What may be shown is made printable."""
        host, waits_for = _printable(report.host), _printable(report.waits_for)
        report = msgspec.structs.replace(report, host=host, waits_for=waits_for)
        known = self.processes.get(key)
        if known is not None and known.report == report:
            return
        self.processes[key] = begin_process(report, now) if known is None else known.report_next(report, now)

    def reports(self, now: float) -> list[tuple[str, float, MetricsReport]]:
        """Return the latest reports, with their keys and ages in seconds."""
        return [(key, max(0.0, now - each.latest.at), each.report) for key, each in list(self.processes.items())]

    def current(self) -> list[ProcessMetrics]:
        """Return one process for each rank and server, in order: of an elastic job, those of the latest view.

        A rank's number belongs to another process in the next view; whoever has it in the latest one counts.
        """
        latest: dict[tuple[str, int], ProcessMetrics] = {}
        for process in list(self.processes.values()):
            place = process.report.kind, process.report.number
            other = latest.get(place)
            if other is None or _order(other) < _order(process):
                latest[place] = process
        ranks = [process.report for process in latest.values() if process.report.kind == "rank"]
        newest = max(ranks, key=lambda report: report.epoch, default=None)
        size = 0 if newest is None or not newest.epoch else newest.size
        found = [each for each in latest.values() if each.report.kind != "rank" or each.report.number < (size or inf)]
        return sorted(found, key=lambda process: (process.report.kind, process.report.number))

    def status(self, now: float) -> list[ProcessStatus]:
        """Return the rows of the live table."""
        processes = self.current()
        waited_for = find_waited_for(processes, now)
        return [
            ProcessStatus(
                process,
                max(0.0, now - process.latest.at),
                _is_silent(process, now),
                process is waited_for,
                _eta_seconds(process),
            )
            for process in processes
        ]

    def samples(self, now: float) -> Iterator[tuple[ProcessMetrics, MetricSample]]:
        """Yield all samples, with those that the launcher adds (`reigen.cluster.metrics.LAUNCHER_METRICS`)."""
        for row in self.status(now):
            for (name, labels), value in row.process.latest.values.items():
                yield row.process, (name, labels, value)
            yield row.process, ("reigen_report_age_seconds", (), row.age_seconds)
            yield row.process, ("reigen_is_waited_for", (), float(row.is_waited_for))


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)


def _order(process: ProcessMetrics) -> tuple[int, float]:
    return process.report.epoch, process.latest.at


def _is_silent(process: ProcessMetrics, now: float) -> bool:
    return not process.report.is_last and now - process.latest.at >= SILENT_SECONDS


def _eta_seconds(process: ProcessMetrics) -> float | None:
    goal, rate = process.latest.get("reigen_goal_steps"), process.rate("reigen_steps_total")
    return max(0.0, goal - process.steps) / rate if goal and rate > 0 else None


def find_waited_for(processes: Sequence[ProcessMetrics], now: float) -> ProcessMetrics | None:
    """Return the rank that the others wait for; None where there is none, or it is not clear.

    That is the one of which nothing is heard while others wait for a collective; or else the one that waits least of
    the time: in lockstep a step takes as long for all, so who has not waited is who the others have waited for.
    """
    ranks = [process for process in processes if process.report.kind == "rank" and not process.report.is_last]
    if len(ranks) < 2:
        return None
    silent = [process for process in ranks if _is_silent(process, now)]
    others = [process for process in ranks if process not in silent]
    if silent and any(process.report.waits_for or process.shares()[2] > _MUCH_WAITING for process in others):
        return min(silent, key=lambda process: process.latest.at)
    if len(others) < 2:
        return None
    by_wait = sorted(others, key=lambda process: process.shares()[2])
    first, second = (process.shares()[2] for process in by_wait[:2])
    return by_wait[0] if second - first >= _LEAST_DIFFERENCE else None
