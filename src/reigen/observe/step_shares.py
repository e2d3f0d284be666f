"""Shares of a rank's steps: waits of its caller, by their reasons, and the program's own time. Pure.

A wait for a collective is cut, in this order, at the moment when the last rank came, when rank 0 had announced it, when
it began, and when it ended:

* late: a rank had not come
* coordination: all had come, and rank 0 had not said so
* queue: what was announced before it was carried out
* moving: it was carried out; of that, in phases of the network, or waiting for a rank that was not as far: if that
  rank began it last, it was late, too
* waking: it was over, and the caller did not run yet

A wait for parameter servers is what it covers of the requests to them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reigen.observe.analysis import (
    MatchedCollective,
    intersect_intervals,
    measure_coverage,
    merge_intervals,
    percentile,
    total_length,
)
from reigen.observe.trace_reader import CollectiveExecution, Interval, Trace

#: Steps that take so many times the median are left out: they compile, evaluate, or write a checkpoint.
_UNUSUAL = 5.0
#: Collectives of at most so many bytes are small: their size hardly matters to how long they take.
SMALL_BYTES = 64 << 10
#: Submissions of small tensors one after the other: more time than this between two is spent on something else.
_SUBMISSION_MICROS = 60.0
#: A wait for a rank that is late with a small tensor, and not with the first of its step, is part of what many
#: tensors cost, unless it takes so much of a step.
_LATE_SHARE = 0.05
_NETWORK_PHASES = ("TCP_", "MPI_", "NCCL_")
_IDLE_PHASE = "WAIT_FOR_OTHER_RANKS"


@dataclass(slots=True)
class StepShares:
    """Shares of one rank's steps: microseconds a step, on average.

    Attributes:
        rank: whose.
        num_steps: how many, without unusual ones; 0: no steps are marked, and all is of the whole time.
        step: one of them.
        waiting: the caller could only wait; late, coordination, queue, moving, waking and servers are parts of it.
        late: by rank: others waited for it.
        coordination, queue, waking: see the module.
        network: moving, between hosts, or over a network within one.
        local: moving, in memory.
        idle: moving, but another rank was not as far.
        small_late, small_coordination, small_moving: of small tensors: a rank was late, with one that is not a step's
            first; and their parts of coordination, and of queue and moving.
        submitting: small tensors were submitted one after the other.
        by_server: requests to this server were not answered, in waits for servers.
        servers: any request was not answered, in these.
        servers_each: the same for each of all marked steps, not on average.
        late_steps: by rank: steps in which others waited for it longer than for anybody else.
        first_lateness, mean_lateness: for how long it alone was missing, with the first collective of a step, and with
            all.
        cpu, cpu_delay, process_cpu: of the thread that marks steps: on a processor, ready to run without one; of all
            threads: on processors. ``cpu`` is None where that is unknown.
    """

    rank: int
    num_steps: int
    step: float
    waiting: float = 0.0
    late: dict[int, float] = field(default_factory=dict)
    late_steps: Counter[int] = field(default_factory=Counter)
    first_lateness: float = 0.0
    mean_lateness: float = 0.0
    coordination: float = 0.0
    queue: float = 0.0
    network: float = 0.0
    local: float = 0.0
    idle: float = 0.0
    waking: float = 0.0
    small_late: float = 0.0
    small_coordination: float = 0.0
    small_moving: float = 0.0
    submitting: float = 0.0
    servers: float = 0.0
    servers_each: list[float] = field(default_factory=list)
    by_server: dict[int, float] = field(default_factory=dict)
    cpu: float | None = None
    process_cpu: float = 0.0
    cpu_delay: float = 0.0

    @property
    def own(self) -> float:
        """Return the time in which the program did not wait here."""
        return max(0.0, self.step - self.waiting)

    @property
    def moving(self) -> float:
        """Return the time in which announced collectives waited for their turn, or were carried out."""
        return self.queue + self.network + self.local + self.idle

    @property
    def blocked(self) -> float:
        """The least for which the rank neither waited here nor had, or wanted, a processor, on any of its threads."""
        return 0.0 if self.cpu is None else max(0.0, self.own - max(self.cpu, self.process_cpu) - self.cpu_delay)


def measure_steps(trace: Trace, matched: Sequence[MatchedCollective]) -> list[StepShares]:
    """Return the shares of each rank that recorded something, by rank."""
    of_rank: defaultdict[int, list[_Part]] = defaultdict(list)
    for occurrence in matched:
        for rank, one in occurrence.executions.items():
            of_rank[rank].append(_Part(one, occurrence))
    return [_measure(trace, rank, of_rank.get(rank, [])) for rank in sorted(trace.names)]


@dataclass(slots=True)
class _Part:
    """Part of a rank in a collective."""

    execution: CollectiveExecution
    occurrence: MatchedCollective
    is_first: bool = False


def _measure(trace: Trace, rank: int, parts: list[_Part]) -> StepShares:
    spans, indices, num_steps = _usual_steps(trace, rank)
    count = max(1, num_steps)
    total = sum(end - begin for begin, end in spans)
    shares = StepShares(rank, num_steps, total / count)
    if not total:
        return shares
    waits = merge_intervals(trace.waits.get(rank, ()))
    shares.waiting = sum(measure_coverage(waits, spans)) / count
    _note_first(parts, spans)
    _Cutter(trace, rank, parts, spans, shares, count).cut()
    _measure_servers(trace, shares, waits, spans, count)
    shares.first_lateness = _lateness(rank, (part for part in parts if part.is_first))
    shares.mean_lateness = _lateness(rank, parts)
    shares.submitting = _submission_time(parts, spans) / count
    times = trace.processor_times.get(rank, [])
    if num_steps and len(times) == len(trace.steps[rank]):
        kept = [times[index] for index in indices]
        shares.cpu = sum(one.thread for one in kept) / count
        shares.process_cpu = sum(one.process for one in kept) / count
        shares.cpu_delay = sum(one.delay for one in kept) / count
    return shares


def _usual_steps(trace: Trace, rank: int) -> tuple[list[Interval], list[int], int]:
    """Return a rank's steps without unusual ones, their places, and how many; or the whole time, and 0."""
    marked = trace.steps.get(rank, [])
    if not marked:
        begins = [one.begun for one in trace.executions if one.rank == rank]
        begins += [one.begun for one in trace.requests if one.rank == rank]
        return ([(min(begins), trace.end)] if begins and trace.end > min(begins) else []), [], 0
    limit = _UNUSUAL * percentile([end - begin for begin, end in marked], 0.5)
    order = sorted(range(len(marked)), key=marked.__getitem__)
    indices = [index for index in order if marked[index][1] - marked[index][0] <= limit]
    return [marked[index] for index in indices], indices, len(indices)


