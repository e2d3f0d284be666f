"""`reigen check --hosts`: whether these hosts can run jobs together, and how fast they talk to each other."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from reigen._version import __version__
from reigen.cli.host_pairs import Findings, Pair
from reigen.cli.tables import print_table
from reigen.launch.agent.host_probe import ClockOffset, HostProbe, probe_hosts
from reigen.launch.base import AgentCommand
from reigen.launch.hosts import HostInfo, assign_ranks, is_this_host
from reigen.launch.ssh.command import SshOptions
from reigen.launch.ssh.launcher import SshAgentStarter

#: Clocks that are further apart are worth a remark: log files do not line up, and certificates may not be valid yet.
_CLOCK_SECONDS = 1.0
_MEASURE_SECONDS = 600
#: With more pairs than these only the slowest are shown.
_MOST_ROWS = 36
#: Command of each rank: $0 is the Python of the other hosts, $1 that of this one.
_PROGRAM = 'command -v "$0" >/dev/null && set -- "$0"; exec "$1" -P -m reigen.cli.host_pairs'


def check_hosts(hosts: Sequence[HostInfo], ssh: SshOptions, options: Sequence[str]) -> int:
    """Print findings about hosts; returns 0 when all can take part in a job, else 1.

    ``options`` are ``ssh``'s, as options of `reigen run`.

    Raises:
        LaunchError: there is no ssh.
    """
    names = list(dict.fromkeys(host.name for host in hosts))
    probes = probe_hosts(names, SshAgentStarter(ssh), AgentCommand.with_modules_of(ssh.python, os.environ))
    bad = [number for number, each in enumerate(probes) if each.problem is not None]
    headings = ["host", "Reigen", "Python", "torch", "clock", "processors", "GPUs"]
    print_table(headings, [_row(each) for each in probes], bad)
    problems = [
        ": ".join(filter(None, (each.host, each.problem.what, each.problem.advice))) for each in probes if each.problem
    ]
    problems += check_pythons(probes)
    clock_problems = check_clocks(probes)
    able = [each.host for each in probes if each.problem is None]
    if len(able) > 1:
        print()
        problems += _measure(able, ssh, options)
    for text in clock_problems:
        print(f"remark: {text}")
    for text in problems:
        print(f"problem: {text}")
    print("these hosts cannot run jobs together" if problems else "these hosts can run jobs together")
    return 1 if problems else 0


def check_pythons(probes: Sequence[HostProbe]) -> list[str]:
    """List problems of the Pythons: one feature release must run everywhere, for functions and classes travel."""
    releases: dict[str, list[str]] = {}
    for each in probes:
        if each.python:
            releases.setdefault(".".join(each.python.split(".")[:2]), []).append(each.host)
    if len(releases) < 2:
        return []
    return ["different Pythons: " + "; ".join(f"{name} on {', '.join(on)}" for name, on in sorted(releases.items()))]


def check_clocks(probes: Sequence[HostProbe]) -> list[str]:
    """List clocks that differ too much from this host's."""
    return [
        f"the clock of {each.host} is {abs(each.clock.offset_seconds):.1f} s "
        f"{'ahead of' if each.clock.offset_seconds > 0 else 'behind'} this host's: is it synchronised (NTP)?"
        for each in probes
        if each.clock is not None and abs(each.clock.offset_seconds) > _CLOCK_SECONDS + each.clock.error_seconds
    ]


def _row(one: HostProbe) -> list[str]:
    if one.facts is None:
        return [one.host, "?", "", "", "", "", ""]
    gpus = one.facts.gpus
    count = f"{len(gpus)} x {gpus[0]}" if len(set(gpus)) == 1 and len(gpus) > 1 else "; ".join(gpus) or "none"
    torch = one.facts.versions.get("torch", "none")
    return [one.host, __version__, one.python, torch, _offset(one.clock), str(one.facts.num_cpus), count]


def _offset(clock: ClockOffset | None) -> str:
    if clock is None:
        return "this one"
    return f"{clock.offset_seconds * 1e3:+.1f} ms (+-{clock.error_seconds * 1e3:.1f})"


def _measure(hosts: Sequence[str], ssh: SshOptions, options: Sequence[str]) -> list[str]:
    """Run the measurements as a job, show them, and return problems."""
    listed = ",".join(f"{name}:1" for name in hosts)
    command = [sys.executable, "-m", "reigen", "run", "-np", str(len(hosts)), "-H", listed, "--no-prefix", *options]
    try:
        done = subprocess.run(
            [*command, "--bind", "none", "--", "sh", "-c", _PROGRAM, ssh.python, sys.executable],
            cwd="/",  # which is everywhere
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_MEASURE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [f"the measurements have not ended within {_MEASURE_SECONDS} s"]
    if done.returncode != 0:
        return ["the measurements failed:\n" + done.stderr.strip()]
    found = msgspec.json.decode(done.stdout, type=Findings)
    by_rank = hosts_by_rank(hosts)
    print_table(
        ["host", "reached at", "which is"], [[name, *found.addresses[rank]] for rank, name in enumerate(by_rank)]
    )
    print()
    shown = sorted(found.pairs, key=lambda pair: (not pair.problem, min(pair.bytes_per_second)))[:_MOST_ROWS]
    if len(shown) < len(found.pairs):
        print(f"the slowest {len(shown)} of {len(found.pairs)} pairs:")
    shown.sort(key=lambda pair: pair.ranks)
    bad = [number for number, pair in enumerate(shown) if pair.problem]
    print_table(["from", "to", "round trip", "there", "back"], [_pair_row(pair, by_rank) for pair in shown], bad)
    print()
    return [f"{by_rank[p.ranks[0]]} and {by_rank[p.ranks[1]]}: {p.problem}" for p in found.pairs if p.problem]


def hosts_by_rank(hosts: Sequence[str]) -> list[str]:
    """Order the hosts as a job does: this one, by any of its names, is one host."""
    return [each.host for each in assign_ranks([HostInfo(name, 1) for name in hosts], len(hosts), is_this_host)]


def _pair_row(pair: Pair, hosts: Sequence[str]) -> list[str]:
    names = [hosts[pair.ranks[0]], hosts[pair.ranks[1]]]
    if pair.problem:
        return [*names, "-", "-", "-"]
    forth, back = map(format_rate, pair.bytes_per_second)
    return [*names, f"{pair.round_trip_seconds * 1e6:.0f} us", forth, back]


def format_rate(bytes_per_second: float) -> str:
    """Format a rate as networks are sold: ``100 Mbit/s``, ``12.0 Gbit/s``."""
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def ssh_run_options(chosen: argparse.Namespace) -> list[str]:
    """Return the options of ssh for `reigen run`."""
    options = ["--ssh-command", chosen.ssh_command]
    for flag, value in (
        ("--ssh-port", chosen.ssh_port),
        ("--ssh-identity-file", chosen.ssh_identity_file),
        ("--remote-python", chosen.remote_python),
        ("--network-interfaces", chosen.network_interfaces),
    ):
        options += [] if value is None else [flag, str(value)]
    return options if chosen.check_host_keys else [*options, "--ssh-no-host-key-check"]
