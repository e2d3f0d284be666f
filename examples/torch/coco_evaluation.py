"""The mean loss of images, and average precision as COCO defines it, for coco_detection.py."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from coco_data import Coco, collate
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision.models.detection import MaskRCNN

import reigen.torch as hvd

LossOf = Callable[..., torch.Tensor]


def _mine(data: Coco, workers: int) -> Iterator[tuple[int, Any]]:
    """This rank's images, with their numbers in the data."""
    part = list(range(len(data)))[hvd.rank() :: hvd.size()]
    loader = DataLoader(Subset(data, part), 1, collate_fn=collate, num_workers=workers)
    return zip(part, loader, strict=True)


def mean_loss(loss_of: LossOf, model: nn.Module, data: Coco, workers: int) -> float:
    """The mean loss of images to test with, of which each rank takes a part."""
    total = torch.zeros(2)
    with torch.no_grad():
        for number, (images, targets) in _mine(data, workers):
            total += torch.tensor([float(loss_of(model, images, targets, number)), 1])
    total = hvd.allreduce(total, op=hvd.Sum, name="test loss")
    return float(total[0] / total[1])


def average_precision(model: nn.Module, data: Coco, device: torch.device, workers: int) -> dict[str, float]:
    """That of boxes (bbox), and of masks (segm) if the model finds them: the means over overlaps of 0.5 to 0.95.

    Each rank looks at a part of the images; the result is on rank 0, and empty elsewhere.
    """
    categories = {label: category for category, label in data.labels.items()}
    found: list[dict[str, Any]] = []
    model.eval()
    with torch.no_grad():
        for number, (images, _) in _mine(data, workers):
            [output] = model([image.to(device) for image in images])
            found += results({name: value.cpu() for name, value in output.items()}, data.numbers[number], categories)
    model.train()
    gathered = [each for part in hvd.allgather_object(found) for each in part]
    kinds = ["bbox", "segm"] if isinstance(model, MaskRCNN) else ["bbox"]
    return precisions(data, gathered, kinds) if hvd.rank() == 0 else {}


def results(output: dict[str, torch.Tensor], image: int, categories: dict[int, int]) -> Iterator[dict[str, Any]]:
    """What was found in an image, as pycocotools wants it."""
    from pycocotools import mask

    corners = output["boxes"].tolist()
    for index, (label, score) in enumerate(zip(output["labels"].tolist(), output["scores"].tolist(), strict=True)):
        left, top, right, bottom = corners[index]
        box = [left, top, right - left, bottom - top]
        one = {"image_id": image, "category_id": categories[label], "bbox": box, "score": score}
        if "masks" in output:
            pixels = (output["masks"][index, 0] > 0.5).numpy().astype(np.uint8)
            one["segmentation"] = mask.encode(np.asfortranarray(pixels))
        yield one


def precisions(data: Coco, found: list[dict[str, Any]], kinds: Sequence[str]) -> dict[str, float]:
    """Average precision of what was found in all images, of boxes (bbox) and masks (segm)."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if not found:
        return dict.fromkeys(kinds, 0.0)
    reached = {}
    with contextlib.redirect_stdout(io.StringIO()):  # it prints twelve figures, and how long it took
        truth = COCO(str(data.annotations))
        for kind in kinds:
            evaluation = COCOeval(truth, truth.loadRes([dict(each) for each in found]), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            reached[kind] = float(evaluation.stats[0])
    return reached
