"""The collectives on torch tensors.

Wherever a tensor is taken, it may be a scalar, empty, non-contiguous, or on a device. CUDA tensors are reduced on the
GPUs where there is an NCCL, and no thread waits for that: results are complete for whatever the calling thread's
current stream does next. On other devices, and without NCCL, tensors are staged through the host.
The element types are uint8, int8, uint16, int16, int32, int64, float16, bfloat16, float32, float64 and bool; another
raises :class:`~reigen.errors.UnsupportedTypeError` (a ValueError). A wrong argument raises
:class:`~reigen.errors.ArgumentError` (a ValueError) on this rank alone. A collective that fails raises
:class:`~reigen.errors.CollectiveError` (also named ``HorovodInternalError``, a RuntimeError) from ``synchronize``.

Collectives match between ranks by ``name``; those without one match in the order in which they are submitted. With a
``process_set`` its ranks take part and no others: "all ranks" below are the ranks of the set. The blocking functions
that return new tensors are differentiable; the asynchronous and the in-place ones are not.
"""

from __future__ import annotations

from collections.abc import Sequence  # noqa: F401 - these are the names in the functions' annotations
from typing import Any

import torch

from reigen.api.collectives import Collectives, Form, Implementation
from reigen.api.compression import as_compressor
from reigen.api.dialects import TORCH
from reigen.api.functions import make_functions
from reigen.api.operations import Collective, as_group
from reigen.api.process_sets import ProcessSet
from reigen.engine.handle import Handle  # noqa: F401
from reigen.torch.adapter import TorchAdapter
from reigen.torch.compression import COMPRESSION_NAMES, Compression, Compressor


class TorchCollectives(Collectives[torch.Tensor]):
    """Collectives on torch tensors; reductions that return new tensors take one more argument, ``compression``."""

    def implementation(self, collective: Collective, grouped: bool, form: Form) -> Implementation:
        """Return the function that runs a collective."""
        run = super().implementation(collective, grouped, form)
        if not collective.reduces or form != Form():
            return run

        def run_compressed(
            value: Any, reduction: Any, name: str | None, process_set: ProcessSet, compression: Compressor
        ) -> Any:
            as_compressor(compression, COMPRESSION_NAMES)
            if not grouped:
                compressed, ctx = compression.compress(value)
                return compression.decompress(run(compressed, reduction, name, process_set), ctx)
            pairs = list(map(compression.compress, as_group(value)))
            results = run([tensor for tensor, _ in pairs], reduction, name, process_set)
            return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]

        return run_compressed


_FUNCTIONS = make_functions(TorchCollectives(TorchAdapter()), TORCH, globals(), compression=Compression.none)
globals().update(_FUNCTIONS)
__all__ = list(_FUNCTIONS)
