"""Cost of the control plane with many ranks: what rank 0 does for each negotiation.

    python -m benchmarks.control_plane negotiate --ranks 8,128,1000,9900
    python -m benchmarks.control_plane membership --ranks 1000,4000,9900
    python -m benchmarks.control_plane start --hosts 16 --ranks-per-host 8 --rounds 2
    python -m benchmarks.control_plane membership --table docs/data/records/control-membership.json

``negotiate``: rank 0 is real: its transport with a connection for each rank that talks to it, its coordinator, its
messages. The other ranks are state machines of this process at the other ends of the connections. What counts is the
processor time of rank 0 alone, from reading the first message to writing the last one: for tensors that are new, and
for those that the response cache knows. The time that messages need on their way is in none of the figures.

``membership``: the table of the control service alone, in processor time for all ranks that register and leave, each
in a turn of its own; and the service itself, to which all ranks connect over loopback, leave at once as fast as they
can, and count what they are told of each other meanwhile.

``start`` (needs root): jobs of `reigen run` on stand-in hosts (`benchmarks/programs/control_plane.py`), alternately
with a tree and with a star: the time of a start by its phases, what passes rank 0 in a step, and how long it takes
until all ranks know that one was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shlex
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from benchmarks.harness.machine import Machine, this_machine
from benchmarks.harness.record import Column, Line, Quantity, Record, make_record
from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.membership.messages import MAX_MESSAGE_BYTES, MEMBER_CODEC, LeaveJob, RegisterMember
from reigen.cluster.membership.table import GroupTable
from reigen.engine.control_channel import ControlChannel
from reigen.engine.control_tree import ControlTree
from reigen.engine.coordinator import Coordinator
from reigen.engine.messages import Announcement, Operation, OperationKind, Report, decode_announcements, encode
from reigen.engine.rank_controller import RankController
from reigen.engine.relay_transport import RelayTransport
from reigen.engine.report_merger import ReportMerger
from reigen.errors import WireError
from reigen.net.auth import ClientHandshake, Identity, ProcessRole, ServerHandshake
from reigen.net.connection import Connection, StreamProtocol, open_connection
from reigen.net.tcp_star import TcpStarTransport
from tests.lab import Hosts

_ROOT = Path(__file__).resolve().parents[1]
_SECRET = bytes(range(32))
_MAX_PAYLOAD_BYTES = 1 << 20
_DEADLINE_SECONDS = 600.0
_WAIT_SECONDS = 60.0
_THRESHOLD_BYTES = 128 << 20
_CACHE_CAPACITY = 1024
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class NegotiationCost:
    """What one negotiation costs.

    Attributes:
        ranks: of the job.
        layout: ``star``, or ``tree``.
        tensors: how many are negotiated at once.
        cached: whether the response cache knows them.
        cpu_ms: processor time of rank 0, in milliseconds.
        relay_cpu_ms: that of the relay with the most children.
        messages_in: to rank 0; ``messages_out``: from it; ``bytes_in`` and ``bytes_out`` are theirs.
    """

    ranks: int
    layout: str
    tensors: int
    cached: bool
    cpu_ms: float
    relay_cpu_ms: float
    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int


class RealRelay:
    """The transport of one relay, and the other ends of its connections."""

    def __init__(self, rank: int, tree: ControlTree) -> None:
        self.rank, self._children = rank, tree.children(rank)
        self._ends, own_ends = _connect((0, *self._children))
        parent = own_ends.pop(0)
        self._transport = RelayTransport({tree.parent(rank): parent, **own_ends}, rank, tree)
        #: what the relay and its children report next
        self.reports: dict[int, bytes] = {}

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()
        for end in self._ends.values():
            end.close()

    def negotiate(self, announced: bytes) -> float:
        """Pass on what the ranks below report, and the answer; returns the relay's processor time in seconds."""
        for child in self._children:
            self._ends[child].send(self.reports[child], time.monotonic() + _WAIT_SECONDS)
        begin = time.thread_time()
        self._transport.send(self.reports[self.rank])
        while self._transport.next_release() is not None:
            self._transport.receive()
        seconds = time.thread_time() - begin
        self._ends[0].receive(time.monotonic() + _WAIT_SECONDS)
        self._ends[0].send(announced, time.monotonic() + _WAIT_SECONDS)
        begin = time.thread_time()
        while not self._transport.receive():
            pass
        seconds += time.thread_time() - begin
        for child in self._children:
            assert self._ends[child].receive(time.monotonic() + _WAIT_SECONDS) == announced
        return seconds


