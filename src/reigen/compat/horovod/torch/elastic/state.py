"""Name of a module of Horovod's: Reigen has no elastic jobs yet."""

raise ImportError("horovod.torch.elastic.state: there are no elastic jobs in Reigen yet")
