"""The peer DistributedDataParallel with Gloo, for `reigen bench train-step`.

By hand: torchrun --nproc-per-node 2 -m benchmarks.harness.rank benchmarks/ddp_train.py mlp/view
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.models import Training, variant_of
from benchmarks.harness.work import Case


class Ddp:
    def __init__(self, rank: int, size: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: whatever its name resolves to
        dist.init_process_group("gloo", rank=rank, world_size=size)
        self.rank = rank
        self.versions = {"torch": str(torch.__version__)}

    def open(self, case: Case) -> Training:
        """.../default or .../view: with gradient_as_bucket_view, which spares a copy of the gradients."""
        view = variant_of(case) == "view"

        def wrapped(model: nn.Module) -> nn.Module:
            return DistributedDataParallel(model, gradient_as_bucket_view=view)

        return Training(case, self.rank, wrap_model=wrapped)

    def close(self) -> None:
        dist.destroy_process_group()


def start(rank: int, size: int) -> Ddp:
    return Ddp(rank, size)