class SimulatedJob:
    """A job of one real rank 0, in a tree also the transport of a relay, and state machines for all others.

    Args:
        size: ranks.
        ranks_per_host: of a tree; 0: a star.
    """

    def __init__(self, size: int, ranks_per_host: int) -> None:
        self.size, self.layout = size, "tree" if ranks_per_host else "star"
        step = ranks_per_host or size
        hosts = [range(begin, min(size, begin + step)) for begin in range(0, size, step)]
        self.tree = ControlTree(hosts) if ranks_per_host else ControlTree(hosts, fanout=size)
        self.coordinator = Coordinator(size, _CACHE_CAPACITY, _THRESHOLD_BYTES, _DEADLINE_SECONDS)
        self.controllers = [RankController(rank) for rank in range(size)]
        self.mergers = {rank: ReportMerger(size, self.tree.subtree(rank)) for rank in self.tree.relays()}
        self._ends, near_ends = _connect(self.tree.children(0))
        self._transport = TcpStarTransport(near_ends)
        self._channel = ControlChannel(self._transport, receives_reports=True)
        busiest = max(self.mergers, key=lambda rank: len(self.tree.children(rank)), default=-1)
        self._relay = RealRelay(busiest, self.tree) if busiest > 0 else None

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()
        for end in self._ends.values():
            end.close()
        if self._relay is not None:
            self._relay.close()

    def negotiate(self, operations: Sequence[Operation], *, cached: bool) -> NegotiationCost:
        """Have all ranks submit these, and take in the answer."""
        for controller in self.controllers:
            for operation in operations:
                controller.submit(operation)
        reports = {rank: encode(self._reports(rank)) for rank in self._ends}
        for rank, data in reports.items():
            self._ends[rank].send(data, time.monotonic() + _WAIT_SECONDS)
        seconds = self._coordinate(len(reports))
        answers = [self._ends[rank].receive(time.monotonic() + _WAIT_SECONDS) for rank in self._ends]
        announcements = decode_announcements(answers[0])
        for merger in self.mergers.values():
            merger.follow(announcements)
        for controller in self.controllers[1:]:
            for announcement in announcements:
                controller.receive(announcement)
        assert not any(controller.pending for controller in self.controllers), "every rank has its answer"
        return NegotiationCost(
            self.size,
            self.layout,
            len(operations),
            cached,
            seconds * 1e3,
            0.0 if self._relay is None else 1e3 * self._relay.negotiate(answers[0]),
            len(reports),
            len(answers),
            sum(map(len, reports.values())),
            sum(map(len, answers)),
        )

    def _reports(self, rank: int) -> list[Report]:
        """Return what a rank reports to its parent, when all below it have reported."""
        controller = self.controllers[rank]
        reports, controller.outgoing = controller.outgoing, []
        if self._relay is not None and rank == self._relay.rank:
            self._relay.reports[rank] = encode(reports)
        merger = self.mergers.get(rank)
        if merger is not None:
            merger.receive(1 << rank, reports, 0.0)
            for child in self.tree.children(rank):
                merger.receive(1 << child, self._reports(child), 0.0)
            reports = merger.take(0.0)
        if self._relay is not None and self.tree.parent(rank) == self._relay.rank:
            self._relay.reports[rank] = encode(reports)
        return reports

    def _coordinate(self, num_expected: int) -> float:
        """Rank 0's part; returns its processor time in seconds."""
        begin, heard = time.thread_time(), 0
        announced: list[Announcement] = []
        own = self.controllers[0]
        self.coordinator.receive(0, own.outgoing, 0.0)
        own.outgoing = []
        while not announced:
            for rank, reports in self._channel.receive():
                heard += 1
                self.coordinator.receive(rank, reports, 0.0)
            announced = self.coordinator.announce(0.0)
        self._channel.send(announced)
        while self._transport.backlog:
            self._transport.flush()
        for announcement in announced:
            own.receive(announcement)
        assert heard == num_expected
        return time.thread_time() - begin


