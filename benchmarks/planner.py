"""The planner's predictions beside measured training steps, on stand-in hosts (needs root to measure).

    python -m benchmarks.planner profile                  a profile of each model, by a job of two ranks on this host
    python -m benchmarks.planner measure                  about 40 minutes; adds a round to what is there
    python -m benchmarks.planner measure --places 2x1 --networks 100,200/5 --models deep --stores one
    python -m benchmarks.planner compare [--costs FILE]   the planner beside what was measured; needs nothing
    python -m benchmarks.planner compare --json FILE      of another file than benchmarks/planner_steps.json
    python -m benchmarks.planner compare --table FILE     writes errors by kind of job, as docs/data/records has them

Real jobs train models (`benchmarks.harness.paced`) by `reigen.torch` on 2 to 4 hosts, with 1 or 2 ranks each: by
all-reduce, as the TCP backend chooses or around the ring, and on one, as many and twice as many parameter servers as
hosts, each on a worker's host. A rank's part of a step takes a known time, so that a host has, in effect, a processor
for each rank; what communication costs in processor time is still paid on the two of this machine.

A figure is the median over rounds of the median of a round's steps; a step is the time from when the last rank has
ended one to when the last rank has ended the next. Whoever adjusts the planner may look at what was measured on two
hosts (the fitting set); how good it is, jobs on 3 and 4 hosts say (held out).
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.harness.crew import Crew, CrewSpec
from benchmarks.harness.figures import Timeline
from benchmarks.harness.machine import this_machine
from benchmarks.harness.record import Column, Quantity, Record, make_record
from benchmarks.harness.report import markdown
from benchmarks.harness.schedule import about, crews, to_stderr
from benchmarks.harness.servers import Seat, parameter_servers, worker_starts
from benchmarks.harness.work import Case
from benchmarks.network import Place
from reigen.errors import LaunchError
from reigen.files import write_atomically
from reigen.launch.supervision.process_tree import find_descendants
from reigen.observe.trace_reader import read_trace
from reigen.planner.cluster import Cluster, make_cluster
from reigen.planner.costs import Costs, read_costs
from reigen.planner.prediction import Strategy
from reigen.planner.profile import TrainingProfile, make_profile
from reigen.planner.simulator import simulate
from reigen.planner.trace_profile import profile_from_trace
from tests.lab import Hosts, Unavailable
from tests.lab.network import DelayingSwitch

PROGRAM = "benchmarks.programs.paced_train"
MODELS = ("deep", "classifier", "embedding")
BATCH = 4
#: Collectives by the TCP backend's algorithm; else how many servers there are for so many hosts.
COLLECTIVE_STORES = {"auto": "auto", "ring": "ring"}
SERVER_STORES = {"one": lambda hosts: 1, "equal": lambda hosts: hosts, "double": lambda hosts: 2 * hosts}
STORES = (*COLLECTIVE_STORES, *SERVER_STORES)
STEPS_FILE = Path(__file__).with_name("planner_steps.json")
#: Alternatives whose measured steps differ by more are to be put in the right order.
CLEAR_DIFFERENCE = 0.1
#: One way between hosts of a network without a delay of its own.
_LEAST_LATENCY_SECONDS = 50e-6
#: Processors of the machine that all stand-in hosts share.
_SHARED_PROCESSORS = 2
_WARMUP, _SETTLE = 3, 1
#: Where there is a delay: TCP and receive windows learn the rate of connections over many round trips with data.
_WARMUP_WITH_DELAY = 10
_PROFILE_SECONDS = 120.0
_TURN_SECONDS, _MOST_STEPS, _FEWEST_STEPS = 3.0, 12, 4


@dataclass(frozen=True)
class NetworkSpec:
    """What connects the hosts: ``RATE`` or ``RATE/DELAY`` on the command line, in Mbit/s and ms one way."""

    rate_mbits: float
    delay_ms: float = 0.0

    @classmethod
    def parse(cls, text: str) -> NetworkSpec:
        """Read ``100`` or ``100/5``."""
        rate, _, delay = text.partition("/")
        return cls(float(rate), float(delay or 0))


class Configuration(msgspec.Struct, frozen=True):
    """One job.

    Attributes:
        num_hosts: stand-in hosts.
        ranks_a_host: ranks on each.
        rate_mbits: of each host's connection, in each direction.
        delay_ms: of each packet, one way.
        store: of `STORES`.
        model: of `MODELS`.
    """

    num_hosts: int
    ranks_a_host: int
    rate_mbits: float
    delay_ms: float
    store: str
    model: str

    @property
    def is_held_out(self) -> bool:
        """Return whether nobody may adjust the planner to it."""
        return self.num_hosts > 2

    @property
    def is_servers_with_delay(self) -> bool:
        """Return whether it is of the kind that is predicted worst: docs/planner-model.md says why."""
        return self.store in SERVER_STORES and self.delay_ms > 0

    @property
    def question(self) -> tuple[object, ...]:
        """Return all but the store: the alternatives have this in common."""
        return self.num_hosts, self.ranks_a_host, self.rate_mbits, self.delay_ms, self.model

    def strategy(self) -> Strategy:
        """Return the planner's name for the store."""
        if self.store in COLLECTIVE_STORES:
            return Strategy(algorithm=COLLECTIVE_STORES[self.store])
        return Strategy("servers", SERVER_STORES[self.store](self.num_hosts))

    def cluster(self) -> Cluster:
        """Return the stand-in hosts as the planner describes them."""
        host = {
            "name": "host",
            "count": self.num_hosts,
            "ranks": self.ranks_a_host,
            "bandwidth": f"{self.rate_mbits:g} Mbit/s",
            "latency": max(1e-3 * self.delay_ms, _LEAST_LATENCY_SECONDS),
        }
        return make_cluster({"hosts": [host], "shared_processors": _SHARED_PROCESSORS})


