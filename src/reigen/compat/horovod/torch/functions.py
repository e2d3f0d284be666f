"""Names of ``horovod.torch.functions``: broadcasts of a model's state, collectives on Python objects."""

from reigen.torch import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
