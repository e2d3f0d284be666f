"""Names of ``horovod.mxnet.functions``: collectives on Python objects."""

from reigen.mxnet import allgather_object, broadcast_object

__all__ = ["allgather_object", "broadcast_object"]
