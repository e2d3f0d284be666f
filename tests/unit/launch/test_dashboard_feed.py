"""What a dashboard shows, from rows of the live table and times: points of charts, events, and messages to browsers."""

from __future__ import annotations

import msgspec
import pytest

from reigen.cluster.metrics import MetricSample
from reigen.launch.dashboard import feed as feed_module
from reigen.launch.dashboard.feed import MAX_EVENTS, DashboardFeed, FeedCursor, JobEnd
from reigen.launch.dashboard.history import MAX_POINTS, HistoryPoint, JobHistory, measure_job
from reigen.launch.dashboard.job_events import STALL_SECONDS, EventTracker
from reigen.launch.metrics.job_metrics import SILENT_SECONDS, JobMetrics
from tests.unit.launch.test_job_metrics import job, report
from tests.unit.launch.test_live_table import lockstep


def sent(way: str, operation: str, num_bytes: float) -> MetricSample:
    return "reigen_bytes_total", (operation, way), num_bytes


def point(seconds: float, value: float = 0.0) -> HistoryPoint:
    return HistoryPoint(seconds, *[value] * 12)


def test_a_point_is_of_the_whole_job() -> None:
    more = sent("network", "allreduce", 10.0), sent("network", "broadcast", 0.0), sent("mpi", "allreduce", 0.0)
    later = sent("network", "allreduce", 30.0), sent("network", "broadcast", 6.0), sent("mpi", "allreduce", 2.0)
    metrics = job((0.0, "r0", report(0, more=more)), (0.0, "r1", report(1)), (0.0, "s0", report(0, kind="server")))
    metrics.take("r0", report(0, steps=4, times=(1.0, 0.5, 0.5), more=later), 2.0)
    metrics.take("r1", report(1, steps=2, times=(2.0, 0.0, 0.0)), 2.0)
    metrics.take("s0", report(0, kind="server", more=(sent("network", "pull", 8.0),)), 2.0)
    found = measure_job(metrics.status(2.0), 7.0)
    assert (found.seconds, found.steps, found.ranks) == (7.0, 2.0, 2.0)
    assert (found.compute, found.transfer, found.wait) == (0.75, 0.125, 0.125)
    assert (found.network, found.mpi, found.shared_memory) == ((20 + 6 + 8) / 2, 1.0, 0.0)


def test_silent_ranks_and_those_that_have_left_do_nothing() -> None:
    metrics = lockstep(3)
    metrics.take("r2", report(2, steps=20, is_last=True), 2.5)
    metrics.take("r1", report(1, steps=21, times=(0.7, 0.2, 1.4)), 2.0 + SILENT_SECONDS)
    found = measure_job(metrics.status(2.1 + SILENT_SECONDS), 0.0)
    assert found.ranks == 1
    assert found.samples == 0, "rank 1 reports none"
    assert found.memory == 3 * 2.0**30, "that of rank 0 is still there"


def test_an_empty_job_is_a_point_of_zeros() -> None:
    assert measure_job([], 0.0) == point(0.0)


def test_a_history_stays_small_and_keeps_all_of_the_time() -> None:
    history = JobHistory()
    for second in range(10 * MAX_POINTS):
        history.add(point(second + 1.0, float(second)))
        assert len(history.points) < MAX_POINTS
    assert history.point_seconds == 16.0
    assert [each.seconds for each in history.points[:3]] == [16.0, 32.0, 48.0]
    assert history.points[0].steps == pytest.approx(7.5), "the mean of the first 16"
    assert history.points[-1].seconds == 10 * MAX_POINTS


def test_silence_and_leaving_are_events() -> None:
    tracker, metrics = EventTracker(), lockstep(2)
    assert tracker.take(metrics.status(2.0), 2.0) == []
    metrics.take("r0", report(0, steps=21), 2.0 + SILENT_SECONDS)
    assert tracker.take(metrics.status(2.0 + SILENT_SECONDS), 4.3) == [
        ("trouble", "rank 1 (host host1) has said nothing for 2 s")
    ]
    metrics.take("r1", report(1, steps=21, times=(3.0, 0.2, 0.0)), 5.0)
    assert ("better", "rank 1 (host host1) is heard again") in tracker.take(metrics.status(5.0), 5.0)
    metrics.take("r1", report(1, steps=22, times=(3.0, 0.2, 0.0), is_last=True), 5.5)
    assert tracker.take(metrics.status(5.5), 5.5) == [("note", "rank 1 has left")]
    assert tracker.take(metrics.status(5.6), 5.6) == []


def test_a_stall_is_said_once_and_its_end_too() -> None:
    def waiting(rank: int, steps: float, name: str) -> None:
        each = report(rank, steps=steps, more=(("reigen_queue_length", ("tensors",), now),))
        metrics.take(f"r{rank}", msgspec.structs.replace(each, waits_for=name), now)

    tracker, metrics, now = EventTracker(), JobMetrics(), 0.0
    found = []
    for second in range(int(2 * STALL_SECONDS) + 1):
        now = float(second)
        for rank in (0, 1, 2):
            waiting(rank, 5, "" if rank == 1 else "layer1")
        found += tracker.take(metrics.status(now), now)
    assert found == [("trouble", "no step for 10 s: rank(s) 0, 2 wait for layer1; rank(s) 1 did not come")]
    waiting(0, 6, "layer1")
    assert tracker.take(metrics.status(now), now) == [("better", "the ranks go on")]


