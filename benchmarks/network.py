"""Reigen and torch's Gloo over several hosts: stand-in machines whose network has a rate and a delay (needs root).

    python -m benchmarks.network                       everything; about 15 minutes
    python -m benchmarks.network allreduce --hosts 2 --rates 1000 --delays 0
    python -m benchmarks.network hierarchy overlap

The processors are those of this machine, shared by all hosts, so rates are chosen that leave them time. What is sent is
compared with the wire's limit: 2 (n-1) / n bytes for each byte of data and host, at the rate, in which headers count
(an Ethernet frame of 1514 bytes carries 1448 of data), and with plain connections over which the same bytes go, in two
ways (plain_tcp.py): the pipelined one waits for what a sum must wait for, and agrees with nobody on anything. Where
there is a delay, a process carries the packets.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from benchmarks.harness.crew import Crew, CrewSpec, Start
from benchmarks.harness.peers import DDP, GLOO, find_peer
from benchmarks.harness.report import Document, Row, Verdict, show
from benchmarks.harness.schedule import Mode, about, alternate, crews, to_stderr
from benchmarks.harness.sizes import format_size, parse_size
from benchmarks.harness.work import Case
from reigen.cluster.environ import RANK_VARIABLES, RENDEZVOUS_VARIABLE, SECRET_VARIABLE
from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.topology import Topology
from reigen.net.auth import SECRET_BYTES
from tests.lab import Hosts, Unavailable

REIGEN, SPREAD, TRAINING, SILENT = "reigen", "reigen, two ranks a host", "reigen training", "no communication"
PLAIN, PIPELINED = "plain TCP", "plain TCP, pipelined"
SUMS = "benchmarks.programs.allreduce"
BACKWARD, STEP, COMMUNICATION = "backward pass", "step without communication", "communication"
#: The model of the overlap: so many layers of so many bytes, weight and bias.
MODEL, NUM_LAYERS, LAYER_BYTES = "stack", 24, 4 * 1024 * 1025
SMALL, LARGE = 1 << 10, 25 << 20
LOOPBACK_SIZES = ("64KiB", "256KiB", "1MiB", "4MiB", "25MiB", "100MiB")
_JOINT_BYTES = 1 << 20
_BYTES_OPERATIONS = 10
PEERS_VARIABLE = "PLAIN_TCP_PEERS"  # of plain_tcp.py
_MASTER_PORT = "29500"
_PAYLOAD_PART = 1448 / 1514


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        num_hosts: of each network.
        rates_bits: bits a second of each host's connection, in each direction.
        delays_seconds: of each packet, one way.
        rounds: turns of each mode.
        turn_seconds: about how long a turn is.
        congestion_control: of TCP, None for the kernel's default.
    """

    num_hosts: tuple[int, ...]
    rates_bits: tuple[float, ...]
    delays_seconds: tuple[float, ...]
    rounds: int
    turn_seconds: float
    congestion_control: str | None


