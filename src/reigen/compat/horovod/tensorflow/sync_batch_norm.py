"""Names of ``horovod.tensorflow.sync_batch_norm``: batch normalisation over the batches of all ranks."""

from reigen.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
