"""Seconds from the death of a rank until the next step of the others, also with torchrun; and the cost without faults.

    python -m benchmarks.elastic kills --rounds 10
    python -m benchmarks.elastic cost --rounds 20
    python -m benchmarks.elastic join --rounds 5 --parameters 25 --optimizer adam
    python -m benchmarks.elastic spares --rounds 8 --parameters 25

``kills``: two jobs of four ranks train the same model on this host, one with `hvd.elastic` below `reigen run`, one with
DDP below ``torchrun --max-restarts``, whose processes go on from a checkpoint. A rank of one of them is killed,
alternately, while the other is stopped (SIGSTOP). Measured is the time until a step has ended on all ranks that there
are then: three here, four new ones there; and how many steps were lost. ``cost``: milliseconds of a step in a static
job, in an elastic one, and in one that commits each step, alternating. ``join``: milliseconds that a newcomer to a
`hvd.elastic.Job` costs its three members: what the longest step around the change took more than a usual one of four
ranks, and of that the parts. ``spares``: two jobs of three ranks and a spare, with ``--spares 1`` and ``--spares
1:warm``, alternating: a rank that takes samples is killed at a random moment. Taken is the time from the kill until the
next step has begun, and has ended, on three ranks, and until one has ended whose samples three ranks have taken, the
spare among them; and how long a usual step is, also in a job without spares. One JSON line comes out; ``--json FILE``
writes a table, as docs/data/records has them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from benchmarks.harness.machine import Machine, this_machine
from benchmarks.harness.record import Column, Quantity, Record, make_record

PROGRAM = Path(__file__).parent / "programs" / "elastic_train.py"
JOIN_PROGRAM = PROGRAM.with_name("elastic_join.py")
SPARE_PROGRAM = PROGRAM.with_name("elastic_spare.py")
_PATIENCE_SECONDS = 240.0
RANKS = 4


class Step(NamedTuple):
    """A step that a process has ended."""

    number: int
    rank: int
    size: int
    pid: int
    at: float


class Mark(NamedTuple):
    """A line of `elastic_spare`."""

    kind: str
    number: int
    view: int
    size: int
    num_dealt: int
    num_samples: int
    at: float

    @classmethod
    def parse(cls, line: str) -> Mark:
        kind, *numbers, at = line.split()
        return cls(kind, *map(int, numbers), float(at))


class TrainingJob:
    """A job that trains in the background, below a launcher that is in a session of its own."""

    def __init__(self, directory: Path, command: list[str], environ: Mapping[str, str]) -> None:
        self.directory = directory
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
        self._output = (directory / "output").open("wb")
        self.process = subprocess.Popen(
            command, env=environ, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def steps(self) -> list[Step]:
        """The latest step of each process that lives."""
        found = []
        for path in self.directory.glob("steps.*"):
            lines = path.read_bytes()[-4096:].decode().rpartition("\n")[0].splitlines()
            if lines and Path(f"/proc/{path.suffix[1:]}").exists():
                step, rank, size, pid, at = lines[-1].split()
                found.append(Step(int(step), int(rank), int(size), int(pid), float(at)))
        return found

    def together_since(self, at: float, size: int) -> list[Step] | None:
        """Steps of all ranks of a group of this size that were made since."""
        steps = [step for step in self.steps() if step.at > at and step.size == size]
        return steps if {step.rank for step in steps} == set(range(size)) else None

    def wait(self, condition: Callable[[], object]) -> None:
        until = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > until or self.process.poll() is not None:
                raise RuntimeError(f"{self.process.args}: {(self.directory / 'output').read_text()[-3000:]}")
            time.sleep(0.002)

    def signal_processes(self, number: int) -> None:
        for pid in self.marks():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def signal_ranks(self, number: int) -> None:
        for step in self.steps():
            with suppress(ProcessLookupError):
                os.kill(step.pid, number)

    def marks(self) -> dict[int, list[Mark]]:
        """All that the living processes of `elastic_spare` have written, by process."""
        found = {}
        for path in self.directory.glob("steps.*"):
            if Path(f"/proc/{path.suffix[1:]}").exists():
                lines = path.read_text().rpartition("\n")[0].splitlines()
                found[int(path.suffix[1:])] = [Mark.parse(line) for line in lines]
        return found

    def close(self) -> None:
        (self.directory / "enough").touch()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._output.close()


@contextmanager
def training(
    directory: Path, command: list[str], environ: Mapping[str, str] = MappingProxyType({})
) -> Iterator[TrainingJob]:
    """Run a training for as long as the block."""
    directory.mkdir()
    job = TrainingJob(directory, command, environ)
    try:
        yield job
    finally:
        job.close()


def reigen_run(*options: str) -> list[str]:
    return [sys.executable, "-m", "reigen", "run", "-np", str(RANKS), *options, sys.executable, str(PROGRAM), "reigen"]


def torchrun(restarts: int) -> list[str]:
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*module, "--nproc-per-node", str(RANKS), "--max-restarts", str(restarts), str(PROGRAM), "ddp"]


def kill_one(job: TrainingJob, left: int, chances: random.Random) -> tuple[float, int]:
    """Kill a rank; returns seconds until a group of ``left`` ranks has made a step, and how many steps were lost."""
    job.wait(lambda: job.together_since(time.time() - 5, RANKS))
    time.sleep(chances.uniform(0.2, 0.5))
    steps = job.steps()
    victim = chances.choice(steps)
    before, at = max(step.number for step in steps), time.time()
    os.kill(victim.pid, signal.SIGKILL)
    job.wait(lambda: not Path(f"/proc/{victim.pid}").exists() or left < RANKS)

    def goes_on() -> bool:
        others = [step for step in job.together_since(at, left) or [] if step.pid != victim.pid]
        pids = {step.pid for step in steps}
        return len(others) == left and (left < RANKS or not pids & {step.pid for step in others})

    job.wait(goes_on)
    seconds = time.time() - at
    first = min(step.number for step in job.together_since(at, left) or [])
    job.wait(lambda: job.together_since(time.time() - 5, RANKS))
    return seconds, max(0, before - first + 1)


def measure_kills(rounds: int, seed: int) -> dict[str, object]:
    """Kill ranks of both jobs alternately."""
    chances = random.Random(seed)
    found: dict[str, list[tuple[float, int]]] = {"reigen": [], "torchrun": []}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        elastic = ["--min-np", "2", "--blacklist-cooldown-range", "1", "1"]
        commands = {"reigen": reigen_run(*elastic), "torchrun": torchrun(5 * rounds + 5)}
        jobs = {}
        for who, command in commands.items():
            directory = Path(name) / who
            arguments = [*command, str(directory), "kills"]
            job = jobs[who] = stack.enter_context(training(directory, arguments))
            job.wait(lambda job=job: job.together_since(0, RANKS))
            job.signal_ranks(signal.SIGSTOP)
        for number in range(rounds):
            for who, job in jobs.items():
                job.signal_ranks(signal.SIGCONT)
                found[who].append(kill_one(job, RANKS - 1 if who == "reigen" else RANKS, chances))
                job.signal_ranks(signal.SIGSTOP)
            print(f"{number + 1}/{rounds}", {who: each[-1] for who, each in found.items()}, file=sys.stderr)
        for job in jobs.values():
            job.signal_ranks(signal.SIGCONT)
    result: dict[str, object] = {}
    for who, each in found.items():
        seconds = sorted(one for one, _ in each)
        result[who] = {
            "median_seconds": round(statistics.median(seconds), 3),
            "least_seconds": round(seconds[0], 3),
            "most_seconds": round(seconds[-1], 3),
            "steps_lost": sorted(lost for _, lost in each),
        }
    pairs = zip(found["torchrun"], found["reigen"], strict=True)
    result["median_ratio"] = round(statistics.median(theirs / ours for (theirs, _), (ours, _) in pairs), 1)
    return result


def measure_cost(rounds: int) -> dict[str, object]:
    """Make steps in a static job and in two elastic ones, alternately."""
    found: dict[str, list[float]] = {"static": [], "elastic": [], "commits": []}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        jobs = {}
        for who in found:
            directory = Path(name) / who
            command = reigen_run(*([] if who == "static" else ["--min-np", "2"]))
            jobs[who] = stack.enter_context(training(directory, [*command, str(directory), "turns", who]))
        for number in range(rounds + 1):
            order = list(jobs)[:: 1 if number % 2 else -1]
            for who in order:
                job = jobs[who]
                (job.directory / f"turn.{number}").touch()
                took = job.directory / f"took.{number}"
                job.wait(took.exists)
                found[who].append(float(took.read_text()))
    result: dict[str, object] = {}
    for who, each in found.items():
        ratios = [mine / static for mine, static in zip(each[1:], found["static"][1:], strict=True)]
        result[who] = {
            "median_ms": round(statistics.median(each[1:]), 4),
            "least_ms": round(min(each[1:]), 4),
            "median_ratio": round(statistics.median(ratios), 4),
        }
    return result


def measure_joins(rounds: int, parameters: float, optimizer: str) -> dict[str, object]:
    """Have newcomers come to a job, one after the other."""
    launcher = [sys.executable, "-m", "reigen", "run", "-np", str(RANKS), "--min-np", str(RANKS - 1)]
    cooldown = ["--blacklist-cooldown-range", "1", "1"]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        arguments = [str(directory), str(parameters), optimizer, str(rounds)]
        command = [*launcher, *cooldown, sys.executable, str(JOIN_PROGRAM), *arguments]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environ, check=True, stdout=sys.stderr, timeout=_PATIENCE_SECONDS * (rounds + 1))
        found = [cost for path in directory.glob("steps.*") for cost in join_costs(json.loads(path.read_text()))]
    result: dict[str, object] = {"parameters": parameters, "optimizer": optimizer, "joins": len(found)}
    for part in sorted({part for cost in found for part in cost}):
        values = [1000 * cost.get(part, 0.0) for cost in found]
        result[f"{part}_ms"] = [round(value, 1) for value in (statistics.median(values), min(values), max(values))]
    return result


def kill_for_spare(job: TrainingJob, chances: random.Random) -> dict[str, float]:
    """Kill a rank that takes samples; returns seconds until steps have begun and ended."""
    job.wait(lambda: len(job.marks()) == RANKS)
    since = time.time()

    def is_ready() -> bool:
        """The spare waits, or has made some steps without samples; the others have made some with them."""
        latest = {pid: [mark for mark in marks if mark.at > since] for pid, marks in job.marks().items()}
        has_samples = [len(marks) > 6 and marks[-1].num_samples > 0 for marks in latest.values()]
        spare = [pid for pid, has in zip(latest, has_samples, strict=True) if not has]
        if len(latest) != RANKS or len(spare) != 1 or sum(has_samples) != RANKS - 1:
            return False
        is_member = job.marks()[spare[0]][-1].kind != "waits"
        return len(latest[spare[0]]) > 6 if is_member else time.time() - since > 2.0

    job.wait(is_ready)
    time.sleep(chances.uniform(0.0, 0.7))
    marks = job.marks()
    takers = [pid for pid, each in marks.items() if each[-1].num_samples]
    usual = median_step([marks[pid] for pid in takers])
    victim = chances.choice(takers)
    (spare,) = marks.keys() - set(takers)
    at = time.time()
    os.kill(victim, signal.SIGKILL)

    def seconds(kind: str, *, is_whole: bool) -> float | None:
        """Until the first step of these ranks, in a view after the kill, has begun or ended on all that must."""
        others = {pid: each for pid, each in job.marks().items() if pid in marks and pid != victim}
        first = []
        for pid, each in others.items():
            last_view = max(mark.view for mark in marks[pid])
            new = [m for m in each if m.kind == kind and m.at > at and (m.view > last_view or pid == spare)]
            new = [m for m in new if m.num_samples] if is_whole else new
            if (pid != spare or is_whole) and not new:
                return None
            first += [new[0].at - at] if new else []
        return max(first) if len(others) == RANKS - 1 else None

    job.wait(lambda: seconds("end", is_whole=True))
    found = {
        "begun": seconds("begin", is_whole=False),
        "ended": seconds("end", is_whole=False),
        "ended_by_three": seconds("end", is_whole=True),
    }
    return {name: value for name, value in found.items() if value is not None} | {"usual_step": usual}


def measure_spares(rounds: int, parameters: float, optimizer: str, seed: int) -> dict[str, object]:
    """Kill ranks of two jobs with spares alternately, and measure steps of a third one, without any."""
    chances = random.Random(seed)
    options = {"spares 1": ["--spares", "1"], "spares 1:warm": ["--spares", "1:warm"], "no spares": []}
    found: dict[str, list[dict[str, float]]] = {who: [] for who in options}
    environ = {"PYTHONPATH": os.pathsep.join(sys.path), "REIGEN_DEADLINE": "3600"}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        jobs = {}
        for who, more in options.items():
            directory = Path(name) / who.replace(" ", "-").replace(":", "-")
            launcher = [sys.executable, "-m", "reigen", "run", "-np", str(RANKS - 1), "--min-np", "1", *more]
            launcher += ["--blacklist-cooldown-range", "1", "1", sys.executable, str(SPARE_PROGRAM)]
            command = [*launcher, str(directory), str(parameters), optimizer]
            job = jobs[who] = stack.enter_context(training(directory, command, environ))
            job.wait(lambda job=job, more=more: len(job.marks()) == RANKS - 1 + bool(more))
            job.signal_processes(signal.SIGSTOP)
        for number in range(rounds):
            for who, job in jobs.items():
                job.signal_processes(signal.SIGCONT)
                found[who].append(kill_for_spare(job, chances) if options[who] else usual_step(job))
                job.signal_processes(signal.SIGSTOP)
            print(f"{number + 1}/{rounds}", {who: each[-1] for who, each in found.items()}, file=sys.stderr)
        for job in jobs.values():
            job.signal_processes(signal.SIGCONT)
    result: dict[str, object] = {"parameters": parameters, "optimizer": optimizer}
    for who, each in found.items():
        for part in each[0]:
            values = [round(1000 * one[part]) for one in each]
            result[f"{who}, {part}_ms"] = [statistics.median(values), min(values), max(values)]
    return result


def usual_step(job: TrainingJob) -> dict[str, float]:
    """Return how long a step is in a job in which nobody dies, as long after it goes on as the others are killed."""
    since = time.time()
    job.wait(lambda: time.time() - since > 2.0 and all(each[-1].at > since for each in job.marks().values()))
    return {"usual_step": median_step(list(job.marks().values()))}


def median_step(marks: list[list[Mark]]) -> float:
    """Return the seconds between the ends of the last eight steps of each of these ranks."""
    ends = [[mark.at for mark in each if mark.kind == "end"][-8:] for each in marks]
    return statistics.median(later - at for each in ends for at, later in itertools.pairwise(each))


def join_costs(steps: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Seconds that newcomers cost a member, and parts of them; ``steps`` as `elastic_join` writes them."""
    found = []
    for at in range(1, len(steps) - 4):
        if steps[at]["size"] <= steps[at - 1]["size"]:
            continue
        usual = statistics.median(step["seconds"] for step in steps[at + 2 : at + 8])
        longest, following = (steps[at + number]["seconds"] - usual for number in (0, 1))
        parts = steps[at]["parts"]
        agreement = parts["change_view"] - parts["rebuild"]
        found.append({**parts, "usual": usual, "pause": longest, "next_step": following, "agreement": agreement})
    return found


