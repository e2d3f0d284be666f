"""The parameter server where the network is the limit: stand-in machines whose connections have a rate (needs root).

    python -m benchmarks.kv_wire                                          everything; about 17 minutes
    python -m benchmarks.kv_wire wire --rates 1000 --layouts 2w2s
    python -m benchmarks.kv_wire compression --layouts together
    python -m benchmarks.kv_wire wire --table docs/data/records/kv-wire.json
    python -m benchmarks.kv_wire compression --table docs/data/records/compression-gain.json

``wire``: pushpull of one array and of ResNet-50's gradients beside what must go through the narrowest connection in one
direction, at the limited rate, in which headers count (an Ethernet frame of 1514 bytes carries 1448 of data). What is
pushed and what comes back go in different directions, so both may take the whole rate at the same time. Plain sockets
exchange as many bytes, alternating with it (`benchmarks/plain_star.py`): what the machines and their TCP allow.

``compression``: how many times as fast an exchange is with codes than without: where servers add up (gradients come
back, as codes too) and where they update weights (which come back as they are). On machines of their own servers
send while they receive, so that weights that come back hide what is pushed, coded or not: compression gains nothing
there. Where each machine has a worker and a server, both go the same way, and it does.

All machines share this one's processors. Which of the two was the limit, the part of the wire says.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks import plain_star
from benchmarks.harness.crew import Crew, CrewSpec
from benchmarks.harness.figures import Timeline
from benchmarks.harness.machine import Machine
from benchmarks.harness.record import Column, Line, Quantity, Record, make_record
from benchmarks.harness.report import Document, Row, Verdict, format_seconds, markdown, show
from benchmarks.harness.schedule import Mode, about, alternate, crews, to_stderr
from benchmarks.harness.servers import Seat, parameter_servers, reigen_role, worker_starts
from benchmarks.harness.sizes import format_size, parse_size, resnet50_counts
from benchmarks.harness.work import Case
from tests.lab import Hosts, Unavailable

PROGRAM = Path(__file__).with_name("kv_reigen.py")
SOCKETS_PROGRAM, SOCKETS = Path(plain_star.__file__), "plain sockets"
PARTS = ("wire", "compression")
GRADIENTS, GRADIENT_BYTES = "ResNet-50, 161 gradients", 4 * sum(resnet50_counts())
PLAIN, CODECS, UPDATING = "plain", ("2bit", "1bit", "fp16"), "sgd"
_WARMUP = 2
_WIRE_PART = 0.9
#: What each codec is held to: both directions coded, and where weights come back.
_BUDGETS = {"2bit": (6.0, 1.7)}


@dataclass(frozen=True)
class Layout:
    """Which machines there are.

    Attributes:
        name: on the command line.
        words: in tables.
        num_workers: each on a machine.
        num_servers: each on a machine.
        is_shared: the servers' machines are the workers'.
    """

    name: str
    words: str
    num_workers: int
    num_servers: int
    is_shared: bool = False

    @property
    def num_hosts(self) -> int:
        """How many machines that is."""
        return self.num_workers if self.is_shared else self.num_workers + self.num_servers

    def busiest_bytes(self, nbytes: int) -> float:
        """What must go through the busiest connection, in each direction, for a pushpull of so many bytes."""
        part = nbytes / self.num_servers
        if self.is_shared:  # of a worker to the others' servers, and of the server to the others' workers
            return part * (self.num_servers - 1) + part * (self.num_workers - 1)
        return max(nbytes, part * self.num_workers)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("2w1s", "2 workers, 1 server", 2, 1),
        Layout("2w2s", "2 workers, 2 servers", 2, 2),
        Layout("together", "2 hosts, a worker and a server each", 2, 2, is_shared=True),
    )
}


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        layouts: machines.
        rates_bits: bits a second of each host's connection, in each direction.
        wire_bytes: the array of the part "wire".
        slow_rate_bits: the same for compression.
        slow_bytes: the array that is compressed.
        rounds: turns of each mode.
        turn_seconds: about how long a turn is; no turn has less than three operations.
    """

    layouts: tuple[Layout, ...]
    rates_bits: tuple[float, ...]
    wire_bytes: int
    slow_rate_bits: float
    slow_bytes: int
    rounds: int
    turn_seconds: float


