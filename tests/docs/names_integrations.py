"""A model and its data for docs/lightning.md and docs/metrics.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

import reigen.torch as hvd

Names = dict[str, Any]


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def given_lightning() -> Names:
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return {"model": Line(), "loader": DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4)}


def check_lightning(names: Names) -> None:
    trainer = names["trainer"]
    assert (trainer.world_size, trainer.current_epoch, trainer.global_step) == (2, 10, 20)
    weights = names["model"].net.weight.detach()
    assert torch.equal(hvd.allgather(weights), weights.repeat(2, 1))
    assert torch.allclose(weights, torch.ones(1, 4), atol=0.3)


def given_fabric() -> Names:
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return {"model": torch.nn.Linear(4, 1), "data": TensorDataset(inputs, inputs.sum(1, keepdim=True))}


def check_fabric(names: Names) -> None:
    assert len(names["loader"]) == 4
    weights = names["model"].weight.detach()
    assert torch.equal(hvd.allgather(weights), weights.repeat(2, 1))


def given_tensorboard() -> Names:
    hvd.init()
    model = torch.nn.Linear(4, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    return {"hvd": hvd, "optimizer": optimizer, "loader": [(torch.ones(1), torch.ones(1))] * 200}


def check_tensorboard(names: Names) -> None:
    names["writer"].close()
    hvd.barrier()
    events = EventAccumulator("runs/1")
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("reigen/ranks")] == [(100, 2.0), (200, 2.0)]
    assert Path("runs/1").is_dir()
