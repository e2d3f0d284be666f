"""A simulator of jobs that makes timelines, with a cause that is known since it was planted.

It knows nothing of how timelines are analysed: ranks compute, submit tensors and wait for them; a collective is carried
out when the last rank has come, behind those before it; a server answers one request after the other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from reigen.observe.trace_reader import CollectiveExecution, RequestExecution, StepProcessorTime, Trace
from reigen.resources.cpu import AllowedCpus

MS = 1000.0


@dataclass
class Job:
    """What is simulated; times in microseconds.

    Attributes:
        noise: how much times vary, relative, from step to step and rank to rank.
        tensors: bytes of each, in the order in which they are submitted.
        after_compute: all tensors are submitted when computing is over, ``submission`` apart; not while it goes on.
        bytes_per_micro, latency: of a batch.
        fusion_bytes: how many bytes travel together at most.
        announcing: from the last rank's submission to its being announced.
        asleep: by rank: how long it waits for its data, in each step; and how long it computes longer.
        load: ready threads for each processor.
        servers: number of parameter servers, in place of collectives; ``server_bytes_per_micro`` of each.
    """

    size: int = 4
    num_hosts: int = 1
    num_steps: int = 25
    seed: int = 0
    noise: float = 0.05
    compute: float = 50 * MS
    tensors: list[int] = field(default_factory=lambda: [4 << 20] * 4)
    after_compute: bool = False
    submission: float = 15.0
    bytes_per_micro: float = 4000.0
    latency: float = 80.0
    network: bool = False
    fusion_bytes: int = 64 << 20
    announcing: float = 60.0
    asleep: dict[int, float] = field(default_factory=dict)
    busier: dict[int, float] = field(default_factory=dict)
    load: float = 1.0
    num_cpus: int = 64
    servers: int = 0
    server_bytes_per_micro: float = 4000.0
    clock_error: float = 0.0


class Simulation:
    def __init__(self, job: Job) -> None:
        self.job = job
        self._random = random.Random(job.seed)
        hosts = [rank * job.num_hosts // job.size for rank in range(job.size)]
        names = {rank: f"rank {rank} (host{hosts[rank]})" for rank in range(job.size)}
        cpus = {rank: AllowedCpus((1 << job.num_cpus) - 1) for rank in range(job.size)}
        self.trace = Trace(job.size, names, cpus=cpus)
        self.trace.steps = {rank: [] for rank in range(job.size)}
        self.trace.waits = {rank: [] for rank in range(job.size)}
        self.trace.processor_times = {rank: [] for rank in range(job.size)}
        self.trace.clock_errors = {rank: job.clock_error if rank else 0.0 for rank in range(job.size)}

    def run(self) -> Trace:
        now = [0.0] * self.job.size
        for _ in range(self.job.num_steps):
            begun = list(now)
            own = [self._own(rank) for rank in range(self.job.size)]
            finish = self._serve if self.job.servers else self._reduce
            now = finish([start + asleep for start, (asleep, _, _) in zip(begun, own, strict=True)], own)
            for rank, (_, cpu, wall) in enumerate(own):
                self.trace.steps[rank].append((begun[rank], now[rank]))
                threads = StepProcessorTime(cpu, wall - cpu, cpu)
                self.trace.processor_times[rank].append(threads)
        self.trace.end = max(now)
        return self.trace

    def _vary(self, value: float) -> float:
        return value * self._random.lognormvariate(0.0, self.job.noise)

    def _own(self, rank: int) -> tuple[float, float, float]:
        """How long a rank sleeps, is on a processor, and takes for that."""
        job = self.job
        cpu = self._vary(job.compute + job.busier.get(rank, 0.0))
        return (
            self._vary(job.asleep.get(rank, 0.0)),
            cpu,
            cpu * (max(1.0, self._vary(job.load)) if job.load > 1 else 1.0),
        )

    def _reduce(self, begun: list[float], own: list[tuple[float, float, float]]) -> list[float]:
        job, count = self.job, len(self.job.tensors)
        submitted: list[list[float]] = []
        for start, (_, _, wall) in zip(begun, own, strict=True):
            if job.after_compute:
                submitted.append([start + wall + self._vary(job.submission) * (i + 1) for i in range(count)])
            else:
                submitted.append([start + wall * (0.4 + 0.6 * (i + 1) / count) for i in range(count)])
            submitted[-1].sort()
        announced = [max(times[i] for times in submitted) + self._vary(job.announcing) for i in range(count)]
        ended, free, i = [0.0] * count, 0.0, 0
        while i < count:
            start, batch, nbytes = max(free, announced[i]), [i], job.tensors[i]
            while (
                (n := batch[-1] + 1) < count and announced[n] <= start and nbytes + job.tensors[n] <= job.fusion_bytes
            ):
                batch.append(n)
                nbytes += job.tensors[n]
            free = start + self._vary(job.latency + nbytes / job.bytes_per_micro)
            for n in batch:
                ended[n] = free
                for rank, times in enumerate(submitted):
                    nbytes, together = job.tensors[n], len(batch)
                    one = CollectiveExecution(
                        rank, "ALLREDUCE", f"t{n}", 0, nbytes, together, times[n], start, free, announced[n]
                    )
                    self.trace.executions.append(one)
            for rank in range(job.size):
                phase = "TCP_ALLREDUCE" if job.network else "SHM_ALLREDUCE"
                self.trace.phases[rank, start] = {phase: free - start}
            i = batch[-1] + 1
        return [self._wait(rank, submitted[rank][-1], ended) for rank in range(job.size)]

    def _wait(self, rank: int, now: float, ended: list[float]) -> float:
        for i, end in enumerate(ended):
            done = max(now + 1.0, end + 5.0)
            self.trace.waits[rank].append((now, done))
            self.trace.waited_for[rank, now] = f"t{i}"
            now = done + 1.0
        return now + 200.0

    def _serve(self, begun: list[float], own: list[tuple[float, float, float]]) -> list[float]:
        """Push all tensors, and pull them when all workers have pushed: a server does one thing after the other."""
        job = self.job
        came = [start + wall for start, (_, _, wall) in zip(begun, own, strict=True)]
        now = list(came)
        free = [0.0] * job.servers
        for i, nbytes in enumerate(job.tensors):
            server = i % job.servers
            for rank in sorted(range(job.size), key=came.__getitem__):
                free[server] = max(free[server], came[rank]) + self._vary(nbytes / job.server_bytes_per_micro)
            for rank in range(job.size):
                free[server] += self._vary(nbytes / job.server_bytes_per_micro)
                self.trace.requests.append(
                    RequestExecution(rank, "PUSHPULL", server, 2 * nbytes, came[rank], free[server])
                )
                now[rank] = max(now[rank], free[server])
        for rank in range(job.size):
            self.trace.waits[rank].append((came[rank], now[rank]))
            self.trace.waited_for[rank, came[rank]] = "pushpull of keys"
        return [end + 200.0 for end in now]


def simulate(job: Job) -> Trace:
    return Simulation(job).run()
