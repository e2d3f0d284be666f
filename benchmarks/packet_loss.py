"""How often connections are given up although both machines are there, where packets are lost: computed and measured.

    python -m benchmarks.packet_loss --loss 0.3 --peer-timeout 5 --connections 500 --seconds 120
    python -m benchmarks.packet_loss --loss 0.05 --connections 2000 --seconds 600
    python -m benchmarks.packet_loss --loss 0.3 --traffic 0.5 --connections 200 --seconds 120
    python -m benchmarks.packet_loss --table docs/data/records/packet-loss.json        all of `CASES`; 20 minutes

Two stand-in machines (root; namespaces and iptables) hold so many connections with `reigen.net.sockets.set_keepalive`
at both ends, between which each machine drops that share of what it receives. What is computed is the mean number of
connections that an independent model of Linux's timers loses; at a loss that makes it large, the measured number must
agree, and then what is computed for a small loss can be believed. Each measurement prints one JSON line.

The model. Idle: an end probes after ``idle`` seconds without an answer, then every ``interval``; a probe is in vain
with q = 1 - (1-p)^2; after n in vain the connection is over. Busy (``--traffic``: one end sends a byte so often, in
seconds): a message is repeated after 0.2 s, six times (with cubic, as here), then after twice as long each time, at
most 1 s from Linux 6.15 on; it is lost if all of that is in vain. Tail loss probes, one more attempt each, are left
out, and so is that messages of one connection follow each other: what is computed for busy ones is an upper bound.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.harness.machine import Machine, this_machine
from benchmarks.harness.record import Column, Quantity, Record, make_record
from reigen.net.sockets import KeepalivePlan, set_keepalive
from tests.lab import Host, Hosts

PORT = 4000
RTO_SECONDS, NUM_LINEAR, RTO_MAX_SECONDS = 0.2, 6, 1.0


def idle_losses_per_hour(loss: float, plan: KeepalivePlan) -> float:
    """How often a connection with nothing to say is given up by one of its ends."""
    in_vain = 1 - (1 - loss) ** 2
    cycle = plan.idle_seconds + plan.interval_seconds * sum(in_vain**k for k in range(1, plan.num_probes))
    return 2 * 3600 / cycle * in_vain**plan.num_probes


def num_transmissions(timeout_seconds: float) -> int:
    """How often a message is sent before the kernel gives up."""
    at, wait, number = 0.0, RTO_SECONDS, 1
    while at + wait < timeout_seconds:
        at += wait
        wait = RTO_SECONDS if number < NUM_LINEAR else min(2 * wait, RTO_MAX_SECONDS)
        number += 1
    return number


def busy_losses_per_hour(loss: float, plan: KeepalivePlan, every_seconds: float) -> float:
    """How often a connection is given up on which one end says something so often."""
    in_vain = 1 - (1 - loss) ** 2
    return 3600 / every_seconds * in_vain ** num_transmissions(plan.user_timeout_ms / 1000)


def hold(host: Host, address: str, arguments: argparse.Namespace, line: Connection) -> None:
    """Run in a process: one end of all connections; tells which have ended at this end, when and with which error."""
    number = arguments.connections
    with host.network():
        if address:
            ends = [socket.create_connection((address, PORT), 60.0) for _ in range(number)]
        else:
            with socket.create_server((host.address, PORT), backlog=number) as listener:
                line.send("listening")
                ends = [listener.accept()[0] for _ in range(number)]
    selector = selectors.DefaultSelector()
    for end in ends:
        set_keepalive(end, arguments.peer_timeout, bulk=arguments.bulk)
        end.setblocking(False)
        # the port of the end that connected names the connection at both ends
        selector.register(end, selectors.EVENT_READ, (end.getsockname() if address else end.getpeername())[1])
    line.send("connected")
    line.recv()
    losses: list[tuple[int, float, str]] = []
    dice, talkers = random.Random(1), list(selector.get_map().values()) if address and arguments.traffic else []
    now = time.monotonic()
    until, due = now + arguments.seconds, now
    while (now := time.monotonic()) < until:
        while talkers and due <= now:
            with contextlib.suppress(OSError):  # the other loop hears of it
                dice.choice(talkers).fileobj.send(b"x")
            due += dice.expovariate(len(talkers) / arguments.traffic)
        for key, _ in selector.select(max(0.0, min(until, due if talkers else until) - now)):
            name = ending(key.fileobj)
            if name:
                selector.unregister(key.fileobj)
                losses.append((key.data, time.monotonic(), name))
    line.send(losses)
    line.recv()


def ending(end: socket.socket) -> str:
    """What has ended a connection; empty if nothing has."""
    try:
        return "" if end.recv(1 << 16) else "closed"
    except BlockingIOError:
        return ""
    except OSError as error:
        return os.strerror(error.errno or 0)


def measure(arguments: argparse.Namespace) -> tuple[int, float]:
    """How many connections were lost, and for how many hours together they had lived."""
    with Hosts(2) as hosts:
        lines, processes = [], []
        for host, address in ((hosts[0], ""), (hosts[1], hosts[0].address)):
            mine, its = multiprocessing.Pipe()
            process = multiprocessing.Process(target=hold, args=(host, address, arguments, its))
            process.start()
            lines.append(mine)
            processes.append(process)
            if not address:
                assert mine.recv() == "listening"
        assert [line.recv() for line in lines] == ["connected"] * 2
        for host in hosts:
            host.lose(arguments.loss)
        begin = time.monotonic()
        for line in lines:
            line.send("go")
        ends: dict[int, float] = {}
        for line in lines:
            for connection, ended, _ in line.recv():
                ends[connection] = min(ended, ends.get(connection, ended))
        for line, process in zip(lines, processes, strict=True):
            line.send("end")
            process.join()
    lived = sum(ended - begin for ended in ends.values()) + (arguments.connections - len(ends)) * arguments.seconds
    return len(ends), lived / 3600


@dataclass(frozen=True)
class LossFigures:
    """What one measurement has found.

    Attributes:
        lost: connections that were given up.
        hours: for which all connections together had lived.
        computed_per_hour: how many connections of the model are given up in an hour.
    """

    lost: int
    hours: float
    computed_per_hour: float


def run_case(arguments: argparse.Namespace) -> LossFigures:
    """Compute and measure one case, and print it."""
    plan = KeepalivePlan.of(arguments.peer_timeout)
    if arguments.traffic:
        rate = busy_losses_per_hour(arguments.loss, plan, arguments.traffic)
    else:
        rate = idle_losses_per_hour(arguments.loss, plan)
    found = LossFigures(*measure(arguments), rate)
    case = {name: value for name, value in vars(arguments).items() if name != "table"}
    figures = {"lost": found.lost, "hours": round(found.hours, 2), "lost_per_hour": round(found.lost / found.hours, 3)}
    probes = [plan.idle_seconds, plan.interval_seconds, plan.num_probes]
    print(json.dumps(case | {"probes": probes, **figures, "computed_per_hour": rate, "kernel": platform.release()}))
    return found


#: Lines of the table: what it calls them, and the options that differ from the defaults.
CASES: Mapping[str, Mapping[str, float]] = {
    "5 %": {"loss": 0.05, "connections": 2000, "seconds": 600.0},
    "50 %": {"loss": 0.5, "seconds": 300.0},
    "30 %": {"loss": 0.3, "peer_timeout": 5.0, "seconds": 120.0},
    "20 %": {"loss": 0.2, "peer_timeout": 5.0, "seconds": 120.0},
    "30 %, three messages a second": {
        "loss": 0.3,
        "peer_timeout": 5.0,
        "traffic": 1 / 3,
        "connections": 200,
        "seconds": 120.0,
    },
}
_TIMEOUT, _MEASURED, _COMPUTED = "REIGEN_PEER_TIMEOUT", "measured: connections lost per hour", "computed"


def make_table(found: Mapping[str, tuple[argparse.Namespace, LossFigures]], machine: Machine) -> Record:
    """Return all cases, as a table."""
    lines: dict[str, dict[str, Quantity | str]] = {}
    for title, (case, figures) in found.items():
        measured: Quantity | str = f"none of {case.connections} connections in {figures.hours:.0f} hours"
        if figures.lost:
            measured = _rate(figures.lost / figures.hours)
        timeout = Quantity(case.peer_timeout, 0, unit="s")
        lines[title] = {_TIMEOUT: timeout, _MEASURED: measured, _COMPUTED: _rate(figures.computed_per_hour)}
    columns = [Column(name) for name in (_TIMEOUT, _MEASURED, _COMPUTED)]
    conditions = f"stand-in hosts, Linux {platform.release()}"
    return make_record("python -m benchmarks.packet_loss", conditions, "packets lost", columns, lines, machine)


def _rate(per_hour: float) -> Quantity | str:
    if 0 < per_hour < 0.05:
        return f"{per_hour:.0e}"
    return Quantity(per_hour, 1 if per_hour < 50 else 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one case, or all of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", type=float, default=0.05, help="which share of packets is lost, each way")
    parser.add_argument("--peer-timeout", type=float, default=20.0, help="REIGEN_PEER_TIMEOUT")
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--traffic", type=float, default=0.0, help="seconds between two messages; 0: none")
    parser.add_argument("--bulk", action="store_true", help="as connections for bulk data")
    parser.add_argument("--table", type=Path, metavar="FILE", help="measure all cases of the table, and write it there")
    options = parser.parse_args(arguments)
    if options.table is None:
        run_case(options)
        return
    machine, defaults = this_machine(), vars(parser.parse_args([]))
    cases = {title: argparse.Namespace(**{**defaults, **case}) for title, case in CASES.items()}
    make_table({title: (case, run_case(case)) for title, case in cases.items()}, machine).save(options.table)


if __name__ == "__main__":
    main()
