"""Operations on devices from a context down to NCCL's functions, between ranks that are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.devices.cuda import PATIENCE_SECONDS, Device, Stream
from tests.devices.nccl import REMOTE_ERROR, Fabric, FakeNccl
from tests.patience import patiently
from tests.unit.jobs import between

from reigen import assembly
from reigen.config import Config
from reigen.context import Context
from reigen.errors import (
    ArgumentError,
    CollectiveError,
    DeadlineError,
    DeviceError,
    JoinedError,
    MismatchError,
)
from reigen.planes.base import DataPlane
from reigen.planes.device import DeviceArray
from reigen.planes.nccl import NcclPlane
from reigen.types import DTYPES, ReduceOp

pytestmark = pytest.mark.slow
FLOAT = DTYPES["float32"]

#: What a rank of a test does, with its job, its GPU and its NCCL.
Act = Callable[[Context, Device, FakeNccl], Any]


class Jobs:
    """Jobs whose ranks are threads, each with a GPU."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fakes: dict[int, FakeNccl] = {}
        self.identities: dict[int, str] = {}
        self._fabric = Fabric()
        patch.setattr(assembly, "device_plane_of", self._plane)

    def _plane(self, config: Config, plane: DataPlane) -> NcclPlane | None:
        if not config.nccl:
            return None
        fake = self.fakes[plane.rank]
        return NcclPlane(plane, range(plane.size), lambda: (fake.library(), "a stand-in"))

    def run(self, size: int, act: Act, **knobs: Any) -> list[Any]:
        self.fakes = {rank: FakeNccl(self._fabric) for rank in range(size)}
        devices = [Device("cuda:0", self.identities.get(rank, f"GPU-{rank}")) for rank in range(size)]
        try:
            return between(size, lambda job: act(job, devices[job.rank], self.fakes[job.rank]), **knobs)
        finally:
            for device in devices:
                device.close()


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    return Jobs(monkeypatch)


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
    def act(job: Context, device: Device, fake: FakeNccl) -> None:
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
        gathers = job.grouped_allgather([lend(1), lend(2)], [FLOAT] * 2).wait()
        assert [array_of(member).shape for member in gathers.members] == [(size,), (2 * size,)]

    jobs.run(size, act)


def test_nobody_waits_for_the_gpu(jobs: Jobs) -> None:
    """What is lent is not even there when the operation is over for the engine, and the result is right at last."""

    def act(job: Context, device: Device, fake: FakeNccl) -> list[float]:
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


