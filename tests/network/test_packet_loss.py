"""Where packets are lost, jobs take longer, and do not end: not while they work, nor while they have nothing to say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import why_unavailable
from tests.network.conftest import MakeHosts
from tests.network.waiting import wait_for

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2]
#: What follows `ready` happens while packets are lost.
WORKS = """
import sys, time
import numpy as np, reigen
reigen.init()
reigen.barrier()
print("ready", flush=True)
time.sleep(float(sys.argv[1]))
for _ in range(5):
    assert reigen.allreduce(np.ones(10_000, np.float32), op=reigen.Sum, name="x")[0] == reigen.size()
print("done", flush=True)
"""
SERVED = """
import sys, time
import numpy as np, reigen.kv
with reigen.kv.create("dist_sync") as kv:
    kv.init("x", np.zeros(10_000, np.float32))
    print("ready", flush=True)
    time.sleep(float(sys.argv[1]))
    for _ in range(5):
        value = np.ones(10_000, np.float32)
        kv.pushpull("x", value)
        assert value[0] == kv.num_workers
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("program", "options"), [(WORKS, ()), pytest.param(SERVED, ("-s", "1"), marks=pytest.mark.nightly)]
)
def test_a_job_in_which_nobody_says_anything_for_long_goes_on(
    make_hosts: MakeHosts, program: str, options: tuple[str, ...]
) -> None:
    """With three probes of an idle connection, and 20 % of the packets lost, one is given up every few seconds."""
    hosts = make_hosts(3, ssh_port=22)
    command = [sys.executable, "-m", "reigen", "run", "-np", "6", *options, "-H", "h1:2,h2:2,h3:2"]
    job = hosts[0].start(
        [*command, sys.executable, "-c", program, "20"], env={"PYTHONPATH": str(SOURCE / "src")}, cwd=SOURCE
    )

    def are_ready() -> bool:
        assert job.returncode is None, job.output()
        return job.output()[0].count("ready") == 6

    wait_for(are_ready, "all ranks are ready")
    for host in hosts:
        host.lose(0.2)
    assert job.wait(150.0) == 0, job.output()
    assert job.output()[0].count("done") == 6


def test_as_many_idle_connections_are_lost_as_is_computed() -> None:
    """The computation is the benchmark's own, and its docstring's; what it says of a small loss follows from that."""
    if reason := why_unavailable():
        pytest.skip(reason)
    options = ["--loss", "0.3", "--peer-timeout", "5", "--connections", "500", "--seconds", "20"]
    command = [sys.executable, "-m", "benchmarks.packet_loss", *options]
    run = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(run.stdout)
    assert found["lost"] > 50
    assert 0.5 < found["lost_per_hour"] / found["computed_per_hour"] < 1.2
