"""Time of a training step on a GPU: ranks that do not communicate, Reigen, and DDP over NCCL; in one job, alternating.

    reigen run -np 2 python -m benchmarks.cuda_step
    reigen run -np 2 python -m benchmarks.cuda_step --json docs/data/records/gpu.json

Where ranks share a GPU, each has a host of its own in NCCL's eyes (NCCL_HOSTID), so NCCL moves everything by sockets:
the same for Reigen and DDP.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import reigen.torch as hvd
from benchmarks.harness.machine import Machine, this_machine
from benchmarks.harness.models import RECIPES
from benchmarks.harness.record import Column, Quantity, Record, make_record
from benchmarks.harness.report import markdown

APART, REIGEN, DDP = "ranks that do not communicate", "reigen", "ddp"
_WARMUP = 5


def make_step(model_name: str, mode: str, cuda: torch.device) -> Callable[[], None]:
    """One step of a training: gradients of random data, SGD with momentum."""
    recipe = RECIPES[model_name]
    torch.manual_seed(20)
    model = recipe.make().to(cuda)
    torch.manual_seed(21 + hvd.rank())
    inputs = torch.randn(recipe.batch, device=cuda)
    with torch.no_grad():
        targets = torch.randn_like(model(inputs))
    forward: nn.Module = DistributedDataParallel(model, gradient_as_bucket_view=True) if mode == DDP else model
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    if mode == REIGEN:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(forward(inputs), targets))
        optimizer.step()

    return step


def measure(model: str, cuda: torch.device, rounds: int, num_steps: int) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of a step: until it is on the GPU's queue, and until it is done; of the slowest rank, by round."""
    steps = {mode: make_step(model, mode, cuda) for mode in (APART, REIGEN, DDP)}
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in steps}
    for number in range(rounds + 1):
        for mode, step in steps.items():
            for _ in range(_WARMUP):
                step()
            torch.cuda.synchronize()
            hvd.barrier()
            begin = time.perf_counter()
            for _ in range(num_steps):
                step()
            queued = time.perf_counter() - begin
            torch.cuda.synchronize()
            took = torch.tensor([queued, time.perf_counter() - begin], dtype=torch.float64) * 1000 / num_steps
            queued, done = hvd.allreduce(took, name="took", op=hvd.Max).tolist()
            if number:  # the first round warms up
                found[mode].append((queued, done))
    return found


def connect_ddp() -> None:
    """DDP's process group, over a port that rank 0 has found free."""
    port = 0
    if hvd.rank() == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    port = hvd.broadcast_object(port, root_rank=0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=hvd.rank(), world_size=hvd.size())


_MODELS = {"mlp": "mlp, 25 M parameters", "deep": "deep, 160 small tensors", "cnn": "cnn, 1.2 M parameters"}
_COLUMNS = {
    APART: (APART, 0),
    "reigen: queued": (REIGEN, 0), "reigen: done": (REIGEN, 1),
    "ddp: queued": (DDP, 0), "ddp: done": (DDP, 1),
}  # fmt: skip
_RATIO = "done, reigen / ddp"


def make_table(
    found: Mapping[str, Mapping[str, list[tuple[float, float]]]], options: argparse.Namespace, machine: Machine
) -> Record:
    """Return what was found, as a table: medians of turns, and the median of their quotients.

    Args:
        found: model -> mode -> milliseconds of a step by turn, queued and done.
        options: those of the command.
        machine: as it was before.
    """
    lines: dict[str, dict[str, Quantity | str]] = {}
    for model, modes in found.items():
        line: dict[str, Quantity | str] = {}
        for name, (mode, which) in _COLUMNS.items():
            value = statistics.median(turn[which] for turn in modes[mode])
            line[name] = Quantity(value, 2 if value < 10 else 1)
        quotients = [mine[1] / other[1] for mine, other in zip(modes[REIGEN], modes[DDP], strict=True)]
        lines[_MODELS.get(model, model)] = line | {_RATIO: Quantity(statistics.median(quotients))}
    columns = [*(Column(name, "ms") for name in _COLUMNS), Column(_RATIO)]
    command = f"python -m benchmarks.cuda_step --rounds {options.rounds} --steps {options.steps}"
    gpu = ""
    if torch.cuda.is_available():
        is_shared = hvd.local_size() > torch.cuda.device_count()
        where = f"ranks share an {torch.cuda.get_device_name()}, and NCCL uses sockets" if is_shared else "ranks, {}"
        gpu = f"{hvd.size()} {where.format(torch.cuda.get_device_name())}"
    conditions = f"{gpu}; medians of {options.rounds} turns of {options.steps} steps, of the slower rank"
    return make_record(
        f"reigen run -np {hvd.size()} {command}",
        conditions,
        "model",
        columns,
        lines,
        machine,
        {"torch": torch.__version__},
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table on rank 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_step", description=__doc__)
    parser.add_argument("--models", default="mlp,deep,cnn", help="of %(default)s (default: all)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each mode (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="steps of a turn (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is false")
    if int(os.environ.get("REIGEN_LOCAL_SIZE", "1")) > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"rank-{os.environ['REIGEN_RANK']}"
    hvd.init()
    cuda = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(cuda)
    connect_ddp()
    before = this_machine()
    rows: list[tuple[str, ...]] = []
    found_by_model: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for model in options.models.split(","):
        found = found_by_model[model] = measure(model, cuda, options.rounds, options.steps)
        for mode, turns in found.items():
            ratio = statistics.median(mine[1] / other[1] for mine, other in zip(turns, found[DDP], strict=True))
            queued, done = (statistics.median(turn[which] for turn in turns) for which in (0, 1))
            rows.append((model, mode, f"{queued:.2f}", f"{done:.2f}", f"{ratio:.2f}"))
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, {torch.cuda.get_device_name(cuda)}, torch {torch.__version__}\n")
        print(markdown(["model", "mode", "queued, ms", "done, ms", "done, of ddp"], rows))
        if options.json is not None:
            make_table(found_by_model, options, before).save(options.json)
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