def test_what_is_ready_together_is_one_group(jobs: Jobs) -> None:
    def act(job: Context, device: Device, fake: FakeNccl) -> tuple[list[float], int]:
        reduce(job, device, 1.0, "warm")
        before = fake.calls.count("ncclGroupStart")
        lent = [device.lend(np.full(4, float(i), np.float32)) for i in range(6)]
        parts = [(x, x) for x in lent]
        handle = job.grouped_allreduce(
            [s for s, _ in parts], [t for _, t in parts], [FLOAT] * 6, op=ReduceOp.SUM, prescale=0.5
        )
        values = [device.take(array_of(member))[0] for member in handle.wait().members]
        group = ["ncclGroupStart", *["ncclAllReduce"] * 6, "ncclGroupEnd"]
        assert fake.calls[-10:] == ["ncclRedOpCreatePreMulSum", *group, "ncclRedOpDestroy"]
        return values, fake.calls.count("ncclGroupStart") - before

    assert jobs.run(2, act) == [([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 1)] * 2


def test_ranks_that_disagree_about_the_device_are_told_who_uses_which(jobs: Jobs) -> None:
    def act(job: Context, device: Device, fake: FakeNccl) -> list[float]:
        x = np.ones(5, np.float32)
        memory = device.lend(x) if job.rank else x
        with pytest.raises(MismatchError, match="the devices differ") as caught:
            job.allreduce(memory, memory, FLOAT, name="t").wait()
        assert caught.value.details == {0: "cpu (or staged there: see `reigen check`)", 1: "cuda", 2: "cuda"}
        return reduce(job, device, 1.0, "later")

    assert jobs.run(3, act) == [[3.0] * 5] * 3


def test_process_sets_have_communicators_of_their_own(jobs: Jobs) -> None:
    def act(job: Context, device: Device, fake: FakeNccl) -> list[float]:
        reduce(job, device, 1.0)
        number = job.add_process_set([0, 2])
        result = [] if job.rank == 1 else reduce(job, device, float(job.rank), "in the set", process_set=number)
        job.remove_process_set(number)
        if job.rank != 1:
            assert fake.calls.count("ncclCommInitRankConfig") == 2
            assert fake.calls.count("ncclCommDestroy") == 1
        reduce(job, device, 1.0, "after it")
        return result

    assert jobs.run(3, act) == [[2.0] * 5, [], [2.0] * 5]
    assert all(comm.gone for fake in jobs.fakes.values() for comm in fake.comms.values())


def test_ranks_that_have_joined_stand_in_on_their_gpus(jobs: Jobs) -> None:
    def act(job: Context, device: Device, fake: FakeNccl) -> list[list[float]]:
        results = [reduce(job, device, 1.0, f"step {i}") for i in range(1 + 2 * job.rank)]
        job.join().wait()
        return results

    first, second, third = jobs.run(3, act)
    assert (len(first), len(second)) == (1, 3)
    assert third == [[3.0] * 5, [2.0] * 5, [2.0] * 5, [1.0] * 5, [1.0] * 5]


def test_who_joins_before_it_has_used_a_gpu_cannot_stand_in(jobs: Jobs) -> None:
    def act(job: Context, device: Device, fake: FakeNccl) -> str:
        work = (lambda: reduce(job, device, 1.0)) if job.rank == 0 else (lambda: job.join().wait())
        with pytest.raises(CollectiveError, match="rank 1 has joined before it used a GPU") as caught:
            work()
        assert not isinstance(caught.value, JoinedError)
        return type(caught.value).__name__

    assert jobs.run(2, act) == ["CollectiveError"] * 2


def test_two_ranks_on_one_gpu_are_told_what_to_do_and_the_job_carries_on(jobs: Jobs) -> None:
    jobs.identities = {0: "GPU-a", 1: "GPU-b", 2: "GPU-a"}

    def act(job: Context, device: Device, fake: FakeNccl) -> float:
        for _ in range(2):  # it is no accident: it happens again
            with pytest.raises(DeviceError, match=r"torch\.cuda\.set_device\(hvd\.local_rank\(\)\)") as caught:
                reduce(job, device, 1.0)
            assert caught.value.details == {0: "cuda:0 (GPU-a)", 2: "cuda:0 (GPU-a)"}
        x = np.ones(1, np.float32)
        job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="on the host").wait()
        return float(x[0])

    assert jobs.run(3, act) == [3.0] * 3


def test_a_rank_uses_one_gpu(jobs: Jobs) -> None:
    def act(job: Context, device: Device, fake: FakeNccl) -> None:
        reduce(job, device, 1.0)
        other = Device("cuda:1", "GPU-other")
        try:
            with pytest.raises(ArgumentError, match="on cuda:1, but this rank has used cuda:0"):
                takes(job, other)
        finally:
            other.close()
        reduce(job, device, 1.0)

    jobs.run(2, act)


def test_rank_0_says_what_there_is(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="reigen"):
        jobs.run(2, lambda job, device, fake: [takes(job, device) for _ in range(3)])
    assert [r.message for r in caplog.records if "CUDA" in r.message] == [
        "CUDA tensors are reduced on the GPUs: a stand-in"
    ]


def test_switched_off(jobs: Jobs) -> None:
    def act(job: Context, device: Device, fake: FakeNccl) -> bool:
        return takes(job, device)

    assert jobs.run(2, act, nccl=False) == [False, False]
    assert jobs.run(2, act) == [True, True]


