"""Python runs this when it starts, where this directory is in PYTHONPATH: torchvision can be imported, and detects.

torchvision of PyPI is built for torch with CUDA. Beside the build for CPUs its library of operators cannot be loaded,
and it cannot be imported unless nms is at least declared. Here that is written in torch; for roi_align torchvision has
its own replacement. Where the operators can be loaded, nothing is changed. transformers and torchmetrics import
torchvision, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_kept: list[Any] = []


def nms(boxes: Any, scores: Any, threshold: float) -> Any:
    """Numbers of boxes in falling order of their scores, without those that overlap a better one by more than that."""
    import torch

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


def define_operators() -> None:
    """Declare those without which torchvision cannot be imported, and write nms."""
    import torch

    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.impl("nms", nms, "CPU")
    _kept.append(operators)


class WithoutOperators(Loader):
    """Imports torchvision by its own loader, and lets it detect without its library."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import functools

        self._loader.exec_module(module)
        module.ops.boxes._assert_has_ops = lambda: None
        # The replacement of roi_align is slow and large where it has to find out how many points a cell needs.
        module.models.detection.roi_heads.roi_align = functools.partial(module.ops.roi_align, sampling_ratio=2)


class Finder:
    """Finds torchvision, and no other module."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torchvision" or (found := PathFinder.find_spec(name)) is None:
            return None
        import torch

        try:
            for each in found.submodule_search_locations or ():
                torch.ops.load_library(Path(each) / "_C.so")
        except OSError:
            if not _kept:
                define_operators()
            assert found.loader is not None
            found.loader = WithoutOperators(found.loader)
        return found


sys.meta_path.insert(0, Finder())
