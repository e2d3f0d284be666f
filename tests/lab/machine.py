"""One stand-in machine: a process tree with a network, host name, disk, /dev/shm and process numbers of its own.

Nothing of it has a name outside: its namespaces exist as long as its first process does, which ends when this process
does, however that happens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reigen.testing.environment import clean_environment
from tests.lab.support import ADMINISTRATORS_PATH

_NAMESPACES = ("--net", "--uts", "--pid", "--ipc", "--mount", "--time", "--propagation", "private")
#: Process 1. $1: the host's name, $2: an empty directory, $3: an identity of this boot, the rest: directories that all
#: machines see. The disk is a copy on write of this one's, in memory. It reaps orphans and ends when its input does.
_FIRST_PROCESS = r"""set -e
read -r pid _ </proc/self/stat
hostname "$1"; base=$2; boot=$3; shift 3
other_mounts=$(while read -r _ _ _ _ at _; do case $at in
  /|/proc|/proc/*|/sys|/sys/*|/dev|/dev/*|/run|/run/*) ;;
  *) echo "$at" ;;
esac; done </proc/self/mountinfo)
mount -t tmpfs tmpfs "$base"
mkdir "$base/upper" "$base/work" "$base/root"
root=$base/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
if [ -d /sys/fs/cgroup ]; then mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"; fi
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs tmpfs "$root/run"
for at in $other_mounts; do mount --bind "$at" "$root$at"; done
for at in "$@"; do mkdir -p "$root$at"; mount --bind "$at" "$root$at"; done
echo "$boot" >"$root/run/boot_id"
mount --bind "$root/run/boot_id" "$root/proc/sys/kernel/random/boot_id"
cd "$root"; mkdir .outside; pivot_root . .outside; umount -l /.outside; rmdir /.outside
echo "$pid"
while read -r _; do :; done
"""


class MachineError(RuntimeError):
    """A stand-in machine, or something on it, did not do what it was asked for."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What went over an interface since the machine was made, as the kernel counts it: with headers."""

    received_bytes: int
    received_packets: int
    sent_bytes: int
    sent_packets: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.received_bytes - earlier.received_bytes,
            self.received_packets - earlier.received_packets,
            self.sent_bytes - earlier.sent_bytes,
            self.sent_packets - earlier.sent_packets,
        )


class HostProcess:
    """A process on a stand-in machine. Its output goes to unlinked files, so it can never block on a full pipe."""

    def __init__(
        self, arguments: Sequence[str], command: Sequence[str], environment: Mapping[str, str], *, has_input: bool
    ) -> None:
        self.command = tuple(command)
        self._outputs = (tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115  close() closes them
        self._helper = subprocess.Popen(
            [*arguments, *command],
            env=dict(environment),
            stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
            stdout=self._outputs[0],
            stderr=self._outputs[1],
            start_new_session=True,
        )
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """Its number outside of the machine, for signals.

        Raises:
            MachineError: it has ended.
        """
        if self._pid is None:
            self._pid = _only_child(self._helper)
        return self._pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, minus the signal's number if it was killed; None while it runs."""
        return self._helper.poll()

    def tell(self, data: bytes) -> None:
        """Writes to its standard input, which stays open."""
        assert self._helper.stdin is not None
        self._helper.stdin.write(data)
        self._helper.stdin.flush()

    def end_input(self) -> None:
        """Closes its standard input."""
        assert self._helper.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._helper.stdin.close()

    def signal(self, number: int) -> None:
        """Sends it a signal. One that has ended gets none."""
        with contextlib.suppress(ProcessLookupError, MachineError):
            os.kill(self.pid, number)
            if number in {signal.SIGCONT, signal.SIGKILL}:
                self.release()

    def release(self) -> None:
        """Lets nsenter, which stops when what it started is stopped, see the end of that."""
        self._helper.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Sends it SIGKILL."""
        self.signal(signal.SIGKILL)

    def wait(self, timeout: float = 60.0) -> int:
        """Waits for its end; the exit code, minus the signal's number if it was killed.

        Raises:
            MachineError: it has not ended in time.
        """
        try:
            return self._helper.wait(timeout)
        except subprocess.TimeoutExpired:
            out, err = self.output()
            what = f"{' '.join(self.command)} has not ended within {timeout:g} s"
            raise MachineError(f"{what}\nstdout: {out[-2000:]}\nstderr: {err[-4000:]}") from None

    def output(self) -> tuple[str, str]:
        """What it has written to stdout and stderr until now."""
        out, err = self._outputs
        return _read(out.fileno()), _read(err.fileno())

    def close(self) -> None:
        """Ends it if it runs; afterwards there is no output to be had."""
        self.kill()
        if self._helper.stdin is not None:
            self.end_input()
        try:
            self._helper.wait(5)
        except subprocess.TimeoutExpired:
            self._helper.kill()
            self._helper.wait()
        for file in self._outputs:
            file.close()


class Machine:
    """The namespaces of one machine, and processes in them.

    Args:
        name: its host name.
        directory: an empty directory of its own.
        shared: directories that it sees as they are, and may write to.
        up_seconds: how much longer than this one it has been running, by its clocks (CLOCK_MONOTONIC, CLOCK_BOOTTIME).

    Raises:
        MachineError: it could not be made; with what was said.
    """

    def __init__(self, name: str, directory: Path, shared: Sequence[Path] = (), up_seconds: int = 0) -> None:
        self.name = name
        self._processes: list[HostProcess] = []
        command = ["bash", "-c", _FIRST_PROCESS, "machine", name, str(directory), str(uuid.uuid4()), *map(str, shared)]
        clocks = (f"--monotonic={up_seconds}", f"--boottime={up_seconds}")
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, *clocks, "--fork", "--kill-child", *command],
            env=environment_of_machines(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        text = self._holder.stdout.readline()
        #: Number of its first process, seen from outside; 0 where there was none.
        self.pid = int(text) if text.strip().isdigit() else 0
        if not self.pid:
            said = self._holder.stderr.read().decode(errors="replace").strip()
            self.close()
            raise MachineError(f"machine {name} could not be made: {said}")
        self._process_namespace = os.readlink(f"/proc/{self.pid}/ns/pid")

    @property
    def root(self) -> Path:
        """Its file system, seen from outside."""
        return Path(f"/proc/{self.pid}/root")

    def entry(self, cwd: str | Path = "/") -> tuple[str, ...]:
        """The beginning of a command; the rest is run on the machine, and ends with whoever runs the whole."""
        namespaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--time")
        enter = ("nsenter", f"--target={self.pid}", *namespaces, "env", f"--chdir={cwd}")
        return ("setpriv", "--pdeathsig", "KILL", *enter)

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "/",
        has_input: bool = False,
    ) -> HostProcess:
        """Starts a process on it.

        Args:
            command: the program, looked for on the machine, and its arguments.
            env: variables, on top of this process's environment less what a launcher put there.
            cwd: its directory.
            has_input: :meth:`HostProcess.tell` may be used. Otherwise it reads nothing.
        """
        environment = {**environment_of_machines(), **(env or {})}
        process = HostProcess(self.entry(cwd), command, environment, has_input=has_input)
        self._processes.append(process)
        return process

    def processes(self) -> dict[int, str]:
        """What runs on it besides its first process: numbers outside, and command lines."""
        found: dict[int, str] = {}
        if self._holder.poll() is not None:  # another namespace may have got its number since
            return found
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.pid:
                with contextlib.suppress(OSError):
                    if os.readlink(entry / "ns/pid") == self._process_namespace:
                        words = (entry / "cmdline").read_bytes().split(b"\0")
                        found[int(entry.name)] = b" ".join(words).decode(errors="replace").strip()
        return found

    def counters(self, interface: str) -> Counters:
        """What went over one of its interfaces."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                fields = [int(number) for number in numbers.split()]
                return Counters(fields[0], fields[1], fields[8], fields[9])
        raise MachineError(f"machine {self.name} has no interface {interface}")

    @property
    def num_retransmissions(self) -> int:
        """How many TCP segments it has sent again."""
        lines = Path(f"/proc/{self.pid}/net/snmp").read_text().splitlines()
        names, numbers = (line.split() for line in lines if line.startswith("Tcp:"))
        return int(numbers[names.index("RetransSegs")])

    def listens(self, port: int) -> bool:
        """Whether some process on it listens on a TCP port."""
        for family in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.pid}/net/{family}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    return True
        return False

    def kill(self) -> None:
        """Ends everything on it at once, and waits for that. What its processes printed can still be read."""
        if self.pid and self._holder.poll() is None:
            for process in self._processes:
                process.release()
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait(30)  # the kernel lets a first process end after all others

    def close(self) -> None:
        """Ends everything on it, and forgets what its processes printed."""
        with contextlib.ExitStack() as stack:
            for stream in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
                assert stream is not None
                stack.callback(stream.close)
            for process in self._processes:
                stack.callback(process.close)
            stack.callback(self.kill)


def run_in_network(pid: int, *command: str) -> str:
    """Runs a command, of this machine's disk, in the network of another process.

    Returns:
        What it printed.

    Raises:
        MachineError: it failed.
    """
    done = subprocess.run(
        ["nsenter", f"--target={pid}", "--net", *command],
        env=environment_of_machines(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    if done.returncode:
        raise MachineError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def environment_of_machines() -> dict[str, str]:
    """This process's environment without launchers' variables; administrators' commands can be found."""
    environment = clean_environment()
    return {**environment, "PATH": f"{environment.get('PATH', os.defpath)}:{ADMINISTRATORS_PATH}"}


def _only_child(helper: subprocess.Popen[bytes]) -> int:
    until = time.monotonic() + 10.0
    children = Path(f"/proc/{helper.pid}/task/{helper.pid}/children")
    while helper.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError):
            if numbers := children.read_text().split():
                return int(numbers[0])
        time.sleep(0.001)
    raise MachineError(f"{helper.args!r} has ended")


def _read(descriptor: int) -> str:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