def _connect(ranks: Sequence[int]) -> tuple[dict[int, Connection], dict[int, Connection]]:
    """Connections over loopback, authenticated: by rank the far end, and rank 0's."""
    far_ends, near_ends = {}, {}
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        for rank in ranks:
            one = socket.create_connection(listening.getsockname())
            other, _ = listening.accept()
            for each in (one, other):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = StreamProtocol(
                ClientHandshake(_SECRET, Identity(ProcessRole.RANK, rank, "control")), _MAX_PAYLOAD_BYTES
            )
            server = StreamProtocol(
                ServerHandshake(_SECRET, Identity(ProcessRole.RANK, 0, "control")), _MAX_PAYLOAD_BYTES
            )
            while client.outgoing or server.outgoing:
                for source, target in ((client, server), (server, client)):
                    data, source.outgoing[:] = bytes(source.outgoing), b""
                    if data:
                        target.receive(data)
            far_ends[rank], near_ends[rank] = Connection(one, client), Connection(other, server)
    return far_ends, near_ends


def measure_negotiation(size: int, ranks_per_host: int, tensors: int, steps: int) -> list[NegotiationCost]:
    """The median of several steps: with tensors that are new, with those that are cached, and with one of these."""
    job = SimulatedJob(size, ranks_per_host)
    try:
        found: dict[tuple[int, bool], list[NegotiationCost]] = {}
        for step in range(steps):
            operations = [_operation(f"step {step} gradient {number:03d}") for number in range(tensors)]
            for chosen, cached in ((operations, False), (operations, True), (operations[:1], True)):
                found.setdefault((len(chosen), cached), []).append(job.negotiate(chosen, cached=cached))
        return [sorted(costs, key=lambda cost: cost.cpu_ms)[len(costs) // 2] for costs in found.values()]
    finally:
        job.close()


@dataclass(frozen=True)
class MembershipCost:
    """What the membership of a job costs.

    Attributes:
        ranks: of the job.
        register_cpu_seconds: processor time of the table, until all have registered.
        leave_cpu_seconds: and when they leave, one in each turn.
        service_cpu_seconds: processor time of the service, from the first that leaves to the end of all connections.
        messages: those in which ranks were told meanwhile that others had left.
    """

    ranks: int
    register_cpu_seconds: float
    leave_cpu_seconds: float
    service_cpu_seconds: float
    messages: int


def measure_membership(size: int) -> MembershipCost:
    """Let all ranks of a job register and leave."""
    table, begin = GroupTable(), time.process_time()
    for rank in range(size):
        table.handle(rank, _registration(rank, size), 0.0)
        table.tick(0.0)
    registered = time.process_time()
    for rank in range(size):
        table.handle(rank, LeaveJob(), 1.0)
        table.tick(1.0)
        table.ended(rank, 1.0)
    left = time.process_time()
    return MembershipCost(size, registered - begin, left - registered, *_leave_service(size))


def _registration(rank: int, size: int) -> RegisterMember:
    return RegisterMember("rank", rank, f"h{rank // 8}", 1 + rank, {"rank": size}, group="g", host_id=f"m{rank // 8}")


def _leave_service(size: int) -> tuple[float, int]:
    """Return the processor time of a real service that all ranks leave, and how many messages they get."""
    service = ControlService(_SECRET)
    service.start()
    thread = next(one for one in threading.enumerate() if one.name == "reigen-rendezvous")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    try:
        host, _, port = service.address.rpartition(":")
        deadline, connections = time.monotonic() + _DEADLINE_SECONDS, list[Connection]()
        for rank in range(size):
            identity = Identity(ProcessRole.RANK, rank, "membership")
            connections.append(open_connection((host, int(port)), _SECRET, identity, MAX_MESSAGE_BYTES, deadline))
            connections[-1].send(MEMBER_CODEC.encode(_registration(rank, size)), deadline)
            connections[-1].receive(deadline)
        begin, num_messages = time.clock_gettime(clock), 0
        for connection in connections:
            connection.send(MEMBER_CODEC.encode(LeaveJob()), deadline)
            num_messages += len(connection.read())
            connection.socket.shutdown(socket.SHUT_WR)
        for connection in connections:
            with contextlib.suppress(OSError, WireError):
                while True:
                    connection.receive(deadline)
                    num_messages += 1
            connection.close()
        return time.clock_gettime(clock) - begin, num_messages
    finally:
        service.close()


def _operation(name: str) -> Operation:
    return Operation(OperationKind.ALLREDUCE, name, "float32", (1024,))


def measure_start(num_hosts: int, ranks_per_host: int, tree: bool) -> dict[str, Any]:
    """Start a job, and return its figures.

    Raises:
        RuntimeError: it has failed in another way than that one rank dies.
    """
    size = num_hosts * ranks_per_host
    with Hosts(num_hosts, ssh_port=22, same_uptime=True) as hosts:
        names = ",".join(f"{host.name}:{ranks_per_host}" for host in hosts)
        run = [sys.executable, "-m", "reigen", "run", "-np", str(size), "-H", names, "--bind", "none"]
        env = {
            "CONTROL_PLANE_BEGAN": str(time.monotonic()),
            "PYTHONPATH": os.pathsep.join((str(_ROOT / "src"), str(_ROOT))),
            "REIGEN_CONTROL_TREE_RANKS": "2" if tree else "0",
            "REIGEN_START_TIMEOUT": "240",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        exports = [part for name in env if name != "PYTHONPATH" for part in ("-x", name)]
        program = [sys.executable, str(_ROOT / "benchmarks" / "programs" / "control_plane.py")]
        ended = hosts[0].run([*run, *exports, *program], env=env, timeout=400.0)
    lines = [json.loads(found[0]) for line in ended.stdout.splitlines() if (found := re.search(r"{.*}", line))]
    figures = next((line for line in lines if "ranks" in line and "told" not in line), None)
    if figures is None:
        raise RuntimeError(f"no figures: {ended.stdout[-2000:]} {ended.stderr[-3000:]}")
    killed = next(line["killed"] for line in lines if "killed" in line)
    told = [line["told"] - killed for line in lines if "told" in line]
    last = round(max(told), 3) if len(told) == size - 1 else None
    return {"layout": "tree" if tree else "star", **figures, "told": len(told), "last_told_seconds": last}


# -- tables of docs/data/records --------------------------------------------------------------------------------------


def negotiation_table(found: Sequence[NegotiationCost], command: str, machine: Machine) -> Record:
    """Return what negotiations cost, as a table: a line for each number of ranks and layout."""
    most = max(cost.tensors for cost in found)
    new, many, one = f"{most} new", f"{most} cached", "1 cached"
    both, size, relay = (
        "messages to and from rank 0",
        f"bytes, {many}: in, out",
        f"the busiest relay: {new}, {many}, {one}",
    )
    jobs: dict[tuple[int, str], dict[str, NegotiationCost]] = {}
    for cost in found:
        kind = new if not cost.cached else one if cost.tensors < most else many
        jobs.setdefault((cost.ranks, cost.layout), {})[kind] = cost
    lines: list[Line] = []
    for (ranks, layout), costs in jobs.items():
        cells: dict[str, Quantity | str] = {"": layout, **{kind: _short(cost.cpu_ms) for kind, cost in costs.items()}}
        cells[both] = f"{costs[many].messages_in:,}, {costs[many].messages_out:,}"
        cells[size] = f"{costs[many].bytes_in:,}, {costs[many].bytes_out:,}"
        if any(cost.relay_cpu_ms for cost in costs.values()):
            cells[relay] = ", ".join(str(_short(costs[kind].relay_cpu_ms)) for kind in (new, many, one))
        lines.append(Line(f"{ranks:,}", cells))
    columns = [Column(name) for name in ("", new, many, one, both, size, relay)]
    return make_record(command, "milliseconds of one processor", "ranks", columns, lines, machine)


def membership_table(found: Sequence[MembershipCost], command: str, machine: Machine) -> Record:
    """Return what the membership costs, as a table."""
    lines = [
        Line(
            f"{cost.ranks:,}",
            {
                "registering": _short(cost.register_cpu_seconds),
                "leaving": _short(cost.service_cpu_seconds),
                "messages": Quantity(cost.messages, 0),
            },
        )
        for cost in found
    ]
    columns = [Column("registering", "s"), Column("leaving", "s"), Column("messages")]
    return make_record(command, "seconds of one processor", "ranks", columns, lines, machine)


#: Lines of `start`: what they are called, and which figures they show.
_START_LINES = {
    "all ranks are ready, s": ("started_seconds",),
    "`init()`, median of the ranks, s": ("init",),
    "processor time of rank 0, ms a step": ("rank_0_cpu_ms_per_step",),
    "messages to and from rank 0, a step": ("messages_in", "messages_out"),
    "bytes to and from rank 0, a step": ("bytes_in", "bytes_out"),
    "a step, ms": ("step_ms",),
    "from the end of a rank that is killed until the last rank knows, s": ("last_told_seconds",),
}


def start_table(found: Sequence[dict[str, Any]], command: str, machine: Machine) -> Record:
    """Return what starts were like, as a table: medians over the rounds of each layout."""
    layouts = sorted({figures["layout"] for figures in found})
    lines: list[Line] = []
    for title, names in _START_LINES.items():
        cells: dict[str, Quantity | str] = {}
        for layout in layouts:
            rounds = [{**each, **each["phases_median"]} for each in found if each["layout"] == layout]
            values = [[each[name] for each in rounds if each[name] is not None] for name in names]
            if all(values):
                medians = [statistics.median(each) for each in values]
                cells[layout] = ", ".join(f"{value:,.0f}" for value in medians) if medians[1:] else _short(medians[0])
        lines.append(Line(title, cells))
    size = found[0]["ranks"]
    conditions = f"{size} ranks with NumPy on stand-in hosts that share this machine"
    return make_record(command, conditions, f"{size} real ranks", [Column(name) for name in layouts], lines, machine)


def _short(value: float) -> Quantity:
    return Quantity(value, 0 if value >= 20 else 1 if value >= 1 else 2 if value >= 0.1 else 3)


def main(arguments: Sequence[str]) -> int:
    """Measure; one JSON line for each figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    negotiate = commands.add_parser("negotiate")
    negotiate.add_argument("--ranks", default="8,128,1000,9900")
    negotiate.add_argument("--ranks-per-host", type=int, default=8)
    negotiate.add_argument("--layouts", default="star,tree")
    negotiate.add_argument("--tensors", type=int, default=64)
    negotiate.add_argument("--steps", type=int, default=5)
    membership = commands.add_parser("membership")
    membership.add_argument("--ranks", default="1000,4000,9900")
    start = commands.add_parser("start")
    start.add_argument("--hosts", type=int, default=16)
    start.add_argument("--ranks-per-host", type=int, default=8)
    start.add_argument("--rounds", type=int, default=1)
    for each in (negotiate, membership, start):
        each.add_argument("--table", type=Path, metavar="FILE", help="also write the table there")
    chosen = parser.parse_args(arguments)
    words = re.sub(r" --table[= ]\S+", "", shlex.join(arguments))
    command, machine = f"python -m benchmarks.control_plane {words}", this_machine()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two descriptors a connection
    table: Record
    if chosen.command == "start":
        table = start_table(list(_printed(_starts(chosen))), command, machine)
    elif chosen.command == "membership":
        costs = (measure_membership(int(size)) for size in chosen.ranks.split(","))
        table = membership_table(list(_printed(costs)), command, machine)
    else:
        table = negotiation_table(list(_printed(_negotiations(chosen))), command, machine)
    if chosen.table is not None:
        table.save(chosen.table)
    return 0


def _negotiations(chosen: argparse.Namespace) -> Iterator[NegotiationCost]:
    for size in map(int, chosen.ranks.split(",")):
        for layout in chosen.layouts.split(","):
            ranks_per_host = chosen.ranks_per_host if layout == "tree" else 0
            yield from measure_negotiation(size, ranks_per_host, chosen.tensors, chosen.steps)


def _starts(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for _ in range(chosen.rounds):
        for tree in (True, False):
            yield measure_start(chosen.hosts, chosen.ranks_per_host, tree)


def _printed(found: Iterable[_Found]) -> Iterator[_Found]:
    """Print each when it is there, as a line of JSON."""
    for each in found:
        print(json.dumps(each if isinstance(each, dict) else asdict(cast("Any", each))), flush=True)
        yield each


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
