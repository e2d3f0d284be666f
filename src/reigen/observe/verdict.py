"""Verdict on a job, from its timeline: what bounded it, how sure that is, and what to do. Pure.

Each possible cause is estimated by itself: the share of a step that would go away with it, or a little less
(`reigen.observe.step_shares` has what it is made of). The largest is the verdict. It is

* clear, if it is large, lasted for the whole recording, and nothing else comes near
* likely, if it is worth a look, but something else may be as important, or events are missing
* unclear otherwise: then no cause is named

Causes can hide each other. Ranks that share too few processors, or wait for their data, are late in turn, so those who
are late in turn are no cause beside that. One rank that is late in most steps is one, whatever else there is.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from reigen.observe.analysis import MatchedCollective, percentile
from reigen.observe.step_shares import SMALL_BYTES, StepShares
from reigen.observe.trace_reader import CollectiveExecution, Trace
from reigen.observe.units import format_bytes, format_time

#: A cause is worth a word from this share of a step on, and clear from that on.
WORTHWHILE, CLEAR_SHARE = 0.08, 0.15
#: A clear cause is so many times as large as the next one.
_CLEAR_MARGIN = 1.4
#: Fewer steps, or a shorter time, allow no conclusion.
MIN_STEPS, MIN_MICROS = 5, 500_000.0
#: Of all time in which ranks were late, one rank's part: it is the late one; clearly so.
_DOMINANT, _CLEARLY_DOMINANT = 0.6, 0.75
#: It was so in more steps than by chance, by so many standard deviations.
_DEVIATIONS = 2.5
#: A smaller part is enough where the next one's is much smaller.
_STANDS_OUT = 0.35
#: Ranks compute all the time: the others' share of a step is below this.
_COMPUTES, _CLEARLY_COMPUTES = 0.85, 0.9
#: Part of the time without a processor for which the job's own ranks must be to blame, if they are too many.
_OWN_PART = 0.3
#: More small tensors in a step than that are many.
_MANY_A_STEP = 32
#: Batches of at most so many bytes would have been better together.
_SMALL_BATCH_BYTES = 1 << 20
_MANY_BATCHES = 8
#: One server's part is so many times that of the others: the keys are spread unevenly.
_UNEVEN = 1.5
#: All ranks are blocked, outside of Reigen, for such a part of a step.
_BLOCKED = 0.25
_LATE_ADVICE = "look at its data loading, its share of the data, and what else runs on its host"
_LATE_IN_TURN_ADVICE = "look at what differs between batches (their size, the time to read them) and at other programs"


class Cause(enum.Enum):
    """Cause that bounds a job."""

    LATE_RANK = "late rank"
    LATE_IN_TURN = "ranks late in turn"
    PROCESSORS = "processors"
    SMALL_TENSORS = "small tensors"
    SMALL_BATCHES = "small batches"
    COORDINATION = "coordination"
    NETWORK = "network"
    MEMORY = "memory"
    SERVER = "server"
    COMPUTE = "compute"
    INPUT = "input"
    UNCLEAR = "unclear"


class Confidence(enum.IntEnum):
    """Confidence in a verdict."""

    UNCLEAR = 0
    LIKELY = 1
    CLEAR = 2


@dataclass(frozen=True)
class JobVerdict:
    """Verdict on what bounded a job, or one cause of several.

    Attributes:
        cause: what it was.
        share: of a step (of the whole time, where no steps are marked) that it took.
        confidence: in the cause.
        finding: what was seen, with figures: a sentence without its full stop.
        advice: what to do; empty: nothing.
        rank: that was late, if it was one.
        server: the parameter server, if it was one.
        others: further causes that are worth a word, the largest first.
    """

    cause: Cause
    share: float
    confidence: Confidence
    finding: str
    advice: str = ""
    rank: int | None = None
    server: int | None = None
    others: tuple[JobVerdict, ...] = ()

    def lines(self) -> list[str]:
        """Return it in one to three lines."""
        hedge = "probably: " if self.confidence is Confidence.LIKELY else ""
        lines = [hedge + self.finding]
        if self.advice:
            lines.append(f"what to do: {self.advice}")
        if self.others:
            lines.append("also: " + "; ".join(other.finding for other in self.others[:2]))
        return lines


def judge(trace: Trace, matched: Sequence[MatchedCollective], shares: Sequence[StepShares]) -> JobVerdict:
    """Judge a job.

    Args:
        trace: its timeline.
        matched: its collectives, of the steps only.
        shares: of its ranks' steps.
    """
    known = [one for one in shares if one.step > 0]
    if reason := _too_little(known):
        return JobVerdict(Cause.UNCLEAR, 0.0, Confidence.UNCLEAR, reason)
    case = _Case(trace, matched, known)
    found = [verdict for estimate in _ESTIMATES if (verdict := estimate(case)) is not None]
    found = sorted((one for one in found if one.share >= WORTHWHILE), key=lambda one: -one.share)
    is_explained = any(one.cause in {Cause.PROCESSORS, Cause.INPUT} for one in found)
    least = 1.0 if is_explained else CLEAR_SHARE
    found = [one for one in found if one.cause is not Cause.LATE_IN_TURN or one.share >= least]
    found.sort(key=_is_elsewhere)
    if not found:
        return _judge_own_time(case)
    first, others = found[0], tuple(found[1:])
    return replace(first, confidence=_confidence(case, first, others), others=others)


def _is_elsewhere(found: JobVerdict) -> bool:
    """Return whether a cause lies outside of the job, so that others are named before it.

    Ranks that wait for devices are no cause if these work meanwhile; other programs on the host are somebody else's.
    """
    return found.cause is Cause.INPUT or (found.cause is Cause.PROCESSORS and found.confidence < Confidence.CLEAR)


def _too_little(shares: Sequence[StepShares]) -> str:
    """Say why nothing can be said; empty: something can."""
    if not shares:
        return "nothing can be said: no rank has recorded anything"
    num_steps = min(one.num_steps for one in shares)
    total = max(one.step * max(1, one.num_steps) for one in shares)
    if 0 < num_steps < MIN_STEPS or total < MIN_MICROS:
        steps = f"{num_steps} steps, " if num_steps else ""
        return (
            f"nothing can be said of {steps}{format_time(total)}: {MIN_STEPS} steps and {format_time(MIN_MICROS)} are "
            "the least"
        )
    return ""


class _Case:
    """Job that is judged, with figures that several estimates need."""

    def __init__(self, trace: Trace, matched: Sequence[MatchedCollective], shares: list[StepShares]) -> None:
        self.trace, self.matched, self.shares = trace, matched, shares
        self.by_rank = {one.rank: one for one in shares}
        self.num_steps = min(one.num_steps for one in shares)
        self.step = _mean([one.step for one in shares])
        self.unit = "a step" if self.num_steps else "the time"
        self.hosts = {rank: host_of(name) for rank, name in trace.names.items()}
        #: share of a step that is the cost of small batches, and not of moving what is in them
        self.small_batches = 0.0
        #: what small tensors cost has a cause of its own
        self.has_many_small = False

    def of_step(self, value: Callable[[StepShares], float]) -> float:
        """Return the mean over ranks of a part of their steps."""
        return _mean([value(one) / one.step for one in self.shares])

    @functools.cached_property
    def workers(self) -> list[StepShares]:
        """Ranks that use parameter servers."""
        return [one for one in self.shares if one.by_server]

    @functools.cached_property
    def server_waits(self) -> list[list[float]]:
        """Of each step, the times for which workers waited for servers, the shortest first.

        Of the mean step only, where they do not make the same steps.
        """
        lengths = {len(one.servers_each) for one in self.workers}
        if len(lengths) > 1 or not self.num_steps:
            return [sorted(one.servers for one in self.workers)]
        return [sorted(times) for times in zip(*(one.servers_each for one in self.workers), strict=True)]

    def name(self, rank: int) -> str:
        """Return a rank's name for people."""
        several = len(set(self.hosts.values())) > 1
        return f"rank {rank} (host {self.hosts[rank]})" if several and rank in self.hosts else f"rank {rank}"

    def time(self, micros: float) -> str:
        """Return a time, of a step or of all."""
        return f"{format_time(micros)} {self.unit}" if self.num_steps else format_time(micros)


