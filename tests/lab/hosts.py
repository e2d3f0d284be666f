"""Several stand-in machines and the network between them, for tests and benchmarks of jobs on many hosts."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tests.lab import ssh
from tests.lab.machine import Counters, HostProcess, Machine, MachineError
from tests.lab.network import (
    Bridge,
    DelayingSwitch,
    Link,
    Network,
    drop_packets_from,
    use_congestion_control,
)
from tests.lab.support import Unavailable, why_unavailable
from tests.lab.switch import network_of

_UPTIME_STEP_SECONDS = 100_000


class Host:
    """One stand-in machine, made by :class:`Hosts`.

    It has its own network, host name, processes, disk (a copy on write of this one's, in memory), /dev/shm and /run.

    Attributes:
        name: its host name; all machines know all names.
        address: its IPv4 address, on ``eth0``.
        address6: its IPv6 address, also called ``NAME-6``.
    """

    def __init__(self, machine: Machine, number: int, addresses: tuple[str, str], network: Network) -> None:
        self.name = machine.name
        self.address, self.address6 = addresses
        self._machine = machine
        self._number = number
        self._network = network
        self._link = Link()
        self._own: frozenset[int] = frozenset()

    @property
    def root(self) -> Path:
        """Its file system, seen from outside: files may be read and written there."""
        return self._machine.root

    @property
    def pid(self) -> int:
        """Number of its first process, seen from outside."""
        return self._machine.pid

    @property
    def counters(self) -> Counters:
        """What has gone over ``eth0`` until now, as its kernel counts it."""
        return self._machine.counters("eth0")

    @property
    def num_retransmissions(self) -> int:
        """How many TCP segments it has sent again until now."""
        return self._machine.num_retransmissions

    def start(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
        has_input: bool = False,
    ) -> HostProcess:
        """Starts a process on it; it ends with the machine.

        Args:
            command: the program, looked for on the machine, and its arguments.
            env: variables, on top of this process's environment less what a launcher put there.
            cwd: its directory.
            has_input: the process has a standard input (:meth:`HostProcess.tell`).
        """
        return self._machine.start([str(word) for word in command], env=env, cwd=cwd, has_input=has_input)

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
        timeout: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a process on it to its end, whatever its exit code is.

        Raises:
            MachineError: it has not ended in time.
        """
        process = self.start(command, env=env, cwd=cwd)
        code = process.wait(timeout)
        return subprocess.CompletedProcess([str(word) for word in command], code, *process.output())

    def entry(self, cwd: str | Path = "/") -> tuple[str, ...]:
        """The beginning of a command whose rest is run on it, for programs that start their processes themselves."""
        return self._machine.entry(cwd)

    def network(self) -> contextlib.AbstractContextManager[None]:
        """Sockets that this thread makes meanwhile are those of a process on it; threads that it starts, too."""
        return network_of(self.pid)

    def processes(self) -> dict[int, str]:
        """What runs on it besides what a machine runs by itself: process numbers outside, and command lines."""
        return {pid: command for pid, command in self._machine.processes().items() if pid not in self._own}

    def wait_until_listening(self, port: int, timeout: float = 60.0) -> None:
        """Waits until some process on it listens on a TCP port.

        Raises:
            MachineError: nobody does in time.
        """
        until = time.monotonic() + timeout
        while not self._machine.listens(port):
            if time.monotonic() > until:
                raise MachineError(f"nothing on {self.name} listens on port {port} after {timeout:g} s")
            time.sleep(0.005)

    def shape(self, rate_bits: float | None, delay_seconds: float = 0.0) -> None:
        """Limits its connection to a rate in each direction, headers included, and delays what it sends.

        Raises:
            ValueError: a delay, and the network is a bridge.
        """
        self._change(replace(self._link, rate_bits=rate_bits, delay_seconds=delay_seconds))

    def lose(self, probability: float) -> None:
        """Loses packets at random: of those that arrive (bridge) or of those that it sends (switch)."""
        self._change(replace(self._link, loss=probability))

    def cut(self) -> None:
        """Unplugs it. Nothing arrives any more, and nobody is told."""
        self._change(replace(self._link, up=False))

    def join(self) -> None:
        """Plugs it in again."""
        self._change(replace(self._link, up=True))

    def crash(self) -> None:
        """Ends it without a word, as a loss of power does: its peers get no packet that says so."""
        self.cut()
        self._machine.kill()

    def kill_everything(self) -> None:
        """Ends all its processes at once while the network works: its kernel still closes their connections."""
        self._machine.kill()

    def _change(self, link: Link) -> None:
        self._network.change(self._number, link)
        self._link = link

    def allow_ssh(self, client: ssh.Key, server: ssh.Key, known_hosts: Sequence[str], port: int) -> None:
        """Starts its sshd; from then on it is reached by, and reaches, whoever has the client's key."""
        ssh.configure(self._machine, client, server, known_hosts, port)
        ssh.serve(self._machine)
        self.wait_until_listening(port)
        self._own = frozenset(self._machine.processes())


class Hosts:
    """Stand-in machines ``h1``, ``h2``, ... in a network of their own, 10.77.0.1 and fd77::1, and so on.

    They are made of Linux namespaces that have no name anywhere else: everything is gone when the block ends, and also
    when this process, or the thread that made them, is killed. Programs on them see this machine's files as they were,
    and what they write is theirs alone, but for the directory ``shared``. The time of day is the same on all of them:
    Linux has no namespace for it.

    Args:
        num_hosts: how many.
        network: ``bridge``: Ethernet, as fast as the kernel goes; ``switch``: a process carries the packets and can
            delay them.
        ssh_port: where an sshd listens on each, None for none. Any of them then reaches any other by ``ssh NAME``.
        shared: directories that all of them may write to.
        congestion_control: of TCP between them, None for this kernel's default.
        same_uptime: CLOCK_MONOTONIC is the same on all. Otherwise they differ, as on machines that were started one
            after the other.

    Raises:
        Unavailable: there can be none here; says why.
        MachineError: one could not be made.

    Example::

        with Hosts(2) as (one, two):
            one.shape(200e6)
            server = two.start(["nc", "-l", "5000"])
            two.wait_until_listening(5000)
            one.run(["sh", "-c", f"echo hello | nc -N {two.address} 5000"])
    """

    def __init__(
        self,
        num_hosts: int,
        *,
        network: Literal["bridge", "switch"] = "bridge",
        ssh_port: int | None = None,
        shared: Sequence[Path] = (),
        congestion_control: str | None = "cubic",
        same_uptime: bool = False,
    ) -> None:
        if reason := why_unavailable(ssh=ssh_port is not None, tun=network == "switch"):
            raise Unavailable(reason)
        if not 1 <= num_hosts <= 100:
            raise ValueError(f"there can be 1 to 100 machines, not {num_hosts}")
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reigen-hosts-")))
            self.network: Network = Bridge() if network == "bridge" else DelayingSwitch()
            stack.callback(self.network.close)
            self._hosts: list[Host] = []
            for number in range(num_hosts):
                name = f"h{number + 1}"
                (directory / name).mkdir()
                up_seconds = 0 if same_uptime else _UPTIME_STEP_SECONDS * (number + 1)
                machine = Machine(name, directory / name, shared, up_seconds)
                stack.callback(machine.close)
                host = self._attach(machine, number)
                if congestion_control is not None:
                    use_congestion_control(host.pid, (host.address, host.address6), congestion_control)
                self._hosts.append(host)
            self._name_all()
            if ssh_port is not None:
                self._connect_by_ssh(directory, ssh_port)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def close(self) -> None:
        """Ends all machines and what runs on them, and removes everything."""
        self._stack.close()

    def partition(self, one: Host, other: Host) -> None:
        """Lets nothing through between two machines, in either direction; both still reach the others."""
        self._separate(one, other, drop=True)

    def heal(self, one: Host, other: Host) -> None:
        """Ends a partition."""
        self._separate(one, other, drop=False)

    def drop_one_way(self, sender: Host, *, to: Host, drop: bool) -> None:
        """Lets one machine drop what comes from another one, or no longer; the other direction is whole."""
        drop_packets_from(to.pid, (sender.address, sender.address6), drop=drop)

    def _separate(self, one: Host, other: Host, *, drop: bool) -> None:
        for here, there in ((one, other), (other, one)):
            drop_packets_from(here.pid, (there.address, there.address6), drop=drop)

    def _attach(self, machine: Machine, number: int) -> Host:
        addresses = (f"10.77.0.{number + 1}", f"fd77::{number + 1:x}")
        self.network.attach(machine.pid, addresses)
        return Host(machine, number, addresses, self.network)

    def _name_all(self) -> None:
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for host in self:
            lines += [f"{host.address} {host.name}", f"{host.address6} {host.name}-6"]
        for host in self:
            for file, text in (("hosts", "\n".join(lines)), ("hostname", host.name), ("resolv.conf", "")):
                path = host.root / "etc" / file
                path.unlink(missing_ok=True)  # it may be a link to somewhere else
                path.write_text(text + "\n")

    def _connect_by_ssh(self, directory: Path, port: int) -> None:
        client = ssh.Key.make(directory, "client")
        keys = [ssh.Key.make(directory, f"server-{host.name}") for host in self]
        names = [[host.name, f"{host.name}-6", host.address, host.address6] for host in self]
        known = [ssh.known_host(aliases, port, key) for aliases, key in zip(names, keys, strict=True)]
        for host, key in zip(self, keys, strict=True):
            host.allow_ssh(client, key, known, port)
