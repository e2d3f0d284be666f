"""There is no front end for Keras yet."""

raise ImportError("horovod.keras: Reigen has no front end for Keras yet; horovod.torch is there")
