"""Metrics at the launcher: from reports to rows, and to JSON lines."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reigen.cluster.metrics import METRICS_PREFIX, METRICS_VARIABLE, REPORT_CODEC, MetricSample, MetricsReport
from reigen.errors import ConfigError
from reigen.launch.metrics.job_metrics import SILENT_SECONDS, JobMetrics
from reigen.launch.metrics.lines_file import MetricsFile
from reigen.launch.metrics.options import TOKEN_VARIABLE, MetricsOptions
from reigen.launch.metrics.service import MetricsService, report_environ


def report(
    rank: int = 0,
    *,
    steps: float = 0,
    times: tuple[float, float, float] = (0.0, 0.0, 0.0),
    epoch: int = 0,
    size: int = 2,
    kind: str = "rank",
    is_last: bool = False,
    more: tuple[MetricSample, ...] = (),
) -> MetricsReport:
    """Report with seconds of computing, of transfers and of waiting."""
    names = [f"reigen_{what}_seconds_total" for what in ("compute", "transfer", "wait")]
    samples = [
        ("reigen_steps_total", (), steps),
        *((name, (), value) for name, value in zip(names, times, strict=True)),
    ]
    return MetricsReport(kind, rank, f"host{rank}", epoch, size, "", is_last, (*samples, *more))  # type: ignore[arg-type]


def job(*reports: tuple[float, str, MetricsReport]) -> JobMetrics:
    metrics = JobMetrics()
    for at, key, each in reports:
        metrics.take(key, each, at)
    return metrics


def test_rates_and_shares_are_of_the_last_seconds() -> None:
    reports = [(float(s), "a", report(steps=10 * s, times=(0.5 * s, 0.2 * s, 0.3 * s))) for s in range(11)]
    late = [(10.0 + s, "a", report(steps=100 + 40 * s, times=(5.0, 2.0, 3.0 + s))) for s in range(1, 7)]
    (row,) = job(*reports).status(10.5)
    assert row.process.rate("reigen_steps_total") == pytest.approx(10)
    assert row.process.shares() == pytest.approx((0.5, 0.2, 0.3))
    assert row.age_seconds == 0.5
    (row,) = job(*reports, *late).status(16.0)
    assert row.process.rate("reigen_steps_total") == pytest.approx(40)
    assert row.process.shares() == pytest.approx((0.0, 0.0, 1.0))


def test_the_time_that_is_left_follows_from_the_rate() -> None:
    goal: tuple[MetricSample, ...] = (("reigen_goal_steps", (), 100.0),)
    (row,) = job((0.0, "a", report(steps=10, more=goal)), (2.0, "a", report(steps=20, more=goal))).status(2.0)
    assert row.eta_seconds == pytest.approx(80 / 5)
    assert job((0.0, "a", report(steps=10))).status(0.0)[0].eta_seconds is None


def test_the_rank_that_waits_least_is_waited_for() -> None:
    metrics = job(
        *((0.0, f"r{rank}", report(rank)) for rank in range(3)),
        (1.0, "r0", report(0, times=(0.2, 0.1, 0.7))),
        (1.0, "r1", report(1, times=(0.9, 0.1, 0.0))),
        (1.0, "r2", report(2, times=(0.3, 0.1, 0.6))),
    )
    assert [row.is_waited_for for row in metrics.status(1.1)] == [False, True, False]


def test_where_all_wait_alike_nobody_is_waited_for() -> None:
    metrics = job(*((at, f"r{rank}", report(rank, times=(at, 0.0, at))) for at in (0.0, 1.0) for rank in range(3)))
    assert not any(row.is_waited_for for row in metrics.status(1.1))
    assert not any(row.is_waited_for for row in job((0.0, "a", report())).status(100.0)), "a rank alone"


def test_a_rank_that_says_nothing_is_silent_and_waited_for() -> None:
    metrics = job((0.0, "r0", report(0)), (0.0, "r1", report(1)), (3.0, "r0", report(0, times=(0.0, 0.0, 3.0))))
    rows = metrics.status(3.0)
    assert SILENT_SECONDS < 3
    assert [(row.is_silent, row.is_waited_for) for row in rows] == [(False, False), (True, True)]
    metrics.take("r1", report(1, is_last=True), 4.0)
    assert not any(row.is_silent for row in metrics.status(5.0)), "it has left"


def test_a_rank_that_says_nothing_is_waited_for_by_those_who_wait_alone() -> None:
    metrics = job((0.0, "r0", report(0)), (0.0, "r1", report(1)), (3.0, "r0", report(0, times=(3.0, 0.0, 0.0))))
    assert [(row.is_silent, row.is_waited_for) for row in metrics.status(3.0)] == [(False, False), (True, False)]


def test_what_is_shown_is_printable() -> None:
    shown = msgspec.structs.replace(report(0), host="h\x1b[2J\n", waits_for="g\x07")
    (row,) = job((0.0, "r0", shown)).status(1.0)
    assert (row.process.report.host, row.process.report.waits_for) == ("h?[2J?", "g?")


def test_in_an_elastic_job_a_rank_is_who_has_it_in_the_latest_view() -> None:
    metrics = job(
        (0.0, "slot0", report(0, epoch=1, size=3)),
        (0.0, "slot1", report(1, epoch=1, size=3)),
        (0.0, "slot2", report(2, epoch=1, size=3)),
        (1.0, "slot1", report(0, steps=7, epoch=2)),
        (1.0, "slot2", report(1, steps=8, epoch=2)),
    )
    assert [(row.process.report.number, row.process.steps) for row in metrics.status(1.0)] == [(0, 7), (1, 8)]


def test_a_process_in_the_place_of_another_begins_anew() -> None:
    metrics = job((0.0, "a", report(steps=100, times=(50.0, 0.0, 0.0))), (1.0, "a", report(steps=1)))
    (row,) = metrics.status(1.0)
    assert row.process.rate("reigen_steps_total") == 0


def test_samples_that_are_in_no_table_are_dropped() -> None:
    strange: tuple[MetricSample, ...] = (("evil", (), 1.0), ("reigen_steps_total", ("label",), 2.0))
    found = list(job((0.0, "a", report(more=strange))).samples(0.0))
    assert {sample[0] for _, sample in found} <= {
        "reigen_steps_total",
        "reigen_compute_seconds_total",
        "reigen_transfer_seconds_total",
        "reigen_wait_seconds_total",
        "reigen_report_age_seconds",
        "reigen_is_waited_for",
    }


# -- in a file --------------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_report_is_a_line_and_the_last_one_is_final(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path, pytest.fail)
    file.start()
    file.add("r0", report(0, steps=1))
    file.add("r1", report(1, steps=2, epoch=4))
    file.add("r0", report(0, steps=5, is_last=True))
    file.finish(7, "rank 1 was killed\n", "rank 1 (host b) waited for 2% of the time")
    file.close()
    *processes, end = lines(path)
    assert {name: end[name] for name in end if name != "time"} == {
        "role": "job",
        "final": True,
        "exit_code": 7,
        "failure": "rank 1 was killed",
        "verdict": "rank 1 (host b) waited for 2% of the time",
    }
    found = [(each["rank"], each["epoch"], each["final"], each["metrics"]["reigen_steps_total"]) for each in processes]  # type: ignore[index]
    killed = (1, 4, True, 2)  # it has said nothing more: its latest report again
    assert found == [(0, 0, False, 1), (1, 4, False, 2), (0, 0, True, 5), killed]
    assert stat.S_IMODE(path.stat().st_mode) & 0o111 == 0


def test_a_file_that_cannot_be_opened_is_an_error_at_once(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "no" / "m", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"--metrics-file .*{problem}"):
            MetricsService(MetricsOptions(file=path), pytest.fail)
    (tmp_path / "m").touch()
    (tmp_path / "m").chmod(0)
    if os.geteuid():  # root may write everything
        with pytest.raises(ConfigError, match="Permission denied"):
            MetricsService(MetricsOptions(file=tmp_path / "m"), pytest.fail)


def test_a_full_disk_is_told_once() -> None:
    told: list[str] = []
    file = MetricsFile(Path("/dev/full"), told.append)
    file.start()
    for _ in range(5):
        file.add("r0", report())
    file.close()
    assert len(told) == 1
    assert "No space left on device; the job goes on" in told[0]


def test_reports_come_by_the_control_service_and_nothing_else_is_touched(tmp_path: Path) -> None:
    service = MetricsService(MetricsOptions(file=tmp_path / "m"), pytest.fail)
    service.start()
    try:
        assert not service.receive("elastic/view", b"...")
        assert service.receive(f"{METRICS_PREFIX}rank.0", REPORT_CODEC.encode(report(0, steps=9)))
        assert service.receive(f"{METRICS_PREFIX}rank.1", b"\xc1 no report")
        assert [each.steps for each in service.metrics.current()] == [9]
    finally:
        service.close()
    assert len(lines(tmp_path / "m")) == 2


def test_processes_report_to_their_own_launcher_alone() -> None:
    inherited = {METRICS_VARIABLE: "1", TOKEN_VARIABLE: "t", "HOME": "/"}
    assert report_environ(MetricsOptions(), inherited) == {"HOME": "/"}
    assert report_environ(MetricsOptions(file=Path("m")), inherited) == {"HOME": "/", METRICS_VARIABLE: "1"}
