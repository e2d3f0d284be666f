"""`reigen bench calls`: many tensors as separate calls, what the response cache saves, what fusion costs in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.crew import Crew, CrewSpec
from benchmarks.harness.memory import DTYPES, Staging, measure
from benchmarks.harness.peers import GLOO, find_peer
from benchmarks.harness.report import Document, Row, Verdict
from benchmarks.harness.schedule import Mode, Report, about, alternate, crews
from benchmarks.harness.sizes import format_size, resnet50_counts
from benchmarks.harness.work import Case
from reigen.errors import LaunchError

PEERS = (GLOO,)
#: The modes whose names begin with "reigen" are ours.
SEPARATE, UNCACHED, GROUPED = "reigen separate", "reigen separate, no response cache", "reigen one group"
GLOO_SEPARATE, GLOO_BUCKETS = "gloo separate", "gloo 25 MiB buckets"
#: A crew for each mode: the names of one must not push those of another out of the cache.
_OURS, _UNCACHED_CREW, _GROUP_CREW = "reigen", "reigen without cache", "reigen in groups"
_PROGRAM = "benchmarks.programs.allreduce"
_SMALL_BYTES = 4 << 10
_TINY_BYTES = 4

THRESHOLDS = (1 << 20, 16 << 20, 128 << 20)
_MEMORY_BYTES = 64 << 10
#: So much of the peak may differ by chance: allocators grow in steps.
_SLACK_BYTES = 4 << 20


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        num_ranks: processes of each mode.
        num_tensors: how many small tensors.
        rounds: turns of each mode.
        turn_seconds: about how long a turn is.
        peers: names of peers.
        gradients: whether to measure ResNet-50's gradients.
        memory: whether to measure the memory of fusion.
    """

    num_ranks: int
    num_tensors: int
    rounds: int
    turn_seconds: float
    peers: tuple[str, ...]
    gradients: bool = True
    memory: bool = True


def run(settings: Settings, command: str, report: Report) -> Document:
    """Measure; a peer that is not there or fails is left out, with a line that says why."""
    document = Document(command, settings.num_ranks, settings.rounds)
    found = [find_peer(name, settings.num_ranks) for name in settings.peers]
    document.skipped += [peer for peer in found if isinstance(peer, str)]
    specs = [
        CrewSpec(_OURS, _PROGRAM, settings.num_ranks),
        CrewSpec(_UNCACHED_CREW, _PROGRAM, settings.num_ranks, variables={"REIGEN_CACHE_CAPACITY": "0"}),
        CrewSpec(_GROUP_CREW, _PROGRAM, settings.num_ranks),
        *(peer for peer in found if isinstance(peer, CrewSpec)),
    ]
    with crews(specs, report) as (came, failures):
        document.skipped += [f"{name} is left out: {reason}" for name, reason in failures.items()]
        for crew in came.values():
            document.versions |= crew.versions
        for title, nbytes, modes in _plan(settings, came):
            outcome = alternate(modes, settings.rounds, settings.turn_seconds, about(title, report))
            document.rows.append(Row(title, nbytes, outcome.summaries, SEPARATE, outcome.failures))
    document.notes += negotiation(document.rows, settings.num_tensors)
    if settings.memory:
        _measure_memory(settings, document, report)
    document.verdicts = verdicts(document.rows) + memory_verdicts(document.memory)
    return document


def _plan(settings: Settings, came: Mapping[str, Crew]) -> Iterator[tuple[str, int, list[Mode]]]:
    """(title, bytes, modes) of each row."""
    count = settings.num_tensors

    def modes(nbytes: int, number: int, names: Sequence[tuple[str, str, str]]) -> list[Mode]:
        return [Mode(name, came[crew], Case(case, nbytes, count=number)) for name, crew, case in names if crew in came]

    ours = [(SEPARATE, _OURS, "separate"), (UNCACHED, _UNCACHED_CREW, "separate")]
    theirs = [(GLOO_SEPARATE, GLOO, "separate"), (GLOO_BUCKETS, GLOO, "buckets")]
    group = [(GROUPED, _GROUP_CREW, "group")]
    if settings.gradients:
        yield "ResNet-50, 161 gradients", 4 * sum(resnet50_counts()), modes(0, 0, [*ours, *theirs])
    title = f"{count} tensors of {format_size(_SMALL_BYTES)}"
    yield title, count * _SMALL_BYTES, modes(_SMALL_BYTES, count, [*ours, *group, *theirs])
    yield _tiny(count), count * _TINY_BYTES, modes(_TINY_BYTES, count, [*ours, *group])


def _tiny(count: int) -> str:
    return f"{count} tensors of {format_size(_TINY_BYTES)}"


def negotiation(rows: Sequence[Row], num_tensors: int) -> list[str]:
    """What a call costs where there is next to no data to move: submission, negotiation, completion."""
    tiny = next((row.modes for row in rows if row.title == _tiny(num_tensors)), {})
    return [
        f"a call with next to no data, {name}: {1e6 * tiny[name].median / num_tensors:.2f} us"
        for name in (SEPARATE, UNCACHED, GROUPED)
        if name in tiny
    ]


def _measure_memory(settings: Settings, document: Document, report: Report) -> None:
    for threshold in THRESHOLDS:
        for num_dtypes in (1, len(DTYPES)):
            report(f"memory: threshold {format_size(threshold)}, {num_dtypes} dtypes")
            try:
                found = measure(settings.num_ranks, threshold, num_dtypes, settings.num_tensors, _MEMORY_BYTES)
            except LaunchError as error:
                document.skipped.append(f"reigen: memory, threshold {format_size(threshold)}: {error}")
            else:
                document.memory.append(found)


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """What separate calls must not be: slower than Gloo's, or slower with the cache than without."""
    found = []
    for row in rows:
        for other in (GLOO_SEPARATE, UNCACHED):
            if {SEPARATE, other} <= row.modes.keys():
                value = row.modes[other].median / row.modes[SEPARATE].median
                found.append(Verdict(f"{row.title}: {other} / {SEPARATE}", value, 1.0, at_least=True))
    return found


def memory_verdicts(memory: Sequence[Staging]) -> list[Verdict]:
    """Staging is bounded by the threshold, and does not grow with the number of dtypes."""
    found = []
    one = {staging.threshold_bytes: staging.peak for staging in memory if staging.num_dtypes == 1}
    for staging in memory:
        threshold = format_size(staging.threshold_bytes)
        if staging.num_dtypes > 1 and staging.threshold_bytes in one:
            more = (staging.peak - one[staging.threshold_bytes]) / (1 << 20)
            claim = f"memory, threshold {threshold}: peak with {staging.num_dtypes} dtypes minus peak with 1"
            found.append(Verdict(claim, more, _SLACK_BYTES / (1 << 20), at_least=False, note="MiB"))
    return found
