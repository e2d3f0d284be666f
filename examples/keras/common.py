"""What the scripts for Keras share: a device for each rank, and a callback that shows progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from progress import Progress


def choose_device(local_rank: int) -> None:
    """Give each rank of a host a GPU of its own, on any backend. To be called before anything is computed."""
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_platforms", "cpu")  # within jax.jit, collectives are for processors
    elif keras.backend.backend() == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
    else:
        import tensorflow as tf

        if gpus := tf.config.list_physical_devices("GPU"):
            tf.config.set_visible_devices(gpus[local_rank % len(gpus)], "GPU")


class Show(keras.callbacks.Callback):
    """Samples per second, the loss and the time that is left, on one rank.

    Args:
        progress: which prints them.
        batch: samples of all ranks in a batch, or in each batch of an epoch.
        loss: the name of what is shown as loss.
    """

    def __init__(self, progress: Progress, batch: int | Sequence[int], loss: str = "loss") -> None:
        super().__init__()
        self._progress, self._batch, self._loss = progress, batch, loss

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        samples = self._batch if isinstance(self._batch, int) else self._batch[batch]
        self._progress.add(samples, (logs or {}).get(self._loss, 0.0))