def host_of(name: str) -> str:
    """Return the host in a rank's name in a timeline."""
    match = re.fullmatch(r"rank \d+ \((.*?)(, view \d+)?\)", name)
    return name if match is None else match[1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# -- a rank that is late ----------------------------------------------------------------------------------------------


def _late_rank(case: _Case) -> JobVerdict | None:
    """Estimate waiting for one rank in most steps, or for several in turn."""
    late: defaultdict[int, float] = defaultdict(float)
    for one in case.shares:
        for rank, micros in one.late.items():
            late[rank] += micros / one.step / max(1, len(case.shares) - 1)
    total = sum(late.values())
    if not total:
        return None
    rank = max(late, key=late.__getitem__)
    if not _is_late_one(case, rank, late):
        mean = total * (len(case.shares) - 1) / len(case.shares)
        finding = (
            f"{mean:.0%} of {case.unit} was waiting for ranks that were late in turn, rank {rank} most often "
            f"({late[rank] / total:.0%} of it)"
        )
        return JobVerdict(Cause.LATE_IN_TURN, mean, Confidence.LIKELY, finding, _LATE_IN_TURN_ADVICE)
    reason, advice = _why_late(case, rank)
    confidence = Confidence.CLEAR if late[rank] >= _CLEARLY_DOMINANT * total else Confidence.LIKELY
    finding = f"{late[rank]:.0%} of {case.unit} was waiting for {case.name(rank)}: {reason}"
    return JobVerdict(Cause.LATE_RANK, late[rank], confidence, finding, advice, rank=rank)


def _is_late_one(case: _Case, rank: int, late: Mapping[int, float]) -> bool:
    """Return whether a rank is late much more than the others, and not by chance.

    Args:
        case: what is judged.
        rank: the one that was waited for longest.
        late: by rank: how long it was waited for.
    """
    total = sum(late.values())
    if late[rank] >= _CLEARLY_DOMINANT * total:
        return True
    second = max((micros for other, micros in late.items() if other != rank), default=0.0)
    if late[rank] < _DOMINANT * total and not (late[rank] >= _STANDS_OUT * total and late[rank] >= 3 * second):
        return False
    # the last of n ranks by chance: in a binomial number of steps
    others = [one for one in case.shares if one.rank != rank]
    num_last = _mean([one.late_steps[rank] for one in others])
    num_steps, chance = max(1, case.num_steps), 1 / len(case.shares)
    limit = num_steps * chance + _DEVIATIONS * math.sqrt(num_steps * chance * (1 - chance))
    return num_last >= min(limit, num_steps)


def _why_late(case: _Case, rank: int) -> tuple[str, str]:
    """Return why a rank is late, as far as its processor time shows, and what to do."""
    own, others = case.by_rank.get(rank), [one for one in case.shares if one.rank != rank]
    if own is None or own.cpu is None or any(one.cpu is None for one in others):
        return "it came last", _LATE_ADVICE

    def more(value: Callable[[StepShares], float]) -> float:
        return value(own) - percentile([value(one) for one in others], 0.5)

    extra = max(more(lambda one: one.own), 1.0)
    busy = max(more(lambda one: one.cpu or 0.0), more(lambda one: one.process_cpu))
    delay, blocked = more(lambda one: one.cpu_delay), more(lambda one: one.blocked)
    is_early = own.first_lateness > 0.8 * own.mean_lateness > 0
    where = "before its first collective of a step, " if is_early else ""
    if blocked >= 0.4 * extra and blocked >= max(busy, delay):
        text = f"{where}it waited {case.time(blocked)} longer than others for something else than a processor"
        return text, "look at its data loader, and at files, locks and devices that it waits for"
    if busy >= 0.3 * extra:  # where processors are busy, who computes longer waits for them longer, too
        text = f"{where}it computed {case.time(busy)} longer than others"
        return text, "look at its share of the data, and whether its host is slower"
    if delay >= 0.5 * extra:
        text = f"it was ready to run, and no processor was free, for {case.time(delay)} longer than others"
        return text, "look at what else runs on its host, and at the processors that it may use (reigen run --bind)"
    return f"{where}it came {case.time(extra)} later than others", _LATE_ADVICE


# -- processors -------------------------------------------------------------------------------------------------------


def _processors(case: _Case) -> JobVerdict | None:
    """Estimate the time in which ranks were ready to run, and no processor was free."""
    if any(one.cpu is None for one in case.shares):
        return None
    by_host: defaultdict[str, list[StepShares]] = defaultdict(list)
    for one in case.shares:
        by_host[case.hosts.get(one.rank, "")].append(one)
    host, ranks = max(by_host.items(), key=lambda item: _mean([one.cpu_delay / one.step for one in item[1]]))
    share = _mean([one.cpu_delay / one.step for one in ranks])
    usable = _usable_processors(case.trace, ranks)
    used = sum(one.process_cpu / one.step for one in ranks)
    # what they computed takes so long on these processors, whatever else runs; without waiting for one, so long
    least = sum(one.process_cpu for one in ranks) / usable if usable else 0.0
    alone = _mean([one.step - one.cpu_delay for one in ranks])
    own_share = (least - alone) / _mean([one.step for one in ranks])
    where = f" of host {host}" if len(by_host) > 1 else ""
    finding = f"for {share:.0%} of {case.unit} the ranks{where} were ready to run, and no processor was free"
    if own_share >= max(WORTHWHILE, _OWN_PART * share):
        finding += f": {len(ranks)} ranks on {usable:g} processor{'s' * (usable != 1)}, of which they used {used:.1f}"
        advice = "run fewer ranks on this host, or fewer threads in each (OMP_NUM_THREADS)"
        return JobVerdict(Cause.PROCESSORS, share, Confidence.CLEAR, finding, advice)
    finding += f": other processes used what the ranks did not, {used:.1f} of {usable:g}" if usable else ""
    return JobVerdict(
        Cause.PROCESSORS, share, Confidence.LIKELY, finding, "look at what else runs there, and at --bind"
    )


def _usable_processors(trace: Trace, ranks: Sequence[StepShares]) -> float:
    """Return how many processors ranks of one host may use; 0: that is unknown."""
    allowed = [trace.cpus[one.rank] for one in ranks if one.rank in trace.cpus]
    count = functools.reduce(lambda mask, one: mask | one.mask, allowed, 0).bit_count()
    quota = max((one.quota for one in allowed), default=0.0)
    return min(count, quota) if quota else float(count)


# -- communication ----------------------------------------------------------------------------------------------------


def _reductions(case: _Case, rank: int) -> list[CollectiveExecution]:
    found = (one.executions.get(rank) for one in case.matched)
    return sorted((one for one in found if one is not None), key=lambda one: one.begun)


def _a_step(case: _Case, number: float) -> float:
    return number / max(1, case.num_steps)


def _small_tensors(case: _Case) -> JobVerdict | None:
    """Estimate the fixed cost of many small tensors."""
    first = case.shares[0].rank
    small = [one for one in _reductions(case, first) if one.nbytes <= SMALL_BYTES]
    count = _a_step(case, len(small))
    if not case.num_steps or count < _MANY_A_STEP:
        return None
    share = case.of_step(
        lambda one: one.small_late + one.small_coordination + one.small_moving + min(one.submitting, one.own)
    )
    case.has_many_small = True
    size = format_bytes(percentile([one.nbytes for one in small], 0.5))
    together = percentile([one.batch for one in small], 0.5)
    finding = (
        f"{share:.0%} of a step is what {count:.0f} small tensors cost (median {size}, {together:.0f} of them travel "
        "together), whatever their size"
    )
    advice = (
        "one call for all of them (grouped_allreduce, DistributedOptimizer), or at least submit all before waiting for "
        "the first (the _async functions)"
    )
    return JobVerdict(Cause.SMALL_TENSORS, share, Confidence.CLEAR, finding, advice)


def _small_batches(case: _Case) -> JobVerdict | None:
    """Estimate the cost of batches that could have travelled together."""
    executions = [one for one in _reductions(case, case.shares[0].rank) if one.kind == "ALLREDUCE"]
    batches: dict[float, list[CollectiveExecution]] = defaultdict(list)
    for one in executions:
        batches[one.begun].append(one)
    order = sorted(batches)
    apart = [
        now
        for before, now in itertools.pairwise(order)
        if all(one.announced is not None and one.announced <= before for one in batches[now])
        and sum(one.nbytes for one in [*batches[now], *batches[before]]) <= _SMALL_BATCH_BYTES
    ]
    if not case.num_steps or case.has_many_small or _a_step(case, len(apart)) < _MANY_BATCHES:
        return None
    cost = percentile([batches[begin][0].ended - begin for begin in apart], 0.1)
    part = len(apart) / len(order)
    waited = case.of_step(lambda one: part * one.moving)
    share = min(waited, _a_step(case, len(apart)) * cost / case.step)
    case.small_batches = share
    nbytes = format_bytes(percentile([sum(one.nbytes for one in batches[begin]) for begin in apart], 0.5))
    finding = (
        f"{share:.0%} of a step is what {_a_step(case, len(apart)):.0f} batches of {nbytes} cost that could have "
        "travelled with the one before"
    )
    advice = "a larger HOROVOD_FUSION_THRESHOLD, or one call for all of them (grouped_allreduce)"
    return JobVerdict(Cause.SMALL_BATCHES, share, Confidence.LIKELY, finding, advice)


def _coordination(case: _Case) -> JobVerdict | None:
    """Estimate waiting for rank 0 to announce tensors that all ranks had submitted."""

    def waited(one: StepShares) -> float:
        return one.coordination - (one.small_coordination if case.has_many_small else 0.0)

    share, micros = case.of_step(waited), _mean([waited(one) for one in case.shares])
    count = _a_step(case, len(case.matched))
    finding = (
        f"{share:.0%} of {case.unit} was waiting for rank 0 to announce what all ranks had submitted "
        f"({case.time(micros)}, {count:.0f} collectives)"
    )
    advice = "fewer collectives (grouped_allreduce), and a processor for rank 0 that nothing else uses"
    return JobVerdict(Cause.COORDINATION, share, Confidence.LIKELY, finding, advice)


def _moving(case: _Case) -> JobVerdict | None:
    """Estimate moving data while the training threads had nothing to do."""
    network, local = case.of_step(lambda one: one.network), case.of_step(lambda one: one.local)
    share = case.of_step(lambda one: one.moving - one.idle - (one.small_moving if case.has_many_small else 0.0))
    share -= case.small_batches
    by_rank: defaultdict[int, float] = defaultdict(float)
    for matched in case.matched:
        for rank, one in matched.executions.items():
            by_rank[rank] += one.nbytes
    nbytes = _a_step(case, _mean([*by_rank.values()]))
    moving = _mean([one.moving - one.idle for one in case.shares])
    speed = f" at {8 * nbytes / moving / 1e3:.3g} Gbit/s" if nbytes and moving else ""
    of_network = network > local
    where = "between hosts" if len(set(case.hosts.values())) > 1 else "over the network" if of_network else "in memory"
    finding = (
        f"{share:.0%} of {case.unit} was moving data {where} while nothing could be computed: {format_bytes(nbytes)} "
        f"{case.unit} on each rank{speed}"
    )
    advice = (
        "more computing for each step (a larger batch, backward_passes_per_step), fewer bytes (Compression.fp16 or "
        "bf16), other buckets (REIGEN_BUCKET_BYTES)"
    )
    if of_network:
        return JobVerdict(Cause.NETWORK, share, Confidence.CLEAR, finding, f"{advice}, or a faster network")
    return JobVerdict(Cause.MEMORY, share, Confidence.CLEAR, finding, advice)


# -- parameter servers ------------------------------------------------------------------------------------------------


def _servers(case: _Case) -> JobVerdict | None:
    """Estimate waiting for parameter servers, of the worker that waits least in a step."""
    workers = case.workers
    if not workers:
        return None
    share = _mean([ordered[0] for ordered in case.server_waits]) / case.step
    busy: defaultdict[int, float] = defaultdict(float)
    for one in workers:
        for server, micros in one.by_server.items():
            busy[server] += micros / len(workers)
    server = max(busy, key=busy.__getitem__)
    nbytes = _a_step(case, sum(one.nbytes for one in case.trace.requests) / len(workers))
    others = [micros for other, micros in busy.items() if other != server]
    is_uneven = bool(others) and busy[server] > _UNEVEN * _mean(others)
    which = f"the {len(busy)} servers" if others and not is_uneven else f"server {server}"
    finding = (
        f"{share:.0%} of {case.unit} was waiting for {which}, on the worker that waited least: "
        f"{format_bytes(nbytes)} {case.unit} there and back on each of {len(workers)} workers"
    )
    advice = "more servers (reigen run -s), on hosts of their own, or compression"
    if is_uneven:
        advice = "spread the keys: large ones are cut from REIGEN_KV_SLICE_BYTES on; more servers help less"
    number = None if others and not is_uneven else server
    return JobVerdict(Cause.SERVER, share, Confidence.CLEAR, finding, advice, server=number)


def _late_worker(case: _Case) -> JobVerdict | None:
    """Estimate waiting at parameter servers for one worker, or for several in turn."""
    workers = case.workers
    if len(workers) < 2:
        return None
    late = min(workers, key=lambda one: one.servers)
    second = min(one.servers for one in workers if one is not late)
    share = (second - late.servers) / case.step
    apart = _mean([ordered[1] - ordered[0] for ordered in case.server_waits]) / case.step
    if share < _DOMINANT * apart:
        finding = f"{apart:.0%} of {case.unit} was waiting at the servers for workers that were late in turn"
        return JobVerdict(Cause.LATE_IN_TURN, apart, Confidence.LIKELY, finding, _LATE_IN_TURN_ADVICE)
    reason, advice = _why_late(case, late.rank)
    finding = f"{share:.0%} of {case.unit} the others were waiting at the servers for {case.name(late.rank)}: {reason}"
    return JobVerdict(Cause.LATE_RANK, share, Confidence.CLEAR, finding, advice, rank=late.rank)


def _input(case: _Case) -> JobVerdict | None:
    """Estimate waiting of all ranks for something that is neither Reigen nor a processor."""
    if any(one.cpu is None for one in case.shares):
        return None
    share = min(one.blocked / one.step for one in case.shares)
    if share < _BLOCKED:
        return None
    finding = (
        f"for {share:.0%} of {case.unit} and more each rank neither computed nor waited for others: it waited for its "
        "data, for files, or for a device"
    )
    advice = "if no GPU works meanwhile, read data in more processes, and ahead (num_workers, prefetching)"
    return JobVerdict(Cause.INPUT, share, Confidence.LIKELY, finding, advice)


_ESTIMATES: tuple[Callable[[_Case], JobVerdict | None], ...] = (
    _late_rank,
    _processors,
    _small_tensors,
    _small_batches,
    _coordination,
    _moving,
    _servers,
    _late_worker,
    _input,
)


# -- all together -----------------------------------------------------------------------------------------------------


def _judge_own_time(case: _Case) -> JobVerdict:
    """Judge a job in which nothing that concerns several ranks is worth a word."""
    own = case.of_step(lambda one: one.own)
    if own < _COMPUTES or not case.num_steps:  # without steps, nobody may have computed
        finding = f"nothing stands out: {1 - own:.0%} of {case.unit} was waiting, for several reasons"
        return JobVerdict(Cause.UNCLEAR, 1 - own, Confidence.UNCLEAR, finding)
    finding = f"{own:.0%} of a step is the program's own computing, evenly on all ranks: nothing to gain between ranks"
    return JobVerdict(Cause.COMPUTE, own, Confidence.CLEAR if own >= _CLEARLY_COMPUTES else Confidence.LIKELY, finding)


def _confidence(case: _Case, first: JobVerdict, others: Sequence[JobVerdict]) -> Confidence:
    """Return how sure the first of several causes is."""
    is_clear = first.share >= max([CLEAR_SHARE, *(_CLEAR_MARGIN * other.share for other in others)])
    if case.trace.num_dropped or len(case.trace.names) < case.trace.size:
        is_clear = False
    if 2 * max(case.trace.clock_errors.values(), default=0.0) >= first.share * case.step:
        is_clear = False  # times of different ranks do not compare so exactly
    return min(first.confidence, Confidence.CLEAR if is_clear else Confidence.LIKELY)
