"""Python runs this when it starts: torchvision, which transformers and torchmetrics import, can be imported.

The one of PyPI is built for torch with CUDA. Beside the build for CPUs its operators cannot be loaded, and it cannot be
imported without a declaration of two of them, which is made here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_kept: list[Any] = []


class Declaration:
    """Finds no module, but is asked for torchvision before it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision" and not _kept and (found := PathFinder.find_spec(name)) is not None:
            import torch

            try:
                for each in found.submodule_search_locations or ():
                    torch.ops.load_library(Path(each) / "_C.so")
            except OSError:
                operators = torch.library.Library("torchvision", "DEF")
                for each in ("nms", "qnms"):
                    operators.define(f"{each}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                _kept.append(operators)
        return None


sys.meta_path.insert(0, Declaration())
