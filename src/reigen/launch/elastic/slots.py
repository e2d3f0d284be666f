"""Hosts of an elastic job, and the places on them: which are used, which rest, which may be started. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from reigen.launch.elastic.options import Cooldown
from reigen.launch.hosts import HostInfo


class SlotState(Enum):
    """Use of a place."""

    FREE = auto()
    RUNNING = auto()
    LEAVING = auto()


@dataclass(slots=True)
class Failures:
    """Failures of a place, or of a host, and the rest that follows.

    Attributes:
        times: of those that count.
        rests_until: when it may be used again; inf: never.
    """

    times: list[float] = field(default_factory=list)
    rests_until: float = -inf

    def add(self, now: float, cooldown: Cooldown, chance: float) -> float | None:
        """Count a failure; returns the seconds of rest, None: for ever."""
        if cooldown.max_failures is not None:
            self.times = [each for each in self.times if now - each < cooldown.window_seconds]
        self.times.append(now)
        rest = cooldown.rest_seconds(len(self.times), chance)
        self.rests_until = inf if rest is None else now + rest
        return rest


@dataclass(slots=True, eq=False)
class JobSlot:
    """Place of one process.

    Attributes:
        host, local_rank: where.
        number: in the job, from its first process on; -1: it had none.
        incarnation: of its latest process.
        state: what it is used for.
        failures: of its processes.
        leaves_by: when a process that was asked to leave is killed.
        ends_by: when one that a view has left out, and that ends by itself therefore, may be asked to leave.
        rests_when_left: its process leaves by itself; then others are used first.
    """

    host: str
    local_rank: int
    number: int = -1
    incarnation: int = -1
    state: SlotState = SlotState.FREE
    failures: Failures = field(default_factory=Failures)
    leaves_by: float = inf
    ends_by: float = -inf
    rests_when_left: bool = False

    @property
    def id(self) -> tuple[int, int]:
        """Slot and incarnation."""
        return self.number, self.incarnation


class HostPhase(Enum):
    """Readiness of a host for processes."""

    CALLED = auto()
    READY = auto()
    #: its engine has announced its end
    LEAVING = auto()
    GONE = auto()


@dataclass(slots=True, eq=False)
class HostSlots:
    """Host, with its places.

    Attributes:
        name: as it was found.
        slots: all that it ever had.
        num_slots: how many of them may be used now; 0: it has vanished.
        phase: whether it can be used.
        num_refusals: how often it could not take part, one after the other.
        failures: of the host itself, or, where a failure of a process counts as one of its host, of those.
    """

    name: str
    slots: list[JobSlot] = field(default_factory=list)
    num_slots: int = 0
    phase: HostPhase = HostPhase.GONE
    num_refusals: int = 0
    failures: Failures = field(default_factory=Failures)

    @property
    def is_untried(self) -> bool:
        """Return whether it was not called, or was well before it was lost."""
        return self.phase is HostPhase.GONE and not self.num_refusals

    def usable_slots(self, now: float) -> Iterator[JobSlot]:
        """Yield the places that can have a process now, or have one that stays."""
        if self.phase is HostPhase.READY and self.failures.rests_until <= now:
            for slot in self.slots[: self.num_slots]:
                if slot.state is SlotState.RUNNING or (
                    slot.state is SlotState.FREE and slot.failures.rests_until <= now
                ):
                    yield slot


class SlotTable:
    """Places of all hosts, in the order in which the hosts were seen first."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostSlots] = {}
        self._slots: list[JobSlot] = []

    def __getitem__(self, number: int) -> JobSlot:
        """Return the place with this number."""
        return self._slots[number]

    def has(self, number: int) -> bool:
        """Return whether there was ever a process with this number."""
        return 0 <= number < len(self._slots)

    def __iter__(self) -> Iterator[JobSlot]:
        """Yield the places that have had a process."""
        return iter(self._slots)

    def update(self, found: Iterable[HostInfo]) -> tuple[list[HostSlots], list[HostSlots]]:
        """Take the hosts that there are now; returns those that have gained places, and those that have lost some."""
        slots = {host.name: host.slots for host in found}
        gained, lost = [], []
        for name, num in slots.items():
            host = self.hosts.setdefault(name, HostSlots(name))
            if num > host.num_slots:
                gained.append(host)
            elif num < host.num_slots:
                lost.append(host)
            host.num_slots = num
            host.slots += [JobSlot(name, local_rank) for local_rank in range(len(host.slots), num)]
        for host in self.hosts.values():
            if host.name not in slots and host.num_slots:
                host.num_slots = 0
                lost.append(host)
        return gained, lost

    def restore(self, number: int, host: str, local_rank: int, incarnation: int, *, is_running: bool) -> None:
        """Take a place as another launcher has left it; numbers come in order, from 0 on."""
        assert number == len(self._slots), "each number was given once"
        of = self.hosts.setdefault(host, HostSlots(host))
        of.slots += [JobSlot(host, each) for each in range(len(of.slots), local_rank + 1)]
        slot = of.slots[local_rank]
        slot.number, slot.incarnation = number, incarnation
        slot.state = SlotState.RUNNING if is_running else SlotState.FREE
        self._slots.append(slot)

    def occupy(self, slot: JobSlot) -> None:
        """Give a place its next process."""
        if slot.number < 0:
            slot.number = len(self._slots)
            self._slots.append(slot)
        slot.incarnation += 1
        slot.state, slot.leaves_by, slot.ends_by, slot.rests_when_left = SlotState.RUNNING, inf, -inf, False

    def leave_out(self, members: Collection[tuple[int, int]], ends_by: float) -> bool:
        """Have members that were not asked to leave end by themselves until then; returns whether there are any."""
        left_out = [slot for slot in self.in_state(SlotState.RUNNING) if slot.id in members]
        for slot in left_out:
            slot.ends_by = ends_by
        return bool(left_out)

    def in_state(self, state: SlotState) -> list[JobSlot]:
        """Return the places in a state."""
        return [slot for slot in self._slots if slot.state is state]

    def ended(self) -> Iterator[tuple[int, int]]:
        """Yield numbers of places, with the latest incarnation of which no process is left."""
        for slot in self._slots:
            last = slot.incarnation - (slot.state is not SlotState.FREE)
            if last >= 0:
                yield slot.number, last

    def usable(self, now: float) -> list[JobSlot]:
        """Return the places of which each has a process that stays, or may have one now.

        Free places that have never failed come before those that have.
        """
        slots = [slot for host in self.hosts.values() for slot in host.usable_slots(now)]
        return sorted(slots, key=lambda slot: (slot.state is SlotState.FREE, bool(slot.failures.times)))

    def num_possible(self) -> int:
        """Return how many processes there can be at most, now or later, on the hosts that there are now."""
        return sum(
            slot.state is SlotState.RUNNING or slot.failures.rests_until < inf
            for host in self.hosts.values()
            if host.failures.rests_until < inf
            for slot in host.slots[: host.num_slots]
        )

    def next_due(self, now: float) -> float:
        """Return when the next rest or the next time to leave, or to end, is over; inf: there is none."""
        hosts = [host for host in self.hosts.values() if host.num_slots]
        ends = [host.failures.rests_until for host in hosts]
        ends += [slot.failures.rests_until for host in hosts for slot in host.slots[: host.num_slots]]
        ends += [slot.ends_by for slot in self.in_state(SlotState.RUNNING)]
        leaving = [slot.leaves_by for slot in self.in_state(SlotState.LEAVING)]
        return min([*(end for end in ends if end > now), *leaving], default=inf)
