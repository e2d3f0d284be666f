"""Reigen's parameter server beside ps-lite in MXNet 1.9.1: two workers on this host, and one or two servers.

    python -m venv V && V/bin/pip install mxnet==1.9.1 numpy==1.23.5 msgspec
    python -m benchmarks.kv --mxnet V/bin/python            about six minutes

Everything runs within one job of processes: each store has its own servers and workers, which sleep while the others
have their turn (docs/benchmarking.md says how turns are measured). Workers are bound to one core each, servers are not.
Without --mxnet, ps-lite is left out.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.harness.crew import Crew, CrewSpec
from benchmarks.harness.report import Document, Row, Verdict, rows_markdown, show
from benchmarks.harness.schedule import Mode, about, alternate, crews, to_stderr
from benchmarks.harness.servers import Seat, parameter_servers, reigen_role, worker_starts
from benchmarks.harness.sizes import resnet50_counts
from benchmarks.harness.work import Case

HERE = Path(__file__).resolve().parent
NUM_WORKERS = 2
REIGEN, MXNET, COPYING = "reigen", "ps-lite", "two copies of the same arrays"
GRADIENTS, ARRAY, SMALL = "ResNet-50, 161 gradients", "one array of 100 MiB", "4 bytes"
GRADIENT_BYTES, ARRAY_BYTES, SMALL_BYTES = 4 * sum(resnet50_counts()), 100 << 20, 4
_FASTER = 3.0


@dataclass(frozen=True)
class Store:
    """One kind of store with servers of its own.

    Attributes:
        system: REIGEN or MXNET.
        num_servers: how many.
        use: "plain": the servers add up; else what is also set: an optimizer, a compression.
    """

    system: str
    num_servers: int
    use: str = "plain"

    @property
    def name(self) -> str:
        servers = "1 server" if self.num_servers == 1 else f"{self.num_servers} servers"
        return f"{self.system}, {servers}" + ("" if self.use == "plain" else f", {self.use}")


def stores(systems: Sequence[str]) -> list[Store]:
    found = [Store(system, servers) for servers in (1, 2) for system in systems]
    found += [Store(system, 2, "sgd") for system in systems]
    return [*found, Store(REIGEN, 1, "2bit")]


class Bench:
    """One run.

    Args:
        rounds: turns of each mode.
        turn_seconds: about how long a turn is.
        mxnet: the Python of an environment with MXNet; None: without.
        command: what was run.
    """

    def __init__(self, rounds: int, turn_seconds: float, mxnet: str | None, command: str) -> None:
        self._rounds, self._turn_seconds, self._mxnet = rounds, turn_seconds, mxnet
        self.document = Document(command, NUM_WORKERS, rounds)
        self._stores = stores([REIGEN] if mxnet is None else [REIGEN, MXNET])

    def run(self) -> None:
        with ExitStack() as stack:
            specs = [self._spec(store, stack.enter_context(self._servers(store))) for store in self._stores]
            specs.append(CrewSpec(COPYING, "benchmarks.programs.copying", NUM_WORKERS))
            came, failures = stack.enter_context(crews(specs, to_stderr))
            self.document.skipped += [f"{name} is left out: {reason}" for name, reason in failures.items()]
            for crew in came.values():
                self.document.versions |= crew.versions
            self._measure(SMALL, Case("plain", SMALL_BYTES, count=1), came, uses=("plain",), joint=False)
            self._measure(ARRAY, Case("plain", ARRAY_BYTES, count=1), came, uses=("plain",))
            self._measure(GRADIENTS, Case("plain"), came, uses=("plain", "sgd", "2bit"))
        self._judge()

    def _measure(
        self, title: str, case: Case, came: Mapping[str, Crew], *, uses: tuple[str, ...], joint: bool = True
    ) -> None:
        modes = [
            Mode(store.name, came[store.name], Case(store.use, case.nbytes, count=case.count), joint)
            for store in self._stores
            if store.use in uses and store.name in came
        ]
        nbytes = case.nbytes * case.count or GRADIENT_BYTES
        if joint:
            modes.append(Mode(COPYING, came[COPYING], Case("two copies", case.nbytes, count=case.count)))
        outcome = alternate(modes, self._rounds, self._turn_seconds, about(title, to_stderr))
        baseline = Store(REIGEN, 1).name
        self.document.rows.append(Row(title, nbytes, outcome.summaries, baseline, outcome.failures))

    def _servers(self, store: Store) -> AbstractContextManager[Mapping[str, str]]:
        """Scheduler and servers of a store."""
        return parameter_servers(NUM_WORKERS, Seat(), [Seat()] * store.num_servers, self._role(store))

    def _role(self, store: Store) -> Callable[[str], list[str]]:
        if store.system == REIGEN:
            return reigen_role
        assert self._mxnet is not None
        command = [self._mxnet, "-c", "import mxnet"]
        return lambda role: command

    def _spec(self, store: Store, common: Mapping[str, str]) -> CrewSpec:
        # The crew's command begins with this Python: $0 of a shell that starts the other one.
        other = ("sh", "-c", f'exec "{self._mxnet}" "$@"') if store.system == MXNET else ()
        program = HERE / ("kv_mxnet.py" if store.system == MXNET else "kv_reigen.py")
        starts = worker_starts(common, [Seat()] * NUM_WORKERS, other)
        return CrewSpec(store.name, str(program), NUM_WORKERS, starts=starts)

    def _judge(self) -> None:
        for row in self.document.rows:
            for servers in (1, 2):
                ours, theirs = (row.modes.get(Store(system, servers).name) for system in (REIGEN, MXNET))
                copies = row.modes.get(COPYING)
                claim = f"{row.title}, {servers} server(s)"
                if ours and theirs and row.title != SMALL:
                    self._verdict(f"{claim}: ps-lite / reigen", theirs.median / ours.median, _FASTER)
                if ours and copies:
                    self._verdict(f"{claim}: two copies / reigen", copies.median / ours.median, 0.5)
                if ours and row.title == SMALL:
                    self._verdict(f"{claim}: microseconds", ours.median * 1e6, 300.0, at_least=False)
        for row in self.document.rows:
            ours, theirs = (row.modes.get(Store(system, 2, "sgd").name) for system in (REIGEN, MXNET))
            if ours and theirs:
                self._verdict(f"{row.title}, 2 servers, SGD: ps-lite / reigen", theirs.median / ours.median, _FASTER)

    def _verdict(self, claim: str, value: float, budget: float, at_least: bool = True) -> None:
        self.document.verdicts.append(Verdict(claim, value, budget, at_least))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mxnet", metavar="PYTHON", help="the Python of an environment with MXNet 1.9.1")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    bench = Bench(
        options.rounds, options.seconds, options.mxnet, shlex.join(["python", "-m", "benchmarks.kv", *sys.argv[1:]])
    )
    bench.run()
    show(bench.document, "push and pull, 2 workers", Console())
    print(f"\n{rows_markdown(bench.document.rows)}")
    if options.json:
        bench.document.save(options.json)
    return 1 if any(row.failures for row in bench.document.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
