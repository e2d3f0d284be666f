"""Placeholder: data loaders do not exist yet."""

raise ImportError("horovod.data: Reigen has no data loaders yet")
