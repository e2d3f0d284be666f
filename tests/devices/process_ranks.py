"""What rank processes do with their "GPUs": each is a process, with process groups over Gloo to the others."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import reigen.torch as hvd
from reigen import context
from reigen.errors import CollectiveError
from reigen.torch.adapter import TorchAdapter
from reigen.torch.cuda_tensors import TorchDeviceTensorAdapter
from tests.devices.gloo import Network
from tests.devices.torch_ranks import TorchDevice
from tests.torch.training import assert_identical_everywhere, assert_same, make_net, mine, train, whole

#: Gloo chooses the ports, so jobs do not disturb each other.
_NETWORK = "127.86.75."


@contextmanager
def a_job() -> Iterator[TorchDevice]:
    """A job in which all tensors lie on a device."""
    device = TorchDevice(Network(_NETWORK), int(os.environ["REIGEN_RANK"]))
    hvd.init(process_sets="dynamic")
    before, TorchAdapter.lender = TorchAdapter.lender, TorchDeviceTensorAdapter(lambda _: device)
    try:
        yield device
    finally:
        hvd.shutdown()
        TorchAdapter.lender = before
        device.close()


def every_collective() -> None:
    with a_job() as device:
        rank, size = hvd.rank(), hvd.size()
        x = torch.full((1 << 16,), rank + 1.0)
        hvd.allreduce_(x, op=hvd.Sum)
        assert x.eq(sum(range(1, size + 1))).all()
        assert hvd.allreduce(torch.full((3,), rank), op=hvd.Max).tolist() == [size - 1] * 3
        group = hvd.grouped_allreduce([torch.full((2,), float(rank)), torch.ones(3)], op=hvd.Average)
        assert [one.tolist() for one in group] == [[(size - 1) / 2] * 2, [1.0] * 3]
        assert hvd.broadcast(torch.full((2,), rank), root_rank=size - 1).tolist() == [size - 1] * 2
        assert hvd.allgather(torch.full((rank,), rank)).tolist() == [r for r in range(size) for _ in range(r)]
        received, splits = hvd.alltoall(torch.arange(size) + 10 * rank, splits=torch.ones(size, dtype=torch.int32))
        assert received.tolist() == [10 * r + rank for r in range(size)]
        assert splits.tolist() == [1] * size
        scattered = hvd.reducescatter(torch.ones(size + 1), op=hvd.Sum)
        assert scattered.tolist() == [size] * (2 if rank == 0 else 1)
        hvd.barrier()
        with torch.inference_mode():
            assert hvd.allreduce(torch.ones(2), op=hvd.Average, prescale_factor=2.0).tolist() == [2.0] * 2
        assert device.calls.count("connect") == 1


def process_sets_side_by_side() -> None:
    with a_job() as device:
        rank = hvd.rank()
        even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])
        own = odd if rank % 2 else even
        for _ in range(5):
            assert hvd.allreduce(torch.full((4,), float(rank)), op=hvd.Sum, process_set=own).tolist() == (
                [4.0] * 4 if rank % 2 else [2.0] * 4
            )
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [4.0] * 2
        hvd.remove_process_set(even)
        hvd.remove_process_set(odd)
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [4.0] * 2
        assert device.calls.count("connect") == 2


def uneven_work() -> list[float]:
    with a_job():
        results = [hvd.allreduce(torch.ones(1), op=hvd.Sum).item() for _ in range(2 + 2 * hvd.rank())]
        context.current().join().wait()
        return results


def trains_alike() -> None:
    with a_job() as device:
        truth, model = make_net(), make_net()
        start = copy.deepcopy(truth.state_dict())
        train(truth, torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.9), whole)
        hvd.broadcast_parameters(start, root_rank=0)
        model.load_state_dict(start)
        optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
        )
        train(model, optimizer, mine)
        assert_same(model, truth)
        assert_identical_everywhere(model)
        assert optimizer._reducer.reducers[0]._places.buckets, "the buckets are in host memory"
        assert device.num_reduced


def tensors_that_differ() -> str:
    with a_job():
        try:
            hvd.allreduce(torch.ones(2 + hvd.rank()), name="t")
        except CollectiveError as error:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
            return type(error).__name__
    raise AssertionError("nobody noticed")


def lost_rank(how: str, when: str) -> tuple[str, tuple[int, ...], float, str]:
    """Rank 1 dies, stops, or leaves; what rank 0 hears, about whom, after how many seconds, and once more."""
    end = {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP)}
    with a_job() as device:
        pids = hvd.allgather_object(os.getpid())
        if when == "connecting":
            if hvd.rank() == 1:
                device.before_connecting = end[how]
        else:
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0] * 2
        if when == "enqueued" and hvd.rank() == 1:
            device.side.hold()  # so that the others wait for it on their devices
        began = time.monotonic()
        error = _error_of(lambda: _work(end[how] if hvd.rank() == 1 and when == "enqueued" else None))
        seconds = time.monotonic() - began
        again = _error_of(lambda: hvd.allreduce(torch.ones(2)))
        if how == "stop":
            os.kill(pids[1], signal.SIGKILL)
        return type(error).__name__, error.ranks, seconds, type(again).__name__


def _work(end: Callable[[], object] | None) -> None:
    hvd.allreduce_async(torch.ones(1 << 16), op=hvd.Sum, name="t")
    hvd.barrier()  # every rank has enqueued it
    if end is not None:
        end()
    while True:
        context.current().barrier().wait()


def _error_of(work: Callable[[], object]) -> CollectiveError:
    try:
        work()
    except CollectiveError as error:
        return error
    raise AssertionError("nobody noticed")
