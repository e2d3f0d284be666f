"""ResNet-50 on ImageNet, in mixed precision.

    reigen run -np 2 python examples/torch/imagenet_resnet50.py
    reigen run -np 8 python examples/torch/imagenet_resnet50.py --data imagenet --classes 1000 --image-size 224 \\
        --batch 2048 --micro-batch 256 --epochs 90 --drop-epochs 30 60 80 --warmup-epochs 5 --workers 8 \\
        --checkpoint resnet50.pt

--data has train/CLASS/*.JPEG and val/CLASS/*.JPEG; without it, a few pictures are drawn. A step of --batch images, on
all ranks together, is cut into micro-batches: each rank takes several of them one after the other where the ranks are
few. Batch normalisation looks at a micro-batch, so the number of ranks does not matter.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from imagenet_data import Sample, Seeded, load, micro_batches
from progress import Progress
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import models

import reigen.torch as hvd

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="the directory of train and val")
    add("--synthetic", action="store_true", help="the same image again and again: how fast is it without files?")
    add("--num-images", type=int, default=320, help="how many to draw, or synthetic ones (default: %(default)s)")
    add("--classes", type=int, default=10, help="1000 in ImageNet (default: %(default)s)")
    add("--image-size", type=int, default=32, help="224 for ImageNet (default: %(default)s)")
    add("--model", default="resnet50", help="one of torchvision's (default: %(default)s)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of products (default: %(default)s)")
    add("--batch", type=int, default=32, help="images of a step, of all ranks together (default: %(default)s)")
    add("--micro-batch", type=int, default=8, help="images of a forward pass (default: %(default)s)")
    add("--epochs", type=int, default=4, help="90 for ImageNet (default: %(default)s)")
    add("--lr", type=float, default=0.1, help="for each 256 images of a step (default: %(default)s)")
    add("--drop-epochs", type=int, nargs="*", default=[3], help="the rate falls to a tenth (default: %(default)s)")
    add("--warmup-epochs", type=float, default=1.0, help="5 for ImageNet (default: %(default)s)")
    add("--label-smoothing", type=float, default=0.1, help="default: %(default)s")
    add("--workers", type=int, default=0, help="processes of a rank that load images (default: %(default)s)")
    add("--checkpoint", type=Path, help="written after each epoch; training goes on from it where it is there")
    add("--goal", type=float, help="exit with 1 below this accuracy (default: 0.8 for drawn pictures)")
    options = parser.parse_args()
    if options.goal is None:
        options.goal = 0.0 if options.data or options.synthetic else 0.8
    return options


def evaluate(model: nn.Module, data: Dataset[Sample], options: argparse.Namespace) -> float:
    """The share that is recognised. Each rank looks at its part, with the running averages of all of them."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for buffer, average in zip(buffers, hvd.grouped_allreduce(buffers, name="buffers"), strict=True):
        buffer.copy_(average)
    model.eval()
    right = torch.zeros(2)
    part = Subset(data, range(hvd.rank(), len(data), hvd.size()))  # type: ignore[arg-type]
    for images, labels in DataLoader(part, options.micro_batch, num_workers=options.workers):
        with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=options.dtype == "bfloat16"):
            found = model(images.to(DEVICE)).argmax(1).cpu()
        right += torch.tensor([int((found == labels).sum()), len(labels)])
    model.train()
    right = hvd.allreduce(right, op=hvd.Sum, name="right")
    return float(right[0] / right[1])


def train(options: argparse.Namespace, data: Dataset[Sample], test: Dataset[Sample]) -> tuple[float, float]:
    """Accuracy, and mean loss of the last epoch."""
    torch.manual_seed(0)
    model = getattr(models, options.model)(num_classes=options.classes, zero_init_residual=True).to(DEVICE)
    passes, rest = divmod(options.batch, options.micro_batch * hvd.size())
    if rest:
        raise SystemExit(f"--batch must be a multiple of --micro-batch times {hvd.size()} ranks")
    optimizer = torch.optim.SGD(model.parameters(), options.lr * options.batch / 256, momentum=0.9, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=passes)
    count = len(data)  # type: ignore[arg-type]
    steps = count // options.batch
    warmup, drops = options.warmup_epochs * steps, [epoch * steps for epoch in options.drop_epochs]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / max(1, warmup)) * 0.1 ** sum(step >= drop for drop in drops)
    )
    first, accuracy, mean = 0, 0.0, float("nan")
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if options.checkpoint and hvd.broadcast_object(options.checkpoint.exists()):
        saved = hvd.rank() == 0 and torch.load(options.checkpoint, map_location="cpu", weights_only=True)
        state = hvd.broadcast_object(saved)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first = state["epoch"]
    if first >= options.epochs:  # it was done already
        accuracy = evaluate(model, test, options)
    progress = Progress((options.epochs - first) * steps * options.batch, is_shown=hvd.rank() == 0)
    for epoch in range(first, options.epochs):
        batches = micro_batches(count, epoch, options)[hvd.rank() :: hvd.size()]
        total = torch.zeros(())
        for number, (images, labels) in enumerate(
            DataLoader(Seeded(data, epoch), batch_sampler=batches, num_workers=options.workers), start=1
        ):
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=options.dtype == "bfloat16"):
                outputs = model(images.to(DEVICE))
            loss = cross_entropy(outputs.float(), labels.to(DEVICE), label_smoothing=options.label_smoothing)
            (loss / passes).backward()
            total += loss.detach().cpu() / len(batches)
            if number % passes == 0:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                progress.add(options.batch, loss.detach())
        mean = float(hvd.allreduce(total, name="loss"))
        accuracy = evaluate(model, test, options)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{options.epochs}  loss {mean:.4f}  accuracy {accuracy:.4f}", flush=True)
        if hvd.rank() == 0 and options.checkpoint:
            state = {name: part.state_dict() for name, part in parts.items()}
            written = options.checkpoint.with_suffix(".new")  # who is killed meanwhile leaves the old one
            torch.save(state | {"epoch": epoch + 1}, written)
            written.replace(options.checkpoint)
    return accuracy, mean


def main() -> int:
    options = parse()
    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as made:
        accuracy, loss = train(options, *load(options, Path(made)))
    if hvd.rank() == 0:
        how = f"{hvd.size()} rank(s), {options.model}, {options.dtype}"
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; last epoch's loss {loss:.6f}", flush=True)
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
