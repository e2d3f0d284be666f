"""docs/metrics.md has every metric, in the words of the code."""

from __future__ import annotations

import re
from pathlib import Path

from reigen.cluster.metrics import PROCESS_METRICS, Metric

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
ALL = PROCESS_METRICS


def row(metric: Metric) -> str:
    return f"| {metric.name} | {metric.kind} | {', '.join(metric.labels)} | {metric.text} |"


def test_the_page_has_a_row_for_each_metric_and_no_other() -> None:
    found = [line for line in PAGE.splitlines() if re.match(r"\| reigen_\w+ \|", line)]
    assert found == [row(metric) for metric in ALL]


def test_names_follow_prometheus() -> None:
    assert len({metric.name for metric in ALL}) == len(ALL)
    for metric in ALL:
        assert re.fullmatch(r"reigen_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not re.search(r"_(milliseconds|ms|kilobytes|mb)(_|$)", metric.name)
        assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)
        assert not {"role", "rank", "host"} & set(metric.labels), "these name the process"


def test_metrics_that_the_page_speaks_of_exist() -> None:
    names = {metric.name for metric in ALL}
    spoken_of = set(re.findall(r"reigen_[a-z_]+(?:_total|_seconds|_steps|_rounds|_length|_bytes|_epoch)\b", PAGE))
    assert spoken_of - {"reigen_bytes"} <= names
