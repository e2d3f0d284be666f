"""PyTorch Lightning, ranks by Reigen: `reigen run -np 2 python examples/torch/lightning_digits.py`.

The steps of Horovod's `pytorch_lightning_mnist.py`, for Lightning 2 and on scikit-learn's digits: a `LightningModule`
that knows nothing of ranks, and a `Trainer` with `strategy="reigen"`. Lines that make it distributed are marked with
(*). --batch counts the images of all ranks together, so the number of ranks does not change the result.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import lightning
import torch
from progress import Progress
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import reigen.lightning  # noqa: F401  (*) registers the strategy
import reigen.torch as hvd


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=32, help="images of a step, of all ranks (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="default: %(default)s")
    parser.add_argument("--momentum", type=float, default=0.9, help="default: %(default)s")
    parser.add_argument("--goal", type=float, default=0.95, help="exit with 1 below it (default: %(default)s)")
    options = parser.parse_args()
    if options.batch % hvd.size():
        parser.error(f"--batch must be a multiple of the {hvd.size()} ranks")
    return options


class Net(lightning.LightningModule):
    """Two convolutions and two layers for images of 8 x 8 pixels.

    Args:
        lr: learning rate of SGD.
        momentum: of SGD.
    """

    def __init__(self, lr: float, momentum: float) -> None:
        super().__init__()
        self._lr, self._momentum = lr, momentum
        convolutions = [nn.Conv2d(1, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, 20, 3, padding=1), nn.ReLU()]
        self._layers = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(320, 50), nn.ReLU())
        self._head = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self._head(self._layers(images))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(self(images), labels)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, labels = batch
        logits = self(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        values = {"val_loss": cross_entropy(logits, labels), "val_accuracy": accuracy}
        self.log_dict(values, sync_dist=True, batch_size=len(labels))  # (*) the mean over all ranks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self._lr, momentum=self._momentum)


class Show(lightning.Callback):
    """Samples per second, the loss and the time that is left, on rank 0.

    Args:
        progress: prints them.
        batch: images of all ranks in a step.
    """

    def __init__(self, progress: Progress, batch: int) -> None:
        self._progress, self._batch = progress, batch

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._progress.add(self._batch, outputs["loss"])


def loader(images: torch.Tensor, labels: torch.Tensor, batch: int, *, is_training: bool) -> DataLoader[Any]:
    """This rank's batches: every rank takes its own images of a common order, as with DistributedDataParallel."""
    data = TensorDataset(images, labels)
    ranks = {"num_replicas": hvd.size(), "rank": hvd.rank()}  # (*)
    sampler: Any = DistributedSampler(data, shuffle=is_training, drop_last=is_training, **ranks)  # (*)
    return DataLoader(data, batch_size=batch // hvd.size(), sampler=sampler, drop_last=is_training)


def main() -> int:
    hvd.init()  # (*)
    options = parse()
    warnings.filterwarnings("ignore", message=".*does not have many workers")  # the images are in memory
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    train_loader = loader(images[train], labels[train], options.batch, is_training=True)
    test_loader = loader(images[test], labels[test], options.batch, is_training=False)

    lightning.seed_everything(0, verbose=False)
    model = Net(options.lr, options.momentum)
    num_samples = options.epochs * len(train_loader) * options.batch
    progress = Progress(num_samples, is_shown=hvd.rank() == 0)
    trainer = lightning.Trainer(
        strategy="reigen",  # (*)
        max_epochs=options.epochs,
        num_sanity_val_steps=0,
        callbacks=[Show(progress, options.batch)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train_loader, test_loader)
    loss, accuracy = (float(trainer.callback_metrics[name]) for name in ("val_loss", "val_accuracy"))
    if hvd.rank() == 0:
        how = f"Lightning {lightning.__version__}, {hvd.size()} rank(s), {progress.elapsed:.1f} s"
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; test loss {loss:.6f}")
    hvd.shutdown()  # (*)
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