@dataclass
class Counted:
    """A crew, and what the machines' connections carried in its turns.

    Attributes:
        crew: has the turns.
        hosts: all machines.
        busiest_bytes: what the busiest machine sent or received in an operation, headers included, on the average.
        num_sent_again: segments of TCP in an operation, of all machines.
    """

    crew: Crew
    hosts: Hosts
    _num_operations: int = 0
    _moved: dict[tuple[str, str], int] = field(default_factory=dict)
    _again: int = 0

    def open(self, key: str, case: Case, warmup: int) -> list[Timeline]:
        """See `Crew.open`."""
        return self.crew.open(key, case, warmup)

    def turn(self, key: str, settle: int, iterations: int) -> list[Timeline]:
        """See `Crew.turn`."""
        before = [(host.counters, host.num_retransmissions) for host in self.hosts]
        timelines = self.crew.turn(key, settle, iterations)
        self._num_operations += settle + iterations
        for host, (counters, again) in zip(self.hosts, before, strict=True):
            moved = host.counters - counters
            for way, nbytes in (("sent", moved.sent_bytes), ("received", moved.received_bytes)):
                self._moved[host.name, way] = self._moved.get((host.name, way), 0) + nbytes
            self._again += host.num_retransmissions - again
        return timelines

    def shut(self, key: str) -> None:
        """See `Crew.shut`."""
        self.crew.shut(key)

    @property
    def busiest_bytes(self) -> float:
        return max(self._moved.values(), default=0) / max(1, self._num_operations)

    @property
    def num_sent_again(self) -> float:
        return self._again / max(1, self._num_operations)


