"""There are no data loaders of its own yet."""

raise ImportError("horovod.data: Reigen has no data loaders of its own yet")
