"""A training step with a parameter server, as events: computing, pushes, sums and updates, values that come back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from reigen.kv.server.thread_pool import choose_num_threads
from reigen.planner.costs import Costs
from reigen.planner.fluid import FluidSimulator
from reigen.planner.layout import HostKind, JobLayout, device_link, receive_link, send_link
from reigen.planner.prediction import Strategy
from reigen.planner.profile import TrainingProfile
from reigen.planner.server_plan import RequestPiece, ServerPlan
from reigen.planner.training_step import RankKind, StepComputing, rank_kinds


class ServerJob:
    """Job whose gradients go to servers when backward is over: what `reigen.torch.Trainer.step` does.

    Attributes:
        messages, sent: of data in the last step, by all; bytes that the busiest host has sent.
        computed_at: when the first and the last rank had computed all gradients.
    """

    def __init__(
        self, layout: JobLayout, profile: TrainingProfile, plan: ServerPlan, strategy: Strategy, costs: Costs
    ) -> None:
        self._layout, self._profile, self._plan, self._strategy, self._costs = layout, profile, plan, strategy, costs
        self._ranks = rank_kinds(layout)
        #: workers on each host of a kind
        self._workers = {kind: min(1, kind.host.num_ranks) if strategy.sums_on_host else kind.host.num_ranks
                         for kind in layout.kinds}  # fmt: skip
        self.num_workers = sum(kind.count * count for kind, count in self._workers.items())
        self.messages = 0
        self.sent = 0.0
        self.computed_at: list[float] = []

    def run_step(self) -> FluidSimulator:
        """Simulate a step of all workers; returns the simulator, which is at its end."""
        self._simulator = FluidSimulator(self._capacities())
        self._computing = StepComputing(self._simulator, self._layout, self._profile, self._costs)
        self._sent = defaultdict[str, float](float)
        self._waiting = len(self._ranks)
        self._unanswered = sum(
            len(self._plan.pieces[number]) for kind in self._layout.kinds for number, _ in kind.servers
        )
        self.messages = self._plan.num_requests * 2 * self.num_workers
        self.computed_at = []
        for rank in self._ranks:
            self._computing.forward(rank, lambda rank=rank: self._backward(rank))  # type: ignore[misc]
        self._simulator.run()
        self.sent = max(self._sent.values(), default=0.0)
        return self._simulator

    def _capacities(self) -> dict[str, float]:
        """Return resources of the cluster, and threads: of each worker, for I/O and for computing of each server."""
        found = self._layout.capacities
        for kind in self._layout.kinds:
            found[_thread(kind)] = 1.0
            processors = self._layout.cluster.shared_processors or kind.host.processors
            for number, _ in kind.servers:
                found[_io_thread(kind, number)] = 1.0
                found[_compute_threads(kind, number)] = choose_num_threads(None, max(1, int(processors)), saves=False)[
                    0
                ]
        return found

    def _backward(self, rank: RankKind) -> None:
        def ended() -> None:
            self.computed_at.append(self._simulator.now)
            self._waiting -= 1
            if not self._waiting:
                self._sum_on_hosts()

        # A round is over when all have pushed: what a worker pushes earlier than the last one makes no difference to
        # the end of the step, unless links are full, and then not much. So all begin when the last one does.
        self._computing.part(rank, self._profile.backward_seconds, "backward", ended)

    def _sum_on_hosts(self) -> None:
        """Add up the gradients of each host's ranks, if they are one worker; then push."""
        if not self._strategy.sums_on_host:
            self._push_all()
            return
        load, seconds, nbytes = defaultdict[str, float](float), 0.0, self._profile.nbytes
        for kind in self._layout.training:
            ranks = kind.host.num_ranks
            if kind.host.device_bandwidth:
                load[device_link(kind)] += nbytes * (ranks - 1) / ranks
            elif ranks > 1:
                busy = ranks * nbytes * self._costs.shm_seconds_per_byte
                seconds = max(seconds, busy)
                _add(load, self._layout.computing(kind, busy))
        self._simulator.start(seconds, load, self._push_all, "collectives", "sum on each host")

    def _push_all(self) -> None:
        for kind in self._layout.kinds:
            for number, count in kind.servers:
                _ServerQueue(self, kind, number, count).push()

    # -- what a queue of a server asks for ----------------------------------------------------------------------------

    def start(self, seconds: float, load: dict[str, float], then: Callable[[], None], name: str) -> None:
        """Start an activity of servers."""
        self._simulator.start(seconds, load, then, "servers" if name else "", name)

    @property
    def hop_seconds(self) -> float:
        """Length of a message's way between worker and server."""
        return self._layout.latency + self._costs.wakeup_seconds

    def moving(
        self, kind: HostKind, number: int, count: int, piece: RequestPiece, *, is_push: bool
    ) -> dict[str, float]:
        """Return the load of moving a piece between all workers and the servers of a class on hosts of a kind."""
        costs, layout = self._costs, self._layout
        nbytes = piece.push_bytes if is_push else piece.value_bytes
        wire = nbytes * costs.wire_bytes_per_byte
        load = defaultdict[str, float](float)
        crossing: dict[HostKind, float] = {}
        to_server, from_server = (costs.tcp_send_seconds_per_byte, costs.tcp_receive_seconds_per_byte)
        worker_byte, server_byte = (to_server, from_server) if is_push else (from_server, to_server)
        coding = (costs.encode_seconds_per_byte * piece.sum_bytes) if self._strategy.compression and is_push else 0.0
        num_servers = count * kind.count
        for other in layout.training:
            workers = self._workers[other]
            near = count if other is kind else 0
            away = num_servers - near
            link = send_link(other) if is_push else receive_link(other)
            load[link] += workers * wire * away
            if is_push:
                crossing[other] = workers * wire * away
            each = num_servers * (
                piece.requests * costs.request_seconds + nbytes * costs.copy_seconds_per_byte + coding
            )
            each += away * nbytes * worker_byte
            load[_thread(other)] += each
            _add(load, layout.computing(other, workers * each))
        far_workers = self.num_workers - self._workers[kind]
        load[receive_link(kind) if is_push else send_link(kind)] += count * far_workers * wire
        if not is_push:
            crossing[kind] = count * far_workers * wire
        each = self.num_workers * piece.requests * costs.server_request_seconds + far_workers * nbytes * server_byte
        load[_io_thread(kind, number)] += each
        _add(load, layout.computing(kind, count * each))
        layout.add_network(load, crossing, is_ring=False)
        for sender, sent in crossing.items():
            self._sent[sender.name] += sent
        return load

    def summing(self, kind: HostKind, number: int, count: int, piece: RequestPiece) -> tuple[float, dict[str, float]]:
        """Return how long a server adds up a piece of all workers and updates its weights, and the load."""
        costs = self._costs
        per_byte = costs.decode_seconds_per_byte if self._strategy.compression else costs.reduce_seconds_per_byte
        seconds = self.num_workers * piece.sum_bytes * per_byte
        if self._strategy.update_on_servers:
            seconds += piece.sum_bytes * costs.server_update_seconds_per_byte
        elif self._strategy.compression:
            seconds += piece.sum_bytes * costs.encode_seconds_per_byte
        load = {_compute_threads(kind, number): seconds}
        _add(load, self._layout.computing(kind, count * seconds))
        return seconds / piece.requests, load

    def answered(self) -> None:
        """Note that a piece's values have come to all workers; with the last one, the step goes on."""
        self._unanswered -= 1
        if self._unanswered:
            return
        for rank in self._ranks:
            if self._strategy.update_on_servers:
                self._simulator.start(0.0, {}, lambda: None)
            else:
                self._computing.update(rank, lambda: None)


