"""`reigen check --hosts` on stand-in machines: it finds what was done to them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.lab import Hosts
from tests.network.conftest import MakeHosts

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2] / "src"


def check(hosts: Hosts, *arguments: str) -> tuple[int, list[str]]:
    """Exit code and lines of `reigen check ARGUMENTS` on the first machine."""
    command = [sys.executable, "-m", "reigen", "check", *arguments]
    done = hosts[0].run(command, env={"PYTHONPATH": str(SOURCE)}, timeout=150.0)
    assert done.stderr == ""
    for host in hosts:
        assert not any("reigen" in running for running in host.processes().values())
    return done.returncode, done.stdout.splitlines()


def row(lines: list[str], *begin: str) -> list[str]:
    """The columns of the line that begins with these."""
    rows = [re.split(r"  +", line) for line in lines]
    return next(columns for columns in rows if tuple(columns[: len(begin)]) == begin)


def test_hosts_that_are_well_and_what_lies_between_them(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(3, network="switch", ssh_port=22)
    hosts[1].shape(50e6, 0.01)
    hosts[2].shape(200e6, 0.0)
    code, lines = check(hosts, "--hosts", "h1,h2,h3")
    assert (code, lines[-1]) == (0, "these hosts can run jobs together")
    assert row(lines, "h1")[4] == "this one"
    offset = float(row(lines, "h2")[4].split()[0])
    assert abs(offset) < 1000.0  # the machines have one clock, and how busy this one is nobody knows
    round_trip, there, back = row(lines, "h1", "h2")[2:]
    assert 9_000 <= float(round_trip.split()[0]) <= 1_000_000
    assert 0 < float(there.split()[0]) <= 51
    assert 0 < float(back.split()[0]) <= 51
    assert 0 < float(row(lines, "h1", "h3")[3].split()[0]) <= 201
    assert any(line.startswith("h3    10.77.0.3:") and "eth0" in line for line in lines)


def test_a_host_that_is_ill_and_two_that_do_not_hear_each_other(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(4, ssh_port=22)
    (hosts[3].root / "root/.ssh/authorized_keys").write_text("")
    hosts.partition(hosts[1], hosts[2])
    code, lines = check(hosts, "--hosts", "h1,h2,h3,h4", "--network-interfaces", "eth0")
    assert (code, lines[-1]) == (1, "these hosts cannot run jobs together")
    assert row(lines, "h2", "h3")[2:] == ["-", "-", "-"]
    assert row(lines, "h1", "h2")[2] != "-"
    problems = [line for line in lines if line.startswith("problem: ")]
    assert len(problems) == 2
    assert problems[0].startswith("problem: h4: it refuses the login")
    assert problems[1].startswith("problem: h2 and h3: no connection")
