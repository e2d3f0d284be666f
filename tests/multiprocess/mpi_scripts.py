"""Scripts that users might start by mpirun, for `test_mpirun`; the first argument chooses one."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time

import numpy as np

import reigen as hvd
from reigen.errors import CollectiveError


def hello() -> None:
    hvd.init()
    total = hvd.allreduce(np.full(100_000, hvd.rank() + 0.5, np.float32), op=hvd.Sum)
    ranks = hvd.allgather(np.array([hvd.rank()])).tolist()
    digest = hashlib.sha256(total.tobytes()).hexdigest()[:8]
    print(f"rank {hvd.rank()} of {hvd.size()}, local rank {hvd.local_rank()} of {hvd.local_size()}: {digest} {ranks}")


def train() -> None:
    import torch

    import reigen.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print(f"rank {hvd.rank()}: {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]}")


def finalizes() -> None:
    """The script ends MPI itself, before Reigen has left the job."""
    from mpi4py import MPI

    hvd.init()
    hvd.allreduce(np.ones(10))
    MPI.Finalize()
    print("finalized", flush=True)


def raises() -> None:
    """One rank has a bug, the others wait for it."""
    hvd.init()
    hvd.allreduce(np.ones(10))
    if hvd.rank() == 1:
        raise ValueError("a bug in the script")
    hvd.allreduce(np.ones(10))


def stops() -> None:
    """One rank stands still, the others wait for it until the deadline."""
    hvd.init()
    hvd.allreduce(np.ones(10))
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    hvd.allreduce(np.ones(10))


def does_not_come() -> None:
    """One rank never calls init()."""
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
        time.sleep(300)
    hvd.init()


def catches() -> None:
    """The others go on without a rank that left, and end well: what counts is that the job ends."""
    hvd.init()
    if hvd.rank() == 1:
        return
    try:
        hvd.allreduce(np.ones(10))
    except CollectiveError as error:
        print("caught", error, flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
