"""Models that were saved with a DistributedOptimizer, or with a plain optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras

from reigen.errors import ArgumentError
from reigen.keras.compression import Compression
from reigen.keras.distributed_optimizer import DistributedOptimizer


def load_model(
    filepath: str | Path,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a saved model, with its optimizer wrapped in a DistributedOptimizer that has the saved one's state.

    Args:
        filepath: of a model that was saved with or without Reigen, or by Horovod.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: other classes and functions that it does not know, by name.
        compression: see `DistributedOptimizer`.
        legacy_opts: accepted for Horovod's sake, as False: Keras 3 has no legacy optimizers.

    Raises:
        ArgumentError: ``legacy_opts``.
        ValueError: Keras cannot read the file.
    """
    if legacy_opts:
        raise ArgumentError("Keras 3 has no legacy optimizers: legacy_opts must be False")
    known = {each.__name__: each for each in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
