"""VGG-11 on CIFAR-10, by parameter servers or by allreduce.

    reigen run -np 2 -s 1 python examples/torch/cifar10_vgg11.py --kvstore dist_sync
    reigen run -np 2 python examples/torch/cifar10_vgg11.py --kvstore ring
    python examples/torch/cifar10_vgg11.py --kvstore local

CIFAR-10's binary version (data_batch_1.bin and so on, https://www.cs.toronto.edu/~kriz/cifar.html) is read from --data;
without it, small pictures are drawn. --batch is that of all workers together, so that their number does not matter.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import generated_data
import numpy as np
import torch
from progress import Progress
from torch import nn
from torch.nn.functional import cross_entropy

import reigen.torch as hvd
from reigen import kv
from reigen.torch import Trainer

VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")
RECORD_BYTES = 1 + 3 * 32 * 32


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kvstore", choices=["dist_sync", "ring", "local"], default="ring", help="default: %(default)s")
    add("--data", type=Path, help="where data_batch_1.bin and the others are")
    add("--num-images", type=int, default=800, help="how many pictures to draw (default: %(default)s)")
    add("--epochs", type=int, default=2, help="60 for CIFAR-10 (default: %(default)s)")
    add("--width", type=float, default=0.25, help="factor of all widths: 1 for VGG-11 itself (default: %(default)s)")
    add("--batch", type=int, default=32, help="images of a step, of all workers together (default: %(default)s)")
    add("--lr", type=float, default=0.001, help="falls to a tenth after half and three quarters (default: %(default)s)")
    add("--goal", type=float, help="exit with 1 below this accuracy (default: 0.8, without --data)")
    options = parser.parse_args()
    if options.goal is None:
        options.goal = 0.0 if options.data else 0.8
    return options


def read(directory: Path, pattern: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of all files, as bytes of the shape (number, 3, 32, 32), and their labels."""
    raw = b"".join(path.read_bytes() for path in sorted(directory.glob(pattern)))
    if not raw or len(raw) % RECORD_BYTES:
        raise SystemExit(f"{directory}/{pattern}: {len(raw)} bytes; CIFAR-10 has {RECORD_BYTES} for each image")
    records = torch.tensor(np.frombuffer(raw, np.uint8).reshape(-1, RECORD_BYTES))
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def load(options: argparse.Namespace) -> list[torch.Tensor]:
    """Images and labels to train on, images and labels to test with."""
    with tempfile.TemporaryDirectory() as made:
        if options.data is None:
            generated_data.write_cifar10(Path(made), options.num_images, options.num_images // 4)
        directory = options.data or Path(made)
        return [*read(directory, "data_batch_*.bin"), *read(directory, "test_batch.bin")]


def scale(images: torch.Tensor) -> torch.Tensor:
    return images.float() / 64 - 2  # about as large as normal numbers


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Flip half of a batch, and move it by up to four pixels."""
    flipped = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    x, y = torch.randint(-4, 5, (2,), generator=generator).tolist()
    return torch.where(flipped, images.flip(3), images).roll((y, x), (2, 3))


def make_model(factor: float) -> nn.Sequential:
    """Configuration A of https://arxiv.org/abs/1409.1556 for 32 x 32 pixels: one linear layer, as is usual there."""
    layers: list[nn.Module] = []
    channels = 3
    for width in VGG11:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
        else:
            convolution = nn.Conv2d(channels, int(width * factor), 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            layers += [convolution, nn.ReLU()]
            channels = int(width * factor)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, generated_data.CLASSES))


def evaluate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        found = torch.cat([model(scale(part).to(DEVICE)).argmax(1).cpu() for part in images.split(256)])
    return float((found == labels).float().mean())


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> int:
    options = parse()
    store = kv.create(options.kvstore)  # in a server that `reigen launch` has started, this is all
    hvd.init()
    if options.kvstore == "local" and hvd.size() > 1:
        raise SystemExit(f"--kvstore local is for one process: the {hvd.size()} workers would train a model each")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    model = make_model(options.width).to(DEVICE)
    images, labels, test_images, test_labels = load(options)
    steps = len(labels) // options.batch
    adam = {"learning_rate": options.lr, "wd": 1e-4}  # SGD takes VGG-11 some epochs to begin
    # Here the servers update the weights, there the workers do: what follows is the same.
    with store:
        rank, num_workers = store.rank, store.num_workers
        trainer = Trainer(model.named_parameters(), "adam", adam, kvstore=store)
        progress = Progress(options.epochs * steps * options.batch, is_shown=rank == 0)
        accuracy = 0.0
        for epoch in range(options.epochs):
            if epoch in {options.epochs // 2, options.epochs * 3 // 4} - {0}:
                trainer.set_learning_rate(trainer.learning_rate / 10)  # the servers', too
            # The same permutation on all workers, of which each takes its part. What is left over comes another time.
            generator = torch.Generator().manual_seed(epoch)
            order = torch.randperm(len(labels), generator=generator)
            for batch in order[: steps * options.batch].split(options.batch):
                changed = augment(images[batch], generator) if options.data else images[batch]
                mine = slice(rank, None, num_workers)
                trainer.zero_grad()
                outputs = model(scale(changed[mine]).to(DEVICE))
                loss = cross_entropy(outputs, labels[batch][mine].to(DEVICE), reduction="sum")
                loss.backward()
                trainer.step(options.batch)  # the gradients of all workers are added up
                progress.add(options.batch, loss.detach() * num_workers / options.batch)
            if rank == 0:
                accuracy = evaluate(model, test_images, test_labels)
                print(f"epoch {epoch + 1}/{options.epochs}  accuracy {accuracy:.4f}", flush=True)
        final = sum(float(weight.detach().double().square().sum()) for weight in model.parameters()) ** 0.5
    if rank == 0:
        how = f"{options.kvstore}, {num_workers} worker(s), {progress.elapsed:.1f} s"
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; norm of the weights {final:.6f}")
    return 0 if rank or accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