class Bench:
    """One run: stand-in machines, crews on them, and what was found."""

    def __init__(self, settings: Settings, command: str) -> None:
        self.settings = settings
        self.document = Document(command, max(settings.num_hosts), settings.rounds)

    def allreduce(self) -> None:
        """1 KiB and 25 MiB over each number of hosts, at each rate and delay."""
        for num_hosts in self.settings.num_hosts:
            for delay in self.settings.delays_seconds:
                with self._machines(num_hosts, delay) as place:
                    specs = [place.reigen(REIGEN, SUMS), place.peer(GLOO), place.plain()]
                    with self._crews(specs) as came:
                        for rate in self.settings.rates_bits:
                            place.shape(rate, delay)
                            network = f"{num_hosts} hosts, {rate / 1e6:g} Mbit/s, {delay * 1e3:g} ms"
                            small, large = (self._sum(nbytes, network, came) for nbytes in (SMALL, LARGE))
                            self._judge_sums(network, small, large, limit_seconds(LARGE, num_hosts, rate))

    def hierarchy(self) -> None:
        """Bytes on the wire of two hosts with one rank each, and with two each."""
        with self._machines(2, 0.0) as place:
            specs = [place.reigen(REIGEN, SUMS), place.reigen(SPREAD, SUMS, 2)]
            with self._crews(specs) as came:
                sent = {name: place.bytes_sent(crew) for name, crew in came.items()}
        for name, parts in sent.items():
            shown = ", ".join(f"{part:.4f}" for part in parts)
            self.document.notes.append(f"25 MiB, 2 hosts: {name}: the hosts send {shown} bytes for a byte of data")
        if {REIGEN, SPREAD} <= sent.keys():
            claim = "25 MiB, 2 hosts: bytes on the wire, two ranks a host / one"
            self._verdict(claim, sum(sent[SPREAD]) / sum(sent[REIGEN]), 1.005, at_least=False)

    def overlap(self) -> None:
        """A training step at a rate at which communication takes about as long as the backward pass."""
        with self._machines(2, 0.0) as place:
            specs = [
                place.on_hosts(CrewSpec(SILENT, "benchmarks.programs.alone", 2)),
                place.reigen(TRAINING, "benchmarks.programs.train"),
                place.peer(DDP),
                place.reigen(REIGEN, SUMS),
            ]
            with self._crews(specs) as came:
                backward = Mode(BACKWARD, came[SILENT], Case(f"{MODEL}/backward"), joint=False)
                found = alternate(
                    [backward], 3, self.settings.turn_seconds, about("backward pass", to_stderr)
                ).summaries
                rate = 8 * NUM_LAYERS * LAYER_BYTES / _PAYLOAD_PART / found[BACKWARD].median
                place.shape(rate)
                wanted = (
                    (STEP, SILENT, Case(f"{MODEL}/alone")),
                    (COMMUNICATION, REIGEN, Case("buckets", LAYER_BYTES, count=NUM_LAYERS)),
                    (REIGEN, TRAINING, Case(f"{MODEL}/reigen")),
                    (DDP, DDP, Case(f"{MODEL}/default")),
                )
                modes = [
                    Mode(name, came[crew], case, joint=crew != SILENT) for name, crew, case in wanted if crew in came
                ]
                took = self._alternate(f"training, 2 hosts, {rate / 1e6:.0f} Mbit/s", 0, [backward, *modes])
        self._judge_overlap(took)

    def loopback(self) -> None:
        """Without limits, through TCP on one host."""
        specs = [CrewSpec(REIGEN, SUMS, 2, variables={"REIGEN_PLANE": "tcp"}), find_peer(GLOO, 2)]
        with self._crews(specs) as came:
            for size in LOOPBACK_SIZES:
                took = self._sum(parse_size(size), "loopback", came)
                if {REIGEN, GLOO} <= took.keys():
                    self._verdict(f"{size}, loopback: gloo / reigen", took[GLOO] / took[REIGEN], 1.0, at_least=True)

    @contextmanager
    def _machines(self, num_hosts: int, delay_seconds: float) -> Iterator[Place]:
        with tempfile.TemporaryDirectory(prefix="reigen-bench-") as name, ExitStack() as stack:
            directory = Path(name)
            network: Literal["switch", "bridge"] = "switch" if delay_seconds else "bridge"
            control = self.settings.congestion_control
            hosts = Hosts(num_hosts, network=network, shared=[directory], congestion_control=control, same_uptime=True)
            yield Place(stack.enter_context(hosts), directory, stack)

    @contextmanager
    def _crews(self, specs: Sequence[CrewSpec | str]) -> Iterator[dict[str, Crew]]:
        self.document.skipped += [spec for spec in specs if isinstance(spec, str)]
        with crews([spec for spec in specs if isinstance(spec, CrewSpec)], to_stderr) as (came, failures):
            self.document.skipped += [f"{name} is left out: {reason}" for name, reason in failures.items()]
            for crew in came.values():
                self.document.versions |= crew.versions
            yield came

    def _sum(self, nbytes: int, where: str, came: Mapping[str, Crew]) -> dict[str, float]:
        joint = nbytes >= _JOINT_BYTES  # else each call counts as its caller sees it
        modes = [Mode(name, crew, Case("ordinary", nbytes), joint=joint) for name, crew in came.items()]
        if PLAIN in came and joint:
            modes.append(Mode(PIPELINED, came[PLAIN], Case("pipelined", nbytes)))
        return self._alternate(f"{format_size(nbytes)}, {where}", nbytes, modes)

    def _alternate(self, title: str, nbytes: int, modes: Sequence[Mode]) -> dict[str, float]:
        outcome = alternate(modes, self.settings.rounds, self.settings.turn_seconds, about(title, to_stderr))
        self.document.rows.append(Row(title, nbytes, outcome.summaries, REIGEN, outcome.failures))
        return {name: summary.median for name, summary in outcome.summaries.items()}

    def _judge_sums(
        self, network: str, small: Mapping[str, float], large: Mapping[str, float], limit_seconds: float
    ) -> None:
        if REIGEN in large:
            share = limit_seconds / large[REIGEN]
            self._verdict(f"25 MiB, {network}: part of the wire's limit", share, 0.9, at_least=True)
        for plain in (PLAIN, PIPELINED):
            if {REIGEN, plain} <= large.keys():
                self._verdict(f"25 MiB, {network}: {plain} / reigen", large[plain] / large[REIGEN], 0.9, at_least=True)
        if {REIGEN, GLOO} <= large.keys():
            # Where both fill the wire they are equal, but for chance.
            self._verdict(f"25 MiB, {network}: gloo / reigen", large[GLOO] / large[REIGEN], 0.99, at_least=True)
        if {REIGEN, GLOO} <= small.keys():
            self._verdict(f"1 KiB, {network}: reigen / gloo", small[REIGEN] / small[GLOO], 2.0, at_least=False)

    def _judge_overlap(self, took: Mapping[str, float]) -> None:
        if not {BACKWARD, STEP, COMMUNICATION} <= took.keys():
            return
        for name in (REIGEN, DDP):
            if name in took:
                whole = took[name] / max(took[STEP], took[COMMUNICATION])
                self._verdict(f"training: step of {name} / the larger of {STEP}, {COMMUNICATION}", whole, 1.25)
                other = took[STEP] - took[BACKWARD]
                part = (took[name] - other) / max(took[BACKWARD], took[COMMUNICATION])
                self._verdict(f"training: the same for {name}, without forward pass and update", part, 1.25)

    def _verdict(self, claim: str, value: float, budget: float, *, at_least: bool = False) -> None:
        self.document.verdicts.append(Verdict(claim, value, budget, at_least))