#: What the table of `kills` calls its jobs.
_KILLED = {
    "reigen": "Reigen, until the three others have ended a step",
    "torchrun": "`torchrun --max-restarts`, until four new processes have ended a step, with a checkpoint "
    "at every tenth step",
}
#: What the table of `spares` calls its jobs, and what is taken.
_SPARES = {"spares 1": "`--spares 1`", "spares 1:warm": "`--spares 1:warm`", "no spares": "3 ranks, no spare"}
_SPARE_PARTS = {
    "begun": "until the next step has begun",
    "ended": "until it has ended",
    "ended_by_three": "until three ranks with samples have ended a step",
    "usual_step": "a usual step",
}


def make_table(what: str, rounds: int, found: Mapping[str, Any], command: str, machine: Machine) -> Record:
    """Return what was found, as a table.

    Args:
        what: `kills`, `cost`, `join` or `spares`.
        rounds: turns of each job.
        found: what the function of that name has returned.
        command: what was run.
        machine: as it was before.
    """
    lines: dict[str, dict[str, Quantity | str]] = {}
    if what == "kills":
        columns = [Column("median", "s"), Column("most", "s"), Column("steps lost")]
        for who, title in _KILLED.items():
            lost = found[who]["steps_lost"]
            shown = f"{lost[0]} to {lost[-1]}" if lost[-1] else "none"
            times = {"median": found[who]["median_seconds"], "most": found[who]["most_seconds"]}
            lines[title] = {name: Quantity(value) for name, value in times.items()} | {"steps lost": shown}
    elif what == "cost":
        columns = [Column("median", "ms"), Column("least", "ms"), Column("of static, by round")]
        for who, each in found.items():
            lines[who] = {
                "median": Quantity(each["median_ms"], 3),
                "least": Quantity(each["least_ms"], 3),
                "of static, by round": Quantity(each["median_ratio"], 3),
            }
    elif what == "join":
        columns = [Column("a step", "s"), Column("pause", "s"), Column("what it is made of")]
        ours = {"usual_ms", "pause_ms"}
        parts = {name: each for name, each in found.items() if name.endswith("_ms") and name not in ours}
        usual, *_ = found["usual_ms"]
        pause, low, high = (each / 1000 for each in found["pause_ms"])
        lines[f"{found['parameters']:g} million, {found['optimizer']}"] = {
            "a step": Quantity(usual / 1000, 3),
            "pause": Quantity(pause, 3, low, high),
            "what it is made of": ", ".join(
                f"{name.removesuffix('_ms')} {each[0] / 1000:.3f}" for name, each in parts.items()
            ),
        }
    else:
        columns = [Column(name, "s") for name in _SPARES.values()]
        for part, title in _SPARE_PARTS.items():
            values = {name: found.get(f"{who}, {part}_ms") for who, name in _SPARES.items()}
            lines[title] = {
                name: Quantity(each[0] / 1000, 2, each[1] / 1000, each[2] / 1000)
                for name, each in values.items()
                if each is not None
            }
    titles = {"kills": f"one of {RANKS} ranks is killed", "cost": "a step", "join": "parameters", "spares": "a death"}
    conditions = f"{RANKS} ranks, {rounds} rounds"
    if what in {"join", "spares"}:
        conditions += f"; {found['parameters']:g} million parameters, {found['optimizer']}"
    return make_record(command, conditions, titles[what], columns, lines, machine, {"torch": torch.__version__})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "cost", "join", "spares"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parameters", type=float, default=25, help="of a model that newcomers get, in millions")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd", help="of that model; sgd with momentum")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the jobs end, too
    before = this_machine()
    if chosen.what == "join":
        found = measure_joins(chosen.rounds, chosen.parameters, chosen.optimizer)
    elif chosen.what == "spares":
        found = measure_spares(chosen.rounds, chosen.parameters, chosen.optimizer, chosen.seed)
    else:
        found = measure_kills(chosen.rounds, chosen.seed) if chosen.what == "kills" else measure_cost(chosen.rounds)
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "load": before.load,
    }
    if chosen.json is not None:
        command = f"python -m benchmarks.elastic {chosen.what} --rounds {chosen.rounds}"
        make_table(chosen.what, chosen.rounds, found, command, before).save(chosen.json)
    print(json.dumps({"what": chosen.what, "rounds": chosen.rounds, **found, **machine}))


if __name__ == "__main__":
    main()
