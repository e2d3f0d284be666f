"""Small data sets in the layout of the large ones: CIFAR-10's binaries, ImageNet's folders, COCO, MovieLens.

The examples read files. Where nobody names a directory, they read what is written here: always the same, in a second or
two, and easy enough that a network learns it in seconds, too.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

CLASSES = 10


def draw_pictures(count: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Stripes whose direction and colour say the class: uint8 (count, 3, size, size), labels (count,)."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % CLASSES).astype(np.uint8)
    angle = (np.pi * labels / CLASSES)[:, None, None]
    y, x = np.mgrid[0:size, 0:size] / size
    phase, waves = random.uniform(0, 2 * np.pi, (count, 1, 1)), random.uniform(3, 5, (count, 1, 1))
    stripes = np.sin(2 * np.pi * waves * (x * np.cos(angle) + y * np.sin(angle)) + phase)[:, None]
    hue = 2 * np.pi * (labels[:, None] / CLASSES + np.arange(3) / 3)
    colour = 128 + 50 * np.cos(hue)[:, :, None, None]
    images = colour + 40 * stripes + random.normal(0, 15, (count, 3, size, size))
    return np.clip(images, 0, 255).astype(np.uint8), labels


def write_cifar10(directory: Path, train: int, test: int) -> None:
    """Write two of CIFAR-10's files: records of a label and 32 x 32 pixels of red, green and blue."""
    for name, count, seed in (("data_batch_1.bin", train, 1), ("test_batch.bin", test, 2)):
        images, labels = draw_pictures(count, 32, seed)
        (directory / name).write_bytes(np.hstack([labels[:, None], images.reshape(count, -1)]).tobytes())


def write_imagenet(directory: Path, train: int, val: int, size: int) -> None:
    """Write JPEG files into ``train/CLASS/`` and ``val/CLASS/``."""
    for part, count, seed in (("train", train, 1), ("val", val, 2)):
        for label in range(CLASSES):
            (directory / part / f"n{label:08}").mkdir(parents=True)
        for number, (image, label) in enumerate(zip(*draw_pictures(count, size, seed), strict=True)):
            file = directory / part / f"n{label:08}" / f"{part}_{number:08}.JPEG"
            write_jpeg(file, image.transpose(1, 2, 0))


def write_jpeg(file: Path, image: np.ndarray) -> None:
    """Write uint8 (height, width, 3), with Pillow, or else with TensorFlow."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        import tensorflow as tf

        file.write_bytes(tf.io.encode_jpeg(image, quality=95).numpy())
    else:
        Image.fromarray(image).save(file, quality=95)


def write_coco(directory: Path, train: int, val: int, size: int) -> None:
    """Write images of rectangles and triangles, with boxes and outlines in ``annotations/instances_*.json``."""
    from PIL import Image, ImageDraw

    (directory / "annotations").mkdir(parents=True)
    for part, count, seed in (("train2017", train, 1), ("val2017", val, 2)):
        (directory / part).mkdir()
        random = np.random.default_rng(seed)
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number in range(1, count + 1):
            picture = Image.fromarray(random.integers(0, 60, (size, size, 3), dtype=np.uint8))
            for _ in range(random.integers(1, 3)):
                side = int(random.integers(size // 4, size // 2))
                x, y = (int(value) for value in random.integers(0, size - side, 2))
                category = int(random.choice([1, 3]))  # numbers of categories have gaps in COCO, too
                corners = [(x, y + side), (x + side, y + side)]
                corners += [(x + side // 2, y)] if category == 3 else [(x + side, y), (x, y)]
                ImageDraw.Draw(picture).polygon(corners, fill=(220, 60, 60) if category == 1 else (60, 90, 220))
                outline = [float(value) for corner in corners for value in corner]
                annotation = {"image_id": number, "category_id": category, "iscrowd": 0, "segmentation": [outline]}
                area = side * side / (1 if category == 1 else 2)
                annotations.append(annotation | {"id": len(annotations) + 1, "bbox": [x, y, side, side], "area": area})
            file = f"{number:012}.jpg"
            picture.save(directory / part / file, quality=95)
            images.append({"id": number, "file_name": file, "width": size, "height": size})
        categories = [{"id": 1, "name": "rectangle"}, {"id": 3, "name": "triangle"}]
        document = {"info": {}, "images": images, "annotations": annotations, "categories": categories}
        (directory / "annotations" / f"instances_{part}.json").write_text(json.dumps(document))


def write_movielens(directory: Path, num_users: int, num_movies: int, num_ratings: int) -> None:
    """Write ``ratings.csv``: stars from 0.5 to 5 by users and movies that have a taste of four numbers each."""
    random = np.random.default_rng(1)
    users, movies = random.normal(size=(num_users, 4)), random.normal(size=(num_movies, 4))
    user, movie = random.integers(num_users, size=num_ratings), random.integers(num_movies, size=num_ratings)
    stars = 3 + 0.6 * (users[user] * movies[movie]).sum(1) + random.normal(0, 0.2, num_ratings)
    with (directory / "ratings.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["userId", "movieId", "rating", "timestamp"])
        for row in zip(user + 1, movie + 1, np.clip(np.rint(2 * stars) / 2, 0.5, 5), strict=True):
            writer.writerow([*row, 1_600_000_000])
