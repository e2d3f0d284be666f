"""Slices of a batch: for several devices of one process, or to accumulate gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from reigen.errors import ArgumentError, UnsupportedTypeError


def split_data(data: Any, num_slice: int, batch_axis: int = 0, even_split: bool = True) -> list[Any]:
    """Cut a batch into ``num_slice`` views, along ``batch_axis``.

    Args:
        data: anything with a ``shape`` that can be sliced (NumPy, torch, ...); otherwise it is made a NumPy array.
        num_slice: the number of slices.
        batch_axis: the dimension that is cut.
        even_split: False: where the batch cannot be divided equally, the first slices get one sample more.

    Raises:
        ArgumentError: (a ValueError) no such axis; fewer samples than slices; not divisible, with ``even_split``.

    Example:
        >>> [len(part) for part in split_data(np.arange(5), 2, even_split=False)]
        [3, 2]
    """
    if not hasattr(data, "shape"):
        data = np.asarray(data)
    shape = tuple(data.shape)
    if num_slice < 1:
        raise ArgumentError(f"num_slice must be at least 1, got {num_slice}")
    if not -len(shape) <= batch_axis < len(shape):
        raise ArgumentError(f"data of shape {shape} has no axis {batch_axis}")
    axis = batch_axis % len(shape)
    size = shape[axis]
    if size < num_slice:
        raise ArgumentError(f"{size} samples (shape {shape}, axis {axis}) are too few for {num_slice} slices")
    each, extra = divmod(size, num_slice)
    if even_split and extra:
        raise ArgumentError(
            f"data of shape {shape} cannot be cut evenly into {num_slice} slices along axis {axis}; use a batch size "
            f"that is a multiple of {num_slice}, or even_split=False"
        )
    starts = [index * each + min(index, extra) for index in range(num_slice + 1)]
    before = (slice(None),) * axis
    return [data[(*before, slice(start, stop))] for start, stop in pairwise(starts)]


def split_and_load(data: Any, devices: Sequence[Any], batch_axis: int = 0, even_split: bool = True) -> list[Any]:
    """Do :func:`split_data`, and move slice i to ``devices[i]`` by its own ``to()``.

    Without a ``to()`` (NumPy arrays) it can be on the device ``"cpu"`` alone. The other arguments are `split_data`'s.

    Raises:
        ArgumentError: as in :func:`split_data`.
        UnsupportedTypeError: the data cannot be moved to the device.
    """
    slices = split_data(data, len(devices), batch_axis, even_split)
    return [_load(part, device) for part, device in zip(slices, devices, strict=True)]


def _load(part: Any, device: Any) -> Any:
    # NumPy's arrays have a to_device() of their own, and since 2.0 a device: but never a to().
    if hasattr(part, "to"):
        return part.to(device)
    if str(device) != "cpu":
        raise UnsupportedTypeError(
            f"{type(part).__name__} cannot be moved to {device}; give a tensor of your framework"
        )
    return part