class _ServerQueue:
    """Servers of one class on the hosts of one kind: their pushes, sums and answers, each in order."""

    def __init__(self, job: ServerJob, kind: HostKind, number: int, count: int) -> None:
        self._job, self._kind, self._number, self._count = job, kind, number, count
        self._pieces = job._plan.pieces[number]
        self._next_push = 0
        self._ready: list[RequestPiece] = []
        self._is_answering = False

    def push(self) -> None:
        """Push the next piece, from all workers to each of these servers."""
        if self._next_push == len(self._pieces):
            return
        piece = self._pieces[self._next_push]
        self._next_push += 1

        def pushed() -> None:
            self._job.start(self._job.hop_seconds, {}, lambda: self._sum(piece), "")
            self.push()

        self._job.start(
            0.0, self._job.moving(self._kind, self._number, self._count, piece, is_push=True), pushed, "push"
        )

    def _sum(self, piece: RequestPiece) -> None:
        seconds, load = self._job.summing(self._kind, self._number, self._count, piece)

        def summed() -> None:
            self._ready.append(piece)
            self._answer()

        self._job.start(seconds, load, summed, "sum and update")

    def _answer(self) -> None:
        if self._is_answering or not self._ready:
            return
        self._is_answering = True
        piece = self._ready.pop(0)

        def sent() -> None:
            self._is_answering = False
            self._job.start(self._job.hop_seconds, {}, self._job.answered, "")
            self._answer()

        self._job.start(
            0.0, self._job.moving(self._kind, self._number, self._count, piece, is_push=False), sent, "pull"
        )


def _thread(kind: HostKind) -> str:
    return f"thread of a worker on {kind.name}"


def _io_thread(kind: HostKind, number: int) -> str:
    return f"I/O thread of a server{_which(kind, number)} on {kind.name}"


def _compute_threads(kind: HostKind, number: int) -> str:
    return f"computing threads of a server{_which(kind, number)} on {kind.name}"


def _which(kind: HostKind, number: int) -> str:
    """Return which of a host's servers it is, where they have different loads."""
    return f" ({number + 1})" if len(kind.servers) > 1 else ""


def _add(load: dict[str, float], other: dict[str, float]) -> None:
    for resource, amount in other.items():
        load[resource] = load.get(resource, 0.0) + amount
