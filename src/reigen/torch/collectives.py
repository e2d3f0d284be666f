"""The collectives on torch tensors: those of every framework, and reductions that travel in a smaller type."""

from __future__ import annotations

from typing import Any

import torch

from reigen.api.collectives import Collectives, Form, Implementation
from reigen.api.compression import as_compressor
from reigen.api.operations import Collective, as_group
from reigen.api.process_sets import ProcessSet
from reigen.torch.adapter import TorchAdapter
from reigen.torch.compression import COMPRESSION_NAMES, Compressor


class TorchCollectives(Collectives[torch.Tensor]):
    """Reductions that give new tensors have an argument more, ``compression``."""

    def implementation(self, collective: Collective, grouped: bool, form: Form) -> Implementation:
        """Return the function that runs a collective."""
        run = super().implementation(collective, grouped, form)
        if not collective.reduces or form != Form():
            return run

        def run_compressed(
            value: Any, how: Any, name: str | None, process_set: ProcessSet, compression: Compressor
        ) -> Any:
            as_compressor(compression, COMPRESSION_NAMES)
            if not grouped:
                compressed, ctx = compression.compress(value)
                return compression.decompress(run(compressed, how, name, process_set), ctx)
            pairs = list(map(compression.compress, as_group(value)))
            results = run([tensor for tensor, _ in pairs], how, name, process_set)
            return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]

        return run_compressed


COLLECTIVES = TorchCollectives(TorchAdapter())
