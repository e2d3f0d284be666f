"""docs/metrics.md has every metric in the words of the code; the dashboard uses only metrics and labels that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from reigen.cluster.metrics import LAUNCHER_METRICS, PROCESS_METRICS, Metric

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((ROOT / "examples/metrics/grafana-dashboard.json").read_text(encoding="utf-8"))
METRICS = {metric.name: metric for metric in (*PROCESS_METRICS, *LAUNCHER_METRICS)}
#: Labels that name a process, and one that Prometheus adds.
PROCESS_LABELS = {"role", "rank", "host", "job"}


def row(metric: Metric) -> str:
    return f"| {metric.name} | {metric.kind} | {', '.join(metric.labels)} | {metric.text} |"


def test_the_page_has_a_row_for_each_metric_and_no_other() -> None:
    found = [line for line in PAGE.splitlines() if re.match(r"\| reigen_\w+ \|", line)]
    assert found == [row(metric) for metric in METRICS.values()]


def test_names_follow_prometheus() -> None:
    assert len(METRICS) == len(PROCESS_METRICS) + len(LAUNCHER_METRICS)
    for metric in METRICS.values():
        assert re.fullmatch(r"reigen_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not re.search(r"_(milliseconds|ms|kilobytes|mb)(_|$)", metric.name)
        assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)
        assert not PROCESS_LABELS & set(metric.labels)


def test_metrics_that_the_page_speaks_of_exist() -> None:
    spoken_of = set(re.findall(r"reigen_[a-z_]+(?:_total|_seconds|_steps|_rounds|_length|_bytes|_epoch)\b", PAGE))
    assert spoken_of <= set(METRICS)


# -- the dashboard ----------------------------------------------------------------------------------------------------

PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_uses_metrics_and_labels_that_exist(expression: str) -> None:
    names = re.findall(r"\b(reigen_\w+)\{([^}]*)\}", expression)
    assert names
    assert len(names) == len(re.findall(r"\breigen_\w+", expression)), "each with labels"
    for name, matchers in names:
        used = set(re.findall(r"(\w+)\s*(?:=~|!=|=)\"", matchers))
        assert used <= PROCESS_LABELS | set(METRICS[name].labels)
    grouped = {label for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(", ")}
    assert grouped <= PROCESS_LABELS | {label for name, _ in names for label in METRICS[name].labels}
    for name in re.findall(r"rate\((reigen_\w+)", expression):
        assert METRICS[name].kind == "counter", "a rate is of what only grows"
    assert expression.count("(") == expression.count(")")


def test_the_dashboard_has_the_form_of_grafanas() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "job", "host"}
    assert set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(DASHBOARD))) <= variables
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    places = set()
    for panel in PANELS:
        assert panel["type"] in {"timeseries", "stat"}
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in places, f"{panel['title']} lies on another panel"
                places.add((x, y))


def test_legends_name_labels_that_their_expressions_have() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            names = re.findall(r"\breigen_\w+", target["expr"])
            known = PROCESS_LABELS | {label for name in names for label in METRICS[name].labels}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known


def test_the_example_for_prometheus_scrapes_the_documented_port() -> None:
    document = yaml.safe_load((ROOT / "examples/metrics/prometheus.yml").read_text(encoding="utf-8"))
    (job,) = document["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9100"]}]
    assert "--metrics-port 9100" in PAGE
