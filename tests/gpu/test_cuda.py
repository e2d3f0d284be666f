"""CUDA tensors on a real GPU, with a real NCCL. Two ranks share one GPU; each has its own NCCL_HOSTID, as NCCL demands.

Skipped, with the reason, where there is no GPU.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import reigen.torch as hvd
from reigen import context
from reigen.errors import CollectiveError, PeerLostError
from reigen.testing import RankError, RankPool, run_ranks
from reigen.torch.cuda_tensors import nccl_library
from tests.torch.training import assert_identical_everywhere, batches, make_net, mean_loss, mine

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is false"),
    pytest.mark.skipif(not nccl_library()[0], reason=nccl_library()[1]),
    pytest.mark.slow,
]
#: Asked before any test begins: the question opens the driver's files.
_NUM_GPUS = torch.cuda.device_count()


def on_a_gpu(body: Callable[[torch.device], Any]) -> Any:
    """``body(GPU)`` in a job; ranks share GPUs if there are not enough."""
    os.environ["NCCL_HOSTID"] = f"rank-{os.environ['REIGEN_RANK']}"
    hvd.init()
    try:
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        return body(torch.device("cuda", torch.cuda.current_device()))
    finally:
        hvd.shutdown()


def every_collective(cuda: torch.device) -> None:
    rank, size = hvd.rank(), hvd.size()

    def full(value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, float(value), device=cuda)

    total = sum(range(size))
    torch.testing.assert_close(hvd.allreduce(full(rank, 5, 3), op=hvd.Sum), full(total, 5, 3))
    torch.testing.assert_close(
        hvd.allreduce(full(rank, 5), op=hvd.Average, prescale_factor=4.0), full(4 * total / size, 5)
    )
    x = full(rank, 1 << 20)
    hvd.allreduce_(x, op=hvd.Max)
    torch.testing.assert_close(x, full(size - 1, 1 << 20))
    transposed = torch.arange(6.0, device=cuda).reshape(2, 3).t()
    torch.testing.assert_close(hvd.allreduce(transposed, op=hvd.Sum), size * transposed)
    torch.testing.assert_close(hvd.broadcast(full(rank, 7), root_rank=size - 1), full(size - 1, 7))
    gathered = hvd.allgather(full(rank, rank + 1, 2))
    torch.testing.assert_close(gathered, torch.cat([full(r, r + 1, 2) for r in range(size)]))
    even = hvd.allgather(full(rank, 3))
    torch.testing.assert_close(even, torch.cat([full(r, 3) for r in range(size)]))
    received, splits = hvd.alltoall(full(rank, 2 * size), splits=torch.full((size,), 2, dtype=torch.int32))
    torch.testing.assert_close(received, torch.cat([full(r, 2) for r in range(size)]))
    assert splits.tolist() == [2] * size
    for rows in (2 * size, 2 * size + 1):
        scattered = hvd.reducescatter(full(1, rows, 3), op=hvd.Sum)
        torch.testing.assert_close(scattered, full(size, rows // size + (rank < rows % size), 3))
    group = hvd.grouped_allreduce([full(rank, 2), full(rank, 3).double()], op=hvd.Min)
    assert [one.tolist() for one in group] == [[0.0] * 2, [0.0] * 3]
    torch.cuda.synchronize()


def types(cuda: torch.device) -> None:
    size = hvd.size()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8):
        x = torch.full((1031,), 3, dtype=dtype, device=cuda)
        torch.testing.assert_close(hvd.allreduce(x, op=hvd.Sum), size * x)
        torch.testing.assert_close(hvd.allreduce(x, op=hvd.Product), x**size)
        if dtype.is_floating_point:
            torch.testing.assert_close(hvd.allreduce(x, op=hvd.Average), x)
            torch.testing.assert_close(hvd.allreduce(x, op=hvd.Average, postscale_factor=0.5), x / 2)
    flags = torch.tensor([True, False, hvd.rank() == 0], device=cuda)
    assert hvd.allreduce(flags, op=hvd.Sum).tolist() == [True, False, True]
    assert hvd.allreduce(flags, op=hvd.Product).tolist() == [True, False, size == 1]
    integers = torch.full((4,), 3, dtype=torch.int32, device=cuda)
    assert hvd.allreduce(integers, op=hvd.Average).tolist() == [3] * 4  # through the host


def trains_alike(cuda: torch.device) -> None:
    truth, model = make_net().to(cuda), make_net().to(cuda)
    plain = torch.optim.SGD(truth.parameters(), lr=0.1, momentum=0.9)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    for x, y in batches(5):
        for net, stepper, part in ((truth, plain, lambda t: t), (model, optimizer, mine)):
            stepper.zero_grad()
            mean_loss(net, part(x).to(cuda), part(y).to(cuda)).backward()
            stepper.step()
    for value, other in zip(model.state_dict().values(), truth.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-8, atol=1e-9)
    for reducer in optimizer._reducer.reducers:  # one rank alone has none
        assert reducer._places.buckets, "the buckets are not on the GPU"
    assert_identical_everywhere(model.cpu())


def a_step_waits_for_nothing(cuda: torch.device) -> None:
    """torch raises where its own calls would wait for the GPU; and a step returns while the GPU still works."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).to(cuda)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    x = torch.ones(8, 512, device=cuda)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    hvd.barrier()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
        began = torch.cuda.Event()
        began.record()
        step()
        assert not began.query(), "the step has waited for the GPU"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def a_rank_dies(cuda: torch.device) -> str:
    x = torch.ones(1 << 20, device=cuda)
    hvd.allreduce_(x, op=hvd.Sum, name="warm")
    torch.cuda.synchronize()
    hvd.barrier()
    handle = hvd.allreduce_async_(x, op=hvd.Sum, name="t")
    if hvd.rank() == 1:
        torch.cuda._sleep(20_000_000_000)
        os.kill(os.getpid(), signal.SIGKILL)
    error: CollectiveError | None = None
    until = time.monotonic() + 60
    while error is None and time.monotonic() < until:
        try:
            hvd.synchronize(handle)
            context.current().barrier().wait()
        except CollectiveError as caught:
            error = caught
    torch.cuda.synchronize()  # returns, since the communicator was aborted
    return type(error).__name__


def share_without_saying_so() -> None:
    with pytest.raises(CollectiveError, match="several ranks use one GPU"):
        hvd.allreduce(torch.ones(2, device="cuda"), name="t")
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="on the host").tolist() == [2.0, 2.0]


@pytest.mark.parametrize("body", [every_collective, types, trains_alike, a_step_waits_for_nothing])
@pytest.mark.parametrize("size", [1, 2])
def test_on_a_gpu(rank_pool: Callable[[int], RankPool], body: Callable[[torch.device], None], size: int) -> None:
    if body is a_step_waits_for_nothing and size == 1:
        pytest.skip("a single rank does not communicate in a step")
    rank_pool(size).run(on_a_gpu, body, timeout=170)


def test_a_rank_that_dies_on_a_gpu_is_named() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(on_a_gpu, 2, a_rank_dies, timeout=170)
    assert caught.value.results == {0: PeerLostError.__name__}, str(caught.value)


def test_ranks_on_one_gpu_without_host_ids_are_told(rank_pool: Callable[[int], RankPool]) -> None:
    if _NUM_GPUS > 1:
        pytest.skip("there is a GPU for each of two ranks")
    rank_pool(2).run(share_without_saying_so, timeout=170, init=True)
