"""A real Prometheus that scrapes a job, and every query of the dashboard for Grafana against it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.multiprocess.launcher import DEADLINE_SECONDS, launched, until
from tests.multiprocess.test_metrics_launch import find_port, program
from tests.unit.test_metrics_page import EXPRESSIONS, ROOT

#: Of elastic jobs alone.
ELASTIC = re.compile(r"reigen_(view_epoch|view_changes_total|lost_ranks_total|joined_ranks_total)\b")
PROGRAM = """
import os, sys, time
import numpy as np, reigen
from reigen import context
reigen.init()
kv = reigen.kv.create("dist_sync")
kv.init("w", np.zeros(1000, np.float32))
x, out = np.ones(100_000, np.float32), np.empty(1000, np.float32)
while True:
    time.sleep(0.02)
    ends = reigen.allreduce(np.array([float(os.path.exists(sys.argv[1]))]), op=reigen.Max, name="ends")[0]
    reigen.allreduce(x, name="x")
    kv.push("w", np.ones(1000, np.float32))
    kv.pull("w", out=out)
    context.mark("STEP")
    # the second rank is the one that the others wait for
    time.sleep(0.05 * reigen.rank())
    reigen.report_progress(samples=2, goal_steps=1_000_000)
    if ends:
        break
kv.close()
"""


@contextmanager
def prometheus(target: str, directory: Path) -> Iterator[str]:
    """Prometheus with the example's configuration, for another port and more often; its URL."""
    document = yaml.safe_load((ROOT / "examples/metrics/prometheus.yml").read_text(encoding="utf-8"))
    document["global"]["scrape_interval"] = "1s"
    document["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    configuration, log = directory / "prometheus.yml", directory / "log"
    configuration.write_text(yaml.safe_dump(document))
    command = [
        "prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={directory / 'data'}",
        "--web.listen-address=127.0.0.1:0", "--log.format=json",
    ]  # fmt: skip
    with log.open("wb") as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err)
    addresses: set[str] = set()
    try:

        def is_ready() -> bool:
            text = log.read_text()
            assert process.poll() is None, text
            addresses.update(re.findall(r'"address":"(127\.0\.0\.1:[1-9]\d*)"', text))
            return bool(addresses) and "Server is ready to receive web requests" in text  # in either order

        until(is_ready)
        (address,) = addresses
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait(DEADLINE_SECONDS)


def query(url: str, expression: str) -> list[dict[str, Any]]:
    text = expression.replace("$job", ".*").replace("$host", ".*").replace("$__rate_interval", "20s")
    asked = urllib.parse.urlencode({"query": text})
    with urllib.request.urlopen(f"{url}/api/v1/query?{asked}", timeout=60) as answer:
        document = json.load(answer)
    assert document["status"] == "success"
    return list(document["data"]["result"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no Prometheus here (Debian: prometheus)")
def test_each_query_of_the_dashboard_has_an_answer(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    flag = tmp_path / "flag"
    with launched("-np", "2", "-s", "1", "--metrics-port", "0", *program(flag, PROGRAM)) as launcher:
        with prometheus(f"127.0.0.1:{find_port(launcher)}", tmp_path) as url:
            missing = {each for each in EXPRESSIONS if not ELASTIC.search(each)}

            def has_answers() -> bool:
                missing.difference_update([each for each in missing if query(url, each)])
                return not missing

            until(has_answers)
            assert all(query(url, each) == [] for each in EXPRESSIONS if ELASTIC.search(each))
            until(lambda: [each["metric"]["rank"] for each in query(url, "reigen_is_waited_for == 1")] == ["1"])
        flag.touch()
        status, _, err = launcher.finish()
    assert status == 0, err
