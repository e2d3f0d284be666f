"""Images of ImageNet's layout, train/CLASS/*.JPEG and val/CLASS/*.JPEG, for imagenet_resnet50.py."""

from __future__ import annotations

import argparse
from pathlib import Path

import generated_data
import torch
from torch.utils.data import Dataset
from torchvision import datasets, transforms

NORMALIZE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
Sample = tuple[torch.Tensor, int]


class Seeded(Dataset[Sample]):
    """Images that are cropped and flipped in a way that only epoch and number decide, whichever rank does it."""

    def __init__(self, images: Dataset[Sample], epoch: int) -> None:
        self.images, self.epoch = images, epoch

    def __getitem__(self, index: int) -> Sample:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.epoch * 10_000_000 + index)
            return self.images[index]


class Synthetic(Dataset[Sample]):
    def __init__(self, options: argparse.Namespace) -> None:
        self.count, self.classes = options.num_images, options.classes
        self.image = torch.randn(3, options.image_size, options.image_size)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        return self.image, index % self.classes


def load(options: argparse.Namespace, directory: Path) -> tuple[Dataset[Sample], Dataset[Sample]]:
    """Images to train on, and to test with."""
    if options.synthetic:
        return Synthetic(options), Synthetic(options)
    if options.data is None:
        generated_data.write_imagenet(directory, options.num_images, options.num_images // 4, options.image_size)
    directory = options.data or directory
    if not all(any((directory / part).glob("*/*")) for part in ("train", "val")):
        raise SystemExit(f"{directory}: no train/CLASS/ and val/CLASS/ there")
    size, convert = options.image_size, [transforms.ToTensor(), NORMALIZE]
    change = transforms.Compose([transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), *convert])
    look = transforms.Compose([transforms.Resize(size * 8 // 7), transforms.CenterCrop(size), *convert])
    return datasets.ImageFolder(directory / "train", change), datasets.ImageFolder(directory / "val", look)


def micro_batches(count: int, epoch: int, options: argparse.Namespace) -> list[list[int]]:
    """Numbers of images: --batch / --micro-batch lists for each step. What is left over comes in another epoch."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))[: count - count % options.batch]
    return [part.tolist() for part in order.split(options.micro_batch)]
