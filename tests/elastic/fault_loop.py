"""Faults of all roles of an elastic job, at random moments, for as long as one likes; and what must be true after each.

What is looked at: members go on in time; no sample is lost or taken twice, by a ledger that is kept outside of the job
(`fault_ledger`); nothing is left of what has ended; nothing grows in those that stay.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tests.elastic.fault_ledger import Ledger, ProcessLines

#: Until members that can go on must have made a step together.
GO_ON_SECONDS = 45.0
#: The same where a member is stopped for ever: in a collective, whose deadline passes, or while a view is being built,
#: rank 0 at worst (three times `ViewTimeouts.stuck`).
STOPPED_SECONDS = 120.0
#: Of collectives: who is stopped for longer is left out.
DEADLINE_SECONDS = 12.0


class FaultError(AssertionError):
    """What must be true after a fault is not."""


@dataclass(frozen=True)
class JobProcess:
    """A process of the job."""

    pid: int
    command: str
    #: ``slot.incarnation`` of a rank
    rank_id: str = ""


@dataclass
class Held:
    """What a process holds: after a first look, and at the latest one."""

    num_views: int
    first: dict[str, int]
    last: dict[str, int]
    files: str = ""


def resources_of(pid: int) -> dict[str, int]:
    """Count what a process holds."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status["Threads"]),
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
        "kB": int(status["VmRSS"].split()[0]),
    }


def start_time(pid: int) -> int:
    """When a process began, in the kernel's ticks: no other one of its number has the same."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def describe_files(pid: int) -> str:
    """Tell of which kinds a process's open files are, for an error."""
    kinds = Counter[str]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            kinds[re.sub(r":\[\d+\]$|\d+", "", entry.readlink().as_posix())] += 1
    return str(dict(kinds.most_common()))


def describe_process(pid: int, command: str) -> JobProcess:
    """Describe a process; a rank by its environment."""
    variables: dict[str, str] = {}
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = entry.decode(errors="replace").partition("=")
            variables[name] = value
    is_rank = "fault_program" in command and "reigen run" not in command and "REIGEN_SLOT" in variables
    rank_id = f"{variables['REIGEN_SLOT']}.{variables['REIGEN_INCARNATION']}" if is_rank else ""
    return JobProcess(pid, command, rank_id)


class FaultyJob(ABC):
    """A job, and what can go wrong with it.

    Args:
        directory: of the ledger.

    Attributes:
        faults: names of faults, with how often each is drawn.
    """

    faults: ClassVar[dict[str, float]]
    #: ranks of the whole job
    size: ClassVar[int]

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ledger = Ledger(directory)

    @abstractmethod
    def processes(self) -> list[JobProcess]:
        """All processes of the job, on all hosts."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the command that the user has started is over."""

    @abstractmethod
    def errors(self) -> str:
        """What the launcher has said."""

    def disturb(self, kind: str, chances: random.Random) -> Callable[[], None]:
        """Disturb the network between its hosts; returns what ends that, and may be called twice."""
        raise NotImplementedError(kind)

    def ranks(self) -> dict[str, JobProcess]:
        """Processes that are ranks, or will be, by their ids."""
        return {each.rank_id: each for each in self.processes() if each.rank_id}

    def members(self) -> dict[str, tuple[JobProcess, ProcessLines]]:
        """Ranks that have made a step."""
        ranks = self.ranks()
        self.ledger.read(ranks)
        lines = {each.id: each for each in self.ledger.processes.values() if each.last is not None}
        return {name: (process, lines[name]) for name, process in ranks.items() if name in lines}

    def supervisor_and_watchdog(self) -> tuple[int, int]:
        """The two processes of the launcher."""
        (supervisor,) = self._watched("reigen run")
        return supervisor, _parent(supervisor)

    def agents(self) -> list[int]:
        """Agents of other hosts; of an agent and its watchdog the agent."""
        return self._watched("reigen.launch.agent")

    def _watched(self, command: str) -> list[int]:
        """Children of the watchdogs. A child of theirs that is just being made still has their command."""
        parents = {each.pid: _parent(each.pid) for each in self.processes() if command in each.command}
        watchdogs = {pid for pid, parent in parents.items() if parent not in parents}
        return [pid for pid, parent in parents.items() if parent in watchdogs]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        pid = _parent(pid)
    return pid == ancestor


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait for a condition; returns whether it came true."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        if time.monotonic() > end:
            return False
        pause.wait(0.01)
    return True


