"""Run a script, `python with_torchvision_operators.py SCRIPT ...`, where torchvision's own operators cannot be loaded.

torchvision of PyPI is built for torch with CUDA. Beside the build for CPUs its library of operators cannot be loaded,
and it cannot be imported unless nms is at least declared. Here that is written in torch; for roi_align torchvision has
its own replacement. Where the operators can be loaded, the script runs with them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import runpy
import sys
from pathlib import Path

import torch


def nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Numbers of boxes in falling order of their scores, without those that overlap a better one by more than that."""
    order = scores.argsort(descending=True, stable=True)
    corners, sides = boxes[order], (boxes[order, 2:] - boxes[order, :2]).clamp(min=0)
    areas = sides.prod(1)
    kept: list[int] = []
    free = torch.ones(len(order), dtype=torch.bool)
    for number in range(len(order)):
        if free[number]:
            kept.append(number)
            low = torch.maximum(corners[:, :2], corners[number, :2])
            common = (torch.minimum(corners[:, 2:], corners[number, 2:]) - low).clamp(min=0).prod(1)
            free &= common <= threshold * (areas + areas[number] - common)
    return order[kept]


def has_operators() -> bool:
    """Whether torchvision's library can be loaded."""
    found = importlib.util.find_spec("torchvision")
    assert found is not None
    assert found.submodule_search_locations is not None
    try:
        for path in found.submodule_search_locations:
            torch.ops.load_library(Path(path) / "_C.so")
    except OSError:
        return False
    return True


def main() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    if not has_operators():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # otherwise the replacement of roi_align is compiled first
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("nms", nms, "CPU")
        import torchvision

        torchvision.ops.boxes._assert_has_ops = lambda: None
        # The replacement of roi_align is slow and large where it has to find out how many points a cell needs.
        roi_heads = torchvision.models.detection.roi_heads
        roi_heads.roi_align = functools.partial(torchvision.ops.roi_align, sampling_ratio=2)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
