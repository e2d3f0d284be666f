"""Placeholder: jobs in Ray do not exist yet."""

raise ImportError("horovod.ray: Reigen has no jobs in Ray yet")