def test_who_leaves_waits_until_the_others_have_what_it_gave_them(jobs: Jobs) -> None:
    """Rank 0 is the root and soon done; rank 1's GPU comes to it when rank 0 leaves already. Then it leaves, too."""
    left = threading.Event()

    def act(job: Context, device: Device, fake: FakeNccl) -> list[float]:
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
    """Rank 1 never enqueues its part, so that the others' kernels wait; NCCL tells rank 0."""
    enqueued = threading.Barrier(3)

    def act(job: Context, device: Device, fake: FakeNccl) -> str:
        reduce(job, device, 1.0, "warm")
        release = device.side.hold() if job.rank == 1 else None
        lent = device.lend(np.ones(3, np.float32))
        job.allreduce(lent, lent, FLOAT, op=ReduceOp.SUM, name="t").wait()
        enqueued.wait(PATIENCE_SECONDS)
        if job.rank == 0:
            fake.broken["asynchronous"] = REMOTE_ERROR
        error = until_broken(job, device)
        if release is not None:
            release()
        assert no_work_is_left(device.side)
        with pytest.raises(CollectiveError, match="network error"):
            reduce(job, device, 1.0, "later")
        assert fake.calls.count("ncclCommAbort") == 1
        return str(error)

    assert all("a network error (said the stand-in)" in text for text in jobs.run(3, act))


def test_what_does_not_end_is_ended_by_the_deadline(jobs: Jobs) -> None:
    """And nobody has to submit anything for that."""

    def attempt(seconds: float) -> None:

        def act(job: Context, device: Device, fake: FakeNccl) -> bool:
            reduce(job, device, 1.0, "warm")
            release = device.side.hold() if job.rank == 1 else lambda: None
            lent = device.lend(np.ones(3, np.float32))
            job.allreduce(lent, lent, FLOAT, op=ReduceOp.SUM, name="t").wait()
            until = time.monotonic() + PATIENCE_SECONDS
            while "ncclCommAbort" not in fake.calls and time.monotonic() < until:
                threading.Event().wait(0.01)
            with pytest.raises(DeadlineError, match="did not end in time"):
                reduce(job, device, 1.0, "later")
            release()
            return no_work_is_left(device.side)

        assert jobs.run(2, act, deadline_seconds=seconds) == [True, True]

    patiently(attempt, 1.0)


def test_a_rank_that_leaves_ends_what_is_flying_among_the_others(jobs: Jobs) -> None:
    enqueued = threading.Barrier(3)

    def act(job: Context, device: Device, fake: FakeNccl) -> bool:
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
        assert "rank 2 has left" in str(until_broken(job, device))
        assert "ncclCommAbort" in fake.calls
        release()
        return no_work_is_left(device.side)

    assert jobs.run(3, act) == [True] * 3


def test_a_communicator_that_does_not_come_about_ends_with_an_error(jobs: Jobs) -> None:
    """Rank 1 fails at once, the others wait for it in NCCL and learn of it from the engine."""

    def act(job: Context, device: Device, fake: FakeNccl) -> str:
        if job.rank == 1:
            fake.broken["ncclCommInitRankConfig"] = REMOTE_ERROR
        with pytest.raises(CollectiveError, match="ncclCommInitRankConfig failed") as caught:
            reduce(job, device, 1.0)
        return str(caught.value)

    began = time.monotonic()
    texts = jobs.run(3, act)
    assert time.monotonic() - began < PATIENCE_SECONDS
    assert sum("told by rank 1" in text for text in texts) == 2


def test_nccl_that_gives_no_id_is_an_error_everywhere_and_the_job_carries_on(jobs: Jobs) -> None:
    def act(job: Context, device: Device, fake: FakeNccl) -> list[float]:
        if job.rank == 0:
            fake.broken["ncclGetUniqueId"] = REMOTE_ERROR
        with pytest.raises(DeviceError, match="ncclGetUniqueId failed"):
            reduce(job, device, 1.0)
        fake.broken.clear()
        job.barrier().wait()
        return reduce(job, device, 1.0)

    assert jobs.run(2, act) == [[2.0] * 5] * 2
