"""Parameter servers and the ring, on hosts whose network is the bottleneck (needs root; stand-in machines).

    python -m benchmarks.ps_vs_ring                              about 8 minutes
    python -m benchmarks.ps_vs_ring --hosts 2,4 --json out.json

One worker on each host trains the same network on real images (scikit-learn's digits) through `reigen.torch.Trainer`,
and only the store differs: one server, as many servers as workers, twice as many, each on a worker's host; or the ring.
All hosts share this machine's processors, which says nothing about hosts. So a worker's own part of a step takes a
fixed time: it computes the gradients, and sleeps for the rest. What is left to differ is what goes over the wires.

Efficiency is samples a second, divided by the number of workers and by what a worker alone does in a second.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.figures import summarize
from benchmarks.harness.machine import this_machine
from benchmarks.harness.report import Document, Row, markdown
from benchmarks.harness.servers import Seat, parameter_servers, worker_starts
from reigen.cluster.environ import SECRET_VARIABLE
from reigen.net.auth import SECRET_BYTES
from tests.lab import HostProcess, Hosts, MachineError, Unavailable

ONE, EQUAL, DOUBLE, RING = "one server", "servers = workers", "servers = 2 x workers", "ring"
MODES = (ONE, EQUAL, DOUBLE, RING)
ALONE = "a worker alone"
_PORT = 9200
_BATCH = 32
_WIDTH = 1024
_SKIPPED_STEPS = 2
_PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        rate_bits: bits a second of each host's connection, in each direction.
        compute_seconds: of a worker's own part of a step.
        num_steps: that are measured.
        rounds: jobs of each kind, by turns.
    """

    rate_bits: float
    compute_seconds: float
    num_steps: int
    rounds: int


def num_servers(mode: str, num_hosts: int) -> int:
    """How many servers a mode has."""
    return {ONE: 1, EQUAL: num_hosts, DOUBLE: 2 * num_hosts, RING: 0}[mode]


# -- the controller ---------------------------------------------------------------------------------------------------


@contextmanager
def job(
    hosts: Hosts, mode: str, settings: Settings, environ: Mapping[str, str] | None = None
) -> Iterator[list[HostProcess]]:
    """The workers of a job, one on each machine, by MXNet's variables, or torchrun's for the ring."""
    seats = [Seat(host.address, "eth0", host.entry(Path.cwd()), host.network) for host in hosts]
    servers = num_servers(mode, len(hosts))
    with ExitStack() as stack:
        if servers:
            serving = parameter_servers(len(seats), seats[0], [seats[each % len(seats)] for each in range(servers)])
            places = [start.variables for start in worker_starts(stack.enter_context(serving), seats)]
        else:
            places = ring_places(hosts)
        worker: list[str | Path] = [
            sys.executable,
            *("-m", "benchmarks.ps_vs_ring"),
            "--worker",
            "dist_sync" if servers else "ring",
        ]
        worker += [str(settings.compute_seconds), str(settings.num_steps)]
        workers = [
            host.start(worker, env={"OMP_NUM_THREADS": "1", **variables, **(environ or {})}, cwd=Path.cwd())
            for host, variables in zip(hosts, places, strict=True)
        ]
        for process in workers:
            stack.callback(process.close)
        yield workers


