"""A job whose hosts are connected by a slow link: its timeline says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from reigen.observe.summary import summarize
from reigen.observe.trace_reader import read_trace
from reigen.observe.verdict import Cause, Confidence
from tests.network.conftest import MakeHosts

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2]
PROGRAM = SOURCE / "tests" / "multiprocess" / "verdict_program.py"


def test_a_slow_link_is_named(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2, ssh_port=22)
    for host in hosts:
        host.shape(200e6)
    environ = {"PYTHONPATH": str(SOURCE / "src"), "HOROVOD_TIMELINE": "/tmp/t.json", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "reigen", "run", "-np", "2", "-H", "h1:1,h2:1", sys.executable, str(PROGRAM)]
    job = hosts[0].start([*command, "large_gradients", "20"], env=environ, cwd=SOURCE)
    assert job.wait(120.0) == 0, job.output()
    trace = read_trace(hosts[0].root / "tmp/t.json")
    found = summarize(trace).verdict
    assert len(trace.names) == 2
    assert found.cause is Cause.NETWORK, found
    assert "moving data between hosts" in found.finding
    assert found.confidence >= Confidence.LIKELY
