"""Faster R-CNN and Mask R-CNN on COCO.

    reigen run -np 2 python examples/torch/coco_detection.py --model mask
    reigen run -np 8 python examples/torch/coco_detection.py --model mask --data coco --backbone resnet50 --size 800 \\
        --regions 512 --backbone-weights resnet50.pt --batch 16 --epochs 12 --workers 4 --average-precision

--data has train2017/, val2017/ and annotations/instances_*.json; without it, a few pictures of rectangles and triangles
are drawn. A step of --batch images, on all ranks together, is cut into micro-batches, of which a rank takes several one
after the other where the ranks are few: their number does not matter for the result.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import generated_data
import torch
from coco_data import Coco, Target, collate
from coco_evaluation import average_precision, mean_loss
from progress import Progress
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

import reigen.torch as hvd

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=["faster", "mask"], default="faster", help="R-CNN (default: %(default)s)")
    add("--data", type=Path, help="the directory of train2017, val2017 and annotations")
    add("--num-images", type=int, default=32, help="how many pictures to draw (default: %(default)s)")
    add("--backbone", default="resnet18", help="resnet50 for COCO (default: %(default)s)")
    add("--backbone-weights", type=Path, help="weights of a classifier, or a checkpoint of imagenet_resnet50.py")
    add("--size", type=int, default=64, help="the shorter side of images, 800 for COCO (default: %(default)s)")
    add("--regions", type=int, default=16, help="of an image, to learn from; 512 for COCO (default: %(default)s)")
    add("--batch", type=int, default=8, help="images of a step, of all ranks together (default: %(default)s)")
    add("--micro-batch", type=int, default=2, help="images of a forward pass (default: %(default)s)")
    add("--epochs", type=int, default=3, help="12 for COCO (default: %(default)s)")
    add("--lr", type=float, default=0.02, help="for each 16 images of a step (default: %(default)s)")
    add("--warmup", type=int, default=10, help="steps, 1000 for COCO (default: %(default)s)")
    add("--workers", type=int, default=0, help="processes of a rank that load images (default: %(default)s)")
    add("--average-precision", action="store_true", help="in the end; needs pycocotools")
    add("--goal", type=float, help="exit with 1 above this loss (default: 2, without --data)")
    options = parser.parse_args()
    if options.goal is None:
        options.goal = float("inf") if options.data else 2.0
    return options


def make_model(options: argparse.Namespace, classes: int) -> nn.Module:
    """The detector. Batch normalisation is frozen with --backbone-weights, and otherwise nothing at first."""
    backbone = resnet_fpn_backbone(
        backbone_name=options.backbone, weights=None, trainable_layers=3 if options.backbone_weights else 5
    )
    if options.backbone_weights:
        weights = torch.load(options.backbone_weights, map_location="cpu", weights_only=True)
        weights = {name: value for name, value in weights.get("model", weights).items() if not name.startswith("fc.")}
        backbone.body.load_state_dict(weights)
    kind = MaskRCNN if options.model == "mask" else FasterRCNN
    return kind(
        backbone,
        classes,
        min_size=options.size,
        max_size=options.size * 5 // 3,
        rpn_pre_nms_top_n_train=4 * options.regions,
        rpn_post_nms_top_n_train=4 * options.regions,
        box_batch_size_per_image=options.regions,
    )


def loss_of(model: nn.Module, images: list[torch.Tensor], targets: list[Target], seed: int) -> torch.Tensor:
    """The sum of all losses. What is drawn by lot for them is the same whichever rank does it."""
    torch.manual_seed(seed)
    moved = [{name: value.to(DEVICE) for name, value in target.items()} for target in targets]
    losses: dict[str, torch.Tensor] = model([image.to(DEVICE) for image in images], moved)
    return torch.stack(list(losses.values())).sum()


def train(options: argparse.Namespace, directory: Path) -> float:
    """The loss of the images to test with."""
    data, test = Coco(directory, "train2017"), Coco(directory, "val2017")
    torch.manual_seed(0)
    model = make_model(options, len(data.labels) + 1).to(DEVICE)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    passes, rest = divmod(options.batch, options.micro_batch * hvd.size())
    if rest or not passes:
        raise SystemExit(f"--batch must be a multiple of --micro-batch times {hvd.size()} ranks")
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    rate = options.lr * options.batch / 16
    optimizer = torch.optim.SGD([weight for _, weight in trained], rate, momentum=0.9, weight_decay=1e-4)
    optimizer = hvd.DistributedOptimizer(optimizer, trained, backward_passes_per_step=passes)
    steps = len(data) // options.batch
    drops = [options.epochs * steps * part // 12 for part in (8, 11)]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / options.warmup) * 0.1 ** sum(step >= drop for drop in drops)
    )
    progress = Progress(options.epochs * steps * options.batch, is_shown=hvd.rank() == 0)
    loss = 0.0
    for epoch in range(options.epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))[: steps * options.batch]
        mine = [part.tolist() for part in order.split(options.micro_batch)][hvd.rank() :: hvd.size()]
        loader = DataLoader(data, batch_sampler=mine, collate_fn=collate, num_workers=options.workers)
        for number, (images, targets) in enumerate(loader, start=1):
            found = loss_of(model, images, targets, seed=mine[number - 1][0])
            (found / passes).backward()
            if number % passes == 0:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                progress.add(options.batch, found.detach())
        loss = mean_loss(loss_of, model, test, options.workers)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{options.epochs}  test loss {loss:.4f}", flush=True)
    if options.average_precision:
        whole = Coco(directory, "val2017", whole=True)
        for kind, precision in average_precision(model, whole, DEVICE, options.workers).items():
            print(f"average precision of {kind}: {precision:.4f}", flush=True)
    return loss


def main() -> int:
    options = parse()
    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as made:
        if options.data is None:
            generated_data.write_coco(Path(made) / "coco", options.num_images, options.num_images // 4, options.size)
        loss = train(options, options.data or Path(made) / "coco")
    if hvd.rank() == 0:
        print(f"{hvd.size()} rank(s), {options.model} R-CNN: test loss {loss:.6f}, wanted {options.goal}", flush=True)
    return 0 if loss <= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