def _lateness(rank: int, parts: Iterable[_Part]) -> float:
    """Return for how long this rank alone was missing, on average."""
    found = [part.occurrence.lateness if part.occurrence.last == rank else 0.0 for part in parts]
    return sum(found) / len(found) if found else 0.0


def _note_first(parts: list[_Part], spans: Sequence[Interval]) -> None:
    """Note which collectives are the first that were submitted in a step."""
    parts.sort(key=lambda part: part.execution.submitted or 0.0)
    submitted = [part.execution.submitted or 0.0 for part in parts]
    for begin, _ in spans:
        index = bisect_right(submitted, begin)
        if index < len(parts):
            parts[index].is_first = True


class _Cutter:
    """Cutter of a rank's waits."""

    def __init__(
        self,
        trace: Trace,
        rank: int,
        parts: Sequence[_Part],
        spans: Sequence[Interval],
        shares: StepShares,
        count: int,
    ) -> None:
        self._trace, self._rank, self._spans, self._shares, self._count = trace, rank, spans, shares, count
        self._by_tensor: defaultdict[str, list[_Part]] = defaultdict(list)
        for part in sorted(parts, key=lambda part: part.execution.ended):
            self._by_tensor[part.execution.tensor].append(part)
        self._ends = {tensor: [p.execution.ended for p in found] for tensor, found in self._by_tensor.items()}
        self._begins = [begin for begin, _ in spans]
        #: by rank: how long it was waited for, in the step that is being cut
        self._late: dict[int, float] = {}
        self._step = -1

    def cut(self) -> None:
        """Add up all waits for collectives in the steps."""
        for begin, end in sorted(self._trace.waits.get(self._rank, ())):
            tensor = self._trace.waited_for.get((self._rank, begin), "")
            ends = self._ends.get(tensor)
            place = bisect_right(self._begins, begin) - 1
            if ends is None or place < 0 or begin >= self._spans[place][1]:
                continue
            if place != self._step:
                self._end_step()
                self._step = place
            index = bisect_right(ends, end + 1.0) - 1
            if index >= 0 and ends[index] > begin:
                self._cut(begin, end, self._by_tensor[tensor][index], self._spans[place])
        self._end_step()

    def _end_step(self) -> None:
        if self._late:
            self._shares.late_steps[max(self._late, key=self._late.__getitem__)] += 1
            self._late.clear()

    def _cut(self, begin: float, end: float, part: _Part, step: Interval) -> None:
        one, shares, count = part.execution, self._shares, self._count
        begun = _clip(one.begun, begin, end)
        ended = _clip(one.ended, begun, end)
        complete = _clip(part.occurrence.alone[1], begin, begun)
        announced = _clip(one.begun if one.announced is None else one.announced, complete, begun)
        is_small = one.nbytes <= SMALL_BYTES
        late = complete - begin
        if is_small and not part.is_first and late < _LATE_SHARE * (step[1] - step[0]):
            shares.small_late += late / count
        elif late > 0 and part.occurrence.last is not None:
            self._add_late(part.occurrence.last, late)
        shares.coordination += (announced - complete) / count
        shares.queue += (begun - announced) / count
        shares.waking += (end - ended) / count
        if is_small:
            shares.small_coordination += (announced - complete) / count
            shares.small_moving += (ended - announced) / count
        self._move(part, ended - begun)

    def _add_late(self, rank: int, micros: float) -> None:
        if micros > 0:
            self._late[rank] = self._late.get(rank, 0.0) + micros
            self._shares.late[rank] = self._shares.late.get(rank, 0.0) + micros / self._count

    def _move(self, part: _Part, moving: float) -> None:
        network, idle = _phase_shares(self._trace.phases.get((self._rank, part.execution.begun), {}))
        self._shares.network += moving * network / self._count
        self._shares.local += moving * (1 - network - idle) / self._count
        last = max(part.occurrence.executions.values(), key=lambda one: one.begun).rank
        if last == part.occurrence.last != self._rank and part.execution.nbytes > SMALL_BYTES:
            self._add_late(last, moving * idle)
        else:
            self._shares.idle += moving * idle / self._count


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _phase_shares(phases: Mapping[str, float]) -> tuple[float, float]:
    """Return the shares of a batch's phases that are the network's, and waiting for other ranks."""
    total = sum(phases.values())
    if not total:
        return 0.0, 0.0
    network = sum(time for name, time in phases.items() if name.startswith(_NETWORK_PHASES))
    return network / total, phases.get(_IDLE_PHASE, 0.0) / total


