"""`reigen run --metrics-port` and `--metrics-file` with real ranks and servers, which stop, die and come."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import termios
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.launcher import DEADLINE_SECONDS, Launcher, launched, run, until
from tests.multiprocess.test_launch_hosts import FAKE_SSH

#: Ranks that step until a file is there, all at the same step.
PROGRAM = """
import os, sys, time
import numpy as np, reigen
from reigen import context
reigen.init()
flag, x = sys.argv[1], np.ones(1000, np.float32)
print("pid", os.getpid(), flush=True)
while True:
    time.sleep(0.01)
    ends = reigen.allreduce(np.array([float(os.path.exists(flag))]), op=reigen.Max, name="ends")[0]
    reigen.allreduce(x, name="x")
    context.mark("STEP")
    reigen.report_progress(samples=2)
    if ends:
        break
"""


def program(flag: Path, code: str = PROGRAM) -> tuple[str, ...]:
    return sys.executable, "-c", code, str(flag)


def complaints(err: str) -> list[str]:
    """What the launcher says, but for its verdict on a job that was not a short one."""
    return [line for line in err.splitlines() if not line.startswith("reigen run: verdict: ")]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of processes: all but the one about the job."""
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["role"] != "job"]


def read_end(path: Path) -> dict[str, Any]:
    """The last line, which is about the job."""
    end: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    assert end["role"] == "job"
    return end


def scrape(port: str) -> dict[str, float]:
    """Values of samples that name a process, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(r'^(reigen_\w+)\{host="[^"]*",rank="(\d+)",role="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {f"{name} {role} {rank}": float(value) for name, rank, role, value in found}


def find_port(launcher: Launcher) -> str:
    assert launcher.process.stderr is not None
    line = launcher.process.stderr.readline().decode()
    found = re.fullmatch(r"reigen run: metrics are at http://127\.0\.0\.1:(\d+)/metrics\n", line)
    assert found is not None, line
    return found[1]


@pytest.mark.slow
def test_a_port_that_is_taken_is_told_before_anything_starts() -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, out, err = run("-np", "1", "--metrics-port", str(port), sys.executable, "-c", "print('started')")
    assert (status, out) == (1, "")
    assert f"--metrics-port: 127.0.0.1:{port} cannot be used: Address already in use" in err


@pytest.mark.slow
def test_all_ranks_are_served_and_a_stopped_one_is_seen(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    path, flag = tmp_path / "m.jsonl", tmp_path / "flag"
    options = ("-np", "3", "--metrics-port", "0", "--metrics-file", str(path))
    with launched(*options, *program(flag)) as launcher:
        port = find_port(launcher)
        pids = dict(line.removeprefix("[").split("] pid ") for line in launcher.lines(3))
        names = [f"reigen_steps_total rank {rank}" for rank in range(3)]
        until(lambda: min(scrape(port).get(name, 0) for name in names) >= 2)
        assert max(scrape(port)[f"reigen_report_age_seconds rank {rank}"] for rank in range(3)) < 60
        os.kill(int(pids["1"]), signal.SIGSTOP)
        until(lambda: scrape(port)["reigen_report_age_seconds rank 1"] >= 2.5)
        found = scrape(port)
        assert found["reigen_is_waited_for rank 1"] == 1
        assert [found[f"reigen_is_waited_for rank {rank}"] for rank in (0, 2)] == [0, 0]
        os.kill(int(pids["1"]), signal.SIGCONT)
        until(lambda: scrape(port)["reigen_report_age_seconds rank 1"] < 2.5)
        flag.touch()
        status, _, err = launcher.finish()
    assert (status, complaints(err)) == (0, [])
    lines = read_lines(path)
    final = {each["rank"]: each for each in lines if each["final"]}
    assert set(final) == {0, 1, 2}
    (steps,) = {each["metrics"]["reigen_steps_total"] for each in final.values()}
    assert steps >= 2
    for each in final.values():
        assert each["metrics"]["reigen_samples_total"] == 2 * steps
        assert each["metrics"]['reigen_operations_total{operation="allreduce"}'] == 2 * steps
    by_rank = defaultdict(list)
    for each in lines:
        by_rank[each["rank"]].append(each["metrics"]["reigen_steps_total"])
    assert all(values == sorted(values) for values in by_rank.values())


@pytest.mark.slow
def test_ranks_of_two_hosts_and_one_that_dies(tmp_path: Path) -> None:
    ssh, path = tmp_path / "ssh", tmp_path / "m.jsonl"
    ssh.write_text(FAKE_SSH)
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    hosts = ("-H", "localhost:1,a.invalid:1", "-np", "2", "--ssh-command", str(ssh))
    with launched(*hosts, "--metrics-file", str(path), *program(tmp_path / "flag")) as launcher:
        pids = dict(line.removeprefix("[").split("] pid ") for line in launcher.lines(2))
        until(lambda: path.exists() and {each["rank"] for each in read_lines(path)} == {0, 1})
        until(lambda: any(each["metrics"]["reigen_steps_total"] for each in read_lines(path)))
        os.kill(int(pids["1"]), signal.SIGKILL)
        status, _, _ = launcher.finish()
    assert status == 137
    end = read_end(path)
    assert end["exit_code"] == 137
    assert "rank 1" in end["failure"], end
    assert [each["rank"] for each in read_lines(path) if each["final"]].count(1) == 1, "what was heard last of it"


@pytest.mark.slow
def test_views_of_an_elastic_job_are_counted(tmp_path: Path) -> None:
    path, flag = tmp_path / "m.jsonl", tmp_path / "flag"
    code = """
