"""Event simulator of activities that share resources fairly (a fluid model).

An *activity* is some work that would take a length of time by itself, and meanwhile loads resources: bytes on links,
seconds of processors. Where the activities that run want more of a resource than there is, they share it: max-min
fairness of their speeds (Bertsekas and Gallager, "Data Networks", section 6.5.2), 1 being the speed that each has
alone. Two flows of one kind through one link so get half of it each, and four busy threads on two processors run at
half speed. Speeds change only when an activity begins or ends, so nothing in between is computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from reigen.planner.prediction import Activity

#: Resource -> what an activity uses of it in all, in the unit of its capacity.
Load = Mapping[str, float]
_EPSILON = 1e-12


@dataclass(slots=True, eq=False)
class _Running:
    """An activity that runs: ``left`` is the part of it that is still to be done."""

    seconds: float
    rates: dict[str, float]
    then: Callable[[], None]
    track: str
    name: str
    begin: float
    left: float = 1.0
    speed: float = 1.0


@dataclass(slots=True)
class FluidSimulator:
    """Activities on resources, by whose ends everything else is driven.

    Attributes:
        capacities: of each resource, units a second.
        now: seconds since the simulation began.
        busy: resource -> seconds for which it was used, weighted with the part that was used.
        spans: activities that have a track and have ended.
    """

    capacities: Mapping[str, float]
    now: float = 0.0
    busy: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[Activity] = field(default_factory=list)
    _running: list[_Running] = field(default_factory=list)

    def start(self, seconds: float, load: Load, then: Callable[[], None], track: str = "", name: str = "") -> None:
        """Begin an activity: ``then`` is called at its end.

        Args:
            seconds: that it takes at least, however much there is of every resource.
            load: what it uses in all.
            then: may start others.
            track: of the picture; without one it is not shown.
            name: of the activity in the picture.
        """
        used = {resource: amount for resource, amount in load.items() if amount > 0}
        length = max([seconds, *(amount / self.capacities[resource] for resource, amount in used.items())])
        rates = {resource: amount / length for resource, amount in used.items()} if length > 0 else {}
        self._running.append(_Running(length, rates, then, track, name, self.now))

    def run(self) -> None:
        """Run until nothing is under way any more."""
        while self._running:
            self._share()
            step = min(one.left * one.seconds / one.speed for one in self._running)
            self.now += step
            ended = []
            for one in self._running:
                for resource, rate in one.rates.items():
                    self.busy[resource] += rate * one.speed * step / self.capacities[resource]
                one.left -= step * one.speed / one.seconds if one.seconds > 0 else 1.0
                if one.left <= _EPSILON:
                    ended.append(one)
            self._running = [one for one in self._running if one.left > _EPSILON]
            for one in ended:
                if one.track:
                    self.spans.append(Activity(one.track, one.name, one.begin, self.now))
                one.then()

    def _share(self) -> None:
        """Give every activity its speed: raise all together, and stop those whose resource is used up."""
        free = dict(self.capacities)
        wanted: defaultdict[str, float] = defaultdict(float)
        for one in self._running:
            one.speed = 1.0
            for resource, rate in one.rates.items():
                wanted[resource] += rate
        rising = [one for one in self._running if one.rates]
        while rising:
            scarce, speed = "", 1.0
            for resource, rate in wanted.items():
                if rate > _EPSILON and free[resource] < speed * rate * (1 - 1e-9):
                    scarce, speed = resource, max(free[resource], 0.0) / rate
            if not scarce:
                return
            still = []
            for one in rising:
                if scarce not in one.rates:
                    still.append(one)
                    continue
                one.speed = max(speed, _EPSILON)
                for resource, rate in one.rates.items():
                    free[resource] -= rate * speed
                    wanted[resource] -= rate
            wanted.pop(scarce)
            rising = still
