"""Prints average precision of what is there in generated images, as JSON: all, moved boxes, half of it, nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples" / "torch"


def main(directory: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    import coco_evaluation
    import generated_data
    from coco_data import Coco

    generated_data.write_coco(directory, 1, 8, 64)
    data = Coco(directory, "val2017", whole=True)
    categories = {label: category for category, label in data.labels.items()}
    found = []
    for index, number in enumerate(data.numbers):
        target = data[index][1]
        masks = {"masks": target["masks"][:, None].float(), "scores": torch.ones(len(target["labels"]))}
        found += coco_evaluation.results(target | masks, number, categories)
    moved = [each | {"bbox": [each["bbox"][0] + 64, *each["bbox"][1:]]} for each in found]
    print(
        json.dumps(
            [coco_evaluation.precisions(data, each, ("bbox", "segm")) for each in (found, moved, found[::2], [])]
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
