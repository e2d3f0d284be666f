"""Images with boxes and masks of COCO's layout, train2017/, val2017/ and annotations/, for coco_detection.py."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.utils.data import Dataset
from torchvision.transforms.functional import to_tensor

Target = dict[str, torch.Tensor]


class Coco(Dataset[tuple[torch.Tensor, Target]]):
    """Images that have objects, or all. Categories are counted from 1 without gaps: 0 is the background.

    Objects that are given as a run-length mask, crowds among them, are left out.
    """

    def __init__(self, directory: Path, part: str, *, whole: bool = False) -> None:
        self.annotations = directory / "annotations" / f"instances_{part}.json"
        document = json.loads(self.annotations.read_text())
        numbers = sorted(category["id"] for category in document["categories"])
        self.labels = {number: label for label, number in enumerate(numbers, start=1)}
        objects: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for each in document["annotations"]:
            if not each["iscrowd"] and isinstance(each["segmentation"], list) and min(each["bbox"][2:]) > 0:
                objects[each["image_id"]].append(each)
        images = [image for image in document["images"] if whole or image["id"] in objects]
        self.numbers = [image["id"] for image in images]
        self.items = [(directory / part / image["file_name"], objects[image["id"]]) for image in images]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Target]:
        file, objects = self.items[index]
        image = Image.open(file).convert("RGB")
        boxes = torch.tensor([each["bbox"] for each in objects], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        masks = np.array([_mask(each["segmentation"], image.size) for each in objects], np.uint8)
        masks = masks.reshape(-1, image.height, image.width)
        labels = torch.tensor([self.labels[each["category_id"]] for each in objects], dtype=torch.int64)
        return to_tensor(image), {"boxes": boxes, "labels": labels, "masks": torch.from_numpy(masks)}


def _mask(outlines: list[list[float]], size: tuple[int, int]) -> np.ndarray:
    """(height, width) of 0 and 1, from polygons."""
    canvas = Image.new("L", size)
    for outline in outlines:
        ImageDraw.Draw(canvas).polygon(outline, fill=1)
    return np.array(canvas)


def collate(samples: list[tuple[torch.Tensor, Target]]) -> tuple[list[torch.Tensor], list[Target]]:
    """Images of a batch differ in size: they stay apart."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)
