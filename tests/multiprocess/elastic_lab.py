"""A small elastic job of real processes, without collectives: members step in lockstep through shared memory.

One process forks all others (`python -m tests.multiprocess.elastic_lab`), so that one more takes milliseconds. Each
tells by a pipe what it does; the test reads that, and kills.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.membership.elastic.directory import meet_first_view
from reigen.cluster.membership.elastic.driver import ViewDriver
from reigen.cluster.membership.elastic.node import ElasticNode
from reigen.cluster.membership.elastic.witness import make_witness
from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.cluster.membership.views.events import Evidence, MembersLate, Verdict
from reigen.cluster.membership.views.member import ViewTimeouts
from reigen.cluster.membership.views.messages import HeldSums, StepProgress
from reigen.cluster.membership.views.record import MemberId, SamplePosition, View

SECRET = b"e" * 32
MAX_SLOTS = 16
PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.0005
_CELL = 8


class Cells:
    """Steps to which members have contributed, by slot: (incarnation, epoch, step) in one word."""

    def __init__(self, fd: int) -> None:
        self._words = memoryview(mmap.mmap(fd, MAX_SLOTS * _CELL)).cast("Q")

    def put(self, me: MemberId, epoch: int, step: int) -> None:
        self._words[me.slot] = (me.incarnation << 48) | (epoch << 32) | step

    def get(self, slot: int) -> tuple[int, int, int]:
        word = self._words[slot]
        return word >> 48, (word >> 32) & 0xFFFF, word & 0xFFFFFFFF

    def has(self, member: MemberId, epoch: int, step: int) -> bool:
        incarnation, its_epoch, its_step = self.get(member.slot)
        return (incarnation, its_epoch) == (member.incarnation, epoch) and its_step >= step


class LabPlane:
    """Plane of one process: counts steps."""

    def __init__(self, me: MemberId, options: dict[str, Any], cells: Cells, log: Callable[..., None]) -> None:
        self.me, self.cells, self.log = me, cells, log
        self.rng = random.Random(me.slot * 1000 + me.incarnation)
        self.slowest = options.get("slowest", 0.005)
        self.failing_builds = options.get("failing", {}).get(str(me.slot), 0)
        self.build_seconds = options.get("build_seconds", 0.0)
        self.revoke_seconds = options.get("revoke_seconds", {}).get(str(me.slot), 0.0)
        self.stops_in = options.get("stops_in", {}).get(str(me.slot))
        self.driver: ViewDriver | None = None
        self.changed = threading.Condition()
        self.view: View | None = None
        self.applied = 0
        self.has_state = not options.get("candidate")

    def revoke(self, epoch: int, done: Callable[[StepProgress], None]) -> None:
        with self.changed:
            self.view = None
            step = self.applied if self.has_state else 0
        self.log("revoke", epoch, step)
        progress = StepProgress(step, SamplePosition(0, step), SamplePosition(0, step + 1), HeldSums(epoch))
        threading.Timer(self.revoke_seconds, done, (progress,)).start()  # an update has begun

    def _begin(self, what: str, view: View, done: Callable[[], None]) -> None:
        def work() -> None:
            time.sleep(self.rng.random() * self.slowest)  # building takes its time
            if what == "build" and view.epoch > 1:
                time.sleep(self.build_seconds)
            if what == "build" and view.epoch == self.stops_in:
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread goes no further
            if what == "build" and self.failing_builds:
                self.failing_builds -= 1
                assert self.driver is not None
                self.driver.request_change("its build failed", view.epoch)
                return
            done()

        self.log(what, view.epoch)
        threading.Thread(target=work, daemon=True).start()

    def build(self, view: View, done: Callable[[], None]) -> None:
        self._begin("build", view, done)

    def roll(self, view: View, done: Callable[[], None]) -> None:
        assert not self.has_state or self.applied <= view.base.target, (self.applied, view)
        self.applied, self.has_state = view.base.target, True
        if self.driver is not None and (note := self.driver.note) is not None and note.epoch == view.epoch:
            self.log("note", view.epoch, note.outcome.value)
        self._begin("roll", view, done)

    def run(self, view: View) -> None:
        assert self.driver is not None
        members = [list(member) for member in view.members]
        if view.witness is not None:
            self.log("witness", view.epoch, view.witness.incarnation)
        self.log("run", view.epoch, members, view.base.target, self.driver.cause.text, self.driver.is_planned)
        with self.changed:
            self.view = view
            self.changed.notify_all()

    def end(self, exit_code: int, reason: str) -> None:
        self.log("end", exit_code, reason)
        os._exit(exit_code)

    def train(self, last: int) -> None:
        """Run steps until the last one."""
        assert self.driver is not None
        while self.applied < last:
            with self.changed:
                self.changed.wait_for(lambda: self.view is not None)
                view, step = self.view, self.applied + 1
                assert view is not None
                self.cells.put(self.me, view.epoch, step)
            while self.view is view and not all(self.cells.has(each, view.epoch, step) for each in view.members):
                time.sleep(_POLL_SECONDS)
            with self.changed:
                if self.view is not view:
                    continue
                self.applied = step
            if self.driver.step_applied(step, view.epoch):
                with self.changed:
                    if self.view is view:
                        self.view = None


def run_member(options: dict[str, Any]) -> None:
    """Be a member, or want to be."""
    me = MemberId(options["slot"], options["incarnation"])

    def log(*what: Any) -> None:
        os.write(options["log"], json.dumps([time.monotonic(), *me, *what]).encode() + b"\n")

    plane = LabPlane(me, options, Cells(options["cells"]), log)
    secret = bytes.fromhex(options["secret"])
    rendezvous = RendezvousClient(options["rendezvous"], SECRET, me.slot, 10.0)
    witness = make_witness(
        options.get("witness", ""), secret, lambda: RendezvousClient(options["rendezvous"], SECRET, me.slot, 10.0)
    )
    node = ElasticNode(
        me, options["host"], "127.0.0.1", secret, options["voter"], peer_timeout_seconds=5.0, witness=witness
    )
    timeouts = ViewTimeouts(**options.get("timeouts", {}))
    driver = plane.driver = ViewDriver(node, plane, rendezvous, timeouts)
    if options.get("candidate"):
        driver.wait_for_view()
    else:
        sizes = tuple(options["sizes"])
        driver.begin(meet_first_view(node, rendezvous, me.slot, options["size"], sizes, 20.0))
    threading.Thread(target=obey, args=(options["orders"], driver, log), daemon=True).start()
    plane.train(options.get("finishing", {}).get(str(me.slot), options.get("last", 1 << 31)))
    driver.finish()
    log("finished", plane.applied)
    driver.close()
    rendezvous.close()
    log("closed", threading.active_count())
    os._exit(0)


def obey(fd: int, driver: ViewDriver, log: Callable[..., None]) -> None:
    """Do what the test says."""
    with os.fdopen(fd) as orders:
        for line in orders:
            match json.loads(line):
                case ["leave"]:
                    driver.leave()
                case ["stuck", slot, incarnation]:
                    driver.report(Evidence(MemberId(slot, incarnation), Verdict.STUCK, "did not come"))
                case ["late", slot, incarnation]:
                    assert driver.view is not None
                    driver.report(MembersLate(driver.view.epoch, (MemberId(slot, incarnation),)))
                case ["change", reason]:
                    driver.request_change(reason)
                case ["count"]:
                    log("count", len([*Path("/proc/self/fd").iterdir()]))
                case ["ask"]:
                    log("state", driver.state.value, sorted(map(list, driver.finished)))


def fork_processes() -> None:
    """Fork what is asked for, and tell how they end."""
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wakeup = os.eventfd(0)
    signal.signal(signal.SIGCHLD, lambda *_: os.eventfd_write(wakeup, 1))
    while True:
        ready, _, _ = select.select([0, wakeup], [], [])
        if wakeup in ready:
            os.eventfd_read(wakeup)
            tell_exits()
        if 0 in ready:
            line = read_line()
            if not line:
                return
            options = json.loads(line)
            reading, writing = os.pipe()
            pid = os.fork()
            if not pid:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(writing)
                os.close(wakeup)
                start_member({**options, "orders": reading})
            os.close(reading)
            print(json.dumps(["started", pid, os.getpid(), writing]), flush=True)


def read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def start_member(options: dict[str, Any]) -> None:
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        run_member(options)
    except Exception:  # noqa: BLE001  of a process that ends
        traceback.print_exc()
    finally:
        os._exit(3)


def tell_exits() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        print(json.dumps(["ended", pid, os.waitstatus_to_exitcode(status)]), flush=True)


@dataclass
class LabProcess:
    """A process of the job, as the test sees it."""

    slot: int
    incarnation: int
    pid: int
    orders: int
    said: list[list[Any]] = field(default_factory=list)
    exit_code: int | None = None

    @property
    def id(self) -> list[int]:
        return [self.slot, self.incarnation]

    def runs(self) -> list[list[Any]]:
        """[time, epoch, members, target, reason, is_planned] of each view that it has run."""
        return [[line[0], *line[4:]] for line in self.said if line[3] == "run"]

    def told(self, what: str) -> list[list[Any]]:
        return [line[4:] for line in self.said if line[3] == what]

    def order(self, *words: Any) -> None:
        os.write(self.orders, json.dumps(words).encode() + b"\n")

    def signal(self, number: int) -> float:
        """Send a signal; returns when."""
        now = time.monotonic()
        os.kill(self.pid, number)
        return now


class Lab:
    """The job.

    Args:
        hosts: name of each slot's host.
        sizes: smallest and largest.
        options: of all processes.
    """

    def __init__(self, hosts: list[str], sizes: tuple[int, int] = (1, MAX_SLOTS), **options: Any) -> None:
        #: keys that were put at the service
        self.told_service: list[str] = []
        self.service = ControlService(SECRET, on_put=lambda key, _: self.told_service.append(key))
        self.service.start()
        self.cells_fd = os.memfd_create("cells")
        os.ftruncate(self.cells_fd, MAX_SLOTS * _CELL)
        self.voters: dict[str, int] = {}
        for host in (*hosts, "a", "spare host"):
            if host not in self.voters:
                self.voters[host] = os.memfd_create("voter")
                os.ftruncate(self.voters[host], 128 << 10)
        self._log, log = os.pipe()
        passed = [log, self.cells_fd, *self.voters.values()]
        command = [sys.executable, "-m", "tests.multiprocess.elastic_lab"]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=passed)
        self._rest = {0: b"", 1: b""}
        self.options = {"log": log, "cells": self.cells_fd, "rendezvous": self.service.address, **options}
        self.options |= {"sizes": sizes, "size": len(hosts), "secret": SECRET.hex()}
        self.cells = Cells(self.cells_fd)
        self.processes: dict[tuple[int, int], LabProcess] = {}
        self._started: list[list[Any]] = []
        self._write_end = log
        for slot, host in enumerate(hosts):
            self.start(slot, host)

    def start(self, slot: int, host: str, incarnation: int = 0, **options: Any) -> LabProcess:
        """Start a process."""
        changes = {"slot": slot, "incarnation": incarnation, "host": host, "voter": self.voters[host]}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps({**self.options, **changes, **options}).encode() + b"\n")
        self._server.stdin.flush()
        self.until(lambda: bool(self._started), "a process is started")
        _, pid, server, writing = self._started.pop()
        orders = os.open(f"/proc/{server}/fd/{writing}", os.O_WRONLY)
        process = self.processes[slot, incarnation] = LabProcess(slot, incarnation, pid, orders)
        return process

    def candidate(self, slot: int, host: str = "a", incarnation: int = 1, **options: Any) -> LabProcess:
        """Start a process that wants to become a member."""
        return self.start(slot, host, incarnation, candidate=True, **options)

    def until(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Read what processes say until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"not within {seconds:g} s: {what}\n{self.story()}"
            self._take(min(left, 0.2))

    def _take(self, seconds: float) -> None:
        assert self._server.stdout is not None
        out = self._server.stdout.fileno()
        ready, _, _ = select.select([self._log, out], [], [], seconds)
        for number, fd in enumerate((self._log, out)):
            if fd in ready:
                data = os.read(fd, 1 << 16)
                assert data, f"the process that forks has ended\n{self.story()}"
                *lines, self._rest[number] = (self._rest[number] + data).split(b"\n")
                for line in lines:
                    self._hear(json.loads(line))

    def _hear(self, line: list[Any]) -> None:
        if line[0] == "started":
            self._started.append(line)
        elif line[0] == "ended":
            process = next(each for each in self.processes.values() if each.pid == line[1])
            process.exit_code = line[2]
        elif (line[1], line[2]) in self.processes:
            self.processes[line[1], line[2]].said.append(line)

    def story(self) -> str:
        """All that was said, in order, but for each step."""
        lines = sorted(line for process in self.processes.values() for line in process.said)
        ends = [f"{each.id} ended: {each.exit_code}" for each in self.processes.values() if each.exit_code is not None]
        return "\n".join([*map(str, lines[-150:]), *ends])

    def alive(self) -> list[LabProcess]:
        return [each for each in self.processes.values() if each.exit_code is None]

    def run_view(
        self, members: list[LabProcess], after: int = 0, seconds: float = PATIENCE_SECONDS
    ) -> tuple[int, float]:
        """Wait until these members, and no others, run a view behind an epoch; returns it, and when the last began."""
        wanted = sorted(each.id for each in members)

        def newest() -> set[int]:
            epochs = [
                {run[1] for run in each.runs() if sorted(run[2]) == wanted and run[1] > after} for each in members
            ]
            return set.intersection(*epochs)

        self.until(lambda: bool(newest()), f"{wanted} run a view behind {after}", seconds)
        epoch = max(newest())
        return epoch, max(run[0] for each in members for run in each.runs() if run[1] == epoch)

    def make_steps(self, members: list[LabProcess], count: int = 3) -> None:
        """Wait until members have made so many steps more."""
        goal = max(self.cells.get(each.slot)[2] for each in members) + count
        self.until(lambda: all(self.cells.get(each.slot)[2] >= goal for each in members), f"{count} steps are made")

    def exit_code(self, process: LabProcess) -> int:
        self.until(lambda: process.exit_code is not None, f"{process.id} ends")
        assert process.exit_code is not None
        return process.exit_code

    def close(self) -> None:
        """End everything."""
        for process in self.alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        try:
            self.until(lambda: not self.alive(), "all have ended")
        finally:
            self._server.kill()
            self._server.communicate()
            self.service.close()
            for fd in (self._log, self._write_end, self.cells_fd, *self.voters.values()):
                os.close(fd)
            for process in self.processes.values():
                os.close(process.orders)


@contextmanager
def elastic_lab(hosts: list[str], sizes: tuple[int, int] = (1, MAX_SLOTS), **options: Any) -> Iterator[Lab]:
    """Run a job for a test."""
    lab = Lab(hosts, sizes, **options)
    try:
        yield lab
    finally:
        lab.close()


if __name__ == "__main__":
    fork_processes()