class Measurement(msgspec.Struct):
    """Steps of one job.

    Attributes:
        configuration: which.
        rounds: of each round, the median in seconds.
        loads: of each round, how many processes of this machine wanted to run, before it.
        sent_again: segments of TCP that all hosts sent again for a step, of the rounds in which they were counted.
    """

    configuration: Configuration
    rounds: list[float] = []
    loads: list[float] = []
    sent_again: list[float] = []

    @property
    def seconds(self) -> float:
        """Of a step: the median over rounds."""
        return statistics.median(self.rounds)


class MeasurementFile(msgspec.Struct):
    """All that was measured, and where; ``profiles``: of the models, as `reigen.planner` has them."""

    machine: str
    profiles: dict[str, Any] = {}
    measurements: list[Measurement] = []

    def of(self, configuration: Configuration) -> Measurement:
        """The measurement of a job, made if it is not there."""
        for each in self.measurements:
            if each.configuration == configuration:
                return each
        self.measurements.append(Measurement(configuration))
        return self.measurements[-1]


def load_measurements(path: Path) -> MeasurementFile:
    """Read what was measured; nothing where there is no such file."""
    if not path.exists():
        return MeasurementFile(str(this_machine()))
    return msgspec.json.decode(path.read_bytes(), type=MeasurementFile)


def save_measurements(path: Path, found: MeasurementFile) -> None:
    """Write what was measured, one job a line."""
    lines = ",\n".join(msgspec.json.encode(each).decode() for each in found.measurements)
    machine = msgspec.json.encode(found.machine).decode()
    profiles = ",\n".join(f'"{name}": {msgspec.json.encode(each).decode()}' for name, each in found.profiles.items())
    text = f'{{"machine": {machine},\n"profiles": {{\n{profiles}\n}},\n"measurements": [\n{lines}\n]}}\n'
    write_atomically(path, [text.encode()])


def step_durations(timelines: Sequence[Timeline]) -> list[float]:
    """From when the last rank has ended a step to when the last rank has ended the next."""
    ends = [max(end for _, end in step) for step in zip(*timelines, strict=True)]
    return [later - earlier for earlier, later in itertools.pairwise(ends)]


# -- measuring --------------------------------------------------------------------------------------------------------


def prioritize_processes() -> None:
    """Have ranks and servers run before whatever else wants this machine's processors: hosts have their own.

    A niceness would not do, where the kernel groups processes by session. Does nothing where this process may not.
    """
    for pid in find_descendants(os.getpid()):
        for task in Path("/proc").glob(f"{pid}/task/*"):
            with suppress(OSError):  # it has ended
                if os.sched_getscheduler(int(task.name)) == os.SCHED_OTHER:
                    os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(1))


