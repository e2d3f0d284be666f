"""There is no front end for MXNet yet."""

raise ImportError("horovod.mxnet: Reigen has no front end for MXNet yet; horovod.torch is there")
