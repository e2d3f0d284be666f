"""What the metrics of a job that has ended say: reports in, a sentence out."""

from __future__ import annotations

import pytest

from reigen.launch.metrics.job_metrics import JobMetrics
from reigen.launch.metrics.waiting import describe_waiting
from tests.unit.launch.test_job_metrics import report


def described(*times: tuple[float, float, float], kinds: str = "") -> str:
    """Of processes with seconds of computing, of transfers and of waiting; servers where ``kinds`` has an s."""
    metrics = JobMetrics()
    for number, each in enumerate(times):
        kind = "server" if kinds[number : number + 1] == "s" else "rank"
        metrics.take(f"{kind}{number}", report(number, times=each, size=len(times), kind=kind, is_last=True), 20.0)
    return describe_waiting(metrics.current())


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        (
            [(12, 0, 8), (19, 0.4, 0.6), (11, 1, 8)],
            "rank 1 (host host1) waited for 3% of the time, the others for 40%: they waited for it",
        ),
        (
            [(12, 0, 8), (19, 0.4, 0.6), (15, 1, 4)],
            "rank 1 (host host1) waited for 3% of the time, the others for 20% to 40%: they waited for it",
        ),
        ([(10, 8, 2), (11, 8, 1)], "for 40% of the time the ranks could do nothing but wait while data was moved"),
        (
            [(12, 1, 7), (13, 1, 6)],
            "each rank waited for 30% of the time and more, for others in turn or for parameter servers",
        ),
        ([(19, 0.5, 0.5), (18, 1, 1)], ""),
        ([(17.5, 0, 2.5), (19.5, 0, 0.5)], ""),  # a tenth
        ([(4, 0, 4), (8, 0, 0)], ""),  # most of eight seconds is starting
        ([(10, 0, 10)], ""),
    ],
)
def test_who_waited_for_whom_is_said(times: list[tuple[float, float, float]], sentence: str) -> None:
    assert described(*times) == sentence


def test_servers_are_no_ranks_and_silence_says_nothing() -> None:
    assert described((12, 0, 8), (20, 0, 0), kinds="rs") == ""
    assert describe_waiting([]) == ""
