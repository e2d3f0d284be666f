"""History of a job for the charts of its dashboard, in bounded memory. Pure: rows of the live table in, points out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from reigen.launch.metrics.job_metrics import ProcessStatus

#: Most points of a history; when there are so many, two become one.
MAX_POINTS = 720
#: Seconds of the first points.
_FIRST_SECONDS = 1.0
_WAYS = ("shared_memory", "network", "mpi", "device")


class HistoryPoint(msgspec.Struct, frozen=True, array_like=True):
    """State of a job at a time, all processes together; of several seconds, the mean.

    Attributes:
        seconds: since the dashboard was started.
        steps: a second, of the rank that is ahead.
        samples: a second, of all ranks.
        compute, transfer, wait: shares of the ranks' time, on average.
        shared_memory, network, mpi, device: bytes a second that went this way, of all processes.
        memory: resident memory of all processes, in bytes.
        most_memory: that of the rank with the most.
        ranks: number of ranks of which something is heard.
    """

    seconds: float
    steps: float
    samples: float
    compute: float
    transfer: float
    wait: float
    shared_memory: float
    network: float
    mpi: float
    device: float
    memory: float
    most_memory: float
    ranks: float


def measure_job(rows: Sequence[ProcessStatus], seconds: float) -> HistoryPoint:
    """Return a job's state; processes that are silent or have ended do nothing, but a silent one has its memory.

    Args:
        rows: of the live table.
        seconds: since the dashboard was started.
    """
    present = [row.process for row in rows if not row.process.report.is_last]
    active = [row.process for row in rows if not row.is_silent and not row.process.report.is_last]
    ranks = [process for process in active if process.report.kind == "rank"]
    shares = [process.shares() for process in ranks if any(process.shares())]
    ahead = max(ranks, key=lambda process: process.steps, default=None)
    memory = [process.latest.get("reigen_memory_bytes", "resident") for process in present]
    of_ranks = [
        process.latest.get("reigen_memory_bytes", "resident") for process in present if process.report.kind == "rank"
    ]
    compute, transfer, wait = (sum(share[n] for share in shares) / (len(shares) or 1) for n in range(3))
    ways = {way: sum(process.way_rate(way) for process in active) for way in _WAYS}
    return HistoryPoint(
        seconds,
        0.0 if ahead is None else ahead.rate("reigen_steps_total"),
        sum(process.rate("reigen_samples_total") for process in ranks),
        compute,
        transfer,
        wait,
        **ways,
        memory=sum(memory),
        most_memory=max(of_ranks, default=0.0),
        ranks=len(ranks),
    )


def average_points(points: Sequence[HistoryPoint]) -> HistoryPoint:
    """Return the mean of points, at the time of the last one."""
    columns = zip(*(msgspec.structs.astuple(point) for point in points), strict=True)
    _, *means = (sum(column) / len(points) for column in columns)
    return HistoryPoint(points[-1].seconds, *means)


@dataclass
class JobHistory:
    """Points of a job from its beginning, never more than `MAX_POINTS`: the longer it runs, the coarser they are.

    Attributes:
        points: in order.
        point_seconds: of each of them.
    """

    points: list[HistoryPoint] = field(default_factory=list)
    point_seconds: float = _FIRST_SECONDS
    #: measurements that are no point yet
    _measured: list[HistoryPoint] = field(default_factory=list)

    def add(self, measured: HistoryPoint) -> bool:
        """Take in the measurement of a second; returns whether it has completed a point."""
        self._measured.append(measured)
        if len(self._measured) * _FIRST_SECONDS < self.point_seconds:
            return False
        self.points.append(average_points(self._measured))
        self._measured.clear()
        if len(self.points) >= MAX_POINTS:
            pairs: Iterable[tuple[HistoryPoint, HistoryPoint]] = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [average_points(pair) for pair in pairs]
            self.point_seconds *= 2
        return True
