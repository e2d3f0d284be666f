"""Cost of the control plane with many ranks: what rank 0 does for each negotiation.

    python -m benchmarks.control_plane negotiate --ranks 8,128,1000,9900

``negotiate``: rank 0 is real: its transport with a connection for each rank that talks to it, its coordinator, its
messages. The other ranks are state machines of this process at the other ends of the connections. What counts is the
processor time of rank 0 alone, from reading the first message to writing the last one: for tensors that are new, and
for those that the response cache knows. The time that messages need on their way is in none of the figures.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from reigen.engine.control_channel import ControlChannel
from reigen.engine.coordinator import Coordinator
from reigen.engine.messages import Announcement, Operation, OperationKind, decode_announcements, encode
from reigen.engine.rank_controller import RankController
from reigen.net.auth import ClientHandshake, Identity, ProcessRole, ServerHandshake
from reigen.net.connection import Connection, StreamProtocol
from reigen.net.tcp_star import TcpStarTransport

_SECRET = bytes(range(32))
_MAX_PAYLOAD_BYTES = 1 << 20
_DEADLINE_SECONDS = 600.0
_THRESHOLD_BYTES = 128 << 20
_CACHE_CAPACITY = 1024


@dataclass(frozen=True)
class NegotiationCost:
    """What one negotiation costs rank 0.

    Attributes:
        ranks: of the job.
        layout: ``star``.
        tensors: how many are negotiated at once.
        cached: whether the response cache knows them.
        cpu_ms: processor time of rank 0, in milliseconds.
        messages_in: to rank 0; ``messages_out``: from it; ``bytes_in`` and ``bytes_out`` are theirs.
    """

    ranks: int
    layout: str
    tensors: int
    cached: bool
    cpu_ms: float
    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int


class SimulatedJob:
    """A job of one real rank 0, and state machines for all others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.coordinator = Coordinator(size, _CACHE_CAPACITY, _THRESHOLD_BYTES, _DEADLINE_SECONDS)
        self.controllers = [RankController(rank) for rank in range(size)]
        self._ends, far_ends = _connect(range(1, size))
        self._transport = TcpStarTransport(far_ends)
        self._channel = ControlChannel(self._transport, receives_reports=True)
        self.layout = "star"

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()
        for end in self._ends.values():
            end.close()

    def negotiate(self, operations: Sequence[Operation], *, cached: bool) -> NegotiationCost:
        """Have all ranks submit these, and take in the answer."""
        for controller in self.controllers:
            for operation in operations:
                controller.submit(operation)
        sizes_in = [self._send(rank) for rank in self._ends]
        cpu_seconds = self._coordinate(len(sizes_in))
        sizes_out = [self._receive(rank) for rank in self._ends]
        assert not any(controller.pending for controller in self.controllers), "every rank has its answer"
        return NegotiationCost(
            self.size,
            self.layout,
            len(operations),
            cached,
            cpu_seconds * 1e3,
            len(sizes_in),
            len(sizes_out),
            sum(sizes_in),
            sum(sizes_out),
        )

    def _send(self, rank: int) -> int:
        controller = self.controllers[rank]
        data = encode(controller.outgoing)
        controller.outgoing = []
        self._ends[rank].send(data, time.monotonic() + 60.0)
        return len(data)

    def _receive(self, rank: int) -> int:
        data = self._ends[rank].receive(time.monotonic() + 60.0)
        for announcement in decode_announcements(data):
            self.controllers[rank].receive(announcement)
        return len(data)

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


def measure_negotiation(size: int, tensors: int, steps: int) -> list[NegotiationCost]:
    """The median of several steps: with tensors that are new, with those that are cached, and with one of these."""
    job = SimulatedJob(size)
    try:
        found: dict[tuple[int, bool], list[NegotiationCost]] = {}
        for step in range(steps):
            operations = [_operation(f"step {step} gradient {number:03d}") for number in range(tensors)]
            for chosen, cached in ((operations, False), (operations, True), (operations[:1], True)):
                found.setdefault((len(chosen), cached), []).append(job.negotiate(chosen, cached=cached))
        return [sorted(costs, key=lambda cost: cost.cpu_ms)[len(costs) // 2] for costs in found.values()]
    finally:
        job.close()


def _operation(name: str) -> Operation:
    return Operation(OperationKind.ALLREDUCE, name, "float32", (1024,))


def main(arguments: Sequence[str]) -> int:
    """Measure; one JSON line for each figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    negotiate = commands.add_parser("negotiate")
    negotiate.add_argument("--ranks", default="8,128,1000,9900")
    negotiate.add_argument("--tensors", type=int, default=64)
    negotiate.add_argument("--steps", type=int, default=5)
    chosen = parser.parse_args(arguments)
    sizes = [int(size) for size in chosen.ranks.split(",")]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two descriptors a connection
    for size in sizes:
        for cost in measure_negotiation(size, chosen.tensors, chosen.steps):
            print(json.dumps(asdict(cost)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