@contextmanager
def jobs(
    num_hosts: int, ranks_a_host: int, stores: Sequence[str], network: NetworkSpec
) -> Iterator[tuple[Place, Mapping[str, Crew]]]:
    """Stand-in hosts in a network, and on them a job for each store; its rate may be changed then, its delay not.

    Kernels forget the shortest round trip of a connection after minutes.
    """
    with tempfile.TemporaryDirectory(prefix="reigen-bench-") as name, ExitStack() as stack:
        directory = Path(name)
        kind: Literal["switch", "bridge"] = "switch" if network.delay_ms else "bridge"
        hosts = stack.enter_context(Hosts(num_hosts, network=kind, shared=[directory], same_uptime=True))
        if isinstance(hosts.network, DelayingSwitch):
            hosts.network.prioritize()
        place = Place(hosts, directory, stack)
        place.shape(1e6 * network.rate_mbits, 1e-3 * network.delay_ms)
        seats = [Seat(host.address, "eth0", host.entry(Path.cwd()), host.network) for host in hosts]
        specs = []
        for store in stores:
            if store in COLLECTIVE_STORES:
                variables = {"REIGEN_TCP_ALGORITHM": COLLECTIVE_STORES[store]}
                specs.append(place.reigen(store, PROGRAM, ranks_a_host, variables))
                continue
            servers = [seats[number % num_hosts] for number in range(SERVER_STORES[store](num_hosts))]
            workers = [seats[number // ranks_a_host] for number in range(num_hosts * ranks_a_host)]
            common = stack.enter_context(parameter_servers(len(workers), seats[0], servers))
            starts = worker_starts(common, workers)
            specs.append(CrewSpec(store, PROGRAM, len(workers), starts=starts, directory=directory))
        came, failures = stack.enter_context(crews(specs, about(f"{num_hosts} x {ranks_a_host}", to_stderr)))
        for failed, reason in failures.items():
            to_stderr(f"{failed} is left out: {reason}")
        yield place, came


def measure_step(place: Place, crew: Crew, case: Case, warmup: int) -> tuple[float, float]:
    """Median seconds of a step, of one turn after some to warm up; and segments of TCP that were sent again for one."""
    key = f"{case.name}.{case.count}"
    warmed = step_durations(crew.open(key, case, warmup))
    num_steps = max(_FEWEST_STEPS, min(_MOST_STEPS, round(_TURN_SECONDS / min(warmed))))
    before = place.num_retransmissions
    seconds = statistics.median(step_durations(crew.turn(key, _SETTLE, num_steps + 1)))
    again = (place.num_retransmissions - before) / (_SETTLE + num_steps + 1)
    crew.shut(key)
    return seconds, again


@dataclass(frozen=True)
class Wanted:
    """What to measure: every model and store at every place and network."""

    places: tuple[tuple[int, int], ...]
    networks: tuple[NetworkSpec, ...]
    stores: tuple[str, ...]
    models: tuple[str, ...]


def measure(wanted: Wanted, path: Path) -> None:
    """Measure one round of all that is wanted, and write each figure when it is there."""
    numbers = itertools.count(1)
    found = load_measurements(path)
    for num_hosts, ranks_a_host in wanted.places:
        for networks in _by_delay(wanted.networks):
            with jobs(num_hosts, ranks_a_host, wanted.stores, networks[0]) as (place, came):
                warmup = _WARMUP_WITH_DELAY if networks[0].delay_ms else _WARMUP
                for network, model in itertools.product(networks, wanted.models):
                    place.shape(1e6 * network.rate_mbits, 1e-3 * network.delay_ms)
                    for store, crew in came.items():
                        configuration = Configuration(
                            num_hosts, ranks_a_host, network.rate_mbits, network.delay_ms, store, model
                        )
                        load = os.getloadavg()[0]
                        prioritize_processes()
                        try:
                            seconds, again = measure_step(place, crew, Case(model, count=next(numbers)), warmup)
                        except LaunchError as error:
                            to_stderr(f"{configuration}: {error}")
                            continue
                        to_stderr(f"{time.strftime('%H:%M:%S')} {configuration}: {seconds * 1e3:.1f} ms, load {load}")
                        entry = found.of(configuration)
                        entry.rounds.append(round(seconds, 6))
                        entry.loads.append(round(load, 1))
                        entry.sent_again.append(round(again, 1))
                        save_measurements(path, found)


def _by_delay(networks: Sequence[NetworkSpec]) -> list[list[NetworkSpec]]:
    """Lists of networks with the same delay."""
    found: dict[float, list[NetworkSpec]] = {}
    for network in networks:
        found.setdefault(network.delay_ms, []).append(network)
    return list(found.values())


# -- profiles ---------------------------------------------------------------------------------------------------------


def profile(models: Sequence[str], path: Path) -> None:
    """Profile the models, by jobs of two ranks on this host."""
    found = load_measurements(path)
    for model in models:
        to_stderr(f"{model}: a job with a timeline")
        found.profiles[model] = take_profile(model).to_json()
    save_measurements(path, found)


def take_profile(model: str) -> TrainingProfile:
    """Return the profile of a model's job of two ranks, from its timeline."""
    with tempfile.TemporaryDirectory(prefix="reigen-bench-") as directory:
        timeline = Path(directory, "timeline.json")
        rank = [sys.executable, "-m", PROGRAM, model]
        subprocess.run(
            [sys.executable, "-m", "reigen", "run", "-np", "2", "--no-verdict", *rank],
            env={**os.environ, "HOROVOD_TIMELINE": str(timeline), "OMP_NUM_THREADS": "1"},
            check=True,
            timeout=_PROFILE_SECONDS,
        )
        return profile_from_trace(read_trace(timeline), BATCH, model)


# -- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparedStep:
    """A measured step and its prediction, in seconds."""

    configuration: Configuration
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Return how much too long the prediction is, as a part of what was measured; negative: too short."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class ComparedOrder:
    """How many pairs of alternatives differ by more than `CLEAR_DIFFERENCE`, and how many are in the right order."""

    num_pairs: int
    num_right: int
    wrong: tuple[tuple[ComparedStep, ComparedStep], ...]


def compare_steps(found: MeasurementFile, costs: Costs) -> list[ComparedStep]:
    """Predict each job that was measured."""
    profiles = {name: make_profile(content, name) for name, content in found.profiles.items()}
    compared = []
    for each in found.measurements:
        job = each.configuration
        predicted = simulate(profiles[job.model], job.cluster(), job.strategy(), costs).step_seconds
        compared.append(ComparedStep(job, each.seconds, predicted))
    return compared


def compare_orders(compared: Sequence[ComparedStep]) -> ComparedOrder:
    """Look at all pairs of stores of the same hosts, network and model."""
    num_pairs, wrong = 0, []
    for first, second in itertools.combinations(compared, 2):
        if first.configuration.question != second.configuration.question:
            continue
        fast, slow = sorted((first, second), key=lambda step: step.measured)
        if slow.measured > fast.measured * (1 + CLEAR_DIFFERENCE):
            num_pairs += 1
            if fast.predicted >= slow.predicted:
                wrong.append((fast, slow))
    return ComparedOrder(num_pairs, num_pairs - len(wrong), tuple(wrong))


def report(compared: Sequence[ComparedStep]) -> str:
    """Tables for the documentation: errors by set, and by store; wrong orders; all figures."""
    held_out = [step for step in compared if step.configuration.is_held_out]
    groups = {
        "fitting set (2 hosts)": [step for step in compared if not step.configuration.is_held_out],
        "held out (3, 4 hosts)": held_out,
        "held out, without servers on networks with a delay": [
            step for step in held_out if not step.configuration.is_servers_with_delay
        ],
        "held out, servers on networks with a delay": [
            step for step in held_out if step.configuration.is_servers_with_delay
        ],
    }
    for store in STORES:
        groups[f"held out, {store}"] = [step for step in held_out if step.configuration.store == store]
    lines = []
    for name, steps in groups.items():
        if steps:
            errors = sorted(abs(step.error) for step in steps)
            order = compare_orders(steps)
            right = f"{order.num_right} of {order.num_pairs}" if order.num_pairs else ""
            within = sum(error <= 0.1 for error in errors) / len(errors)
            lines.append(
                (name, str(len(steps)), f"{statistics.median(errors):.1%}", f"{errors[-1]:.1%}", f"{within:.0%}", right)
            )
    text = markdown(("jobs", "number", "median error", "worst", "within 10 %", "in the right order"), lines)
    for fast, slow in compare_orders(compared).wrong:
        text += f"\n\nwrong order: {_describe(fast)} is predicted slower than {_describe(slow)}"
    rows = [
        (
            f"{job.num_hosts} x {job.ranks_a_host}",
            f"{job.rate_mbits:g} Mbit/s, {job.delay_ms:g} ms",
            job.model,
            job.store,
            f"{step.measured * 1e3:.0f} ms",
            f"{step.predicted * 1e3:.0f} ms",
            f"{step.error:+.0%}",
        )
        for step in compared
        for job in [step.configuration]
    ]
    return f"{text}\n\n{markdown(('hosts', 'network', 'model', 'store', 'measured', 'predicted', 'error'), rows)}"


def make_table(compared: Sequence[ComparedStep], num_rounds: int) -> Record:
    """Return errors by kind of job, as a table.

    Args:
        compared: what `compare_steps` has returned.
        num_rounds: of all measurements.
    """
    held_out = [step for step in compared if step.configuration.is_held_out]
    kinds: dict[str, list[ComparedStep]] = {}
    for delay in ("no delay", "with delay"):
        for name, stores in (("collectives", COLLECTIVE_STORES), ("servers", SERVER_STORES)):
            kinds[f"held out, {name}, {delay}"] = [
                step
                for step in held_out
                if step.configuration.store in stores and (step.configuration.delay_ms > 0) == (delay == "with delay")
            ]
    kinds["**all that are held out**"] = held_out
    kinds["two hosts"] = [step for step in compared if not step.configuration.is_held_out]
    lines: dict[str, dict[str, Quantity | str]] = {}
    for name, steps in kinds.items():
        if errors := [abs(step.error) for step in steps]:
            lines[name] = {
                "number": Quantity(len(errors), 0),
                "median error": Quantity(100 * statistics.median(errors), 1, unit="%"),
                "worst": Quantity(100 * max(errors), 1, unit="%"),
                "within 10 %": Quantity(sum(error <= 0.1 for error in errors), 0),
                "within 25 %": Quantity(sum(error <= 0.25 for error in errors), 0),
            }
    columns = [Column(name) for name in ("number", "median error", "worst", "within 10 %", "within 25 %")]
    conditions = f"{len(compared)} jobs that were measured, {num_rounds} rounds; held out are the jobs on 3 and 4 hosts"
    command = "python -m benchmarks.planner compare"
    return make_record(command, conditions, "jobs", columns, lines, this_machine())


def _describe(step: ComparedStep) -> str:
    job = step.configuration
    where = f"{job.num_hosts} x {job.ranks_a_host}, {job.rate_mbits:g} Mbit/s, {job.delay_ms:g} ms, {job.model}"
    return f"{job.store} ({where}: {step.measured * 1e3:.0f} ms, predicted {step.predicted * 1e3:.0f})"


# -- the command ------------------------------------------------------------------------------------------------------


def _place(text: str) -> tuple[int, int]:
    hosts, _, ranks = text.partition("x")
    return int(hosts), int(ranks)


def _list_of(parse: object) -> object:
    return lambda text: tuple(parse(part) for part in text.split(",") if part)  # type: ignore[operator]


def main(arguments: Sequence[str]) -> int:
    chosen = _parser().parse_args(arguments)
    try:
        if chosen.what == "measure":
            measure(Wanted(chosen.places, chosen.networks, chosen.stores, chosen.models), chosen.json)
        elif chosen.what == "profile":
            profile(chosen.models, chosen.json)
        else:
            costs = Costs() if chosen.costs is None else read_costs(chosen.costs)
            found = load_measurements(chosen.json)
            compared = compare_steps(found, costs)
            print(f"measured on: {found.machine}\n\n{report(compared)}")
            if chosen.table is not None:
                make_table(compared, sum(len(each.rounds) for each in found.measurements)).save(chosen.table)
    except Unavailable as error:
        print(f"there can be no stand-in machines here: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="WHAT", dest="what")
    one = commands.add_parser("measure", help="measure a round of steps", allow_abbrev=False)
    one.add_argument("--places", type=_list_of(_place), default="2x1,3x1,2x2,4x1,4x2", metavar="HOSTSxRANKS,...")
    one.add_argument(
        "--networks",
        type=_list_of(NetworkSpec.parse),
        default="100,300,1000,5000,200/5,300/10",
        metavar="RATE[/MS],...",
    )
    one.add_argument("--stores", type=_list_of(str), default=",".join(STORES), metavar="A,B")
    two = commands.add_parser("profile", help="profile the models", allow_abbrev=False)
    three = commands.add_parser("compare", help="compare predictions with what was measured", allow_abbrev=False)
    three.add_argument("--costs", type=Path, metavar="FILE", help="what `reigen bench costs` wrote (default: defaults)")
    three.add_argument("--table", type=Path, metavar="FILE", help="write errors by kind of job there")
    for command in (one, two):
        command.add_argument("--models", type=_list_of(str), default=",".join(MODELS), metavar="A,B")
    for command in (one, two, three):
        command.add_argument("--json", type=Path, default=STEPS_FILE, metavar="FILE", help=f"({STEPS_FILE.name})")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