class Place:
    """Stand-in machines that jobs are to run on.

    Args:
        hosts: the machines.
        directory: one that all of them see.
        stack: what ends the jobs' services.
    """

    def __init__(self, hosts: Hosts, directory: Path, stack: ExitStack) -> None:
        self._hosts, self._directory, self._stack = hosts, directory, stack

    def shape(self, rate_bits: float, delay_seconds: float = 0.0) -> None:
        """Give every machine's connection a rate and a delay."""
        for host in self._hosts:
            host.shape(rate_bits, delay_seconds)

    def reigen(
        self, name: str, program: str, ranks_a_host: int = 1, more_variables: Mapping[str, str] | None = None
    ) -> CrewSpec:
        """A job of Reigen with a rendezvous service on the first machine."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with self._hosts[0].network():
            server = ControlService(secret, self._hosts[0].address)
        self._stack.callback(server.close)
        server.start()
        variables = {RENDEZVOUS_VARIABLE: server.address, SECRET_VARIABLE: secret.hex(), **(more_variables or {})}
        spec = CrewSpec(name, program, len(self._hosts) * ranks_a_host, variables=variables)
        return self.on_hosts(spec, ranks_a_host)

    def peer(self, name: str) -> CrewSpec | str:
        """A peer with one rank on each machine; or why it is left out."""
        spec = find_peer(name, len(self._hosts))
        return spec if isinstance(spec, str) else self.on_hosts(spec)

    def plain(self) -> CrewSpec:
        """Connections over which the same bytes go."""
        addresses = ",".join(host.address for host in self._hosts)
        program = str(Path(__file__).with_name("plain_tcp.py"))
        return self.on_hosts(CrewSpec(PLAIN, program, len(self._hosts), variables={PEERS_VARIABLE: addresses}))

    @property
    def num_retransmissions(self) -> int:
        """How many TCP segments the machines have sent again until now."""
        return sum(host.num_retransmissions for host in self._hosts)

    def on_hosts(self, spec: CrewSpec, ranks_a_host: int = 1) -> CrewSpec:
        """The same processes on the machines, consecutive ranks side by side."""
        starts = []
        for rank in range(spec.num_ranks):
            cross, local = divmod(rank, ranks_a_host)
            place = Topology(rank, spec.num_ranks, local, ranks_a_host, cross, len(self._hosts))
            variables = dict(zip(RANK_VARIABLES, map(str, astuple(place)), strict=True))
            variables |= {"MASTER_ADDR": self._hosts[0].address, "MASTER_PORT": _MASTER_PORT}
            variables |= {"GLOO_SOCKET_IFNAME": "eth0", **spec.variables}
            starts.append(Start(self._hosts[cross].entry(Path.cwd()), variables))
        return replace(spec, starts=tuple(starts), directory=self._directory)

    def bytes_sent(self, crew: Crew) -> list[float]:
        """What each machine sends for a byte of data of a sum of 25 MiB, headers included."""
        crew.open("bytes", Case("ordinary", LARGE), 2)
        before = [host.counters for host in self._hosts]
        crew.turn("bytes", 0, _BYTES_OPERATIONS)
        moved = [host.counters - earlier for host, earlier in zip(self._hosts, before, strict=True)]
        return [counted.sent_bytes / _BYTES_OPERATIONS / LARGE for counted in moved]


def limit_seconds(nbytes: int, num_hosts: int, rate_bits: float) -> float:
    """What a sum over hosts takes at least: each sends 2 (n-1) / n of its data at so many bits a second."""
    return 2 * (num_hosts - 1) / num_hosts * nbytes * 8 / rate_bits


PARTS = ("allreduce", "hierarchy", "overlap", "loopback")


def main(arguments: Sequence[str]) -> int:
    chosen = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "benchmarks.network", *arguments])
    rates, delays = (tuple(1e6 * rate for rate in chosen.rates), tuple(1e-3 * delay for delay in chosen.delays))
    control = chosen.congestion_control or None
    bench = Bench(Settings(chosen.hosts, rates, delays, chosen.rounds, chosen.seconds, control), command)
    if set(chosen.parts) == {"loopback"}:
        bench.document.num_ranks = 2
    measures = {
        "allreduce": bench.allreduce,
        "hierarchy": bench.hierarchy,
        "overlap": bench.overlap,
        "loopback": bench.loopback,
    }
    try:
        for part in chosen.parts or PARTS:
            measures[part]()
    except Unavailable as error:
        print(f"there can be no stand-in machines here: {error}", file=sys.stderr)
        return 1
    show(bench.document, command, Console(width=140))
    if chosen.json is not None:
        bench.document.save(chosen.json)
    return 1 if bench.document.has_failed(REIGEN) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--hosts", type=_numbers(int), default=(2, 3, 4), metavar="N,M", help="how many (2,3,4)")
    parser.add_argument(
        "--rates", type=_numbers(float), default=(200.0, 1000.0), metavar="A,B", help="Mbit/s (200,1000)"
    )
    parser.add_argument("--delays", type=_numbers(float), default=(0.0, 5.0), metavar="A,B", help="ms, one way (0,5)")
    parser.add_argument("--rounds", type=int, default=3, metavar="R", help="turns of each mode (3)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="length of a turn (2)")
    parser.add_argument(
        "--congestion-control", default="cubic", metavar="NAME", help="of TCP; empty: the kernel's (cubic)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found there, too")
    return parser


def _numbers(kind: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    return lambda text: tuple(kind(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
