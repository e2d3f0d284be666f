"""Who has a turn when: every mode in every round, in an order that rotates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.harness.crew import Crew, CrewSpec
from benchmarks.harness.figures import Summary, Timeline, joint_durations, num_iterations, own_durations, summarize
from benchmarks.harness.work import Case
from reigen.errors import LaunchError

WARMUP = 5
#: This part of a turn's operations comes first and does not count: caches hold what the mode before left there.
_SETTLE_PART = 0.1

Report = Callable[[str], None]


class Team(Protocol):
    """What `alternate` needs of a `Crew`."""

    def open(self, key: str, case: Case, warmup: int) -> list[Timeline]:
        """See `Crew.open`."""
        ...

    def turn(self, key: str, settle: int, iterations: int) -> list[Timeline]:
        """See `Crew.turn`."""
        ...

    def shut(self, key: str) -> None:
        """See `Crew.shut`."""
        ...


@dataclass(frozen=True)
class Mode:
    """One way to do a thing.

    Attributes:
        name: what tables call it.
        team: the processes.
        case: what they do.
        joint: whether an operation of all ranks counts once, from the last arrival to the last result; or each rank's
            call by itself.
        num_steps: of which one operation consists; durations are those of a step.
    """

    name: str
    team: Team
    case: Case
    joint: bool = True
    num_steps: int = 1

    def durations(self, timelines: Sequence[Timeline]) -> list[float]:
        """Seconds of the operations, or of a step of each."""
        found = joint_durations(timelines) if self.joint else own_durations(timelines)
        return [seconds / self.num_steps for seconds in found]


@dataclass(frozen=True)
class Outcome:
    """What came of some modes.

    Attributes:
        summaries: of the modes that worked, by name.
        failures: of the others: why.
    """

    summaries: dict[str, Summary] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def about(what: str, report: Report) -> Report:
    """A reporter that says first what it is about."""
    return lambda line: report(f"{what}: {line}")


def to_stderr(line: str) -> None:
    """A reporter of programs that print what they found to stdout."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def rotated(names: Sequence[str], round_number: int) -> list[str]:
    """The order of a round: everybody is first once, and follows the same neighbour, in turn."""
    shift = round_number % len(names) if names else 0
    return [*names[shift:], *names[:shift]]


def alternate(
    modes: Sequence[Mode], rounds: int, turn_seconds: float, report: Report, *, warmup: int = WARMUP
) -> Outcome:
    """Give every mode a turn in every round.

    Args:
        modes: with different names.
        rounds: how many; at least 1.
        turn_seconds: about how long a turn is.
        report: told what is going on.
        warmup: operations of each mode before the first round; they tell how many make a turn.

    A mode that fails is left out from then on; the others go on.
    """
    failures: dict[str, str] = {}
    iterations: dict[str, int] = {}
    by_name = {mode.name: mode for mode in modes}
    samples: dict[str, list[list[float]]] = {name: [] for name in by_name}
    for mode in modes:
        report(f"{mode.name}: warming up")
        try:
            first = mode.durations(mode.team.open(mode.name, mode.case, warmup))
            iterations[mode.name] = num_iterations(min(first) * mode.num_steps, turn_seconds)
        except LaunchError as error:
            failures[mode.name] = str(error)
    for number in range(rounds):
        for name in rotated(list(by_name), number):
            if name in failures:
                continue
            report(f"round {number + 1} of {rounds}: {name}")
            settle = max(1, round(iterations[name] * _SETTLE_PART))
            try:
                timelines = by_name[name].team.turn(name, settle, iterations[name])
            except LaunchError as error:
                failures[name] = str(error)
                continue
            samples[name].append(by_name[name].durations(timelines))
    for name, mode in by_name.items():
        if name not in failures:
            with suppress(LaunchError):  # it has been measured; the next case will tell
                mode.team.shut(name)
    return Outcome({name: summarize(samples[name]) for name in by_name if name not in failures}, failures)


@contextmanager
def crews(specs: Sequence[CrewSpec], report: Report) -> Iterator[tuple[dict[str, Crew], dict[str, str]]]:
    """All crews at once, started and met; ended when the block ends.

    Yields:
        the crews that came, by name; and why the others did not.
    """
    came: dict[str, Crew] = {}
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        started = [stack.enter_context(Crew(spec)) for spec in specs]
        for crew in started:
            _try(crew, crew.spawn, failures)
        for crew in started:
            if crew.spec.name not in failures:
                report(f"{crew.spec.name}: starting")
                if _try(crew, crew.meet, failures):
                    came[crew.spec.name] = crew
        yield came, failures


def _try(crew: Crew, action: Callable[[], None], failures: dict[str, str]) -> bool:
    try:
        action()
    except LaunchError as error:
        failures[crew.spec.name] = str(error)
        return False
    return True
