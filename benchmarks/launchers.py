"""How long `reigen run` takes to start ranks on several hosts by ssh and by Slurm, on stand-in machines (needs root).

    python -m benchmarks.launchers
    python -m benchmarks.launchers --hosts 4 --ranks 8 --rounds 5
    python -m benchmarks.launchers --json docs/data/records/launchers.json

The machines share this one's processors, so importing takes its time. Real sshd and Slurm; each rank joins the job and
ends. Beside it: what srun takes to run Python on all hosts, and until an agent on one other host has been imported.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from rich.console import Console

from benchmarks.harness.figures import summarize
from benchmarks.harness.record import Column, Quantity, Record, make_record
from benchmarks.harness.report import Document, Row, Verdict, show
from benchmarks.harness.schedule import rotated, to_stderr
from reigen.errors import LaunchError
from tests.lab import Host, Hosts, Unavailable
from tests.network.slurm import Slurm, why_no_slurm

SSH, SLURM, SRUN, AGENT = "ssh", "Slurm", "srun python -c pass", "srun, one agent"
_DIFFERENCE_SECONDS, _AGENT_SECONDS, _LIMIT_SECONDS = 1.5, 1.0, 60.0
_SOURCE = Path(__file__).parents[1]
_RUN = (sys.executable, "-m", "reigen", "run")
_RANK = (sys.executable, "-c", "import reigen; reigen.init()")
_STEP = ("srun", "--overlap", "--mpi=none", "--mem=0")


def measure(num_hosts: int, num_ranks: int, rounds: int, document: Document) -> None:
    """Start by each way alternately, after one start of each that does not count.

    Raises:
        Unavailable: no stand-in machines, or no Slurm, can be had here.
        LaunchError: a start failed.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(Hosts(num_hosts, ssh_port=22, shared=[directory]))
        slurm = Slurm(hosts, directory)
        allocation = stack.enter_context(slurm.allocation(f"-N{num_hosts}", f"-n{num_ranks}"))
        each, more = divmod(num_ranks, num_hosts)
        slots = ",".join(f"{host.name}:{each + (number < more)}" for number, host in enumerate(hosts))
        agent = (sys.executable, "-P", "-c", "import reigen.launch.agent.__main__")
        commands: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {
            SSH: ((*_RUN, "-np", str(num_ranks), "-H", slots, *_RANK), {}),
            SLURM: ((*_RUN, *_RANK), {**allocation, "SLURM_TASKS_PER_NODE": f"{each}(x{num_hosts})"}),
            SRUN: ((*_STEP, f"-N{num_hosts}", f"-n{num_ranks}", sys.executable, "-c", "pass"), allocation),
            AGENT: ((*_STEP, "-N1", "-n1", "-w", hosts[1].name, *agent), allocation),
        }
        samples: dict[str, list[list[float]]] = {name: [] for name in commands}
        for number in range(rounds + 1):
            for name in rotated(list(commands), number):
                to_stderr(f"round {number} of {rounds}, {name}")
                seconds = _time(hosts[0], *commands[name])
                if number:
                    samples[name].append([seconds])
    summaries = {name: summarize(found) for name, found in samples.items()}
    document.rows.append(Row("start and end", 0, summaries, SSH))
    apart = abs(summaries[SLURM].median - summaries[SSH].median)
    document.verdicts += [
        Verdict("Slurm and ssh: seconds apart", apart, _DIFFERENCE_SECONDS, at_least=False, note="s"),
        Verdict("an agent by srun", summaries[AGENT].median, _AGENT_SECONDS, at_least=False, note="s"),
    ]


def _time(host: Host, command: Sequence[str], environ: Mapping[str, str]) -> float:
    """Seconds from the start of a command on a machine to its end."""
    begin = time.perf_counter()
    variables = {**environ, "PYTHONPATH": f"{_SOURCE / 'src'}"}
    with closing(host.start(command, env=variables, cwd="/")) as process:
        code = process.wait(_LIMIT_SECONDS)
        seconds = time.perf_counter() - begin
        if code:
            raise LaunchError(f"{' '.join(command)} ended with exit code {code}: {process.output()[1][-2000:]}")
    return seconds


#: What the table calls the ways, and their budgets.
_SHOWN = {
    SSH: ("`reigen run -H ...`, ssh", ""),
    SLURM: ("`reigen run` in a job of Slurm's", f"within {_DIFFERENCE_SECONDS:g} s of ssh"),
    AGENT: ("srun, until an agent on one host has been imported", f"{_AGENT_SECONDS:g} s"),
    SRUN: ("`srun python -c pass` on all hosts", ""),
}


def make_table(document: Document, num_hosts: int) -> Record:
    """Return what `measure` has found, as a table."""
    [row] = document.rows
    lines: dict[str, dict[str, Quantity | str]] = {}
    for name, (title, budget) in _SHOWN.items():
        lines[title] = {"start and end": Quantity(row.modes[name].median, unit="s"), "budget": budget}
    ranks, rounds = document.num_ranks, document.rounds
    command = f"python -m benchmarks.launchers --hosts {num_hosts} --ranks {ranks} --rounds {rounds}"
    conditions = f"{ranks} ranks on {num_hosts} stand-in hosts, medians of {rounds} rounds, alternating"
    columns = [Column("start and end"), Column("budget")]
    return make_record(command, conditions, "", columns, lines, document.machine)


def main() -> int:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launchers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hosts", type=int, default=4, help="stand-in machines (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="a multiple of the hosts (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each way (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args()
    if options.hosts < 2 or options.ranks < options.hosts or options.ranks % options.hosts or options.rounds < 1:
        parser.error("at least two hosts, a multiple of them as ranks, and one round are needed")
    if os.geteuid() != 0 or (reason := why_no_slurm()):
        parser.error("root is needed" if os.geteuid() != 0 else reason)
    document = Document("launchers", options.ranks, options.rounds)
    try:
        measure(options.hosts, options.ranks, options.rounds, document)
    except (LaunchError, Unavailable) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    show(document, f"Seconds to start and end {options.ranks} ranks on {options.hosts} hosts", Console())
    if options.json is not None:
        make_table(document, options.hosts).save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
