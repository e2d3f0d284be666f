"""Elastic jobs: there are none yet. The use of anything names it."""

from reigen.api.horovod_basics import make_missing_getattr

__all__: list[str] = []

__getattr__ = make_missing_getattr(
    "horovod.tensorflow.keras.elastic",
    "elastic jobs",
    ("CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"),
)
