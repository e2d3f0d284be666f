"""Networks between stand-in machines: a bridge whose links have a rate, or a switch that delays, too."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Protocol

from tests.lab import switch
from tests.lab.machine import MachineError, environment_of_machines, run_in_network

#: A packet may wait as long as this for its turn.
_QUEUE = ("burst", "256kb", "latency", "20ms")
_SEED = 20260


@dataclass(frozen=True, slots=True)
class Link:
    """A machine's connection to the others.

    Attributes:
        rate_bits: bits a second, in each direction; None: as fast as it goes.
        delay_seconds: from this machine to any other.
        loss: probability that a packet is lost.
        up: whether the cable is plugged in.
    """

    rate_bits: float | None = None
    delay_seconds: float = 0.0
    loss: float = 0.0
    up: bool = True


class Network(Protocol):
    """What connects the machines. Machines are numbered from 0 in the order of ``attach``."""

    def attach(self, pid: int, addresses: tuple[str, str]) -> None:
        """Gives the machine whose first process is ``pid`` an interface ``eth0`` with these addresses."""

    def change(self, number: int, link: Link) -> None:
        """Makes a machine's connection what ``link`` says."""

    def close(self) -> None:
        """Removes everything."""


class Bridge:
    """A bridge in a namespace of its own: fast, real Ethernet devices; it has rates and losses, but no delays.

    A packet is lost where it arrives: a link's loss is that of what is sent *to* the machine.
    """

    def __init__(self) -> None:
        self._pids: list[int] = []
        self._links: list[Link] = []
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", "echo; cat"],
            env=environment_of_machines(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert self._holder.stdout is not None
            self._holder.stdout.readline()  # the namespace is there
            run_in_network(self._holder.pid, "ip", "link", "add", "br0", "type", "bridge")
            run_in_network(self._holder.pid, "ip", "link", "set", "br0", "up")
        except BaseException:
            self.close()
            raise

    def attach(self, pid: int, addresses: tuple[str, str]) -> None:
        """See :meth:`Network.attach`."""
        port = f"p{len(self._pids)}"
        ours = str(self._holder.pid)
        run_in_network(
            pid, "ip", "link", "add", "eth0", "netns", str(pid), "type", "veth", "peer", "name", port, "netns", ours
        )
        run_in_network(self._holder.pid, "ip", "link", "set", port, "master", "br0", "up")
        configure(pid, addresses)
        self._pids.append(pid)
        self._links.append(Link())

    def change(self, number: int, link: Link) -> None:
        """See :meth:`Network.change`."""
        if link.delay_seconds:
            raise ValueError('a bridge has no delays: Hosts(..., network="switch") has')
        pid, port, before = self._pids[number], f"p{number}", self._links[number]
        if link.rate_bits != before.rate_bits:
            for namespace, device in ((pid, "eth0"), (self._holder.pid, port)):
                _shape(namespace, device, link.rate_bits)
        if link.loss != before.loss:
            _lose(pid, before.loss, link.loss)
            for sender in self._pids:  # what is lost are single packets, not what the kernel would have cut later
                run_in_network(sender, "ip", "link", "set", "eth0", "gso_max_segs", "1")
        if link.up != before.up:
            run_in_network(self._holder.pid, "ip", "link", "set", port, "up" if link.up else "down")
        self._links[number] = link

    def close(self) -> None:
        """See :meth:`Network.close`."""
        _end(self._holder)


class DelayingSwitch:
    """A process that carries each packet (:mod:`tests.lab.switch`). It needs part of a processor."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", sys.executable, "-I", "-S", switch.__file__, str(_SEED)],
            env=environment_of_machines(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def prioritize(self) -> None:
        """Gives it a processor whenever it has something to do: packets of a real network wait for none.

        For measurements, whose processes may have the lowest of these priorities. Does nothing where this process may
        not.
        """
        with contextlib.suppress(OSError):
            os.sched_setscheduler(self._process.pid, os.SCHED_RR, os.sched_param(2))

    def attach(self, pid: int, addresses: tuple[str, str]) -> None:
        """See :meth:`Network.attach`."""
        self._order({"attach": pid, "addresses": addresses})
        configure(pid, addresses)

    def change(self, number: int, link: Link) -> None:
        """See :meth:`Network.change`."""
        self._order({"port": number, **asdict(link)})

    def close(self) -> None:
        """See :meth:`Network.close`."""
        _end(self._process)

    def _order(self, order: dict[str, object]) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().decode()
        if answer != "\n":
            raise MachineError(f"the switch could not do {order}: {answer.strip() or 'it has ended'}")


def configure(pid: int, addresses: tuple[str, str]) -> None:
    """Gives ``eth0`` of a machine its IPv4 and IPv6 address, and brings it up."""
    for address, bits in zip(addresses, (24, 64), strict=True):
        tail = ["nodad"] if bits == 64 else []
        run_in_network(pid, "ip", "addr", "add", f"{address}/{bits}", "dev", "eth0", *tail)
    for device in ("lo", "eth0"):
        run_in_network(pid, "ip", "link", "set", device, "up")


def use_congestion_control(pid: int, addresses: tuple[str, str], name: str) -> None:
    """Lets connections of a machine to its network use a congestion control that is not this kernel's default."""
    tail = ("congctl", "lock", name)
    network = addresses[0].rpartition(".")[0] + ".0/24"
    run_in_network(pid, "ip", "route", "replace", network, "dev", "eth0", "src", addresses[0], *tail)
    network6 = addresses[1].rpartition("::")[0] + "::/64"
    run_in_network(pid, "ip", "-6", "route", "replace", network6, "dev", "eth0", *tail)


def drop_packets_from(pid: int, addresses: tuple[str, str], *, drop: bool) -> None:
    """Lets a machine drop whatever comes from these addresses, or no longer."""
    for command, address in zip(("iptables", "ip6tables"), addresses, strict=True):
        run_in_network(pid, command, "-w", "-A" if drop else "-D", "INPUT", "-s", address, "-j", "DROP")


def _shape(pid: int, device: str, rate_bits: float | None) -> None:
    root = ("dev", device, "root")
    if rate_bits is None:
        run_in_network(pid, "tc", "qdisc", "del", *root)
    else:
        run_in_network(pid, "tc", "qdisc", "replace", *root, "tbf", "rate", f"{rate_bits:.0f}bit", *_QUEUE)


def _lose(pid: int, before: float, loss: float) -> None:
    for command in ("iptables", "ip6tables"):
        for action, probability in (("-D", before), ("-A", loss)):
            if probability:
                rule = ("-m", "statistic", "--mode", "random", "--probability", f"{probability}", "-j", "DROP")
                run_in_network(pid, command, "-w", action, "INPUT", "-i", "eth0", *rule)


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()
    try:
        process.wait(5)  # its input has ended
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
