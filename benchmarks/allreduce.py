"""`reigen bench allreduce`: sums of float32 over the ranks of this host, Reigen's and its peers'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.crew import Crew, CrewSpec
from benchmarks.harness.peers import GLOO, MPI, find_peer
from benchmarks.harness.report import Document, Row, Verdict
from benchmarks.harness.schedule import Mode, Report, about, alternate, crews
from benchmarks.harness.sizes import format_size, resnet50_counts
from benchmarks.harness.work import Case

PEERS = (GLOO, MPI)
_REIGEN, _COPYING = "reigen", "copying"

REGISTERED, ORDINARY, COPY = "reigen registered", "reigen ordinary", "copy of as many bytes"
FRESH_COPY = "copy of fresh data"
BACKEND = "reigen's backend alone"
BUCKETS, SEPARATE = "reigen buckets", "reigen separate"
GLOO_SUM, MPI_SUM = "gloo", "mpi"
GLOO_BUCKETS, GLOO_SEPARATE, MPI_SEPARATE = "gloo 25 MiB buckets", "gloo separate", "mpi one by one"
_RESNET = "ResNet-50, 161 gradients"
#: Below this size writing fresh data takes next to nothing, so a rank that waits for another waits for the operation:
#: each call counts as its caller sees it, scheduling included. From here on a rank may be late because it still writes.
_LATENCY_BYTES = 1 << 20


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        num_ranks: processes of each mode.
        sizes: bytes on each rank.
        rounds: turns of each mode.
        turn_seconds: about how long a turn is.
        peers: names of peers.
        gradients: whether to measure ResNet-50's gradients.
    """

    num_ranks: int
    sizes: tuple[int, ...]
    rounds: int
    turn_seconds: float
    peers: tuple[str, ...]
    gradients: bool = True


def run(settings: Settings, command: str, report: Report) -> Document:
    """Measure; a peer that is not there or fails is left out, with a line that says why."""
    document = Document(command, settings.num_ranks, settings.rounds)
    found = [find_peer(name, settings.num_ranks) for name in settings.peers]
    document.skipped += [peer for peer in found if isinstance(peer, str)]
    specs = [
        CrewSpec(_REIGEN, "benchmarks.programs.allreduce", settings.num_ranks),
        CrewSpec(_COPYING, "benchmarks.programs.copying", settings.num_ranks),
        *(peer for peer in found if isinstance(peer, CrewSpec)),
    ]
    with crews(specs, report) as (came, failures):
        document.skipped += [f"{name} is left out: {reason}" for name, reason in failures.items()]
        for crew in came.values():
            document.versions |= crew.versions
        for title, nbytes, baseline, modes in _plan(settings, came):
            outcome = alternate(modes, settings.rounds, settings.turn_seconds, about(title, report))
            document.rows.append(Row(title, nbytes, outcome.summaries, baseline, outcome.failures))
    document.verdicts = verdicts(document.rows, settings.num_ranks)
    return document


def _plan(settings: Settings, came: Mapping[str, Crew]) -> Iterator[tuple[str, int, str, list[Mode]]]:
    """(title, bytes, baseline, modes) of each row."""
    for nbytes in settings.sizes:
        modes = [
            Mode(name, came[crew], Case(case, nbytes), joint=nbytes >= _LATENCY_BYTES and crew != _COPYING)
            for name, crew, case in (
                (REGISTERED, _REIGEN, "registered"),
                (ORDINARY, _REIGEN, "ordinary"),
                (BACKEND, _REIGEN, "backend"),
                (GLOO_SUM, GLOO, "ordinary"),
                (MPI_SUM, MPI, "ordinary"),
                (COPY, _COPYING, "copy"),
                (FRESH_COPY, _COPYING, "fresh copy"),
            )
            if crew in came
        ]
        yield format_size(nbytes), nbytes, REGISTERED, modes
    if settings.gradients:
        modes = [
            Mode(name, came[crew], Case(case))
            for name, crew, case in (
                (BUCKETS, _REIGEN, "buckets"),
                (SEPARATE, _REIGEN, "separate"),
                (GLOO_BUCKETS, GLOO, "buckets"),
                (GLOO_SEPARATE, GLOO, "separate"),
                (MPI_SEPARATE, MPI, "separate"),
            )
            if crew in came
        ]
        yield _RESNET, 4 * sum(resnet50_counts()), BUCKETS, modes


#: (title, slower mode, faster mode, at least so many times as long): the budgets for two ranks on two cores.
_RATIOS = (
    ("1 KiB", MPI_SUM, ORDINARY, 0.1),
    ("4 KiB", BACKEND, ORDINARY, 0.5),
    ("25 MiB", GLOO_SUM, REGISTERED, 6.0),
    ("25 MiB", GLOO_SUM, ORDINARY, 2.5),
    ("25 MiB", MPI_SUM, REGISTERED, 1.5),
    ("25 MiB", COPY, REGISTERED, 0.6),
    ("100 MiB", GLOO_SUM, REGISTERED, 4.0),
    ("100 MiB", MPI_SUM, REGISTERED, 1.5),
    ("100 MiB", COPY, REGISTERED, 0.6),
    (_RESNET, GLOO_BUCKETS, BUCKETS, 4.0),
    (_RESNET, GLOO_BUCKETS, SEPARATE, 2.0),
    (_RESNET, MPI_SEPARATE, SEPARATE, 1.0),
)
#: ranks -> microseconds that a blocking named sum of 1 KiB may take.
_LATENCY_BUDGETS = {2: 250.0, 4: 1000.0}


def verdicts(rows: Sequence[Row], num_ranks: int) -> list[Verdict]:
    """The budgets that this run says something about."""
    by_title = {row.title: row.modes for row in rows}
    found: list[Verdict] = []
    budget = _LATENCY_BUDGETS.get(num_ranks)
    if budget and ORDINARY in by_title.get("1 KiB", {}):
        median = by_title["1 KiB"][ORDINARY].median
        found.append(Verdict(f"1 KiB: {ORDINARY}, blocking, named", median * 1e6, budget, at_least=False, note="us"))
    for title, slower, faster, factor in _RATIOS if num_ranks == 2 else ():
        modes = by_title.get(title, {})
        if slower in modes and faster in modes:
            value = modes[slower].median / modes[faster].median
            found.append(Verdict(f"{title}: {slower} / {faster}", value, factor, at_least=True))
    return found