def test_a_job_that_waits_for_nothing_has_not_stalled() -> None:
    """It may be computing, or be a program that makes no steps."""
    tracker, metrics = EventTracker(), lockstep(2)
    for second in range(100):
        metrics.take("r0", report(0, steps=20, more=(("reigen_queue_length", ("tensors",), float(second)),)), second)
        metrics.take("r1", report(1, steps=20, more=(("reigen_queue_length", ("tensors",), float(second)),)), second)
        assert tracker.take(metrics.status(float(second)), float(second)) == []


# -- messages ---------------------------------------------------------------------------------------------------------


def run_feed(seconds: int, size: int = 2) -> tuple[DashboardFeed, JobMetrics]:
    feed, metrics = DashboardFeed("train.py", 0.0), JobMetrics()
    for second in range(seconds):
        for rank in range(size):
            metrics.take(f"r{rank}", report(rank, steps=10 * second, times=(0.5 * second, 0.0, 0.5 * second)), second)
        assert feed.turn(metrics.status(float(second)), float(second), 1000.0 + second)
    return feed, metrics


def test_a_message_has_what_the_browser_does_not_have() -> None:
    feed, metrics = run_feed(5)
    first, cursor = feed.message(FeedCursor())
    assert first.has_all_points
    assert [each.seconds for each in first.points] == [1.0, 2.0, 3.0, 4.0]
    assert (first.job.program, first.job.ranks, first.job.step, first.job.steps) == ("train.py", 2, 40.0, 10.0)
    assert [row.name for row in first.rows] == ["rank 0", "rank 1"]
    assert not feed.turn(metrics.status(4.5), 4.5, 1004.5), "nothing is new"
    feed.note("note", "view 2", 1004.6)
    assert feed.turn(metrics.status(5.0), 5.0, 1005.0)
    second, last = feed.message(cursor)
    assert not second.has_all_points
    assert [each.seconds for each in second.points] == [5.0]
    assert [(each.time, each.text) for each in second.events] == [(1004.6, "view 2")]
    third, _ = feed.message(last)
    assert (third.points, third.events) == ([], [])


def test_a_browser_that_slept_gets_all_points_where_they_have_become_fewer() -> None:
    feed, metrics = run_feed(5)
    _, cursor = feed.message(FeedCursor())
    for second in range(5, MAX_POINTS + 10):
        for rank in range(2):
            metrics.take(f"r{rank}", report(rank, steps=10 * second), float(second))
        feed.turn(metrics.status(float(second)), float(second), 0.0)
    message, _ = feed.message(cursor)
    assert message.has_all_points
    assert (len(message.points), message.point_seconds) == (len(feed.history.points), 2.0)


def test_events_are_bounded_in_number_and_length() -> None:
    feed, _ = run_feed(1)
    _, cursor = feed.message(FeedCursor())
    for number in range(3 * MAX_EVENTS):
        feed.note("note", f"{number} " + "x" * 5000, 0.0)
    message, _ = feed.message(cursor)
    assert len(message.events) == MAX_EVENTS
    assert message.events[-1].text.startswith(f"{3 * MAX_EVENTS - 1} ")
    assert max(len(event.text) for event in message.events) <= 1000


def test_of_many_processes_those_in_trouble_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_ROWS", 3)
    metrics = lockstep(6)
    for rank in range(5):
        metrics.take(f"r{rank}", report(rank, steps=30), 2.0 + SILENT_SECONDS)
    feed = DashboardFeed("x", 0.0)
    feed.turn(metrics.status(2.1 + SILENT_SECONDS), 2.1 + SILENT_SECONDS, 0.0)
    message, _ = feed.message(FeedCursor())
    assert (len(message.rows), message.left_out) == (3, 3)
    (silent,) = (row for row in message.rows if row.is_silent)
    assert (silent.name, silent.steps, silent.compute) == ("rank 5", 0.0, 0.0)


def test_a_silent_rank_is_sent_at_once() -> None:
    metrics, feed = lockstep(2), DashboardFeed("x", 0.0)
    feed.turn(metrics.status(2.0), 2.0, 0.0)
    metrics.take("r0", report(0, steps=21), 4.0)
    feed.turn(metrics.status(2.0 + SILENT_SECONDS - 0.1), 2.0 + SILENT_SECONDS - 0.1, 0.0)
    assert feed.turn(metrics.status(2.0 + SILENT_SECONDS), 2.0 + SILENT_SECONDS, 0.0)


def test_the_end_is_in_each_message_from_then_on() -> None:
    feed, metrics = run_feed(3)
    num_points = len(feed.history.points)
    feed.finish(JobEnd(3, "rank 1 failed", "they waited for rank 1"), 1234.0)
    feed.turn(metrics.status(9.0), 9.0, 1235.0)
    for _ in range(2):
        message, _ = feed.message(FeedCursor())
        assert message.end == JobEnd(3, "rank 1 failed", "they waited for rank 1")
        assert message.job.eta is None
        assert message.events[-1].text == "the job has ended with exit code 3"
        assert len(message.points) == num_points, "a job that has ended has no further history"
