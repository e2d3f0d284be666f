"""Operations on devices from a context down to torch's process groups, between ranks that are threads."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reigen.backends.device import DeviceArray
from reigen.context import Context
from reigen.engine.operation_builders import build_allgather
from reigen.errors import ArgumentError, CollectiveError, DeadlineError, DeviceError, JoinedError, MismatchError
from reigen.types import DTYPES, ReduceOp
from tests.devices.gloo import PATIENCE_SECONDS, Device, Network, Stream
from tests.patience import patiently
from tests.unit.engine.jobs import across, between

pytestmark = pytest.mark.slow
FLOAT = DTYPES["float32"]

#: What a rank of a test does, with its job and its GPU.
Act = Callable[[Context, Device], Any]


class Jobs:
    """Jobs whose ranks are threads, each with a GPU."""

    def __init__(self) -> None:
        self.identities: dict[int, str] = {}

    def run(self, size: int, act: Act, *, are_apart: bool = False, **knobs: Any) -> list[Any]:
        """``act(job, device)`` on each rank; ``are_apart``: on a host of its own."""
        network = Network()
        devices = [Device("cuda:0", self.identities.get(rank, f"GPU-{rank}"), network, rank) for rank in range(size)]
        try:
            if are_apart:
                return across([[rank] for rank in range(size)], lambda job: act(job, devices[job.rank]), **knobs)
            return between(size, lambda job: act(job, devices[job.rank]), **knobs)
        finally:
            for device in devices:
                device.close()


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def array_of(outcome: Any) -> DeviceArray:
    assert isinstance(outcome.array, DeviceArray)
    return outcome.array


def takes(job: Context, device: Device, how: tuple[ReduceOp, float, float] | None = None) -> bool:
    return job.device is not None and job.device.takes(device, FLOAT, how)


def reduce(job: Context, device: Device, value: float, name: str = "t", **how: Any) -> list[float]:
    lent = device.lend(np.full(5, value, np.float32))
    assert takes(job, device, (ReduceOp.SUM, 1.0, 1.0))
    handle = job.allreduce(lent, lent, FLOAT, op=ReduceOp.SUM, name=name, **how)
    return device.take(array_of(handle.wait())).tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective(jobs: Jobs, size: int) -> None:
    def act(job: Context, device: Device) -> None:
        rank, total = job.rank, sum(range(1, size + 1))

        def lend(*shape: int) -> DeviceArray:
            return device.lend(np.full(shape, rank + 1, np.float32))

        assert takes(job, device)
        source, target = lend(2, 3), lend(2, 3)
        reduced = job.allreduce(source, target, FLOAT, op=ReduceOp.AVERAGE, prescale=3.0, postscale=0.5).wait()
        np.testing.assert_allclose(device.take(array_of(reduced)), np.full((2, 3), 1.5 * total / size), rtol=1e-6)
        spread = job.broadcast(lend(4), lend(4), FLOAT, root_rank=size - 1).wait()
        assert device.take(array_of(spread)).tolist() == [size] * 4
        gathered = job.allgather(lend(rank, 2), FLOAT).wait()
        assert device.take(array_of(gathered)).tolist() == [[r + 1.0] * 2 for r in range(size) for _ in range(r)]
        exchanged = job.alltoall(lend(size + 1, 2), FLOAT, splits=[1] * size).wait()
        assert device.take(array_of(exchanged)).tolist() == [[r + 1.0] * 2 for r in range(size)]
        assert exchanged.received_splits == (1,) * size
        scattered = job.reducescatter(lend(size + 1), FLOAT, op=ReduceOp.SUM).wait()
        assert device.take(array_of(scattered)).tolist() == [total] * (2 if rank == 0 else 1)
        group = job.grouped_allreduce([lend(2), lend(3)], [lend(2), lend(3)], [FLOAT] * 2, op=ReduceOp.MAX).wait()
        assert [device.take(array_of(m)).tolist() for m in group.members] == [[size] * 2, [size] * 3]
        gathers = job.start_group(build_allgather, [lend(1), lend(2)], [FLOAT] * 2).wait()
        assert [array_of(member).shape for member in gathers.members] == [(size,), (2 * size,)]

    jobs.run(size, act)


def test_nobody_waits_for_the_gpu(jobs: Jobs) -> None:
    """What is lent is not even there when the operation is over for the engine, and the result is right at last."""

    def act(job: Context, device: Device) -> list[float]:
        release = device.current().hold()
        values: list[list[float]] = []
        lent = device.lend(np.full(3, 1.0 + job.rank, np.float32))
        outcome = job.allreduce(lent, lent, FLOAT, op=ReduceOp.SUM, name="t").wait()
        ready = array_of(outcome).ready
        assert ready is not None
        assert not ready.passed()
        release()
        values.append(device.take(array_of(outcome)).tolist())
        return values[0]

    assert jobs.run(2, act) == [[3.0] * 3] * 2


def test_what_is_ready_together_is_one_call(jobs: Jobs) -> None:
    def act(job: Context, device: Device) -> tuple[list[float], list[str]]:
        reduce(job, device, 1.0, "warm")
        device.calls.clear()
        lent = [device.lend(np.full(4, float(i), np.float32)) for i in range(6)]
        parts = [(x, x) for x in lent]
        handle = job.grouped_allreduce(
            [s for s, _ in parts], [t for _, t in parts], [FLOAT] * 6, op=ReduceOp.SUM, prescale=0.5
        )
        values = [device.take(array_of(member))[0] for member in handle.wait().members]
        return values, list(device.calls)

    assert jobs.run(2, act) == [([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], ["allreduce_coalesced"])] * 2


def test_ranks_that_disagree_about_the_device_are_told_who_uses_which(jobs: Jobs) -> None:
    def act(job: Context, device: Device) -> list[float]:
        x = np.ones(5, np.float32)
        memory = device.lend(x) if job.rank else x
        with pytest.raises(MismatchError, match="the devices differ") as caught:
            job.allreduce(memory, memory, FLOAT, name="t").wait()
        assert caught.value.details == {0: "cpu (or staged there: see `reigen check`)", 1: "cuda", 2: "cuda"}
        return reduce(job, device, 1.0, "later")

    assert jobs.run(3, act) == [[3.0] * 5] * 3


def test_process_sets_have_process_groups_of_their_own(jobs: Jobs) -> None:
    def act(job: Context, device: Device) -> list[float]:
        reduce(job, device, 1.0)
        number = job.add_process_set([0, 2])
        result = [] if job.rank == 1 else reduce(job, device, float(job.rank), "in the set", process_set=number)
        job.remove_process_set(number)
        if job.rank != 1:
            assert device.calls.count("connect") == 2
            assert device.calls.count("shutdown") == 1
        reduce(job, device, 1.0, "after it")
        return result

    assert jobs.run(3, act) == [[2.0] * 5, [], [2.0] * 5]


def test_ranks_that_have_joined_stand_in_on_their_gpus(jobs: Jobs) -> None:
    def act(job: Context, device: Device) -> list[list[float]]:
        results = [reduce(job, device, 1.0, f"step {i}") for i in range(1 + 2 * job.rank)]
        job.join().wait()
        return results

    first, second, third = jobs.run(3, act)
    assert (len(first), len(second)) == (1, 3)
    assert third == [[3.0] * 5, [2.0] * 5, [2.0] * 5, [1.0] * 5, [1.0] * 5]


def test_who_joins_before_it_has_used_a_gpu_cannot_stand_in(jobs: Jobs) -> None:
    def act(job: Context, device: Device) -> str:
        work = (lambda: reduce(job, device, 1.0)) if job.rank == 0 else (lambda: job.join().wait())
        with pytest.raises(CollectiveError, match="rank 1 has joined before it used a GPU") as caught:
            work()
        assert not isinstance(caught.value, JoinedError)
        return type(caught.value).__name__

    assert jobs.run(2, act) == ["CollectiveError"] * 2


def test_two_ranks_on_one_gpu_are_told_what_to_do_and_the_job_carries_on(jobs: Jobs) -> None:
    jobs.identities = {0: "GPU-a", 1: "GPU-b", 2: "GPU-a"}

    def act(job: Context, device: Device) -> float:
        for _ in range(2):  # it is no accident: it happens again
            with pytest.raises(DeviceError, match=r"torch\.cuda\.set_device\(hvd\.local_rank\(\)\)") as caught:
                reduce(job, device, 1.0)
            assert caught.value.details == {0: "cuda:0 (GPU-a)", 2: "cuda:0 (GPU-a)"}
        x = np.ones(1, np.float32)
        job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="on the host").wait()
        return float(x[0])

    assert jobs.run(3, act) == [3.0] * 3


def test_between_hosts(jobs: Jobs) -> None:
    def act(job: Context, device: Device) -> list[float]:
        number = job.add_process_set([0, 2])
        reduce(job, device, 1.0)
        result = [] if job.rank == 1 else reduce(job, device, float(job.rank), "in the set", process_set=number)
        job.barrier().wait()
        return result

    assert jobs.run(3, act, are_apart=True) == [[2.0] * 5, [], [2.0] * 5]


def test_a_rank_uses_one_gpu(jobs: Jobs) -> None:
    def act(job: Context, device: Device) -> None:
        reduce(job, device, 1.0)
        other = Device("cuda:1", "GPU-other", Network(), 0)
        try:
            with pytest.raises(ArgumentError, match="on cuda:1, but this rank has used cuda:0"):
                takes(job, other)
        finally:
            other.close()
        reduce(job, device, 1.0)

    jobs.run(2, act)


def test_rank_0_says_what_there_is(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="reigen"):
        jobs.run(2, lambda job, device: [takes(job, device) for _ in range(3)])
    assert [r.message for r in caplog.records if "CUDA" in r.message] == [
        "CUDA tensors are reduced on the GPUs: a stand-in"
    ]


def test_switched_off(jobs: Jobs) -> None:
    def act(job: Context, device: Device) -> bool:
        return takes(job, device)

    assert jobs.run(2, act, nccl=False) == [False, False]
    assert jobs.run(2, act) == [True, True]


def test_who_leaves_waits_until_the_others_have_what_it_gave_them(jobs: Jobs) -> None:
    """Rank 0 is the root and soon done; rank 1's GPU comes to it when rank 0 leaves already. Then it leaves, too."""
    left = threading.Event()

    def act(job: Context, device: Device) -> list[float]:
        reduce(job, device, 1.0, "warm")
        release = device.side.hold() if job.rank == 1 else lambda: None
        lent = device.lend(np.full(3, 7.0 + job.rank, np.float32))
        outcome = job.broadcast(lent, lent, FLOAT, root_rank=0, name="t").wait()
        if job.rank == 0:
            job.close()
            left.set()
        else:
            assert not left.wait(0.5), "rank 0 has not waited"
            release()
        result = device.take(array_of(outcome)).tolist()
        job.close()
        return result

    assert jobs.run(2, act) == [[7.0] * 3] * 2


