"""Placeholder: elastic jobs do not exist yet."""

raise ImportError("horovod.torch.elastic.sampler: there are no elastic jobs in Reigen yet")
