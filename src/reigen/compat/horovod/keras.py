"""Placeholder: a front end for Keras does not exist yet."""

raise ImportError("horovod.keras: Reigen has no front end for Keras yet; horovod.torch is there")