# -- what goes wrong ------------------------------------------------------------------------------------------------


def until_broken(job: Context, device: Device) -> CollectiveError:
    """The error of the first operation that fails; the job has to notice by itself."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        try:
            job.barrier().wait()
        except CollectiveError as error:
            return error
    raise AssertionError("nobody noticed")


def no_work_is_left(stream: Stream) -> bool:
    return stream.record().reached.wait(PATIENCE_SECONDS)


def test_an_asynchronous_error_ends_the_job_and_what_is_flying(jobs: Jobs) -> None:
    """Rank 1 never enqueues its part, so that the others wait; then the network between the devices fails."""
    enqueued = threading.Barrier(3)

    def act(job: Context, device: Device) -> str:
        reduce(job, device, 1.0, "warm")
        release = device.side.hold() if job.rank == 1 else None
        lent = device.lend(np.ones(3, np.float32))
        job.allreduce(lent, lent, FLOAT, op=ReduceOp.SUM, name="t").wait()
        enqueued.wait(PATIENCE_SECONDS)
        if job.rank == 0:
            device.network.cut()
        error = until_broken(job, device)
        if release is not None:
            release()
        assert no_work_is_left(device.side)
        with pytest.raises(CollectiveError, match=r"cuda:0.* failed"):
            reduce(job, device, 1.0, "later")
        assert device.calls.count("abort") == 1
        return str(error)

    assert all("cuda:0" in text and "failed" in text for text in jobs.run(3, act))


def test_what_does_not_end_is_ended_by_the_deadline(jobs: Jobs) -> None:
    """And nobody has to submit anything for that."""

    def attempt(seconds: float) -> None:

        def act(job: Context, device: Device) -> bool:
            reduce(job, device, 1.0, "warm")
            release = device.side.hold() if job.rank == 1 else lambda: None
            lent = device.lend(np.ones(3, np.float32))
            job.allreduce(lent, lent, FLOAT, op=ReduceOp.SUM, name="t").wait()
            until = time.monotonic() + PATIENCE_SECONDS
            while "abort" not in device.calls and time.monotonic() < until:
                threading.Event().wait(0.01)
            with pytest.raises(DeadlineError, match="did not end in time"):
                reduce(job, device, 1.0, "later")
            release()
            return no_work_is_left(device.side)

        assert jobs.run(2, act, deadline_seconds=seconds) == [True, True]

    patiently(attempt, 1.0)


def test_a_rank_that_leaves_ends_what_is_flying_among_the_others(jobs: Jobs) -> None:
    enqueued = threading.Barrier(3)

    def act(job: Context, device: Device) -> bool:
        number = job.add_process_set([0, 1])
        release = device.side.hold() if job.rank == 1 else lambda: None
        if job.rank < 2:
            lent = device.lend(np.ones(3, np.float32))
            assert takes(job, device)
            job.allreduce(lent, lent, FLOAT, op=ReduceOp.SUM, name="t", process_set=number).wait()
        enqueued.wait(PATIENCE_SECONDS)
        if job.rank == 2:
            job.close()
            return True
        # told by the engine, or by the service of the job: whoever is heard first
        assert re.search(r"rank(\(s\))? 2 (has )?left the job", str(until_broken(job, device)))
        assert "abort" in device.calls
        release()
        return no_work_is_left(device.side)

    assert jobs.run(3, act) == [True] * 3


def test_a_device_that_cannot_be_connected_is_an_error_everywhere_and_the_job_carries_on(jobs: Jobs) -> None:
    """Rank 1 fails at once; the others wait for it within the library and learn of it from each other."""

    def fail() -> None:
        raise OSError("no route to anybody")

    def act(job: Context, device: Device) -> list[float]:
        if job.rank == 1:
            device.before_connecting = fail
        with pytest.raises(DeviceError, match="Gloo cannot connect the ranks' devices") as caught:
            reduce(job, device, 1.0)
        assert caught.value.details == {1: "OSError: no route to anybody"}
        device.before_connecting = int
        job.barrier().wait()
        return reduce(job, device, 1.0)

    assert jobs.run(3, act) == [[3.0] * 5] * 3


def test_a_device_that_does_not_connect_by_the_deadline_is_named(jobs: Jobs) -> None:
    is_over = threading.Event()

    def attempt(seconds: float) -> None:
        is_over.clear()

        def act(job: Context, device: Device) -> tuple[int, ...]:
            if job.rank == 1:
                device.before_connecting = lambda: is_over.wait(2 * PATIENCE_SECONDS)
            try:
                with pytest.raises(DeadlineError, match="did not connect the ranks' devices in time") as caught:
                    reduce(job, device, 1.0)
            finally:
                is_over.set()
            return caught.value.ranks

        assert jobs.run(3, act, deadline_seconds=seconds) == [(0, 1, 2)] * 3

    patiently(attempt, 1.0)


def test_the_others_results_are_there_before_a_subgroup_is_closed(jobs: Jobs) -> None:
    """A process set is removed while its last operation has not begun on one rank's device."""

    def act(job: Context, device: Device) -> list[float]:
        number = job.add_process_set([0, 1])
        if job.rank == 2:
            job.remove_process_set(number)
            return []
        assert takes(job, device)
        release = device.side.hold() if job.rank == 1 else lambda: None
        lent = device.lend(np.full(3, 1.0 + job.rank, np.float32))
        outcome = job.allreduce(lent, lent, FLOAT, op=ReduceOp.SUM, name="t", process_set=number).wait()
        threading.Timer(0.2, lambda: (device.calls.append("released"), release())).start()
        job.remove_process_set(number)
        if job.rank == 1:
            assert device.calls.index("released") < device.calls.index("shutdown")
        return device.take(array_of(outcome)).tolist()

    assert jobs.run(3, act) == [[3.0] * 3, [3.0] * 3, []]
