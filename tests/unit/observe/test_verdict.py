"""Verdicts on simulated jobs whose cause was planted, in several sizes and with more or less noise."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from reigen.observe.summary import summarize
from reigen.observe.trace_reader import Trace
from reigen.observe.verdict import Cause, Confidence, JobVerdict, host_of
from tests.unit.observe.simulated_job import MS, Job, simulate

COMPUTE = 50 * MS
GRADIENT_BYTES = 16 << 20
SIZES, NOISES, AMOUNTS = (2, 4, 16), (0.05, 0.25), (0.4, 0.8, 1.6)
#: More jobs of each kind: other seeds.
NUM_SEEDS = int(os.environ.get("REIGEN_TEST_VERDICTS", "1"))

#: Plants a cause of such a part of computing in a job; the rank is the late one, where there is one.
Plant = Callable[[Job, float, int], Job]


def replace(**fields: object) -> Plant:
    return lambda job, _, __: dataclasses.replace(job, **fields)  # type: ignore[arg-type]


def late(job: Job, amount: float, rank: int) -> Job:
    return dataclasses.replace(job, asleep={rank: amount * COMPUTE})


def busier(job: Job, amount: float, rank: int) -> Job:
    return dataclasses.replace(job, busier={rank: amount * COMPUTE})


def slow_link(job: Job, amount: float, _: int) -> Job:
    return dataclasses.replace(job, network=True, num_hosts=2, bytes_per_micro=GRADIENT_BYTES / (amount * COMPUTE))


def slow_memory(job: Job, amount: float, _: int) -> Job:
    return dataclasses.replace(job, bytes_per_micro=GRADIENT_BYTES / (amount * COMPUTE))


def tiny(job: Job, amount: float, _: int) -> Job:
    return dataclasses.replace(
        job,
        tensors=[64] * 200,
        after_compute=True,
        submission=50.0,
        latency=amount * 1000.0,
        fusion_bytes=1 << 10,
        num_steps=10,
    )


def apart(job: Job, amount: float, _: int) -> Job:
    tensors, latency = [100 << 10] * 60, amount * COMPUTE / 60
    return dataclasses.replace(
        job, tensors=tensors, after_compute=True, submission=5.0, latency=latency, fusion_bytes=1, num_steps=10
    )


def crowded(job: Job, amount: float, _: int) -> Job:
    load = 1 + 2 * amount
    return dataclasses.replace(job, load=load, num_cpus=max(1, round(job.size / load)))


def other_programs(job: Job, amount: float, _: int) -> Job:
    return dataclasses.replace(job, load=1 + 2 * amount)


def busy_server(job: Job, amount: float, _: int) -> Job:
    rate = job.size * 2 * GRADIENT_BYTES / (amount * COMPUTE)
    return dataclasses.replace(job, servers=1, server_bytes_per_micro=rate)


def late_worker(job: Job, amount: float, rank: int) -> Job:
    return dataclasses.replace(late(job, amount, rank), servers=2, server_bytes_per_micro=40_000.0)


def announcing(job: Job, amount: float, _: int) -> Job:
    return dataclasses.replace(job, announcing=amount * COMPUTE)


def no_data(job: Job, amount: float, _: int) -> Job:
    return dataclasses.replace(job, asleep=dict.fromkeys(range(job.size), 2 * amount * COMPUTE))


#: The cause that each plants, and whether verdicts on it may be clear.
PLANTS: list[tuple[Plant, Cause, bool]] = [
    (late, Cause.LATE_RANK, True),
    (busier, Cause.LATE_RANK, True),
    (late_worker, Cause.LATE_RANK, True),
    (slow_link, Cause.NETWORK, True),
    (slow_memory, Cause.MEMORY, True),
    (tiny, Cause.SMALL_TENSORS, True),
    (apart, Cause.SMALL_BATCHES, False),
    (crowded, Cause.PROCESSORS, True),
    (other_programs, Cause.PROCESSORS, False),
    (busy_server, Cause.SERVER, True),
    (announcing, Cause.COORDINATION, False),
    (no_data, Cause.INPUT, False),
]


def judged(job: Job) -> JobVerdict:
    return summarize(simulate(job)).verdict


def jobs(sizes: Sequence[int] = SIZES) -> Iterator[tuple[Job, float, int]]:
    """Jobs without a cause yet, how large it is to be, and the rank that has it."""
    for seed, (size, noise, amount) in enumerate(itertools.product(sizes, NOISES, AMOUNTS)):
        for repeat in range(NUM_SEEDS):
            number = 1000 * repeat + seed
            yield Job(size, noise=noise, seed=number), amount, random.Random(number).randrange(size)


@pytest.mark.parametrize(("plant", "cause", "may_be_clear"), PLANTS, ids=lambda x: getattr(x, "__name__", None))
def test_the_planted_cause_is_named_and_no_other_with_confidence(
    plant: Plant, cause: Cause, may_be_clear: bool
) -> None:
    named, clear, total = 0, 0, 0
    for job, amount, rank in jobs((2, 3) if plant in {tiny, apart} else SIZES):  # these have many collectives
        found = judged(plant(job, amount, rank))
        is_right = found.cause is cause and (cause is not Cause.LATE_RANK or found.rank == rank)
        assert is_right or found.confidence < Confidence.CLEAR, (job, amount, found)
        named += is_right
        clear += is_right and found.confidence is Confidence.CLEAR
        total += 1
    print(f"{plant.__name__}: {named} of {total} named, {clear} clear")
    assert named >= 0.9 * total, f"{named} of {total}"
    assert clear >= 0.5 * total if may_be_clear else clear == 0, f"{clear} of {total}"


@pytest.mark.parametrize("plant", [replace(), replace(servers=2, server_bytes_per_micro=1e6)], ids=["ring", "servers"])
def test_a_job_without_a_cause_is_told_so(plant: Plant) -> None:
    for job, amount, rank in jobs():
        found = judged(plant(job, amount, rank))
        if job.noise <= 0.1 and job.size <= 4:
            assert found.cause is Cause.COMPUTE, (job, found)
            assert "nothing to gain between ranks" in found.finding
        else:  # steps vary so much that the slowest of 16 ranks takes much longer than the mean: that is a cause
            assert found.cause in {Cause.COMPUTE, Cause.LATE_IN_TURN, Cause.UNCLEAR}, (job, found)
            assert found.cause is Cause.COMPUTE or found.confidence < Confidence.CLEAR


@pytest.mark.parametrize("number", range(4))
def test_of_two_causes_a_clear_one_was_planted(number: int) -> None:
    pairs = [
        (late, slow_link, {Cause.LATE_RANK, Cause.NETWORK}),
        (late, crowded, {Cause.LATE_RANK, Cause.PROCESSORS}),
        (busier, announcing, {Cause.LATE_RANK, Cause.COORDINATION}),
        (slow_memory, other_programs, {Cause.MEMORY, Cause.PROCESSORS}),
    ]
    first, second, causes = pairs[number]
    rng = random.Random(number)
    for job, amount, rank in jobs():
        found = judged(second(first(job, amount, rank), rng.choice(AMOUNTS), rank))
        assert found.cause in causes or found.confidence < Confidence.CLEAR, (job, found)


def one_late(size: int = 4, rank: int = 3, **fields: object) -> Job:
    return Job(size, noise=0.05, asleep={rank: COMPUTE}, **fields)  # type: ignore[arg-type]


def test_what_a_late_rank_does_meanwhile_is_told() -> None:
    found = judged(one_late(num_hosts=2))
    assert found.finding.startswith("4")
    assert "% of a step was waiting for rank 3 (host host1): before its first collective of a step, it waited" in (
        found.finding
    )
    assert "ms a step longer than others for something else than a processor" in found.finding
    assert found.lines()[1].startswith("what to do: look at its data loader")
    found = judged(Job(4, busier={1: COMPUTE}))
    assert "was waiting for rank 1: " in found.finding
    assert "it computed 5" in found.finding
    trace = simulate(one_late())
    trace.processor_times = {}
    found = summarize(trace).verdict
    assert (found.cause, found.rank, found.confidence) == (Cause.LATE_RANK, 3, Confidence.CLEAR)
    assert found.finding.endswith("rank 3: it came last")


def test_doubts_take_confidence_away() -> None:
    def spoilt(change: Callable[[Trace], object]) -> JobVerdict:
        trace = simulate(one_late())
        change(trace)
        return summarize(trace).verdict

    assert spoilt(lambda trace: None).confidence is Confidence.CLEAR
    for change in (
        lambda trace: setattr(trace, "num_dropped", 1),
        lambda trace: setattr(trace, "size", 5),
        lambda trace: trace.clock_errors.update({2: 40 * MS}),
    ):
        found = spoilt(change)
        assert (found.cause, found.confidence) == (Cause.LATE_RANK, Confidence.LIKELY)
        assert found.lines()[0].startswith("probably: ")


def test_too_little_allows_no_verdict() -> None:
    for num_steps, compute in ((4, 1000 * MS), (40, 5 * MS)):
        found = judged(dataclasses.replace(one_late(num_steps=num_steps), compute=compute, asleep={3: compute}))
        assert (found.cause, found.confidence) == (Cause.UNCLEAR, Confidence.UNCLEAR)
        assert found.finding.startswith(f"nothing can be said of {num_steps} steps, ")
    assert summarize(Trace(2)).verdict.finding == "nothing can be said: no rank has recorded anything"


def test_without_steps_shares_are_of_the_whole_time() -> None:
    trace = simulate(one_late())
    trace.steps, trace.processor_times = {}, {}
    found = summarize(trace).verdict
    assert (found.cause, found.rank) == (Cause.LATE_RANK, 3)
    assert "of the time was waiting for rank 3" in found.finding


def test_a_step_that_takes_unusually_long_is_left_out() -> None:
    """Rank 1 writes a checkpoint of a minute, once."""
    trace = simulate(Job(2, noise=0.02))
    end = trace.end
    for rank in range(2):
        trace.steps[rank].append((end, end + 60_000 * MS))
        trace.processor_times[rank].append(dataclasses.replace(trace.processor_times[rank][0]))
    trace.waits[0].append((end, end + 59_000 * MS))
    trace.end = end + 60_000 * MS
    assert summarize(trace).verdict.cause is Cause.COMPUTE


def test_servers_whose_keys_are_uneven_are_told_apart() -> None:
    even = judged(Job(4, servers=2, server_bytes_per_micro=4000.0))
    assert (even.cause, even.server) == (Cause.SERVER, None)
    assert "waiting for the 2 servers" in even.finding
    uneven = judged(Job(4, servers=2, server_bytes_per_micro=4000.0, tensors=[16 << 20, 1 << 20]))
    assert (uneven.cause, uneven.server) == (Cause.SERVER, 0)
    assert uneven.advice.startswith("spread the keys")


@pytest.mark.parametrize(
    ("name", "host"),
    [("rank 1 (vm)", "vm"), ("rank 12 (h (old))", "h (old)"), ("rank 1 (h, view 3)", "h"), ("strange", "strange")],
)
def test_hosts_are_read_from_names(name: str, host: str) -> None:
    assert host_of(name) == host
