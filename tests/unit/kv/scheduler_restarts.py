"""An elastic job's scheduler that is killed at any moment, and its workers and servers, under random schedules.

`MembershipTable`, `RecordedJob` and `JobView` are the real ones; time, connections, the launcher and the record are
made up. A scheduler may die before it has recorded what has happened, behind some of it, and when some have been told.
Workers pass barriers until they are to stop, and leave; they die, and so do servers; others are started.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from reigen.cluster.membership.members import LossPolicy, parameter_server_job
from reigen.cluster.membership.messages import (
    MEMBER_CODEC,
    MEMBERSHIP_REPLY_CODEC,
    EnterBarrier,
    JobEnded,
    LeaveJob,
    MemberHeartbeat,
    MemberLeft,
    MemberLost,
    MemberMessage,
    MemberRefused,
    MemberReturned,
    MembershipNews,
    MembershipReply,
    RegisterMember,
    WorkerRoster,
)
from reigen.cluster.membership.recorded_job import RecordedEvent, RecordedJob
from reigen.cluster.membership.table import MembershipTable
from reigen.cluster.membership.view import JobView

MOST_STEPS = 30_000
BEAT_SECONDS, RECONNECT_SECONDS, LONGEST_TRAVEL_SECONDS = 2.0, 0.1, 0.3
JOB = 7


@dataclass(eq=False)
class Process:
    """A worker or a server."""

    view: JobView
    incarnation: int
    #: of a worker, the launcher's number for its place, and how often that was used before; of a server, its number
    slot: tuple[int, int]
    link: int = 0
    lives: bool = True
    was_killed: bool = False
    next: float = 0.0
    entry: tuple[str, int] | None = None
    has_given_up: bool = False
    #: incarnations of workers that it has heard to be gone
    gone: set[int] = field(default_factory=set)
    end: JobEnded | None = None

    @property
    def role(self) -> str:
        return self.view.registration().role

    @property
    def is_member(self) -> bool:
        return self.lives and self.view.is_assigned and self.view.failure is None


class Crash(Exception):
    """The scheduler is killed."""


class Schedule:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        num_slots = rng.randint(1, 4)
        self.spec = parameter_server_job(
            num_slots, rng.randint(1, 2), policy=LossPolicy.ELASTIC, servers_return=True, return_seconds=600,
            first_workers=rng.randint(1, num_slots),
        )  # fmt: skip
        self.haste, self.pace = rng.choice((0.0, 0.0, 0.2)), rng.choice((0.02, 0.05, 0.15))
        self.crashes, self.kills = rng.randint(1, 6), rng.choice((0, 1, 3))
        self.server_kills, self.cuts = rng.choice((0, 1, 2)), rng.choice((0, 0, 3))
        self.now, self.stop_at = 0.0, rng.uniform(2.0, 12.0)
        self.seen: Counter[str] = Counter()
        self.record: list[RecordedEvent] = []
        self.table: MembershipTable | None = None
        self.scheduler_due = 0.0
        self.slot_of: dict[int, tuple[int, int]] = {}
        self.processes: list[Process] = []
        self.up: dict[int, deque[tuple[float, bytes | None]]] = {}
        self.down: dict[int, deque[tuple[float, bytes | None]]] = {}
        self.owners: dict[int, Process] = {}
        #: (when, role, slot, attempt): to be started; and deaths that the launcher has still to tell
        self.births: list[tuple[float, str, int, int]] = []
        self.deaths: list[tuple[float, int, int]] = []
        self.ended: dict[int, int] = {}
        self.outcomes: dict[tuple[str, int], dict[Process, bool]] = {}
        for slot in range(self.spec.first_workers):
            self.births.append((rng.random(), "worker", slot, 0))
        for number in range(self.spec.counts["server"]):
            self.births.append((rng.random(), "server", number, 0))
        for slot in range(self.spec.first_workers, num_slots):
            self.births.append((rng.uniform(0.5, 10.0), "worker", slot, 0))

    # -- the scheduler

    def begin_scheduler(self) -> None:
        recorded = RecordedJob.replay(self.record)
        self.table = MembershipTable(self.spec, JOB, recorded=recorded, now=self.now)
        self.slot_of = {one.came.incarnation: one.slot for one in recorded.workers.values() if one.slot is not None}
        self.deaths += [(self.now + 0.01, slot, attempt) for slot, attempt in self.ended.items()]
        self.seen["scheduler"] += 1

    def crash(self) -> None:
        """It is killed; all connections end, and what was on its way is lost, or not."""
        self.crashes -= 1
        self.table, self.scheduler_due = None, self.now + self.rng.uniform(0.1, 0.6)
        self.deaths.clear()
        for line, process in self.owners.items():
            self.up[line].clear()
            kept = self.rng.randint(0, len(self.down[line]))
            self.down[line] = deque([*list(self.down[line])[:kept], (self.now, None)] if process.link == line else [])

    def carry(self, replies: Sequence[tuple[object, MembershipReply]]) -> None:
        """What the scheduler does with replies: it records, and tells."""
        table = self.table
        assert table is not None
        table.validate()
        events, table.announced = table.announced, []
        moment = self.rng.random() * (0.3 if events else 1.0) if self.crashes and (events or replies) else 1.0
        slots = [self.slot_of.get(each.incarnation) if isinstance(each, MemberReturned) else None for each in events]
        entries = [RecordedEvent(event, table.epoch, slot) for event, slot in zip(events, slots, strict=True)]
        if moment < self.pace / 2:
            entries = entries[: self.rng.randint(0, len(entries))]
            self.seen["cut record"] += bool(events) and len(entries) < len(events)
        self.record += entries
        if moment < self.pace / 2:
            raise Crash
        self.check_announced(events)
        told = len(replies) if moment >= self.pace else self.rng.randint(0, len(replies))
        for line, reply in replies[:told]:
            self.reply(int(str(line)), reply)
        if moment < self.pace:
            self.seen["some told"] += told < len(replies)
            raise Crash

    def reply(self, line: int, reply: MembershipReply) -> None:
        if line not in self.down:
            return
        self.down[line].append((self.now, MEMBERSHIP_REPLY_CODEC.encode(reply)))
        if isinstance(reply, MemberRefused):
            self.down[line].append((self.now, None))
            self.up[line].clear()

    def check_announced(self, events: Sequence[object]) -> None:
        living = {one.incarnation for one in self.processes if one.lives and one.view.failure is None}
        for event in events:
            if isinstance(event, MemberLost):
                assert event.incarnation not in living, f"{event}: it lives"
                self.seen["lost"] += 1
            if isinstance(event, JobEnded):
                assert event.exit_code == 0, event
                working = [one for one in self.processes if one.role == "worker" and one.is_member]
                assert all(one.view.has_left for one in working), "it ends while workers are there"

    # -- processes

    def start(self, role: str, slot: int, attempt: int) -> None:
        incarnation = 1 + len(self.processes)
        server = role == "server"
        me = RegisterMember(
            "server" if server else "worker", slot if server else -1, "h", incarnation, self.spec.counts,
            f"h:{incarnation}" if server else "", is_restart=attempt > 0, slot=None if server else (slot, attempt),
        )  # fmt: skip
        process = Process(JobView(me, is_loss_fatal=False), incarnation, (slot, attempt), next=self.now)
        self.processes.append(process)

    def connect(self, process: Process) -> None:
        line = process.link = len(self.owners) + 1
        self.up[line], self.down[line], self.owners[line] = deque(), deque(), process
        self.say(process, process.view.registration())

    def say(self, process: Process, message: MemberMessage) -> None:
        if process.link:
            self.up[process.link].append((self.now, MEMBER_CODEC.encode(message)))

    def hang_up(self, process: Process) -> None:
        if process.link:
            self.up[process.link].append((self.now, None))
            self.down[process.link].clear()
            process.link = 0

    def kill(self, process: Process) -> None:
        process.lives, process.was_killed = False, True
        self.hang_up(process)
        for told in self.outcomes.values():  # what it knew
            told.pop(process, None)
        slot, attempt = process.slot
        if process.role == "worker":
            self.ended[slot] = attempt
            if self.table is not None and self.rng.random() < 0.7:
                self.deaths.append((self.now + self.rng.random() * 0.2, slot, attempt))
        delay = 0.4 if process.role == "server" else self.rng.uniform(0.5, 3.0)
        self.births.append((self.now + delay, process.role, slot, attempt + 1))

    def read(self, process: Process, line: int, payload: bytes | None) -> None:
        if payload is None:
            if process.link == line:
                process.link, process.next = 0, self.now + RECONNECT_SECONDS
            return
        message = MEMBERSHIP_REPLY_CODEC.decode(payload)
        was_assigned = process.view.is_assigned
        for again in process.view.take(message):
            self.say(process, again)
        if isinstance(message, MembershipNews):
            for event in message.events:
                self.heard(process, event)
        if process.view.failure is not None:
            assert process.end is not None or not process.view.is_assigned or process.view.has_left, (
                f"{process.view.name}: {process.view.failure}"
            )
            process.lives = False
            self.hang_up(process)
            return
        if process.role == "worker" and process.view.is_assigned:
            if not was_assigned:
                others = [one.view.number for one in self.processes if one.is_member and one is not process
                          and one.role == "worker" and not one.view.has_left]  # fmt: skip
                assert process.view.number not in others, "two processes have one place"
            self.work(process)

    def heard(self, process: Process, event: object) -> None:
        if isinstance(event, JobEnded):
            process.end = event
        elif isinstance(event, MemberLost | MemberLeft) and event.role == "worker":
            process.gone.add(event.incarnation)
        elif isinstance(event, WorkerRoster):
            order = [each.event.incarnation for each in self.record
                     if isinstance(each.event, MemberReturned) and each.event.role == "worker"]  # fmt: skip
            assert sorted(event.incarnations, key=order.index) == list(event.incarnations), "not by age"

    def work(self, process: Process) -> None:
        """The program: barriers until it is time to stop."""
        view = process.view
        if view.has_left:
            if view.is_out:
                process.lives = False
                self.hang_up(process)
            return
        if not view.servers:
            return
        if process.entry is not None and (outcome := view.outcome(process.entry)) is not None:
            self.outcomes.setdefault(process.entry, {})[process] = outcome.is_broken
            if not outcome.is_broken:
                self.check_barrier(process, process.entry)
            view.forget(process.entry)
            process.entry, process.has_given_up = None, False
        if process.entry is not None:
            return
        if self.now >= self.stop_at:
            view.has_left = True
            for told in self.outcomes.values():
                told.pop(process, None)
            self.say(process, LeaveJob())
        else:
            process.entry = view.enter("b")
            self.say(process, EnterBarrier(*process.entry))

    def check_barrier(self, process: Process, entry: tuple[str, int]) -> None:
        self.seen["barrier"] += 1
        for other in self.processes:
            if other.role == "worker" and other.is_member and not other.view.has_left:
                assert other.view._entered[entry[0]] >= entry[1], (
                    f"worker {process.incarnation} passes {entry} without worker {other.incarnation}"
                )

    # -- the run

    def run(self) -> None:
        for _ in range(MOST_STEPS):
            try:
                if self.step():
                    break
            except Crash:
                self.crash()
        else:
            raise AssertionError("it hangs")
        self.check_end()

    def step(self) -> bool:
        if self.table is not None and self.crashes and self.rng.random() < self.pace / 20:
            raise Crash
        members = [one for one in self.processes if one.is_member and one.link]
        if self.rng.random() < 0.002 * (1 + 20 * self.pace):
            self.fault(members)
        lines = [(line, False) for line, some in self.up.items() if some and self.table is not None]
        lines += [(line, True) for line, some in self.down.items() if some]
        oldest = min(((self.down if down else self.up)[line][0][0] for line, down in lines), default=self.now)
        if lines and (self.rng.random() < 0.8 or self.now - oldest > LONGEST_TRAVEL_SECONDS):
            self.deliver(*self.rng.choice(lines))
        else:
            self.wait(self.rng.choice((0.01, 0.05)) if lines else 0.1)
        is_over = self.table is not None and self.table.stop is not None and not any(self.up.values())
        return is_over and not any(one.lives for one in self.processes if one.view.is_assigned)

    def fault(self, members: list[Process]) -> None:
        workers = [one for one in members if one.role == "worker" and not one.view.has_left]
        servers = [one for one in members if one.role == "server"]
        begun = self.table is not None and self.table._has_opened
        kind = self.rng.choice(("kill", "server", "cut", "both"))
        is_early = self.now < self.stop_at
        if kind in {"kill", "both"} and self.kills and workers and begun and is_early:
            self.kills -= 1
            self.kill(self.rng.choice(workers))
            self.seen["killed"] += 1
        if kind in {"server", "both"} and self.server_kills and servers and is_early:
            self.server_kills -= 1
            self.kill(self.rng.choice(servers))
            self.seen["server killed"] += 1
        if kind == "cut" and self.cuts and members:
            self.cuts -= 1
            line = self.rng.choice(members).link
            self.up[line].append((self.now, None))
            self.down[line].append((self.now, None))
        if kind == "both" and self.crashes and self.table is not None:
            raise Crash

    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.table is None and self.now >= self.scheduler_due:
            self.begin_scheduler()
        for birth in [birth for birth in self.births if birth[0] <= self.now]:
            self.births.remove(birth)
            self.start(*birth[1:])
        for process in self.processes:
            if process.lives and process.next <= self.now:
                process.next = self.now + (BEAT_SECONDS if self.table is not None else RECONNECT_SECONDS)
                if not process.link and self.table is not None:
                    self.connect(process)
                elif process.view.is_assigned:
                    self.say(process, MemberHeartbeat())
                if process.entry and not process.has_given_up and self.rng.random() < self.haste:
                    process.has_given_up = True
                    self.say(process, process.view.give_up(process.entry))
        for death in [death for death in self.deaths if death[0] <= self.now]:
            self.deaths.remove(death)
            self.tell_death(*death[1:])
        if self.table is not None and (due := self.table.due()) is not None and due <= self.now:
            self.carry(self.table.tick(self.now))

    def tell_death(self, slot: int, ended: int) -> None:
        for incarnation, (place, attempt) in list(self.slot_of.items()):
            if self.table is not None and place == slot and attempt <= ended:
                self.carry(self.table.note_death(incarnation, self.now))

    def deliver(self, line: int, is_down: bool) -> None:
        _, payload = (self.down if is_down else self.up)[line].popleft()
        process = self.owners[line]
        if is_down:
            if process.lives and process.link == line:
                self.read(process, line, payload)
            return
        assert self.table is not None
        if payload is None:
            self.carry(self.table.ended(line, self.now))
            return
        message = MEMBER_CODEC.decode(payload)
        if isinstance(message, RegisterMember) and message.slot is not None:
            self.slot_of[message.incarnation] = message.slot
        self.carry(self.table.handle(line, message, self.now))
        if isinstance(message, RegisterMember) and not message.is_known and self.table._unheard:
            self.seen["newcomer waits"] += line in self.table._waiting

    def check_end(self) -> None:
        assert self.table is not None
        assert self.table.stop is not None
        assert self.table.stop.exit_code == 0, self.table.stop
        for entry, told in self.outcomes.items():
            assert len(set(told.values())) <= 1, f"{entry} was passed by some and broken for others"
        losses = {each.event.incarnation for each in self.record
                  if isinstance(each.event, MemberLost) and each.event.role == "worker"}  # fmt: skip
        for process in self.processes:
            heard = [each.incarnation for each in process.view.events
                     if isinstance(each, MemberLost) and each.role == "worker"]  # fmt: skip
            assert len(heard) == len(set(heard)), "a process takes one loss for two"
            if process.role == "server" and process.end is not None and process.slot[1] == 0:
                assert losses <= process.gone, "a server has not heard of a loss"
                assert process.end.exit_code == 0
            was_there = process.role == "server" and process.view.is_assigned and not process.was_killed
            assert process.end is not None or not was_there, "a server was not told of the end"


def play(seed: int) -> Counter[str]:
    """Run one seed; returns what has happened in it."""
    schedule = Schedule(seed)
    try:
        schedule.run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return schedule.seen
