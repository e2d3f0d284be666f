"""Elastic training with ``tf.keras``: that of `reigen.keras.elastic`, or the same for the legacy Keras."""

from typing import Any

from reigen.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, history, leave
from reigen.tensorflow.elastic import run
from reigen.tensorflow.keras.choice import IS_LEGACY

if IS_LEGACY:
    from reigen.tensorflow.keras.legacy_elastic import (
        CommitStateCallback,
        KerasState,
        UpdateBatchStateCallback,
        UpdateEpochStateCallback,
    )
else:
    from reigen.keras.elastic import (  # type: ignore[assignment]  # the same, for another Keras
        CommitStateCallback,
        KerasState,
        UpdateBatchStateCallback,
        UpdateEpochStateCallback,
    )

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "history",
    "leave",
    "run",
]


class TensorFlowKerasState(KerasState):
    """A `KerasState`, under the name and with the arguments that it has in ``hvd.elastic`` of TensorFlow.

    Args:
        model: see `KerasState`.
        optimizer: likewise.
        backend: accepted for Horovod's sake.
        kwargs: see `KerasState`.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: object = None, **kwargs: Any) -> None:
        del backend
        super().__init__(model, optimizer, **kwargs)
