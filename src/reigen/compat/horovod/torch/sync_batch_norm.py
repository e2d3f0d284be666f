"""Names of ``horovod.torch.sync_batch_norm``: batch normalisation over the batches of all ranks."""

from reigen.torch import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