import os, signal, sys, time
import numpy as np, torch, reigen.torch as hvd
hvd.init()
state = hvd.elastic.TorchState(step=0)
@hvd.elastic.run
def train(state):
    while state.step < 20:
        time.sleep(0.02)
        if hvd.rank() == 1 and state.step == 10 and os.environ["REIGEN_INCARNATION"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(10), name="x")
        state.step += 1
        hvd.report_progress(steps=1)
        state.commit()
train(state)
"""
    options = ("-np", "2", "--min-np", "1", "--max-np", "2", "--metrics-file", str(path))
    status, _, err = run(*options, *program(flag, code))
    assert status == 0, err
    lines = read_lines(path)
    final = [each for each in lines if each["final"] and each["epoch"] > 1]
    assert final
    for each in final:
        metrics = each["metrics"]
        assert metrics["reigen_view_epoch"] == each["epoch"]
        changes = [value for name, value in metrics.items() if name.startswith("reigen_view_changes_total")]
        if metrics["reigen_steps_total"] > 10:  # no newcomer
            assert sum(changes) >= 1
            assert metrics["reigen_lost_ranks_total"] >= 1
            assert metrics["reigen_view_change_seconds_total"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", ["run -np 2 -s 1", "launch --launcher local -n 2 -s 1"])
def test_workers_and_servers_report_pushes_and_requests(tmp_path: Path, options: str) -> None:
    path = tmp_path / "m.jsonl"
    code = """
import numpy as np, reigen
kv = reigen.kv.create("dist_sync")
kv.init("w", np.zeros(1000, np.float32))
out = np.empty(1000, np.float32)
for _ in range(5):
    kv.push("w", np.ones(1000, np.float32))
    kv.pull("w", out=out)
kv.barrier()
kv.close()
"""
    command, *numbers = options.split()
    words = (*numbers, "--metrics-file", str(path), *program(tmp_path / "flag", code))
    status, _, err = run(*words, program=command)
    assert status == 0, err
    final = {(each["role"], each["rank"]): each["metrics"] for each in read_lines(path) if each["final"]}
    assert set(final) == {("rank", 0), ("rank", 1), ("server", 0)}
    for rank in (0, 1):
        found = final["rank", rank]
        assert (found["reigen_pushes_total"], found["reigen_pulls_total"]) == (5, 5)
        for operation in ("push", "pull"):
            ways = ("network", "shared_memory")
            moved = [found[f'reigen_bytes_total{{operation="{operation}",way="{way}"}}'] for way in ways]
            assert sum(moved) == 5 * 4000
        assert found["reigen_compute_seconds_total"] > 0
    server = final["server", 0]
    assert server['reigen_server_requests_total{request="push"}'] == 10
    assert server['reigen_server_requests_total{request="pull"}'] == 10


def read_until(terminal: int, pattern: bytes, data: bytes = b"") -> bytes:
    """What a terminal has been sent when a pattern is in it."""
    while not re.search(pattern, data):
        ready, _, _ = select.select([terminal], [], [], DEADLINE_SECONDS)
        assert ready, data
        data += os.read(terminal, 1 << 16)
    return data


@pytest.mark.slow
def test_a_table_on_the_terminal_marks_a_stopped_rank(tmp_path: Path) -> None:
    terminal, other_end = pty.openpty()
    termios.tcsetwinsize(other_end, (40, 160))
    flag = tmp_path / "flag"
    try:
        options = {"stdout": subprocess.PIPE, "stderr": other_end, "env": {"TERM": "xterm"}}
        full = ("--metrics-file", "/dev/full")
        with launched("-np", "2", "--top", *full, *program(flag), **options) as launcher:
            pids = dict(line.removeprefix("[").split("] pid ") for line in launcher.lines(2))
            data = read_until(terminal, rb"steps/s(?s:.*)\d+%")
            data = read_until(terminal, rb"run: --metrics-file /dev/full: it cannot be written any more: No", data)
            os.kill(int(pids["1"]), signal.SIGSTOP)
            data = read_until(terminal, rb"\x1b\[1;31m1 (?s:.*)silent: the others wait", data)
            os.kill(int(pids["1"]), signal.SIGCONT)
            flag.touch()
            data = read_until(terminal, rb"\x1b\[J(?!(?s:.*)steps/s)", data)
            launcher.process.wait(DEADLINE_SECONDS)
        assert launcher.process.returncode == 0
    finally:
        os.close(terminal)
        os.close(other_end)


@pytest.mark.slow
def test_a_launcher_that_is_stopped_holds_up_no_rank(tmp_path: Path) -> None:
    """Its control service accepts nothing meanwhile."""
    flag, steps = tmp_path / "flag", tmp_path / "steps"
    code = PROGRAM.replace("    if ends:", f"    open({str(steps)!r}, 'a').write('.')\n    if ends:")
    with launched("-np", "2", "--metrics-file", str(tmp_path / "m"), *program(flag, code)) as launcher:
        launcher.lines(2)
        supervisor = launcher.supervisor()
        os.kill(supervisor, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            seen = steps.stat().st_size if steps.exists() else 0
            until(lambda: time.monotonic() - begun > 3 and steps.exists() and steps.stat().st_size > seen + 50)
        finally:
            os.kill(supervisor, signal.SIGCONT)
        flag.touch()
        status, _, err = launcher.finish()
    assert (status, complaints(err)) == (0, [])
    assert {each["rank"] for each in read_lines(tmp_path / "m") if each["final"]} == {0, 1}
