"""Placeholder: elastic jobs do not exist yet."""

raise ImportError("horovod.torch.elastic.state: there are no elastic jobs in Reigen yet")