def ring_places(hosts: Hosts) -> list[dict[str, str]]:
    """What the ranks of a ring are told."""
    common = {SECRET_VARIABLE: secrets.token_hex(SECRET_BYTES), "MASTER_ADDR": hosts[0].address}
    common |= {"MASTER_PORT": str(_PORT), "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return [{**common, "RANK": str(rank), "GROUP_RANK": str(rank)} for rank in range(len(hosts))]


def result(workers: Sequence[HostProcess]) -> dict[str, Any]:
    """What worker 0 has measured; all workers have ended.

    Raises:
        MachineError: one failed, or has not ended in time.
    """
    for rank, worker in enumerate(workers):
        if worker.wait(_PATIENCE_SECONDS) != 0:
            raise MachineError(f"worker {rank} failed:\n{worker.output()[1][-3000:]}")
    found: dict[str, Any] = json.loads(workers[0].output()[0].splitlines()[-1])
    return found


def measure(
    hosts: Hosts, mode: str, settings: Settings, environ: Mapping[str, str] | None = None
) -> tuple[float, float]:
    """Median seconds of a step, and MiB that the busiest host sends in one."""
    before = [host.counters for host in hosts]
    with job(hosts, mode, settings, environ) as workers:
        found = result(workers)
    sent = max((host.counters - earlier).sent_bytes for host, earlier in zip(hosts, before, strict=True))
    return statistics.median(found["seconds"]), sent / found["num_steps"] / 2**20


@contextmanager
def machines(num_hosts: int, settings: Settings) -> Iterator[Hosts]:
    """Hosts in a network of that rate."""
    with Hosts(num_hosts, same_uptime=True) as hosts:
        for host in hosts:
            host.shape(settings.rate_bits)
        yield hosts


def run(num_hosts: Sequence[int], settings: Settings) -> list[dict[str, Any]]:
    """A row for each number of hosts and mode."""
    rows: list[dict[str, Any]] = []
    for count in num_hosts:
        steps: dict[str, list[float]] = {mode: [] for mode in MODES}
        sent: dict[str, float] = {}
        with machines(count, settings) as hosts:
            for turn in range(settings.rounds):
                for mode in MODES:
                    print(f"{count} workers, {mode}: round {turn + 1} of {settings.rounds}", file=sys.stderr)
                    seconds, sent[mode] = measure(hosts, mode, settings)
                    steps[mode].append(seconds)
        for mode in MODES:
            seconds = statistics.median(steps[mode])
            rows.append(
                {
                    "workers": count,
                    "mode": mode,
                    "servers": num_servers(mode, count),
                    "step_seconds": seconds,
                    "rounds": steps[mode],
                    "samples_per_second": count * _BATCH / seconds,
                    "efficiency": settings.compute_seconds / seconds,
                    "busiest_host_sends_mib": sent[mode],
                }
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table, for the documentation."""
    headings = ("workers", "store", "servers", "a step", "samples/s", "efficiency", "busiest host sends in a step")
    return markdown(
        headings,
        [
            (
                str(row["workers"]),
                row["mode"],
                str(row["servers"]),
                f"{row['step_seconds'] * 1e3:.0f} ms",
                f"{row['samples_per_second']:.0f}",
                f"{row['efficiency']:.0%}",
                f"{row['busiest_host_sends_mib']:.1f} MiB",
            )
            for row in rows
        ],
    )


def document(rows: Sequence[Mapping[str, Any]], settings: Settings, command: str) -> Document:
    """What was found, as other benchmarks write it: a row for each number of workers."""
    found = Document(command, max(row["workers"] for row in rows), settings.rounds)
    for count in dict.fromkeys(row["workers"] for row in rows):
        modes = {ALONE: summarize([[settings.compute_seconds]] * settings.rounds)}
        modes |= {row["mode"]: summarize([[each] for each in row["rounds"]]) for row in rows if row["workers"] == count}
        found.rows.append(Row(f"{count} workers", 0, modes, ALONE))
    for row in rows:
        sent = f"{row['busiest_host_sends_mib']:.1f} MiB"
        found.notes.append(f"{row['workers']} workers, {row['mode']}: the busiest host sends {sent} in a step")
    return found


# -- a worker ---------------------------------------------------------------------------------------------------------


def work(store: str, compute_seconds: float, num_steps: int) -> None:
    """One worker: trains, and tells how long its steps took."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    from reigen.torch import Trainer

    torch.manual_seed(20)
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 10))
    optimizer = {"learning_rate": 0.05, "momentum": 0.9}
    with Trainer(model.named_parameters(), "sgd", optimizer, kvstore=store) as trainer:
        mine = torch.randperm(len(labels), generator=torch.Generator().manual_seed(7))[
            trainer.rank :: trainer.num_workers
        ]
        seconds = []
        for step in range(_SKIPPED_STEPS + num_steps):
            begin = time.perf_counter()
            batch = mine[[(step * _BATCH + i) % len(mine) for i in range(_BATCH)]]
            trainer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            time.sleep(max(0.0, begin + compute_seconds - time.perf_counter()))
            trainer.step(trainer.num_workers)
            seconds.append(time.perf_counter() - begin)
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(images), labels))
    told = {"seconds": seconds[_SKIPPED_STEPS:], "num_steps": len(seconds), "loss": loss}
    print(json.dumps(told), flush=True)


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--worker"]:
        work(arguments[1], float(arguments[2]), int(arguments[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,4,6", metavar="N,M", help="how many workers (2,4,6)")
    parser.add_argument("--rate", type=float, default=200.0, metavar="R", help="Mbit/s of each host (200)")
    parser.add_argument("--compute", type=float, default=0.5, metavar="S", help="seconds of a worker's own part (0.5)")
    parser.add_argument("--steps", type=int, default=10, metavar="K", help="steps of each job (10)")
    parser.add_argument("--rounds", type=int, default=2, metavar="K", help="jobs of each kind (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    chosen = parser.parse_args(arguments)
    settings = Settings(1e6 * chosen.rate, chosen.compute, chosen.steps, chosen.rounds)
    command = shlex.join(["python", "-m", "benchmarks.ps_vs_ring", *arguments])
    try:
        rows = run([int(count) for count in chosen.hosts.split(",")], settings)
    except Unavailable as error:
        print(f"there can be no stand-in machines here: {error}", file=sys.stderr)
        return 1
    print(f"{command}\n{this_machine()}\n\n{table(rows)}")
    if chosen.json is not None:
        document(rows, settings, command).save(chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