class Bench:
    """One run."""

    def __init__(self, settings: Settings, command: str) -> None:
        self.settings = settings
        self.document = Document(command, 2, settings.rounds)
        self.tables: dict[str, list[list[str]]] = {part: [] for part in PARTS}
        self.lines: dict[str, list[Line]] = {part: [] for part in PARTS}

    def wire(self) -> None:
        """The array and the gradients, at each rate."""
        for layout in self.settings.layouts:
            with self._machines(layout, [PLAIN, SOCKETS]) as (hosts, came):
                for rate in self.settings.rates_bits:
                    shape(hosts, rate)
                    for case in (Case(PLAIN, self.settings.wire_bytes, count=1), Case(PLAIN)):
                        self._fill(layout, rate, case, hosts, came)

    def compression(self) -> None:
        """The array, with all codecs and with none, where servers add up, and where they update."""
        rate, nbytes = self.settings.slow_rate_bits, self.settings.slow_bytes
        for layout in self.settings.layouts:
            for suffix, what in (("", "servers add up"), (f"+{UPDATING}", "servers update weights")):
                uses = [plain(suffix), *(codec + suffix for codec in CODECS)]
                with self._machines(layout, uses) as (hosts, came):
                    shape(hosts, rate)
                    modes = {name: Counted(crew, hosts) for name, crew in came.items()}
                    title = f"{layout.words}, {what}, {rate / 1e6:g} Mbit/s, {format_size(nbytes)}"
                    took = self._alternate(title, nbytes, modes, {use: Case(use, nbytes, count=1) for use in uses})
                    self._compare(layout, what, suffix, took, modes)

    @contextmanager
    def _machines(self, layout: Layout, uses: Sequence[str]) -> Iterator[tuple[Hosts, Mapping[str, Crew]]]:
        """Machines, and a job with servers of its own for each use."""
        with tempfile.TemporaryDirectory(prefix="reigen-bench-") as name, ExitStack() as stack:
            hosts = stack.enter_context(Hosts(layout.num_hosts, shared=[Path(name)], same_uptime=True))
            seats = [Seat(host.address, "eth0", host.entry(Path.cwd()), host.network) for host in hosts]
            servers, specs = seats[-layout.num_servers :], []
            for use in uses:
                program, role = (SOCKETS_PROGRAM, plain_star.role) if use == SOCKETS else (PROGRAM, reigen_role)
                common = stack.enter_context(parameter_servers(layout.num_workers, servers[0], servers, role))
                starts = worker_starts(plain_star.variables(common, servers), seats[: layout.num_workers])
                specs.append(CrewSpec(use, str(program), layout.num_workers, starts=starts, directory=Path(name)))
            came, failures = stack.enter_context(crews(specs, about(layout.words, to_stderr)))
            self.document.skipped += [f"{use} is left out: {reason}" for use, reason in failures.items()]
            yield hosts, came

    def _fill(self, layout: Layout, rate: float, case: Case, hosts: Hosts, came: Mapping[str, Crew]) -> None:
        nbytes = case.nbytes * case.count or GRADIENT_BYTES
        what = f"one array of {format_size(nbytes)}" if case.count else GRADIENTS
        title = f"{what}, {layout.words}, {rate / 1e6:g} Mbit/s"
        counted = {name: Counted(crew, hosts) for name, crew in came.items()}
        needed = layout.busiest_bytes(nbytes)
        took = self._alternate(title, nbytes, counted, dict.fromkeys(counted, case))
        for name, seconds in took.items():
            part = 8 * needed / rate / seconds
            moved = counted[name].busiest_bytes / needed
            figures = [format_seconds(seconds), f"{part:.3f}", f"{moved:.3f}", f"{counted[name].num_sent_again:.0f}"]
            self.tables["wire"].append([what, layout.words, f"{rate / 1e6:g} Mbit/s", _HOW[name], *figures])
            if name == PLAIN:
                counts = (moved, counted[name].num_sent_again)
                self.lines["wire"].append(wire_line(what, layout.words, rate, seconds, part, *counts))
                self._verdict(f"{title}: part of the wire's limit", part, _WIRE_PART)
        if PLAIN in took and SOCKETS in took:
            self._verdict(f"{title}: plain sockets / reigen", took[SOCKETS] / took[PLAIN], _WIRE_PART)

    def _compare(
        self, layout: Layout, what: str, suffix: str, took: Mapping[str, float], modes: Mapping[str, Counted]
    ) -> None:
        base = plain(suffix)
        if base in took:
            self.lines["compression"].append(gain_line(layout.words, what, base, took))
        for use, seconds in took.items():
            codec = use.partition("+")[0] if use != base else "none"
            moved = f"{modes[use].busiest_bytes / 1e6:.2f} MB"
            cells = [layout.words, what, codec, format_seconds(seconds), moved]
            self.tables["compression"].append([*cells, f"{took[base] / seconds:.2f}" if base in took else ""])
            if codec in _BUDGETS and base in took and (layout.is_shared or not suffix):
                budget = _BUDGETS[codec][bool(suffix)]
                self._verdict(f"{layout.words}, {what}: none / {codec}", took[base] / seconds, budget)

    def _alternate(
        self, title: str, nbytes: int, teams: Mapping[str, Counted], cases: Mapping[str, Case]
    ) -> dict[str, float]:
        modes = [Mode(name, team, cases[name]) for name, team in teams.items()]
        settings = self.settings
        outcome = alternate(modes, settings.rounds, settings.turn_seconds, about(title, to_stderr), warmup=_WARMUP)
        self.document.rows.append(Row(title, nbytes, outcome.summaries, next(iter(teams), ""), outcome.failures))
        return {name: summary.median for name, summary in outcome.summaries.items()}

    def _verdict(self, claim: str, value: float, budget: float) -> None:
        self.document.verdicts.append(Verdict(claim, value, budget, at_least=True))


def plain(suffix: str) -> str:
    """The use without compression."""
    return suffix.removeprefix("+") or PLAIN


def shape(hosts: Hosts, rate_bits: float) -> None:
    """Give every machine's connection a rate."""
    for host in hosts:
        host.shape(rate_bits)


# -- tables of docs/data/records --------------------------------------------------------------------------------------

_WITHOUT = "without codes"
_COLUMNS = {
    "wire": ("machines", "each", "time", "part of the wire", "bytes on it / needed", "segments retransmitted"),
    "compression": ("", *CODECS, _WITHOUT),
}
_TITLES = {"wire": "what", "compression": "machines"}


