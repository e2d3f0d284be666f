"""Training of a small network by Lightning's Trainer, in rank processes of tests and as a program.

python -m tests.integrations.lightning_training STRATEGY [BATCH before which rank 1 dies]
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Options:
    """Options of one training."""

    strategy: str = "reigen"
    package: str = "lightning.pytorch"
    #: samples of a rank's batch
    batch: int = 8
    #: batches of one step, or by epoch
    accumulate: int = 1
    clip: float | None = None
    epochs: int = 2
    sync_batchnorm: bool = False
    precision: str = "32-true"
    #: where checkpoints go
    directory: str | None = None
    #: a checkpoint to go on from
    resume: str | None = None
    #: epochs without a better loss
    patience: int | None = None
    #: the batch before which rank 1 dies
    death: int = -1
    #: the network within the module is compiled
    compiled: bool = False
    #: of the strategy
    arguments: dict[str, Any] = field(default_factory=dict)


def samples(seed: int, count: int) -> torch.utils.data.TensorDataset:
    """Points of three classes."""
    labels = torch.arange(count) % 3
    points = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(points + labels[:, None] * torch.tensor([1.0, -1, 0.5, 0, 2, -0.5]), labels)


def make_model(options: Options) -> Any:
    """A classifier, which keeps what it sees."""
    from torchmetrics.classification import MulticlassAccuracy

    package: Any = importlib.import_module(options.package)

    class Classifier(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            norm = torch.nn.BatchNorm1d(16) if options.sync_batchnorm else torch.nn.Identity()
            self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), norm, torch.nn.Tanh(), torch.nn.Linear(16, 3))
            if options.compiled:
                self.net.compile(backend="eager")
            self.accuracy = MulticlassAccuracy(3, average="micro")
            self.losses: list[float] = []
            self.norms: list[float] = []
            self.gathered: list[Any] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if index == options.death and self.global_rank == 1:
                os._exit(9)
            points, labels = batch
            loss = torch.nn.functional.cross_entropy(self.net(points), labels)
            self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")))
            return loss

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            self.norms.append(float(torch.stack([each.norm() for each in gradients]).norm()))

        def validation_step(self, batch: Any, index: int) -> None:
            points, labels = batch
            scores = self.net(points)
            self.accuracy(scores, labels)
            self.log("accuracy", self.accuracy, on_epoch=True)
            loss = torch.nn.functional.cross_entropy(scores, labels)
            self.log("val_loss", loss, on_epoch=True, sync_dist=True, batch_size=len(points))

        def on_train_end(self) -> None:
            rank = torch.tensor([float(self.global_rank)], requires_grad=True)
            gathered = self.all_gather(rank, sync_grads=True)
            (gathered.sum() * (self.global_rank + 1)).backward()
            assert rank.grad is not None
            self.gathered = [gathered.flatten().tolist(), rank.grad.tolist()]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Classifier()


def make_trainer(options: Options) -> Any:
    """A Trainer."""
    package: Any = importlib.import_module(options.package)
    callbacks: list[Any] = []
    if options.directory is not None:
        callbacks += [package.callbacks.ModelCheckpoint(dirpath=options.directory, save_last=True)]
    if options.patience is not None:
        callbacks += [package.callbacks.EarlyStopping("val_loss", patience=options.patience, min_delta=10.0)]
    strategy: Any = options.strategy
    if options.arguments:
        import reigen.lightning

        strategy = reigen.lightning.make_strategy_class(options.package)(**options.arguments)
    return package.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) if options.strategy == "ddp" else 1,
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip,
        sync_batchnorm=options.sync_batchnorm,
        precision=options.precision,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=options.directory is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def fit(options: Options) -> dict[str, Any]:
    """Train; returns what this rank has seen."""
    warnings.filterwarnings("ignore", module=".*lightning.*")
    importlib.import_module(options.package)
    import reigen.lightning

    assert reigen.lightning.register_strategies()
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # each begins with other weights than rank 0
    model = make_model(options)
    trainer = make_trainer(options)
    if options.strategy == "reigen" and trainer.world_size > 1:
        torch.manual_seed(trainer.global_rank)
        model = make_model(options)
    data = samples(1, 96)
    # The order in which Lightning deals out samples to several ranks.
    order = torch.utils.data.DistributedSampler(data, 1, 0) if options.strategy == "auto" else None
    loader = torch.utils.data.DataLoader(data, batch_size=options.batch, sampler=order)
    validation = torch.utils.data.DataLoader(samples(2, 50), batch_size=options.batch)
    trainer.fit(model, loader, validation, ckpt_path=options.resume)
    state = b"".join(tensor.contiguous().numpy().tobytes() for tensor in model.net.state_dict().values())
    return {
        "rank": trainer.global_rank,
        "size": trainer.world_size,
        "weights": hashlib.sha256(state).hexdigest(),
        "parameters": torch.cat([p.detach().flatten() for p in model.net.parameters()]).tolist(),
        "buffers": [buffer.tolist() for buffer in model.net.buffers()],
        "norm": type(model.net[1]).__name__,
        "losses": model.losses,
        "norms": model.norms,
        "accuracy": float(trainer.callback_metrics["accuracy"]),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "gathered": model.gathered,
        "sampler": type(trainer.train_dataloader.sampler).__name__,
        "broadcast": trainer.strategy.broadcast(("of", trainer.global_rank), 0),
        "optimizer": type(trainer.optimizers[0]) is torch.optim.SGD,
        "hooks": sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()),
    }


if __name__ == "__main__":
    result = fit(Options(sys.argv[1], death=int(sys.argv[2]) if len(sys.argv) > 2 else -1))
    sys.stdout.write(f"{result['rank']} of {result['size']}: {result['weights']}\n")