@dataclass
class FaultLoop:
    """Faults, one after the other.

    Attributes:
        start: starts a job, and a new one where one has ended because of its supervisor.
        chances: decides.
        gap_seconds: mean of the time between two faults, which is exponential.
        seconds: by fault, from it until all that live have made a step in another view.
        ends: jobs that ended, as they had to.
    """

    start: Callable[[], FaultyJob]
    chances: random.Random
    gap_seconds: float
    log: Callable[[str], None] = print
    job: FaultyJob = field(init=False)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    num_anew: int = 0
    ends: int = 0
    held: dict[tuple[int, int], Held] = field(default_factory=dict)
    _views: set[str] = field(default_factory=set)
    num_views: int = 0

    def run(self, num_faults: int, seconds: float = float("inf")) -> None:
        """Run so many faults, or for so long; the job ends at last, in good order."""
        begin = time.monotonic()
        self.job = self.start()
        self._wait_for_members(2)
        for number in range(num_faults):
            if time.monotonic() - begin > seconds:
                break
            threading.Event().wait(min(self.chances.expovariate(1 / self.gap_seconds), 10 * self.gap_seconds))
            kinds = self.job.faults
            kind = self.chances.choices([*kinds], [*kinds.values()])[0]
            self._one(number, kind)
        self.finish()

    def _one(self, number: int, kind: str) -> None:
        try:
            getattr(self, "_" + kind.replace(" ", "_").replace(".", "_"))()
            self.counts[kind] += 1
            self.job.ledger.verify()
            self._look()
        except (AssertionError, OSError) as error:
            said = self.job.errors()[-3000:]
            last = {name: (p.pid, lines.last) for name, (p, lines) in self.job.members().items()}
            raise FaultError(f"fault {number}, {kind}: {error}\nmembers: {last}\nlauncher: {said}") from error
        if number % 25 == 24:
            self.log(f"{number + 1} faults: {self.summary()}")

    def summary(self) -> str:
        """Describe what has happened."""
        parts = [f"{self.num_views} views, {self.num_steps + self.job.ledger.num_steps} steps verified"]
        parts += [f"{self.num_anew + self.job.ledger.num_anew} made anew, {self.ends} jobs ended by their supervisors"]
        for kind, found in sorted(self.seconds.items()):
            ordered = sorted(found)
            p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
            parts.append(
                f"{kind} ({len(found)}): p50 {statistics.median(ordered):.2f} p99 {p99:.2f} max {ordered[-1]:.2f} s"
            )
        rest = {kind: count for kind, count in self.counts.items() if kind not in self.seconds}
        return "; ".join([*parts, *(f"{kind}: {count}" for kind, count in sorted(rest.items()))])

    def finish(self) -> None:
        """End the job in good order, and verify all of its ledger."""
        (self.job.directory / "enough").touch()
        if not until(self.job.has_ended, GO_ON_SECONDS):
            raise FaultError(f"the job does not end: {self.job.processes()}\n{self.job.errors()[-3000:]}")
        self._close_job(is_over=True)

    def _close_job(self, *, is_over: bool) -> None:
        ledger = self.job.ledger
        ledger.verify(is_over=is_over)
        self.num_steps, self.num_anew = self.num_steps + ledger.num_steps, self.num_anew + ledger.num_anew
        ledger.num_steps = ledger.num_anew = 0
        if not until(lambda: not self.job.processes(), 15):
            raise FaultError(f"left over: {self.job.processes()}")
        self._check_held()

    # -- what must be true --------------------------------------------------------------------------------------------

    def _wait_for_members(self, size: int) -> None:
        if not until(lambda: len(self.job.members()) >= size, GO_ON_SECONDS):
            raise FaultError(f"the job does not begin: {self.job.errors()[-3000:]}")

    def _goes_on(self, kind: str, at: float, gone: frozenset[int] = frozenset(), most: float = GO_ON_SECONDS) -> None:
        """Wait until all members that live are together in a view, and have made a step in it since."""

        def is_together() -> bool:
            members = {name: lines for name, (process, lines) in self.job.members().items() if process.pid not in gone}
            steps = [lines.last for lines in members.values() if lines.last is not None]
            if self.job.has_ended():
                raise FaultError("the job has ended")
            if not steps or any(step.at <= at for step in steps):
                return False
            self._count_views(step.view for step in steps)
            return len({step.view for step in steps}) == 1 and {step.rank for step in steps} == set(
                range(steps[0].size)
            )

        if not until(is_together, most):
            raise FaultError(f"members do not go on in {most:g} s")
        self.seconds[kind].append(time.time() - at)

    def _count_views(self, views: Iterator[str]) -> None:
        new = set(views) - self._views
        self.num_views += len(new)
        self._views |= new

    def _look(self) -> None:
        """Take note of what processes hold that stay, when all are there: with fewer they hold less."""
        watched = [process.pid for process, _ in self.job.members().values()]
        if len(watched) != self.job.size:
            return
        with suppress(ValueError):
            watched += self.job.supervisor_and_watchdog()
        for pid in watched:
            with suppress(OSError, KeyError, ValueError):
                found = resources_of(pid)
                process = pid, start_time(pid)  # in an hour numbers come again
                held = self.held.get(process)
                if held is None or self.num_views < held.num_views + 8:  # pools fill, code is loaded
                    self.held[process] = Held(self.num_views if held is None else held.num_views, found, found)
                else:
                    held.last, held.files = found, describe_files(pid)

    def _check_held(self) -> None:
        """Check that nothing has grown with the number of views."""
        for (pid, _), held in self.held.items():
            num = self.num_views - held.num_views
            for what, allowed in (("descriptors", 6), ("threads", 4), ("mappings", 40), ("kB", 8_000 + 20 * num)):
                if held.last[what] > held.first[what] + allowed:
                    grown = f"{held.first} -> {held.last}"
                    raise FaultError(f"process {pid} has grown in {num} views: {grown}; open files: {held.files}")
        self.held.clear()

    # -- faults of one host -------------------------------------------------------------------------------------------

    def _pick(self, num: int) -> list[JobProcess]:
        """Pick members; at least one is left."""
        members = [process for process, _ in self.job.members().values()]
        if len(members) <= num:
            self._wait_for_members(num + 1)
            members = [process for process, _ in self.job.members().values()]
        return self.chances.sample(members, num)

    def _kill(self, kind: str, victims: list[JobProcess]) -> None:
        at = time.time()
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGKILL)
        until(lambda: not {victim.pid for victim in victims} & {each.pid for each in self.job.processes()}, 10)
        self._goes_on(kind, at)

    def _kill_rank(self) -> None:
        self._kill("kill rank", self._pick(1))

    def _kill_rank_0(self) -> None:
        members = self.job.members().values()
        if len(members) > 1:
            first = [process for process, lines in members if lines.last is not None and lines.last.rank == 0]
            self._kill("kill rank 0", first[:1])

    def _kill_several(self) -> None:
        num = len(self.job.members())
        self._kill("kill several", self._pick(self.chances.randint(1, max(1, num - 1))))

    def _stop(self, kind: str, pid: int, seconds: float) -> None:
        """Stop a process for some time: nothing may come of it."""
        before = set(self.job.members())
        os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(seconds)
        os.kill(pid, signal.SIGCONT)
        self._goes_on(kind, time.time())
        if before - set(self.job.members()):
            raise FaultError(f"{before - set(self.job.members())} have ended because of a stop of {seconds} s")

    def _stop_rank_0_5_s(self) -> None:
        self._stop("stop rank 0.5 s", self._pick(1)[0].pid, 0.5)

    def _stop_rank_5_s(self) -> None:
        self._stop("stop rank 5 s", self._pick(1)[0].pid, 5.0)

    def _stop_rank_for_ever(self) -> None:
        (victim,) = self._pick(1)
        at = time.time()
        os.kill(victim.pid, signal.SIGSTOP)
        self._goes_on("stop rank for ever", at, frozenset({victim.pid}), STOPPED_SECONDS)
        with suppress(ProcessLookupError):  # who is left out, and wakes, does no harm
            os.kill(victim.pid, signal.SIGCONT)
        if not until(lambda: victim.pid not in {each.pid for each in self.job.processes()}, 15):
            raise FaultError(f"{victim} was left out, and still runs")

    def _stop_supervisor_5_s(self) -> None:
        self._stop("stop supervisor 5 s", self.job.supervisor_and_watchdog()[0], 5.0)

    def _stop_watchdog_5_s(self) -> None:
        self._stop("stop watchdog 5 s", self.job.supervisor_and_watchdog()[1], 5.0)

    def _end_job(self, pid: int) -> None:
        """Kill a process whose end is the job's: nothing is left; then begin anew."""
        os.kill(pid, signal.SIGKILL)
        if not until(self.job.has_ended, 15):
            raise FaultError(f"the job goes on without process {pid}")
        self._close_job(is_over=False)
        self.ends += 1
        self.job = self.start()
        self._wait_for_members(2)

    def _kill_supervisor(self) -> None:
        self._end_job(self.job.supervisor_and_watchdog()[0])

    def _kill_watchdog(self) -> None:
        self._end_job(self.job.supervisor_and_watchdog()[1])

    # -- faults of other hosts ----------------------------------------------------------------------------------------

    def _kill_agent(self) -> None:
        members = [process.pid for process, _ in self.job.members().values()]
        agents = [each for each in self.job.agents() if not all(_descends(pid, each) for pid in members)]
        if agents:  # without the last member the job ends
            at = time.time()
            os.kill(self.chances.choice(agents), signal.SIGKILL)
            self._goes_on("kill agent", at)

    def _stop_agent_0_5_s(self) -> None:
        if agents := self.job.agents():
            self._stop("stop agent 0.5 s", self.chances.choice(agents), 0.5)

    def _separate_briefly(self, kind: str) -> None:
        """Disturb the network for a second: nothing may come of it."""
        before = set(self.job.members())
        restore = self.job.disturb(kind, self.chances)
        try:
            threading.Event().wait(1.0)
        finally:
            restore()
        self._goes_on(f"{kind} 1 s", time.time())
        if gone := before - set(self.job.members()):
            raise FaultError(f"{gone} have ended though the network was soon there again")

    def _separate_for_long(self, kind: str) -> None:
        """Disturb the network until one side goes on alone; then those must be gone, or back, that were cut off."""
        self._wait_for_members(self.job.size)  # so that some are on each side
        at = time.time()
        restore = self.job.disturb(kind, self.chances)
        try:
            if not until(lambda: self._some_go_on(at + 0.5), GO_ON_SECONDS):
                raise FaultError(f"nobody goes on in {GO_ON_SECONDS:g} s")
            self.seconds[kind].append(time.time() - at)
        finally:
            restore()
        self._goes_on(f"{kind}, heals", time.time())

    def _some_go_on(self, at: float) -> bool:
        """Whether all members of the latest view have made a step in it since."""
        members = [lines.last for _, lines in self.job.members().values() if lines.last is not None]
        latest = max(members, key=lambda step: step.at)
        ranks = {step.rank for step in members if step.view == latest.view and step.at > at}
        return ranks == set(range(latest.size))

    def _cut_host_1_s(self) -> None:
        self._separate_briefly("cut host")

    def _cut_host(self) -> None:
        self._separate_for_long("cut host")

    def _partition_1_s(self) -> None:
        self._separate_briefly("partition")

    def _partition(self) -> None:
        self._separate_for_long("partition")

    def _lose_packets(self) -> None:
        """30 % of packets: everything is slow, and nothing ends."""
        self._separate_briefly("lose packets")
