"""A training that goes on when ranks die, for `benchmarks.elastic`: with `hvd.elastic`, or with DDP below torchrun.

Arguments: ``reigen`` or ``ddp``; a directory; ``kills`` or ``turns``. Each process appends to a file of its own, for
each step, ``step rank size process time``. With ``ddp``, rank 0 writes a checkpoint every tenth step, from which the
processes that torchrun starts go on. With ``turns`` it makes `STEPS_A_TURN` steps for each file ``turn.N``, commits
if the fourth argument says so, and rank 0 writes the milliseconds of a step.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

STEPS_A_TURN = 60
STEPS_A_CHECKPOINT = 10


def make_model(width: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


class Steps:
    """Writes down steps; ends when a file says so."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = (directory / f"steps.{os.getpid()}").open("a", buffering=1)

    def note(self, step: int, rank: int, size: int) -> None:
        self._file.write(f"{step} {rank} {size} {os.getpid()} {time.time():.6f}\n")

    def is_over(self) -> bool:
        return (self._directory / "enough").exists()


def turns(directory: Path, is_first: bool, step: Callable[[], None], meet: Callable[[], object]) -> Iterator[None]:
    """Make steps when they are asked for."""
    number = 0
    while not (directory / "enough").exists():
        if not (directory / f"turn.{number}").exists():
            time.sleep(0.002)
            continue
        meet()
        for _ in range(5):
            step()
        begin = time.perf_counter()
        for _ in range(STEPS_A_TURN):
            step()
        milliseconds = (time.perf_counter() - begin) / STEPS_A_TURN * 1000
        if is_first:
            (directory / f"took.{number}.part").write_text(f"{milliseconds:.4f}")
            (directory / f"took.{number}.part").rename(directory / f"took.{number}")
        number += 1
        yield


def train_reigen(directory: Path, mode: str, commits: bool) -> None:
    import reigen.torch as hvd

    hvd.init()
    model = make_model(256 if mode == "kills" else 512)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), named_parameters=model.named_parameters()
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    data, steps = torch.randn(32, 64), Steps(directory)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    def commit_step() -> None:
        step()
        state.commit()

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        if mode == "turns":
            for _ in turns(directory, hvd.rank() == 0, commit_step if commits else step, hvd.barrier):
                pass
            return
        is_over = False
        while not is_over:
            step()
            state.step += 1
            steps.note(state.step, hvd.rank(), hvd.size())
            is_over = bool(hvd.allreduce(torch.tensor([float(steps.is_over())]), name="over", op=hvd.Max).item())
            state.commit()

    train(state)


def train_ddp(directory: Path) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.nn.parallel import DistributedDataParallel

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # keys of an attempt of its own: after a restart Gloo found addresses of processes that were dead (torch 2.13)
    agent = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", agent)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model = DistributedDataParallel(make_model(256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data, steps, number = torch.randn(32, 64), Steps(directory), 0
    checkpoint = directory / "checkpoint"
    if checkpoint.exists():
        found = torch.load(checkpoint)
        number = found["step"]
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    is_over = torch.zeros(1)
    while not is_over.item():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        number += 1
        steps.note(number, rank, size)
        is_over[0] = float(steps.is_over())
        dist.all_reduce(is_over, dist.ReduceOp.MAX)
        if rank == 0 and number % STEPS_A_CHECKPOINT == 0:
            part = checkpoint.with_suffix(".part")
            torch.save({"step": number, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
            part.rename(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "ddp":
        train_ddp(Path(sys.argv[2]))
    else:
        train_reigen(Path(sys.argv[2]), sys.argv[3], len(sys.argv) > 4 and sys.argv[4] == "commits")