def _measure_servers(
    trace: Trace, shares: StepShares, waits: Sequence[Interval], spans: Sequence[Interval], count: int
) -> None:
    requests: defaultdict[int, list[Interval]] = defaultdict(list)
    for one in trace.requests:
        if one.rank == shares.rank:
            requests[one.server].append((one.begun, one.ended))
    for server, found in sorted(requests.items()):
        covered = intersect_intervals(merge_intervals(found), waits)
        shares.by_server[server] = sum(measure_coverage(covered, spans)) / count
    every = intersect_intervals(merge_intervals(one for found in requests.values() for one in found), waits)
    shares.servers = sum(measure_coverage(every, spans)) / count
    shares.servers_each = measure_coverage(every, sorted(trace.steps.get(shares.rank, ())))


def _submission_time(parts: Sequence[_Part], spans: Sequence[Interval]) -> float:
    """Return the time in which small tensors were submitted one after the other; ``parts`` in order of submission."""
    small = [part.execution.submitted or 0.0 for part in parts if part.execution.nbytes <= SMALL_BYTES]
    pairs = itertools.pairwise(small)
    gaps = [(begin, min(end, begin + _SUBMISSION_MICROS)) for begin, end in pairs if end - begin < _UNUSUAL * 1e3]
    return total_length(intersect_intervals(merge_intervals(gaps), merge_intervals(spans)))
