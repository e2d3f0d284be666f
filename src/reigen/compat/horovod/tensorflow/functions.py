"""Names of ``horovod.tensorflow.functions``: broadcasts of variables, collectives on Python objects."""

from reigen.tensorflow import allgather_object, broadcast_object, broadcast_object_fn, broadcast_variables
from reigen.tensorflow.functions import broadcast_global_variables

__all__ = [
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]
