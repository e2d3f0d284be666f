"""Optimizers in saved models of Keras, as their files describe them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_optimizer(filepath: str | Path) -> Mapping[str, Any]:
    """Return the description of a saved model's optimizer; empty if it has none, or the file is no ``.keras``."""
    try:
        with zipfile.ZipFile(filepath) as file:
            found = json.loads(file.read("config.json"))["compile_config"]["optimizer"]
    except (OSError, zipfile.BadZipFile, KeyError, TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def find_horovods(optimizer: Mapping[str, Any], keras_optimizers: Any) -> dict[str, type]:
    """Return Keras's classes for optimizers that Horovod had wrapped, by the names under which Keras looks for them.

    Keras writes down the module of a class, which is Horovod's; the name is that of the wrapped one.

    Args:
        optimizer: of `read_optimizer`.
        keras_optimizers: Keras's module of them.
    """
    found: dict[str, type] = {}
    inner = optimizer.get("config", {}).get("inner_optimizer")
    if isinstance(inner, dict):
        found |= find_horovods(inner, keras_optimizers)
    name = str(optimizer.get("class_name", ""))
    cls = getattr(keras_optimizers, name, None)
    if isinstance(cls, type) and str(optimizer.get("module", "")).startswith("horovod."):
        found |= {name: cls, str(optimizer.get("registered_name") or name): cls}
    return found
