"""Batch normalisation over the batches of all ranks."""

from reigen.torch import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