def wire_line(
    what: str, machines: str, rate_bits: float, seconds: float, part: float, moved: float, num_sent_again: float
) -> Line:
    """Return a line of the part "wire", of the columns above."""
    figures = (Quantity(part, 3), Quantity(moved, 3), Quantity(num_sent_again, 0))
    cells = (machines, f"{rate_bits / 1e6:g} Mbit/s", _duration(seconds), *figures)
    return Line(what, dict(zip(_COLUMNS["wire"], cells, strict=True)))


def gain_line(machines: str, what: str, base: str, took: Mapping[str, float]) -> Line:
    """Return a line of the part "compression": how many times as fast each codec is as ``base``, which has none."""
    ratios = {use.partition("+")[0]: took[base] / seconds for use, seconds in took.items() if use != base}
    gains = {codec: Quantity(ratio, 1 if ratio >= 10 else 2) for codec, ratio in ratios.items()}
    return Line(machines, {"": what, **gains, _WITHOUT: _duration(took[base])})


def make_table(part: str, lines: Sequence[Line], command: str, settings: Settings, machine: Machine) -> Record:
    """Return what was found of a part, as a table."""
    conditions = f"stand-in hosts that share this machine, medians of {settings.rounds} rounds"
    if part == "compression":
        conditions += f"; {settings.slow_rate_bits / 1e6:g} Mbit/s in each direction, one array of "
        conditions += format_size(settings.slow_bytes)
    return make_record(command, conditions, _TITLES[part], [Column(name) for name in _COLUMNS[part]], lines, machine)


def _duration(seconds: float) -> Quantity:
    return Quantity(seconds, unit="s") if seconds >= 1 else Quantity(1e3 * seconds, 0, unit="ms")


# -- the command ------------------------------------------------------------------------------------------------------

_HOW = {PLAIN: "reigen", SOCKETS: SOCKETS}
_HEADINGS = {
    "wire": ("what", "machines", "each", "how", "time", "part of the wire", "bytes on it / needed", "sent again"),
    "compression": ("machines", "", "codec", "time", "busiest connection", "times as fast"),
}


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.table is not None and len(chosen.parts) != 1:
        parser.error("--table needs one part: wire or compression")
    command = shlex.join(["python", "-m", "benchmarks.kv_wire", *arguments])
    settings = Settings(
        tuple(LAYOUTS[name] for name in chosen.layouts.split(",")),
        tuple(1e6 * float(rate) for rate in chosen.rates.split(",")),
        parse_size(chosen.size),
        1e6 * chosen.slow_rate,
        parse_size(chosen.slow_size),
        chosen.rounds,
        chosen.seconds,
    )
    bench = Bench(settings, command)
    try:
        for part in chosen.parts or PARTS:
            {"wire": bench.wire, "compression": bench.compression}[part]()
    except Unavailable as error:
        print(f"there can be no stand-in machines here: {error}", file=sys.stderr)
        return 1
    show(bench.document, command, Console(width=140))
    for part, lines in bench.tables.items():
        if lines:
            print(f"\n{markdown(_HEADINGS[part], lines)}")
    if chosen.json is not None:
        bench.document.save(chosen.json)
    if chosen.table is not None:
        [part] = chosen.parts
        plain_command = re.sub(r" --(?:json|table)[= ]\S+", "", command)
        make_table(part, bench.lines[part], plain_command, settings, bench.document.machine).save(chosen.table)
    return 1 if bench.document.has_failed("") else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), metavar="A,B", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--rates", default="200,1000", metavar="A,B", help="Mbit/s, of wire (200,1000)")
    parser.add_argument("--size", default="100MiB", metavar="BYTES", help="the array, of wire (100MiB)")
    parser.add_argument("--slow-rate", type=float, default=100.0, metavar="R", help="Mbit/s, of compression (100)")
    parser.add_argument("--slow-size", default="25MiB", metavar="BYTES", help="the array, of compression (25MiB)")
    parser.add_argument("--rounds", type=int, default=2, metavar="R", help="turns of each mode (2)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="length of a turn (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything that was found there")
    parser.add_argument("--table", type=Path, metavar="FILE", help="also write the table there, of one part")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
