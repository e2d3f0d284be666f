"""Manual optimization with two optimizers, as for adversarial networks; prints the weights' sum on each rank.

With an argument, both optimizers have all parameters.
"""

from __future__ import annotations

import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import reigen.lightning  # noqa: F401  registers the strategy
import reigen.torch as hvd


class Alternating(lightning.LightningModule):
    """Two layers, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def loss(self, points: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(points)).square().mean()

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        for optimizer in self.optimizers():
            self.zero_grad()  # those of the other optimizer, too
            own = torch.autograd.grad(self.loss(batch[0]), list(self.parameters()))
            self.manual_backward(self.loss(batch[0]))
            for parameter, gradient in zip(self.parameters(), own, strict=True):
                torch.testing.assert_close(parameter.grad, hvd.allreduce(gradient))
            optimizer.step()
            assert optimizer.param_groups[0]["lr"] == 0.1
            assert optimizer.state_dict()["param_groups"]

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        owners = (self, self) if len(sys.argv) > 1 else (self.first, self.second)
        return tuple(torch.optim.SGD(layer.parameters(), lr=0.1) for layer in owners)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Alternating()
    trainer = lightning.Trainer(
        strategy="reigen", accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    before = sum(each.double().sum().item() for each in model.parameters())
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4))
    after = sum(each.double().sum().item() for each in model.parameters())
    print(f"changed: {before != after}, weights: {after!r}", flush=True)
